//! Queries of managed memory.
use crate::mappings::Mappings;
use alloc::vec::Vec;
use memfold_os::units::PAGE_SHIFT;

impl Mappings<'_> {
    /// Returns whether an address is managed.
    pub fn manages(&self, addr: usize) -> bool {
        self.areas.read().find(addr).is_some()
    }

    /// Returns the parts of `[start, end)` that are not managed.
    pub fn unmanaged_parts(&self, start: usize, end: usize) -> Vec<(usize, usize)> {
        let areas = self.areas.read();
        let mut parts = Vec::new();
        let mut at = start;
        for area in areas.iter() {
            let (s, e) = ((area.start as usize) << PAGE_SHIFT, (area.end as usize) << PAGE_SHIFT);
            if e <= at || s >= end {
                continue;
            }
            if s > at {
                parts.push((at, s));
            }
            at = e;
        }
        if at < end {
            parts.push((at, end));
        }
        parts
    }
}
