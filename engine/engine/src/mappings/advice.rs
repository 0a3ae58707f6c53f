//! The owner's requests for managed memory, by address. They lock `areas` and turn addresses into
//! keys.
use crate::mappings::Mappings;
use crate::mappings::ranges::KeyRanges;
use core::ops::Range;
use memfold_os::units::{PAGE_SHIFT, PAGE_SIZE};

/// Returns the pages that lie wholly in a byte range, or with `outwards` those that it touches.
fn pages(addrs: &Range<usize>, outwards: bool) -> Range<u64> {
    let (start, end) = if outwards {
        (addrs.start >> PAGE_SHIFT, addrs.end.div_ceil(PAGE_SIZE))
    } else {
        (addrs.start.div_ceil(PAGE_SIZE), addrs.end >> PAGE_SHIFT)
    };
    start as u64..end.max(start) as u64
}

impl Mappings<'_> {
    /// Manages `[start, end)`, which touches no area, is registered already, and holds no page.
    ///
    /// # Panics
    /// If it overlaps an area.
    pub fn manage_empty(&self, start: usize, end: usize) {
        let mut areas = loop {
            if let Some(areas) = self.areas.grow() {
                break areas;
            }
        };
        areas.add((start >> PAGE_SHIFT) as u64, (end >> PAGE_SHIFT) as u64);
    }

    /// Folds the pages wholly inside a range of addresses now. Returns the number of evicted pages.
    pub fn page_out_at(&self, addrs: Range<usize>) -> u64 {
        let areas = self.areas.read();
        areas
            .parts(&pages(&addrs, false))
            .into_iter()
            .map(|(_, keys)| KeyRanges::new(self.engine).page_out(&areas, keys))
            .sum()
    }

    /// Makes the pages wholly inside a range of addresses the first to be folded when memory is
    /// needed.
    pub fn cool_at(&self, addrs: Range<usize>) {
        let areas = self.areas.read();
        areas
            .parts(&pages(&addrs, false))
            .into_iter()
            .for_each(|(_, keys)| KeyRanges::new(self.engine).cool(keys));
    }

    /// Loads and maps the folded pages that a range of addresses touches.
    pub fn need_at(&self, mut addrs: Range<usize>) {
        let need = |addrs: &Range<usize>| {
            let areas = self.areas.read();
            areas
                .parts(&pages(addrs, true))
                .into_iter()
                .try_for_each(|(area, keys)| KeyRanges::new(self.engine).need(&areas, &area, keys))
        };
        while let Err(at) = need(&addrs) {
            addrs.start = at;
            memfold_os::thread::yield_now();
        }
    }

    /// Drops the contents of the pages wholly inside a range of addresses: they read as zeros.
    ///
    /// # Safety
    /// - The bytes there are not needed any more, and no thread is using them.
    pub unsafe fn discard_at(&self, addrs: Range<usize>) {
        let areas = self.areas.write();
        areas
            .parts(&pages(&addrs, false))
            .into_iter()
            .for_each(|(area, keys)| KeyRanges::new(self.engine).discard_keys(&area, keys, true));
    }

    /// Pins the pages that a range of addresses touches. They stay mapped from their next touch,
    /// and writable, also for the kernel, until [`Mappings::unpin_at`] with the same range. Pins
    /// nest.
    pub fn pin_at(&self, addrs: Range<usize>) {
        let mut areas = self.areas.write();
        for (area, keys) in areas.parts(&pages(&addrs, true)) {
            areas.pin(keys.start, keys.end);
            KeyRanges::new(self.engine).unprotect(&area, keys);
        }
    }

    /// Ends one pin.
    pub fn unpin_at(&self, addrs: Range<usize>) {
        let mut areas = self.areas.write();
        areas
            .parts(&pages(&addrs, true))
            .into_iter()
            .for_each(|(_, keys)| areas.unpin(keys.start, keys.end));
    }
}
