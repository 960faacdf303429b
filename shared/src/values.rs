//! Values that are checked once, where they enter, and trusted from then on.
//!
//! The same types stand in HTTP bodies, in events and in queries, so a consumer refuses what the
//! API would have refused, and PostgreSQL never sees a NUL character (which no `text` can hold).

use serde::{Deserialize, Serialize};

/// The longest identifier, in characters.
pub const MAX_ID_CHARS: usize = 128;

/// The largest amount, in minor units: ten digits before the decimal point of most currencies, and
/// far inside the 2^53 that every JSON reader keeps exact.
pub const MAX_AMOUNT_MINOR: i64 = 1_000_000_000_000;

/// Why a value is refused. Reads well behind the name of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidValue {
    /// Empty, or longer than [`MAX_ID_CHARS`].
    #[error("must have 1 to {MAX_ID_CHARS} characters")]
    Length,
    /// NUL, line feed and the like.
    #[error("must not contain control characters")]
    ControlCharacter,
    /// " A1" and "A1" must not be two orders.
    #[error("must not begin or end with white space")]
    Padding,
    /// Zero, negative or above [`MAX_AMOUNT_MINOR`].
    #[error("must be a whole number of minor units from 1 to {MAX_AMOUNT_MINOR}")]
    Amount,
    /// Lower case, or not in ISO 4217.
    #[error("must be an ISO 4217 code in capitals, such as EUR")]
    Currency,
}

fn check_id(id: &str) -> Result<(), InvalidValue> {
    if id.is_empty() || id.chars().count() > MAX_ID_CHARS {
        Err(InvalidValue::Length)
    } else if id.contains(char::is_control) {
        Err(InvalidValue::ControlCharacter)
    } else if id.trim() != id {
        Err(InvalidValue::Padding)
    } else {
        Ok(())
    }
}

/// One newtype over `String` per kind of identifier: a transaction id can never be passed for an
/// order id.
macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, sqlx::Type)]
        #[serde(try_from = "String")]
        #[sqlx(transparent)]
        pub struct $name(String);

        impl TryFrom<String> for $name {
            type Error = InvalidValue;

            fn try_from(id: String) -> Result<Self, InvalidValue> {
                check_id(&id).map(|()| Self(id))
            }
        }

        impl $name {
            /// The identifier as it came.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

id! {
    /// The order: chosen by the client, the aggregate of every event of the pair.
    OrderId
}
id! {
    /// Who ordered.
    CustomerId
}
id! {
    /// The payment provider's transaction: the business key that makes a confirmation count once,
    /// whoever repeats it and under whatever event id.
    TransactionId
}
id! {
    /// The carrier's name for a parcel, by which a customer follows it.
    TrackingCode
}

/// An amount in minor units (cents of EUR, whole JPY), from 1 to [`MAX_AMOUNT_MINOR`].
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, sqlx::Type,
)]
#[serde(try_from = "i64")]
#[sqlx(transparent)]
pub struct AmountMinor(i64);

impl TryFrom<i64> for AmountMinor {
    type Error = InvalidValue;

    fn try_from(amount: i64) -> Result<Self, InvalidValue> {
        if (1..=MAX_AMOUNT_MINOR).contains(&amount) {
            Ok(Self(amount))
        } else {
            Err(InvalidValue::Amount)
        }
    }
}

impl AmountMinor {
    /// The plain number.
    pub fn get(self) -> i64 {
        self.0
    }
}

/// A currency of ISO 4217, by its three capital letters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, sqlx::Type)]
#[serde(try_from = "String")]
#[sqlx(transparent)]
pub struct Currency(String);

impl TryFrom<String> for Currency {
    type Error = InvalidValue;

    fn try_from(code: String) -> Result<Self, InvalidValue> {
        match iso_currency::Currency::from_code(&code) {
            Some(known) if known.code() == code => Ok(Self(code)),
            _ => Err(InvalidValue::Currency),
        }
    }
}

impl Currency {
    /// The code.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for Currency {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_are_bounded_visible_and_unpadded() {
        let order = |id: &str| OrderId::try_from(id.to_owned()).map(|_| ());
        assert_eq!(order("A-1"), Ok(()));
        assert_eq!(order("größe 42"), Ok(()));
        assert_eq!(order(&"ü".repeat(MAX_ID_CHARS)), Ok(()));
        assert_eq!(order(""), Err(InvalidValue::Length));
        assert_eq!(order(&"x".repeat(MAX_ID_CHARS + 1)), Err(InvalidValue::Length));
        assert_eq!(order("A\u{0}1"), Err(InvalidValue::ControlCharacter));
        assert_eq!(order(" A1"), Err(InvalidValue::Padding));
    }

    #[test]
    fn amounts_are_positive_and_bounded() {
        for refused in [i64::MIN, -1, 0, MAX_AMOUNT_MINOR + 1, i64::MAX] {
            assert_eq!(AmountMinor::try_from(refused), Err(InvalidValue::Amount));
        }
        assert_eq!(
            AmountMinor::try_from(MAX_AMOUNT_MINOR).map(AmountMinor::get),
            Ok(MAX_AMOUNT_MINOR)
        );
    }

    #[test]
    fn currencies_are_those_of_iso_4217_in_capitals() {
        for known in ["EUR", "USD", "JPY", "CHF", "KWD"] {
            assert!(Currency::try_from(known.to_owned()).is_ok(), "{known}");
        }
        for refused in ["", "eur", "Eur", "EURO", "ZZZ", "E R", "€"] {
            assert_eq!(
                Currency::try_from(refused.to_owned()),
                Err(InvalidValue::Currency),
                "{refused}"
            );
        }
    }
}
