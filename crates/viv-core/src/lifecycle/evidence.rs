//! What was checked, when, by which path, with which outcome (T2, T3).

use serde::{Deserialize, Serialize};

use crate::id::ExecutionId;
use crate::spec::{SandboxSpec, ServiceName};

/// What a check found. Timeout, unhealthy and gone are three different findings (T7).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finding {
    /// It answered as it has to.
    Ok,
    /// It answered, and not as it has to.
    Unhealthy,
    /// It did not answer in time: nothing is known.
    Timeout,
    /// There is nothing that could answer.
    Gone,
}

/// One check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// What it found.
    pub finding: Finding,
    /// When it was made.
    pub at_ms: u64,
    /// How long it took.
    pub took_ms: u64,
    /// In words, where there is something to say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// The check of a port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortCheck {
    /// Which.
    pub port: u16,
    /// What came of it.
    pub check: Check,
}

/// The check of a service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceCheck {
    /// Which.
    pub service: ServiceName,
    /// Which start of it.
    pub execution: ExecutionId,
    /// What came of it.
    pub check: Check,
}

/// What was checked last, for one generation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evidence {
    /// A command that echoed a fresh nonce.
    pub exec: Option<Check>,
    /// The working directory and the identity file.
    pub filesystem: Option<Check>,
    /// Each port that the spec names.
    pub ports: Vec<PortCheck>,
    /// Each service that the spec names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub services: Vec<ServiceCheck>,
}

impl Evidence {
    fn checks(&self) -> impl Iterator<Item = Option<&Check>> {
        [self.exec.as_ref(), self.filesystem.as_ref()]
            .into_iter()
            .chain(self.ports.iter().map(|port| Some(&port.check)))
            .chain(self.services.iter().map(|service| Some(&service.check)))
    }

    /// The worst finding: gone before unhealthy before timeout. `None` when something was not checked at all.
    pub fn finding(&self) -> Option<Finding> {
        let rank = |finding| match finding {
            Finding::Ok => 0,
            Finding::Timeout => 1,
            Finding::Unhealthy => 2,
            Finding::Gone => 3,
        };
        let findings: Option<Vec<Finding>> = self.checks().map(|check| check.map(|check| check.finding)).collect();
        findings?.into_iter().max_by_key(|&finding| rank(finding))
    }

    /// The worst finding about an instance of this spec. `None` when something, a port or a service included, was not
    /// checked at all: what was not looked at is not well (T2).
    pub fn finding_for(&self, spec: &SandboxSpec) -> Option<Finding> {
        let port = |port: &u16| self.ports.iter().any(|check| check.port == *port);
        let service = |name: &ServiceName| self.services.iter().any(|check| check.service == *name);
        let whole = spec.ports.iter().all(port) && spec.services.iter().all(|spec| service(&spec.name));
        self.finding().filter(|&finding| finding != Finding::Ok || whole)
    }

    /// Whether services are all that is not well, and one of them was seen not to be: then they are looked at, and not
    /// the instance.
    pub fn is_about_services(&self) -> bool {
        let rest = Self { services: Vec::new(), ..self.clone() };
        let unwell = |service: &ServiceCheck| matches!(service.check.finding, Finding::Unhealthy | Finding::Gone);
        rest.finding() == Some(Finding::Ok) && self.services.iter().any(unwell)
    }

    /// When the oldest of the checks was made.
    pub fn at_ms(&self) -> Option<u64> {
        self.checks().flatten().map(|check| check.at_ms).min()
    }

    /// How long ago the oldest of the checks was made. `None` when there is none, and when one of them is from the
    /// future: the clock was set back since, and how old it is cannot be told (T3).
    pub fn age_ms(&self, now_ms: u64) -> Option<u64> {
        let ages = self.checks().flatten().map(|check| now_ms.checked_sub(check.at_ms));
        ages.collect::<Option<Vec<u64>>>()?.into_iter().max()
    }

    /// What the first bad one says.
    pub fn complaint(&self) -> Option<String> {
        let what = |name: &str, check: &Check| {
            let said = check.message.as_deref().unwrap_or("no answer");
            (check.finding != Finding::Ok).then(|| format!("{name}: {said}"))
        };
        let first = |name, check: &Option<Check>| check.as_ref().and_then(|check| what(name, check));
        first("exec", &self.exec)
            .or_else(|| first("filesystem", &self.filesystem))
            .or_else(|| self.ports.iter().find_map(|port| what(&format!("port {}", port.port), &port.check)))
            .or_else(|| self.services.iter().find_map(|one| what(&format!("service {}", one.service), &one.check)))
    }
}

impl Observed {
    /// It was looked for after it was ended, and was not there.
    pub fn absent(at_ms: u64) -> Self {
        Self { state: "absent".to_owned(), via: "record".to_owned(), at_ms }
    }

    /// Whether it was ending, had ended, or was not there.
    pub fn tells_of_an_end(&self) -> bool {
        ["ended", "ending", "absent"].iter().any(|word| self.state.starts_with(word))
    }
}

/// What the provider said.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Observed {
    /// The state, in the provider's words.
    pub state: String,
    /// How it was learnt.
    pub via: String,
    /// When.
    pub at_ms: u64,
}
