//! Signed requests to somebody outside: of hooks (L14), and events to who subscribed to them (O6).
//!
//! ```text
//!   POST URL
//!   Content-Type: application/json
//!   Vivarium-Delivery: ID                      the same when it is repeated
//!   Vivarium-Signature: t=SECONDS,v1=HEX       HMAC-SHA256 of "SECONDS." and the body, with the secret; one more
//!                                              `v1` for a secret that is being replaced
//! ```
//!
//! Whoever may make a sandbox chooses the URL, and the daemon stands where they do not. So the address is looked at
//! after the name was resolved, and the connection goes to that very address: private networks, the machine itself and
//! the places at which clouds hand out credentials are refused (S2). Redirects are not followed, proxies are not used.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use sha2::{Digest, Sha256};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};
use ureq::{Agent, config::Config, http::Uri};
use viv_engine::{Delivery, Undelivered, Webhooks};

use crate::address::AddressRange;

/// Headers of an answer; nobody reads more of one than its status.
const HEADER_BYTES_MAX: usize = 64 << 10;

/// Requests that are made at once; more of them wait.
const AT_ONCE: usize = 16;

/// How webhooks are made.
#[derive(Debug, Clone, Default)]
pub struct WebhookConfig {
    /// Whether private addresses and the machine itself may be asked.
    pub private_addresses: bool,
    /// Private addresses that may be asked all the same.
    pub private_ranges: Vec<AddressRange>,
    /// Authorities to believe, as PEM.
    pub authorities_pem: Vec<u8>,
}

/// Who makes the requests. Each that is made has places of its own, so that who waits for one does not hold up another.
pub fn webhooks(config: &WebhookConfig) -> Webhooks {
    let agent = agent(config, DefaultResolver::default());
    let permits = Arc::new(tokio::sync::Semaphore::new(AT_ONCE));
    Webhooks(Arc::new(move |delivery: Delivery| {
        let (agent, permits) = (agent.clone(), permits.clone());
        Box::pin(async move {
            let permit = permits.acquire_owned().await;
            let posted = tokio::task::spawn_blocking(move || {
                // Held until the request is over, also when nobody waits for it any more.
                let _permit = permit;
                post(&agent, &delivery)
            });
            posted.await.unwrap_or_else(|error| Err(Undelivered { why: error.to_string(), is_down: false }))
        })
    }))
}

/// Who names are looked up with is given, so that a test can answer as a hostile name server would.
fn agent(config: &WebhookConfig, names: impl Resolver) -> Agent {
    let certificate = |item| match item {
        Ok(PemItem::Certificate(certificate)) => Some(certificate),
        Ok(_) | Err(_) => None,
    };
    let roots: Vec<Certificate<'static>> = parse_pem(&config.authorities_pem).filter_map(certificate).collect();
    let tls = TlsConfig::builder()
        .root_certs(RootCerts::Specific(Arc::new(roots)))
        .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .build();
    let setup = Agent::config_builder()
        .tls_config(tls)
        .max_redirects(0)
        .http_status_as_error(false)
        // Otherwise it is taken from the environment.
        .proxy(None)
        .user_agent(concat!("vivarium/", env!("CARGO_PKG_VERSION")))
        .max_response_header_size(HEADER_BYTES_MAX)
        .max_idle_connections(0)
        .build();
    Agent::with_parts(setup, DefaultConnector::default(), guarded(config, names))
}

fn guarded<R: Resolver>(config: &WebhookConfig, inner: R) -> Guarded<R> {
    Guarded { private_addresses: config.private_addresses, allowed: config.private_ranges.clone(), inner }
}

/// One try. What is said about a failure names no path and no query of the URL: those are often secrets (S6).
fn post(agent: &Agent, delivery: &Delivery) -> Result<(), Undelivered> {
    let request = agent
        .post(&delivery.url)
        .config()
        .timeout_global(Some(delivery.within))
        .build()
        .header("content-type", "application/json")
        .header("vivarium-delivery", &delivery.id)
        .header("vivarium-signature", signature(delivery));
    let down = |why: String| Undelivered { why, is_down: true };
    let answer = request.send(&delivery.body[..]).map_err(|error| match error {
        // Refused here: nobody was asked.
        ureq::Error::Io(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            Undelivered { why: error.to_string(), is_down: false }
        }
        ureq::Error::Io(error) => down(format!("cannot be reached: {}", error.kind())),
        ureq::Error::Timeout(_) => down("did not answer in time".to_owned()),
        ureq::Error::HostNotFound => down("its host is not known".to_owned()),
        ureq::Error::Tls(_) | ureq::Error::Rustls(_) => down("its certificate is not believed".to_owned()),
        _ => down("answered something that is no HTTP".to_owned()),
    })?;
    let status = answer.status();
    if status.is_success() {
        return Ok(());
    }
    // Who refuses one request may take another: many send theirs to the same host.
    let is_down = status.is_server_error() || status == ureq::http::StatusCode::TOO_MANY_REQUESTS;
    Err(Undelivered { why: format!("answered {}", status.as_u16()), is_down })
}

fn signature(delivery: &Delivery) -> String {
    let mut signed = format!("{}.", delivery.at_s).into_bytes();
    signed.extend(&delivery.body);
    let mut text = format!("t={}", delivery.at_s);
    for secret in std::iter::once(&delivery.secret).chain(&delivery.also) {
        let mac = hmac_sha256(secret.reveal().as_bytes(), &signed);
        let hex: String = mac.iter().map(|byte| format!("{byte:02x}")).collect();
        text.push_str(",v1=");
        text.push_str(&hex);
    }
    text
}

/// RFC 2104.
fn hmac_sha256(key: &[u8], message: &[u8]) -> [u8; 32] {
    const BLOCK: usize = 64;
    let mut block = [0_u8; BLOCK];
    if key.len() > BLOCK {
        block[..32].copy_from_slice(&Sha256::digest(key));
    } else {
        block[..key.len()].copy_from_slice(key);
    }
    let padded = |with: u8| block.map(|byte| byte ^ with);
    let inner = Sha256::new().chain_update(padded(0x36)).chain_update(message).finalize();
    Sha256::new().chain_update(padded(0x5c)).chain_update(inner).finalize().into()
}

/// Resolves names, and refuses those of whom nobody outside should be able to make us ask.
struct Guarded<R> {
    private_addresses: bool,
    allowed: Vec<AddressRange>,
    inner: R,
}

impl<R> fmt::Debug for Guarded<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Guarded")
    }
}

impl<R: Resolver> Resolver for Guarded<R> {
    fn resolve(&self, uri: &Uri, config: &Config, timeout: NextTimeout) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let found = self.inner.resolve(uri, config, timeout)?;
        let may = |address: IpAddr| is_public(address) || self.allowed.iter().any(|range| range.contains(address));
        if !self.private_addresses && found.iter().any(|address| !may(address.ip())) {
            let what = "is at a private address, to which this daemon makes no requests";
            return Err(ureq::Error::Io(io::Error::new(io::ErrorKind::PermissionDenied, what)));
        }
        Ok(found)
    }
}

/// Whether an address is the internet's.
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let special = address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_multicast()
        || address.is_documentation()
        || a == 0
        || a >= 240
        || (a == 100 && (64..128).contains(&b))
        || (a == 192 && b == 0 && c == 0)
        || (a == 198 && (b == 18 || b == 19));
    !special
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    // What carries an address of the older kind is judged by that.
    if let Some(inner) = address.to_ipv4_mapped() {
        return is_public_v4(inner);
    }
    let segments = address.segments();
    if segments[..6] == [0x64, 0xff9b, 0, 0, 0, 0] {
        let [.., first, second, third, last] = address.octets();
        return is_public_v4(Ipv4Addr::new(first, second, third, last));
    }
    // Global unicast, but for documentation and the tunnels that carry older addresses.
    let (first, second) = (segments[0], segments[1]);
    (first & 0xe000) == 0x2000 && first != 0x2002 && !(first == 0x2001 && (second == 0xdb8 || second == 0))
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::io::{Read, Write};
    use std::net::{SocketAddr, TcpListener};
    use std::sync::Mutex;
    use std::thread::JoinHandle;
    use std::time::Duration;

    use viv_core::hook::Secret;

    use super::*;

    fn delivery(url: String) -> Delivery {
        Delivery {
            url,
            secret: Secret::new("a secret of the tests"),
            also: Vec::new(),
            id: "op_1-after_start".to_owned(),
            at_s: 1_700_000_000,
            body: b"{\"hook\":\"after_start\"}".to_vec(),
            within: Duration::from_secs(60),
        }
    }

    /// Answers one request, and gives what was asked.
    fn server(answer: &'static str) -> (String, JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/hook?token=hidden", listener.local_addr().unwrap());
        (url, serve(listener, answer))
    }

    fn serve(listener: TcpListener, answer: &'static str) -> JoinHandle<String> {
        std::thread::spawn(move || {
            let (mut connection, _) = listener.accept().unwrap();
            let mut heard = Vec::new();
            let mut buffer = [0; 4096];
            while !heard.ends_with(b"\"after_start\"}") {
                let read = connection.read(&mut buffer).unwrap();
                assert!(read > 0, "it hung up: {}", String::from_utf8_lossy(&heard));
                heard.extend_from_slice(&buffer[..read]);
            }
            connection.write_all(answer.as_bytes()).unwrap();
            String::from_utf8(heard).unwrap()
        })
    }

    fn open() -> Agent {
        named(&WebhookConfig { private_addresses: true, ..WebhookConfig::default() })
    }

    /// With the names of this machine.
    fn named(config: &WebhookConfig) -> Agent {
        agent(config, DefaultResolver::default())
    }

    /// A name server that says something else each time, as one that means harm does.
    #[derive(Debug, Clone)]
    struct Scripted {
        answers: Arc<Mutex<VecDeque<Vec<SocketAddr>>>>,
    }

    impl Scripted {
        fn new(answers: &[&[&str]]) -> Self {
            let parsed = |answer: &&[&str]| answer.iter().map(|address| address.parse().unwrap()).collect();
            Self { answers: Arc::new(Mutex::new(answers.iter().map(parsed).collect())) }
        }

        fn left(&self) -> usize {
            self.answers.lock().unwrap().len()
        }
    }

    impl Resolver for Scripted {
        fn resolve(&self, _: &Uri, _: &Config, _: NextTimeout) -> Result<ResolvedSocketAddrs, ureq::Error> {
            let answer = self.answers.lock().unwrap().pop_front().expect("asked more often than was thought");
            let mut found = self.empty();
            for address in answer {
                found.push(address);
            }
            Ok(found)
        }
    }

    #[test]
    fn hmac_is_that_of_rfc_4231() {
        let hex = |mac: [u8; 32]| mac.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let short = hmac_sha256(b"Jefe", b"what do ya want for nothing?");
        assert_eq!(hex(short), "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
        let long = hmac_sha256(&[0xaa; 131], b"Test Using Larger Than Block-Size Key - Hash Key First");
        assert_eq!(hex(long), "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    }

    #[test]
    fn l14_a_webhook_is_signed_and_its_answer_counts() {
        let (url, heard) = server("HTTP/1.1 204 No Content\r\ncontent-length: 0\r\n\r\n");
        let delivery = delivery(url);
        assert_eq!(post(&open(), &delivery), Ok(()));
        let heard = heard.join().unwrap().to_lowercase();
        assert!(heard.contains(&format!("vivarium-signature: {}", signature(&delivery))), "{heard}");
        assert!(heard.contains("vivarium-delivery: op_1-after_start"), "{heard}");
        assert!(!heard.contains("a secret of the tests"), "S6");
    }

    #[test]
    fn o6_a_secret_that_is_being_replaced_is_signed_with_too() {
        let mut both = delivery("http://127.0.0.1".to_owned());
        let new = signature(&both);
        both.also = vec![Secret::new("the one before")];
        let old = signature(&Delivery { secret: both.also[0].clone(), also: Vec::new(), ..both.clone() });
        let old_mac = old.split_once(",v1=").unwrap().1;
        assert_eq!(signature(&both), format!("{new},v1={old_mac}"));
    }

    #[test]
    fn redirects_are_not_followed_and_errors_hold_no_secret() {
        for (answer, why, is_down) in [
            ("HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n", "answered 302", false),
            ("HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n", "answered 404", false),
            ("HTTP/1.1 429 Much\r\ncontent-length: 0\r\n\r\n", "answered 429", true),
            ("HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n", "answered 500", true),
        ] {
            let (url, heard) = server(answer);
            assert_eq!(post(&open(), &delivery(url)), Err(Undelivered { why: why.to_owned(), is_down }));
            heard.join().unwrap();
        }
        let nobody = post(&open(), &delivery("http://127.0.0.1:1/hook?token=hidden".to_owned())).unwrap_err();
        assert!(nobody.is_down && !nobody.why.contains("hidden"), "{nobody:?}");
    }

    #[test]
    fn s2_private_addresses_are_refused_unless_they_are_allowed() {
        let closed = named(&WebhookConfig::default());
        let refused = post(&closed, &delivery("http://localhost:1/".to_owned())).unwrap_err();
        assert!(refused.why.contains("private address") && !refused.is_down, "{refused:?}");
        let allowed = WebhookConfig { private_ranges: vec!["127.0.0.1".parse().unwrap()], ..WebhookConfig::default() };
        let (url, heard) = server("HTTP/1.1 204 No Content\r\ncontent-length: 0\r\n\r\n");
        assert_eq!(post(&named(&allowed), &delivery(url)), Ok(()), "what is allowed is asked");
        heard.join().unwrap();
        let other = post(&named(&allowed), &delivery("http://127.0.0.2:1/".to_owned())).unwrap_err();
        assert!(other.why.contains("private address"), "{other:?}");
        let private = [
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "224.0.0.1",
            "255.255.255.255",
            "::1",
            "::",
            "fe80::1",
            "fd00::1",
            "::ffff:127.0.0.1",
            "64:ff9b::7f00:1",
            "2002:7f00:1::",
        ];
        for address in private {
            assert!(!is_public(address.parse().unwrap()), "{address}");
        }
        for address in ["1.1.1.1", "93.184.216.34", "2606:2800:220:1::1"] {
            assert!(is_public(address.parse().unwrap()), "{address}");
        }
    }
    #[test]
    fn o6_what_was_public_is_looked_at_again_and_one_address_that_is_not_is_enough() {
        const PUBLIC: &str = "93.184.216.34:443";
        const ALSO_PUBLIC: &str = "[2606:2800:220:1::1]:443";
        let answers: [(&[&str], bool); 7] = [
            (&[PUBLIC], true),
            // The same name, a moment later.
            (&["127.0.0.1:443"], false),
            (&[PUBLIC, "127.0.0.1:443"], false),
            (&["[::ffff:169.254.169.254]:443", PUBLIC], false),
            (&[PUBLIC, ALSO_PUBLIC, "[fd00::1]:443"], false),
            (&[PUBLIC, ALSO_PUBLIC], true),
            (&["10.0.0.1:443"], false),
        ];
        let names = Scripted::new(&answers.map(|(answer, _)| answer));
        let guard = guarded(&WebhookConfig::default(), names.clone());
        let (uri, config) = (Uri::from_static("https://hooks.invalid/"), Config::default());
        for (answer, may) in answers {
            match guard.resolve(&uri, &config, NextTimeout::default()) {
                // All that is connected to is what was looked at, in that order.
                Ok(found) => {
                    let found: Vec<String> = found.iter().map(SocketAddr::to_string).collect();
                    assert!(may && found == answer, "{answer:?}: {found:?}");
                }
                Err(ureq::Error::Io(error)) => {
                    assert!(!may && error.kind() == io::ErrorKind::PermissionDenied, "{answer:?}: {error}");
                }
                Err(error) => panic!("{answer:?}: {error}"),
            }
        }
        assert_eq!(names.left(), 0);
    }

    #[test]
    fn o6_each_delivery_asks_for_the_name_once_and_goes_to_the_address_that_was_looked_at() {
        // What may be asked, and beside it on the same port what may not; somebody else may have that port there.
        let beside = |_| {
            let may = TcpListener::bind("127.0.0.2:0").unwrap();
            let port = may.local_addr().unwrap().port();
            TcpListener::bind(("127.0.0.1", port)).ok().map(|secret| (may, secret, port))
        };
        let (may, secret, port) = (0..16).find_map(beside).expect("a port that is free at both");
        let (at, closed) = (format!("127.0.0.2:{port}"), format!("127.0.0.1:{port}"));
        let names = Scripted::new(&[&[&at], &[&at], &[&closed], &[&at, &closed], &[&closed, &at]]);
        let allowed = WebhookConfig { private_ranges: vec!["127.0.0.2".parse().unwrap()], ..WebhookConfig::default() };
        let agent = agent(&allowed, names.clone());
        // Nobody else knows this name, so what arrives was sent to what the script says.
        let delivery = delivery(format!("http://hooks.invalid:{port}/"));
        let serve = || {
            // It would keep the connection: the next delivery takes another all the same.
            serve(may.try_clone().unwrap(), "HTTP/1.1 204 No Content\r\ncontent-length: 0\r\n\r\n")
        };
        for left in [4, 3] {
            let heard = serve();
            assert_eq!(post(&agent, &delivery), Ok(()));
            assert!(heard.join().unwrap().to_lowercase().contains("host: hooks.invalid"));
            assert_eq!(names.left(), left, "once for each delivery, and never from memory");
        }
        // Then the name turns to the machine itself, alone and beside the address that may be asked.
        for left in [2, 1, 0] {
            let refused = post(&agent, &delivery).unwrap_err();
            assert!(refused.why.contains("private address") && !refused.is_down, "{refused:?}");
            assert_eq!(names.left(), left);
        }
        for nobody in [&secret, &may] {
            nobody.set_nonblocking(true).unwrap();
            let kind = nobody.accept().map(|_| ()).map_err(|error| error.kind());
            assert_eq!(kind, Err(io::ErrorKind::WouldBlock), "nobody was asked");
        }
    }
}
