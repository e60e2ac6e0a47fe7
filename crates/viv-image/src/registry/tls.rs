//! Whom to believe.

use std::io;
use std::path::Path;

use ureq::tls::{Certificate, PemItem, parse_pem};

use super::RegistryError;
use crate::files::{Links, open_regular, read_bounded};
use crate::limits::SETTINGS_BYTES_MAX;

/// Where distributions keep the authorities that the machine trusts: Debian and Alpine, Fedora, SUSE.
const SYSTEM_FILES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// The machine's authorities and the caller's. A machine without any can still speak to plain registries.
pub(super) fn roots(extra: Option<&Path>) -> Result<Vec<Certificate<'static>>, RegistryError> {
    let mut roots = Vec::new();
    for path in SYSTEM_FILES.iter().map(Path::new) {
        match read(path) {
            Ok(found) => {
                roots.extend(found);
                break;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(RegistryError::Certificates { path: path.to_owned(), source }),
        }
    }
    if let Some(path) = extra {
        let failed = |source| RegistryError::Certificates { path: path.to_owned(), source };
        let found = read(path).map_err(failed)?;
        if found.is_empty() {
            return Err(failed(io::Error::new(io::ErrorKind::InvalidData, "there is no certificate in it")));
        }
        roots.extend(found);
    }
    Ok(roots)
}

fn read(path: &Path) -> io::Result<Vec<Certificate<'static>>> {
    let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let file = open_regular(path, Links::Follow)?;
    let bytes = read_bounded(file, SETTINGS_BYTES_MAX)?.ok_or_else(|| invalid("it is too long"))?;
    let mut found = Vec::new();
    for item in parse_pem(&bytes) {
        if let PemItem::Certificate(certificate) = item.map_err(|error| invalid(&error.to_string()))? {
            found.push(certificate);
        }
    }
    Ok(found)
}
