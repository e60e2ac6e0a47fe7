//! The protocol of the agent, and what both of its ends share.
//!
//! - [`proto`]: the messages, versioned.
//! - [`frame`]: how they travel on a unix socket.
//! - [`output`]: how an execution's output is kept on disk. The host reads the
//!   same files once the agent is gone.
//!
//! The agent itself is the binary of this crate (`main.rs`).

pub mod frame;
pub mod output;
pub mod proto;
