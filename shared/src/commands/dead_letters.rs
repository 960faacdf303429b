//! `dead-letters list | show | replay | discard`.
//!
//! A replay hands the message to the service's own handler, with its inbox and keys: what was applied
//! meanwhile is recognised, and nothing goes to the stream, where other consumers would get it too.
//! What fails again stays, with the new error. All of it may be repeated.

use std::process::ExitCode;

use anyhow::{Context as _, ensure};
use base64::prelude::{BASE64_STANDARD, Engine as _};
use clap::Subcommand;
use futures_util::TryStreamExt as _;
use serde::Serialize;
use serde_json::json;
use sqlx::{PgConnection, PgPool};
use tokio::pin;
use uuid::Uuid;

use super::{Format, Table, conclude, operator, printable};
use crate::{
    database,
    dead_letters::{
        Reason,
        settle::{self, Kept},
    },
    events,
    handler::{self, Delivery, Handler, Verdict},
    telemetry::Causes,
};

/// Operator tools over this service's dead letters.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Lists those that wait for a person, oldest first
    List {
        /// Also those that are settled
        #[arg(long)]
        all: bool,
        /// Only those of one reason
        #[arg(long)]
        reason: Option<Reason>,
        /// How it is printed.
        #[command(flatten)]
        format: Format,
    },
    /// Shows one, with its headers and its body
    Show {
        /// Its deadLetterId
        id: Uuid,
        /// How it is printed.
        #[command(flatten)]
        format: Format,
    },
    /// Hands them to the service's own handler again. Exit code 1 if one of them stays
    Replay {
        /// Their deadLetterIds
        #[arg(required_unless_present = "all", conflicts_with = "all")]
        ids: Vec<Uuid>,
        /// All that wait for a person
        #[arg(long)]
        all: bool,
        /// Only those of one reason
        #[arg(long, requires = "all")]
        reason: Option<Reason>,
        /// Says which can be read, and applies nothing
        #[arg(long)]
        dry_run: bool,
        /// How it is printed.
        #[command(flatten)]
        format: Format,
    },
    /// Settles one without applying it
    Discard {
        /// Its deadLetterId
        id: Uuid,
        /// Why, for whoever looks later
        #[arg(long)]
        why: String,
    },
}

/// What a replay came to.
#[derive(Debug)]
pub enum Replayed {
    /// It is settled, and how.
    Settled(String),
    /// It is not, and why.
    Failed {
        /// The new reason, if it is another one.
        reason: Option<Reason>,
        /// The new error.
        error: String,
    },
    /// A dry run: it can be read.
    Readable,
}

impl Replayed {
    /// One that nobody here can try.
    pub fn unknown(letter: &Kept) -> Self {
        let error = format!("this service has no consumer {}", letter.origin.consumer);
        Self::Failed { reason: None, error }
    }
}

/// A line of what `replay` prints.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Line<'a> {
    dead_letter_id: Uuid,
    outcome: &'a str,
    detail: &'a str,
}

/// Runs one. `replay` hands a letter to the handler of its consumer; told that it is a dry run, it only
/// reads it.
///
/// # Errors
/// When the database is away, or refuses, or there is no such letter.
pub async fn run(
    command: Command,
    pool: &PgPool,
    replay: impl AsyncFn(&Kept, bool) -> anyhow::Result<Replayed>,
) -> anyhow::Result<ExitCode> {
    match command {
        Command::List { all, reason, format } => {
            let columns = &[
                ("deadLetterId", 36),
                ("createdAt", 27),
                ("consumer", 13),
                ("reason", 20),
                ("streamSeq", 9),
                ("bodyBytes", 9),
                ("replays", 7),
                ("resolution", 10),
                ("error", 0),
            ];
            let table = Table::new(format, columns)?;
            let letters = settle::list(pool, all, reason);
            pin!(letters);
            while let Some(letter) = letters.try_next().await? {
                table.row(&letter)?;
            }
        }
        Command::Show { id, format } => show(&find(pool, id).await?, format),
        Command::Replay { ids, all, reason, dry_run, format } => {
            let ids = if all {
                let letters = settle::list(pool, false, reason);
                letters.map_ok(|letter| letter.dead_letter_id).try_collect().await?
            } else {
                ids
            };
            let table = Table::new(format, &[("deadLetterId", 36), ("outcome", 8), ("detail", 0)])?;
            let mut stay = 0;
            for id in &ids {
                let (outcome, detail) = replay_one(pool, *id, dry_run, &replay).await?;
                stay += usize::from(outcome == STAYS);
                table.row(&Line { dead_letter_id: *id, outcome, detail: &detail })?;
            }
            conclude(&format!("{} dead letters, {stay} of them stay", ids.len()));
            if stay > 0 {
                return Ok(ExitCode::FAILURE);
            }
        }
        Command::Discard { id, why } => {
            ensure!(!why.trim().is_empty(), "--why is empty; say why it need not be applied");
            let letter = find(pool, id).await?;
            let how = format!("discarded: {why}");
            let mut connection = pool.acquire().await?;
            if !settle::resolve(&mut connection, id, &how, &operator()).await? {
                ensure!(
                    letter.resolution.as_ref() == Some(&how),
                    "it is settled already: {}",
                    letter.resolution.unwrap_or_default()
                );
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The outcome that needs a person.
const STAYS: &str = "stays";

async fn find(pool: &PgPool, id: Uuid) -> anyhow::Result<Kept> {
    settle::get(pool, id).await?.with_context(|| format!("there is no dead letter {id}"))
}

async fn replay_one(
    pool: &PgPool,
    id: Uuid,
    dry_run: bool,
    replay: &impl AsyncFn(&Kept, bool) -> anyhow::Result<Replayed>,
) -> anyhow::Result<(&'static str, String)> {
    let letter = find(pool, id).await?;
    if let Some(resolution) = letter.resolution {
        return Ok(("settled", format!("before: {resolution}")));
    }
    Ok(match replay(&letter, dry_run).await? {
        Replayed::Readable => ("readable", "it would be handed to the handler".to_owned()),
        Replayed::Settled(how) => {
            // Crash point 7, after the effect and before the note: replayed again, it is a duplicate.
            resolve_replayed(&mut *pool.acquire().await?, id, &how).await?;
            ("settled", how)
        }
        Replayed::Failed { reason, error } => {
            if !dry_run {
                settle::note_replay(pool, id, reason, &error).await?;
            }
            (STAYS, error)
        }
    })
}

/// Settles a letter that was replayed, and says how. For a replay that does it in a transaction of its own:
/// to be settled again changes nothing.
///
/// # Errors
/// When the database refuses.
pub async fn resolve_replayed(tx: &mut PgConnection, id: Uuid, how: &str) -> sqlx::Result<bool> {
    settle::resolve(tx, id, &format!("replayed: {how}"), &operator()).await
}

/// Hands a letter to `handler`, as the consumer does with a delivery.
///
/// # Errors
/// When something that the handler needs is away: the letter is as it was.
pub async fn replay<H: Handler>(
    handler: &H,
    letter: &Kept,
    dry_run: bool,
) -> anyhow::Result<Replayed> {
    let origin = letter.origin.clone();
    let event = match events::decode(&origin.message.payload, H::EVENT_TYPE) {
        Ok(event) => event,
        Err(error) => {
            let reason = Some(Reason::from(&error));
            return Ok(Replayed::Failed { reason, error: Causes(&error.into()).to_string() });
        }
    };
    if dry_run {
        return Ok(Replayed::Readable);
    }
    let verdict = match handler::guarded(handler, &[Delivery { event, origin }]).await {
        Ok(mut verdicts) => verdicts.pop().context("the handler gave no verdict")?,
        Err(error) if database::is_outage(&error) || handler.is_outage(&error) => {
            return Err(error);
        }
        Err(error) => Verdict::Retry(error),
    };
    Ok(match verdict {
        Verdict::Done => Replayed::Settled("applied".to_owned()),
        Verdict::Duplicate(guard) => {
            Replayed::Settled(format!("a duplicate, absorbed by {guard:?}"))
        }
        Verdict::Retry(error) => {
            Replayed::Failed { reason: None, error: Causes(&error).to_string() }
        }
        Verdict::Reject(stored) => {
            Replayed::Failed { reason: Some(stored.reason()), error: stored.error().to_owned() }
        }
    })
}

fn show(letter: &Kept, format: Format) {
    let Kept { dead_letter_id, origin, headers, resolution } = letter;
    let text = std::str::from_utf8(&origin.message.payload);
    if format.json {
        // Not every body is text.
        let bytes = text.is_err().then(|| BASE64_STANDARD.encode(&origin.message.payload));
        println!(
            "{}",
            json!({
                "deadLetterId": dead_letter_id, "consumer": origin.consumer,
                "stream": origin.stream, "streamSeq": origin.stream_seq,
                "subject": origin.message.subject.as_str(), "headers": headers,
                "deliveries": origin.deliveries, "resolution": resolution,
                "body": text.ok(), "bodyBase64": bytes,
            })
        );
        return;
    }
    println!("dead letter  {dead_letter_id}");
    println!("consumer     {}", origin.consumer);
    println!("message      {} in {}", origin.stream_seq, printable(&origin.stream));
    println!("subject      {}", printable(&origin.message.subject));
    println!("deliveries   {}", origin.deliveries);
    println!("resolution   {}", printable(resolution.as_deref().unwrap_or("-")));
    println!("headers      {headers}");
    match text {
        Ok(text) => println!("body         {}", printable(text)),
        Err(_) => println!("body, bytes  {}", origin.message.payload.escape_ascii()),
    }
}
