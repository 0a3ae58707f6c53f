//! The keeper: answers to the gate's questions.
use crate::diagnostics::{self, warn_once};
use crate::lending::borrower;
use crate::mappings::call::NO_MEMORY;
use crate::mappings::zero_device;
use crate::marks::state::MemoryMark;
use crate::marks::statics;
use crate::program::{LOST, ManagedProgram, get, lost, moves_lost, number_least};
use crate::{deferred, engine, execution::executes, limits, paging, sampling, threads};
use core::ops::Range;
use memfold_engine::fault::{FaultOutcome, FaultSource, PageFault};
use memfold_engine::known::TOP;
use memfold_gate::child;
use memfold_gate::touch;
use memfold_gate::{
    BadAddress, ChildKeeper, ErrandServer, HoldKeeper, Keeper, KeeperCall, KeeperHold, LifeKeeper,
    Names, NoHoldRoom, OtherProcess, PageKeeper, RefusedCall, RightsKeeper, ThreadKeeper,
};
use memfold_os::Errno;
use memfold_os::raw::populates;
use memfold_os::thread::identity::ThreadRights;
use memfold_os::thread::{bare, yield_now};
use memfold_os::units::PAGE_SIZE;
use memfold_run::member;

/// A piece of a call may hold the limit divided by this, but no less than `PIECE_LEAST` and no more
/// than `PIECE_MOST` bytes.
const PIECE_SHARE: u64 = 64;
const PIECE_LEAST: u64 = 128 << 10;
const PIECE_MOST: u64 = 4 << 20;
/// When more than the limit divided by this is held, pieces have `PIECE_SMALL` bytes.
const HELD_SHARE: u64 = 8;
const PIECE_SMALL: usize = 64 << 10;
/// After this many pages of a range that can't be touched, the rest of the range is skipped. The
/// kernel gets no further in it.
const BAD_MAX: usize = 8;

/// The keeper of the program that the gate asks.
struct ProgramKeeper;

/// A call that another task may make, because it concerns the memory that both share.
struct LentCall<'a>(&'a mut dyn FnMut(&[usize; 6]) -> isize);
// SAFETY: the lender waits while another thread makes the call, so only one thread uses it at a
// time.
unsafe impl Send for LentCall<'_> {}

impl LentCall<'_> {
    fn make(&mut self, args: &[usize; 6]) -> isize {
        (self.0)(args)
    }
}

pub static KEEPER: Keeper = Keeper {
    holds: &ProgramKeeper,
    pages: &ProgramKeeper,
    life: &ProgramKeeper,
    children: &ProgramKeeper,
    rights: &ProgramKeeper,
    threads: &ProgramKeeper,
};

impl ManagedProgram {
    fn hold(
        &self,
        names: Names,
        thread: usize,
        touch: fn(usize, bool) -> Result<(), BadAddress>,
    ) -> Result<Option<KeeperHold>, NoHoldRoom> {
        let holds = self.pager().holds();
        let is_child = child().is_some();
        if is_child {
            let mut count = 0;
            names(&mut |_| count += 1);
            if !holds.has_room(thread, count, false) {
                self.threads().try_on_behalf(|| holds.has_room(thread, count, true));
            }
        }
        let mut holding = holds.begin(thread);
        names(&mut |span| {
            let range = span.start..span.start + span.len;
            if self.memory().concerns(&range) {
                holding.push(range, span.write);
            }
        });
        let Some(hold) = holding.publish().map_err(|_| NoHoldRoom)? else { return Ok(None) };
        if is_child {
            // An evictor that has ended with its process never unmarks its pages.
            holds.wait_by_looking(hold, || {
                if bare::life() == 0 {
                    engine::inherit();
                }
                get().is_none()
            });
        } else {
            holds.wait(hold);
        }
        if self.memory().is_managing() {
            self.pager().gauges().note_held();
            holds.each(hold, |pages, write| self.touch_all(pages, write, touch));
        }
        Ok(Some(KeeperHold(hold.0)))
    }

    /// Returns the most bytes that a piece of a call should hold.
    pub fn piece_bytes(&self) -> usize {
        if !self.memory().is_managing() {
            return usize::MAX;
        }
        let bound = self.pager().limits().bound_bytes();
        if self.pager().holds().held_bytes() > bound / HELD_SHARE {
            return PIECE_SMALL;
        }
        (bound / PIECE_SHARE).clamp(PIECE_LEAST, PIECE_MOST) as usize
    }

    fn touch_all(
        &self,
        pages: Range<usize>,
        write: bool,
        touch: fn(usize, bool) -> Result<(), BadAddress>,
    ) {
        let (mut at, mut bad) = (pages.start, 0);
        while at < pages.end.min(TOP) && bad < BAD_MAX {
            if !self.memory().known().is_set(&(at..at + 1)) {
                at += PAGE_SIZE;
                continue;
            }
            let found = self.threads().try_on_behalf(|| self.pager().mappings().run_at(at));
            // A child of vfork that has lost the engine touches all that may be folded.
            let (is_managed, end) = found.unwrap_or((true, at + PAGE_SIZE));
            let end = end.min(pages.end).min(TOP);
            // Unmanaged memory is left to the kernel: a write here would change a file, or end
            // sharing. Only where memory is hidden, unmanaged memory may be hidden too. And unmanaged
            // memory may be registered.
            let may_be_missing = self.memory().may_miss_unmanaged();
            if is_managed || may_be_missing {
                let mut run = (at..end).step_by(PAGE_SIZE);
                let touched = |page: usize| touch(page, write && is_managed);
                bad +=
                    run.by_ref().filter(|page| touched(*page).is_err()).take(BAD_MAX - bad).count();
            }
            at = end;
        }
    }

    /// Serves a fault. Returns whether that is done, and where the page came from.
    pub fn fault(&self, fault: memfold_gate::KeeperFault) -> (bool, FaultSource) {
        let memfold_gate::KeeperFault { address: addr, write, protected } = fault;
        if self.memory().paging().is_tight() {
            self.show_before(addr);
        }
        loop {
            match self.pager().faults().fault_from(PageFault { addr, write, protected }) {
                (FaultOutcome::Yes, source) => return (true, source),
                (FaultOutcome::Again, _) => yield_now(),
                (FaultOutcome::NotManaged, source) => return (self.fault_elsewhere(addr), source),
            }
        }
    }

    /// Loads the hidden memory before an address, from the start of its mapping on, block by block.
    /// Each block continues shown memory, so it needs no further mapping.
    fn show_before(&self, addr: usize) {
        let block = addr & !(self.memory().block_bytes() - 1);
        loop {
            let mut first = addr;
            let _ = self.memory().maps().each(addr, addr + 1, |found| {
                if found.access == libc::PROT_NONE {
                    first = found.start;
                }
            });
            let fault = PageFault { addr: first, ..PageFault::default() };
            if first >= block || self.pager().faults().fault(fault) == FaultOutcome::NotManaged {
                return;
            }
        }
    }

    /// Returns whether an access that faulted in unmanaged memory must be tried again, because the
    /// memory has left management since. Otherwise the fault is the program's own.
    fn fault_elsewhere(&self, addr: usize) -> bool {
        let page = addr & !(PAGE_SIZE - 1);
        if !self.memory().known().is_set(&(page..page + PAGE_SIZE)) {
            return false;
        }
        if self.memory().has_faults(&(page..page + PAGE_SIZE)) {
            return false;
        }
        if self.memory().paging().fills(page) {
            return true;
        }
        let mut may_be = false;
        // Where memory is hidden, the program's own errors raise the same signal.
        let hides = self.memory().paging().hides();
        match self.memory().maps().each(page, page + 1, |found| {
            may_be |= found.anonymous && (!hides || self.memory().suits(found.access));
        }) {
            Ok(()) => may_be,
            // Without a map, an access that the kernel now allows isn't the program's error.
            Err(_) => {
                populates(page, false) || self.pager().mappings().touches(&(page..page + PAGE_SIZE))
            }
        }
    }

    /// Serves a fault in a child of vfork that has lost this engine. A page that is only
    /// write-protected is resident, and a page that was never touched is zeros.
    fn fault_when_lost(&self, fault: memfold_gate::KeeperFault) -> bool {
        let page = fault.address & !(PAGE_SIZE - 1);
        if !self.memory().known().is_set(&(page..page + 1)) {
            return false;
        }
        // SAFETY: all threads that change the engine have ended. A child that has lost it changes
        // nothing.
        let is_zeros = || unsafe { self.pager().fork().is_untouched(page) };
        let is_served = match fault.protected {
            true => self.memory().paging().unprotect(page).is_ok(),
            // The page may be there by now, because another child has touched it.
            false => {
                is_zeros()
                    && (self.memory().paging().opens(page)
                        || self.memory().pagemap().is_populated(page))
            }
        };
        if !is_served {
            diagnostics::die(format_args!("{LOST}"));
        }
        true
    }

    fn refused(&self, nr: usize, name: &str, words: &[usize]) {
        let is_missing = |word: &&usize| {
            let page = **word & !(PAGE_SIZE - 1);
            page < TOP
                && self.memory().known().is_set(&(page..page + PAGE_SIZE))
                && self.pager().mappings().touches(&(page..page + PAGE_SIZE))
                && !self.memory().pagemap().is_populated(page)
                // If the program itself may not write there, the kernel is right to refuse.
                && touch(page, true).is_ok()
        };
        if let Some(word) = words.iter().find(is_missing) {
            memfold_stats::add(&self.pager().stats().calls_refused, 1);
            diagnostics::warn(format_args!(
                "warning: System call {nr} ({name}) failed because of folded memory at {word:#x}. This is a bug of memfold; please report it"
            ));
        }
    }

    fn never_fold(&self, range: Range<usize>) {
        let mut state = self.memory().state().lock();
        state.marked(MemoryMark::Own).add(range.clone());
        if self.memory().is_managing() && self.pager().mappings().touches(&range) {
            self.memory().leave(&range);
        }
    }
}

/// Returns the pages of a range of bytes.
fn pages_around(start: usize, len: usize) -> Range<usize> {
    let end = start.saturating_add(len).min(TOP);
    start & !(PAGE_SIZE - 1)..end.next_multiple_of(PAGE_SIZE)
}

/// Touches what a call names, in a child of vfork that has lost the engine. So it ends with a message
/// if a part is folded.
fn touch_lost(names: Names, touch: fn(usize, bool) -> Result<(), BadAddress>) {
    let Some(program) = lost() else { return };
    names(&mut |span| {
        let pages = span.start & !(PAGE_SIZE - 1)..span.start.saturating_add(span.len).min(TOP);
        let known = pages
            .step_by(PAGE_SIZE)
            .filter(|page| program.memory().known().is_set(&(*page..page + 1)));
        let touched = |page: &usize| touch(*page, span.write).is_err();
        let _ = known.filter(touched).take(BAD_MAX).count();
    });
}

impl HoldKeeper for ProgramKeeper {
    fn concerns(&self, start: usize, len: usize) -> bool {
        get().is_some_and(|gated| {
            len > 0 && gated.memory().concerns(&(start..start.saturating_add(len)))
        })
    }

    fn hold(
        &self,
        names: Names,
        thread: usize,
        touch: fn(usize, bool) -> Result<(), BadAddress>,
    ) -> Result<Option<KeeperHold>, NoHoldRoom> {
        match get() {
            Some(gated) => gated.hold(names, thread, touch),
            None => {
                touch_lost(names, touch);
                Ok(None)
            }
        }
    }

    fn release(&self, hold: KeeperHold) {
        if let Some(gated) = get() {
            gated.pager().holds().release(memfold_engine::holds::HoldId(hold.0));
        }
    }

    fn lent(
        &self,
        process: OtherProcess,
        parts: &[[usize; 2]],
        write: bool,
        make: &mut dyn FnMut(usize) -> isize,
    ) -> isize {
        borrower::borrow(process, parts, write, make)
    }

    fn piece_bytes(&self) -> usize {
        get().map_or(usize::MAX, ManagedProgram::piece_bytes)
    }

    fn refused(&self, nr: usize, name: &str, words: &[usize]) {
        if let Some(gated) = get().filter(|gated| gated.memory().is_managing()) {
            gated.threads().try_on_behalf(|| gated.refused(nr, name, words));
        }
    }
}

impl PageKeeper for ProgramKeeper {
    fn hides(&self) -> bool {
        get().or(lost()).is_some_and(|gated| gated.memory().paging().hides())
    }

    fn fault(&self, fault: memfold_gate::KeeperFault) -> bool {
        let Some(gated) = get() else {
            return lost().is_some_and(|program| program.fault_when_lost(fault));
        };
        // If the parent of a child of vfork ends, the child tries its access again.
        let again = (true, FaultSource::Other);
        let serve = || gated.threads().try_on_behalf(|| gated.fault(fault)).unwrap_or(again);
        match sampling::due() {
            Some(ring) => sampling::serve_sampled(ring, fault.address, serve),
            None => serve().0,
        }
    }

    fn change(
        &self,
        nr: usize,
        args: &[usize; 6],
        make: &mut dyn FnMut(&[usize; 6]) -> isize,
    ) -> isize {
        let args = &zero_device::without_file(nr, args);
        if deferred::is_waiting() {
            deferred::see(nr, args);
        }
        let mut make = LentCall(make);
        let Some(gated) = get() else {
            let made = if moves_lost(nr, args) { NO_MEMORY } else { make.make(args) };
            deferred::seen(nr, args, made);
            return made;
        };
        let made = gated.change(nr, args, &mut |args| make.make(args));
        sampling::note_mapping(nr, args, made);
        made
    }

    fn never_fold(&self, start: usize, len: usize) {
        let range = pages_around(start, len);
        match get() {
            _ if len == 0 => {}
            Some(gated) => _ = gated.threads().try_on_behalf(|| gated.never_fold(range)),
            // A child of vfork takes no lock, because it may be killed. Its memory is its parent's,
            // which waits.
            None if deferred::is_waiting() && child().is_none() => statics::keep(range),
            None => {}
        }
    }

    fn keep_all(&self, keep: bool) {
        if let Some(holds) = get().map(|gated| gated.pager().holds()) {
            if keep { holds.stop_eviction() } else { holds.allow_eviction() }
        }
    }

    fn keep_home(&self, keep: bool) -> bool {
        get().is_none_or(|gated| gated.keep_home(keep))
    }
}

impl LifeKeeper for ProgramKeeper {
    fn expect_copy(&self) {
        if deferred::is_waiting() && child().is_none() {
            deferred::expect_copy();
        }
    }

    fn begin_copy(&self) {
        if lost().is_some() {
            // The copy would read zeros where memory is folded.
            diagnostics::die(format_args!("{LOST}"));
        }
        limits::stop();
        if let Some(gated) = get() {
            gated.begin_copy();
        }
    }

    fn end_copy(&self, made: isize) {
        match get() {
            Some(gated) => gated.end_copy(made),
            None if made == 0 && deferred::is_waiting() => deferred::begin_as_child(),
            None => {}
        }
        // SAFETY: `begin_copy` has stopped them, and this is called once for it in each of the two
        // processes.
        unsafe { limits::resume(made == 0) };
    }

    fn execute(
        &self,
        nr: usize,
        args: &[usize; 6],
        make: &mut dyn FnMut(&[usize; 6]) -> isize,
    ) -> isize {
        executes::execute(nr, args, make)
    }

    fn owns_descriptor(&self, fd: i32) -> bool {
        fd >= 0 && fd == member::link() || get().is_some_and(|gated| gated.owns(fd))
    }

    fn ends(&self) {
        if child().is_some() {
            // Everything that the child leaves behind belongs to its parent.
            return;
        }
        if let Some(gated) = get() {
            // A filter may kill a thread that asks for CPU times.
            if !gated.threads().is_filtered() {
                gated.pager().gauges().note_cost();
            }
            gated.publish_last(|| {});
        }
    }
}

impl ChildKeeper for ProgramKeeper {
    fn has_child(&self) {
        if let Some(gated) = get() {
            gated.threads().start_serving(gated.memory().state());
        }
    }

    fn has_no_child(&self, number: usize) {
        if let Some(gated) = get() {
            gated.threads().try_on_behalf(|| gated.end_child(number));
        }
    }

    fn server(&self) -> Option<ErrandServer> {
        if get().is_some_and(|gated| gated.threads().serves_errands())
            && child().is_some()
            && bare::life() == 0
        {
            engine::inherit();
        }
        get().filter(|gated| gated.threads().serves_errands()).map(|_| threads::SERVER)
    }

    fn waits_in_copy(&self) -> bool {
        get().is_some_and(|gated| gated.relations().tells_of_copies())
    }

    fn is_copied(&self) -> bool {
        get().is_some_and(ManagedProgram::is_copied)
    }
}

impl RightsKeeper for ProgramKeeper {
    fn last_chance(&self) {
        if deferred::is_waiting() && child().is_none() {
            deferred::begin();
        }
    }

    fn give_up_rights(&self) {
        if child().is_some() || !member::has_given_up() {
            return;
        }
        let done = match get() {
            Some(program) => ThreadRights::own().and_then(|rights| program.give_up_rights(&rights)),
            None => member::change_user().map(drop),
        };
        if let Err(e) = done {
            diagnostics::die(format_args!(
                "Discarding memory that the program discarded failed: {e}"
            ));
        }
    }

    fn leaves_network(&self) {
        member::keep_link(number_least());
    }

    fn filters(&self) {
        member::note_filter(true);
    }

    fn filtered(&self) {
        if let Some(gated) = get().filter(|_| child().is_none()) {
            gated.threads().note_filter();
        }
    }

    fn each_call(&self, of_all: bool, each: &mut dyn FnMut(&KeeperCall)) {
        let by_protection = match get() {
            Some(gated) => Some(gated.memory().paging().hides()),
            // A child of vfork takes no lock, and there is no engine that it needs.
            None if child().is_some() => None,
            None => deferred::is_by_protection(),
        };
        if let Some(by_protection) = by_protection {
            paging::each_call(by_protection, of_all, each);
        }
    }

    fn can_retire(&self) -> bool {
        true
    }

    fn retire(&self) {
        match get() {
            Some(gated) => gated.retire(),
            None => drop(deferred::give_up()),
        }
    }

    fn tells(&self, what: RefusedCall) {
        match what {
            RefusedCall::Int80 => warn_once!(
                "warning: System calls by `int 0x80` fail with ENOSYS, because memfold does not support them"
            ),
            RefusedCall::Traced => {
                member::note_unmanaged(b"traced by its parent (PTRACE_TRACEME)");
            }
            RefusedCall::Strict => {
                member::note_unmanaged(b"a thread in SECCOMP_MODE_STRICT");
            }
            RefusedCall::Filter => warn_once!(
                "warning: A seccomp filter of the program refuses system calls that memfold makes in its threads. From now \
                 on its memory is not folded"
            ),
            RefusedCall::Task(e) => diagnostics::warn(format_args!(
                "warning: A thread or process that the program started ends with status 255, because its seccomp filter refuses \
                 prctl(PR_SET_SYSCALL_USER_DISPATCH): {e}. Allow this call"
            )),
        }
    }
}

impl ThreadKeeper for ProgramKeeper {
    fn count(&self) -> usize {
        bare::count()
    }

    fn owns_thread(&self, number: u32) -> bool {
        bare::has(number)
    }

    fn alarm(&self) {
        engine::end_own_rest();
    }

    fn end_alarms(&self) {
        // Without an engine no thread has alarms.
        if get().is_some() {
            engine::end_alarms();
        }
    }

    fn alone(&self, make: &mut dyn FnMut() -> isize) -> isize {
        match get() {
            Some(gated) => gated.alone(make),
            None => make(),
        }
    }

    fn limit(&self, resource: u32, new: Option<[u64; 2]>) -> Result<[u64; 2], Errno> {
        limits::limit(resource, new)
    }
}
