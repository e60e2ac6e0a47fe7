//! Debian's registry, and a way to it that counts, listens and stops.
#![allow(dead_code, unreachable_pub, reason = "every test binary uses a part of this")]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

#[path = "../../../viv-image/tests/common/mod.rs"]
mod common;

pub use common::{DockerRegistry, noise};

/// A registry of this test's own; its process ends with it.
pub fn start() -> DockerRegistry {
    DockerRegistry::start().expect("docker-registry is needed (Debian: docker-registry)")
}

/// Between a client and a registry. Its threads end with the connections.
pub struct Way {
    pub port: u16,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// Bytes from the registry to the client.
    down: AtomicU64,
    /// Nothing more passes once this many have.
    stop_at: AtomicU64,
    /// Heads of requests.
    asked: Mutex<String>,
}

impl Way {
    pub fn to(registry: &DockerRegistry) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, to) = (listener.local_addr().unwrap().port(), registry.port);
        let state = Arc::new(State { stop_at: AtomicU64::new(u64::MAX), ..State::default() });
        let shared = state.clone();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), Ok(server)) = (client, TcpStream::connect(("127.0.0.1", to))) else { continue };
                let (up_from, up_to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let (up, down) = (shared.clone(), shared.clone());
                std::thread::spawn(move || {
                    pump(up_from, up_to, |bytes| up.asked.lock().unwrap().push_str(&String::from_utf8_lossy(bytes)));
                });
                std::thread::spawn(move || {
                    pump(server, client, |bytes| {
                        while down.down.load(Ordering::SeqCst) >= down.stop_at.load(Ordering::SeqCst) {
                            std::thread::sleep(Duration::from_millis(5));
                        }
                        down.down.fetch_add(bytes.len() as u64, Ordering::SeqCst);
                    });
                });
            }
        });
        Self { port, state }
    }

    /// What an image in the registry is called on this way.
    pub fn name(&self, path: &str) -> String {
        format!("127.0.0.1:{}/{path}", self.port)
    }

    /// Bytes that came down so far.
    pub fn down(&self) -> u64 {
        self.state.down.load(Ordering::SeqCst)
    }

    /// Begins to count and to listen anew.
    pub fn reset(&self) {
        self.state.down.store(0, Ordering::SeqCst);
        self.state.asked.lock().unwrap().clear();
    }

    /// Stops when this many bytes have come down; `u64::MAX` goes on.
    pub fn stop_at(&self, bytes: u64) {
        self.state.stop_at.store(bytes, Ordering::SeqCst);
    }

    /// All that was asked for, in lower case.
    pub fn asked(&self) -> String {
        self.state.asked.lock().unwrap().to_ascii_lowercase()
    }
}

fn pump(mut from: TcpStream, mut to: TcpStream, mut passes: impl FnMut(&[u8])) {
    let mut buffer = [0; 16 << 10];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        passes(&buffer[..count]);
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
