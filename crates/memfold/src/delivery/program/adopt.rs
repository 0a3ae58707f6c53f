//! Adoption: memory of the program comes under management, and leaves it.
use super::{Watcher, each_mapping, each_private};
use alloc::vec::Vec;
use memfold_sys::Errno;
use memfold_sys::maps::flag;
use memfold_sys::sync::atomic::Ordering::Relaxed;
use memfold_sys::units::PAGE_SIZE;
use memfold_sys::zone::set_inherited;

impl Watcher {
    /// Takes what is not under management yet of ranges of private anonymous memory. `still` is asked, after a part was
    /// registered, whether it is still what it was taken for. Returns whether it was done; if not, the address space was
    /// changing, or other threads were at work for long: try again later. What is registered by then makes its program wait
    /// for a handler at every first touch.
    pub fn adopt(&self, ranges: &[(usize, usize)], still: &mut dyn FnMut(usize, usize) -> bool) -> bool {
        let reading = self.pager.changes.reading();
        let mut parts = Vec::new();
        for &(start, end) in ranges {
            for (start, end) in self.pager.unmanaged_parts(start, end) {
                self.register(start, end, &mut parts);
            }
        }
        self.begun.fetch_or(!parts.is_empty(), Relaxed);
        // Nothing is unregistered when it can't be taken: while an event is on its way, what looks unmanaged may be managed
        // memory that mremap has just brought here. Registered and not managed, a range is served page by page.
        let quiet = self.is_quiet();
        let mut done = quiet;
        for &(start, end) in &parts {
            done &= quiet && still(start, end) && self.manage(start, end);
        }
        drop(reading);
        done
    }

    /// Brings what is managed of `[start, end)` home and gives it back to the kernel: it is not folded again unless it is
    /// adopted again. With `inherited`, children of fork get it; without, that stays as it is. No adoption may be under way.
    pub fn release(&self, start: usize, end: usize, inherited: bool) {
        self.pager.leave(start..end, |start, end| {
            if inherited {
                set_inherited(start, end, true);
            }
            // It may have been unmapped meanwhile.
            let _ = self.uffd.unregister(start, end - start);
        });
    }

    /// Registers `[start, end)` and notes it in `parts`; mapping by mapping where the kernel refuses it as a whole, without
    /// those that it refuses, as one that the program serves through a userfaultfd of its own.
    fn register(&self, start: usize, end: usize, parts: &mut Vec<(usize, usize)>) {
        let mut register = |start: usize, end: usize| {
            // SAFETY: the handlers serve the range from now on. It is the program's, so no engine thread touches it.
            let done = unsafe { self.uffd.register(start, end - start, false) }.is_ok();
            if done {
                parts.push((start, end));
            }
            done
        };
        if !register(start, end) {
            each_mapping(start, end, |start, end| {
                register(start, end);
            });
        }
    }

    /// The parts of `[start, end)` that are registered. A part may have come after the rest was: the kernel registers what is
    /// mapped, says nothing of holes, and the program's break moves up again beside it. Who takes such a part for managed never
    /// hears of its faults.
    ///
    /// Called with the right to read events. What is found is true until an event is on its way: what is registered ends with
    /// one, and nobody else registers.
    fn registered(&self, start: usize, end: usize) -> Vec<(usize, usize)> {
        let mut parts: Vec<(usize, usize)> = Vec::new();
        each_mapping(start, end, |start, end| {
            // A mapping is registered whole or not at all.
            // SAFETY: nobody else defines what is registered and not managed: a missing page there is a new one.
            match unsafe { self.uffd.zero(start, PAGE_SIZE) } {
                Err(partial) if partial.errno != Errno::EXIST => {}
                _ => match parts.last_mut() {
                    Some(last) if last.1 == start => last.1 = end,
                    _ => parts.push((start, end)),
                },
            }
        });
        parts
    }

    /// Takes what is registered of `[start, end)` under management. Returns whether all of it is managed now.
    pub(super) fn manage(&self, start: usize, end: usize) -> bool {
        let parts = self.registered(start, end);
        let mut done = parts == [(start, end)];
        for (start, end) in parts {
            done &= self.manage_registered(start, end);
        }
        done
    }

    /// Takes a registered part under management. A child that comes to be past libc has no engine: it must not get the
    /// part, or it would read zeros where something is folded. Returns whether it is managed now. If not, that stays as it is,
    /// as for all that is registered: a part of a mapping with a property of its own would be another mapping to the kernel.
    fn manage_registered(&self, start: usize, end: usize) -> bool {
        if !self.is_quiet() {
            return false;
        }
        set_inherited(start, end, self.pager.is_inherited());
        if self.is_quiet() {
            return self.pager.manage(start, end, &self.pagemap).is_ok();
        }
        self.inherit_unregistered(start, end);
        false
    }

    /// Lets children of fork get what is not registered of `[start, end)`: it was mapped there after one last looked, and has
    /// a property that was meant for what was there before.
    fn inherit_unregistered(&self, start: usize, end: usize) {
        each_private(|area, about| {
            let (start, end) = (area.start.max(start), area.end.min(end));
            if start < end && about.has(flag::DONT_FORK) && !about.has(flag::UFFD_MISSING) {
                set_inherited(start, end, true);
            }
        });
    }
}
