//! Finding out what a runtime is, before anything is made with it.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::{Kernel, PATH, Runtime};
use crate::ordinary::Standing;
use crate::wait::readable_within;

/// How long a runtime may take to say what it is; they take milliseconds.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// How much of what it says is read. The longest, `runsc flags`, has some 8 KiB.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// How `runsc --version` begins.
const RUNSC: &str = "runsc version ";

/// Options without which `runsc` is of no use here: see [`Kernel::options`].
const RUNSC_NEEDS: [&str; 2] = ["-host-uds", "-overlay2"];

/// A runtime that was looked at and can be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The same, by its full path.
    pub runtime: Runtime,
    /// The kernel that those inside will talk to.
    pub kernel: Kernel,
    /// What it says of itself, in one line.
    pub version: String,
}

/// Why a runtime cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RuntimeError {
    /// No such program.
    #[error("there is no runtime {}", .0.display())]
    Missing(PathBuf),
    /// It is there and is no program.
    #[error("the runtime {} is not an executable file", .0.display())]
    NotExecutable(PathBuf),
    /// It does not answer as runtimes do.
    #[error("the runtime {} does not say its version: {why}", .path.display())]
    Strange {
        /// Which.
        path: PathBuf,
        /// What it did.
        why: String,
    },
    /// Its version cannot carry an agent.
    #[error("{version} is too old: it has no option {option}")]
    TooOld {
        /// What it says of itself.
        version: String,
        /// What it does not have.
        option: &'static str,
    },
    /// It cannot work without root.
    #[error("{version} works for root only: it has to set up cgroups that are not yours")]
    TakesRoot {
        /// What it says of itself.
        version: String,
    },
}

impl RuntimeError {
    /// What to do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Missing(_) => {
                "install it, name it by its full path, or leave --runtime (VIV_RUNTIME) out for the embedded one"
            }
            Self::NotExecutable(_) | Self::Strange { .. } => {
                "name an OCI runtime such as runc or runsc, or leave --runtime (VIV_RUNTIME) out for the embedded one"
            }
            Self::TakesRoot { .. } => "run viv as root, or leave --runtime (VIV_RUNTIME) out for the embedded one",
            Self::TooOld { .. } => "install a release of gVisor from December 2022 or later",
        }
    }
}

impl Runtime {
    /// Looks at it. Blocks for some milliseconds.
    pub fn find(&self) -> Result<Found, RuntimeError> {
        let name = match self {
            Self::Embedded => {
                let version = concat!("embedded in viv ", env!("CARGO_PKG_VERSION")).to_owned();
                return Ok(Found { runtime: Self::Embedded, kernel: Kernel::Host, version });
            }
            Self::Binary(name) => name,
        };
        let path = locate(name)?;
        let strange = |why: io::Error| RuntimeError::Strange { path: path.clone(), why: why.to_string() };
        let said = ask(&path, "--version").map_err(strange)?;
        let version = said.lines().next().unwrap_or_default().trim().to_owned();
        if version.is_empty() {
            return Err(strange(io::Error::other("it says nothing")));
        }
        let kernel = if version.starts_with(RUNSC) {
            let options = ask(&path, "flags").map_err(strange)?;
            let has = |option: &str| options.lines().any(|line| line.split_whitespace().next() == Some(option));
            if let Some(option) = RUNSC_NEEDS.into_iter().find(|option| !has(option)) {
                return Err(RuntimeError::TooOld { version, option });
            }
            if !Standing::of_this_process().is_ok_and(|standing| standing == Standing::Root) {
                return Err(RuntimeError::TakesRoot { version });
            }
            Kernel::Gvisor
        } else {
            Kernel::Host
        };
        Ok(Found { runtime: Self::Binary(path), kernel, version })
    }
}

/// The program's full path: the shim works in another folder, with a search path of its own.
fn locate(name: &Path) -> Result<PathBuf, RuntimeError> {
    let candidates: Vec<PathBuf> = if name.components().count() > 1 || name.has_root() {
        vec![std::path::absolute(name).unwrap_or_else(|_| name.to_owned())]
    } else {
        PATH.split(':').map(|folder| Path::new(folder).join(name)).collect()
    };
    let mut error = RuntimeError::Missing(name.to_owned());
    for path in candidates {
        match fs::metadata(&path) {
            Ok(found) if found.is_file() && found.permissions().mode() & 0o111 != 0 => return Ok(path),
            Ok(_) => error = RuntimeError::NotExecutable(path),
            Err(_) => {}
        }
    }
    Err(error)
}

/// What it prints, in time and up to a bound.
fn ask(path: &Path, argument: &str) -> io::Result<String> {
    // Both streams in one: some things are printed as help.
    let (reader, writer) = io::pipe()?;
    let mut child = Command::new(path)
        .arg(argument)
        .env_clear()
        .env("PATH", PATH)
        .stdin(Stdio::null())
        .stdout(writer.try_clone()?)
        .stderr(writer)
        .spawn()?;
    let said = hear(reader);
    if said.is_err() {
        // It may have ended by itself.
        let _ = child.kill();
    }
    let status = child.wait()?;
    let said = said?;
    if !status.success() {
        let first = said.lines().next().unwrap_or_default();
        return Err(io::Error::other(format!("it ends with {status}: {first}")));
    }
    Ok(said)
}

fn hear(mut pipe: io::PipeReader) -> io::Result<String> {
    let until = Instant::now() + ANSWER_WITHIN;
    let mut said = Vec::new();
    let mut buf = [0; 4096];
    loop {
        if !readable_within(&pipe, until.saturating_duration_since(Instant::now()))? {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "it does not answer"));
        }
        match pipe.read(&mut buf)? {
            0 => return Ok(String::from_utf8_lossy(&said).into_owned()),
            count => said.extend_from_slice(&buf[..count]),
        }
        if said.len() > ANSWER_BYTES_MAX {
            return Err(io::Error::other("it does not stop talking"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program that does as the script says, in a folder of its own.
    fn program(script: &str) -> (tempfile::TempDir, Runtime) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("runtime");
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        (folder, Runtime::Binary(path))
    }

    #[test]
    fn kernels_are_told_apart() {
        let (_folder, plain) = program("echo runc version 1.2.3; echo spec: 1.0");
        let found = plain.find().unwrap();
        assert_eq!((found.kernel, found.version.as_str()), (Kernel::Host, "runc version 1.2.3"));
        assert_eq!(found.runtime, plain);
        let (_folder, gvisor) =
            program("[ $1 = flags ] && printf '  -host-uds value\\n  -overlay2 value\\n' >&2 || echo runsc version 7");
        assert_eq!(gvisor.find().unwrap().kernel, Kernel::Gvisor);
        assert_eq!(Runtime::Embedded.find().unwrap().kernel, Kernel::Host);
    }

    #[test]
    fn s5_what_cannot_be_used_is_told_with_a_hint() {
        let (_folder, old) = program("[ $1 = flags ] && echo '  -host-uds value' || echo runsc version 6");
        let error = old.find().unwrap_err();
        assert_eq!(error, RuntimeError::TooOld { version: "runsc version 6".to_owned(), option: "-overlay2" });
        for (script, why) in
            [("echo no such flag >&2; exit 3", "no such flag"), ("true", "nothing"), ("yes", "does not stop")]
        {
            let (_folder, strange) = program(script);
            let error = strange.find().unwrap_err();
            assert!(matches!(error, RuntimeError::Strange { .. }) && error.to_string().contains(why), "{error}");
            assert!(error.hint().contains("runsc"), "{}", error.hint());
        }
        for name in ["no-such-runtime", "/no/such/runtime"] {
            let missing = Runtime::Binary(name.into()).find().unwrap_err();
            assert_eq!(missing, RuntimeError::Missing(name.into()));
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        for path in [folder.path().to_owned(), file] {
            let error = Runtime::Binary(path.clone()).find().unwrap_err();
            assert_eq!(error, RuntimeError::NotExecutable(path));
        }
    }
}
