//! `POST /payments` beside pgbench, which runs the same statements.

use std::{
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use e2e::{
    api::confirmation,
    find::find_postgres,
    services::Kind,
    stage::{ALWAYS, Stage, events},
};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use http_body_util::{BodyExt as _, Full};
use hyper::{Request, body::Bytes, client::conn::http1::SendRequest, header};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpStream, time::Instant};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use super::{
    Scale,
    table::{Goal, Line, percentile},
};
use crate::{demo::AMOUNT, show::Timeline};

const CLIENTS: [usize; 3] = [1, 16, 64];
const WARM_UP: Duration = Duration::from_secs(2);

pub(super) async fn measure(scale: Scale, show: &Timeline) -> anyhow::Result<Vec<Line>> {
    let stage = Stage::start(ALWAYS).await?;
    let service = stage.service(Kind::Orders).await?;
    Load::place(&stage, "before", 100_000).await?.closed(service.plan.port, 16, WARM_UP).await?;
    stage.drained().await?;
    stage.settle().await?;
    // What is confirmed waits in the outbox, as it does at every replica but one.
    stage.hold_relay().await?;
    let mut lines = Vec::new();
    for clients in CLIENTS {
        let _bar = show.wait("confirm");
        let length = Duration::from_secs(scale.seconds);
        let load = Load::place(&stage, &format!("http-{clients}"), 10_000 * scale.seconds).await?;
        let ours = load.closed(service.plan.port, clients, length).await?;
        let theirs = pgbench(&stage, clients, scale.seconds).await?;
        let goal = if clients == 16 { Goal::AtLeast(0.6) } else { Goal::None };
        let even = if clients == 64 { Goal::AtMost(4.0) } else { Goal::None };
        let rate = ours.len() as f64 / length.as_secs_f64();
        let [half, most] = [0.5, 0.99].map(|share| percentile(ours.clone(), share));
        lines.push(
            Line::new(format!("confirm, {clients} connections"), "requests/s", rate).beside(
                "pgbench, the same statements",
                theirs,
                goal,
            ),
        );
        lines.push(
            Line::new(format!("confirm, {clients} connections, p99"), "ms", most)
                .beside("its p50", half, even),
        );
    }
    drop(service);
    stage.world.close().await?;
    Ok(lines)
}

/// Orders that wait for their payments.
pub(super) struct Load {
    prefix: String,
    next: AtomicUsize,
    count: usize,
}

impl Load {
    pub(super) async fn place(stage: &Stage, prefix: &str, count: u64) -> anyhow::Result<Self> {
        place(stage, prefix, count).await?;
        sqlx::query("vacuum analyze orders").execute(&stage.world.orders).await?;
        Ok(Self { prefix: prefix.to_owned(), next: AtomicUsize::new(0), count: count.try_into()? })
    }

    /// What the ids of its orders begin with.
    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// So many clients, each of which asks again when it was answered. Returns the times in ms.
    pub(super) async fn closed(
        &self,
        port: u16,
        clients: usize,
        length: Duration,
    ) -> anyhow::Result<Vec<f64>> {
        let until = Instant::now() + length;
        let client = async || {
            let mut client = Client::connect(port).await?;
            let mut times = Vec::new();
            while Instant::now() < until {
                let order = self.next.fetch_add(1, Relaxed);
                ensure!(order < self.count, "more orders are needed than {}", self.count);
                times.push(client.confirm(&format!("{}-{order}", self.prefix)).await?);
            }
            anyhow::Ok(times)
        };
        let clients = stream::iter(0..clients).map(|_| client()).buffer_unordered(clients);
        clients.try_concat().await
    }

    /// So many requests a second, whether the last ones are answered or not. Returns the times in ms.
    pub(super) async fn open(
        &self,
        ports: &[u16],
        per_second: u64,
        length: Duration,
    ) -> anyhow::Result<Vec<f64>> {
        const CLIENTS: usize = 32;
        let total = usize::try_from(per_second * length.as_secs())?;
        let begun = Instant::now();
        let client = async |number: usize| {
            let mut client = Client::connect(ports[number % ports.len()]).await?;
            let mut times = Vec::new();
            for place in (number..total).step_by(CLIENTS) {
                let due = begun + length * u32::try_from(place)? / u32::try_from(total)?;
                tokio::time::sleep_until(due).await;
                let order = self.next.fetch_add(1, Relaxed);
                times.push(client.confirm(&format!("{}-{order}", self.prefix)).await?);
            }
            anyhow::Ok(times)
        };
        let clients = stream::iter(0..CLIENTS).map(client).buffer_unordered(CLIENTS);
        clients.try_concat().await
    }
}

/// A connection, and nothing between it and its caller: what is measured shares the machine with us.
struct Client {
    sender: SendRequest<Full<Bytes>>,
    _connection: AbortOnDropHandle<()>,
}

impl Client {
    async fn connect(port: u16) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port)).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let connection = TaskTracker::new().spawn(async { drop(connection.await) });
        Ok(Self { sender, _connection: AbortOnDropHandle::new(connection) })
    }

    /// Returns how many milliseconds it took.
    async fn confirm(&mut self, order: &str) -> anyhow::Result<f64> {
        let body = confirmation(&format!("tx-{order}"), order, AMOUNT).to_string();
        let request = Request::post("/payments")
            .header(header::HOST, "127.0.0.1")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::from(body))?;
        self.sender.ready().await?;
        let asked = Instant::now();
        let answer = self.sender.send_request(request).await?;
        let status = answer.status();
        let body = answer.into_body().collect().await?.to_bytes();
        ensure!(status == 201, "{status}: {}", String::from_utf8_lossy(&body));
        Ok(asked.elapsed().as_secs_f64() * 1000.0)
    }
}

/// The statements of `payments::confirm`. ORDER is of the client's own, PAYLOAD an event.
const SCRIPT: &str = r"\set n :n + 1
begin;
select order_id, customer_id, amount_minor, currency from orders where order_id = ORDER for no key update;
insert into payments (transaction_id, order_id, amount_minor, currency, event_id)
    values ('tx-' || ORDER, ORDER, 1999, 'EUR', gen_random_uuid())
    on conflict do nothing
    returning transaction_id, order_id, event_id, confirmed_at;
update orders set status = 'paid', paid_at = now() where order_id = ORDER and status = 'pending';
insert into outbox (event_id, aggregate_id, subject, payload, traceparent)
    values (gen_random_uuid(), ORDER, 'orders.payment.confirmed', 'PAYLOAD',
            '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01');
commit;
";

/// Transactions per second of so many clients.
async fn pgbench(stage: &Stage, clients: usize, seconds: u64) -> anyhow::Result<f64> {
    let prefix = format!("pgbench-{clients}-");
    let each = 20_000 * seconds / clients as u64;
    for client in 0..clients {
        place(stage, &format!("{prefix}{client}"), each).await?;
    }
    sqlx::query("vacuum analyze orders").execute(&stage.world.orders).await?;
    let [event] = &events("pgbench", 1)[..] else { unreachable!("one was asked for") };
    let script = SCRIPT
        .replace("ORDER", &format!("('{prefix}' || :client_id || '-' || :n)"))
        .replace("PAYLOAD", &event.body);
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), script)?;
    let output = tokio::process::Command::new(find_postgres()?.path.join("pgbench"))
        .args(["--no-vacuum", "--protocol=prepared", "--define=n=0"])
        .arg(format!("--client={clients}"))
        .arg(format!("--jobs={}", clients.min(2)))
        .arg(format!("--time={seconds}"))
        .arg("--file")
        .arg(file.path())
        .arg(stage.world.postgres().url_as("orders", "orders"))
        .output()
        .await
        .context("cannot run pgbench")?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "pgbench: {}", String::from_utf8_lossy(&output.stderr));
    let tps = said.lines().find_map(|line| line.strip_prefix("tps = "));
    let tps = tps.and_then(|rest| rest.split_whitespace().next());
    Ok(tps.with_context(|| format!("no rate in: {said}"))?.parse()?)
}

async fn place(stage: &Stage, prefix: &str, count: u64) -> anyhow::Result<()> {
    sqlx::query(
        "insert into orders (order_id, customer_id, amount_minor, currency)
         select $1 || '-' || n, 'C-1', $2, 'EUR' from generate_series(0, $3) as n",
    )
    .bind(prefix)
    .bind(AMOUNT)
    .bind(i64::try_from(count)?)
    .execute(&stage.world.orders)
    .await?;
    Ok(())
}
