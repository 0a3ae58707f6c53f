//! The keeper: answers to the gate's questions.
use crate::adoption::Adoption;
use crate::borrower;
use crate::diagnostics::{self, warn_once};
use crate::fork::ForkCopy;
use crate::mappings::call::NO_MEMORY;
use crate::mappings::change::ChangeCalls;
use crate::mappings::zero_device;
use crate::marks::statics;
use crate::program::{LOST, get, lost, moves_lost, number_least};
use crate::residency::faults::ProgramFaults;
use crate::residency::holds::{CallHolds, touch_lost};
use crate::restart::EngineRestart;
use crate::{deferred, engine, execution::executes, limits, paging, sampling, threads};
use core::ops::Range;
use memfold_engine::fault::FaultSource;
use memfold_engine::known::TOP;
use memfold_gate::child;
use memfold_gate::{
    BadAddress, ChildKeeper, ErrandServer, HoldKeeper, Keeper, KeeperCall, KeeperHold, LifeKeeper,
    Names, NoHoldRoom, OtherProcess, PageKeeper, RefusedCall, RightsKeeper, ThreadKeeper,
};
use memfold_os::Errno;
use memfold_os::thread::bare;
use memfold_os::thread::identity::ThreadRights;
use memfold_os::units::PAGE_SIZE;
use memfold_run::member;

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

/// The keeper that the gate asks, in parts.
pub static KEEPER: Keeper = Keeper {
    holds: &ProgramKeeper,
    pages: &ProgramKeeper,
    life: &ProgramKeeper,
    children: &ProgramKeeper,
    rights: &ProgramKeeper,
    threads: &ProgramKeeper,
};

/// Returns the pages of a range of bytes.
fn pages_around(start: usize, len: usize) -> Range<usize> {
    let end = start.saturating_add(len).min(TOP);
    start & !(PAGE_SIZE - 1)..end.next_multiple_of(PAGE_SIZE)
}

impl HoldKeeper for ProgramKeeper {
    fn concerns(&self, start: usize, len: usize) -> bool {
        get().is_some_and(|program| {
            len > 0 && program.memory().concerns(&(start..start.saturating_add(len)))
        })
    }

    fn hold(
        &self,
        names: Names,
        thread: usize,
        touch: fn(usize, bool) -> Result<(), BadAddress>,
    ) -> Result<Option<KeeperHold>, NoHoldRoom> {
        match get() {
            Some(program) => CallHolds::of(program).hold(names, thread, touch),
            None => {
                touch_lost(names, touch);
                Ok(None)
            }
        }
    }

    fn release(&self, hold: KeeperHold) {
        if let Some(program) = get() {
            program.pager().holds().release(memfold_engine::holds::HoldId(hold.0));
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
        get().map_or(usize::MAX, |program| CallHolds::of(program).piece_bytes())
    }

    fn refused(&self, nr: usize, name: &str, words: &[usize]) {
        if let Some(program) = get().filter(|program| program.memory().is_managing()) {
            program.threads().try_on_behalf(|| CallHolds::of(program).refused(nr, name, words));
        }
    }
}

impl PageKeeper for ProgramKeeper {
    fn hides(&self) -> bool {
        get().or(lost()).is_some_and(|program| program.memory().paging().hides())
    }

    fn guards(&self) -> bool {
        get().or(lost()).is_some_and(|program| program.memory().paging().guards())
    }

    fn fault(&self, fault: memfold_gate::KeeperFault) -> bool {
        let Some(program) = get() else {
            return lost().is_some_and(|program| ProgramFaults::of(program).fault_when_lost(fault));
        };
        // If the parent of a child of vfork ends, the child tries its access again.
        let again = (true, FaultSource::Other);
        let serve = || {
            program
                .threads()
                .try_on_behalf(|| ProgramFaults::of(program).fault(fault))
                .unwrap_or(again)
        };
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
        let Some(program) = get() else {
            let result = if moves_lost(nr, args) { NO_MEMORY } else { make.make(args) };
            deferred::seen(nr, args, result);
            return result;
        };
        let result = ChangeCalls::of(program).change(nr, args, &mut |args| make.make(args));
        sampling::note_mapping(nr, args, result);
        result
    }

    fn never_fold(&self, start: usize, len: usize) {
        let range = pages_around(start, len);
        match get() {
            _ if len == 0 => {}
            Some(program) => {
                _ = program.threads().try_on_behalf(|| Adoption::of(program).never_fold(range))
            }
            // A child of vfork takes no lock, because it may be killed. Its memory is its parent's,
            // which waits.
            None if deferred::is_waiting() && child().is_none() => statics::keep(range),
            None => {}
        }
    }

    fn keep_all(&self, keep: bool) {
        if let Some(holds) = get().map(|program| program.pager().holds()) {
            if keep { holds.stop_eviction() } else { holds.allow_eviction() }
        }
    }

    fn keep_home(&self, keep: bool) -> bool {
        get().is_none_or(|program| Adoption::of(program).keep_home(keep))
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
        if let Some(program) = get() {
            ForkCopy::of(program).begin_copy();
        }
    }

    fn end_copy(&self, made: isize) {
        match get() {
            Some(program) => ForkCopy::of(program).end_copy(made),
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
        fd >= 0 && fd == member::link() || get().is_some_and(|program| program.owns(fd))
    }

    fn ends(&self) {
        if child().is_some() {
            // Everything that the child leaves behind belongs to its parent.
            return;
        }
        if let Some(program) = get() {
            // A filter may kill a thread that asks for CPU times.
            if !program.threads().is_filtered() {
                program.pager().gauges().note_cost();
            }
            program.publish_last(|| {});
        }
    }
}

impl ChildKeeper for ProgramKeeper {
    fn has_child(&self) {
        if let Some(program) = get() {
            program.threads().start_serving(program.memory().state());
        }
    }

    fn has_no_child(&self, number: usize) {
        if let Some(program) = get() {
            program.threads().try_on_behalf(|| Adoption::of(program).end_child(number));
        }
    }

    fn server(&self) -> Option<ErrandServer> {
        if get().is_some_and(|program| program.threads().serves_errands())
            && child().is_some()
            && bare::life() == 0
        {
            engine::inherit();
        }
        get().filter(|program| program.threads().serves_errands()).map(|_| threads::SERVER)
    }

    fn waits_in_copy(&self) -> bool {
        get().is_some_and(|program| program.relations().tells_of_copies())
    }

    fn is_copied(&self) -> bool {
        get().is_some_and(|program| ForkCopy::of(program).is_copied())
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
        let outcome = match get() {
            Some(program) => ThreadRights::own()
                .and_then(|rights| EngineRestart::of(program).give_up_rights(&rights)),
            None => member::change_user().map(drop),
        };
        if let Err(e) = outcome {
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
        if let Some(program) = get().filter(|_| child().is_none()) {
            program.threads().note_filter();
        }
    }

    fn each_call(&self, of_all: bool, each: &mut dyn FnMut(&KeeperCall)) {
        let by_protection = match get() {
            Some(program) => Some(program.memory().paging().hides()),
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
            Some(program) => EngineRestart::of(program).retire(),
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
            Some(program) => EngineRestart::of(program).alone(make),
            None => make(),
        }
    }

    fn limit(&self, resource: u32, new: Option<[u64; 2]>) -> Result<[u64; 2], Errno> {
        limits::limit(resource, new)
    }
}
