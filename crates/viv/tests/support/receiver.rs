//! Somebody who gets webhooks, and can be down, slow, choosy, or send them elsewhere.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use serde_json::Value;

/// What becomes of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mood {
    /// It is taken.
    Up,
    /// The connection is closed without a word.
    Down,
    /// It is never answered.
    Slow,
    /// It is sent elsewhere.
    Redirects(String),
    /// Those in which this word is are refused.
    Refuses(String),
}

/// One request.
#[derive(Debug, Clone)]
pub struct Heard {
    pub mood: Mood,
    pub taken: bool,
    pub delivery: String,
    pub signature: String,
    pub body: Vec<u8>,
}

impl Heard {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    pub fn seq(&self) -> u64 {
        self.json()["event"]["seq"].as_u64().unwrap()
    }

    /// Whether one of its signatures is by this secret.
    pub fn is_signed_with(&self, secret: &str) -> bool {
        let (at, macs) = self.signature.strip_prefix("t=").unwrap().split_once(",v1=").unwrap();
        let signed = [format!("{at}.").as_bytes(), &self.body].concat();
        let wanted = openssl_hmac(secret, &signed);
        macs.split(",v1=").any(|mac| mac == wanted)
    }
}

/// By another program than ours.
fn openssl_hmac(secret: &str, message: &[u8]) -> String {
    let script = "import hmac,hashlib,sys;print(hmac.new(sys.argv[1].encode(),sys.stdin.buffer.read(),hashlib.sha256).hexdigest())";
    let mut child = std::process::Command::new("python3")
        .args(["-c", script, secret])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(message).unwrap();
    let said = child.wait_with_output().unwrap();
    String::from_utf8(said.stdout).unwrap().trim().to_owned()
}

#[derive(Debug)]
struct Inner {
    mood: Mutex<Mood>,
    heard: Mutex<Vec<Heard>>,
}

/// A receiver on this machine, until the test ends.
#[derive(Debug, Clone)]
pub struct Receiver {
    pub address: SocketAddr,
    inner: Arc<Inner>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Receiver {
    pub fn start(mood: Mood) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let inner = Arc::new(Inner { mood: Mutex::new(mood), heard: Mutex::default() });
        let shared = inner.clone();
        thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let shared = shared.clone();
                thread::spawn(move || shared.serve(connection));
            }
        });
        Self { address, inner }
    }

    pub fn url(&self) -> String {
        format!("http://{}/hook?token=hidden", self.address)
    }

    pub fn be(&self, mood: Mood) {
        *locked(&self.inner.mood) = mood;
    }

    /// All that was heard, in the order in which it came.
    pub fn heard(&self) -> Vec<Heard> {
        locked(&self.inner.heard).clone()
    }

    pub fn taken(&self) -> Vec<Heard> {
        self.heard().into_iter().filter(|heard| heard.taken).collect()
    }
}

impl Inner {
    fn serve(&self, mut connection: TcpStream) {
        connection.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let Some((head, body)) = request(&mut connection) else { return };
        let header = |name: &str| {
            let line = head.lines().find(|line| line.to_lowercase().starts_with(&format!("{name}:")));
            line.and_then(|line| line.split_once(':')).map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
        };
        let mood = locked(&self.mood).clone();
        let refused = matches!(&mood, Mood::Refuses(word) if String::from_utf8_lossy(&body).contains(word.as_str()));
        let taken = mood == Mood::Up || (matches!(mood, Mood::Refuses(_)) && !refused);
        let (delivery, signature) = (header("vivarium-delivery"), header("vivarium-signature"));
        locked(&self.heard).push(Heard { mood: mood.clone(), taken, delivery, signature, body });
        let answer = match mood {
            Mood::Down => return,
            Mood::Slow => {
                thread::sleep(Duration::from_secs(30));
                return;
            }
            Mood::Redirects(to) => format!("HTTP/1.1 307 Elsewhere\r\nlocation: {to}\r\ncontent-length: 0\r\n\r\n"),
            Mood::Refuses(_) if refused => "HTTP/1.1 422 No\r\ncontent-length: 0\r\n\r\n".to_owned(),
            Mood::Up | Mood::Refuses(_) => "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n".to_owned(),
        };
        let _ = connection.write_all(answer.as_bytes());
    }
}

/// A whole request: its head, and its body.
fn request(connection: &mut TcpStream) -> Option<(String, Vec<u8>)> {
    let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
            let lower = head.to_lowercase();
            let length = lower.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
            if bytes.len() >= end + 4 + length.unwrap_or(0_usize) {
                return Some((head, bytes.split_off(end + 4)));
            }
        }
        let read = connection.read(&mut buffer).ok().filter(|read| *read > 0)?;
        bytes.extend_from_slice(&buffer[..read]);
    }
}
