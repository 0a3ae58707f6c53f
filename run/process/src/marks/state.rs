//! The known properties of the program's memory besides its management: marks, and calls in
//! progress with no lock held. They are changed together with the program's mappings.
use crate::diagnostics::limit::LimitReport;
use crate::marks::ranges::{RangeSet, common, without};
use crate::size::share::SizeLevel;
use crate::threads::ThreadStarts;
use alloc::vec::Vec;
use core::ops::Range;
use memfold_os::maps::flag;

/// A reason why memory isn't managed. [`MemoryMark::DontFork`] only keeps it from children.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum MemoryMark {
    /// Present at the start, a stack of a thread, or reported by the gate.
    Own,
    /// Mapped as a stack (MAP_STACK). The next look decides whether a thread uses it.
    Stack,
    /// Locked in memory.
    Locked,
    /// Kept from children: managed, and absent in them.
    DontFork,
    /// Zeros in children.
    Wiped,
    /// Kept from core dumps.
    DontDump,
    /// Open to merging, as all memory of the process (PR_SET_MEMORY_MERGE).
    Mergeable,
    /// Guards, which a touch of meets instead of a page (MADV_GUARD_INSTALL).
    Guard,
    /// Any other reason that smaps shows.
    Other,
}

pub const MARKS: [MemoryMark; 9] = [
    MemoryMark::Own,
    MemoryMark::Stack,
    MemoryMark::Locked,
    MemoryMark::DontFork,
    MemoryMark::Wiped,
    MemoryMark::DontDump,
    MemoryMark::Mergeable,
    MemoryMark::Guard,
    MemoryMark::Other,
];

/// Marks by the flags of smaps.
pub const FLAGS: [(u32, MemoryMark); 7] = [
    (flag::LOCKED, MemoryMark::Locked),
    (flag::DONT_FORK, MemoryMark::DontFork),
    (flag::WIPE_ON_FORK, MemoryMark::Wiped),
    (flag::DONT_DUMP, MemoryMark::DontDump),
    (flag::MERGEABLE, MemoryMark::Mergeable),
    (flag::GROWS_DOWN, MemoryMark::Other),
    (
        flag::IO
            | flag::PFN
            | flag::MIXED
            | flag::HUGETLB
            | flag::DROPPABLE
            | flag::SHADOW_STACK
            | flag::SEALED
            | flag::UFFD_MISSING
            | flag::UFFD_PROTECT,
        MemoryMark::Other,
    ),
];

/// The state that changes with the program's mappings.
#[derive(Default)]
pub struct ProgramState {
    /// The memory of each mark, by [`MemoryMark`].
    never: [RangeSet; MARKS.len()],
    /// Ranges that wait to be taken with the next mappings of the program
    /// (`Adoption::adopt_later`).
    pub late: RangeSet,
    /// Ranges that were too small to be taken (`Adoption::adopt`).
    pub small: RangeSet,
    /// Whether memory that is mapped from now on is locked.
    pub locks_future: bool,
    /// Whether the kernel may merge equal pages of all memory.
    pub merges: bool,
    /// Number of tasks in this memory that are traced at their own wish
    /// (`Adoption::keep_home`).
    pub traced: u32,
    /// Whether the program handles faults in some of its memory by a userfaultfd of its own.
    pub has_userfault: bool,
    /// Calls in progress with no lock held.
    apart: Vec<PendingCall>,
    pub threads: ThreadStarts,
    pub limit_report: LimitReport,
    pub level: SizeLevel,
    /// Whether all memory is to be managed at the next look.
    pub is_due: bool,
    /// Bytes that were mapped since the last look.
    pub mapped_since: usize,
    /// Writable memory that isn't managed has at most so many bytes; `None` if that is unknown.
    pub writable: Option<u64>,
    /// Ranges that were mapped without a reservation, each larger than the bound. They are not
    /// expected to be filled (`Adoption::may_pass`).
    pub sparse: RangeSet,
}

impl ProgramState {
    pub fn marked(&mut self, mark: MemoryMark) -> &mut RangeSet {
        &mut self.never[mark as usize]
    }

    /// Records that a range has new contents, so that apart calls in progress no longer rely on
    /// what they found there.
    pub fn note_new(&mut self, range: &Range<usize>) {
        self.apart.iter_mut().for_each(|pending| pending.new_since.add(range.clone()));
    }

    /// Returns the apart call of a child, if one is in progress.
    pub fn apart_of(&self, child: usize) -> Option<ApartCall> {
        let call = self.apart.iter().find(|pending| pending.child == Some(child))?;
        Some(ApartCall(call.number))
    }

    /// Forgets all apart calls. They belong to children of the process of which this one is a copy.
    pub fn forget_apart(&mut self) {
        self.apart.clear();
    }

    /// Returns whether a property that smaps shows of a mapping doesn't keep it from being managed:
    /// the mapping grows downwards, but its lowest part is marked
    /// (`ChangeCalls::note_growing`), or `madvise` opened it to merging, which adoption ends.
    pub fn is_undone(&mut self, flags: u32, range: &Range<usize>) -> bool {
        let first = range.start..range.start + 1;
        match flags {
            flag::GROWS_DOWN => !self.marked(MemoryMark::Other).within(&first).is_empty(),
            flag::MERGEABLE => !self.merges,
            _ => false,
        }
    }

    /// Returns the parts of `parts` that may be managed.
    pub fn unmarked(&self, parts: Vec<Range<usize>>) -> Vec<Range<usize>> {
        let never = MARKS.iter().filter(|mark| **mark != MemoryMark::DontFork);
        never.fold(parts, |parts, mark| self.never[*mark as usize].cut_out_of(parts))
    }

    /// Removes all marks of a range, because its memory was replaced.
    pub fn forget(&mut self, range: &Range<usize>) {
        self.never.iter_mut().for_each(|never| never.remove(range));
        self.small.remove(range);
        self.sparse.remove(range);
    }

    /// Returns what there is in some ranges. `faults` are the parts where the program handles
    /// faults itself.
    pub fn before(&self, ranges: &[Range<usize>], faults: Vec<Range<usize>>) -> FoundRanges {
        let marks = ranges.iter().flat_map(|range| self.marks_in(range)).collect();
        FoundRanges { parts: ranges.to_vec(), marks, faults }
    }

    /// Begins a call on the parts of `before` that is made with no lock held. Nothing in them may
    /// be managed until [`ProgramState::end_apart`]. `number` is the number of the call, and
    /// `child` that of its caller if that is a child.
    pub fn begin_apart(
        &mut self,
        number: u64,
        child: Option<usize>,
        before: FoundRanges,
    ) -> ApartCall {
        let (marks, mut ranges) = (self.marked(MemoryMark::Other), RangeSet::default());
        for range in &before.parts {
            for part in without(range, &marks.within(range)) {
                marks.add(part.clone());
                ranges.add(part);
            }
        }
        self.apart.push(PendingCall {
            number,
            child,
            added: ranges,
            before,
            new_since: RangeSet::default(),
        });
        ApartCall(number)
    }

    /// Ends an apart call. Returns what it found at its beginning. The parts are only those where
    /// nothing was mapped or registered meanwhile.
    pub fn end_apart(&mut self, apart: ApartCall) -> FoundRanges {
        let at = self.apart.iter().position(|pending| pending.number == apart.0);
        let at = at.expect("it is ended once, by who began it");
        let PendingCall { mut before, added: new_ranges, new_since, .. } =
            self.apart.swap_remove(at);
        before.parts = new_since.cut_out_of(before.parts);
        for part in before.parts.iter().flat_map(|part| new_ranges.within(part)) {
            self.marked(MemoryMark::Other).remove(&part);
        }
        before
    }

    /// Returns the marks in a range, each with its part.
    fn marks_in(&self, range: &Range<usize>) -> Vec<(MemoryMark, Range<usize>)> {
        let of = |mark: MemoryMark| self.never[mark as usize].within(range).into_iter();
        MARKS.into_iter().flat_map(|mark| of(mark).map(move |part| (mark, part))).collect()
    }

    /// Records an mremap that found `before` in its ranges. Marks move with the memory. Memory that
    /// it leaves behind, if any, is no longer locked.
    pub fn note_moved(&mut self, moved: &RemappedTo, before: &FoundRanges) {
        self.note_new(&moved.target);
        if moved.is_elsewhere() {
            self.forget(&moved.target);
            for part in &before.parts {
                self.marked(MemoryMark::Locked).remove(&common(part, &moved.taken));
            }
            for (mark, part) in &before.marks {
                self.marked(*mark).add(moved.there(part));
            }
        }
        before.parts.iter().for_each(|part| self.forget(&common(part, &moved.gone)));
        if moved.from.len() < moved.target.len() {
            let old_end = moved.target.start + moved.from.len();
            self.extend(&(moved.target.start..old_end), old_end..moved.target.end);
        }
    }

    /// Gives the memory that mremap adds the marks of the memory before it.
    fn extend(&mut self, before: &Range<usize>, added: Range<usize>) {
        let last = before.end.saturating_sub(1).max(before.start)..before.end;
        let is_of_mapping =
            |mark: &MemoryMark| ![MemoryMark::Own, MemoryMark::Guard].contains(mark);
        for mark in MARKS.into_iter().filter(is_of_mapping) {
            let marks = self.marked(mark);
            if !marks.within(&last).is_empty() {
                marks.add(added.clone());
            }
        }
    }

    /// Returns whether a userfaultfd of the program may report what happens to a part of a range.
    pub fn is_watched(&mut self, range: &Range<usize>) -> bool {
        self.has_userfault && !self.marked(MemoryMark::Other).within(range).is_empty()
    }

    /// Returns whether more memory may be taken under management.
    pub fn takes(&self) -> bool {
        !self.locks_future && !self.merges && self.traced == 0
    }
}

/// The effect of an mremap on addresses.
pub struct RemappedTo {
    /// The range before the call. `target` is the range after it.
    pub from: Range<usize>,
    pub target: Range<usize>,
    /// The part of `from` whose memory is in `target` now.
    pub taken: Range<usize>,
    /// The range that is no longer mapped.
    pub gone: Range<usize>,
}

impl RemappedTo {
    /// Returns whether the memory has another address now.
    pub fn is_elsewhere(&self) -> bool {
        self.from.start != self.target.start
    }

    /// Returns where the memory of a part is now; an empty range if it was not taken along.
    pub fn there(&self, part: &Range<usize>) -> Range<usize> {
        let part = common(part, &self.taken);
        let to = |at: usize| at - self.from.start + self.target.start;
        to(part.start)..to(part.end)
    }
}

/// A call that is made with no lock held, an apart call ([`ProgramState::begin_apart`]).
pub struct ApartCall(u64);

/// An apart call in progress.
struct PendingCall {
    number: u64,
    /// The number of the child that makes it.
    child: Option<usize>,
    /// Parts that were marked for the call.
    added: RangeSet,
    before: FoundRanges,
    /// Ranges that were mapped or registered since.
    new_since: RangeSet,
}

/// The state that a call finds in its ranges.
pub struct FoundRanges {
    /// The ranges of the call, or the parts of them that haven't changed.
    pub parts: Vec<Range<usize>>,
    pub marks: Vec<(MemoryMark, Range<usize>)>,
    /// Parts where the program handles faults itself.
    pub faults: Vec<Range<usize>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    const OTHERS: [MemoryMark; 5] = [
        MemoryMark::Own,
        MemoryMark::Wiped,
        MemoryMark::DontDump,
        MemoryMark::Mergeable,
        MemoryMark::Other,
    ];

    fn marked(state: &mut ProgramState, mark: MemoryMark) -> Vec<Range<usize>> {
        state.marked(mark).within(&(0..1000))
    }

    fn with(marks: &[(MemoryMark, Range<usize>)]) -> ProgramState {
        let mut state = ProgramState::default();
        marks.iter().for_each(|(mark, range)| state.marked(*mark).add(range.clone()));
        state
    }

    fn moved(from: Range<usize>, target: Range<usize>, keeps_source: bool) -> RemappedTo {
        let source = from.start..from.start + from.len().min(target.len());
        let rest = match (target.start == from.start, keeps_source) {
            (true, _) => target.end..from.end.max(target.end),
            (false, true) => 0..0,
            (false, false) => from.clone(),
        };
        RemappedTo { from, target, taken: source, gone: rest }
    }

    /// Records an mremap during which nothing changed.
    fn move_all(state: &mut ProgramState, moved: &RemappedTo) {
        let before = state.before(core::slice::from_ref(&moved.from), Vec::new());
        state.note_moved(moved, &before);
    }

    #[test]
    fn every_mark_but_that_of_children_forbids_management() {
        for mark in MARKS {
            let state = with(&[(mark, 20..30)]);
            let parts = state.unmarked([0..100].to_vec());
            let all = if mark == MemoryMark::DontFork {
                [0..100].to_vec()
            } else {
                [0..20, 30..100].to_vec()
            };
            assert_eq!(parts, all, "{mark:?}");
        }
    }

    #[test]
    fn marks_move_with_memory_and_what_was_there_has_none() {
        for mark in OTHERS {
            let mut state = with(&[(mark, 10..20), (mark, 500..600)]);
            move_all(&mut state, &moved(0..100, 500..600, false));
            assert_eq!(marked(&mut state, mark), [510..520], "{mark:?}");
        }
    }

    #[test]
    fn memory_that_stays_has_its_marks_but_for_locks() {
        let mut state = with(&[(MemoryMark::DontDump, 10..20), (MemoryMark::Locked, 30..40)]);
        move_all(&mut state, &moved(0..100, 500..600, true));
        assert_eq!(marked(&mut state, MemoryMark::DontDump), [10..20, 510..520]);
        assert_eq!(marked(&mut state, MemoryMark::Locked), [530..540]);
    }

    #[test]
    fn memory_that_is_cut_off_has_no_marks() {
        let mut state = with(&[(MemoryMark::Other, 10..90)]);
        move_all(&mut state, &moved(0..100, 0..50, false));
        assert_eq!(marked(&mut state, MemoryMark::Other), [10..50]);
        let mut state = with(&[(MemoryMark::Other, 10..90)]);
        move_all(&mut state, &moved(0..100, 500..550, false));
        assert_eq!(marked(&mut state, MemoryMark::Other), [510..550]);
    }

    #[test]
    fn memory_that_is_added_is_marked_as_that_before_it() {
        for (mark, last) in [(MemoryMark::Locked, 99..100), (MemoryMark::Other, 0..100)] {
            let mut state = with(&[(mark, last.clone())]);
            move_all(&mut state, &moved(0..100, 0..150, false));
            assert_eq!(marked(&mut state, mark), [last.start..150]);
            let mut state = with(&[(mark, last.clone())]);
            move_all(&mut state, &moved(0..100, 500..650, false));
            assert_eq!(marked(&mut state, mark), [500 + last.start..650]);
        }
        let mut state = with(&[(MemoryMark::Locked, 0..99), (MemoryMark::Own, 0..100)]);
        move_all(&mut state, &moved(0..100, 0..150, false));
        assert_eq!(marked(&mut state, MemoryMark::Locked), [0..99]);
        assert_eq!(marked(&mut state, MemoryMark::Own), [0..100], "what comes is the program's");
    }

    #[test]
    fn nothing_of_a_call_apart_is_managed_until_it_ends() {
        let mut state = with(&[(MemoryMark::Other, 10..20)]);
        let before = state.before(&[0..100, 200..300], Vec::new());
        let apart = state.begin_apart(7, Some(3), before);
        assert_eq!(state.unmarked([0..400].to_vec()), [100..200, 300..400]);
        assert!(state.apart_of(3).is_some() && state.apart_of(4).is_none());
        let before = state.end_apart(apart);
        assert_eq!(before.parts, [0..100, 200..300]);
        assert_eq!(before.marks, [(MemoryMark::Other, 10..20)]);
        assert_eq!(marked(&mut state, MemoryMark::Other), [10..20], "that one was there");
        assert!(state.apart_of(3).is_none());
    }

    #[test]
    fn memory_mapped_during_a_call_apart_is_not_of_it() {
        let mut state = ProgramState::default();
        let before = state.before(&[0..100, 0..0], Vec::new());
        let apart = state.begin_apart(1, None, before);
        // Another thread maps a range, and gives a part of it to a device.
        state.note_new(&(40..60));
        state.forget(&(40..60));
        state.marked(MemoryMark::Other).add(50..60);
        let before = state.end_apart(apart);
        assert_eq!(before.parts, [0..40, 60..100]);
        assert_eq!(marked(&mut state, MemoryMark::Other), [50..60]);
    }

    #[test]
    fn two_calls_apart_on_the_same_memory_end_in_any_order() {
        for first_ends_first in [true, false] {
            let mut state = ProgramState::default();
            let begin = |state: &mut ProgramState, number, range: Range<usize>| {
                let before = state.before(&[range], Vec::new());
                state.begin_apart(number, None, before)
            };
            let first = begin(&mut state, 1, 0..60);
            let second = begin(&mut state, 2, 40..100);
            let order = if first_ends_first { [first, second] } else { [second, first] };
            let [one, other] = order.map(|apart| state.end_apart(apart).parts);
            assert_eq!(one.len() + other.len(), 2);
            assert!(marked(&mut state, MemoryMark::Other).is_empty());
        }
    }

    #[test]
    fn faults_of_the_program_are_where_they_were_before_a_move() {
        let all = moved(100..200, 500..550, false);
        assert_eq!(all.there(&(110..120)), 510..520);
        assert_eq!(all.there(&(140..160)), 540..550);
        assert!(all.there(&(160..170)).is_empty());
    }

    #[test]
    fn nothing_more_is_taken_while_the_program_forbids_it() {
        assert!(ProgramState::default().takes());
        for forbid in [
            (|s| s.locks_future = true) as fn(&mut ProgramState),
            |s| s.merges = true,
            |s| s.traced = 1,
        ] {
            let mut state = ProgramState::default();
            forbid(&mut state);
            assert!(!state.takes());
        }
    }
}
