//! The attempts, by what they are after.

mod calls;
mod devices;
mod files;
mod knobs;
mod mounts;
mod namespaces;
mod neighbours;
pub(crate) mod privileges;
mod processes;
mod sockets;

use crate::attempt::Attempt;

/// All of them, in the order in which they are made.
pub(crate) fn all() -> impl Iterator<Item = &'static Attempt> {
    let groups: [&'static [Attempt]; 10] = [
        knobs::ATTEMPTS,
        mounts::ATTEMPTS,
        namespaces::ATTEMPTS,
        processes::ATTEMPTS,
        calls::ATTEMPTS,
        sockets::ATTEMPTS,
        devices::ATTEMPTS,
        privileges::ATTEMPTS,
        files::ATTEMPTS,
        neighbours::ATTEMPTS,
    ];
    groups.into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    #[test]
    fn every_attempt_has_a_name_of_its_own() {
        let names: BTreeSet<_> = super::all().map(|attempt| attempt.name).collect();
        assert_eq!(names.len(), super::all().count());
        assert!(names.len() >= 90, "{}", names.len());
    }
}
