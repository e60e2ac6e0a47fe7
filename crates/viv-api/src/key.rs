//! Keys (S3).

use serde::{Deserialize, Serialize};

use crate::bound::{KeyId, KeyLifetimeMs, KeyName, ProjectName};

/// A key to make. Takes the scope `admin`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({"name": "ci", "scope": "project", "project": "default"})))]
#[serde(deny_unknown_fields)]
pub struct CreateKey {
    /// Its name, for people.
    pub name: KeyName,
    /// What it allows.
    pub scope: Scope,
    /// In which project; the caller's when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub project: Option<ProjectName>,
    /// For how long it is good; for ever when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifetime_ms: Option<KeyLifetimeMs>,
}

/// What a key allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// Everything, in every project.
    Admin,
    /// Everything about one project's sandboxes.
    Project,
    /// Reading about one project's sandboxes.
    ReadOnly,
}

/// A key without its secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Key {
    /// Its id.
    pub id: KeyId,
    /// Its name, for people.
    pub name: String,
    /// What it allows.
    pub scope: Scope,
    /// In which project.
    pub project: String,
    /// When it was made.
    pub created_at_ms: u64,
    /// When it was last used, roughly.
    pub last_used_at_ms: Option<u64>,
    /// Until when it is good; for ever when absent.
    pub expires_at_ms: Option<u64>,
    /// When it was revoked.
    pub revoked_at_ms: Option<u64>,
}

/// A new key with its secret, which is told this once and kept nowhere.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreatedKey {
    /// The key.
    pub key: Key,
    /// What to send as `Authorization: Bearer …`.
    pub secret: String,
}

impl std::fmt::Debug for CreatedKey {
    /// Without the secret: what is printed ends up in logs (S6).
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CreatedKey").field("key", &self.key).finish_non_exhaustive()
    }
}
