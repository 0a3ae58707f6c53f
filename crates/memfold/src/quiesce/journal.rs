//! What is served while the engine is at rest for a fork, and what of it the child is told.
//!
//! The thread that forks, and others that hold locks which it waits for, may still need a folded
//! page. At rest nothing of the engine may change, as the child gets a copy of it at some moment.
//! So a page is decompressed and *copied* home, and the index goes on to say that it is folded;
//! each such page is noted before it is there, and put in order after the rest. Changes of the
//! address space are noted too, so that whoever makes them goes on, and applied after the rest.
//!
//! The notes lie in memory that parent and child have in common. How many there were when the copy
//! was made the child knows from its own copy of the count; what was noted later may have happened
//! before the copy all the same, and [`crate::quiesce::copy_moment`] tells.
use crate::area::{Areas, page_of};
use crate::quiesce::copy_moment::Pages;
use alloc::vec::Vec;
use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
// The log is shared by processes, and all zeros at first: never a model checker's.
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use memfold_sys::Errno;
use memfold_sys::memory::zone::SharedZone;
use memfold_sys::sync::Mutex;
use memfold_sys::thread::{now_ns, sleep_ns};
use memfold_sys::uffd::Event;
use memfold_sys::units::PAGE_SIZE;

/// Notes that a log holds: seconds of nothing but changes.
const NOTES: usize = 1 << 16;

/// How long a child of fork waits until its parent has logged a change that was under way when the
/// copy was made; and how long a fork waits until the child of the fork before needs no more of the
/// log. Nanoseconds.
pub const CATCH_UP_NS: u64 = 5_000_000_000;
/// How often a fork looks whether that child needs no more notes.
const PACE_NS: u64 = 200_000;

/// No copy takes so long, or if it does, a doubt is better than to let the thread wait that makes
/// it.
const LONG_NS: u64 = 2_000_000_000;

/// One note.
#[derive(Copy, Clone)]
pub enum Note {
    /// A page that was about to be copied home.
    Page(usize),
    /// A change that was read.
    Change(Event),
    /// All changes that were made are noted.
    Quiet,
}

#[repr(C)]
struct Log {
    count: AtomicUsize,
    /// Reads of the descriptor that have ended.
    reads: AtomicUsize,
    /// There is a child, so its copy has been made.
    born: AtomicBool,
    /// The child needs no more notes.
    content: AtomicBool,
    /// The parent makes no more.
    closed: AtomicBool,
    /// Each with the number of the read that it comes from.
    notes: [UnsafeCell<MaybeUninit<(Note, usize)>>; NOTES],
}

/// A log in memory that children share.
struct SharedLog(SharedZone);

impl SharedLog {
    fn new() -> Result<SharedLog, Errno> {
        SharedZone::reserve(size_of::<Log>().next_multiple_of(PAGE_SIZE)).map(SharedLog)
    }

    fn log(&self) -> &Log {
        // SAFETY: the zone is large enough, page-aligned and all zeros at first, which is a log
        // without notes. What changes in it is atomic, or a note that nobody reads before it is
        // counted.
        unsafe { &*self.0.as_ptr().cast::<Log>() }
    }

    fn note(&self, at: usize) -> (Note, usize) {
        // SAFETY: the caller has seen it counted, so it was written, and never will be again.
        unsafe { (*self.log().notes[at].get()).assume_init() }
    }
}

/// The notes of a rest, and whether there is one.
#[derive(Default)]
pub struct Journal {
    on: AtomicBool,
    /// The copy may be made at any moment: the caller of [`Journal::begin`] has gone on.
    copying: AtomicBool,
    /// A child may need what is noted after the rest.
    told: AtomicBool,
    /// Pages that were copied home are still to be put in order.
    unsettled: AtomicBool,
    /// Marks may be missing, or be where nothing is managed.
    unsure: AtomicBool,
    notes: Mutex<Notes>,
}

/// See the module.
#[derive(Default)]
pub struct Notes {
    log: Option<SharedLog>,
    own: Own,
    /// The thread that forks, if there are others beside it; 0 otherwise.
    forker: u32,
    began_ns: u64,
    /// Where the noted pages are now.
    pages: Vec<usize>,
}

/// What is not shared: a child finds what it was when its copy was made. On one page, so that all
/// of it is of one moment.
#[derive(Default)]
#[repr(align(64))]
struct Own {
    /// How many notes there are.
    count: AtomicUsize,
    /// Reads of the descriptor that have begun and ended.
    begun: AtomicUsize,
    ended: AtomicUsize,
}

/// What a child of fork finds next in the notes.
pub enum Later {
    /// A note.
    Note(Note),
    /// Nothing yet.
    Nothing,
    /// Nothing, and there will be no more.
    End,
}

impl Journal {
    /// It begins: the gates are closed. `forker`: the thread that forks, if there are others beside
    /// it, else 0.
    ///
    /// # Errors
    /// What reserving memory for the notes says.
    pub fn begin(&self, forker: u32) -> Result<(), Errno> {
        let log = SharedLog::new()?;
        let mut notes = self.notes.lock();
        notes.end_log();
        *notes = Notes { log: Some(log), forker, began_ns: now_ns(), ..Notes::default() };
        self.told.store(forker != 0, SeqCst);
        self.copying.store(false, SeqCst);
        self.unsure.store(false, SeqCst);
        self.on.store(true, SeqCst);
        Ok(())
    }

    /// Waits until the child of the fork before needs no more notes, but not for ever: it may have
    /// been killed.
    pub fn wait_for_child(&self) {
        let begin = now_ns();
        while self.told.load(SeqCst)
            && !self.notes.lock().is_content()
            && now_ns() - begin < CATCH_UP_NS
        {
            sleep_ns(PACE_NS);
        }
    }

    /// At rest: what is managed where, by the index (`areas`) and the changes that are noted, and
    /// how many notes there are. `is_quiet` tells whether there are no other changes; `None` if
    /// there are. To be asked again then: whoever makes them waits for who reads them.
    pub fn managed(&self, mut areas: Areas, is_quiet: impl Fn() -> bool) -> Option<(Areas, usize)> {
        let mut notes = self.notes.lock();
        // Nobody reads while the notes are locked, so there is nothing between the two.
        if !is_quiet() {
            return None;
        }
        notes.bring_up_to_date(&mut areas);
        notes.push(Note::Quiet);
        Some((areas, notes.own.count.load(SeqCst)))
    }

    /// At rest: calls `settle` with what is managed where (`areas` is what the index says), and all
    /// that other threads have changed since it began: addresses in ascending order, of which no
    /// two overlap. `false` if they were changing something when it was called, or while it ran, so
    /// that it may have acted on what was there no longer: to be asked again.
    pub fn settle_changed(
        &self,
        mut areas: Areas,
        is_quiet: impl Fn() -> bool,
        settle: impl FnOnce(&Areas, &[(usize, usize)]),
    ) -> bool {
        let notes = self.notes.lock();
        // Nobody reads while the notes are locked: if it is quiet at the end, it was so all the
        // time.
        if !is_quiet() {
            return false;
        }
        notes.bring_up_to_date(&mut areas);
        settle(&areas, &notes.changed());
        is_quiet()
    }

    /// At rest: whether other threads have changed mappings since it began.
    pub fn has_changed(&self) -> bool {
        self.notes.lock().changes(0).next().is_some()
    }

    /// After a rest in which no copy was made: nobody will need the notes.
    pub fn forget(&self) {
        let mut notes = self.notes.lock();
        self.told.store(false, SeqCst);
        notes.end_log();
    }

    /// Where pages have been moved to, by the notes from number `from` on.
    pub fn moved_since(&self, from: usize) -> Vec<Pages> {
        let notes = self.notes.lock();
        let moved = notes.changes(from).filter_map(|change| match change {
            Event::Remap { to, len, .. } => Some((page_of(to), page_of(to + len))),
            _ => None,
        });
        moved.collect()
    }

    /// At rest: notes pages that are there.
    pub fn note_pages(&self, pages: &[usize]) {
        let mut notes = self.notes.lock();
        pages.iter().for_each(|page| notes.note_page(*page));
    }

    /// At rest: says that other threads never stopped changing mappings, so a child can't tell what
    /// is managed in it.
    pub fn note_unsure(&self) {
        self.unsure.store(true, SeqCst);
    }

    /// Whether that was said.
    pub fn is_unsure(&self) -> bool {
        self.unsure.load(SeqCst)
    }

    /// From now on the copy may be made at any moment.
    pub fn begin_copying(&self) {
        self.copying.store(true, SeqCst);
    }

    /// At rest, lets `one` serve messages until it returns false. Does nothing otherwise.
    pub fn receive(&self, mut one: impl FnMut(&mut Notes) -> bool) {
        let mut notes = self.notes.lock();
        loop {
            if !self.on.load(SeqCst) || !one(&mut notes) {
                return;
            }
        }
    }

    /// Whether a message must not be read now, because the copy might be made between its reading
    /// and its logging: the child would then know nothing of it. `is_asleep` tells whether a thread
    /// sleeps: the thread that forks makes no copy then.
    pub fn may_miss(&self, notes: &Notes, is_asleep: impl FnOnce(u32) -> bool) -> bool {
        notes.forker != 0
            && self.copying.load(SeqCst)
            && !notes.is_born()
            && now_ns() - notes.began_ns < LONG_NS
            && !is_asleep(notes.forker)
    }

    /// It ends: gives the changes and quiet moments to `apply`. The pages are still to be put in
    /// order, see [`Journal::noted_page`].
    pub fn end(&self, mut apply: impl FnMut(Note)) {
        let mut notes = self.notes.lock();
        self.on.store(false, SeqCst);
        for at in 0..notes.own.count.load(SeqCst) {
            let (note, _) = notes.log.as_ref().expect("at rest there is a log").note(at);
            notes.follow(note, &mut apply);
        }
        self.unsettled.store(!notes.pages.is_empty(), SeqCst);
    }

    /// After a rest: where a page is that was copied home, and is still to be put in order.
    pub fn noted_page(&self) -> Option<usize> {
        self.notes.lock().pages.last().copied()
    }

    /// The page that was at `page` when one asked is in order, if it still is there.
    pub fn end_page(&self, page: usize) {
        let mut notes = self.notes.lock();
        notes.pages.pop_if(|noted| *noted == page);
        self.unsettled.store(!notes.pages.is_empty(), SeqCst);
    }

    /// After a rest: a change was read and is about to be applied. Noted pages are followed, and a
    /// child that may need it is told.
    pub fn tell(&self, change: Event) {
        let told = self.told.load(SeqCst);
        if !told && !self.unsettled.load(SeqCst) {
            return;
        }
        let mut notes = self.notes.lock();
        notes.follow(Note::Change(change), &mut |_| ());
        if told && (notes.is_content() || notes.own.count.load(SeqCst) == NOTES) {
            self.told.store(false, SeqCst);
            notes.end_log();
        } else if told {
            notes.push(Note::Change(change));
        }
    }
}

/// In a child of fork, whose notes are the parent's as they were when the copy was made.
impl Journal {
    /// Begins anew what the parent's threads had begun, and returns how many notes there were.
    ///
    /// # Safety
    /// - The caller is the only engine thread of a child of fork.
    pub unsafe fn reset_in_child(&self) -> usize {
        // SAFETY: whoever held the lock in the parent is not there.
        unsafe { self.notes.reset() };
        self.told.store(false, SeqCst);
        let notes = self.notes.lock();
        notes.log().born.store(true, SeqCst);
        notes.own.count.swap(0, SeqCst)
    }

    /// Note `at`, if it was made.
    pub fn note(&self, at: usize) -> Later {
        let notes = self.notes.lock();
        let closed = notes.log().closed.load(SeqCst);
        match &notes.log {
            Some(log) if at < log.log().count.load(SeqCst) => Later::Note(log.note(at).0),
            _ if closed => Later::End,
            _ => Later::Nothing,
        }
    }

    /// Whether a discard was read just before or just after the copy was made, so that nobody can
    /// tell whether its caller had gone on; `count` as from [`Journal::reset_in_child`]. `None`
    /// while the parent is still reading.
    pub fn is_doubtful(&self, count: usize) -> Option<bool> {
        let notes = self.notes.lock();
        let begun = notes.own.begun.load(SeqCst);
        if notes.own.ended.load(SeqCst) == begun {
            return Some(false);
        }
        if notes.log().reads.load(SeqCst) < begun {
            return None;
        }
        let next = || notes.log.as_ref().expect("a fork has a log").note(count);
        let discard = notes.log().count.load(SeqCst) > count
            && matches!(next(), (Note::Change(Event::Remove { .. }), read) if read == begun);
        Some(discard)
    }

    /// Takes a note in: gives it to `apply`, but for pages.
    pub fn follow(&self, note: Note, mut apply: impl FnMut(Note)) {
        self.notes.lock().follow(note, &mut apply);
    }

    /// The first of these pages that was not copied home at rest.
    pub fn first_unknown(&self, pages: &[usize]) -> Option<usize> {
        let mut known = self.notes.lock().pages.clone();
        known.sort_unstable();
        pages.iter().copied().find(|page| known.binary_search(page).is_err())
    }

    /// No more notes are needed.
    pub fn be_content(&self) {
        let notes = self.notes.lock();
        notes.log().content.store(true, SeqCst);
    }
}

impl Notes {
    fn log(&self) -> &Log {
        self.log.as_ref().expect("a fork has a log").log()
    }

    /// At rest and quiet: makes the noted changes in `areas`, which are as the index says.
    fn bring_up_to_date(&self, areas: &mut Areas) {
        let log = self.log.as_ref().expect("at rest there is a log");
        for at in 0..self.own.count.load(SeqCst) {
            match log.note(at).0 {
                Note::Change(change) => areas.follow(change),
                Note::Quiet => areas.end_parked(),
                Note::Page(_) => {}
            }
        }
        areas.end_parked();
    }

    /// At rest: all addresses that noted changes were about, joined where they touch.
    fn changed(&self) -> Vec<(usize, usize)> {
        let ranges = self.changes(0).flat_map(|change| match change {
            Event::Remap { from, to, len } => [(from, from + len), (to, to + len)],
            Event::Unmap { start, end } => [(start, end), (0, 0)],
            _ => [(0, 0); 2],
        });
        let mut ranges: Vec<(usize, usize)> = ranges.filter(|(start, end)| start < end).collect();
        ranges.sort_unstable();
        let mut joined: Vec<(usize, usize)> = Vec::new();
        for (start, end) in ranges {
            match joined.last_mut() {
                Some(last) if last.1 >= start => last.1 = last.1.max(end),
                _ => joined.push((start, end)),
            }
        }
        joined
    }

    /// At rest: the changes among the notes from number `from` on.
    fn changes(&self, from: usize) -> impl Iterator<Item = Event> {
        let log = self.log.as_ref().expect("at rest there is a log");
        (from..self.own.count.load(SeqCst)).filter_map(|at| match log.note(at).0 {
            Note::Change(change) => Some(change),
            _ => None,
        })
    }

    /// No child is told any more.
    fn end_log(&mut self) {
        if let Some(log) = self.log.take() {
            log.log().closed.store(true, SeqCst);
        }
    }

    fn is_content(&self) -> bool {
        self.log.as_ref().is_none_or(|log| log.log().content.load(SeqCst))
    }

    fn is_born(&self) -> bool {
        self.log().born.load(SeqCst)
    }

    /// Reads a message by `read`, and notes it if it is a change.
    pub fn read(&mut self, read: impl FnOnce() -> Result<Event, Errno>) -> Result<Event, Errno> {
        let number = self.own.begun.load(SeqCst) + 1;
        self.own.begun.store(number, SeqCst);
        let message = read();
        if let Ok(change) = message
            && !matches!(change, Event::Fault { .. })
        {
            self.push(Note::Change(change));
        }
        self.own.ended.store(number, SeqCst);
        self.log().reads.store(number, SeqCst);
        message
    }

    /// Notes a page before it is copied home.
    pub fn note_page(&mut self, page: usize) {
        self.push(Note::Page(page));
    }

    fn push(&mut self, note: Note) {
        let at = self.own.count.load(SeqCst);
        assert!(
            at < NOTES,
            "memfold: too much memory is touched, or too many mappings change, while the program forks"
        );
        // SAFETY: nobody reads it before it is counted, and only the holder of the lock writes.
        unsafe { (*self.log().notes[at].get()).write((note, self.own.begun.load(SeqCst))) };
        self.log().count.store(at + 1, SeqCst);
        self.own.count.store(at + 1, SeqCst);
    }

    /// Whether so much has been noted that it is time to go slowly.
    pub fn is_half_full(&self) -> bool {
        self.own.count.load(SeqCst) > NOTES / 2
    }

    fn follow(&mut self, note: Note, apply: &mut impl FnMut(Note)) {
        match note {
            Note::Page(page) => self.pages.push(page),
            Note::Change(change) => {
                if let Event::Remap { from, to, len } = change {
                    let moved = self.pages.iter_mut().filter(|page| page.wrapping_sub(from) < len);
                    moved.for_each(|page| *page = *page - from + to);
                }
                apply(note);
            }
            Note::Quiet => apply(note),
        }
    }

    /// Where the index, which doesn't know of the noted changes, has what is at `page` now; `None`
    /// for fresh memory.
    pub fn origin(&self, page: usize) -> Option<usize> {
        let log = self.log.as_ref().expect("at rest there is a log");
        let mut at = page;
        for note in (0..self.own.count.load(SeqCst)).rev().map(|i| log.note(i).0) {
            match note {
                Note::Change(Event::Remap { from, to, len }) if at.wrapping_sub(to) < len => {
                    at = at - to + from
                }
                Note::Change(Event::Remap { from, len, .. }) if at.wrapping_sub(from) < len => {
                    return None;
                }
                Note::Change(Event::Unmap { start, end } | Event::Remove { start, end })
                    if start <= at && at < end =>
                {
                    return None;
                }
                _ => {}
            }
        }
        Some(at)
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use core::cell::Cell;

    const MIB: usize = 1 << 20;

    /// At rest, `changes` have been read.
    fn rest_with(changes: &[Event]) -> Journal {
        let rest = Journal::default();
        rest.begin(1).unwrap();
        for &change in changes {
            rest.receive(|notes| notes.read(|| Ok(change)).is_err());
        }
        rest
    }

    #[test]
    fn what_was_changed_at_rest_is_settled_by_what_is_managed_now() {
        let remap = Event::Remap { from: 16 * MIB, to: 32 * MIB, len: MIB };
        let rest = rest_with(&[
            remap,
            Event::Unmap { start: 16 * MIB, end: 17 * MIB },
            Event::Unmap { start: 17 * MIB, end: 18 * MIB },
        ]);
        let mut areas = Areas::default();
        areas.add(page_of(16 * MIB), page_of(20 * MIB));
        let mut seen = false;
        let done = rest.settle_changed(
            areas,
            || true,
            |managed, changed| {
                assert_eq!(changed, [(16 * MIB, 18 * MIB), (32 * MIB, 33 * MIB)]);
                let is_managed = |at| managed.find(at).is_some();
                assert!(
                    is_managed(32 * MIB)
                        && is_managed(18 * MIB)
                        && !is_managed(16 * MIB)
                        && !is_managed(17 * MIB)
                );
                seen = true;
            },
        );
        assert!(done && seen && rest.has_changed());
    }

    #[test]
    fn it_is_not_settled_if_there_was_a_change_before_or_meanwhile() {
        for quiet_at_first in [false, true] {
            let (rest, asked) = (rest_with(&[]), Cell::new(0));
            let is_quiet = || quiet_at_first && asked.replace(asked.get() + 1) == 0;
            let mut acted = false;
            assert!(!rest.settle_changed(Areas::default(), is_quiet, |_, changed| acted =
                changed.is_empty()));
            assert_eq!(acted, quiet_at_first);
        }
    }
}
