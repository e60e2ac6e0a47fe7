//! Spans on their way out. Whoever makes one never waits: what does not fit is dropped, counted and said once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use opentelemetry::Context;
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::trace::{Span, SpanData, SpanExporter, SpanProcessor};
use viv_engine::TraceCounts;

/// Spans that wait. A daemon under load makes some hundreds in a second, so this is what a receiver misses that is
/// restarted: some seconds.
const WAITING_MAX: usize = 8_192;

/// Most that go in one request.
const BATCH_MAX: usize = 512;

/// How long a span may wait for others to go with.
const GATHER: Duration = Duration::from_millis(500);

/// How often spans are offered to who did not take them, and how long to wait between; the last time it is twice as long.
const TRIES_MAX: u32 = 3;
const PAUSE: Duration = Duration::from_millis(500);

/// What became of spans.
#[derive(Debug, Default)]
pub(super) struct Counts {
    sent: AtomicU64,
    dropped: AtomicU64,
    /// Whether it was said that spans are dropped, and none were taken since.
    is_said: AtomicBool,
}

impl Counts {
    pub(super) fn get(&self) -> TraceCounts {
        TraceCounts { sent: self.sent.load(Ordering::Relaxed), dropped: self.dropped.load(Ordering::Relaxed) }
    }

    fn sent(&self, spans: usize) {
        self.sent.fetch_add(spans as u64, Ordering::Relaxed);
        if self.is_said.swap(false, Ordering::Relaxed) {
            let dropped = self.get().dropped;
            tracing::warn!(component = "traces", dropped, "spans are taken again");
        }
    }

    fn dropped(&self, spans: usize, why: &str) {
        self.dropped.fetch_add(spans as u64, Ordering::Relaxed);
        if !self.is_said.swap(true, Ordering::Relaxed) {
            tracing::warn!(component = "traces", why, "spans are dropped; said once until some are taken again");
        }
    }
}

enum Word {
    Span(Box<SpanData>),
    /// All that came before is sent; then the thread ends if that is wanted, and answers.
    Flush {
        end: bool,
        done: SyncSender<()>,
    },
}

/// The queue, as the SDK calls it.
#[derive(Debug)]
pub(super) struct Queue {
    words: SyncSender<Word>,
    counts: Arc<Counts>,
    /// No more tries: the daemon ends.
    ending: Arc<AtomicBool>,
}

impl Queue {
    /// Begins to send what is put into it.
    pub(super) fn begin(exporter: impl SpanExporter + 'static, counts: Arc<Counts>) -> std::io::Result<Self> {
        let (words, heard) = sync_channel(WAITING_MAX);
        let ending = Arc::new(AtomicBool::new(false));
        let sender = Sender { exporter, counts: counts.clone(), ending: ending.clone() };
        thread::Builder::new().name("traces".to_owned()).spawn(move || sender.run(&heard))?;
        Ok(Self { words, counts, ending })
    }

    fn flush(&self, end: bool, within: Duration) -> OTelSdkResult {
        let until = Instant::now() + within;
        let (done, heard) = sync_channel(1);
        let mut word = Word::Flush { end, done };
        // It may be full, and is emptied by who sends.
        loop {
            match self.words.try_send(word) {
                Ok(()) => break,
                Err(TrySendError::Disconnected(_)) => return Err(OTelSdkError::AlreadyShutdown),
                Err(TrySendError::Full(_)) if Instant::now() >= until => return Err(OTelSdkError::Timeout(within)),
                Err(TrySendError::Full(again)) => {
                    word = again;
                    thread::sleep(Duration::from_millis(10));
                }
            }
        }
        heard.recv_timeout(until.saturating_duration_since(Instant::now())).map_err(|_| OTelSdkError::Timeout(within))
    }
}

impl SpanProcessor for Queue {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        if !span.span_context.is_sampled() {
            return;
        }
        match self.words.try_send(Word::Span(Box::new(span))) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => self.counts.dropped(1, "too many wait"),
            Err(TrySendError::Disconnected(_)) => self.counts.dropped(1, "the daemon ends"),
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.flush(false, Duration::from_secs(5))
    }

    fn shutdown_with_timeout(&self, within: Duration) -> OTelSdkResult {
        self.ending.store(true, Ordering::Relaxed);
        self.flush(true, within)
    }
}

/// Who sends.
struct Sender<E> {
    exporter: E,
    counts: Arc<Counts>,
    ending: Arc<AtomicBool>,
}

impl<E: SpanExporter> Sender<E> {
    fn run(self, heard: &Receiver<Word>) {
        let mut batch = Vec::new();
        loop {
            let Ok(mut word) = heard.recv() else { return };
            let until = Instant::now() + GATHER;
            let flush = loop {
                match word {
                    Word::Span(span) => batch.push(*span),
                    Word::Flush { end, done } => break Some((end, done)),
                }
                if batch.len() >= BATCH_MAX {
                    break None;
                }
                match heard.recv_timeout(until.saturating_duration_since(Instant::now())) {
                    Ok(next) => word = next,
                    Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break None,
                }
            };
            self.send(&std::mem::take(&mut batch));
            match flush {
                Some((true, done)) => {
                    self.drain(heard);
                    let _ = done.try_send(());
                    return;
                }
                Some((false, done)) => {
                    let _ = done.try_send(());
                }
                None => {}
            }
        }
    }

    /// What came while the last ones were sent.
    fn drain(&self, heard: &Receiver<Word>) {
        let mut batch = Vec::new();
        loop {
            match heard.try_recv() {
                Ok(Word::Span(span)) => batch.push(*span),
                Ok(Word::Flush { .. }) => {}
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => break,
            }
        }
        while !batch.is_empty() {
            let next: Vec<SpanData> = batch.drain(..batch.len().min(BATCH_MAX)).collect();
            self.send(&next);
        }
    }

    fn send(&self, batch: &[SpanData]) {
        if batch.is_empty() {
            return;
        }
        let mut why = String::new();
        for attempt in 1..=TRIES_MAX {
            match now(self.exporter.export(batch.to_vec())) {
                Ok(()) => return self.counts.sent(batch.len()),
                Err(error) => why = error.to_string(),
            }
            if self.ending.load(Ordering::Relaxed) {
                break;
            }
            if attempt < TRIES_MAX {
                thread::sleep(PAUSE * attempt);
            }
        }
        self.counts.dropped(batch.len(), &why);
    }
}

/// Runs what waits for nobody but a blocking client.
pub(super) fn now<T>(work: impl Future<Output = T>) -> T {
    let mut work = std::pin::pin!(work);
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    loop {
        match work.as_mut().poll(&mut context) {
            std::task::Poll::Ready(done) => return done,
            std::task::Poll::Pending => thread::sleep(Duration::from_millis(1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use opentelemetry::trace::{Span as _, Tracer, TracerProvider};
    use opentelemetry_sdk::trace::SdkTracerProvider;

    use super::*;

    /// Takes spans, or fails so often first, or waits until it is let go.
    #[derive(Debug, Clone, Default)]
    struct Fake {
        took: Arc<AtomicU64>,
        failures: Arc<AtomicU64>,
        stuck: Arc<Mutex<()>>,
    }

    impl SpanExporter for Fake {
        async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
            let _stuck = self.stuck.lock().unwrap();
            let left = self.failures.load(Ordering::SeqCst);
            if left > 0 {
                self.failures.store(left - 1, Ordering::SeqCst);
                return Err(OTelSdkError::InternalFailure("it is down".to_owned()));
            }
            self.took.fetch_add(batch.len() as u64, Ordering::SeqCst);
            Ok(())
        }
    }

    fn provider(fake: &Fake) -> (SdkTracerProvider, Arc<Counts>) {
        let counts = Arc::new(Counts::default());
        let queue = Queue::begin(fake.clone(), counts.clone()).unwrap();
        (SdkTracerProvider::builder().with_span_processor(queue).build(), counts)
    }

    fn make(provider: &SdkTracerProvider, spans: usize) {
        let tracer = provider.tracer("test");
        for _ in 0..spans {
            tracer.start("one").end();
        }
    }

    #[test]
    fn o4_all_spans_are_sent_before_the_end() {
        let fake = Fake::default();
        let (provider, counts) = provider(&fake);
        make(&provider, 1_500);
        provider.shutdown_with_timeout(Duration::from_secs(30)).unwrap();
        assert_eq!(fake.took.load(Ordering::SeqCst), 1_500);
        assert_eq!(counts.get(), TraceCounts { sent: 1_500, dropped: 0 });
    }

    #[test]
    fn o4_a_receiver_that_fails_twice_gets_them_all_the_same() {
        let fake = Fake::default();
        fake.failures.store(2, Ordering::SeqCst);
        let (provider, counts) = provider(&fake);
        make(&provider, 3);
        provider.force_flush().unwrap();
        assert_eq!(counts.get(), TraceCounts { sent: 3, dropped: 0 });
    }

    #[test]
    fn o4_nobody_waits_for_a_receiver_that_is_stuck_and_drops_are_counted() {
        let fake = Fake::default();
        let (provider, counts) = provider(&fake);
        let held = fake.stuck.lock().unwrap();
        make(&provider, WAITING_MAX + 3 * BATCH_MAX);
        let dropped = counts.get().dropped;
        assert!(dropped >= BATCH_MAX as u64, "{dropped}");
        // Nor at the end: its bound passes.
        assert!(provider.shutdown_with_timeout(Duration::from_millis(50)).is_err());
        drop(held);
    }
}
