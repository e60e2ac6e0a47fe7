//! A call that is waited for where it is made. What answers from a thread of its own, as the store in a file does, would
//! otherwise leave a world with nothing to do, and simulated time would go on.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

struct Unparks(Thread);

impl Wake for Unparks {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Answers when it is answered, and nothing else of the world happens until then. Not for what waits for the world.
pub(crate) async fn at_once<T>(call: impl Future<Output = T>) -> T {
    // Nobody gets a turn meanwhile, so there is none to give up.
    let mut call = pin!(tokio::task::unconstrained(call));
    std::future::poll_fn(|_| Poll::Ready(wait(call.as_mut()))).await
}

/// The same where nobody can wait. Only for what answers without one.
pub(crate) fn now<T>(call: impl Future<Output = T>) -> T {
    wait(pin!(tokio::task::unconstrained(call)))
}

fn wait<T>(mut call: Pin<&mut impl Future<Output = T>>) -> T {
    let waker = Waker::from(Arc::new(Unparks(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        match call.as_mut().poll(&mut context) {
            Poll::Ready(answer) => return answer,
            Poll::Pending => std::thread::park(),
        }
    }
}
