//! Whether a store is as it should be.

use std::collections::BTreeSet;
use std::fs;
use std::io;

use serde::Serialize;
use viv_core::SnapshotId;
use viv_provider::Integrity;

use super::Store;
use super::layer::{LayerId, LayerMeta};
use super::plan::MadeOf;
use super::snapshot::SnapshotFile;
use crate::checkpoint::MemoryDir;

/// What a check found.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Checked {
    /// Layers that were looked at.
    pub layers: u64,
    /// Snapshots that were looked at.
    pub snapshots: u64,
    /// Images that were looked at.
    pub images: u64,
    /// What is wrong: something that was acknowledged is not there, or not what it was.
    pub damage: Vec<String>,
    /// What could not be looked at: nothing is known about it.
    pub unreadable: Vec<String>,
    /// What was left by processes that died, or is not used any more. It does no harm, and collecting removes it.
    pub leftovers: Vec<String>,
}

impl Checked {
    /// Whether nothing is wrong, as far as anything shows.
    pub fn is_clean(&self) -> bool {
        self.damage.is_empty() && self.unreadable.is_empty()
    }
}

impl Store {
    /// Looks at everything; with `deep`, at the content of every file too. Layers that are found damaged are marked,
    /// so that nothing is made from them.
    pub(crate) fn check(&self, deep: bool) -> io::Result<Checked> {
        let mut checked = Checked::default();
        // Nobody collects meanwhile, so what is referred to has to be there.
        let _lock = self.lock_shared()?;
        let mut known = BTreeSet::new();
        for (id, meta) in self.layers()? {
            checked.layers += 1;
            known.insert(id.clone());
            match meta {
                Err(error) => checked.damage.push(format!("layer {id}: its file cannot be read: {error}")),
                Ok(meta) => match self.check_layer(&meta, deep) {
                    Ok(None) => {}
                    Ok(Some(wrong)) => checked.damage.push(format!("layer {id}: {wrong}")),
                    Err(error) => checked.unreadable.push(format!("layer {id}: {error}")),
                },
            }
        }
        self.check_records(&known, deep, &mut checked)?;
        self.find_leftovers(&known, &mut checked)?;
        Ok(checked)
    }

    /// Looks whether what was saved is as it was sealed, before anything is made of it: names, sizes, modes, owners and
    /// times, in proportion to the number of files. A root that lacks files would pass every probe (T2). What was found
    /// damaged before is looked at closely, so that what somebody put right can be used again.
    pub(crate) fn check_saved(&self, of: &MadeOf) -> io::Result<()> {
        for layer in &of.saved {
            if let Some(wrong) = self.check_layer(&self.need_layer(layer)?, false)? {
                let what = format!("the layer {layer} is damaged: {wrong}");
                return Err(io::Error::new(io::ErrorKind::InvalidData, what));
            }
        }
        Ok(())
    }

    /// What is wrong with a layer, if anything is. Not being able to look is not damage.
    fn check_layer(&self, meta: &LayerMeta, deep: bool) -> io::Result<Option<String>> {
        // What only a close look has found is not put right by a quick one.
        let deep = deep || meta.integrity == Integrity::Damaged;
        let wrong = match self.look_into(meta, deep) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Some("its content is missing".to_owned()),
            looked => looked?,
        };
        let looked_at = meta.sealed_at_ms;
        self.update_layer(&meta.id, |meta| {
            if meta.sealed_at_ms != looked_at {
                // It was replaced meanwhile.
                return;
            }
            meta.integrity = match (&wrong, &meta.content) {
                (Some(_), _) => Integrity::Damaged,
                // Somebody put right what was wrong.
                (None, Some(_)) => Integrity::Verified,
                (None, None) => Integrity::Pending,
            };
        })?;
        Ok(wrong)
    }

    fn look_into(&self, meta: &LayerMeta, deep: bool) -> io::Result<Option<String>> {
        let opened = self.open_layer(meta)?;
        let found = viv_layer::survey(&opened.parts())?;
        if !found.same_structure(&meta.survey) {
            let (now, then) = (found.entries, meta.survey.entries);
            return Ok(Some(format!("names, sizes, modes or owners changed ({then} entries then, {now} now)")));
        }
        if deep
            && let Some(content) = &meta.content
            && viv_layer::content(&opened.parts())? != *content
        {
            return Ok(Some("the content of a file changed".to_owned()));
        }
        Ok(None)
    }

    /// What is wrong with the memory of a snapshot, if anything is: nobody goes on with it then, but for the files of the
    /// snapshot that is no reason. What only a close look finds is noted, so that others tell it too.
    pub(crate) fn check_memory(&self, id: &SnapshotId, deep: bool) -> io::Result<Option<String>> {
        MemoryDir::new(self.data().memory().join(id.as_str())).check(deep)
    }

    fn check_records(&self, known: &BTreeSet<LayerId>, deep: bool, checked: &mut Checked) -> io::Result<()> {
        // One that was made since the layers were listed is not missing.
        let is_missing = |layer: &LayerId| !known.contains(layer) && matches!(self.layer(layer), Ok(None));
        let damage = |who: String, of: &MadeOf, damage: &mut Vec<String>| {
            for layer in of.layers().filter(|layer| is_missing(layer)) {
                damage.push(format!("{who}: its layer {layer} is missing"));
            }
        };
        for (id, file) in self.all_snapshots()? {
            match file {
                Err(error) => checked.damage.push(format!("snapshot {id}: its record cannot be read: {error}")),
                Ok(SnapshotFile::Kept(record)) => {
                    checked.snapshots += 1;
                    damage(format!("snapshot {id}"), &record.of, &mut checked.damage);
                    if record.snapshot.memory {
                        match self.check_memory(&id, deep) {
                            Ok(None) => {}
                            Ok(Some(wrong)) => {
                                checked.damage.push(format!("snapshot {id}: its memory, and not its files: {wrong}"));
                            }
                            Err(error) => checked.unreadable.push(format!("snapshot {id}: its memory: {error}")),
                        }
                    }
                }
                Ok(SnapshotFile::Removed { .. }) => {}
            }
        }
        for (name, record) in self.images()? {
            checked.images += 1;
            match record.and_then(|record| record.layer_ids()) {
                Err(error) => checked.damage.push(format!("image {name}: its record cannot be read: {error}")),
                Ok(layers) => {
                    for layer in layers.iter().filter(|layer| is_missing(layer)) {
                        checked.damage.push(format!("image {name}: its layer {layer} is missing"));
                    }
                }
            }
        }
        for entry in fs::read_dir(self.data().instances())? {
            let name = entry?.file_name();
            let Some(sandbox) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
            match self.data().instance(&sandbox).read_record() {
                Ok(Some(record)) => {
                    if let Some(made) = record.made {
                        damage(record.instance.to_string(), &made.of, &mut checked.damage);
                    }
                }
                Ok(None) => {}
                Err(error) => checked.unreadable.push(format!("{sandbox}: its record: {error}")),
            }
        }
        Ok(())
    }

    /// What was left by processes that died, or is not used any more; `None` while somebody builds.
    pub(crate) fn leftovers(&self) -> io::Result<Option<Vec<String>>> {
        let Some(_lock) = self.lock_exclusive()? else { return Ok(None) };
        let known: BTreeSet<_> = self.layers()?.into_iter().map(|(id, _)| id).collect();
        let mut checked = Checked::default();
        self.find_leftovers(&known, &mut checked)?;
        Ok(Some(checked.leftovers))
    }

    fn find_leftovers(&self, known: &BTreeSet<LayerId>, checked: &mut Checked) -> io::Result<()> {
        // What cannot be read was told above.
        let Ok(references) = self.references() else { return Ok(()) };
        for layer in known.iter().filter(|layer| references.of(layer) == 0) {
            checked.leftovers.push(format!("layer {layer}: nothing refers to it"));
        }
        for entry in fs::read_dir(self.sealed())? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if let Ok(id) = name.parse::<LayerId>()
                && !known.contains(&id)
                && references.of(&id) == 0
            {
                checked.leftovers.push(format!("sealed/{name}: it never became a layer"));
            }
        }
        let active = references.active_folders(self);
        for (folder, place) in [("tmp", self.tmp()), ("active", self.active())] {
            for entry in fs::read_dir(place)? {
                let entry = entry?;
                if active.contains(&entry.path()) {
                    continue;
                }
                checked.leftovers.push(format!("{folder}/{}", entry.file_name().to_string_lossy()));
            }
        }
        Ok(())
    }
}
