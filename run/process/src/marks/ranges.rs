//! Sets of addresses.
use alloc::vec::Vec;
use core::ops::Range;

/// Ranges in ascending order. No two of them overlap or touch.
#[derive(Default)]
pub struct RangeSet(Vec<Range<usize>>);

impl RangeSet {
    pub const fn new() -> RangeSet {
        RangeSet(Vec::new())
    }

    pub fn add(&mut self, range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        let first = self.0.partition_point(|r| r.end < range.start);
        let last = self.0.partition_point(|r| r.start <= range.end);
        let union = match self.0[first..last] {
            [] => range,
            [ref one] => one.start.min(range.start)..one.end.max(range.end),
            [ref a, .., ref b] => a.start.min(range.start)..b.end.max(range.end),
        };
        self.0.splice(first..last, [union]);
    }

    pub fn remove(&mut self, range: &Range<usize>) {
        if range.is_empty() {
            return;
        }
        let first = self.0.partition_point(|r| r.end <= range.start);
        let last = self.0.partition_point(|r| r.start < range.end);
        if first >= last {
            return;
        }
        let (head, tail) = (self.0[first].start..range.start, range.end..self.0[last - 1].end);
        let rest = [head, tail].into_iter().filter(|r| !r.is_empty());
        self.0.splice(first..last, rest);
    }

    /// Returns the parts of `range` in the set.
    pub fn within(&self, range: &Range<usize>) -> Vec<Range<usize>> {
        let first = self.0.partition_point(|r| r.end <= range.start);
        let some = self.0[first..].iter().take_while(|r| r.start < range.end && !range.is_empty());
        some.map(|r| r.start.max(range.start)..r.end.min(range.end)).collect()
    }

    /// Returns the parts of `parts` that are not in the set.
    pub fn cut_out_of(&self, parts: Vec<Range<usize>>) -> Vec<Range<usize>> {
        parts.iter().flat_map(|part| without(part, &self.within(part))).collect()
    }

    /// Returns the number of bytes in the set.
    pub fn bytes(&self) -> usize {
        self.0.iter().map(|range| range.len()).sum()
    }

    /// Returns the ranges, and leaves the set empty.
    pub fn take(&mut self) -> Vec<Range<usize>> {
        core::mem::take(&mut self.0)
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }
}

/// Returns the parts of `range` that are in none of `out`, which must be in ascending order.
pub fn without(range: &Range<usize>, out: &[Range<usize>]) -> Vec<Range<usize>> {
    let (mut parts, mut at) = (Vec::new(), range.start);
    for part in out {
        if at < part.start {
            parts.push(at..part.start.min(range.end));
        }
        at = at.max(part.end);
    }
    if at < range.end {
        parts.push(at..range.end);
    }
    parts
}

/// Returns the intersection of two ranges; if there is none, an empty range at the start of the
/// second one.
pub fn common(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let (start, end) = (a.start.max(b.start), a.end.min(b.end));
    if start < end { start..end } else { b.start..b.start }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_testkit::random::Random;
    use std::collections::BTreeSet;

    const SIZE: usize = 40;

    fn any(random: &mut Random) -> Range<usize> {
        let start = random.below(SIZE);
        start..start + random.below(SIZE - start + 1)
    }

    /// Returns the ranges of a set of numbers.
    fn ranges_of(numbers: &BTreeSet<usize>, within: Range<usize>) -> Vec<Range<usize>> {
        let mut all: Vec<Range<usize>> = Vec::new();
        for &n in numbers.range(within) {
            match all.last_mut() {
                Some(last) if last.end == n => last.end += 1,
                _ => all.push(n..n + 1),
            }
        }
        all
    }

    #[test]
    fn ranges_are_as_a_set_of_their_numbers() {
        let mut random = Random::new(7);
        for _ in 0..200 {
            let (mut ranges, mut numbers) = (RangeSet::default(), BTreeSet::new());
            for _ in 0..40 {
                let range = any(&mut random);
                if random.below(2) == 0 {
                    ranges.add(range.clone());
                    numbers.extend(range);
                } else {
                    ranges.remove(&range);
                    numbers.retain(|n| !range.contains(n));
                }
                assert_eq!(ranges.0, ranges_of(&numbers, 0..SIZE), "ascending, and none touch");
                assert_eq!(ranges.bytes(), numbers.len());
                let part = any(&mut random);
                assert_eq!(ranges.within(&part), ranges_of(&numbers, part.clone()));
                let rest: BTreeSet<usize> = part.clone().filter(|n| !numbers.contains(n)).collect();
                let others = ranges.cut_out_of([part].to_vec());
                assert_eq!(others, ranges_of(&rest, 0..SIZE));
            }
            assert_eq!(ranges.take(), ranges_of(&numbers, 0..SIZE));
            assert!(ranges.take().is_empty());
        }
    }

    #[test]
    fn common_part_of_disjoint_ranges_is_empty() {
        assert_eq!(common(&(1..5), &(3..9)), 3..5);
        assert_eq!(common(&(3..9), &(1..5)), 3..5);
        assert_eq!(common(&(1..3), &(3..9)), 3..3);
        assert_eq!(common(&(1..2), &(5..9)), 5..5);
    }
}
