//! Holds faults back while the program is far past its bounds.
//!
//! A program under `run` grows by memory that the engine learns of only at its next look, and may
//! grow faster than the background gives memory back. Its faults wait then, as allocations of a
//! Linux memory cgroup past `memory.high` do (`mem_cgroup_handle_over_high`). They don't wait for
//! what can't be had: only while the excess falls.
use crate::pager::Pager;

/// Faults are held from an excess of one part in this many of the target, until it is half of that.
const SHARE: u64 = 128;
/// Without any progress for so long, nanoseconds, faults are let go.
const PATIENCE_NS: u64 = 50_000_000;
/// Faults served after that before it is tried again: twice as many each time that it was in vain.
const PAUSE_MIN: u32 = 32;
const PAUSE_MAX: u32 = 1 << 16;

/// One handler's part.
#[derive(Default)]
pub(crate) struct Throttle {
    /// The smallest excess since faults are held, pages, and when it was reached.
    held: Option<(u64, u64)>,
    pause: u32,
    vain: u32,
}

impl Throttle {
    /// Whether faults should wait; if so, the background is asked for memory. `now` gives
    /// nanoseconds.
    pub fn holds(&mut self, pager: &Pager, now: impl Fn() -> u64) -> bool {
        let target = pager.target();
        let holds = self.judge(pager.physical().saturating_sub(target), target / SHARE, now);
        if holds {
            pager.queue.reclaim();
        }
        holds
    }

    fn judge(&mut self, excess: u64, most: u64, now: impl Fn() -> u64) -> bool {
        if self.pause > 0 {
            self.pause -= 1;
            return false;
        }
        let Some((least, since)) = self.held else {
            if excess > most {
                self.held = Some((excess, now()));
            }
            return excess > most;
        };
        if excess <= most / 2 {
            (self.held, self.vain) = (None, 0);
        } else if excess < least {
            self.held = Some((excess, now()));
        } else if now() - since > PATIENCE_NS {
            (self.held, self.pause) = (None, (PAUSE_MIN << self.vain).min(PAUSE_MAX));
            self.vain = (self.vain + 1).min(16);
        }
        self.held.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_wait_while_the_excess_falls_and_no_longer() {
        let mut throttle = Throttle::default();
        assert!(!throttle.judge(100, 100, || 0));
        assert!(throttle.judge(101, 100, || 0));
        assert!(throttle.judge(90, 100, || PATIENCE_NS));
        assert!(throttle.judge(95, 100, || 2 * PATIENCE_NS));
        assert!(!throttle.judge(50, 100, || 2 * PATIENCE_NS));
        assert!(!throttle.judge(90, 100, || 3 * PATIENCE_NS));
    }

    #[test]
    fn what_cannot_be_had_is_not_waited_for() {
        let mut throttle = Throttle::default();
        assert!(throttle.judge(200, 100, || 0));
        assert!(throttle.judge(200, 100, || PATIENCE_NS));
        assert!(!throttle.judge(200, 100, || PATIENCE_NS + 1));
        assert!((0..PAUSE_MIN).all(|_| !throttle.judge(200, 100, || 0)));
        assert!(throttle.judge(200, 100, || 0));
        assert!(!throttle.judge(200, 100, || PAUSE_MIN as u64 + PATIENCE_NS));
        assert!(
            (0..2 * PAUSE_MIN).all(|_| !throttle.judge(200, 100, || 0)),
            "it waits less and less"
        );
        assert!(throttle.judge(200, 100, || 0));
    }
}
