//! Adoption: memory of the program comes under management, and leaves it.
//!
//! # Adoption
//! `program.rs` and `delivery/program/mod.rs` `adopt`. A thread looks at the program's size every 5
//! ms. At `--adopt-at` percent of the limit it adopts what is private, anonymous, readable,
//! writable and not executable, 64 KiB or more (or next to a managed area); never what was there
//! when the constructor ended, stacks, or areas with one of the properties in `NEVER`. Then:
//!
//! 1. Take `reading`, so that no event is applied meanwhile.
//! 2. **Register** what is not managed yet. From now on no page appears there but by the engine,
//!    and changes are reported. Where the kernel refuses a range, mapping by mapping: what the
//!    program serves by a userfaultfd of its own is left to it.
//! 3. **Probe**: a copy onto a page that is there says EEXIST at rest, EAGAIN while a change is
//!    under way. If so: later; it stays registered.
//! 4. **Re-check**: the map is read again; what is not what it was is not taken.
//! 5. **Ask each mapping** whether it is registered (`Watcher::registered`: UFFDIO_ZEROPAGE at its
//!    first page). The kernel registers what is mapped and says nothing of holes; what was mapped
//!    there afterwards, as when the break has moved down and up again, is not registered, and would
//!    read zeros once it was folded. What is registered ends with an event only, so it need not be
//!    asked again.
//! 6. **Scan** the page map: pages that are there become `Resident` folios, lowest address oldest.
//!    Add the area.
//!
//! After a fault in a registered range that isn't managed (an area that mremap has grown),
//! `serve_unmanaged` does the same.
//!
//! **A program that grows faster than it is folded.** New memory isn't managed until the next look,
//! so touching it makes nobody wait. What keeps it near its limit: the heap is registered up to
//! where `brk` is at that moment, past what the map said, so that its next page faults; and while
//! memory is more than 1/128 past its target, faults are held until the background has given it
//! back (`reclaim/throttle.rs`), as `memory.high` does, unless nothing can be given back. Frames
//! are given back through `bin.rs`, since the report of a discard may sleep for a timer tick until
//! a handler on a busy CPU has read it. And what is found is taken without waiting for a background
//! thread that compresses (`area/lock.rs`): on a busy machine that one waits for a CPU for 40 to 70
//! ms. If others have the areas for longer than 1 ms all the same, what is found stays registered,
//! so that touching it waits for a handler, and the next look takes it.
//!
//! **Marks after adoption.** Memory that gets a property of `NEVER` later, by `madvise`, `mlock` or
//! `mlockall`, leaves management before the call returns (`marks.rs`, `address_space/release.rs`):
//! chunk by chunk it is brought home, its folios and their stored copies end, and it is
//! unregistered, with `reading` and `areas` held, so that what is left is ordinary memory of the
//! kernel's. From the first mark on, every area's properties are read before it is adopted.
//! `--dont-dump fold` takes MADV_DONTDUMP out of `NEVER` (the engine's zones are kept out of core
//! dumps anyway). Where such memory alone is past the limit, a warning says so. Adoption is paused
//! from before the call until after. mlockall would have the kernel fill the engine's frames, and
//! wait for ever for them: so it only marks (MCL_ONFAULT), the engine's zones are unlocked again,
//! and the program's areas are then locked one by one.
//!
//! A program's own UFFDIO_REGISTER of managed memory would be refused (EBUSY): `userfault.rs` lets
//! it leave management first.
//!
//! **Pages that the kernel holds.** A pinned page (O_DIRECT, registered buffers of io_uring, RDMA)
//! makes MOVE say EBUSY, and its folio stays. A page that the kernel only holds a reference to
//! moves, and its memory goes to other data: `lent.rs` keeps programs from lending pages in that
//! way, by copying (`vmsplice`) or refusing (SO_ZEROCOPY).
use super::{Watcher, each_mapping, each_private};
use alloc::vec::Vec;
use memfold_sys::Errno;
use memfold_sys::maps::flag;
use memfold_sys::memory::zone::{set_inherited, unless_own};
use memfold_sys::sync::atomic::Ordering::Relaxed;
use memfold_sys::units::PAGE_SIZE;

impl Watcher {
    /// Takes what is not under management yet of ranges of private anonymous memory. `still` is
    /// asked, after a part was registered, whether it is still what it was taken for. Returns
    /// whether it was done; if not, the address space was changing, or other threads were at work
    /// for long: try again later. What is registered by then makes its program wait for a handler
    /// at every first touch.
    pub fn adopt(
        &self,
        ranges: &[(usize, usize)],
        still: &mut dyn FnMut(usize, usize) -> bool,
    ) -> bool {
        let reading = self.pager.changes.reading();
        let mut parts = Vec::new();
        for &(start, end) in ranges {
            for (start, end) in self.pager.unmanaged_parts(start, end) {
                self.register(start, end, &mut parts);
            }
        }
        self.begun.fetch_or(!parts.is_empty(), Relaxed);
        // Nothing is unregistered when it can't be taken: while an event is on its way, what looks
        // unmanaged may be managed memory that mremap has just brought here. Registered and not
        // managed, a range is served page by page.
        let quiet = self.is_quiet();
        let mut done = quiet;
        for &(start, end) in &parts {
            done &= quiet && still(start, end) && self.manage(start, end);
        }
        drop(reading);
        done
    }

    /// Brings what is managed of `[start, end)` home and gives it back to the kernel: it is not
    /// folded again unless it is adopted again. With `inherited`, children of fork get it; without,
    /// that stays as it is. No adoption may be under way.
    pub fn release(&self, start: usize, end: usize, inherited: bool) {
        self.pager.leave(start..end, |start, end| {
            if inherited {
                set_inherited(start, end, true);
            }
            // It may have been unmapped meanwhile.
            let _ = self.uffd.unregister(start, end - start);
        });
    }

    /// Registers `[start, end)` and notes it in `parts`; mapping by mapping where the kernel
    /// refuses it as a whole, without those that it refuses, as one that the program serves through
    /// a userfaultfd of its own.
    fn register(&self, start: usize, end: usize, parts: &mut Vec<(usize, usize)>) {
        let mut register = |start: usize, end: usize| {
            // SAFETY: the handlers serve the range from now on. It is the program's, so no engine
            // thread touches it.
            let take = || unsafe { self.uffd.register(start, end - start, false) };
            let done = unless_own(start, end, take).is_ok();
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

    /// The parts of `[start, end)` that are registered. A part may have come after the rest was:
    /// the kernel registers what is mapped, says nothing of holes, and the program's break moves up
    /// again beside it. Who takes such a part for managed never hears of its faults.
    ///
    /// Called with the right to read events. What is found is true until an event is on its way:
    /// what is registered ends with one, and nobody else registers.
    fn registered(&self, start: usize, end: usize) -> Vec<(usize, usize)> {
        let mut parts: Vec<(usize, usize)> = Vec::new();
        each_mapping(start, end, |start, end| {
            // A mapping is registered whole or not at all. SAFETY: nobody else defines what is
            // registered and not managed: a missing page there is a new one.
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

    /// Takes what is registered of `[start, end)` under management. Returns whether all of it is
    /// managed now.
    pub(super) fn manage(&self, start: usize, end: usize) -> bool {
        let parts = self.registered(start, end);
        let mut done = parts == [(start, end)];
        for (start, end) in parts {
            done &= self.manage_registered(start, end);
        }
        done
    }

    /// Takes a registered part under management. A child that comes to be past libc has no engine:
    /// it must not get the part, or it would read zeros where something is folded. Returns whether
    /// it is managed now. If not, that stays as it is, as for all that is registered: a part of a
    /// mapping with a property of its own would be another mapping to the kernel.
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

    /// Lets children of fork get what is not registered of `[start, end)`: it was mapped there
    /// after one last looked, and has a property that was meant for what was there before.
    fn inherit_unregistered(&self, start: usize, end: usize) {
        each_private(|area, about| {
            let (start, end) = (area.start.max(start), area.end.min(end));
            if start < end && about.has(flag::DONT_FORK) && !about.has(flag::UFFD_MISSING) {
                set_inherited(start, end, true);
            }
        });
    }
}
