//! Free and used parts of a span of addresses. Allocation is best fit, and free neighbours join.
use alloc::collections::{BTreeMap, BTreeSet};

/// Free and used extents of `[0, len)`. Numbers are offsets and lengths in any one unit.
///
/// Free and used extents together cover the span exactly once, and no two free ones touch.
pub struct Extents {
    len: usize,
    /// Start -> length.
    free: BTreeMap<usize, usize>,
    /// The free extents as (length, start), to find the smallest that fits.
    by_len: BTreeSet<(usize, usize)>,
    /// Start -> length.
    used: BTreeMap<usize, usize>,
}

impl Extents {
    /// Makes a span with all of `[0, len)` free.
    pub fn new(len: usize) -> Extents {
        let mut extents =
            Extents { len, free: BTreeMap::new(), by_len: BTreeSet::new(), used: BTreeMap::new() };
        extents.insert_free(0, len);
        extents
    }

    fn insert_free(&mut self, start: usize, len: usize) {
        if len > 0 {
            self.free.insert(start, len);
            self.by_len.insert((len, start));
        }
    }

    fn remove_free(&mut self, start: usize, len: usize) {
        self.free.remove(&start);
        self.by_len.remove(&(len, start));
    }

    /// Takes `len` (above 0) from the smallest free extent that holds it at a multiple of `align`.
    /// Returns its start.
    pub fn take(&mut self, len: usize, align: usize) -> Option<usize> {
        let fits =
            |&&(free, start): &&(usize, usize)| start.next_multiple_of(align) - start + len <= free;
        let &(free, start) = self.by_len.range((len, 0)..).find(fits)?;
        let at = start.next_multiple_of(align);
        self.remove_free(start, free);
        self.insert_free(start, at - start);
        self.insert_free(at + len, start + free - (at + len));
        self.used.insert(at, len);
        Some(at)
    }

    /// Resizes the used extent at `start` in place. Returns `false`, and changes nothing, if there
    /// is none, or the following extent is not free. The part that it loses is free at once.
    pub fn resize(&mut self, start: usize, len: usize) -> bool {
        let Some(&old) = self.used.get(&start) else { return false };
        let after = self.free.get(&(start + old)).copied().unwrap_or(0);
        if len > old + after {
            return false;
        }
        self.remove_free(start + old, after);
        self.insert_free(start + len, old + after - len);
        self.used.insert(start, len);
        true
    }

    /// Ends the used extent at `start`, and returns its length. Its addresses stay taken until
    /// [`Extents::give`].
    pub fn end(&mut self, start: usize) -> Option<usize> {
        self.used.remove(&start)
    }

    /// Frees an extent that was ended.
    pub fn give(&mut self, mut start: usize, mut len: usize) {
        if let Some((&before, &size)) =
            self.free.range(..start).next_back().filter(|(s, l)| *s + *l == start)
        {
            self.remove_free(before, size);
            (start, len) = (before, len + size);
        }
        if let Some(&after) = self.free.get(&(start + len)) {
            self.remove_free(start + len, after);
            len += after;
        }
        self.insert_free(start, len);
    }

    /// Returns the start and length of the used extent that holds `at`.
    pub fn find(&self, at: usize) -> Option<(usize, usize)> {
        let (&start, &len) = self.used.range(..=at).next_back()?;
        (at - start < len).then_some((start, len))
    }

    /// Returns whether all of the span is free. Ended extents are not free before they are given.
    pub fn is_free(&self) -> bool {
        self.free.get(&0) == Some(&self.len)
    }

    /// Returns the starts and lengths of used extents.
    pub fn used(&self) -> impl Iterator<Item = (usize, usize)> {
        self.used.iter().map(|(start, len)| (*start, *len))
    }

    /// Returns the length of all used extents.
    pub fn used_len(&self) -> usize {
        self.used.values().sum()
    }

    /// Verifies the struct's equations. No extent may be ended and not yet given.
    ///
    /// # Panics
    /// If one doesn't hold.
    #[cfg(test)]
    pub fn check(&self) {
        let mut all: alloc::vec::Vec<_> = self.free.iter().map(|(s, l)| (*s, *l, true)).collect();
        assert_eq!(all.len(), self.by_len.len());
        assert!(all.iter().all(|&(start, len, _)| self.by_len.contains(&(len, start))));
        all.extend(self.used.iter().map(|(s, l)| (*s, *l, false)));
        all.sort_unstable();
        let (mut at, mut was_free) = (0, false);
        for (start, len, is_free) in all {
            assert!(start == at && len > 0 && !(is_free && was_free), "extents at {start}");
            (at, was_free) = (start + len, is_free);
        }
        assert_eq!(at, self.len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    /// Compares with an array of owners.
    #[test]
    fn extents_agree_with_a_naive_map() {
        const LEN: usize = 256;
        let mut extents = Extents::new(LEN);
        let (mut owner, mut live, mut next) = ([0u32; LEN], Vec::new(), 1);
        let mut x = 0x9e3779b97f4a7c15u64;
        let mut random = |below: usize| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x as usize % below
        };
        let mut refused = 0;
        for _ in 0..20_000 {
            match random(3) {
                0 => {
                    let (len, align) = (1 + random(40), 1 << random(5));
                    let free = |at: &usize| {
                        at + len <= LEN && owner[*at..at + len].iter().all(|o| *o == 0)
                    };
                    let possible = (0..LEN).step_by(align).any(|at| free(&at));
                    let taken = extents.take(len, align);
                    assert_eq!(taken.is_some(), possible);
                    refused += u32::from(taken.is_none());
                    if let Some(at) = taken {
                        assert!(free(&at) && at % align == 0);
                        owner[at..at + len].fill(next);
                        live.push((at, len, next));
                        next += 1;
                    }
                }
                1 if !live.is_empty() => {
                    let (at, len, _) = live.swap_remove(random(live.len()));
                    assert_eq!(extents.end(at), Some(len));
                    assert_eq!(extents.end(at), None, "it has ended");
                    extents.give(at, len);
                    owner[at..at + len].fill(0);
                }
                _ if !live.is_empty() => {
                    let i = random(live.len());
                    let (at, old, name) = live[i];
                    let len = 1 + random(60);
                    let end = at + len;
                    let possible =
                        end <= LEN && owner[at..end].iter().all(|o| *o == 0 || *o == name);
                    assert_eq!(extents.resize(at, len), possible);
                    if possible {
                        owner[at..at + old].fill(0);
                        owner[at..end].fill(name);
                        live[i].1 = len;
                    }
                }
                _ => {}
            }
            extents.check();
            let at = random(LEN);
            let found =
                extents.find(at).and_then(|f| live.iter().find(|l| l.0 == f.0).map(|l| l.2));
            assert_eq!(found.unwrap_or(0), owner[at]);
        }
        assert!(refused > 100);
    }
}
