//! Lends memory to system calls of other processes (`borrower.rs`). The first engine thread serves
//! the requests. It waits for no other process.
use crate::engine::LentMemory;
use crate::program::{ManagedProgram, ProgramMemory};
use crate::residency::faults::ProgramFaults;
use crate::residency::holds::CallHolds;
use core::ops::Range;
use memfold_engine::holds::HoldId;
use memfold_engine::known::TOP;
use memfold_engine::pager::Pager;
use memfold_gate::KeeperFault;
use memfold_os::raw::{populates, populates_all};
use memfold_os::units::PAGE_SIZE;
use memfold_run::member;
use memfold_run::table::ProcessSlot;
use memfold_run::table::lending::{AskedMemory, LeaseId};

/// A page that can't be accessed after so many faults is left to the kernel.
const TRIES: usize = 16;
/// The most bytes that a request can hold.
const LENT_MOST: usize = 4 << 20;

/// Returns the ranges of a request, cut to `most` bytes in all. What lies beyond the program's
/// addresses is left out, because the kernel ends there.
fn cut(asked: &AskedMemory, most: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    let mut rest = most;
    asked.parts.into_iter().take(asked.count).map_while(move |[start, len]| {
        let len = len.min(rest);
        rest -= len;
        let range = start..start.saturating_add(len);
        (range.end <= TOP).then_some(range)
    })
}

/// Lends memory of the program to other processes.
#[derive(Copy, Clone)]
pub struct MemoryLender<'a> {
    pager: &'a Pager,
    memory: &'a ProgramMemory,
    holds: CallHolds<'a>,
    faults: ProgramFaults<'a>,
}

impl MemoryLender<'_> {
    /// Returns the walk over the parts of `program`.
    pub fn of(program: &ManagedProgram) -> MemoryLender<'_> {
        MemoryLender {
            pager: program.pager(),
            memory: program.memory(),
            holds: CallHolds::of(program),
            faults: ProgramFaults::of(program),
        }
    }

    /// Serves the requests of other processes, and releases what they have used.
    pub fn lend(&self, lent: &mut LentMemory) {
        let Some(own) = member::own() else { return };
        let has_asks = own.take_asks();
        for (n, place) in lent.iter_mut().enumerate() {
            if let Some((lease, hold)) = *place
                && !own.is_lent(n, lease)
            {
                self.pager.holds().release(hold);
                *place = None;
            }
            if has_asks && let Some(request) = own.asked(n) {
                *place = self.serve_request(own, n, &request);
            }
        }
    }

    /// Serves one request. Returns what is held for it.
    fn serve_request(
        &self,
        own: &ProcessSlot,
        n: usize,
        asked: &AskedMemory,
    ) -> Option<(LeaseId, HoldId)> {
        let ranges = cut(asked, self.holds.piece_bytes().min(LENT_MOST));
        let mut holding = self.pager.holds().begin(0);
        for range in ranges.clone().filter(|range| self.memory.concerns(range)) {
            holding.push(range, asked.writes);
        }
        let Ok(hold) = holding.publish() else {
            own.lend(n, asked.lease, 0);
            return None;
        };
        if let Some(hold) = hold {
            self.pager.holds().wait(hold);
        }
        // From now on nothing of it is folded or protected.
        let mut bytes = 0;
        for range in ranges {
            let end =
                if self.memory.is_managing() { self.load(&range, asked.writes) } else { range.end };
            bytes += end - range.start;
            if end < range.end {
                break;
            }
        }
        let is_wanted = own.lend(n, asked.lease, bytes as u64);
        let hold = hold?;
        if !is_wanted {
            self.pager.holds().release(hold);
        }
        is_wanted.then_some((asked.lease, hold))
    }

    /// Loads a range that is held. Returns the address up to which the kernel can access it as far
    /// as it is managed.
    fn load(&self, range: &Range<usize>, write: bool) -> usize {
        let mut at = range.start & !(PAGE_SIZE - 1);
        let end = range.end.next_multiple_of(PAGE_SIZE);
        while at < end {
            if !self.memory.known().is_set(&(at..at + 1)) {
                at += PAGE_SIZE;
                continue;
            }
            let (is_managed, stop) = self.pager.mappings().run_at(at);
            let stop = stop.min(end);
            // Unmanaged memory is left to the kernel, as in a call on memory of this process.
            let may_be_missing = self.memory.may_miss_unmanaged();
            let write = write && is_managed;
            if (is_managed || may_be_missing) && !populates_all(at, stop - at, write) {
                let bad_page = (at..stop).step_by(PAGE_SIZE).find(|page| !self.bring(*page, write));
                if let Some(page) = bad_page.filter(|_| is_managed) {
                    return page.max(range.start);
                }
            }
            at = stop;
        }
        range.end
    }

    /// Makes one page accessible. Returns whether it is.
    fn bring(&self, page: usize, write: bool) -> bool {
        (0..TRIES).any(|_| {
            let is_there = populates(page, write);
            if !is_there {
                let is_protected = write
                    && !self.memory.paging().hides()
                    && self.memory.pagemap().is_populated(page);
                self.faults.fault(KeeperFault { address: page, write, protected: is_protected });
            }
            is_there
        })
    }

    /// Releases all that is held for other processes.
    pub fn end_lending(&self, lent: &mut LentMemory) {
        for (_, hold) in lent.iter_mut().filter_map(Option::take) {
            self.pager.holds().release(hold);
        }
    }
}
