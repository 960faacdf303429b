//! A TCP proxy that can hold back one direction, or refuse: the fault that makes "published, but
//! the acknowledgement never came" happen on purpose.

use std::{net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

/// What passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// Everything.
    Open,
    /// What the client sends reaches the server; the answers wait.
    HoldReplies,
    /// What the server sends reaches the client; the client's words wait.
    HoldRequests,
    /// Everything, until the client publishes; from then on as `HoldReplies`. So the client can
    /// connect first, and the very first acknowledgement is held already.
    HoldAcks,
    /// Everything, each answer some milliseconds late.
    Slow,
    /// Nothing, and nobody is told: connections stay open.
    BlackHole,
    /// The client's side is closed towards the server; what the server still says passes.
    HalfClosed,
    /// Nothing: connections are closed, and new ones at once.
    Cut,
}

/// How a publish with headers begins, on a line of its own. The services publish no other way.
const PUBLISH: &[u8] = b"HPUB orders.";

/// How late an answer is in `Flow::Slow`.
const LATE: Duration = Duration::from_millis(2);

/// Stands between a client and a server. Dropping it closes all connections.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    flow: watch::Sender<Flow>,
    _accepting: AbortOnDropHandle<()>,
}

impl Proxy {
    pub async fn start(server: SocketAddr) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let flow = watch::Sender::new(Flow::Open);
        let tasks = TaskTracker::new();
        let accepting = tasks.spawn({
            let (tasks, changes) = (tasks.clone(), flow.clone());
            async move {
                while let Ok((client, _)) = listener.accept().await {
                    if *changes.borrow() == Flow::Cut {
                        continue;
                    }
                    let Ok(server) = TcpStream::connect(server).await else { continue };
                    let (flow, mut cut) = (changes.clone(), changes.subscribe());
                    tasks.spawn(async move {
                        let (from_client, to_client) = client.into_split();
                        let (from_server, to_server) = server.into_split();
                        tokio::select! {
                            () = requests(from_client, to_server, flow.clone()) => {}
                            () = replies(from_server, to_client, flow.subscribe()) => {}
                            _ = cut.wait_for(|flow| *flow == Flow::Cut) => {}
                        }
                    });
                }
            }
        });
        Ok(Self { address, flow, _accepting: AbortOnDropHandle::new(accepting) })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn set(&self, flow: Flow) {
        self.flow.send_replace(flow);
    }
}

async fn requests(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, flow: watch::Sender<Flow>) {
    let mut changes = flow.subscribe();
    let mut closing = flow.subscribe();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let half_closed =
            async { closing.wait_for(|flow| *flow == Flow::HalfClosed).await.is_ok() };
        let read = tokio::select! {
            read = from.read(&mut buffer) => Some(read),
            _ = half_closed => None,
        };
        let Some(read) = read else {
            // Until the server ends it, if it was there to be told.
            if to.shutdown().await.is_ok() {
                std::future::pending::<()>().await;
            }
            return;
        };
        let Ok(length @ 1..) = read else { return };
        let words = &buffer[..length];
        if words.windows(PUBLISH.len()).any(|part| part == PUBLISH) {
            flow.send_if_modified(|flow| {
                let holds = *flow == Flow::HoldAcks;
                if holds {
                    *flow = Flow::HoldReplies;
                }
                holds
            });
        }
        let passes = |flow: &Flow| !matches!(flow, Flow::HoldRequests | Flow::BlackHole);
        let may_pass = changes.wait_for(passes).await.is_ok();
        if !may_pass || to.write_all(words).await.is_err() {
            return;
        }
    }
}

async fn replies(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut flow: watch::Receiver<Flow>) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(length @ 1..) = from.read(&mut buffer).await {
        let passes = |flow: &Flow| !matches!(flow, Flow::HoldReplies | Flow::BlackHole);
        let may_pass = match flow.wait_for(passes).await.map(|flow| *flow) {
            Ok(Flow::Slow) => {
                tokio::time::sleep(LATE).await;
                true
            }
            passed => passed.is_ok(),
        };
        if !may_pass || to.write_all(&buffer[..length]).await.is_err() {
            return;
        }
    }
}
