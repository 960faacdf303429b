//! From start to exit code: workers, signals, a drain with a limit, and what readiness asks.
//!
//! Guarantees: the first signal lets everything in hand be finished, a second one or the limit ends
//! the process at once; a worker that fails takes the process down with a code that is not 0, so
//! that whoever supervises it sees it. Work handed to [`Lifecycle::detached`] is finished whatever
//! happens to its caller.

use std::{
    process::ExitCode,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use tokio::{
    signal::unix::{SignalKind, signal},
    time::timeout,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{error, info};

use crate::{
    config::Common,
    telemetry::{self, Causes},
};

/// What a `main` does: logs, runs the service, and turns how it went into an exit code.
pub async fn main(
    config: &Common,
    service: impl Future<Output = anyhow::Result<ExitCode>>,
) -> ExitCode {
    if let Err(error) = telemetry::init(&config.rust_log, config.log_format) {
        eprintln!("error: {error:#}");
        return ExitCode::from(2);
    }
    service.await.unwrap_or_else(|error| {
        error!("{}", Causes(&error));
        ExitCode::FAILURE
    })
}

/// Everything that runs in this process, and the order to stop. Cheap to clone.
#[derive(Clone, Default)]
pub struct Lifecycle {
    stop: CancellationToken,
    tasks: TaskTracker,
    failed: Arc<OnceLock<&'static str>>,
}

impl Lifecycle {
    /// A lifecycle nobody has told to stop.
    pub fn new() -> Self {
        Self::default()
    }

    /// Cancelled when it is time to stop.
    pub fn stop(&self) -> CancellationToken {
        self.stop.clone()
    }

    /// Runs a worker until it ends. One that ends with an error, or panics, stops the process.
    #[expect(clippy::disallowed_methods, reason = "this is the tracker")]
    pub fn worker(
        &self,
        name: &'static str,
        work: impl Future<Output = anyhow::Result<()>> + Send + 'static,
    ) {
        let lifecycle = self.clone();
        self.tasks.spawn(async move {
            let failed = match tokio::spawn(work).await {
                Ok(Ok(())) => return,
                Ok(Err(error)) => Causes(&error).to_string(),
                Err(panicked) => panicked.to_string(),
            };
            error!("{name} failed, stopping: {failed}");
            // Only the first failure matters; those it causes come later.
            lifecycle.failed.get_or_init(|| name);
            lifecycle.stop.cancel();
        });
    }

    /// Runs `work` to its end even if the caller is dropped half way, as a request handler is when
    /// its client hangs up. A transaction is finished or rolled back, never left.
    pub async fn detached<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> T {
        match self.tasks.spawn(work).await {
            Ok(done) => done,
            Err(panicked) => std::panic::resume_unwind(panicked.into_panic()),
        }
    }

    /// Waits for a signal or a failed worker, then until all tasks are done and `close` after them,
    /// at most `grace`.
    pub async fn run(&self, grace: Duration, close: impl Future<Output = ()>) -> ExitCode {
        let mut interrupt = signal(SignalKind::interrupt()).expect("signals can be listened to");
        let mut terminate = signal(SignalKind::terminate()).expect("signals can be listened to");
        let mut signalled = async || {
            tokio::select! {
                _ = interrupt.recv() => "SIGINT",
                _ = terminate.recv() => "SIGTERM",
            }
        };
        tokio::select! {
            () = self.stop.cancelled() => {}
            name = signalled() => info!("{name}: draining, at most {grace:?}; once more to abort"),
        }
        self.stop.cancel();
        self.tasks.close();
        let drain = async {
            self.tasks.wait().await;
            close.await;
        };
        let drained = tokio::select! {
            drained = timeout(grace, drain) => drained.is_ok(),
            name = signalled() => { error!("{name}: aborted"); false }
        };
        if !drained {
            error!("not everything was done; {} tasks are cut off", self.tasks.len());
        }
        if drained && self.failed.get().is_none() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

/// After this much silence a worker counts as hung. Longer than any query may take.
const SILENCE: Duration = Duration::from_secs(60);

/// What a worker says of itself, for readiness to read. Cheap to clone.
#[derive(Clone)]
pub struct Health(Arc<Mutex<(Instant, Result<(), String>)>>);

impl Default for Health {
    fn default() -> Self {
        Self(Arc::new(Mutex::new((Instant::now(), Err("starting".to_owned())))))
    }
}

impl Health {
    /// The worker works. To be repeated: silence is not health.
    pub fn ok(&self) {
        self.set(Ok(()));
    }

    /// The worker cannot do its work, and why.
    pub fn failing(&self, reason: String) {
        self.set(Err(reason));
    }

    fn set(&self, state: Result<(), String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = (Instant::now(), state);
    }

    /// What readiness reports.
    ///
    /// # Errors
    /// When the worker said so, or has said nothing for a minute.
    pub fn check(&self) -> anyhow::Result<()> {
        let (at, state) = &*self.0.lock().unwrap_or_else(PoisonError::into_inner);
        anyhow::ensure!(at.elapsed() < SILENCE, "no sign of life for {:.0?}", at.elapsed());
        state.clone().map_err(anyhow::Error::msg)
    }
}
