//! Makes signals pending, and enters the handlers of the program.
use crate::actions::{PROTECTED, UNBLOCKABLE, bit};
use crate::frame::{SignalAction, SignalContext, SignalFrame, SignalInfo, clear_fp, fp_bytes_at};
use crate::keeper::BadAddress;
use crate::record::GateThread;
use crate::signals::actions::{set_real, tell_kernel};
use crate::signals::alternate;
use crate::signals::sent::{keep, put, send};
use crate::touch::{copy, write};
use core::sync::atomic::Ordering::SeqCst;
use memfold_os::thread::thread_id;

const RED_ZONE: usize = 128;
const FP_ALIGN: usize = 64;
/// The processor's flags for direction, resume and trap.
const CLEARED_FLAGS: u64 = 0x400 | 0x1_0000 | 0x100;

/// Makes a signal pending that has interrupted the gate at `context`. All other signals are blocked
/// until the thread leaves the gate.
pub fn defer(record: &GateThread, context: &mut SignalContext, info: &SignalInfo) {
    // The kernel may deliver two signals at one return. Then the second signal's handler runs
    // first, and finds all signals blocked by the first one's action. So the first one's mask is
    // the one to keep.
    let blocks_all = |mask: u64| mask | PROTECTED | UNBLOCKABLE == u64::MAX;
    if record.pending.load(SeqCst) == 0 || blocks_all(record.mask_before.get()) {
        record.mask_before.set(context.mask);
    }
    put(record, info);
    context.mask = !PROTECTED;
}

/// Delivers all pending signals. `context` continues in their handlers.
///
/// # Safety
/// - `context` is the address of the thread's own signal context, and `record` that of its own
///   record, as for [`crate::entry::leave`].
pub unsafe extern "C" fn deliver_pending(context: usize, record: usize) {
    // SAFETY: the caller promises that both addresses are those of the thread's own structs. No
    // other reference to the context is in use. The record is shared only by its atomics and cells.
    let (record, context) =
        unsafe { (&*(record as *const GateThread), &mut *(context as *mut SignalContext)) };
    loop {
        let pending = record.pending.load(SeqCst);
        if pending == 0 {
            return;
        }
        let place = pending.trailing_zeros() as usize;
        let info = record.deferred[place].get();
        record.pending.fetch_and(!(1 << place), SeqCst);
        deliver(record, context, &info);
    }
}

/// Delivers a signal to the program, which is about to continue at `context`. Enters the program's
/// handler, or does what the program's action says.
pub fn deliver(record: &GateThread, context: &mut SignalContext, info: &SignalInfo) {
    if info.is_nudge() {
        return;
    }
    let signal = info.signal;
    let mask = context.mask | record.blocked.get();
    let now = record.waiting_mask.get().unwrap_or(mask);
    let is_blocked = now & PROTECTED & bit(signal) != 0;
    if is_blocked && !info.is_fault() {
        return keep(record, info);
    }
    let action = record.actions().of(signal);
    if !action.is_handler() || is_blocked {
        if action.handler == libc::SIG_IGN && !info.is_fault() {
            return;
        }
        return end_by(info);
    }
    if action.flags & (libc::SA_RESETHAND as u32) as u64 != 0 {
        record.actions().with(|actions| {
            let reset = SignalAction { handler: libc::SIG_DFL, ..action };
            actions[signal as usize] = reset;
            let _ = tell_kernel(signal, &reset);
        });
    }
    record.waiting_mask.set(None);
    if enter(record, context, info, &action, mask).is_err() {
        return cannot_enter(record, context, signal);
    }
    let own = if action.flags & libc::SA_NODEFER as u64 != 0 { 0 } else { bit(signal) };
    let mask = (now | action.mask | own) & !UNBLOCKABLE;
    context.mask = mask & !PROTECTED;
    record.blocked.set(mask & PROTECTED);
}

/// Makes the kernel take its default action on a signal. For a fault, that ends the process.
pub fn end_by(info: &SignalInfo) {
    let _ = set_real(info.signal, Some(&SignalAction::DEFAULT));
    let _ = send(thread_id(), info);
}

/// Delivers SIGSEGV because the frame of `signal` can't be written. If `signal` is SIGSEGV itself,
/// the process ends.
fn cannot_enter(record: &GateThread, context: &mut SignalContext, signal: i32) {
    if signal == libc::SIGSEGV {
        end_by(&SignalInfo::forced(signal));
    } else {
        deliver(record, context, &SignalInfo::forced(libc::SIGSEGV));
    }
}

/// Writes the frame of the signal, and makes `context` continue in the handler.
///
/// # Errors
/// The frame can't be written, or the alternate stack has no room for it.
fn enter(
    record: &GateThread,
    context: &mut SignalContext,
    info: &SignalInfo,
    action: &SignalAction,
    blocked: u64,
) -> Result<(), BadAddress> {
    let (stack, sp) = (record.alternate.get(), context.regs.rsp as usize);
    let on = alternate::is_on(record, sp);
    let enters = action.flags & libc::SA_ONSTACK as u64 != 0 && stack.size != 0 && !on;
    let top = if enters { stack.sp + stack.size } else { sp.wrapping_sub(RED_ZONE) };
    let from = context.regs.fp as usize;
    // SAFETY: the kernel wrote the context, so its `fp` is the address of a state that the kernel
    // wrote too.
    let bytes = if from == 0 { 0 } else { unsafe { fp_bytes_at(from) } };
    let fp = top.wrapping_sub(bytes) & !(FP_ALIGN - 1);
    let at = (fp.wrapping_sub(size_of::<SignalFrame>()) & !15).wrapping_sub(8);
    if (enters || on) && !stack.contains(at) {
        return Err(BadAddress);
    }
    let mut frame =
        SignalFrame { returns_to: action.restorer, context: *context, info: info.shown() };
    frame.context.stack = stack;
    frame.context.mask = blocked;
    frame.context.regs.fp = if from == 0 { 0 } else { fp as u64 };
    // SAFETY: both ranges lie where the kernel would have written the frame: on the alternate
    // stack, or below the program's stack pointer and its red zone.
    unsafe {
        copy(fp, from, bytes)?;
        write(at, &frame)?;
    }
    if enters {
        alternate::entered(record);
    }
    let regs = &mut context.regs;
    regs.rdi = info.signal as u64;
    regs.rsi = (at + core::mem::offset_of!(SignalFrame, info)) as u64;
    regs.rdx = (at + core::mem::offset_of!(SignalFrame, context)) as u64;
    regs.rax = 0;
    regs.rip = action.handler as u64;
    regs.rsp = at as u64;
    regs.flags &= !CLEARED_FLAGS;
    if from != 0 {
        // SAFETY: the kernel wrote the state, on the gate's stack, and only this handler uses it.
        unsafe { clear_fp(from) };
    }
    Ok(())
}
