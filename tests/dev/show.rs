//! Output for people: one line per thing that happened, and a bar while something takes its time.

use std::{
    fmt::Display,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};

/// Prints a timeline. On a terminal, work in progress has a bar; in a pipe, only lines are printed.
pub(crate) struct Timeline {
    start: Instant,
    /// Standard output belongs to a machine.
    aside: bool,
}

impl Timeline {
    pub(crate) fn new() -> Self {
        Self::aside(false)
    }

    /// On standard error, if `aside`.
    pub(crate) fn aside(aside: bool) -> Self {
        Self { start: Instant::now(), aside }
    }

    /// Since the beginning.
    pub(crate) fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Something that happened, and who saw it.
    pub(crate) fn line(&self, who: &str, what: impl Display) {
        let line = format!("{:>6.2}s  {who:<12}  {what}", self.start.elapsed().as_secs_f64());
        if self.aside { eprintln!("{line}") } else { println!("{line}") }
    }

    /// A heading.
    pub(crate) fn chapter(&self, title: impl Display) {
        println!("\n{title}");
    }

    /// A bar over `total` steps, which vanishes when it is dropped. Invisible in a pipe.
    pub(crate) fn bar(&self, what: &str, total: usize) -> ProgressBar {
        let style = ProgressStyle::with_template("         {msg} {wide_bar} {pos}/{len}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::new(total as u64).with_style(style).with_message(what.to_owned());
        bar.with_finish(indicatif::ProgressFinish::AndClear)
    }

    /// A spinner for work without steps.
    pub(crate) fn wait(&self, what: &str) -> ProgressBar {
        let bar = ProgressBar::new_spinner().with_message(what.to_owned());
        bar.enable_steady_tick(Duration::from_millis(100));
        bar.with_finish(indicatif::ProgressFinish::AndClear)
    }
}
