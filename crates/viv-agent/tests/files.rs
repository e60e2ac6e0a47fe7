//! Files, against the real agent with a root of its own.

mod common;

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use common::*;
use viv_agent::proto::*;
use viv_core::file::{FileKind, FileStat, WatchEvent, WatchKind};

fn write(agent: &TestAgent, path: &str, data: &[u8]) -> Result<FileStat, AgentError> {
    write_as(agent, path, data, None, None)
}

fn write_as(
    agent: &TestAgent,
    path: &str,
    data: &[u8],
    mode: Option<u32>,
    user: Option<&str>,
) -> Result<FileStat, AgentError> {
    let request = Request::FileWrite { fence: fence(), path: path.to_owned(), mode, user: user.map(ToOwned::to_owned) };
    match agent.connect().upload(&request, data)? {
        Answer::Stat(stat) => Ok(stat),
        other => panic!("{other:?}"),
    }
}

fn read(agent: &TestAgent, path: &str, offset: u64, length: Option<u64>) -> Result<Vec<u8>, AgentError> {
    let mut client = agent.connect();
    client.call(&Request::FileRead { path: path.to_owned(), offset, length })?;
    client.download()
}

fn code(result: Result<impl std::fmt::Debug, AgentError>) -> ErrorCode {
    result.unwrap_err().code
}

#[test]
fn a_file_goes_in_and_comes_out() {
    let agent = TestAgent::start(Killing::Subreaper);
    let data: Vec<u8> = (0..700_000_u32).map(|n| (n % 251) as u8).collect();
    let stat = write(&agent, "/made/on/the way/file", &data).unwrap();
    assert_eq!((stat.size_bytes, stat.mode, stat.kind), (700_000, 0o644, FileKind::File));
    assert_eq!(read(&agent, "/made/on/the way/file", 0, None).unwrap(), data);
    assert_eq!(read(&agent, "/made/on/the way/file", 10, Some(5)).unwrap(), data[10..15]);
    assert_eq!(read(&agent, "/made/on/the way/file", 1 << 40, None).unwrap(), b"");
    // Two conversations on one connection.
    let mut client = agent.connect();
    for _ in 0..2 {
        client
            .call(&Request::FileRead { path: "/made/../made/on/the way/file".to_owned(), offset: 0, length: None })
            .unwrap();
        assert_eq!(client.download().unwrap().len(), data.len());
    }
}

#[test]
fn mode_and_owner_are_set_and_kept() {
    let agent = TestAgent::start(Killing::Subreaper);
    if rustix::process::geteuid().is_root() {
        let stat = write_as(&agent, "/f", b"1", Some(0o4755), Some("1234:77")).unwrap();
        assert_eq!((stat.mode, stat.uid, stat.gid), (0o4755, 1234, 77));
        let stat = write(&agent, "/f", b"2").unwrap();
        assert_eq!((stat.mode, stat.uid, stat.gid), (0o4755, 1234, 77));
    }
    assert_eq!(code(write_as(&agent, "/f", b"", Some(0o100_644), None)), ErrorCode::Invalid);
    assert_eq!(code(write_as(&agent, "/f", b"", None, Some("eve"))), ErrorCode::Invalid);
}

#[test]
fn an_upload_that_is_cut_off_changes_nothing() {
    let agent = TestAgent::start(Killing::Subreaper);
    write(&agent, "/f", b"before").unwrap();
    let mut client = agent.connect();
    client.send(&Request::FileWrite { fence: fence(), path: "/f".to_owned(), mode: None, user: None });
    client.send_data(b"half of it").unwrap();
    let drafts = || {
        std::fs::read_dir(agent.root())
            .unwrap()
            .flatten()
            .filter(|e| e.file_name() != "f" && e.file_name() != "tmp")
            .count()
    };
    eventually("a draft", || drafts() == 1);
    drop(client);
    eventually("no draft", || drafts() == 0);
    assert_eq!(read(&agent, "/f", 0, None).unwrap(), b"before");
}

#[test]
fn no_path_leads_out() {
    let agent = TestAgent::start(Killing::Subreaper);
    let outside = agent.dir.path().join("outside");
    std::fs::write(&outside, "secret").unwrap();
    symlink(&outside, agent.root().join("absolute")).unwrap();
    symlink("../outside", agent.root().join("relative")).unwrap();
    symlink("..", agent.root().join("up")).unwrap();
    for path in ["/absolute", "/relative", "/../outside", "/up/outside", "/up/up/up/outside"] {
        assert_eq!(code(read(&agent, path, 0, None)), ErrorCode::NotFound, "{path}");
    }
    // Writing replaces the link, and what it points to stays.
    write(&agent, "/absolute", b"new").unwrap();
    write(&agent, "/up/outside", b"inside").unwrap();
    assert_eq!(std::fs::read(&outside).unwrap(), b"secret");
    assert_eq!(std::fs::read(agent.root().join("outside")).unwrap(), b"inside");
    symlink("/proc/self/root", agent.root().join("magic")).unwrap();
    for path in ["relative", "", "/a\0b"] {
        assert_eq!(code(read(&agent, path, 0, None)), ErrorCode::Invalid, "{path:?}");
        assert_eq!(code(write(&agent, path, b"")), ErrorCode::Invalid, "{path:?}");
    }
}

#[test]
fn only_regular_files_are_read() {
    let agent = TestAgent::start(Killing::Subreaper);
    std::fs::create_dir(agent.root().join("dir")).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(agent.root().join("fifo")).status().unwrap().success());
    assert_eq!(code(read(&agent, "/dir", 0, None)), ErrorCode::Conflict);
    assert_eq!(code(read(&agent, "/fifo", 0, None)), ErrorCode::Invalid);
    assert_eq!(code(read(&agent, "/missing", 0, None)), ErrorCode::NotFound);
    assert_eq!(code(write(&agent, "/dir", b"")), ErrorCode::Conflict);
    assert_eq!(code(write(&agent, "/new/", b"")), ErrorCode::Invalid);
    write(&agent, "/file", b"").unwrap();
    assert_eq!(code(write(&agent, "/file/below", b"")), ErrorCode::Conflict);
}

fn list(agent: &TestAgent, path: &str, depth: u32) -> Result<Vec<String>, AgentError> {
    match agent.call(&Request::FileList { path: path.to_owned(), depth })? {
        Answer::Listing(listing) => {
            assert!(listing.complete);
            Ok(listing.entries.into_iter().map(|entry| entry.path).collect())
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn looking_around() {
    let agent = TestAgent::start(Killing::Subreaper);
    for path in ["/d/a", "/d/b/c", "/d/b/e/f"] {
        write(&agent, path, b"xyz").unwrap();
    }
    symlink("/d/b", agent.root().join("d/link")).unwrap();
    assert_eq!(list(&agent, "/d", 1).unwrap(), ["a", "b", "link"]);
    assert_eq!(list(&agent, "/d", 9).unwrap(), ["a", "b", "b/c", "b/e", "b/e/f", "link"]);
    assert_eq!(code(list(&agent, "/d/a", 1)), ErrorCode::Conflict);
    assert_eq!(code(list(&agent, "/none", 1)), ErrorCode::NotFound);
    let Answer::Stat(stat) = agent.call(&Request::FileStat { path: "/d/link".to_owned() }).unwrap() else { panic!() };
    assert_eq!((stat.kind, stat.link_target.as_deref()), (FileKind::Symlink, Some("/d/b")));
}

#[test]
fn a_listing_is_bounded() {
    let agent = TestAgent::start(Killing::Subreaper);
    std::fs::create_dir(agent.root().join("many")).unwrap();
    for n in 0..25_000 {
        std::fs::File::create(agent.root().join(format!("many/{n}"))).unwrap();
    }
    let Answer::Listing(listing) = agent.call(&Request::FileList { path: "/many".to_owned(), depth: 1 }).unwrap()
    else {
        panic!()
    };
    assert!(!listing.complete && listing.entries.len() > 10_000);
}

#[test]
fn making_moving_removing() {
    let agent = TestAgent::start(Killing::Subreaper);
    let mkdir = |path: &str| agent.call(&Request::FileMkdir { fence: fence(), path: path.to_owned() });
    let remove = |path: &str| agent.call(&Request::FileRemove { fence: fence(), path: path.to_owned() });
    let rename = |from: &str, to: &str| {
        agent.call(&Request::FileMove { fence: fence(), from: from.to_owned(), to: to.to_owned() })
    };
    assert_eq!(mkdir("/a/b/c"), Ok(Answer::Done));
    assert_eq!(mkdir("/a/b/c"), Ok(Answer::Done));
    write(&agent, "/a/b/c/f", b"x").unwrap();
    assert_eq!(code(mkdir("/a/b/c/f")), ErrorCode::Conflict);
    assert_eq!(rename("/a/b", "/z/b"), Ok(Answer::Done));
    assert_eq!(read(&agent, "/z/b/c/f", 0, None).unwrap(), b"x");
    assert_eq!(code(rename("/a/b", "/q")), ErrorCode::NotFound);
    assert_eq!(code(rename("/z", "/z/b/inside")), ErrorCode::Invalid);
    // A link to a tree goes, and the tree stays.
    symlink(agent.root().join("z"), agent.root().join("a/link")).unwrap();
    assert_eq!(remove("/a"), Ok(Answer::Done));
    assert!(std::fs::exists(agent.root().join("z/b/c/f")).unwrap());
    assert_eq!(remove("/z"), Ok(Answer::Done));
    assert_eq!(code(remove("/z")), ErrorCode::NotFound);
    for path in ["/", "//", "/.", "/a/.."] {
        assert_eq!(code(remove(path)), ErrorCode::Invalid, "{path}");
    }
    // Deep, and wide.
    let mut deep = agent.root().join("deep");
    for _ in 0..300 {
        deep.push("d");
    }
    std::fs::create_dir_all(&deep).unwrap();
    for n in 0..500 {
        std::fs::create_dir_all(agent.root().join(format!("deep/{n}/x"))).unwrap();
    }
    assert_eq!(remove("/deep"), Ok(Answer::Done));
    assert!(!std::fs::exists(agent.root().join("deep")).unwrap());
}

#[test]
fn an_operation_is_done_once() {
    let agent = TestAgent::start(Killing::Subreaper);
    write(&agent, "/f", b"1").unwrap();
    let remove = Request::FileRemove { fence: fence(), path: "/f".to_owned() };
    assert_eq!(agent.call(&remove), Ok(Answer::Done));
    write(&agent, "/f", b"2").unwrap();
    assert_eq!(agent.call(&remove), Ok(Answer::Done));
    assert_eq!(read(&agent, "/f", 0, None).unwrap(), b"2");
}

#[test]
fn what_is_ours_is_not_changed() {
    let agent = TestAgent::start(Killing::Subreaper);
    // As inside a sandbox, where it is below the root: reached through a mount or, here, a move.
    let link = agent.root().join("home");
    std::fs::create_dir(&link).unwrap();
    let mounted = std::process::Command::new("mount")
        .arg("--bind")
        .args([agent.dir.path().join("home"), link.clone()])
        .status()
        .is_ok_and(|status| status.success());
    if !mounted {
        return;
    }
    symlink("home/run", agent.root().join("way")).unwrap();
    let refused = [
        code(write(&agent, "/home/run/agent.json", b"{}")),
        code(write(&agent, "/way/agent.json", b"{}")),
        code(agent.call(&Request::FileRemove { fence: fence(), path: "/home".to_owned() })),
        code(agent.call(&Request::FileRemove { fence: fence(), path: "/home/run/exec".to_owned() })),
        code(agent.call(&Request::FileMkdir { fence: fence(), path: "/home/run/new/deep".to_owned() })),
        code(agent.call(&Request::FileMove { fence: fence(), from: "/home".to_owned(), to: "/x".to_owned() })),
    ];
    let unpacked = unpack(&agent, "/", &archive(|builder| add_file(builder, "home/run/x", b"")));
    let unpacked_below = unpack(&agent, "/way", &archive(|builder| add_file(builder, "x", b"")));
    assert!(std::process::Command::new("umount").arg(&link).status().unwrap().success());
    assert_eq!(refused, [ErrorCode::Invalid; 6]);
    assert_eq!((code(unpacked), code(unpacked_below)), (ErrorCode::Invalid, ErrorCode::Invalid));
}

#[test]
fn s3_what_is_ours_is_not_read_through_a_link_nor_from_above() {
    let agent = TestAgent::start(Killing::Subreaper);
    let home = agent.root().join("home");
    std::fs::create_dir(&home).unwrap();
    let mounted = std::process::Command::new("mount")
        .arg("--bind")
        .args([agent.dir.path().join("home"), home.clone()])
        .status()
        .is_ok_and(|status| status.success());
    if !mounted {
        return;
    }
    std::fs::write(home.join("run/secret"), "ours").unwrap();
    symlink("/home", agent.root().join("way")).unwrap();
    symlink("home/run/secret", agent.root().join("file")).unwrap();
    let by_name = read(&agent, "/home/run/secret", 0, None);
    let refused = [
        code(read(&agent, "/file", 0, None)),
        code(read(&agent, "/way/run/secret", 0, None)),
        code(agent.call(&Request::FileList { path: "/way".to_owned(), depth: 1 })),
        code(agent.call(&Request::FileStat { path: "/way/run/secret".to_owned() })),
        code(agent.call(&Request::FileWatch { path: "/way/run".to_owned(), recursive: false })),
        code(agent.call(&Request::ArchiveGet { path: "/way/run".to_owned() })),
        code(agent.call(&Request::ArchiveGet { path: "/file".to_owned() })),
    ];
    let listed = agent.call(&Request::FileList { path: "/".to_owned(), depth: 9 });
    let mut watcher = agent.connect();
    watcher.call(&Request::FileWatch { path: "/".to_owned(), recursive: true }).unwrap();
    std::fs::write(home.join("run/another"), "ours").unwrap();
    std::fs::write(agent.root().join("theirs"), "x").unwrap();
    let told = watcher.json::<WatchEvent>();
    // Whoever looked there lets go of it a moment after he has answered.
    let unmounted = || std::process::Command::new("umount").arg(&home).status().unwrap().success();
    eventually("nothing of it is held", unmounted);
    assert_eq!(by_name.unwrap(), b"ours");
    assert_eq!(refused, [ErrorCode::Invalid; 7]);
    let Ok(Answer::Listing(listed)) = listed else { panic!("{listed:?}") };
    let names: Vec<_> = listed.entries.iter().map(|entry| entry.path.as_str()).collect();
    assert!(names.contains(&"home") && !names.iter().any(|name| name.starts_with("home/")), "{names:?}");
    assert_eq!(told.path, "theirs");
}

#[test]
fn changes_are_told() {
    let agent = TestAgent::start(Killing::Subreaper);
    std::fs::create_dir(agent.root().join("w")).unwrap();
    let mut client = agent.connect();
    client.call(&Request::FileWatch { path: "/w".to_owned(), recursive: true }).unwrap();
    let mut until = |kind: WatchKind, path: &str, is_dir: bool| {
        while client.json::<WatchEvent>() != (WatchEvent { kind, path: path.to_owned(), is_dir }) {}
    };
    std::fs::write(agent.root().join("w/f"), "x").unwrap();
    until(WatchKind::Created, "f", false);
    until(WatchKind::Modified, "f", false);
    std::fs::create_dir_all(agent.root().join("w/a/b")).unwrap();
    until(WatchKind::Created, "a", true);
    until(WatchKind::Created, "a/b", true);
    std::fs::write(agent.root().join("w/a/b/g"), "x").unwrap();
    until(WatchKind::Created, "a/b/g", false);
    std::fs::rename(agent.root().join("w/a"), agent.root().join("w/c")).unwrap();
    until(WatchKind::MovedFrom, "a", true);
    until(WatchKind::MovedTo, "c", true);
    std::fs::remove_file(agent.root().join("w/c/b/g")).unwrap();
    until(WatchKind::Removed, "c/b/g", false);
    std::fs::set_permissions(agent.root().join("w/f"), std::fs::Permissions::from_mode(0o600)).unwrap();
    until(WatchKind::Attributes, "f", false);
    // A client that goes is noticed without any change.
    drop(client);
    eventually(
        "the watcher to go",
        || matches!(agent.call(&Request::Health), Ok(Answer::Health(health)) if health.connections == 1),
    );
    assert_eq!(code(agent.call(&Request::FileWatch { path: "/w/f".to_owned(), recursive: false })), ErrorCode::Invalid);
}

type Archive = tar::Builder<Vec<u8>>;
type Fill = Box<dyn Fn(&mut Archive)>;

fn archive(fill: impl FnOnce(&mut Archive)) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    fill(&mut builder);
    builder.into_inner().unwrap()
}

fn header(kind: tar::EntryType, size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_size(size);
    header.set_mode(0o640);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(1_000_000_000);
    header
}

/// Puts a name into a header that the `tar` crate itself would refuse to write.
fn add_raw(builder: &mut Archive, mut header: tar::Header, name: &str, data: &[u8]) {
    header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
    header.set_cksum();
    builder.append(&header, data).unwrap();
}

fn add_file(builder: &mut Archive, name: &str, data: &[u8]) {
    add_raw(builder, header(tar::EntryType::Regular, data.len() as u64), name, data);
}

fn add_link(builder: &mut Archive, kind: tar::EntryType, name: &str, target: &str) {
    let mut header = header(kind, 0);
    header.set_link_name_literal(target).unwrap();
    add_raw(builder, header, name, b"");
}

fn unpack_bounded(
    agent: &TestAgent,
    path: &str,
    data: &[u8],
    bounds: viv_core::file::ArchiveBounds,
) -> Result<viv_core::file::Unpacked, AgentError> {
    match agent.connect().upload(&Request::ArchivePut { fence: fence(), path: path.to_owned(), bounds }, data)? {
        Answer::Unpacked(unpacked) => Ok(unpacked),
        other => panic!("{other:?}"),
    }
}

fn unpack(agent: &TestAgent, path: &str, data: &[u8]) -> Result<viv_core::file::Unpacked, AgentError> {
    unpack_bounded(agent, path, data, viv_core::file::ArchiveBounds::default())
}

#[test]
fn a_tree_goes_through_an_archive_and_back() {
    let agent = TestAgent::start(Killing::Subreaper);
    let long = "n".repeat(180);
    for path in ["/t/a", "/t/sub/b", &format!("/t/{long}/{long}")] {
        write_as(&agent, path, path.as_bytes(), Some(0o751), None).unwrap();
    }
    symlink("../a", agent.root().join("t/sub/link")).unwrap();
    symlink("l".repeat(150), agent.root().join("t/long-link")).unwrap();
    std::fs::hard_link(agent.root().join("t/a"), agent.root().join("t/hard")).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(agent.root().join("t/fifo")).status().unwrap().success());
    let mut client = agent.connect();
    client.call(&Request::ArchiveGet { path: "/t".to_owned() }).unwrap();
    let packed = client.download().unwrap();
    let unpacked = unpack(&agent, "/copy/of it", &packed).unwrap();
    assert_eq!((unpacked.entries, unpacked.bytes), (8, 4 + 8 + 364 + 4));
    assert_eq!(std::fs::read(agent.root().join(format!("copy/of it/{long}/{long}"))).unwrap().len(), 364);
    assert_eq!(std::fs::read_link(agent.root().join("copy/of it/sub/link")).unwrap().to_str(), Some("../a"));
    assert_eq!(std::fs::metadata(agent.root().join("copy/of it/hard")).unwrap().mode() & 0o7777, 0o751);
    let time = |path: &str| std::fs::metadata(agent.root().join(path)).unwrap().mtime();
    assert_eq!(time("t/a"), time("copy/of it/a"));
    assert!(!std::fs::exists(agent.root().join("copy/of it/fifo")).unwrap());
    // One file alone.
    client.call(&Request::ArchiveGet { path: "/t/sub/b".to_owned() }).unwrap();
    let one = client.download().unwrap();
    assert_eq!(unpack(&agent, "/one", &one).unwrap().entries, 1);
    assert_eq!(read(&agent, "/one/b", 0, None).unwrap(), b"/t/sub/b");
    assert_eq!(client.call(&Request::ArchiveGet { path: "/none".to_owned() }).unwrap_err().code, ErrorCode::NotFound);
}

#[test]
fn hard_links_and_replacements_in_archives() {
    let agent = TestAgent::start(Killing::Subreaper);
    let data = archive(|builder| {
        add_file(builder, "d/a", b"one");
        add_link(builder, tar::EntryType::Link, "hard", "d/a");
        add_file(builder, "again", b"1");
        add_file(builder, "again", b"2");
        add_link(builder, tar::EntryType::Symlink, "d/soft", "../hard");
    });
    assert_eq!(unpack(&agent, "/x", &data).unwrap().entries, 5);
    let inode = |path: &str| std::fs::metadata(agent.root().join(path)).unwrap().ino();
    assert_eq!(inode("x/d/a"), inode("x/hard"));
    assert_eq!(read(&agent, "/x/again", 0, None).unwrap(), b"2");
    assert_eq!(read(&agent, "/x/d/soft", 0, None).unwrap(), b"one");
}

#[test]
fn hostile_archives_write_nothing_outside() {
    use tar::EntryType as Kind;
    let agent = TestAgent::start(Killing::Subreaper);
    let root = agent.root();
    std::fs::write(root.join("victim"), "untouched").unwrap();
    std::fs::create_dir_all(root.join("x")).unwrap();
    symlink("..", root.join("x/planted")).unwrap();
    let hostile: Vec<(&str, Fill)> = vec![
        ("upwards", Box::new(|b| add_file(b, "../victim", b"bad"))),
        ("upwards inside", Box::new(|b| add_file(b, "a/../../victim", b"bad"))),
        ("absolute", Box::new(|b| add_file(b, "/victim", b"bad"))),
        ("through a planted link", Box::new(|b| add_file(b, "planted/victim", b"bad"))),
        (
            "through an absolute link of its own",
            Box::new(|b| {
                add_link(b, Kind::Symlink, "l", "/");
                add_file(b, "l/victim", b"bad");
            }),
        ),
        (
            "through a link upwards of its own",
            Box::new(|b| {
                add_link(b, Kind::Symlink, "l", "..");
                add_file(b, "l/victim", b"bad");
            }),
        ),
        (
            "through its own link",
            Box::new(|b| {
                add_link(b, Kind::Symlink, "here", ".");
                add_file(b, "here/f", b"bad");
            }),
        ),
        ("hard link upwards", Box::new(|b| add_link(b, Kind::Link, "h", "../victim"))),
        ("hard link through a link", Box::new(|b| add_link(b, Kind::Link, "h", "planted/victim"))),
        (
            "hard link to a link",
            Box::new(|b| {
                add_link(b, Kind::Symlink, "d/l", "../x");
                add_link(b, Kind::Link, "h", "d/l");
            }),
        ),
        ("device", Box::new(|b| add_raw(b, header(Kind::Char, 0), "dev", b""))),
        ("pipe", Box::new(|b| add_raw(b, header(Kind::Fifo, 0), "fifo", b""))),
    ];
    for (what, fill) in hostile {
        assert_eq!(code(unpack(&agent, "/x", &archive(|b| fill(b)))), ErrorCode::Invalid, "{what}");
    }
    assert_eq!(code(unpack(&agent, "/x", b"this is no archive at all".repeat(100).as_slice())), ErrorCode::Invalid);
    assert_eq!(std::fs::read(root.join("victim")).unwrap(), b"untouched");
    let mut names: Vec<_> = std::fs::read_dir(&root).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["tmp", "victim", "x"]);
}

#[test]
fn archives_are_bounded() {
    let agent = TestAgent::start(Killing::Subreaper);
    let bounds = viv_core::file::ArchiveBounds { entries_max: 3, bytes_max: 1000, ratio_max: 10 };
    let many = archive(|b| (0..4).for_each(|n| add_file(b, &format!("f{n}"), b"x")));
    assert_eq!(code(unpack_bounded(&agent, "/x", &many, bounds)), ErrorCode::Exhausted);
    let big = archive(|b| add_file(b, "big", &[0; 1001]));
    assert_eq!(code(unpack_bounded(&agent, "/x", &big, bounds)), ErrorCode::Exhausted);
    assert!(!std::fs::exists(agent.root().join("x/big")).unwrap());
    // A few bytes that stand for a gigabyte of zeroes.
    let sparse = archive(|b| {
        let mut header = header(tar::EntryType::GNUSparse, 0);
        let gnu = header.as_gnu_mut().unwrap();
        gnu.set_real_size(1 << 30);
        gnu.sparse[0].set_offset(1 << 30);
        gnu.sparse[0].set_length(0);
        add_raw(b, header, "sparse", b"");
    });
    let bounds = viv_core::file::ArchiveBounds { entries_max: 3, bytes_max: 1 << 40, ratio_max: 1000 };
    assert_eq!(code(unpack_bounded(&agent, "/x", &sparse, bounds)), ErrorCode::Exhausted);
    // A name that would fill the memory.
    let name =
        archive(|b| add_raw(b, header(tar::EntryType::GNULongName, 64 << 20), "././@LongLink", &vec![b'n'; 64 << 20]));
    assert_eq!(code(unpack(&agent, "/x", &name)), ErrorCode::Exhausted);
    assert!(agent.memory_kib("VmHWM") < 16 << 10, "{} KiB", agent.memory_kib("VmHWM"));
}
