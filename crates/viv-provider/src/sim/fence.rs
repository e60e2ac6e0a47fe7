//! Who may still change a sandbox (L15): one record for each, which outlives its instances.
//!
//! The rule is [`viv_core::fence`]'s. Every mutation of an instance passes [`Fences::admit`], and every other one
//! [`Fences::admit_token`]; nothing else compares tokens or generations.

use std::collections::BTreeMap;

use viv_core::fence::{self, Intent};
use viv_core::{FencingToken, Generation, OperationId, SandboxId};

use crate::error::ProviderError;
use crate::instance::{Ended, InstanceRef, Mutation};

/// What is to be done about an admitted mutation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Admission {
    /// The work.
    Work,
    /// Nothing: it was done before.
    Done,
}

/// How the last generation stands.
#[derive(Debug, Clone)]
enum Standing {
    /// It was made by this operation and was not destroyed, so it has an instance.
    Lives { made_by: OperationId },
    /// It was destroyed, or may never be made.
    Gone(Ended),
}

/// What is known about a sandbox for ever.
#[derive(Debug, Clone)]
struct Fence {
    highest: FencingToken,
    /// The last generation; `None` when only refused calls were seen.
    last: Option<(Generation, Standing)>,
}

impl Fence {
    fn rule(&self) -> fence::Fence {
        let last = self.last.as_ref().map(|(generation, standing)| match standing {
            Standing::Lives { .. } => (*generation, fence::Standing::Made),
            Standing::Gone(_) => (*generation, fence::Standing::Buried),
        });
        fence::Fence { token: self.highest, last }
    }
}

/// All fences.
#[derive(Debug, Clone, Default)]
pub(super) struct Fences {
    by_sandbox: BTreeMap<SandboxId, Fence>,
}

impl Fences {
    /// Decides whether a mutation may happen: first by its token, then by its generation.
    pub(super) fn admit(
        &mut self,
        sandbox: &SandboxId,
        mutation: &Mutation,
        intent: Intent,
    ) -> Result<Admission, ProviderError> {
        let fence = self.raised(sandbox, mutation.token)?;
        fence::admit(Some(&fence.rule()), intent, mutation.generation, mutation.token)?;
        match &fence.last {
            Some((current, Standing::Lives { made_by })) => admit_living(*current, made_by, mutation, intent),
            Some((current, Standing::Gone(_))) if intent == Intent::End && mutation.generation == *current => {
                Ok(Admission::Done)
            }
            None | Some((_, Standing::Gone(_))) => Ok(Admission::Work),
        }
    }

    /// Decides whether what belongs to no generation may be changed: by its token alone.
    pub(super) fn admit_token(&mut self, sandbox: &SandboxId, token: FencingToken) -> Result<(), ProviderError> {
        self.raised(sandbox, token).map(drop)
    }

    /// The fence, with a token that is no older than the highest as its highest.
    fn raised(&mut self, sandbox: &SandboxId, token: FencingToken) -> Result<&Fence, ProviderError> {
        let fence = self.by_sandbox.entry(sandbox.clone()).or_insert(Fence { highest: token, last: None });
        fence::admit_token(&fence.rule(), token)?;
        fence.highest = token;
        Ok(fence)
    }

    /// Decides whether a read may happen.
    pub(super) fn admit_read(&self, instance: &InstanceRef) -> Result<(), ProviderError> {
        match self.by_sandbox.get(&instance.sandbox).and_then(|fence| fence.last.as_ref()) {
            Some((current, _)) if *current != instance.generation => {
                Err(ProviderError::StaleGeneration { asked: instance.generation, current: *current })
            }
            Some((_, Standing::Lives { .. })) => Ok(()),
            Some((_, Standing::Gone(_))) | None => Err(ProviderError::Absent),
        }
    }

    /// How a generation ended, if it is the last one and was destroyed.
    pub(super) fn tombstone(&self, instance: &InstanceRef) -> Option<&Ended> {
        match self.by_sandbox.get(&instance.sandbox)?.last.as_ref()? {
            (generation, Standing::Gone(ended)) if *generation == instance.generation => Some(ended),
            _ => None,
        }
    }

    /// Remembers that a generation was made. Only after [`Fences::admit`] said so.
    pub(super) fn made(&mut self, sandbox: &SandboxId, mutation: &Mutation) {
        let standing = Standing::Lives { made_by: mutation.operation.clone() };
        self.set(sandbox, mutation, standing);
    }

    /// Remembers that a generation is gone for ever. Only after [`Fences::admit`] said so.
    pub(super) fn bury(&mut self, sandbox: &SandboxId, mutation: &Mutation, ended: Ended) {
        self.set(sandbox, mutation, Standing::Gone(ended));
    }

    fn set(&mut self, sandbox: &SandboxId, mutation: &Mutation, standing: Standing) {
        let last = Some((mutation.generation, standing));
        self.by_sandbox.insert(sandbox.clone(), Fence { highest: mutation.token, last });
    }
}

/// The last generation is there, alive or ended.
fn admit_living(
    current: Generation,
    made_by: &OperationId,
    mutation: &Mutation,
    intent: Intent,
) -> Result<Admission, ProviderError> {
    match intent {
        Intent::Make if mutation.generation == current && mutation.operation == *made_by => Ok(Admission::Done),
        Intent::Make => {
            Err(ProviderError::Conflict { what: format!("generation {current} is there; destroy it first") })
        }
        Intent::End | Intent::Change if mutation.generation == current => Ok(Admission::Work),
        Intent::End | Intent::Change => Err(ProviderError::StaleGeneration { asked: mutation.generation, current }),
    }
}
