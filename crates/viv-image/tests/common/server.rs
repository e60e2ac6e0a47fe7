//! A tiny HTTP server whose answers a test makes up. One request for each connection.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

#[derive(Debug, Clone, Default)]
pub struct Request {
    pub method: String,
    /// With the query.
    pub path: String,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }
}

#[derive(Debug, Clone, Default)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Sends only this much of the body, then closes.
    pub cut_at: Option<usize>,
    /// Says nothing for this long before the body.
    pub silence: Duration,
    /// Sends the body in chunks, without saying how long it is.
    pub endless: bool,
}

impl Answer {
    pub fn ok(body: impl Into<Vec<u8>>) -> Self {
        Self::of(200, body)
    }

    pub fn of(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self { status, body: body.into(), ..Self::default() }
    }

    pub fn with(mut self, name: &str, value: impl std::fmt::Display) -> Self {
        self.headers.push((name.to_owned(), value.to_string()));
        self
    }
}

pub struct Server {
    pub port: u16,
    seen: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    pub fn start(answer: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = seen.clone();
        let answer = Arc::new(answer);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (answer, log) = (answer.clone(), log.clone());
                std::thread::spawn(move || serve(&stream, &*answer, &log));
            }
        });
        Self { port, seen }
    }

    pub fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub fn seen(&self) -> Vec<Request> {
        self.seen.lock().unwrap().clone()
    }
}

fn serve(stream: &TcpStream, answer: &dyn Fn(&Request) -> Answer, log: &Mutex<Vec<Request>>) -> Option<()> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line.split_whitespace();
    let mut request = Request { method: words.next()?.to_owned(), path: words.next()?.to_owned(), headers: Vec::new() };
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        request.headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    let length: u64 = request.header("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
    std::io::copy(&mut reader.by_ref().take(length), &mut std::io::sink()).ok()?;
    log.lock().unwrap().push(request.clone());
    write_answer(stream, &answer(&request), request.method == "HEAD")
}

fn write_answer(mut stream: &TcpStream, answer: &Answer, head: bool) -> Option<()> {
    let mut head_bytes = Vec::new();
    write!(head_bytes, "HTTP/1.1 {} X\r\nconnection: close\r\n", answer.status).ok()?;
    for (name, value) in &answer.headers {
        write!(head_bytes, "{name}: {value}\r\n").ok()?;
    }
    if answer.endless {
        write!(head_bytes, "transfer-encoding: chunked\r\n\r\n").ok()?;
        stream.write_all(&head_bytes).ok()?;
        let chunk = vec![b'x'; 64 << 10];
        loop {
            stream.write_all(b"10000\r\n").and_then(|()| stream.write_all(&chunk)).ok()?;
            stream.write_all(b"\r\n").ok()?;
        }
    }
    write!(head_bytes, "content-length: {}\r\n\r\n", answer.body.len()).ok()?;
    stream.write_all(&head_bytes).ok()?;
    std::thread::sleep(answer.silence);
    if !head {
        let sent = answer.cut_at.unwrap_or(answer.body.len());
        stream.write_all(&answer.body[..sent]).ok()?;
    }
    Some(())
}
