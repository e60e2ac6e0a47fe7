//! What those inside ask for, through the agent.

use std::io::ErrorKind;

use async_trait::async_trait;
use viv_agent::proto::{self, AGENT, ASK_VERB, Answer, CALL_BYTES_MAX, Request, VIV_VERB};
use viv_core::exec::ExecSpec;
use viv_core::{RequestId, SandboxId};
use viv_provider::{InsideRequest, InstanceRef, Mutation, ProviderError, RequestStream};

use super::agent_client::{Conversation, expected, fence};
use super::{LocalProvider, Result};

/// How long the command of [`spec`] waits for its answer: whoever listens may be slow to begin.
const ASK_WITHIN: &str = "60s";

/// The agent's own program is in every sandbox, also in one whose image holds no other.
pub(super) fn spec(body: &str) -> ExecSpec {
    let argv = [AGENT, VIV_VERB, "--wait", ASK_WITHIN, ASK_VERB, body].map(str::to_owned).to_vec();
    ExecSpec { argv, ..ExecSpec::default() }
}

impl LocalProvider {
    pub(super) async fn hear_requests(&self, instance: &InstanceRef) -> Result<Box<dyn RequestStream>> {
        let (conversation, answer) = self.streaming(instance, &Request::Requests).await?;
        expected!(answer, Answer::Done => Box::new(Requests { conversation }) as Box<dyn RequestStream>)
    }

    pub(super) async fn give_answer(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        request: &RequestId,
        answer: &str,
    ) -> Result<()> {
        let request = Request::RequestAnswer { fence: fence(mutation), id: request.clone(), body: answer.to_owned() };
        expected!(self.change(mutation, sandbox, &request).await?, Answer::Done => ())
    }
}

struct Requests {
    conversation: Conversation,
}

#[async_trait]
impl RequestStream for Requests {
    async fn next(&mut self) -> Result<Option<InsideRequest>> {
        match self.conversation.message::<proto::InsideRequest>().await {
            Ok(Some(request)) if request.body.len() > CALL_BYTES_MAX => {
                let what = format!("{} asks for more than {CALL_BYTES_MAX} bytes hold", request.id);
                Err(ProviderError::Failed { what })
            }
            Ok(heard) => Ok(heard.map(|proto::InsideRequest { id, again, body }| InsideRequest { id, again, body })),
            // It ended while it had something to say.
            Err(cause) if matches!(cause.kind(), ErrorKind::ConnectionReset | ErrorKind::UnexpectedEof) => Ok(None),
            Err(source) => Err(ProviderError::Unavailable { what: "the agent".to_owned(), source }),
        }
    }
}
