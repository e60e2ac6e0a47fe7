//! Where requests go, and where they may be sent on to.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ureq::http::Uri;

use crate::digest::shorten;

/// Docker's registry answers under another name than the images have.
const DOCKER: &str = "docker.io";
const DOCKER_HOST: &str = "registry-1.docker.io";

/// A registry, as it is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Endpoint {
    /// As references call it: what credentials are found by.
    pub(super) name: String,
    /// Host and port.
    pub(super) authority: String,
    pub(super) scheme: Scheme,
    plain: Plain,
}

/// Which hosts are spoken to without encryption.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Plain {
    /// These are.
    pub(super) listed: BTreeSet<String>,
    /// And those on loopback, but for these.
    pub(super) encrypted: BTreeSet<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scheme {
    Http,
    Https,
}

/// Why a place is not gone to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// It is no URL of HTTP.
    Malformed(String),
    /// Without encryption.
    Plain(String),
}

impl Endpoint {
    pub(super) fn new(registry: &str, plain: &Plain) -> Self {
        let authority = if registry == DOCKER { DOCKER_HOST } else { registry };
        let scheme = if plain.may_be(authority) { Scheme::Http } else { Scheme::Https };
        Self { name: registry.to_owned(), authority: authority.to_owned(), scheme, plain: plain.clone() }
    }

    /// The URL of a path of ours, whose parts are checked.
    pub(super) fn url(&self, path: &str) -> Uri {
        let scheme = match self.scheme {
            Scheme::Http => "http",
            Scheme::Https => "https",
        };
        format!("{scheme}://{}{path}", self.authority).parse().expect("hosts, repositories and digests stand in URLs")
    }

    /// Whether a URL is at the registry itself, so that it may see what is meant for the registry.
    pub(super) fn is_home(&self, url: &Uri) -> bool {
        let home = self.url("/");
        url.scheme() == home.scheme()
            && url.host().map(str::to_ascii_lowercase) == home.host().map(str::to_ascii_lowercase)
            && port(url) == port(&home)
    }

    /// A place that the registry names, if we may go there. What began encrypted stays so, even to a host that is
    /// listed for plain HTTP: a registry out there must not make us speak to services on this machine.
    pub(super) fn follow(&self, from: &Uri, location: &str) -> Result<Uri, Refused> {
        let url = join(from, location).ok_or_else(|| Refused::Malformed(shorten(location)))?;
        let authority = url.authority().map(ToString::to_string).unwrap_or_default();
        match url.scheme_str() {
            Some("https") => Ok(url),
            Some("http") if self.scheme == Scheme::Http && self.plain.may_be(&authority) => Ok(url),
            Some("http") => Err(Refused::Plain(shorten(&authority))),
            _ => Err(Refused::Malformed(shorten(location))),
        }
    }
}

fn port(url: &Uri) -> Option<u16> {
    url.port_u16().or(match url.scheme_str() {
        Some("http") => Some(80),
        Some("https") => Some(443),
        _ => None,
    })
}

impl Plain {
    fn may_be(&self, authority: &str) -> bool {
        if self.listed.contains(authority) {
            return true;
        }
        let host = match authority.strip_prefix('[') {
            Some(rest) => rest.split(']').next().unwrap_or_default(),
            None => authority.split(':').next().unwrap_or_default(),
        };
        let loopback = host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
        loopback && !self.encrypted.contains(authority)
    }
}

/// A location as HTTP allows it: whole, without the scheme, or only a path. Names with a user in them are no place.
fn join(from: &Uri, location: &str) -> Option<Uri> {
    let absolute = if location.contains("://") && !location.starts_with('/') {
        location.to_owned()
    } else if let Some(rest) = location.strip_prefix("//") {
        format!("{}://{rest}", from.scheme_str()?)
    } else {
        let (scheme, authority) = (from.scheme_str()?, from.authority()?);
        if location.starts_with('/') {
            format!("{scheme}://{authority}{location}")
        } else {
            let folder = from.path().rsplit_once('/').map_or("", |(folder, _)| folder);
            format!("{scheme}://{authority}{folder}/{location}")
        }
    };
    // What follows # is for the reader of a document, and is never sent.
    let absolute = absolute.split('#').next()?;
    let url: Uri = absolute.parse().ok()?;
    let authority = url.authority()?;
    (!authority.as_str().contains('@') && !authority.host().is_empty()).then_some(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(name: &str) -> Endpoint {
        let plain = Plain {
            listed: BTreeSet::from(["plain.example:81".to_owned()]),
            encrypted: BTreeSet::from(["localhost:5443".to_owned()]),
        };
        Endpoint::new(name, &plain)
    }

    #[test]
    fn only_loopback_and_listed_hosts_are_plain() {
        for name in ["localhost:5000", "127.0.0.1:1", "127.9.9.9", "[::1]:5000", "plain.example:81"] {
            assert_eq!(endpoint(name).scheme, Scheme::Http, "{name}");
        }
        for name in
            ["plain.example", "docker.io", "localhost:5443", "10.0.0.1:5000", "localhost.example", "127.0.0.1.example"]
        {
            assert_eq!(endpoint(name).scheme, Scheme::Https, "{name}");
        }
        assert_eq!(endpoint("docker.io").url("/v2/").to_string(), "https://registry-1.docker.io/v2/");
    }

    #[test]
    fn encryption_is_not_left_and_strange_places_are_not_gone_to() {
        let out_there = endpoint("registry.example");
        let from = out_there.url("/v2/a/blobs/x");
        assert!(out_there.follow(&from, "https://storage.example/x?y=z#w").is_ok());
        for plain in ["http://registry.example/x", "http://127.0.0.1/x", "http://plain.example:81/x"] {
            assert!(matches!(out_there.follow(&from, plain), Err(Refused::Plain(_))), "{plain}");
        }
        for strange in ["ftp://x/", "file:///etc/passwd", "https://", "https://me@registry.example/", "http:x\r\ny"] {
            assert!(matches!(out_there.follow(&from, strange), Err(Refused::Malformed(_))), "{strange}");
        }
        let here = endpoint("localhost:5000");
        assert!(here.follow(&here.url("/v2/"), "http://127.0.0.1:6000/x").is_ok());
        assert!(here.follow(&here.url("/v2/"), "http://elsewhere.example/x").is_err());
    }

    #[test]
    fn relative_places_are_of_the_same_host() {
        let home = endpoint("registry.example");
        let from = home.url("/v2/a/uploads/1?x");
        let at = |location| home.follow(&from, location).unwrap().to_string();
        assert_eq!(at("/v2/b?c"), "https://registry.example/v2/b?c");
        assert_eq!(at("2?state=z"), "https://registry.example/v2/a/uploads/2?state=z");
        assert_eq!(at("//other.example/x"), "https://other.example/x");
        assert!(home.is_home(&"https://REGISTRY.example:443/x".parse().unwrap()));
        assert!(!home.is_home(&"https://registry.example:444/x".parse().unwrap()));
        assert!(!home.is_home(&"http://registry.example/x".parse().unwrap()));
    }
}
