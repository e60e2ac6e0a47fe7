//! Layers: folder trees in overlayfs' own on-disk format.
//!
//! A layer holds ordinary entries, *whiteouts* (character devices 0/0: the name
//! is gone from what lies below) and *opaque* folders (`trusted.overlay.opaque`
//! is `y`: nothing of the folder below shows through; an ordinary user's layers
//! have that mark by another name, see [`Marks`]). The ids on disk are the ids
//! inside the sandbox.
//!
//! ```text
//!   survey, content, lines   what is in a layer: to compare, to name, to read
//!   Weigher                  what was changed in it lately, while others wait
//!   copy, merge              a layer from one, or from a stack of them
//!   Packer, unpack           a layer as a tar stream, and back
//!   remove                   a layer taken apart
//! ```
//!
//! Whatever is in a layer was put there by a sandbox, which may have meant
//! harm. Hence, everywhere: work goes by descriptor and never through a
//! symbolic link; neither the stack nor the number of descriptors depends on
//! the tree; pipes, sockets and devices are never opened; holes are never read;
//! and what a limit stops is said as an error.
//!
//! Deliberately absent: threads, `fsync` (whoever wants a layer to be durable
//! syncs its filesystem once), compression, and any clean-up of half-made
//! targets (whoever named the target removes it).

#![forbid(unsafe_code)]

mod copy;
#[cfg(feature = "corpus")]
pub mod corpus;
mod digest;
mod extents;
mod faults;
mod links;
mod meta;
mod pack;
mod remove;
mod settle;
mod survey;
mod tar;
mod trail;
mod unpack;
mod walk;
mod weigh;
mod xattr;

pub use crate::copy::{Copied, copy, merge, merge_onto};
pub use crate::digest::{Digest, NotADigest};
pub use crate::pack::{Form, Packer};
pub use crate::remove::remove;
pub use crate::survey::{Survey, content, lines, survey};
pub use crate::unpack::{Bound, Bounds, UnpackError, Unpacked, unpack};
pub use crate::weigh::{Weigher, Weight};
pub use crate::xattr::Marks;
