//! Unix sockets in folders of any depth.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use tokio::net::UnixStream;

/// Longest path of a socket that the kernel takes, without the closing zero.
const PATH_BYTES_MAX: usize = 107;

/// Connects, by way of a descriptor of the folder when the path is too long.
pub(super) async fn connect(path: &Path) -> io::Result<UnixStream> {
    let (short, _folder) = shorten(path)?;
    UnixStream::connect(short).await
}

/// The same outside of the async runtime.
pub(crate) fn connect_blocking(path: &Path) -> io::Result<std::os::unix::net::UnixStream> {
    let (short, _folder) = shorten(path)?;
    std::os::unix::net::UnixStream::connect(short)
}

/// A path that the kernel takes, good for as long as what comes with it is open.
fn shorten(path: &Path) -> io::Result<(PathBuf, Option<File>)> {
    if path.as_os_str().as_bytes().len() <= PATH_BYTES_MAX {
        return Ok((path.to_owned(), None));
    }
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let folder = File::open(folder)?;
    let short = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name);
    Ok((short, Some(folder)))
}

/// Nobody listens there: no such socket, or its owner is gone.
pub(crate) fn is_refused(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::UnexpectedEof
    )
}
