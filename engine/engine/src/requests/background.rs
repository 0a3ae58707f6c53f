//! Requests to the background threads: windows to load ahead, and dirty folios to save.
use alloc::collections::BTreeSet;
use memfold_os::sync::{Condvar, Mutex};
use memfold_os::units::Order;

const WINDOWS: usize = 16;

/// A window to load ahead.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct LoadWindow {
    /// A page of it, as a key.
    pub key: u64,
    /// Its largest order.
    pub order: Order,
}

/// The queue of requests.
#[derive(Default)]
pub struct RequestQueue {
    inner: Mutex<QueueState>,
    changed: Condvar,
    /// Wakes the thread that recompresses.
    recompress: Condvar,
}

#[derive(Default)]
struct QueueState {
    windows: [Option<LoadWindow>; WINDOWS],
    head: usize,
    count: usize,
    save: bool,
    /// First keys of the chunks that are to be huge pages. None may be dropped, because no later
    /// load asks for it again.
    chunks: BTreeSet<u64>,
    recompress: bool,
    stop: bool,
}

/// One request.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum BackgroundRequest {
    /// Load this window into the swap cache.
    Load(LoadWindow),
    /// Reclaim until no dirty folio remains, and no memory past the target.
    Reclaim,
    /// Make a huge page of the chunk with this first key.
    Collapse(u64),
    /// End the thread.
    Stop,
}

impl RequestQueue {
    /// Makes an empty queue.
    pub fn new() -> RequestQueue {
        RequestQueue::default()
    }

    /// Requests a window. It is dropped if too many are queued, because readahead is optional.
    pub fn load(&self, window: LoadWindow) {
        let mut inner = self.inner.lock();
        let waiting =
            (0..inner.count).any(|i| inner.windows[(inner.head + i) % WINDOWS] == Some(window));
        if inner.count < WINDOWS && !waiting {
            let at = (inner.head + inner.count) % WINDOWS;
            inner.windows[at] = Some(window);
            inner.count += 1;
            self.changed.notify_one();
        }
    }

    /// Requests reclaim.
    pub fn reclaim(&self) {
        let mut inner = self.inner.lock();
        if !inner.save {
            inner.save = true;
            self.changed.notify_one();
        }
    }

    /// Requests a huge page for the chunk from `key`.
    pub fn collapse(&self, key: u64) {
        self.inner.lock().chunks.insert(key);
        self.changed.notify_one();
    }

    /// Requests recompression without delay.
    pub fn recompress(&self) {
        self.inner.lock().recompress = true;
        self.recompress.notify_all();
    }

    /// Sleeps for at most `ns` nanoseconds. [`RequestQueue::recompress`] and
    /// [`RequestQueue::stop`] end the sleep. Returns `false` after `stop`.
    pub fn rest(&self, ns: u64) -> bool {
        let mut inner = self.inner.lock();
        if !inner.recompress && !inner.stop {
            inner = self.recompress.wait_within(inner, ns);
        }
        inner.recompress = false;
        !inner.stop
    }

    /// Requests reclaim for a background thread that calls [`RequestQueue::next`] at once. No other
    /// thread is woken for it.
    pub fn go_on(&self) {
        self.inner.lock().save = true;
    }

    /// Blocks the queue until [`RequestQueue::unfreeze`]: for a fork.
    pub fn freeze(&self) {
        core::mem::forget(self.inner.lock());
    }

    /// Returns whether a thread uses the queue at this moment, or has ended while it did.
    pub fn is_held(&self) -> bool {
        self.inner.is_held()
    }

    /// Ends [`RequestQueue::freeze`].
    ///
    /// # Safety
    /// - `freeze` has returned, in this process or in the parent that it is a copy of, and this is
    ///   called once for it.
    pub unsafe fn unfreeze(&self) {
        // SAFETY: the guard was forgotten.
        unsafe { self.inner.unlock() };
    }

    /// Ends the threads.
    pub fn stop(&self) {
        self.inner.lock().stop = true;
        self.changed.notify_all();
        self.recompress.notify_all();
    }

    /// Undoes [`RequestQueue::stop`]: the threads are about to be started again.
    pub fn resume(&self) {
        self.inner.lock().stop = false;
    }

    /// Returns whether reclaim is requested.
    #[cfg(test)]
    pub fn is_reclaim_due(&self) -> bool {
        self.inner.lock().save
    }

    fn pop(inner: &mut QueueState) -> Option<LoadWindow> {
        if inner.count == 0 {
            return None;
        }
        let at = inner.head;
        inner.head = (at + 1) % WINDOWS;
        inner.count -= 1;
        inner.windows[at].take()
    }

    /// Sleeps until there is a request. Windows come first, because a thread is about to need them.
    /// Huge pages come last.
    pub fn next(&self) -> BackgroundRequest {
        let mut inner = self.inner.lock();
        loop {
            if inner.stop {
                return BackgroundRequest::Stop;
            }
            if let Some(window) = Self::pop(&mut inner) {
                return BackgroundRequest::Load(window);
            }
            if inner.save {
                inner.save = false;
                return BackgroundRequest::Reclaim;
            }
            if let Some(key) = inner.chunks.pop_first() {
                return BackgroundRequest::Collapse(key);
            }
            inner = self.changed.wait(inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_come_before_reclaim_and_are_not_doubled() {
        let queue = RequestQueue::new();
        let window = LoadWindow { key: 512, order: Order::MAX };
        queue.reclaim();
        queue.load(window);
        queue.load(window);
        assert_eq!(queue.next(), BackgroundRequest::Load(window));
        assert_eq!(queue.next(), BackgroundRequest::Reclaim);
        queue.collapse(1024);
        queue.collapse(1024);
        queue.go_on();
        assert_eq!(queue.next(), BackgroundRequest::Reclaim);
        assert_eq!(queue.next(), BackgroundRequest::Collapse(1024));
        queue.reclaim();
        assert_eq!(queue.next(), BackgroundRequest::Reclaim, "no chunk is served twice");
        queue.recompress();
        assert!(queue.rest(u64::MAX / 2), "it was asked for before");
        queue.stop();
        assert_eq!(queue.next(), BackgroundRequest::Stop);
        assert!(!queue.rest(u64::MAX / 2));
    }
}
