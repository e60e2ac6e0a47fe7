//! `viv cp`
//!
//! A directory goes as an archive, in one request and as it is read. What comes out of a sandbox is not trusted: it is
//! unpacked below its destination, and only files, directories and links are made.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path as LocalPath, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::thread;

use anyhow::Context;
use serde::Serialize;
use tar::{Archive, Builder, EntryType};
use viv_api::ErrorCode;
use viv_api::bound::{FileMode, Path, SandboxRef, UserName};
use viv_api::client::SandboxHandle;
use viv_api::file::FileKind;
use viv_api::query::{ReadFile, WriteFile};

use super::new::wrong;
use super::progress::Waiting;
use super::{Daemon, print_json};
use crate::fail::{Failure, NOT_FOUND};

/// Standard input or output.
const STANDARD: &str = "-";

/// Copy files into a sandbox or out of it
///
/// One of the two is SANDBOX:PATH with an absolute path, the other a path here, or `-` for standard input or output.
/// Directories are copied with all that is in them; into a directory that exists, as `cp -r` does. A path here that has
/// a colon is written with a slash before it: ./a:b.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to copy
    from: Place,
    /// Where to
    to: Place,
    /// Who shall own a file in the sandbox; root when not said
    #[arg(long, value_name = "USER[:GROUP]")]
    user: Option<UserName>,
}

#[derive(Clone)]
enum Place {
    Standard,
    Here(PathBuf),
    There(SandboxRef, Path),
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == STANDARD {
            return Ok(Self::Standard);
        }
        match text.split_once(':') {
            Some((sandbox, path)) if !sandbox.contains('/') && !sandbox.is_empty() => {
                let sandbox = sandbox.parse().map_err(|error| format!("{error}; a path here is written ./{text}"))?;
                let path = path.parse::<Path>().map_err(|error| error.to_string())?;
                Ok(Self::There(sandbox, path))
            }
            Some(_) | None if text.is_empty() => Err("a path is empty".to_owned()),
            Some(_) | None => Ok(Self::Here(text.into())),
        }
    }
}

/// What was copied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
struct Copied {
    /// Files, directories and links.
    entries: u64,
    /// In files.
    bytes: u64,
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let user = args.user.as_ref();
    let copied = match (&args.from, &args.to) {
        (Place::There(sandbox, path), Place::Standard) => {
            // The file itself is what is said, with --json too.
            read_to(&daemon.sandbox(sandbox), path, &mut io::stdout().lock())?;
            return Ok(ExitCode::SUCCESS);
        }
        (Place::There(sandbox, path), Place::Here(to)) => {
            let _waiting = Waiting::on("copying");
            download(&daemon.sandbox(sandbox), path, to)
        }
        (Place::Standard, Place::There(sandbox, path)) => {
            let handle = daemon.sandbox(sandbox);
            if path.as_str().ends_with('/') {
                return Err(Failure::usage("standard input needs the name of a file to become").into());
            }
            write_from(&handle, path, None, user, &mut io::stdin().lock())
        }
        (Place::Here(from), Place::There(sandbox, path)) => {
            let _waiting = Waiting::on("copying");
            upload(&daemon.sandbox(sandbox), from, path, user)
        }
        (Place::There(..), Place::There(..)) => Err(Failure::usage("both are in sandboxes")
            .hint("copy it here first, or: viv cp A:/file - | viv cp - B:/file")
            .into()),
        (Place::Here(_) | Place::Standard, Place::Here(_) | Place::Standard) => {
            Err(Failure::usage("neither is in a sandbox").hint("write one of them as SANDBOX:/PATH").into())
        }
    }?;
    if daemon.json { print_json(&copied) } else { Ok(ExitCode::SUCCESS) }
}

fn upload(handle: &SandboxHandle<'_>, from: &LocalPath, to: &Path, user: Option<&UserName>) -> anyhow::Result<Copied> {
    let found = fs::metadata(from).map_err(|error| local(from, &error))?;
    let to = match kind(handle, to)? {
        Some(FileKind::Dir) => below(to, &name_of(from)?)?,
        Some(FileKind::File | FileKind::Symlink | FileKind::Other) | None if to.as_str().ends_with('/') => {
            below(to, &name_of(from)?)?
        }
        Some(FileKind::File | FileKind::Symlink | FileKind::Other) | None => to.clone(),
    };
    if !found.is_dir() {
        let mut file = File::open(from).map_err(|error| local(from, &error))?;
        let mode = FileMode::from_bits(found.permissions().mode() & 0o777);
        return write_from(handle, &to, Some(mode), user, &mut file);
    }
    if user.is_some() {
        return Err(Failure::usage("--user is for a single file")
            .hint("`viv exec … chown -R` does it for more")
            .into());
    }
    let (mut reader, writer) = io::pipe()?;
    let folder = from.to_owned();
    let packing = thread::spawn(move || pack(&folder, writer));
    let unpacked = handle.unpack(&to, &mut reader);
    // Whoever packs must not wait for a reader that gave up.
    drop(reader);
    let packed = packing.join().unwrap_or_else(|_| Err(io::Error::other("packing failed")));
    // What is missing in the archive is worse than what the server made of it; a broken pipe is only the echo.
    match packed {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            return Err(error).with_context(|| format!("cannot copy all of {}", from.display()));
        }
        Ok(()) | Err(_) => {}
    }
    let unpacked = unpacked?;
    eprintln!("{} entries, {}", unpacked.entries, crate::text::bytes(unpacked.bytes));
    Ok(Copied { entries: unpacked.entries, bytes: unpacked.bytes })
}

fn pack(folder: &LocalPath, to: impl Write) -> io::Result<()> {
    let mut archive = Builder::new(to);
    archive.follow_symlinks(false);
    archive.append_dir_all(".", folder)?;
    archive.into_inner()?.flush()
}

fn write_from(
    handle: &SandboxHandle<'_>,
    path: &Path,
    mode: Option<FileMode>,
    user: Option<&UserName>,
    from: &mut dyn Read,
) -> anyhow::Result<Copied> {
    let query = WriteFile { path: path.clone(), mode, user: user.cloned(), generation: None };
    let written = handle.write_file(&query, from)?;
    Ok(Copied { entries: 1, bytes: written.size_bytes })
}

fn download(handle: &SandboxHandle<'_>, from: &Path, to: &LocalPath) -> anyhow::Result<Copied> {
    let stat = handle.stat_file(from)?;
    let name = from.as_str().rsplit('/').find(|part| !part.is_empty());
    let into_folder = to.is_dir() || to.as_os_str().to_string_lossy().ends_with('/');
    let to = match name {
        Some(name) if into_folder && name != "." && name != ".." => to.join(name),
        Some(_) | None => to.to_owned(),
    };
    match stat.kind {
        FileKind::Dir => unpack(handle.archive(from)?, &to),
        FileKind::File | FileKind::Symlink => {
            // In a file beside it first: half a file must not stand where a whole one did.
            let folder = to.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(LocalPath::new("."));
            let draft = folder.join(format!(".viv-cp-{}", std::process::id()));
            let mut file = File::create_new(&draft).map_err(|error| local(folder, &error))?;
            let done = read_to(handle, from, &mut file).and_then(|bytes| {
                // Without bits that would lend our rights to others.
                file.set_permissions(fs::Permissions::from_mode(stat.mode.bits() & 0o777))?;
                fs::rename(&draft, &to).map_err(|error| local(&to, &error))?;
                Ok(Copied { entries: 1, bytes })
            });
            if done.is_err() {
                let _ = fs::remove_file(&draft);
            }
            done
        }
        FileKind::Other => Err(Failure::usage(format!("{from} is neither a file nor a directory")).into()),
    }
}

/// How many bytes that were.
fn read_to(handle: &SandboxHandle<'_>, path: &Path, to: &mut dyn Write) -> anyhow::Result<u64> {
    let query = ReadFile { path: path.clone(), offset: None, length: None, generation: None };
    let mut content = handle.read_file(&query)?;
    let bytes = io::copy(&mut content, to)?;
    to.flush()?;
    Ok(bytes)
}

fn unpack(archive: impl Read, to: &LocalPath) -> anyhow::Result<Copied> {
    fs::create_dir_all(to).map_err(|error| local(to, &error))?;
    let mut archive = Archive::new(archive);
    archive.set_preserve_permissions(false);
    let (mut copied, mut left_out) = (Copied::default(), 0_u64);
    for entry in archive.entries()? {
        let mut entry = entry?;
        match entry.header().entry_type() {
            EntryType::Regular
            | EntryType::Continuous
            | EntryType::Directory
            | EntryType::Symlink
            | EntryType::Link => {
                if entry.unpack_in(to)? {
                    copied = Copied { entries: copied.entries + 1, bytes: copied.bytes + entry.size() };
                } else {
                    left_out += 1;
                }
            }
            // Devices, pipes and what nobody knows.
            _ => left_out += 1,
        }
    }
    if left_out > 0 {
        eprintln!("viv: {left_out} entries were left out: neither files, directories nor links, or named outside");
    }
    Ok(copied)
}

/// What stands there, if anything does.
fn kind(handle: &SandboxHandle<'_>, path: &Path) -> anyhow::Result<Option<FileKind>> {
    match handle.stat_file(path) {
        Ok(stat) => Ok(Some(stat.kind)),
        // Of a missing sandbox the copy itself tells.
        Err(error) if error.code() == Some(ErrorCode::NotFound) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The last part of a path here, also of `.` and `..`.
fn name_of(path: &LocalPath) -> anyhow::Result<String> {
    let whole = fs::canonicalize(path).map_err(|error| local(path, &error))?;
    let name = path.file_name().or_else(|| whole.file_name()).context("a name is needed in the sandbox")?;
    Ok(name.to_str().with_context(|| format!("{} is no text", path.display()))?.to_owned())
}

fn below(folder: &Path, name: &str) -> anyhow::Result<Path> {
    let folder = folder.as_str().trim_end_matches('/');
    Ok(Path::new(format!("{folder}/{name}")).map_err(wrong)?)
}

fn local(path: &LocalPath, error: &io::Error) -> anyhow::Error {
    let message = format!("{}: {error}", path.display());
    if error.kind() == io::ErrorKind::NotFound {
        return Failure::new(NOT_FOUND, message).into();
    }
    anyhow::anyhow!(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_told_apart() {
        assert!(matches!("box:/a".parse(), Ok(Place::There(..))));
        assert!(matches!("-".parse(), Ok(Place::Standard)));
        for here in ["a", "./a:b", "/a:/b", "a/b:c"] {
            assert!(matches!(here.parse(), Ok(Place::Here(_))), "{here}");
        }
        for wrong in ["", "box:relative", "Not a sandbox:/a"] {
            assert!(wrong.parse::<Place>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn s4_what_comes_out_stays_below_its_destination() {
        let folder = tempfile::tempdir().unwrap();
        let to = folder.path().join("to");
        let mut archive = Builder::new(Vec::new());
        let mut add = |name: &str, kind: EntryType, link: Option<&str>| {
            let mut header = tar::Header::new_gnu();
            // Written by hand: the library refuses to make such names.
            header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
            header.set_entry_type(kind);
            header.set_mode(0o6755);
            header.set_size(if kind == EntryType::Regular { 2 } else { 0 });
            if let Some(link) = link {
                header.set_link_name(link).unwrap();
            }
            header.set_cksum();
            archive.append(&header, if kind == EntryType::Regular { &b"hi"[..] } else { &[] }).unwrap();
        };
        add("../out", EntryType::Regular, None);
        add("way", EntryType::Symlink, Some(".."));
        add("good", EntryType::Regular, None);
        add("pipe", EntryType::Fifo, None);
        unpack(&archive.into_inner().unwrap()[..], &to).unwrap();
        assert_eq!(fs::read(to.join("good")).unwrap(), b"hi");
        assert_eq!(fs::metadata(to.join("good")).unwrap().permissions().mode() & 0o7000, 0);
        assert!(!folder.path().join("out").exists() && !to.join("pipe").exists());

        // Through a link that the archive itself brought.
        let mut archive = Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(EntryType::Regular);
        header.set_size(2);
        header.set_mode(0o644);
        archive.append_data(&mut header, "way/out", &b"hi"[..]).unwrap();
        assert!(unpack(&archive.into_inner().unwrap()[..], &to).is_err());
        assert!(!folder.path().join("out").exists());
    }
}
