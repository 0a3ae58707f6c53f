//! Whether the keys of a run are refreshed in time, and the warnings if not.
use memfold_os::raw::warn;
use std::sync::Mutex;
use std::time::Duration;

/// Passes over all keys that begin in one lifetime.
const PASSES: u32 = 4;
/// Part of the lifetime without a complete pass after which the user is warned.
const LATE: u32 = 2;

/// The progress of the passes over the keys.
pub struct KeptPasses {
    expiry: Duration,
    state: Mutex<PassState>,
}

/// Times are those of [`since_boot`].
struct PassState {
    /// When the last complete pass began: each key lives for the whole time from then on, or
    /// longer.
    whole: Duration,
    /// When the pass in progress began.
    begun: Option<Duration>,
    /// The last key that it has reached.
    last: Option<(u64, u64)>,
    /// Why it makes no progress.
    why: Option<String>,
    has_warned: bool,
}

/// Returns a time that also advances while the machine sleeps, as in the store.
fn since_boot() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is local. Every kernel that memfold runs on has this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut now) };
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

impl KeptPasses {
    /// Makes the state of a run without keys. Keys live for `expiry`.
    pub fn new(expiry: Duration) -> KeptPasses {
        let state = PassState {
            whole: since_boot(),
            begun: None,
            last: None,
            why: None,
            has_warned: false,
        };
        KeptPasses { expiry, state: Mutex::new(state) }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, PassState> {
        self.state.lock().expect("nobody panics with the lock")
    }

    /// Returns whether a pass must begin or continue. Begins it.
    pub fn is_due(&self) -> bool {
        self.begin(since_boot())
    }

    fn begin(&self, now: Duration) -> bool {
        let mut state = self.state();
        let is_due =
            state.begun.is_some() || now.saturating_sub(state.whole) >= self.expiry / PASSES;
        if is_due && (state.begun.is_none() || state.last.is_none()) {
            // No key has been reached yet.
            state.begun = Some(now);
        }
        is_due
    }

    /// Returns the key after which the pass continues.
    pub fn at(&self) -> Option<(u64, u64)> {
        self.state().last
    }

    /// Notes that all keys up to this one have been refreshed.
    pub fn reach(&self, last: (u64, u64)) {
        self.state().last = Some(last);
    }

    /// Notes the result of the pass: complete, or why it makes no progress. Warns once while there
    /// is time to act, and again if there was none. `is_empty`: there are no keys.
    pub fn note(&self, store: &str, done: Result<(), String>, is_empty: bool) {
        if let Some(text) = self.judge(since_boot(), done, is_empty) {
            warn(&[
                "memfold: ",
                if text.is_calm { "" } else { "warning: " },
                "remote store ",
                store,
                ": ",
                &text.text,
                "\n",
            ]);
        }
    }

    fn judge(
        &self,
        now: Duration,
        done: Result<(), String>,
        is_empty: bool,
    ) -> Option<PassMessage> {
        let mut state = self.state();
        let age = now.saturating_sub(state.whole);
        if let Err(why) = done {
            let text = format!(
                "the keys could not be refreshed for {} and expire in {}. Make the store reachable before then, or the program \
                 ends when it needs them. Reason: {why}",
                span(age),
                span(self.expiry.saturating_sub(age))
            );
            state.why = Some(why);
            let warns = age >= self.expiry / LATE && !state.has_warned && !is_empty;
            state.has_warned |= warns;
            return warns.then_some(PassMessage { text, is_calm: false });
        }
        let has_warned = state.has_warned;
        *state = PassState {
            whole: state.begun.unwrap_or(now),
            begun: None,
            last: None,
            why: None,
            has_warned: false,
        };
        if age > self.expiry && !is_empty {
            return self.late(age).map(|text| PassMessage {
                text: format!("data may be lost, because {text}"),
                is_calm: false,
            });
        }
        has_warned.then(|| PassMessage {
            text: "the keys are refreshed again".to_string(),
            is_calm: true,
        })
    }

    /// Checks that all keys were refreshed lately.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self) -> Result<(), String> {
        let (state, now) = (self.state(), since_boot());
        let age = now.saturating_sub(state.whole);
        if age < self.expiry / LATE {
            return Ok(());
        }
        let why = state.why.as_deref().unwrap_or("a pass takes too long");
        Err(format!("the keys were not refreshed for {}: {why}", span(age)))
    }

    /// Returns a text if keys were not refreshed for longer than their lifetime.
    pub fn lateness(&self) -> Option<String> {
        let age = since_boot().saturating_sub(self.state().whole);
        self.late(age)
    }

    fn late(&self, age: Duration) -> Option<String> {
        let text = || {
            format!(
                "the keys were not refreshed for {}, but expire after {}",
                span(age),
                span(self.expiry)
            )
        };
        (age > self.expiry).then(text)
    }
}

/// A message.
struct PassMessage {
    text: String,
    /// It is not a warning.
    is_calm: bool,
}

/// Returns a time as text, rounded down.
fn span(time: Duration) -> String {
    match time.as_secs() {
        s @ ..120 => format!("{s} s"),
        s @ ..7200 => format!("{} min", s / 60),
        s => format!("{} h", s / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPIRY: Duration = Duration::from_secs(86400);

    fn kept() -> (KeptPasses, impl Fn(u64) -> Duration) {
        let passes = KeptPasses::new(EXPIRY);
        let start = passes.state().whole;
        (passes, move |hours| start + Duration::from_secs(hours * 3600))
    }

    fn fails(kept: &KeptPasses, now: Duration) -> Option<String> {
        kept.begin(now)
            .then(|| kept.judge(now, Err("no route".to_string()), false))?
            .map(|text| text.text)
    }

    #[test]
    fn pass_begins_at_a_quarter_of_the_lifetime_and_resumes() {
        let (passes, at) = kept();
        assert!(!passes.begin(at(5)));
        assert!(passes.begin(at(6)));
        passes.reach((3, 9));
        assert!(passes.judge(at(6), Err("no route".to_string()), false).is_none(), "there is time");
        assert!(passes.begin(at(7)));
        assert_eq!(passes.at(), Some((3, 9)));
        assert!(passes.judge(at(7), Ok(()), false).is_none());
        assert_eq!(passes.state().whole, at(6), "keys that it reached first are so old");
        assert!(!passes.begin(at(11)) && passes.begin(at(12)));
        assert_eq!(passes.at(), None);
    }

    #[test]
    fn warning_comes_once_at_half_the_lifetime_with_time_left() {
        let (passes, at) = kept();
        assert_eq!(fails(&passes, at(11)), None);
        let text = fails(&passes, at(13)).unwrap();
        assert!(
            text.contains("for 13 h and expire in 11 h") && text.ends_with("no route"),
            "{text}"
        );
        assert_eq!(fails(&passes, at(14)), None);
        assert!(passes.begin(at(20)));
        let text = passes.judge(at(20), Ok(()), false).unwrap();
        assert!(text.is_calm && text.text.contains("refreshed again"), "{}", text.text);
        assert!(!passes.begin(at(25)), "no key was reached before, so all are fresh");
    }

    #[test]
    fn nothing_is_said_of_keys_that_there_are_not() {
        let (passes, at) = kept();
        assert!(passes.begin(at(30)));
        assert!(passes.judge(at(30), Err("no route".to_string()), true).is_none());
        assert!(passes.judge(at(31), Ok(()), true).is_none());
    }

    #[test]
    fn stop_longer_than_the_lifetime_warns_of_data_loss() {
        let (passes, at) = kept();
        assert!(passes.begin(at(30)));
        let text = passes.judge(at(30), Ok(()), false).unwrap();
        assert!(
            !text.is_calm && text.text.contains("lost") && text.text.contains("30 h"),
            "{}",
            text.text
        );
    }
}
