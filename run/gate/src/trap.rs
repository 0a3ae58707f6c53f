//! The gate's handler of all signals, which runs on the stack of the thread's slot.
//!
//! A system call of the program arrives as SIGSYS, and a touch of folded memory as SIGBUS or
//! SIGSEGV. Each other signal is one of the program. It is delivered if the program was
//! interrupted, and becomes pending if the gate was (`call_state.rs`).
use crate::call_state::{CALLED_OFF, CallOutcome, CallStage, NEEDS_CONTEXT};
use crate::dispatcher::{self, make_without_context, needs_no_context};
use crate::entry;
use crate::frame::{SignalContext, SignalInfo};
use crate::keeper::{Keeper, KeeperFault, PageKeeper, RefusedCall};
use crate::patch;
use crate::patch::entry::EnteredCall;
use crate::patch::steps::{Step, StepTrap, learn};
use crate::record::{GateThread, KEEPER, ProgramPlace, REFUSED};
use crate::signals::{block_all, defer, deliver, deliver_pending, end_by, set_mask};
use crate::threads::leave_for_good;
use crate::touch::fix_up;
use crate::user_dispatch::{DispatchVerdict, SYS_USER_DISPATCH, is_retired};
use core::sync::atomic::Ordering::SeqCst;
use memfold_os::raw::{set_signals_blocked, system_call};
use memfold_os::thread::{access_of, bare, process_id};

const SYSCALL_BYTES: u64 = 2;
const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;

/// Handles a signal.
///
/// # Safety
/// - The kernel calls this as a signal handler with SA_SIGINFO.
pub unsafe extern "C" fn on_signal(
    signal: i32,
    info: *const SignalInfo,
    context: *mut SignalContext,
) {
    // SAFETY: the kernel passes pointers to structs that it wrote on this stack. They stay until
    // the handler returns, and no other code uses them.
    let (info, context) = unsafe { (&*info, &mut *context) };
    if signal == libc::SIGSYS && info.code != SYS_USER_DISPATCH && bare::is_current() {
        return on_bare(info, context);
    }
    let before = info.before_forwarding();
    let info = before.as_ref().unwrap_or(info);
    let address = &raw const *context as usize;
    let (Some(keeper), Some(record)) = (KEEPER.get(), GateThread::of_stack(address)) else {
        // A thread of the engine has faulted, and nothing serves such a fault.
        return die(signal);
    };
    let on_slot = record.contains(context.regs.rsp as usize);
    match CallStage::of(context.regs.rip as usize, on_slot) {
        CallStage::Program => {}
        // The step has trapped. A signal that arrived earlier in the step or the entry has blocked
        // all others. It is delivered when this handler is left, so the program's own mask is put
        // back first.
        CallStage::Coming | CallStage::Back if info.is_fault() => {
            if record.pending.load(SeqCst) != 0 {
                context.mask = record.mask_before.get();
            }
        }
        CallStage::Coming => return defer(record, context, info),
        CallStage::Back => context.regs.rip = context.regs.rcx,
        stage => return in_gate(keeper, record, context, info, stage),
    }
    record.place.set(Some(place_of(context)));
    match signal {
        libc::SIGSYS if info.code == SYS_USER_DISPATCH => {
            from_program(keeper, record, context, info)
        }
        libc::SIGBUS | libc::SIGSEGV if served(keeper.pages, context, info) => {}
        _ => deliver(record, context, info),
    }
    if is_retired() {
        leave_for_good(record, context);
    }
    // SAFETY: `address` is the context that the kernel made for this handler. It lies on this stack,
    // which was empty, so all frames below it are this handler's. None of them is needed any more.
    // The first word of the record tells what is pending.
    unsafe { entry::leave(address, &raw const *record as usize, deliver_pending) }
}

/// Handles a SIGSYS in a thread of the engine that waits for its alarm. Any other SIGSYS is the
/// program's: it was sent to the process, and the kernel has chosen this thread. So it is sent on,
/// to a thread that doesn't block it. With the information of a user's signal the kernel allows that
/// only to the first thread of the process.
fn on_bare(info: &SignalInfo, context: &mut SignalContext) {
    if info.code == libc::SI_TIMER {
        return KEEPER.get().into_iter().for_each(|keeper| keeper.threads.alarm());
    }
    // The handler's own mask leaves SIGSYS open: sent on, it would come here again and again.
    set_signals_blocked(u64::MAX);
    context.mask |= 1 << (libc::SIGSYS - 1);
    let signal = info.before_forwarding().unwrap_or(*info).forwarded();
    let args = [process_id() as usize, libc::SIGSYS as usize, &raw const signal as usize, 0, 0, 0];
    // SAFETY: the kernel reads one `siginfo_t`, which `signal` is. It lives until the call returns.
    let _ = unsafe { system_call(libc::SYS_rt_sigqueueinfo, args) };
}

/// Returns the place of a program with these registers.
fn place_of(context: &SignalContext) -> ProgramPlace {
    let regs = &context.regs;
    ProgramPlace { ip: regs.rip as usize, sp: regs.rsp as usize, bp: regs.rbp as usize }
}

/// The codes of a SIGSEGV at a guard page, or where nothing is mapped, and at an address whose mapping
/// doesn't allow the access (`include/uapi/asm-generic/siginfo.h`).
const SEGV_MAPERR: i32 = 1;
const SEGV_ACCERR: i32 = 2;
/// The bit of the processor's error code that marks the fetch of an instruction
/// (`arch/x86/include/asm/trap_pf.h`).
const FETCHED: u64 = 1 << 4;

/// Returns whether the signal was a fault that the keeper has served.
fn served(pages: &dyn PageKeeper, context: &SignalContext, info: &SignalInfo) -> bool {
    let (write, is_protected) = access_of(context.regs.error);
    let address = info.address as usize;
    match info.signal {
        libc::SIGBUS => {
            info.code == libc::BUS_ADRERR
                && pages.fault(KeeperFault { address, write, protected: is_protected })
        }
        _ => {
            (info.code == SEGV_ACCERR && pages.hides()
                || info.code == SEGV_MAPERR && pages.guards())
                && context.regs.error & FETCHED == 0
                && pages.fault(KeeperFault { address, write, protected: false })
        }
    }
}

/// Handles a signal that has interrupted the gate's own code.
fn in_gate(
    keeper: &'static Keeper,
    record: &GateThread,
    context: &mut SignalContext,
    info: &SignalInfo,
    stage: CallStage,
) {
    let at = context.regs.rip as usize;
    match info.signal {
        // A library function that the gate has called has made a system call. It is made as it is.
        libc::SIGSYS if info.code == SYS_USER_DISPATCH => {
            let (nr, args) = context.regs.call();
            let result = if nr as i64 == libc::SYS_rt_sigprocmask {
                // The return from this handler would undo a change of the mask, which `abort`
                // needs.
                set_mask(record, context, &args).map(|()| 0)
            } else {
                // SAFETY: the code that makes the call answers for its conditions. The call is made
                // here with the same arguments.
                unsafe { system_call(nr as i64, args) }
            };
            context.regs.rax = match result {
                Ok(value) => value as u64,
                Err(e) => -i64::from(e.raw_os_error()) as u64,
            };
        }
        libc::SIGBUS | libc::SIGSEGV if served(keeper.pages, context, info) => {}
        // A filter of the program has refused a call. The result reports this to the code that made
        // the call, which knows whether it was the program's.
        libc::SIGSYS if info.refused().is_some() => {
            record.refused.set(Some(*info));
            context.regs.rax = REFUSED as u64;
        }
        _ if info.is_fault() => match fix_up(at) {
            Some(to) => context.regs.rip = to as u64,
            None => die(info.signal),
        },
        _ => {
            defer(record, context, info);
            let (to, result) = stage.interrupted(at, context.regs.rax);
            (context.regs.rip, context.regs.rax) = (to as u64, result);
        }
    }
}

/// Serves a system call of the program that has trapped, at its own instruction or on the way from
/// a patched site.
fn from_program(
    keeper: &'static Keeper,
    record: &'static GateThread,
    context: &mut SignalContext,
    info: &SignalInfo,
) {
    let after = context.regs.rip as usize;
    let Some((step, trap)) = Step::trapped(after) else {
        let (nr, args) = context.regs.call();
        if passes(record, after) && needs_no_context(nr, &args) {
            // A child of vfork may be killed at any time, so it must take no lock.
            match record.is_of_first_process() {
                true => patch::note_trap(after, nr),
                false => patch::note_trap_of_child(after, nr),
            }
        }
        return trapped(keeper, record, context, info);
    };
    context.regs.rip = step.site_end() as u64;
    record.place.set(Some(place_of(context)));
    learn(record);
    match trap {
        StepTrap::Call => trapped(keeper, record, context, info),
        StepTrap::Done if context.regs.rax as isize == CALLED_OFF => {
            context.regs.rip -= SYSCALL_BYTES;
            context.regs.rax = record.patched.get() as u64;
        }
        StepTrap::Done => {}
    }
}

/// Serves a call from a patched site, and returns its result. Returns [`NEEDS_CONTEXT`] if the call
/// must trap.
///
/// # Safety
/// - The entry calls this with the calling thread's record and the frame that it has made.
pub unsafe extern "C" fn on_patched(
    record: *const GateThread,
    entered: *const EnteredCall,
) -> isize {
    // SAFETY: the caller promises that both pointers are valid. The record stays mapped, and the
    // frame stays until this returns.
    let (record, trap_entry) = unsafe { (&*record, &*entered) };
    record.refused.set(None);
    record.patched.set(trap_entry.nr);
    let site_end = Step::of(trap_entry).site_end();
    record.place.set(Some(ProgramPlace { ip: site_end, sp: trap_entry.sp, bp: trap_entry.bp }));
    let keeper = KEEPER.get().filter(|_| passes(record, site_end) && !is_retired());
    let result = keeper
        .and_then(|keeper| make_without_context(keeper, record, trap_entry.nr, &trap_entry.args()));
    match result {
        Some(result) if record.take_refused(trap_entry.nr, result).is_none() => result,
        // A filter has refused the call, and the program's handler needs the context. Or the call
        // itself needs it.
        _ => NEEDS_CONTEXT,
    }
}

/// Returns whether the thread's own dispatch lets a call pass, if the call's instruction ends at
/// `after`.
fn passes(record: &GateThread, after: usize) -> bool {
    record.dispatch.get().is_none_or(|own| own.verdict(after) == DispatchVerdict::Passes)
}

/// Serves a system call of the program. `context` is the program's state after the call's
/// instruction.
fn trapped(
    keeper: &'static Keeper,
    record: &'static GateThread,
    context: &mut SignalContext,
    info: &SignalInfo,
) {
    if is_retired() {
        // The program makes the call again, without the gate.
        context.regs.rip -= SYSCALL_BYTES;
        return;
    }
    let (nr, args) = context.regs.call();
    let own = record.dispatch.get();
    match own.map_or(DispatchVerdict::Passes, |own| own.verdict(context.regs.rip as usize)) {
        DispatchVerdict::Passes => {}
        DispatchVerdict::Dispatched => return force(record, context, info),
        DispatchVerdict::Ends(signal) => return end_by(&SignalInfo::forced(signal)),
    }
    if (info.call >> 32) as u32 != AUDIT_ARCH_X86_64 {
        // Calls by `int 0x80` have other numbers, and addresses below 4 GiB.
        keeper.rights.tells(RefusedCall::Int80);
        context.regs.rax = -i64::from(libc::ENOSYS) as u64;
        return;
    }
    record.refused.set(None);
    let outcome = dispatcher::serve(keeper, record, context, nr, args);
    match outcome {
        CallOutcome::CalledOff => context.regs.rip -= SYSCALL_BYTES,
        CallOutcome::Returned(result) => match record.take_refused(nr, result) {
            Some(info) => force(record, context, &info),
            None => context.regs.rax = result as u64,
        },
        CallOutcome::InContext => {}
    }
}

/// Delivers the SIGSYS that a filter, or the program's own dispatch, raises for a call. The
/// register of the result still has the call's number, because the program's handler sets the
/// result.
fn force(record: &GateThread, context: &mut SignalContext, info: &SignalInfo) {
    block_all();
    if record.pending.load(SeqCst) != 0 {
        // A signal that arrived earlier is delivered first. The call has done nothing, so the
        // program makes it again.
        context.regs.rip -= SYSCALL_BYTES;
    } else {
        deliver(record, context, &info.made_at(context.regs.rip));
    }
}

/// Ends the process by this signal. When the handler returns, the fault happens again with the
/// default action.
fn die(signal: i32) {
    let default = crate::frame::SignalAction::DEFAULT;
    let args = [signal as usize, &raw const default as usize, 0, 8, 0, 0];
    // SAFETY: `default` lives until the call returns, and the kernel only reads it. The default
    // action ends the process at the next fault, so no code relies on the previous action.
    let _ = unsafe { system_call(libc::SYS_rt_sigaction, args) };
}
