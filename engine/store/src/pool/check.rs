//! Checks the whole pool against its equations.
//!
//! - the used slots of a span = its bits = its count; each names a live entry, and that entry names
//!   the slot
//! - live entries + free entries = entries ever used; live entries = the objects of all classes
//! - a class's spans, objects and bytes = the sums over its spans; partly used spans are in the
//!   list of their group
//! - class spans + warm + bare spans = spans ever cut; held bytes = class spans + warm spans
//! - every finished object's checksum fits
use crate::format;
use crate::pool::arena::{self, NIL};
use crate::pool::entries::FreeList;
use crate::pool::entry::PoolLocation;
use crate::pool::size_class::{CLASSES, COUNT};
use crate::pool::span::PoolSpan;
use crate::pool::{ClassState, Pool, group, owner_of};
use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use memfold_os::sync::MutexGuard;
use memfold_os::units::PAGE_SIZE;

/// A pool in which nothing is allocated, freed or moved while this lives. Reads go on.
pub(crate) struct FrozenPool<'a> {
    pool: &'a Pool,
    classes: Vec<MutexGuard<'a, ClassState>>,
    entries: MutexGuard<'a, FreeList>,
    arena: MutexGuard<'a, arena::ArenaState>,
}

/// The sums over the spans of a class.
#[derive(Copy, Clone, Default)]
struct SpanSums {
    spans: u32,
    objects: u32,
    stored: u64,
    original: u64,
    partial: u32,
    limbo: u32,
}

impl Pool {
    /// Takes every lock of the pool, in order.
    pub(crate) fn freeze(&self) -> FrozenPool<'_> {
        let classes = (0..COUNT).map(|c| self.lock_class(c)).collect();
        FrozenPool { pool: self, classes, entries: self.entries.lock(), arena: self.arena.lock() }
    }
}

impl FrozenPool<'_> {
    /// Returns the bytes of memory that the pool holds, as its parts count them.
    pub fn held(&self) -> u64 {
        self.arena.held + self.metadata_bytes()
    }

    /// Returns the bytes of entries and span descriptions.
    pub fn metadata_bytes(&self) -> u64 {
        self.pool.entries.bytes(&self.entries) + self.pool.arena.metadata_bytes(&self.arena)
    }

    /// Verifies everything, payloads included: takes time in proportion to the pool.
    ///
    /// # Errors
    /// Says what does not hold.
    pub fn check(&self) -> Result<(), String> {
        let mut sums = vec![SpanSums::default(); COUNT];
        let mut owned_bytes = 0;
        let mut pages = 0;
        for index in 0..self.arena.cut {
            let span = self.pool.arena.span(index).ok_or("span outside the table")?;
            let Some(class) = span.class() else { continue };
            let sum = sums
                .get_mut(class)
                .ok_or_else(|| format!("span {index} has no such class: {class}"))?;
            self.check_span(index, span, class, sum)
                .map_err(|e| format!("span {index} of class {class}: {e}"))?;
            pages += 1;
            owned_bytes += span.pages() as u64 * PAGE_SIZE as u64;
        }
        for (class, sum) in sums.iter().enumerate() {
            self.check_class(class, sum).map_err(|e| format!("class {class}: {e}"))?;
        }
        self.pool.arena.check(&self.arena, pages, owned_bytes)?;
        self.pool.entries.check(&self.entries)?;
        let live: u32 = sums.iter().map(|s| s.objects).sum();
        if live + self.entries.free != self.entries.fresh {
            return Err(format!(
                "{live} objects + {} free != {} entries",
                self.entries.free, self.entries.fresh
            ));
        }
        Ok(())
    }

    fn check_span(
        &self,
        index: u32,
        span: &PoolSpan,
        class_index: usize,
        sum: &mut SpanSums,
    ) -> Result<(), String> {
        let class = &CLASSES[class_index];
        if span.pages() != class.pages {
            return Err(format!("{} pages instead of {}", span.pages(), class.pages));
        }
        let count = span.used_slots().count();
        if count != span.in_use() as usize {
            return Err(format!("{count} bits but a count of {}", span.in_use()));
        }
        if count == 0 {
            sum.limbo += 1;
            return Ok(());
        }
        for slot in span.used_slots() {
            self.check_object(index, span, class_index, slot, sum)
                .map_err(|e| format!("slot {slot}: {e}"))?;
        }
        sum.spans += 1;
        sum.objects += count as u32;
        sum.partial += group(class, span).is_some() as u32;
        Ok(())
    }

    fn check_object(
        &self,
        index: u32,
        span: &PoolSpan,
        class: usize,
        slot: u8,
        sum: &mut SpanSums,
    ) -> Result<(), String> {
        let info = &CLASSES[class];
        if slot as u16 >= info.slots {
            return Err(format!("beyond the {} slots", info.slots));
        }
        // SAFETY: a used slot of a span whose class is locked.
        let owner = unsafe { owner_of(span, info, self.pool.arena.slot(span, info, slot)) };
        let entry = self.pool.entries.get(owner).filter(|_| owner < self.entries.fresh);
        let entry = entry.ok_or_else(|| format!("owner {owner} was never used"))?;
        let snapshot =
            entry.snapshot(owner).map_err(|w| format!("entry {owner} is damaged: {w:#x}"))?;
        if !snapshot.is_live() || snapshot.place() != (PoolLocation { span: index, slot }) {
            return Err(format!("entry {owner} points elsewhere"));
        }
        let header = entry.header();
        let len = header.len as usize;
        if len == 0 || len > info.payload_max() || crate::pool::size_class::of_payload(len) != class
        {
            return Err(format!("length {len} does not belong here"));
        }
        sum.stored += len as u64;
        sum.original += (PAGE_SIZE << header.order) as u64;
        // The writer of an object pins its span.
        if header.format != format::BUILDING || !span.is_pinned() {
            let name = crate::handle::ObjectName {
                pool: self.pool.number,
                index: owner,
                generation: snapshot.generation(),
            };
            let pin = self.pool.pin(name).map_err(|e| format!("{e:?}"))?;
            pin.verify().map_err(|e| format!("entry {owner}: {e:?}"))?;
        }
        Ok(())
    }

    fn check_class(&self, index: usize, sum: &SpanSums) -> Result<(), String> {
        let (state, class) = (&self.classes[index], &CLASSES[index]);
        if (state.spans, state.objects, state.limbo_spans) != (sum.spans, sum.objects, sum.limbo) {
            return Err(format!(
                "counts {:?} but has {:?} (spans, objects, in limbo)",
                (state.spans, state.objects, state.limbo_spans),
                (sum.spans, sum.objects, sum.limbo)
            ));
        }
        if (state.stored, state.original) != (sum.stored, sum.original) {
            return Err("stored or original bytes are wrong".into());
        }
        let mut count = 0;
        for (expected, list) in state.partial.iter().enumerate() {
            let (mut at, mut prev) = (list.first(), NIL);
            while let Some(span) = self.pool.arena.span(at) {
                if span.class() != Some(index)
                    || group(class, span) != Some(expected)
                    || span.prev() != prev
                {
                    return Err(format!("span {at} is wrong in list {expected}"));
                }
                count += 1;
                if count > sum.partial {
                    return Err("more spans listed than partly used".into());
                }
                (prev, at) = (at, span.next());
            }
        }
        if count == sum.partial { Ok(()) } else { Err("a partly used span is not listed".into()) }
    }
}
