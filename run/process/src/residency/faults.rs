//! Faults of the program, served in the thread that faults.
use crate::diagnostics;
use crate::program::{LOST, ManagedProgram, ProgramMemory};
use memfold_engine::fault::{FaultOutcome, FaultSource, PageFault};
use memfold_engine::pager::Pager;
use memfold_os::raw::populates;
use memfold_os::thread::yield_now;
use memfold_os::units::PAGE_SIZE;

/// Serves faults of the program.
#[derive(Copy, Clone)]
pub struct ProgramFaults<'a> {
    pager: &'a Pager,
    memory: &'a ProgramMemory,
}

impl ProgramFaults<'_> {
    /// Returns the walk over the parts of `program`.
    pub fn of(program: &ManagedProgram) -> ProgramFaults<'_> {
        ProgramFaults { pager: program.pager(), memory: program.memory() }
    }

    /// Serves a fault. Returns whether that is done, and where the page came from.
    pub fn fault(&self, fault: memfold_gate::KeeperFault) -> (bool, FaultSource) {
        let memfold_gate::KeeperFault { address: addr, write, protected: is_protected } = fault;
        if self.memory.paging().is_tight() {
            self.show_before(addr);
        }
        loop {
            match self.pager.faults().fault_with_source(PageFault {
                addr,
                write,
                protected: is_protected,
            }) {
                (FaultOutcome::Yes, source) => return (true, source),
                (FaultOutcome::Again, _) => yield_now(),
                (FaultOutcome::NotManaged, source) => return (self.fault_elsewhere(addr), source),
            }
        }
    }

    /// Loads the hidden memory before an address, from the start of its mapping on, block by block.
    /// Each block continues shown memory, so it needs no further mapping.
    fn show_before(&self, addr: usize) {
        let block = addr & !(self.memory.block_bytes() - 1);
        loop {
            let mut first = addr;
            let _ = self.memory.maps().each(addr, addr + 1, |mapping| {
                if mapping.access == libc::PROT_NONE {
                    first = mapping.start;
                }
            });
            let fault = PageFault { addr: first, ..PageFault::default() };
            if first >= block || self.pager.faults().fault(fault) == FaultOutcome::NotManaged {
                return;
            }
        }
    }

    /// Returns whether an access that faulted in unmanaged memory must be tried again, because the
    /// memory has left management since. Otherwise the fault is the program's own.
    fn fault_elsewhere(&self, addr: usize) -> bool {
        let page = addr & !(PAGE_SIZE - 1);
        if !self.memory.known().is_set(&(page..page + PAGE_SIZE)) {
            return false;
        }
        if self.memory.has_faults(&(page..page + PAGE_SIZE)) {
            return false;
        }
        if self.memory.paging().fills(page) {
            return true;
        }
        // The engine's guards are in managed memory, so this one is the program's.
        if self.memory.paging().guards() && self.memory.pagemap().is_guard(page) {
            return false;
        }
        let mut may_be = false;
        // Where memory is hidden, the program's own errors raise the same signal.
        let hides = self.memory.paging().hides();
        match self.memory.maps().each(page, page + 1, |mapping| {
            may_be |= mapping.anonymous && (!hides || self.memory.suits(mapping.access));
        }) {
            Ok(()) => may_be,
            // Without a map, an access that the kernel now allows isn't the program's error.
            Err(_) => {
                populates(page, false) || self.pager.mappings().touches(&(page..page + PAGE_SIZE))
            }
        }
    }

    /// Serves a fault in a child of vfork that has lost this engine. A page that is only
    /// write-protected is resident, and a page that was never touched is zeros.
    pub fn fault_when_lost(&self, fault: memfold_gate::KeeperFault) -> bool {
        let page = fault.address & !(PAGE_SIZE - 1);
        if !self.memory.known().is_set(&(page..page + 1)) {
            return false;
        }
        // SAFETY: all threads that change the engine have ended. A child that has lost it changes
        // nothing.
        let is_zeros = || unsafe { self.pager.fork().is_untouched(page) };
        let is_served = match fault.protected {
            true => self.memory.paging().unprotect(page).is_ok(),
            // The page may be there by now, because another child has touched it.
            false => {
                is_zeros()
                    && (self.memory.paging().opens(page)
                        || self.memory.pagemap().is_populated(page))
            }
        };
        if !is_served {
            diagnostics::die(format_args!("{LOST}"));
        }
        true
    }
}
