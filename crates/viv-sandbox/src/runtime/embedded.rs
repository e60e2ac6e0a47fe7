//! libcontainer, called in a process of its own.

use std::path::Path;

use libcontainer::container::builder::ContainerBuilder;
use libcontainer::error::LibcontainerError;
use libcontainer::syscall::syscall::SyscallType;

/// Why libcontainer did not make it.
#[derive(Debug, thiserror::Error)]
pub enum EmbeddedError {
    /// It was not made.
    #[error("the container could not be made")]
    Create(#[source] LibcontainerError),
    /// It was made and not started.
    #[error("the container could not be started")]
    Start(#[source] LibcontainerError),
}

/// Makes and starts a container. Must be called from a process with one thread.
pub fn run(root: &Path, bundle: &Path, pid_file: &Path, id: &str) -> Result<(), EmbeddedError> {
    let mut container = ContainerBuilder::new(id.to_owned(), SyscallType::default())
        .with_root_path(root)
        .and_then(|builder| builder.with_pid_file(Some(pid_file)))
        .and_then(ContainerBuilder::validate_id)
        .map_err(EmbeddedError::Create)?
        .as_init(bundle)
        .with_systemd(false)
        .with_detach(true)
        .build()
        .map_err(EmbeddedError::Create)?;
    container.start().map_err(EmbeddedError::Start)
}
