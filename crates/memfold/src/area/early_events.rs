//! Memory whose mremap or unmap is known to have happened, before the event that tells of it was
//! read.
//!
//! The kernel queues these events after it has let go of the address space, so those of two threads
//! may come in the wrong order. When one thread's mremap arrives where another thread's managed
//! memory still seems to be, that memory has left: it is parked under addresses that don't exist,
//! until its own event says whether it went elsewhere or ended. And the source of an mremap is
//! reported as unmapped once more after its move; when another thread's mremap arrives there
//! before, that report must not end what has arrived.
use alloc::vec::Vec;

/// Parked pages have numbers from here on: no address of user space, with four levels of page
/// tables or five.
pub const PARKED_FROM: u64 = 1 << 45;

/// A range of pages that waits for its event.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Ghost {
    /// First page that the event will name.
    pub start: u64,
    /// First page past it.
    pub end: u64,
    /// Where `start` is parked; `None` if nothing is left of it, and only the report of its end is
    /// still to come.
    pub at: Option<u64>,
}

impl Ghost {
    fn part(&self, start: u64, end: u64) -> Ghost {
        Ghost { start, end, at: self.at.map(|at| at + (start - self.start)) }
    }
}

/// What an event is about.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum About {
    /// An end.
    Unmap,
    /// A move.
    Remap,
}

/// All that waits.
#[derive(Clone, Default)]
pub struct Parked {
    /// Oldest first.
    ghosts: Vec<Ghost>,
    /// Sources of mremap whose end has not been reported, and never will be if the program kept it
    /// (MREMAP_DONTUNMAP).
    sources: Vec<(u64, u64)>,
    used: u64,
}

impl Parked {
    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.ghosts.is_empty() && self.sources.is_empty()
    }

    /// The ranges that events still to come will name: each with where its first page is parked.
    pub fn contents(&self) -> impl Iterator<Item = (u64, u64, u64)> {
        self.ghosts.iter().filter_map(|ghost| ghost.at.map(|at| (ghost.start, ghost.end, at)))
    }

    /// A place for pages `[start, end)`, where an mremap arrives; whoever asks moves them there.
    pub fn park(&mut self, start: u64, end: u64) -> u64 {
        let at = PARKED_FROM + self.used;
        self.used += end - start + 1;
        self.ghosts.push(Ghost { start, end, at: Some(at) });
        self.sources =
            self.sources.iter().flat_map(|s| without(s.0, s.1, &[(start, end)])).collect();
        at
    }

    /// An mremap arrives at pages `[start, end)`, of which nothing is managed. It could not have,
    /// were the end of an earlier source there not only still to be reported.
    pub fn arrive(&mut self, start: u64, end: u64) {
        for (s, e) in core::mem::take(&mut self.sources) {
            let (from, to) = (s.max(start), e.min(end));
            if from < to {
                self.ghosts.push(Ghost { start: from, end: to, at: None });
            }
            self.sources.extend(without(s, e, &[(start, end)]));
        }
    }

    /// Pages `[start, end)` have been moved away.
    pub fn leave(&mut self, start: u64, end: u64) {
        self.sources.push((start, end));
    }

    /// Takes out what an event about `[start, end)` is about, as far as it waited, oldest first:
    /// parts of ghosts. What has moved still waits for the report of its end.
    pub fn take(&mut self, start: u64, end: u64, about: About) -> Vec<Ghost> {
        let (mut taken, mut rest): (Vec<Ghost>, Vec<Ghost>) = (Vec::new(), Vec::new());
        for ghost in &self.ghosts {
            let (s, e) = (ghost.start.max(start), ghost.end.min(end));
            let fits = about == About::Unmap || ghost.at.is_some();
            // A range that waits twice has two events to come: the older ghost has the first.
            if s >= e || !fits || taken.iter().any(|t| t.start < e && s < t.end) {
                rest.push(*ghost);
                continue;
            }
            taken.push(ghost.part(s, e));
            let left = [ghost.part(ghost.start, s), ghost.part(e, ghost.end)];
            rest.extend(left.iter().filter(|g| g.start < g.end));
            if about == About::Remap {
                // Somebody has arrived where this left from, so its end there is still to be
                // reported.
                rest.push(Ghost { start: s, end: e, at: None });
            }
        }
        self.ghosts = rest;
        if about == About::Unmap {
            self.sources =
                self.sources.iter().flat_map(|s| without(s.0, s.1, &[(start, end)])).collect();
        }
        taken
    }

    /// No event is on its way: forgets all; returns the ghosts, whose memory has ended.
    pub fn clear(&mut self) -> Vec<Ghost> {
        self.sources.clear();
        core::mem::take(&mut self.ghosts)
    }
}

/// The parts of `[start, end)` in none of `out`.
pub fn without(start: u64, end: u64, out: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut parts = alloc::vec![(start, end)];
    for &(s, e) in out {
        let cut = parts.iter().flat_map(|&(a, b)| [(a, b.min(s)), (a.max(e), b)]);
        parts = cut.filter(|part| part.0 < part.1).collect();
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_takes_the_older_of_two_ghosts_and_leaves_the_rest() {
        let mut parked = Parked::default();
        let (first, second) = (parked.park(10, 20), parked.park(10, 20));
        assert_eq!(
            parked.take(12, 14, About::Remap),
            [Ghost { start: 12, end: 14, at: Some(first + 2) }]
        );
        assert_eq!(parked.take(12, 14, About::Unmap), [Ghost { start: 12, end: 14, at: None }]);
        assert_eq!(
            parked.take(12, 14, About::Unmap),
            [Ghost { start: 12, end: 14, at: Some(second + 2) }]
        );
        assert_eq!(parked.take(12, 14, About::Unmap), []);
        assert_eq!(
            parked.take(0, 11, About::Unmap),
            [Ghost { start: 10, end: 11, at: Some(first) }]
        );
        assert_eq!(parked.clear().iter().map(|g| g.end - g.start).sum::<u64>(), 1 + 6 + 2 + 6);
        assert!(parked.is_empty());
    }

    #[test]
    fn the_late_end_of_a_source_spares_what_has_arrived_there() {
        let mut parked = Parked::default();
        parked.leave(10, 20);
        parked.arrive(15, 30);
        assert_eq!(parked.take(15, 18, About::Remap), []);
        assert_eq!(parked.take(10, 20, About::Unmap), [Ghost { start: 15, end: 20, at: None }]);
        assert_eq!(parked.take(10, 20, About::Unmap), []);
        assert!(parked.is_empty());
    }

    #[test]
    fn the_end_of_a_source_that_was_kept_spares_nothing() {
        let mut parked = Parked::default();
        parked.leave(10, 20);
        assert_eq!(parked.take(10, 20, About::Unmap), []);
        parked.arrive(10, 20);
        assert_eq!(parked.take(10, 20, About::Unmap), []);
    }

    #[test]
    fn without_cuts_holes() {
        assert_eq!(without(0, 10, &[(2, 3), (5, 20)]), [(0, 2), (3, 5)]);
        assert_eq!(without(0, 10, &[(20, 30)]), [(0, 10)]);
        assert_eq!(without(5, 10, &[(0, 30)]), []);
    }
}
