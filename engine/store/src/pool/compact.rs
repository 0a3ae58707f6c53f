//! Compaction: objects of sparse spans move into the gaps of fuller ones, behind their handles.
use crate::pool::arena::NIL;
use crate::pool::entry::PoolLocation;
use crate::pool::size_class::{CLASSES, SizeClass};
use crate::pool::span::PoolSpan;
use crate::pool::{ClassState, Pool, group, owner_of};
use memfold_os::sync::atomic::Ordering::*;

/// Warm bytes that gather before compaction returns them in one step.
const FLUSH: u64 = 1 << 20;
/// A class is sparse when more than one slot in this many is free.
const SPARSE_PART: usize = 8;
/// Approximate bytes of spans that one step of [`Pool::tidy`] empties.
const STEP_BYTES: usize = 256 << 10;
/// Sparse spans that are examined for one without readers.
const TRIES: usize = 8;

impl Pool {
    /// Returns memory to the kernel, until `bytes` are returned or nothing is left to gain: first
    /// the spans kept for reuse, then spans that can be emptied into others. Returns the bytes.
    pub(crate) fn compact(&self, bytes: u64) -> u64 {
        let mut pages = self.arena.trim_to(0);
        let mut empty_spans = 0;
        for (index, class) in CLASSES.iter().enumerate().filter(|(_, class)| !class.is_sole()) {
            while pages + empty_spans < bytes && self.empty_one(index) {
                empty_spans += class.span_bytes() as u64;
                if empty_spans >= FLUSH {
                    pages += self.arena.trim_to(0);
                    empty_spans = 0;
                }
            }
        }
        pages += self.arena.trim_to(0);
        self.counters.compacted.fetch_add(pages, Relaxed);
        pages
    }

    /// Does one bounded step of compaction where a class leaves more than an eighth of its slots
    /// free: objects of up to 256 KiB move. Returns the bytes of the spans that were emptied, whose
    /// memory is returned to the kernel beyond the allowance of warm spans; 0 if nothing is sparse.
    pub(crate) fn tidy(&self) -> u64 {
        let (mut empty_spans, mut moves) = (0, 0);
        for (index, class) in CLASSES.iter().enumerate().filter(|(_, class)| !class.is_sole()) {
            let sparse = || {
                let state = self.lock_class(index);
                let slots = state.spans as usize * class.slots as usize;
                let free = slots - state.objects as usize;
                free >= class.slots as usize && free > slots / SPARSE_PART
            };
            while moves < STEP_BYTES && sparse() && self.empty_one(index) {
                empty_spans += class.span_bytes() as u64;
                moves += class.span_bytes();
            }
        }
        if empty_spans > 0 {
            let pages = self.arena.trim();
            self.counters.compacted.fetch_add(pages, Relaxed);
        }
        empty_spans
    }

    /// Empties the sparsest span of a class into the others. Returns `false` if they have no room
    /// for it.
    fn empty_one(&self, class_index: usize) -> bool {
        let class = &CLASSES[class_index];
        let mut state = self.lock_class(class_index);
        self.reap(&mut state);
        let room = state.spans as usize * class.slots as usize - state.objects as usize;
        // As many free slots as a span has: then the others can take all objects of any one span.
        if room < class.slots as usize {
            return false;
        }
        let Some((index, span)) = self.sparsest(&state) else { return false };
        if !self.owners_fit(class, index, span) {
            return false;
        }
        self.move_objects(&mut state, class, index, span);
        state.spans -= 1;
        if span.is_pinned() {
            // A reader came before its object's entry changed. The class stays noted, because the
            // reader needs it.
            state.limbo.push(index, span);
            state.limbo_spans += 1;
            return false;
        }
        self.arena.free(index);
        true
    }

    /// Returns a span of the sparsest group without pins.
    fn sparsest(&self, state: &ClassState) -> Option<(u32, &PoolSpan)> {
        for list in state.partial {
            let mut at = list.first();
            let mut best: Option<(u32, &PoolSpan)> = None;
            for _ in 0..TRIES {
                let Some(span) = self.arena.span(at).filter(|_| at != NIL) else { break };
                // Writers pin under the class lock, so an unpinned span has no object that is being
                // written.
                if !span.is_pinned() && best.is_none_or(|(_, b)| span.in_use() < b.in_use()) {
                    best = Some((at, span));
                }
                at = span.next();
            }
            if best.is_some() {
                return best;
            }
        }
        None
    }

    /// Returns whether every object of the span names an entry that names it; `false` if one is
    /// damaged.
    fn owners_fit(&self, class: &SizeClass, index: u32, span: &PoolSpan) -> bool {
        span.used_slots().all(|slot| {
            // SAFETY: a used slot of a span whose class is locked.
            let owner = unsafe { owner_of(span, class, self.arena.slot(span, class, slot)) };
            let place = self.entries.get(owner).and_then(|e| e.snapshot(owner).ok());
            place.is_some_and(|p| p.is_live() && p.place() == PoolLocation { span: index, slot })
        })
    }

    /// Copies all objects of a span into other spans of the class and changes their entries.
    fn move_objects(&self, state: &mut ClassState, class: &SizeClass, index: u32, span: &PoolSpan) {
        let before = group(class, span);
        let slots = span.in_use();
        // A span that counts as empty is in no list, so the objects can't be moved within it.
        span.set_in_use(0);
        self.regroup(state, class, index, before);
        span.set_in_use(slots);
        for slot in span.used_slots() {
            let from = self.arena.slot(span, class, slot);
            let to_index = state.fullest().expect("the other spans have room");
            let (to_span, to_slot) = self.allocate_slot(state, class, to_index);
            let to = self.arena.slot(to_span, class, to_slot);
            // SAFETY: both are slots of `slot_bytes` bytes in different spans. `to` was free and
            // belongs to this thread under the class lock. `from` is only read, by this thread and
            // perhaps by readers. `owners_fit` checked the owner.
            let owner = unsafe {
                core::ptr::copy_nonoverlapping(from, to, class.slot_bytes as usize);
                owner_of(span, class, from)
            };
            if let Some(entry) = self.entries.get(owner) {
                entry.set_place(
                    owner,
                    entry.generation_unchecked(),
                    PoolLocation { span: to_index, slot: to_slot },
                );
            }
        }
        self.counters.moved.fetch_add(slots as u64, Relaxed);
        span.clear();
    }
}
