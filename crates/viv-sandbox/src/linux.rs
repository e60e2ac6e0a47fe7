//! Which Linux this is. For telling why something is not there; what is there is found by trying.

/// As `uname -r` has it.
pub(crate) fn release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// The first two numbers of it.
pub(crate) fn version() -> Option<(u32, u32)> {
    version_of(&release())
}

fn version_of(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_distributions_write_them() {
        let releases = ["6.1.0-50-cloud-amd64", "5.15.0-122-generic", "6.18.44-fc", "7.2", "5.14.0-503.el9.x86_64"];
        let versions = releases.map(|release| version_of(release).unwrap());
        assert_eq!(versions, [(6, 1), (5, 15), (6, 18), (7, 2), (5, 14)]);
        assert_eq!([version_of("six"), version_of("6"), version_of("")], [None, None, None]);
        assert!(version().is_some(), "{}", release());
    }
}
