//! Pages of listings: sizes, and tokens that survive changes between pages.

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};

use crate::core::ids::{Faults, InvalidField, digest};

/// A page ends early when its answer reaches this size, so that clients with the usual bound of 4 MB can read it.
pub(super) const PAGE_BYTES_MAX: usize = 2_000_000;

const VERSION: u8 = 1;
const SIZE_DEFAULT: usize = 100;
const SIZE_MAX: usize = 1_000;

/// Which page of which listing is asked for.
#[derive(Debug)]
pub(super) struct Page {
    /// Most entries.
    pub(super) size: usize,
    /// The page begins strictly after this place.
    pub(super) after: Option<Vec<u8>>,
    filter: [u8; 8],
}

impl Page {
    /// Reads the size and the token of a request for the listing that `filter` describes.
    pub(super) fn read(size: i32, token: &str, filter: &[&str], faults: &mut Faults) -> Page {
        let digest = digest(filter);
        let filter = std::array::from_fn(|at| digest[at]);
        let size = match usize::try_from(size) {
            Ok(0) => SIZE_DEFAULT,
            Ok(size @ 1..=SIZE_MAX) => size,
            _ => {
                faults.add("page_size", size, "1 to 1000, or 0 for 100");
                SIZE_DEFAULT
            }
        };
        let after = faults.take(read_token(token, filter)).flatten();
        Page { size, after, filter }
    }

    /// The place that the page begins after, as text.
    pub(super) fn after_text(&self, faults: &mut Faults) -> Option<String> {
        let text = String::from_utf8(self.after.clone()?).ok();
        if text.is_none() {
            faults.take(Err::<(), _>(invalid_token()));
        }
        text
    }

    /// The token of the page that begins after `last`.
    pub(super) fn token_after(&self, last: &[u8]) -> String {
        let mut token = vec![VERSION];
        token.extend(self.filter);
        token.extend(last);
        URL_SAFE_NO_PAD.encode(token)
    }
}

fn read_token(token: &str, filter: [u8; 8]) -> Result<Option<Vec<u8>>, InvalidField> {
    if token.is_empty() {
        return Ok(None);
    }
    let bytes = URL_SAFE_NO_PAD.decode(token).map_err(|_| invalid_token())?;
    match bytes.split_at_checked(1 + filter.len()) {
        Some((head, last)) if head[0] == VERSION && head[1..] == filter => Ok(Some(last.to_vec())),
        _ => Err(invalid_token()),
    }
}

pub(super) fn invalid_token() -> InvalidField {
    InvalidField::new(
        "page_token",
        "this token",
        "the next_page_token of an answer to the same request, or none",
    )
}
