//! Files in an instance, through its agent.

use async_trait::async_trait;
use viv_agent::proto::{Answer, Request};
use viv_core::SandboxId;
use viv_core::file::{ArchiveBounds, DirListing, FileStat, Unpacked, WatchEvent};
use viv_provider::{ByteReader, FileWrite, InstanceRef, Mutation, ProviderError, WatchStream};

use super::agent_client::{ANSWER_WITHIN_MS, Conversation, expected, fence};
use super::{LocalProvider, Result, within};

impl LocalProvider {
    pub(super) async fn read_file(
        &self,
        instance: &InstanceRef,
        path: &str,
        offset: u64,
        length: Option<u64>,
    ) -> Result<ByteReader> {
        let request = Request::FileRead { path: path.to_owned(), offset, length };
        let (conversation, answer) = self.streaming(instance, &request).await?;
        expected!(answer, Answer::Stat(_) => conversation.into_body())
    }

    pub(super) async fn write_file(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        file: &FileWrite,
        content: ByteReader,
    ) -> Result<FileStat> {
        let FileWrite { path, mode, user } = file.clone();
        let request = Request::FileWrite { fence: fence(mutation), path, mode, user };
        expected!(self.upload(mutation, sandbox, &request, content).await?, Answer::Stat(stat) => stat)
    }

    pub(super) async fn stat_file(&self, instance: &InstanceRef, path: &str) -> Result<FileStat> {
        let request = Request::FileStat { path: path.to_owned() };
        expected!(self.query(instance, &request).await?, Answer::Stat(stat) => stat)
    }

    pub(super) async fn list_files(&self, instance: &InstanceRef, path: &str, depth: u32) -> Result<DirListing> {
        let request = Request::FileList { path: path.to_owned(), depth };
        expected!(self.query(instance, &request).await?, Answer::Listing(listing) => listing)
    }

    pub(super) async fn make_directory(&self, mutation: &Mutation, sandbox: &SandboxId, path: &str) -> Result<()> {
        let request = Request::FileMkdir { fence: fence(mutation), path: path.to_owned() };
        self.change(mutation, sandbox, &request).await.map(|_| ())
    }

    pub(super) async fn move_file(&self, mutation: &Mutation, sandbox: &SandboxId, from: &str, to: &str) -> Result<()> {
        let request = Request::FileMove { fence: fence(mutation), from: from.to_owned(), to: to.to_owned() };
        self.change(mutation, sandbox, &request).await.map(|_| ())
    }

    pub(super) async fn remove_file(&self, mutation: &Mutation, sandbox: &SandboxId, path: &str) -> Result<()> {
        let request = Request::FileRemove { fence: fence(mutation), path: path.to_owned() };
        self.change(mutation, sandbox, &request).await.map(|_| ())
    }

    pub(super) async fn watch_files(
        &self,
        instance: &InstanceRef,
        path: &str,
        recursive: bool,
    ) -> Result<Box<dyn WatchStream>> {
        let request = Request::FileWatch { path: path.to_owned(), recursive };
        let (conversation, answer) = self.streaming(instance, &request).await?;
        expected!(answer, Answer::Done => Box::new(Watch { conversation }) as Box<dyn WatchStream>)
    }

    pub(super) async fn get_archive(&self, instance: &InstanceRef, path: &str) -> Result<ByteReader> {
        let (conversation, answer) = self.streaming(instance, &Request::ArchiveGet { path: path.to_owned() }).await?;
        expected!(answer, Answer::Done => conversation.into_body())
    }

    pub(super) async fn put_archive(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        path: &str,
        bounds: ArchiveBounds,
        archive: ByteReader,
    ) -> Result<Unpacked> {
        let request = Request::ArchivePut { fence: fence(mutation), path: path.to_owned(), bounds };
        expected!(self.upload(mutation, sandbox, &request, archive).await?, Answer::Unpacked(unpacked) => unpacked)
    }

    /// Starts a conversation that goes on after its first answer.
    pub(super) async fn streaming(&self, instance: &InstanceRef, request: &Request) -> Result<(Conversation, Answer)> {
        within(ANSWER_WITHIN_MS, "the agent", self.converse(instance, request)).await
    }
}

struct Watch {
    conversation: Conversation,
}

#[async_trait]
impl WatchStream for Watch {
    async fn next(&mut self) -> Result<Option<WatchEvent>> {
        match self.conversation.message().await {
            Ok(event) => Ok(event),
            Err(source) => Err(ProviderError::Unavailable { what: "the agent".to_owned(), source }),
        }
    }
}
