//! Who relays: one row, a holder, and a time on the database's clock.
//!
//! Only saves work. Two relays at once publish the same rows twice; message ids and the inbox absorb
//! that. Without the lease everything would still be right, at twice the cost. So it need not survive a
//! crash of the server either, and nobody waits for the disk: `set_config` holds until the end of the
//! transaction, which is the statement.

use std::time::Duration;

use sqlx::PgPool;
use uuid::Uuid;

/// What a crash of the holder costs the others. The lease is renewed with every unit of work.
pub const LEASE: Duration = Duration::from_secs(5);

/// Takes or renews the lease. False when somebody else holds it.
///
/// # Errors
/// When the database cannot be asked.
pub async fn acquire(pool: &PgPool, holder: Uuid) -> sqlx::Result<bool> {
    let taken = sqlx::query!(
        "update relay_lease set holder = $1, expires_at = now() + make_interval(secs => $2)
         from set_config('synchronous_commit', 'off', true)
         where holder = $1 or expires_at <= now()",
        holder,
        LEASE.as_secs_f64(),
    )
    .execute(pool)
    .await?;
    Ok(taken.rows_affected() == 1)
}

/// Gives the lease back, if it is still ours.
///
/// # Errors
/// When the database cannot be asked; the lease then runs out by itself.
pub async fn release(pool: &PgPool, holder: Uuid) -> sqlx::Result<()> {
    sqlx::query!(
        "update relay_lease set expires_at = now()
         from set_config('synchronous_commit', 'off', true)
         where holder = $1",
        holder,
    )
    .execute(pool)
    .await
    .map(|_| ())
}
