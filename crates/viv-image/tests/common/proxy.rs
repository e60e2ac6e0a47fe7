//! A proxy on the level of TCP that counts, and cuts.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Between a client and a server. Its threads end with the connections.
pub struct Proxy {
    pub port: u16,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// Bytes from the server to the client.
    down: AtomicU64,
    /// Connections that are cut after this many bytes, while there are cuts left.
    cut_after: AtomicU64,
    cuts_left: AtomicU64,
}

impl Proxy {
    pub fn start(to_port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(State::default());
        let shared = state.clone();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), Ok(server)) = (client, TcpStream::connect(("127.0.0.1", to_port))) else { continue };
                let state = shared.clone();
                let (up_from, up_to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                std::thread::spawn(move || pump(up_from, up_to, |_| true));
                std::thread::spawn(move || {
                    let mut passed = 0;
                    pump(server, client, |count| {
                        state.down.fetch_add(count, Ordering::SeqCst);
                        passed += count;
                        let over = passed >= state.cut_after.load(Ordering::SeqCst);
                        let cut = over
                            && state
                                .cuts_left
                                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1))
                                .is_ok();
                        !cut
                    });
                });
            }
        });
        Self { port, state }
    }

    pub fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Cuts the next connections that send this much.
    pub fn cut(&self, after_bytes: u64, times: u64) {
        self.state.cut_after.store(after_bytes, Ordering::SeqCst);
        self.state.cuts_left.store(times, Ordering::SeqCst);
    }

    pub fn cuts_left(&self) -> u64 {
        self.state.cuts_left.load(Ordering::SeqCst)
    }

    /// Bytes that came down since the last call.
    pub fn take_down(&self) -> u64 {
        self.state.down.swap(0, Ordering::SeqCst)
    }
}

fn pump(mut from: TcpStream, mut to: TcpStream, mut go_on: impl FnMut(u64) -> bool) {
    let mut buffer = [0; 16 << 10];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        if to.write_all(&buffer[..count]).is_err() || !go_on(count as u64) {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
