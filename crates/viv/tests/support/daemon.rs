//! A house in which one real daemon lives, killed and started again at will.

use std::ops::Deref;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use viv_api::client::{Client, SandboxHandle};
use viv_api::diagnosis::HostView;
use viv_api::execution::{Execution, OutputLine, StartExecution};
use viv_api::sandbox::{CreateSandbox, Sandbox, Status};
use viv_core::SandboxId;

use super::restart::{self, House};

/// How long a daemon may take to start, or a sandbox to be made, with all tests at once.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A daemon on ground of its own.
pub struct Daemon {
    // Before the house: its sandboxes are cleared away when nobody makes new ones.
    process: Option<restart::Daemon>,
    client: Option<Client>,
    house: House,
}

impl Deref for Daemon {
    type Target = House;

    fn deref(&self) -> &House {
        &self.house
    }
}

impl Daemon {
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// With more arguments of `viv serve`.
    pub fn start_with(arguments: &[&str]) -> Self {
        let mut daemon = Self::prepare(arguments);
        daemon.run(&[]);
        daemon
    }

    /// The ground alone, on which nothing runs yet.
    pub fn prepare(arguments: &[&str]) -> Self {
        Self::in_house(House::with_arguments(arguments))
    }

    /// On ground that somebody prepared.
    pub fn in_house(house: House) -> Self {
        Self { process: None, client: None, house }
    }

    /// The same, when it serves.
    #[must_use]
    pub fn running(mut self) -> Self {
        self.run(&[]);
        self
    }

    /// Starts the process, with more environment, and waits until it listens.
    pub fn run(&mut self, env: &[(&str, &str)]) {
        assert!(self.process.is_none(), "it runs already");
        let process = self.house.start_with(env);
        self.client = Some(process.client());
        self.process = Some(process);
    }

    pub fn client(&self) -> &Client {
        self.client.as_ref().expect("it listens")
    }

    fn process(&mut self) -> restart::Daemon {
        self.client = None;
        self.process.take().expect("it runs")
    }

    pub fn pid(&self) -> u32 {
        self.process.as_ref().expect("it runs").pid()
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        self.process().kill();
    }

    /// Asks it to end, and waits for that.
    pub fn end(&mut self) {
        let mut process = self.process();
        process.signal(Signal::TERM);
        let status = process.wait();
        assert!(status.success(), "it ended as {status}\n{}", self.said());
    }

    /// Waits for an end that comes by itself, at a failpoint.
    pub fn wait(&mut self) -> ExitStatus {
        self.process().wait()
    }

    /// Starts again on the same folder.
    pub fn restart(&mut self) {
        self.run(&[]);
    }

    /// A sandbox that is ready.
    pub fn create(&self) -> Sandbox {
        self.create_from(&CreateSandbox::default())
    }

    pub fn create_from(&self, request: &CreateSandbox) -> Sandbox {
        let made = self.client().create(request, None).unwrap().into_sandbox();
        assert_eq!(made.status, Status::Ready, "{made:#?}");
        made
    }

    pub fn sandbox(&self, id: &SandboxId) -> SandboxHandle<'_> {
        self.client().sandbox(id)
    }

    /// Where its parts are, as the diagnosis tells an operator.
    pub fn host(&self, id: &SandboxId) -> HostView {
        self.sandbox(id).diagnosis().unwrap().host.expect("an admin is told")
    }

    /// Waits until it is shown like this.
    pub fn wait_for(&self, id: &SandboxId, what: &str, so: impl Fn(&Sandbox) -> bool) -> Sandbox {
        let mut seen = None;
        let until = Instant::now() + PATIENCE;
        loop {
            let now = self.sandbox(id).get().unwrap();
            if so(&now) {
                return now;
            }
            assert!(Instant::now() < until, "not so after {PATIENCE:?}: {what}: {now:#?}\nbefore: {seen:#?}");
            seen = Some(now.status);
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Deletes it and sees that it is over.
    pub fn remove(&self, id: &SandboxId) {
        let over = self.sandbox(id).delete(None).unwrap().into_sandbox();
        assert_eq!((over.status, over.deleted), (Status::Stopped, true), "{over:#?}");
    }

    /// Folders of instances: each is one at the provider.
    pub fn instances(&self) -> Vec<PathBuf> {
        self.house.instance_folders()
    }
}

/// Runs a script to its end: what it said, and how it ended.
pub fn run(sandbox: &SandboxHandle<'_>, script: &str) -> (String, Execution) {
    let started = sandbox.start(&StartExecution::of(["/bin/sh", "-c", script]).unwrap(), None).unwrap();
    let mut said = Vec::new();
    for line in sandbox.execution(started.id).follow(0) {
        match line.unwrap() {
            OutputLine::Chunk(chunk) => said.extend(chunk.data().unwrap()),
            OutputLine::Cut(cut) => panic!("output was cut: {cut:?}"),
            OutputLine::End(end) => return (String::from_utf8_lossy(&said).into_owned(), *end.end),
            OutputLine::Alive(_) => {}
        }
    }
    panic!("an output without an end")
}
