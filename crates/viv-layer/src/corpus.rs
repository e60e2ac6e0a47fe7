//! Difficult layers, for tests: one of everything that a sandbox can leave behind.
//!
//! Needs root, for owners, devices and opaque marks.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, makedev, mkdirat, mknodat, openat};

use crate::meta::{Kind, Time};
use crate::settle::{Look, settle};
use crate::trail::FOLDER;
use crate::xattr::{Holder, OPAQUE, OPAQUE_VALUE};

/// How much of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    /// Some 300 entries: for tests that go over it many times.
    Small,
    /// 10,000 files and more.
    Full,
}

impl Size {
    fn files(self) -> u64 {
        match self {
            Self::Small => 200,
            Self::Full => 10_000,
        }
    }

    /// Deeper than one path of the kernel can say, at 15 bytes a name.
    fn depth(self) -> u32 {
        match self {
            Self::Small => 40,
            Self::Full => 400,
        }
    }
}

/// Fills an empty folder with a layer. The same seed gives the same layer.
pub fn corpus(folder: &Path, seed: u64, size: Size) -> io::Result<()> {
    let mut dice = Dice(seed);
    small_files(folder, size.files(), &mut dice)?;
    odd_names(folder, &mut dice)?;
    sparse_files(&folder.join("sparse"), &mut dice)?;
    attributes(&folder.join("attributes"), &mut dice)?;
    marks(&folder.join("marks"), &mut dice)?;
    nodes(&folder.join("nodes"), &mut dice)?;
    hard_links(&folder.join("links"), &mut dice)?;
    deep(folder, size.depth())?;
    times(folder, &mut dice)
}

/// `SplitMix64`: enough to vary, and the same everywhere.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % sides
    }

    fn bytes(&mut self, length: u64) -> Vec<u8> {
        (0..length).map(|_| self.roll(256) as u8).collect()
    }

    /// Between seconds, and one in three before 1970.
    fn time(&mut self) -> Time {
        let seconds = match self.roll(3) {
            0 => -(self.roll(1 << 30) as i64),
            _ => self.roll(1 << 31) as i64,
        };
        Time { seconds, nanos: self.roll(1_000_000_000) as u32 }
    }
}

fn dress(path: &Path, mode: u32, (uid, gid): (u32, u32), mtime: Time) -> io::Result<()> {
    let file = File::open(path)?;
    settle(Holder::Open(file.as_fd()), &Look { kind: Kind::File, mode, uid, gid, mtime }, |_| Ok(()))
}

fn small_files(top: &Path, count: u64, dice: &mut Dice) -> io::Result<()> {
    let mut folder = top.join("many");
    for number in 0..count {
        if number % 100 == 0 {
            folder = top.join(format!("many/{}", number / 100));
            fs::create_dir_all(&folder)?;
        }
        let path = folder.join(format!("file-{number}"));
        let length = if dice.roll(10) == 0 { 0 } else { dice.roll(600) };
        fs::write(&path, dice.bytes(length))?;
        let owner =
            ([0, 1, 1000, 65_534, 4_000_000_000][dice.roll(5) as usize], [0, 100, 3_000_000][dice.roll(3) as usize]);
        let mode = [0o644, 0o600, 0, 0o755, 0o4755, 0o2711, 0o1777, 0o6111][dice.roll(8) as usize];
        dress(&path, mode, owner, dice.time())?;
    }
    Ok(())
}

fn odd_names(top: &Path, dice: &mut Dice) -> io::Result<()> {
    let folder = top.join("names");
    fs::create_dir(&folder)?;
    let mut names: Vec<OsString> =
        ["-rf", " ", "a\nb", "a\\b", "*", "ü", ".hidden", "wh.", "%25=%3D", "\u{202e}"].map(OsString::from).into();
    names.push(OsString::from_vec(vec![0xff, 0xfe, b'x', 0x80]));
    names.push(OsString::from_vec((1..=255).filter(|&byte| byte != b'/').collect()));
    names.push("n".repeat(255).into());
    for name in &names {
        fs::write(folder.join(name), dice.bytes(20))?;
    }
    let long = folder.join("l".repeat(255));
    fs::create_dir_all(long.join("m".repeat(255)))?;
    fs::write(long.join("m".repeat(255)).join("o".repeat(200)), "far")?;
    // As long as XFS allows.
    symlink("t".repeat(1000), folder.join("long-target"))?;
    symlink(OsString::from_vec(vec![0xff, b'/', 0x01]), folder.join("odd-target"))?;
    symlink("/etc/passwd", folder.join("out"))?;
    symlink("../../../..", folder.join("up"))?;
    symlink("up", folder.join("loop"))
}

fn sparse_files(folder: &Path, dice: &mut Dice) -> io::Result<()> {
    fs::create_dir(folder)?;
    File::create(folder.join("all-hole"))?.set_len(1 << 30)?;
    File::create(folder.join("terabyte"))?.set_len(1 << 40)?;
    let pieces = File::create(folder.join("pieces"))?;
    pieces.set_len(1 << 26)?;
    for _ in 0..40 {
        pieces.write_all_at(&dice.bytes(100), dice.roll((1 << 26) - 100))?;
    }
    let ends = File::create(folder.join("ends-with-data"))?;
    ends.write_all_at(b"end", (10 << 20) + 77)?;
    fs::write(folder.join("zeros"), vec![0; 200_000])?;
    fs::write(folder.join("dense"), dice.bytes(300_000))
}

fn attributes(folder: &Path, dice: &mut Dice) -> io::Result<()> {
    fs::create_dir(folder)?;
    let set = |name: &str, attributes: &[(&std::ffi::CStr, &[u8])]| {
        let path = folder.join(name);
        if !path.exists() {
            File::create(&path)?.write_all(name.as_bytes())?;
        }
        let file = File::open(path)?;
        attributes.iter().try_for_each(|(name, value)| Holder::Open(file.as_fd()).set(name, value))
    };
    let binary = dice.bytes(900);
    set("plain", &[(c"user.one", b"1"), (c"user.two", &binary), (c"user.empty", b"")])?;
    set("odd", &[(c"user.a=b%3D c\n", b"x=y\n"), (c"user.\xc3\xbc", b"\0")])?;
    // What `setcap cap_net_raw+ep` writes: version 2, effective.
    let capability = [&[1, 0, 0, 2, 0, 0x20, 0, 0][..], &[0; 12]].concat();
    set("capable", &[(c"security.capability", &capability)])?;
    set("listed", &[(c"system.posix_acl_access", &acl(1001))])?;
    fs::create_dir(folder.join("heir"))?;
    fs::write(folder.join("heir/before"), "no list")?;
    fs::create_dir(folder.join("heir/below"))?;
    set("heir", &[(c"system.posix_acl_default", &acl(1002)), (c"user.folder", b"yes")])?;
    dress(&folder.join("capable"), 0o4755, (0, 0), dice.time())?;
    // A change of owner took the capability.
    set("capable", &[(c"security.capability", &capability)])
}

/// An access list that names one user.
fn acl(user: u32) -> Vec<u8> {
    let mut list = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in
        [(1, 6, u32::MAX), (2, 4, user), (4, 4, u32::MAX), (16, 4, u32::MAX), (32, 4, u32::MAX)]
    {
        list.extend_from_slice(&u16::to_le_bytes(tag));
        list.extend_from_slice(&u16::to_le_bytes(permissions));
        list.extend_from_slice(&id.to_le_bytes());
    }
    list
}

fn node(path: &Path, kind: FileType, device: u64) -> io::Result<()> {
    Ok(mknodat(CWD, path, kind, Mode::from_raw_mode(0o640), device)?)
}

fn marks(folder: &Path, dice: &mut Dice) -> io::Result<()> {
    for name in ["opaque", "opaque-empty", "clear"] {
        fs::create_dir_all(folder.join(name))?;
        if name.starts_with("opaque") {
            Holder::Open(File::open(folder.join(name))?.as_fd()).set(OPAQUE, OPAQUE_VALUE)?;
        }
    }
    fs::write(folder.join("opaque/inside"), dice.bytes(10))?;
    for name in [OsString::from("gone"), OsString::from_vec(vec![0xfe]), "g".repeat(255).into()] {
        node(&folder.join("clear").join(name), FileType::CharacterDevice, 0)?;
    }
    // As the kernel makes them: many names of one inode.
    fs::hard_link(folder.join("clear/gone"), folder.join("clear/gone-too"))?;
    fs::hard_link(folder.join("clear/gone"), folder.join("gone-above"))
}

fn nodes(folder: &Path, dice: &mut Dice) -> io::Result<()> {
    fs::create_dir(folder)?;
    node(&folder.join("fifo"), FileType::Fifo, 0)?;
    node(&folder.join("socket"), FileType::Socket, 0)?;
    node(&folder.join("null"), FileType::CharacterDevice, makedev(1, 3))?;
    // More than a byte each; XFS does not take the highest that there are.
    node(&folder.join("odd"), FileType::CharacterDevice, makedev(511, 65_535))?;
    node(&folder.join("disk"), FileType::BlockDevice, makedev(0, 0))?;
    symlink("fifo", folder.join("link"))?;
    let opened = File::open(folder)?;
    for (name, kind) in [(c"fifo", Kind::Fifo), (c"socket", Kind::Socket), (c"null", Kind::Char), (c"link", Kind::Link)]
    {
        let look = Look { kind, mode: 0o4123, uid: 7, gid: 8, mtime: dice.time() };
        settle(Holder::Named(opened.as_fd(), name), &look, |_| Ok(()))?;
    }
    Ok(())
}

fn hard_links(folder: &Path, dice: &mut Dice) -> io::Result<()> {
    fs::create_dir_all(folder.join("a/deep"))?;
    fs::create_dir_all(folder.join("b"))?;
    fs::write(folder.join("b/first"), dice.bytes(5000))?;
    for name in ["a/deep/second", "z-third", "a/fourth"] {
        fs::hard_link(folder.join("b/first"), folder.join(name))?;
    }
    symlink("nowhere", folder.join("b/link"))?;
    fs::hard_link(folder.join("b/link"), folder.join("a/link"))?;
    node(&folder.join("b/fifo"), FileType::Fifo, 0)?;
    fs::hard_link(folder.join("b/fifo"), folder.join("a/fifo"))?;
    node(&folder.join("b/socket"), FileType::Socket, 0)?;
    fs::hard_link(folder.join("b/socket"), folder.join("a/socket"))
}

/// Folders inside each other, with a hard link from the deepest to the shallowest.
fn deep(top: &Path, depth: u32) -> io::Result<()> {
    let mut folder = openat(CWD, top, FOLDER, Mode::empty())?;
    fs::write(top.join("from-the-deep"), "linked")?;
    for level in 0..depth {
        let name = format!("level-{level:09}");
        mkdirat(&folder, &name, Mode::RWXU)?;
        folder = openat(&folder, &name, FOLDER, Mode::empty())?;
    }
    Ok(rustix::fs::linkat(CWD, top.join("from-the-deep"), &folder, c"linked", rustix::fs::AtFlags::empty())?)
}

/// Odd times for folders too, once they are filled.
fn times(top: &Path, dice: &mut Dice) -> io::Result<()> {
    let mut folders: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(top)? {
        folders.push(entry?.path());
    }
    folders.retain(|path| path.is_dir() && path.file_name().is_some_and(|name| !name.as_bytes().starts_with(b"level")));
    folders.sort();
    folders.push(top.to_owned());
    for (mode, folder) in [0o755, 0o700, 0o3777, 0o2755].iter().cycle().zip(&folders) {
        dress(folder, *mode, (dice.roll(2000) as u32, 50), dice.time())?;
    }
    Ok(())
}
