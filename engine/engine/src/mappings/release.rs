//! The end of management: memory is loaded, and then belongs to the kernel alone.
use crate::mappings::Mappings;
use crate::mappings::ranges::KeyRanges;
use core::ops::Range;
use memfold_os::thread::yield_now;
use memfold_os::units::{MAX_PAGES, PAGE_SHIFT, PAGE_SIZE};

impl Mappings<'_> {
    /// Loads the folded parts of a range of addresses and ends its management. `unregister` is
    /// called for each part (addresses), at a moment when all its pages are in the page table, and
    /// none has a folio any more.
    ///
    /// It works part by part, so that only one part at a time must fit the bounds. An engine thread
    /// calls it while no area may be added.
    pub fn leave(&self, addrs: Range<usize>, mut unregister: impl FnMut(usize, usize)) {
        while let Some(part) = self.first_part(&addrs) {
            // Otherwise other threads may evict the part as fast as it is loaded.
            let holds = self.holds.are_used();
            // Without room for a hold it takes longer.
            let hold = holds.then(|| self.holds.hold(0, part.clone()).ok()).flatten();
            self.need_at(part.clone());
            let outcome = self.leave_at_home(part, &mut unregister);
            if let Some(hold) = hold {
                self.holds.release(hold);
            }
            if !outcome {
                yield_now();
            }
        }
    }

    /// Returns the first managed part of a range of addresses, at most a chunk of keys.
    fn first_part(&self, addrs: &Range<usize>) -> Option<Range<usize>> {
        let areas = self.areas.read();
        let (first, last) =
            ((addrs.start >> PAGE_SHIFT) as u64, addrs.end.div_ceil(PAGE_SIZE) as u64);
        let area = areas.iter().find(|a| a.start < last && first < a.end)?;
        let start = first.max(area.start);
        let key = start - area.start + area.key;
        let in_chunk = MAX_PAGES as u64 - key % MAX_PAGES as u64;
        let end = last.min(area.end).min(start + in_chunk);
        Some((start << PAGE_SHIFT) as usize..(end << PAGE_SHIFT) as usize)
    }

    /// Ends the management of a part of one area, if every page of it that was touched is in the
    /// page table.
    fn leave_at_home(&self, part: Range<usize>, unregister: &mut impl FnMut(usize, usize)) -> bool {
        let mut areas = self.areas.write();
        let (first, last) = ((part.start >> PAGE_SHIFT) as u64, (part.end >> PAGE_SHIFT) as u64);
        let Some(area) = areas.find(part.start).copied().filter(|a| last <= a.end) else {
            return false;
        };
        let keys = first - area.start + area.key..last - area.start + area.key;
        let key_ranges = KeyRanges::new(self.engine);
        key_ranges.unfold_across(keys.start);
        key_ranges.unfold_across(keys.end);
        if !key_ranges.is_home(keys.start, keys.end) {
            return false;
        }
        let mut pages = 0;
        self.table.each(keys, |guard, id| {
            pages += self.table.get(guard, id).pages();
            self.table.remove(guard, id, self.backing);
        });
        self.table.tally().unmap(pages);
        self.budget.quota().add_outside(pages << PAGE_SHIFT);
        areas.remove(first, last);
        unregister(part.start, part.end);
        true
    }
}
