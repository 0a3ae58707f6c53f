//! Faults that need the swap file or the remote store. Handlers pass them to the threads that read.
//!
//! A thread that reads a device may sleep for a long time. A handler that read would delay every
//! other fault, also those that the pool can serve. So it passes the fault on, and takes the next
//! one. The folio stays `Stored` meanwhile: the reading thread looks it up anew, as if the fault
//! had just come.
use memfold_os::sync::atomic::{AtomicBool, Ordering::Relaxed};
use memfold_os::sync::{Condvar, Mutex};
use memfold_os::units::PAGE_SIZE;

/// Number of threads that read.
pub const READERS: usize = 4;
/// Most queued faults. With more, handlers read for themselves.
const WAITING: usize = 64;

/// A fault: its address, and whether the page was mapped but protected.
pub type Asked = (usize, bool);

/// The queue of faults for threads that may sleep.
#[derive(Default)]
pub struct DeviceFaults {
    /// Whether there are threads that read. Set before any fault.
    served: AtomicBool,
    inner: Mutex<WaitingFaults>,
    changed: Condvar,
}

struct WaitingFaults {
    faults: [Asked; WAITING],
    head: usize,
    count: usize,
    stop: bool,
}

impl Default for WaitingFaults {
    fn default() -> WaitingFaults {
        WaitingFaults { faults: [(0, false); WAITING], head: 0, count: 0, stop: false }
    }
}

impl DeviceFaults {
    /// Notes that threads call [`DeviceFaults::next`].
    pub fn set_served(&self) {
        self.served.store(true, Relaxed);
    }

    /// Returns whether there are threads that read.
    pub fn is_served(&self) -> bool {
        self.served.load(Relaxed)
    }

    /// Passes a fault on. Returns `false` if too many are queued, or no thread reads: the caller
    /// serves the fault.
    pub fn ask(&self, addr: usize, protected: bool) -> bool {
        if !self.is_served() {
            return false;
        }
        let mut inner = self.inner.lock();
        let page = |addr: usize| addr & !(PAGE_SIZE - 1);
        let is_same = |i| inner.faults[(inner.head + i) % WAITING] == (page(addr), protected);
        // The faulting thread is woken when the page is mapped.
        if (0..inner.count).any(is_same) {
            return true;
        }
        if inner.count == WAITING || inner.stop {
            return false;
        }
        let at = (inner.head + inner.count) % WAITING;
        inner.faults[at] = (page(addr), protected);
        inner.count += 1;
        self.changed.notify_one();
        true
    }

    /// Sleeps until there is a fault. Returns `None` if the thread is to end, and no fault is
    /// queued.
    pub fn next(&self) -> Option<Asked> {
        let mut inner = self.inner.lock();
        loop {
            if inner.count > 0 {
                let request = inner.faults[inner.head];
                inner.head = (inner.head + 1) % WAITING;
                inner.count -= 1;
                return Some(request);
            }
            if inner.stop {
                return None;
            }
            inner = self.changed.wait(inner);
        }
    }

    /// Ends the threads.
    pub fn stop(&self) {
        self.inner.lock().stop = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_asked_for_once_and_nothing_is_dropped() {
        let reads = DeviceFaults::default();
        assert!(!reads.ask(4096, false), "no thread reads");
        reads.set_served();
        assert!((0..WAITING).all(|n| reads.ask(n * PAGE_SIZE + 5, false)));
        assert!(reads.ask(7 * PAGE_SIZE + 9, false), "that page is asked for already");
        assert!(
            !reads.ask(WAITING * PAGE_SIZE, false) && !reads.ask(0, true),
            "no room: the caller does it"
        );
        assert_eq!(reads.next(), Some((0, false)));
        assert!(reads.ask(0, true));
        reads.stop();
        (1..WAITING).for_each(|n| assert_eq!(reads.next(), Some((n * PAGE_SIZE, false))));
        assert_eq!((reads.next(), reads.next()), (Some((0, true)), None));
        assert!(!reads.ask(0, false));
    }
}
