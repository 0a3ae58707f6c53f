//! Folios that could not be moved out because a fork still shares their pages: a background thread makes them private
//! again, with no lock held, since that may fault.
use memfold_sys::space::Space;
use memfold_sys::sync::Mutex;
use memfold_sys::units::PAGE_SIZE;

const NOTED: usize = 64;

/// Ranges of addresses to be made private.
pub struct Busy {
    ranges: Mutex<([(usize, usize); NOTED], usize)>,
}

impl Busy {
    /// None.
    pub const fn new() -> Busy {
        Busy { ranges: Mutex::new(([(0, 0); NOTED], 0)) }
    }

    /// Notes a range (address, bytes). Forgotten if too many are: it will be met again.
    pub fn note(&self, start: usize, len: usize) {
        let mut ranges = self.ranges.lock();
        let (list, count) = &mut *ranges;
        if *count < NOTED {
            list[*count] = (start, len);
            *count += 1;
        }
    }

    /// Makes the noted ranges private. A page that goes missing meanwhile is faulted in, so the caller holds no lock and
    /// is no fault handler. A range that has gone, or that a device has pinned, stays as it is. Returns whether there was any.
    pub fn unshare(&self, space: &dyn Space) -> bool {
        let (list, count) = {
            let mut ranges = self.ranges.lock();
            (ranges.0, core::mem::take(&mut ranges.1))
        };
        for page in list[..count].iter().flat_map(|&(start, len)| (start..start + len).step_by(PAGE_SIZE)) {
            // What is missing is folded, or was never there: it must not be brought here for this.
            if space.is_populated(page) {
                let _ = space.unshare(page, PAGE_SIZE);
            }
        }
        count > 0
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn too_many_ranges_are_forgotten_not_lost_count_of() {
        let busy = Busy::new();
        (0..NOTED + 10).for_each(|n| busy.note(n << 12, 4096));
        assert_eq!(busy.ranges.lock().1, NOTED);
    }
}
