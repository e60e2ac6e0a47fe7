//! The system calls that rustix does not have, each behind a safe function.
//!
//! Architecture invariant: all unsafe code of this crate is in this folder.
#![expect(unsafe_code, reason = "system calls without a safe wrapper elsewhere")]

pub(crate) mod btrfs;
pub(crate) mod clone;
pub(crate) mod creds;
pub(crate) mod descriptor;
pub(crate) mod idmap;
pub(crate) mod klog;
pub(crate) mod loopback;
pub(crate) mod namespace;
pub(crate) mod quota;
pub(crate) mod userfault;
