//! What was measured: figures, what stands beside them, and the medians of the rounds.

use std::fmt::{self, Display, Formatter};

use serde::Serialize;

/// A figure of ours, and what it is compared with.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    pub(crate) what: String,
    pub(crate) unit: &'static str,
    pub(crate) ours: f64,
    pub(crate) beside: Vec<Beside>,
}

/// Something measured in the same round.
#[derive(Debug, Clone)]
pub(crate) struct Beside {
    pub(crate) what: &'static str,
    pub(crate) figure: f64,
    /// For ours divided by this.
    pub(crate) goal: Goal,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Goal {
    AtLeast(f64),
    AtMost(f64),
    None,
}

impl Line {
    pub(crate) fn new(what: impl Into<String>, unit: &'static str, ours: f64) -> Self {
        Self { what: what.into(), unit, ours, beside: Vec::new() }
    }

    pub(crate) fn beside(mut self, what: &'static str, figure: f64, goal: Goal) -> Self {
        self.beside.push(Beside { what, figure, goal });
        self
    }
}

impl Display for Line {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { what, unit, ours, beside } = self;
        write!(f, "{what}: {} {unit}", Short(*ours))?;
        for Beside { what, figure, .. } in beside {
            write!(f, "; {what} {} ({:.2} x)", Short(*figure), ours / figure)?;
        }
        Ok(())
    }
}

/// All rounds.
#[derive(Default)]
pub(crate) struct Table {
    rounds: Vec<Line>,
}

/// Medians over the rounds.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Row {
    what: String,
    unit: &'static str,
    ours: f64,
    beside: Option<&'static str>,
    theirs: Option<f64>,
    /// The median of the ratios, not the ratio of the medians.
    ratio: Option<f64>,
    goal: Option<String>,
    reached: Option<bool>,
}

impl Table {
    pub(crate) fn add(&mut self, lines: Vec<Line>) {
        self.rounds.extend(lines);
    }

    /// One for each figure and what stands beside it.
    pub(crate) fn rows(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        for (place, first) in self.rounds.iter().enumerate() {
            if self.rounds[..place].iter().any(|line| line.what == first.what) {
                continue;
            }
            let rounds: Vec<&Line> =
                self.rounds.iter().filter(|line| line.what == first.what).collect();
            let row = |ours: f64| Row {
                what: first.what.clone(),
                unit: first.unit,
                ours,
                beside: None,
                theirs: None,
                ratio: None,
                goal: None,
                reached: None,
            };
            let ours = median(rounds.iter().map(|line| line.ours));
            if first.beside.is_empty() {
                rows.push(row(ours));
            }
            for (column, Beside { what, goal, .. }) in first.beside.iter().enumerate() {
                let theirs = |line: &Line| line.beside[column].figure;
                let ratio = median(rounds.iter().map(|line| line.ours / theirs(line)));
                let (goal, reached) = match goal {
                    Goal::AtLeast(bound) => (Some(format!(">= {bound}")), Some(ratio >= *bound)),
                    Goal::AtMost(bound) => (
                        Some(format!("<= {}", (bound * 100.0).round() / 100.0)),
                        Some(ratio <= *bound),
                    ),
                    Goal::None => (None, None),
                };
                rows.push(Row {
                    beside: Some(what),
                    theirs: Some(median(rounds.iter().map(|line| theirs(line)))),
                    ratio: Some(ratio),
                    goal,
                    reached,
                    ..row(ours)
                });
            }
        }
        rows
    }
}

impl Display for Table {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "| what | ours | beside it | its figure | ratio | goal |")?;
        writeln!(f, "|---|---|---|---|---|---|")?;
        for row in self.rows() {
            let Row { what, unit, ours, beside, theirs, ratio, goal, reached } = row;
            let figure = |value: Option<f64>| value.map(|v| Short(v).to_string());
            let goal = match (goal, reached) {
                (Some(goal), Some(true)) => goal,
                (Some(goal), _) => format!("{goal}: missed"),
                (None, _) => String::new(),
            };
            writeln!(
                f,
                "| {what} | {} {unit} | {} | {} | {} | {goal} |",
                Short(ours),
                beside.unwrap_or_default(),
                figure(theirs).unwrap_or_default(),
                ratio.map(|ratio| format!("{ratio:.2}")).unwrap_or_default(),
            )?;
        }
        Ok(())
    }
}

/// A figure with three digits that mean something.
struct Short(f64);

impl Display for Short {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.0 {
            value if value >= 10_000.0 => write!(f, "{:.1}k", value / 1000.0),
            value if value >= 100.0 => write!(f, "{value:.0}"),
            value if value >= 1.0 => write!(f, "{value:.2}"),
            value => write!(f, "{value:.4}"),
        }
    }
}

/// Of an even number of values, the lower of the two in the middle.
pub(crate) fn median(values: impl Iterator<Item = f64>) -> f64 {
    percentile(values.collect(), 0.5)
}

/// `share` of the values are not above it.
pub(crate) fn percentile(mut values: Vec<f64>, share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let place = ((values.len() as f64 * share).ceil() as usize).clamp(1, values.len().max(1)) - 1;
    values.get(place).copied().unwrap_or(f64::NAN)
}
