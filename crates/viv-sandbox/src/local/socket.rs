//! Unix sockets in folders of any depth.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use tokio::net::UnixStream;

/// Longest path of a socket that the kernel takes, without the closing zero.
const PATH_BYTES_MAX: usize = 107;

/// Connects, by way of a descriptor of the folder when the path is too long.
pub(super) async fn connect(path: &Path) -> io::Result<UnixStream> {
    if path.as_os_str().as_bytes().len() <= PATH_BYTES_MAX {
        return UnixStream::connect(path).await;
    }
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let folder = File::open(folder)?;
    let short = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name);
    UnixStream::connect(short).await
}

/// Nobody listens there: no such socket, or its owner is gone.
pub(super) fn is_refused(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::UnexpectedEof
    )
}
