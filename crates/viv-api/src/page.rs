//! Lists in parts.

use serde::{Deserialize, Serialize};

/// A part of a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Page<T> {
    /// What is listed.
    pub items: Vec<T>,
    /// Where the next part begins; nothing at the end. It is opaque and good for the same question only.
    #[serde(default)]
    pub next: Option<String>,
}

impl<T> Page<T> {
    /// A list that is all there is.
    pub fn whole(items: Vec<T>) -> Self {
        Self { items, next: None }
    }
}
