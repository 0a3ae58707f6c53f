//! One pool: objects in slots of spans, found through entries.
//!
//! Lock order: one class, then entries or arena (never both). No lock is held while bytes are
//! compressed, decompressed, or copied in. Compaction copies at most one span (128 KiB) under the
//! lock of its class.
//!
//! # Reading beside compaction
//! A reader takes no lock. It reads the entry, pins the span, and reads the entry again. An
//! unchanged entry means that the object is here and stays here while pinned. Compaction, under the
//! class lock, copies the objects of an unpinned span elsewhere, changes their entries, and only
//! then looks at the pins. A reader that pinned before that is counted, so the old span is kept
//! aside (in limbo) until it is unpinned. A reader that pins later sees the changed entry and turns
//! back. All four accesses are SeqCst, so at least one side sees the other.
pub(crate) mod size_class;
pub(crate) mod entry;
pub(crate) mod area;
pub(crate) mod budget;
pub(crate) mod mark;
pub(crate) mod span;
pub(crate) mod arena;
pub(crate) mod entries;
pub(crate) mod check;
pub(crate) mod compact;

use crate::format;
use crate::handle::ObjectName;
use crate::hash::xxh3;
use crate::pool::area::AreaTable;
use crate::pool::arena::{NIL, SpanArena, SpanList};
use crate::pool::entries::EntryTable;
use crate::pool::entry::{ObjectEntry, ObjectHeader, PoolLocation};
use crate::pool::mark::ObjectMark;
use crate::pool::size_class::{CLASSES, SizeClass};
use crate::pool::span::PoolSpan;
use alloc::boxed::Box;
use memfold_os::raw::{LINE_BYTES, prefetch};
use memfold_os::sync::atomic::{AtomicU64, Ordering::*};
use memfold_os::sync::{Mutex, MutexGuard};
use memfold_os::thread::now_ns;
use memfold_os::units::{MAX_BYTES, PAGE_SIZE};

/// Partly used spans are listed by how full they are, in this many groups; the fullest are used
/// first.
const GROUPS: usize = 4;

pub(crate) struct Pool {
    pub(crate) number: u8,
    pub(crate) arena: SpanArena,
    pub(crate) entries: EntryTable,
    /// By the entry's index.
    pub(crate) marks: AreaTable<ObjectMark>,
    pub(crate) classes: Box<[Mutex<ClassState>]>,
    pub(crate) counters: PoolCounters,
}

#[derive(Default)]
pub(crate) struct PoolCounters {
    /// Times that the lock of a class was held by another thread.
    pub lock_waits: AtomicU64,
    /// Nanoseconds that these waits took.
    pub lock_wait_ns: AtomicU64,
    /// Objects moved by compaction.
    pub moved: AtomicU64,
    /// Bytes that compaction gave back to the kernel.
    pub compacted: AtomicU64,
    /// Frees of dead or damaged handles; nothing was freed.
    pub bad_frees: AtomicU64,
    /// Objects by their dictionary.
    pub dictionary_objects: [AtomicU64; format::CANNED_SLOTS],
}

/// Partly used spans are in the list of their group, full ones in none, empty ones leave the class.
/// `objects` = the used slots of all `spans`; limbo is not counted in `spans`. Zeros are a class
/// without spans.
pub(crate) struct ClassState {
    pub(crate) partial: [SpanList; GROUPS],
    /// Spans that compaction emptied while a reader was active there.
    pub(crate) limbo: SpanList,
    pub(crate) limbo_spans: u32,
    pub(crate) spans: u32,
    pub(crate) objects: u32,
    /// Payload bytes.
    pub(crate) stored: u64,
    /// Bytes of the blocks before compression.
    pub(crate) original: u64,
}

/// The payload for [`Pool::store`].
///
/// `head_len` bytes at `head`, then the rest of the `len` bytes at `bytes`.
pub(crate) struct ObjectPayload {
    pub head: *const u8,
    pub head_len: usize,
    pub bytes: *const u8,
    pub len: usize,
    pub order: u8,
    pub format: u8,
    pub mixed: bool,
}

/// No memory within the limit, or no address space or entry left.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PoolFull;

/// Why an object can't be read.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum ObjectDamage {
    /// The handle was never returned by a save, or was freed.
    Unknown,
    /// The entry or the object's own note of its owner is damaged.
    Entry,
    /// The header's checksum is not the payload's.
    Checksum { expected: u32, found: u32 },
}

/// An object that does not move until this is dropped.
pub(crate) struct PinnedObject<'a> {
    span: &'a PoolSpan,
    index: u32,
    pub header: ObjectHeader,
    /// `header.len` readable bytes.
    pub payload: *const u8,
}

impl Pool {
    pub fn new(
        number: u8,
        arena: SpanArena,
        entries: EntryTable,
        marks: AreaTable<ObjectMark>,
    ) -> Pool {
        // SAFETY: the state of a class is numbers and lists of spans, and zeros are valid for both.
        let classes = unsafe { Mutex::zeroed(CLASSES.len()) };
        Pool { number, arena, entries, marks, classes, counters: PoolCounters::default() }
    }

    /// Stores an object.
    ///
    /// # Errors
    /// [`PoolFull`]; nothing is changed then.
    ///
    /// # Safety
    /// - Both parts of the payload are readable, and no thread writes there meanwhile.
    pub unsafe fn store(&self, payload: &ObjectPayload) -> Result<ObjectName, PoolFull> {
        let len = payload.len;
        let slot = self.allocate(len, payload.order)?;
        if slot.is_fresh {
            self.arena.populate(slot.span);
        }
        // SAFETY: the slot is `len` bytes or longer, new, pinned, and unknown to other threads
        // until it is published; the caller vouches for the bytes.
        let hash = unsafe {
            core::ptr::copy_nonoverlapping(payload.head, slot.payload, payload.head_len);
            let rest = slot.payload.add(payload.head_len);
            core::ptr::copy_nonoverlapping(payload.bytes, rest, len - payload.head_len);
            hash(slot.payload, len)
        };
        let mut header = ObjectHeader {
            len: len as u32,
            order: payload.order,
            format: payload.format,
            mixed: payload.mixed,
            checksum: 0,
        };
        if let Some(slot) = format::dictionary_slot(payload.format) {
            self.counters.dictionary_objects[slot].fetch_add(1, SeqCst);
        }
        header.checksum = entry::checksum(header.fields(), slot.name.index, hash);
        slot.entry.set_header(header);
        slot.span.unpin();
        Ok(slot.name)
    }

    /// Prefetches what [`Pool::pin`] and a reader of the payload will read.
    #[inline]
    pub fn prefetch(&self, name: ObjectName) {
        let Some(entry) = self.entries.get(name.index) else { return };
        if let Some(mark) = self.marks.get(name.index) {
            prefetch((&raw const *mark).cast());
        }
        let Ok(snapshot) = entry.snapshot(name.index) else { return };
        let Some(span) = self.arena.span(snapshot.place().span) else { return };
        let Some(class) = span.class().and_then(|c| CLASSES.get(c)) else { return };
        // It is not pinned, so it may be another object's by now, and the address may be any. No
        // byte is read.
        let at = self.arena.slot_hint(span, class, snapshot.place().slot);
        let len = class.payload_offset() + entry.header().len as usize;
        (0..len.min(class.slot_bytes as usize))
            .step_by(LINE_BYTES)
            .for_each(|offset| prefetch(at.wrapping_add(offset)));
    }

    /// Finds and pins an object, without reading its payload. Takes no lock.
    ///
    /// # Errors
    /// [`ObjectDamage::Unknown`] or [`ObjectDamage::ObjectEntry`].
    #[inline]
    pub fn pin(&self, name: ObjectName) -> Result<PinnedObject<'_>, ObjectDamage> {
        let entry = self.entries.get(name.index).ok_or(ObjectDamage::Unknown)?;
        let (span, place) = loop {
            let snapshot = entry.snapshot(name.index).map_err(|_| ObjectDamage::Entry)?;
            if !snapshot.is_live() || snapshot.generation() != name.generation {
                return Err(ObjectDamage::Unknown);
            }
            let span = self.arena.span(snapshot.place().span).ok_or(ObjectDamage::Entry)?;
            span.pin();
            if entry.is_still(snapshot) {
                break (span, snapshot.place());
            }
            // Compaction moved the object in between. That is rare, and each turn needs another
            // move.
            span.unpin();
        };
        let mut pin = PinnedObject {
            span,
            index: name.index,
            header: entry.header(),
            payload: core::ptr::null(),
        };
        let class = span.class().and_then(|c| CLASSES.get(c)).ok_or(ObjectDamage::Entry)?;
        let len = pin.header.len as usize;
        if len == 0 || len > class.payload_max() || place.slot as u16 >= class.slots {
            return Err(ObjectDamage::Entry);
        }
        let at = self.arena.slot(span, class, place.slot);
        // SAFETY: the slot is pinned and holds this object, so it is readable and no thread writes
        // there.
        if unsafe { owner_of(span, class, at) } != name.index
            || pin.header.format == format::BUILDING
        {
            return Err(ObjectDamage::Entry);
        }
        pin.payload = at.wrapping_add(class.payload_offset());
        Ok(pin)
    }

    /// Frees an object. A dead or damaged handle is counted and changes nothing.
    pub fn free(&self, name: ObjectName) {
        match self.try_free(name) {
            Some(true) => self.arena.trim_some(),
            Some(false) => {}
            None => {
                self.counters.bad_frees.fetch_add(1, Relaxed);
            }
        }
    }

    /// Locks the state of class `class`.
    pub(crate) fn lock_class(&self, class: usize) -> MutexGuard<'_, ClassState> {
        self.classes[class].try_lock().unwrap_or_else(|| {
            let start = now_ns();
            let guard = self.classes[class].lock();
            self.counters.lock_waits.fetch_add(1, Relaxed);
            self.counters.lock_wait_ns.fetch_add(now_ns() - start, Relaxed);
            guard
        })
    }

    fn allocate(&self, len: usize, order: u8) -> Result<PinnedSlot<'_>, PoolFull> {
        let class_index = size_class::of_payload(len);
        let class = &CLASSES[class_index];
        let mut state = self.lock_class(class_index);
        let (index, generation, entry) = self.entries.allocate().ok_or(PoolFull)?;
        if !self.marks.need(index + 1) {
            self.entries.free(index);
            return Err(PoolFull);
        }
        let index_and_source = state.fullest().map(|index| (index, false));
        let Some((span_index, is_fresh)) =
            index_and_source.or_else(|| self.add_span(&mut state, class_index))
        else {
            self.entries.free(index);
            return Err(PoolFull);
        };
        let (span, slot) = self.allocate_slot(&mut state, class, span_index);
        let at = self.arena.slot(span, class, slot);
        // SAFETY: the slot was free and belongs to this thread now; only the holder of the class
        // lock hands slots out.
        unsafe { set_owner(span, class, at, index) };
        span.pin();
        entry.set_header(ObjectHeader {
            len: len as u32,
            order,
            format: format::BUILDING,
            mixed: false,
            checksum: 0,
        });
        entry.set_place(index, generation, PoolLocation { span: span_index, slot });
        state.objects += 1;
        state.stored += len as u64;
        state.original += (PAGE_SIZE << order) as u64;
        let name = ObjectName { pool: self.number, index, generation };
        Ok(PinnedSlot {
            name,
            entry,
            span,
            is_fresh,
            payload: at.wrapping_add(class.payload_offset()),
        })
    }

    /// Frees an object. Returns `None` for a dead or damaged handle, and `Some(true)` if the arena
    /// needs trimming.
    fn try_free(&self, name: ObjectName) -> Option<bool> {
        let entry = self.entries.get(name.index)?;
        let header = entry.header();
        let len = header.len as usize;
        if len == 0 || len > MAX_BYTES || (PAGE_SIZE << header.order) > MAX_BYTES {
            return None;
        }
        // The class follows from the length, so it is known before the lock. The place is read
        // under the lock.
        let class_index = size_class::of_payload(len);
        let class = &CLASSES[class_index];
        let mut state = self.lock_class(class_index);
        let snapshot = entry.snapshot(name.index).ok()?;
        if !snapshot.is_live() || snapshot.generation() != name.generation {
            return None;
        }
        let place = snapshot.place();
        let span = self.arena.span(place.span)?;
        if span.class() != Some(class_index) || !span.is_used(place.slot) {
            return None;
        }
        let before = group(class, span);
        span.free_slot(place.slot);
        if let Some(slot) = format::dictionary_slot(header.format) {
            // It must not fall below zero if the format is damaged.
            let _ = self.counters.dictionary_objects[slot]
                .fetch_update(SeqCst, SeqCst, |n| n.checked_sub(1));
        }
        self.entries.free(name.index);
        state.objects -= 1;
        state.stored -= len as u64;
        state.original -= (PAGE_SIZE << header.order) as u64;
        self.regroup(&mut state, class, place.span, before);
        if span.in_use() > 0 {
            return Some(false);
        }
        state.spans -= 1;
        Some(self.arena.free(place.span))
    }

    /// Returns a new span, and whether it has no memory yet.
    fn add_span(&self, state: &mut ClassState, class_index: usize) -> Option<(u32, bool)> {
        self.reap(state);
        let (index, is_fresh) = self.arena.allocate(CLASSES[class_index].pages)?;
        let span = self.arena.span(index)?;
        span.clear();
        span.set_class(Some(class_index));
        state.spans += 1;
        Some((index, is_fresh))
    }

    /// Allocates a slot of a span with room, and puts the span into the list where it then belongs.
    pub(crate) fn allocate_slot(
        &self,
        state: &mut ClassState,
        class: &SizeClass,
        index: u32,
    ) -> (&PoolSpan, u8) {
        let span = self.arena.span(index).expect("a listed span is in the table");
        let before = group(class, span);
        let slot = span.allocate_slot(class);
        self.regroup(state, class, index, before);
        (span, slot)
    }

    /// Moves a span whose use has changed from list `before` to the list where it belongs.
    pub(crate) fn regroup(
        &self,
        state: &mut ClassState,
        class: &SizeClass,
        index: u32,
        before: Option<usize>,
    ) {
        let span = self.arena.span(index).expect("a listed span is in the table");
        let after = group(class, span);
        if before != after {
            if let Some(group) = before {
                self.unlink(&mut state.partial[group], span);
            }
            if let Some(group) = after {
                self.link(&mut state.partial[group], index, span);
            }
        }
    }

    /// Returns the spans in limbo without pins to the arena.
    pub(crate) fn reap(&self, state: &mut ClassState) {
        let mut at = core::mem::take(&mut state.limbo).first();
        while let Some(span) = self.arena.span(at) {
            let next = span.next();
            if span.is_pinned() {
                state.limbo.push(at, span);
            } else {
                state.limbo_spans -= 1;
                self.arena.free(at);
            }
            at = next;
        }
    }

    fn link(&self, list: &mut SpanList, index: u32, span: &PoolSpan) {
        span.set_prev(NIL);
        if let Some(next) = self.arena.span(list.first()) {
            next.set_prev(index);
        }
        list.push(index, span);
    }

    fn unlink(&self, list: &mut SpanList, span: &PoolSpan) {
        match self.arena.span(span.prev()) {
            Some(prev) => prev.set_next(span.next()),
            None => list.set_first(span.next()),
        }
        if let Some(next) = self.arena.span(span.next()) {
            next.set_prev(span.prev());
        }
    }
}

#[cfg(test)]
impl Pool {
    /// Returns start and length of the used parts of the pool's address space.
    pub(crate) fn extents(&self) -> [(usize, usize); 4] {
        let (list, state) = (self.entries.lock(), self.arena.lock());
        let entries = self.entries.get(0).map_or(0, |e| e as *const ObjectEntry as usize);
        let spans = self.arena.span(0).map_or(0, |s| s as *const PoolSpan as usize);
        let (data, data_bytes) = self.arena.extent(&state);
        let marks = self.marks.get(0).map_or(0, |m| m as *const ObjectMark as usize);
        [
            (entries, AreaTable::<ObjectEntry>::bytes(list.fresh) as usize),
            (marks, AreaTable::<ObjectMark>::bytes(list.fresh) as usize),
            (spans, self.arena.metadata_bytes(&state) as usize),
            (data, data_bytes),
        ]
    }
}

impl ClassState {
    /// Returns the first span of the fullest group with room.
    pub(crate) fn fullest(&self) -> Option<u32> {
        self.partial.iter().rev().map(|list| list.first()).find(|first| *first != NIL)
    }
}

impl PinnedObject<'_> {
    /// Returns whether the header's checksum matches the payload.
    #[inline]
    pub fn verify(&self) -> Result<(), ObjectDamage> {
        // SAFETY: the pinned payload is `len` readable bytes that no thread writes.
        let hash = unsafe { hash(self.payload, self.header.len as usize) };
        let checksum = entry::checksum(self.header.fields(), self.index, hash);
        let expected = self.header.checksum;
        if checksum == expected {
            Ok(())
        } else {
            Err(ObjectDamage::Checksum { expected, found: checksum })
        }
    }
}

impl Drop for PinnedObject<'_> {
    #[inline]
    fn drop(&mut self) {
        self.span.unpin();
    }
}

/// A new slot, pinned.
struct PinnedSlot<'a> {
    name: ObjectName,
    entry: &'a ObjectEntry,
    span: &'a PoolSpan,
    /// The span has no memory yet.
    is_fresh: bool,
    payload: *mut u8,
}

/// Returns the list where a span belongs: none when it is full or empty.
pub(crate) fn group(class: &SizeClass, span: &PoolSpan) -> Option<usize> {
    let (in_use, slots) = (span.in_use() as usize, class.slots as usize);
    if in_use == 0 || in_use >= slots { None } else { Some(in_use * GROUPS / slots) }
}

/// # Safety
/// - `slot` is a used slot of `span`, which is pinned or whose class is locked.
#[inline]
pub(crate) unsafe fn owner_of(span: &PoolSpan, class: &SizeClass, slot: *const u8) -> u32 {
    if class.is_sole() {
        span.owner()
    } else {
        // SAFETY: a shared slot starts with its owner's index; slots are aligned to 16.
        unsafe { slot.cast::<u32>().read() }
    }
}

/// # Safety
/// - `slot` is a slot of `span` that no object uses yet, and the class is locked.
unsafe fn set_owner(span: &PoolSpan, class: &SizeClass, slot: *mut u8, index: u32) {
    if class.is_sole() {
        span.set_owner(index);
    } else {
        // SAFETY: as the caller says; a shared slot starts with its owner's index; slots are
        // aligned to 16.
        unsafe { slot.cast::<u32>().write(index) };
    }
}

/// # Safety
/// - `len` bytes at `payload` are readable, and no thread writes there during the call.
#[inline]
unsafe fn hash(payload: *const u8, len: usize) -> u64 {
    // SAFETY: as the caller says.
    let bytes = unsafe { core::slice::from_raw_parts(payload, len) };
    xxh3(bytes)
}
