//! Data in the remote store expires unless the service refreshes it. The service reports if it
//! can't. Only the engine can notice that the service is silent, for example because it was
//! stopped.
use crate::remote::Remote;
use alloc::format;
use alloc::string::String;
use core::time::Duration;
use memfold_os::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use memfold_os::thread::now_ns;

/// Number of times that the service is asked in the lifetime of an object.
const ASKS: u32 = 8;
/// The engine warns when this fraction of the lifetime (1/4) has passed without an answer. Objects
/// may already be that old when the last answer came.
const SILENT: u64 = 4;
/// The longest wait for an answer. The wait is `1 / PATIENCE_SHARE` of the lifetime if that is
/// less.
const PATIENCE_MAX: Duration = Duration::from_secs(30);
const PATIENCE_SHARE: u32 = 16;

/// Measures the time since the service last answered.
pub struct ExpiryWatch {
    expiry: Duration,
    asked_ns: AtomicU64,
    answered_ns: AtomicU64,
    warned: AtomicBool,
}

impl ExpiryWatch {
    /// Starts with an empty store. Data there lives for `expiry` without a refresh.
    pub fn new(expiry: Duration) -> ExpiryWatch {
        let now = now_ns();
        let at = || AtomicU64::new(now);
        ExpiryWatch { expiry, asked_ns: at(), answered_ns: at(), warned: AtomicBool::new(false) }
    }

    /// Returns the nanoseconds until the service is to be asked again.
    pub fn left_ns(&self) -> u64 {
        let next = self.asked_ns.load(Relaxed) + (self.expiry / ASKS).as_nanos() as u64;
        next.saturating_sub(now_ns())
    }

    /// Asks whether objects are refreshed, if `any` are in the store. Returns a warning if there
    /// was no answer for a long time.
    pub fn ask(&self, remote: &dyn Remote, any: bool) -> Option<String> {
        let patience = (self.expiry / PATIENCE_SHARE).min(PATIENCE_MAX);
        let outcome = if any { remote.keep(patience) } else { Ok(()) };
        let now = now_ns();
        self.asked_ns.store(now, Relaxed);
        let failure = match outcome {
            Err(failure) if failure.is_cut => failure,
            _ => {
                // The service runs, so it reports failures itself.
                self.answered_ns.store(now, Relaxed);
                self.warned.store(false, Relaxed);
                return None;
            }
        };
        let silent = Duration::from_nanos(now - self.answered_ns.load(Relaxed));
        if silent < self.expiry / SILENT as u32 || self.warned.swap(true, Relaxed) {
            return None;
        }
        Some(format!(
            "its service has not refreshed the data for {} s ({failure}). If the service is stopped, \
             continue it (kill -CONT). The data is lost after {} s (--remote-expiry)",
            silent.as_secs(),
            self.expiry.as_secs()
        ))
    }
}
