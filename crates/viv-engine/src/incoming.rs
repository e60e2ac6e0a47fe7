//! What a client sends into a sandbox takes as long as it takes to come. But once nobody waits for the client, the
//! provider has to get on: one that hangs would count as use for ever, and keep the sandbox awake (L6).

use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, ReadBuf};
use viv_provider::{ByteReader, ProviderError};

/// How far it is.
#[derive(Debug, Default)]
struct Progress {
    reads: AtomicU64,
    /// The client is waited for.
    waits: AtomicBool,
}

/// Content that tells how far it is.
struct Incoming {
    content: ByteReader,
    progress: Arc<Progress>,
}

impl AsyncRead for Incoming {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.content).poll_read(cx, buffer);
        self.progress.reads.fetch_add(1, Ordering::Relaxed);
        self.progress.waits.store(read.is_pending(), Ordering::Relaxed);
        read
    }
}

/// Has this content taken in, and answers with what came of it; or that nothing went on for so long, though it could.
pub(crate) async fn take_in<T, F>(
    content: ByteReader,
    silence_max: Duration,
    take: impl FnOnce(ByteReader) -> F,
) -> Result<T, ProviderError>
where
    F: Future<Output = Result<T, ProviderError>>,
{
    let progress = Arc::new(Progress::default());
    let mut taken = pin!(take(Box::new(Incoming { content, progress: progress.clone() })));
    loop {
        let before = progress.reads.load(Ordering::Relaxed);
        if let Ok(answer) = tokio::time::timeout(silence_max, &mut taken).await {
            return answer;
        }
        if progress.reads.load(Ordering::Relaxed) == before && !progress.waits.load(Ordering::Relaxed) {
            let after_ms = silence_max.as_millis() as u64;
            return Err(ProviderError::TimedOut { what: "the provider", after_ms });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    const SILENCE: Duration = Duration::from_secs(10);

    #[tokio::test(start_paused = true)]
    async fn l6_who_hangs_with_all_of_it_is_given_up() {
        let taken: Result<(), _> = take_in(Box::new(&b"all"[..]), SILENCE, |mut content| async move {
            let mut all = Vec::new();
            content.read_to_end(&mut all).await.unwrap();
            std::future::pending().await
        })
        .await;
        assert!(matches!(taken, Err(ProviderError::TimedOut { .. })), "{taken:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_may_take_its_time() {
        let (mut client, content) = tokio::io::duplex(64);
        tokio::spawn(async move {
            for _ in 0..3 {
                tokio::time::sleep(10 * SILENCE).await;
                client.write_all(b"more").await.unwrap();
            }
        });
        let taken = take_in(Box::new(content), SILENCE, |mut content| async move {
            let mut all = Vec::new();
            content.read_to_end(&mut all).await.unwrap();
            Ok(all.len())
        })
        .await;
        assert_eq!(taken.unwrap(), 12);
    }
}
