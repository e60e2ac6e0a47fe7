//! Another range of ids for what was saved under one.
//!
//! CRIU keeps ids as they are inside, but for two: the mapping of the user namespace (`userns-*.img`), and the options of
//! mounts (`mountpoints-*.img`), which name owners as the machine does.

use std::fs;
use std::io;
use std::path::Path;

use super::wire::{Field, Value, bad, fields, messages, write_number};
use crate::rootfs::IdRange;

/// Largest image that is looked at: a few hundred mounts.
const IMAGE_BYTES_MAX: u64 = 16 << 20;

/// In the mapping: the number of the field that says what an id is outside.
const LOWER_FIRST: u64 = 2;

/// Rewrites the images in a folder from one range to another. They are put in the place of what is there, which may be
/// linked from elsewhere.
pub(crate) fn renumber(images: &Path, from: IdRange, to: IdRange) -> io::Result<()> {
    if from == to {
        return Ok(());
    }
    if from.count != to.count {
        return Err(bad("a range of ids of another size"));
    }
    let moved = |id: u64| {
        let within = id.checked_sub(from.base.into()).filter(|offset| *offset < from.count.into());
        within.map(|offset| u64::from(to.base) + offset)
    };
    let mut mappings = 0;
    for entry in fs::read_dir(images)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let change: &dyn Fn(&Field<'_>) -> Changed = if name.starts_with("userns-") {
            mappings += 1;
            &|field| mapping(field, &moved)
        } else if name.starts_with("mountpoints-") {
            &|field| Ok(options(field, &moved))
        } else {
            continue;
        };
        if fs::metadata(&path)?.len() > IMAGE_BYTES_MAX {
            return Err(bad("an image is too large"));
        }
        let changed = rewrite_image(&fs::read(&path)?, change)?;
        let beside = path.with_extension("new");
        fs::write(&beside, changed)?;
        fs::rename(beside, path)?;
    }
    // What has no mapping would run with ids of nobody knows whom.
    if mappings == 1 { Ok(()) } else { Err(bad("not one mapping of ids")) }
}

/// What is in the place of a field, header included, if it is to be changed.
type Changed = io::Result<Option<Vec<u8>>>;

fn rewrite_image(image: &[u8], change: &dyn Fn(&Field<'_>) -> Changed) -> io::Result<Vec<u8>> {
    let mut written = Vec::with_capacity(image.len());
    let header = messages(image, |message| {
        let message = rewrite(message, change)?;
        written.extend(u32::try_from(message.len()).map_err(io::Error::other)?.to_le_bytes());
        written.extend(message);
        Ok(())
    })?;
    Ok([header, &written].concat())
}

/// A message with some of its fields changed, and all others as they were.
fn rewrite(message: &[u8], change: &dyn Fn(&Field<'_>) -> Changed) -> io::Result<Vec<u8>> {
    let mut written = Vec::with_capacity(message.len());
    fields(message, |field| {
        match change(&field)? {
            Some(changed) => written.extend(changed),
            None => written.extend(field.whole),
        }
        Ok(())
    })?;
    Ok(written)
}

fn bytes_field(number: u64, bytes: &[u8]) -> Vec<u8> {
    let mut written = Vec::with_capacity(bytes.len() + 4);
    write_number(&mut written, number << 3 | 2);
    write_number(&mut written, bytes.len() as u64);
    written.extend(bytes);
    written
}

/// The mapping: extents of users and of groups. All that is outside has to be known.
fn mapping(field: &Field<'_>, moved: &dyn Fn(u64) -> Option<u64>) -> Changed {
    let Value::Bytes(extent) = field.value else { return Ok(None) };
    let changed = rewrite(extent, &|field| match field {
        Field { number: LOWER_FIRST, value: Value::Number(id), .. } => {
            let mut written = Vec::new();
            write_number(&mut written, LOWER_FIRST << 3);
            write_number(&mut written, moved(*id).ok_or_else(|| bad("a mapping of ids that were not its own"))?);
            Ok(Some(written))
        }
        _ => Ok(None),
    })?;
    Ok(Some(bytes_field(field.number, &changed)))
}

/// Options of a mount: `uid=` and `gid=`.
fn options(field: &Field<'_>, moved: &dyn Fn(u64) -> Option<u64>) -> Option<Vec<u8>> {
    let Value::Bytes(text) = field.value else { return None };
    let text = std::str::from_utf8(text).ok()?;
    let mut is_changed = false;
    let changed: Vec<String> = text
        .split(',')
        .map(|option| {
            let id = option.split_once('=').filter(|(name, _)| matches!(*name, "uid" | "gid"));
            match id.and_then(|(name, id)| Some((name, moved(id.parse().ok()?)?))) {
                Some((name, id)) => {
                    is_changed = true;
                    format!("{name}={id}")
                }
                None => option.to_owned(),
            }
        })
        .collect();
    is_changed.then(|| bytes_field(field.number, changed.join(",").as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(base: u32) -> IdRange {
        IdRange { base, count: IdRange::COUNT }
    }

    fn image(messages: &[Vec<u8>]) -> Vec<u8> {
        let mut image = b"magicsof".to_vec();
        for message in messages {
            image.extend((message.len() as u32).to_le_bytes());
            image.extend(message);
        }
        image
    }

    fn extent(inside: u64, outside: u64, count: u64) -> Vec<u8> {
        let mut written = Vec::new();
        for (number, value) in [(1, inside), (2, outside), (3, count)] {
            write_number(&mut written, number << 3);
            write_number(&mut written, value);
        }
        written
    }

    #[test]
    fn mappings_and_options_move_to_another_range() {
        let folder = tempfile::tempdir().unwrap();
        let userns = |base: u64| {
            let both = [bytes_field(1, &extent(0, base, 1000)), bytes_field(2, &extent(1000, base + 1000, 64_536))];
            image(&[both.concat()])
        };
        let mounts = |base: u64| {
            let text = format!("size=65536k,mode=755,uid={base},gid={},inode64", base + 5);
            let mut fixed = vec![4 << 3 | 1];
            fixed.extend([9; 8]);
            let first = [bytes_field(7, b"/dev"), fixed, bytes_field(9, text.as_bytes())].concat();
            image(&[first, bytes_field(9, b"uid=12,newinstance")])
        };
        let (old, new) = (range(1 << 29), range((1 << 29) + (3 << 16)));
        fs::write(folder.path().join("userns-9.img"), userns(old.base.into())).unwrap();
        fs::write(folder.path().join("mountpoints-12.img"), mounts(old.base.into())).unwrap();
        fs::write(folder.path().join("core-1.img"), "as it is").unwrap();
        renumber(folder.path(), old, old).unwrap();
        assert_eq!(fs::read(folder.path().join("userns-9.img")).unwrap(), userns(old.base.into()));
        renumber(folder.path(), old, new).unwrap();
        assert_eq!(fs::read(folder.path().join("userns-9.img")).unwrap(), userns(new.base.into()));
        assert_eq!(fs::read(folder.path().join("mountpoints-12.img")).unwrap(), mounts(new.base.into()));
        assert_eq!(fs::read(folder.path().join("core-1.img")).unwrap(), b"as it is");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        let (old, new) = (range(1 << 29), range(1 << 30));
        let folder = tempfile::tempdir().unwrap();
        assert!(renumber(folder.path(), old, new).is_err(), "no mapping at all");
        let path = folder.path().join("userns-9.img");
        let foreign = image(&[bytes_field(1, &extent(0, 5, 1000))]);
        let whole = image(&[bytes_field(1, &extent(0, 1 << 29, 1000))]);
        for torn in [b"mag".to_vec(), foreign, whole[..whole.len() - 1].to_vec()] {
            fs::write(&path, torn).unwrap();
            assert!(renumber(folder.path(), old, new).is_err());
        }
        fs::write(&path, whole).unwrap();
        renumber(folder.path(), old, new).unwrap();
    }
}
