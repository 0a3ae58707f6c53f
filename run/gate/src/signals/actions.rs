//! Serves `rt_sigaction`. The gate keeps the program's actions, and the gate's handler takes the
//! signals.
use crate::actions::{PROTECTED, SIGNALS, UNBLOCKABLE, bit};
use crate::entry::restorer;
use crate::frame::SignalAction;
use crate::record::GateThread;
use crate::signals::sent::forget;
use crate::touch::{read, write};
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use memfold_os::Errno;
use memfold_os::raw::system_call;

/// The address of the gate's handler of all signals.
pub static HANDLER: AtomicUsize = AtomicUsize::new(0);

const SA_RESTORER: u64 = 0x0400_0000;
/// The flags of the program's action that the kernel must have too.
const KEPT: u64 = (libc::SA_NOCLDSTOP | libc::SA_NOCLDWAIT | libc::SA_RESTART) as u64;
/// All flags that the kernel knows (`UAPI_SA_FLAGS`).
const KNOWN: u64 = KEPT
    | SA_RESTORER
    | 0x800
    | (libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER) as u64
    | (libc::SA_RESETHAND as u32) as u64;

/// Sets the kernel's action for a signal if `new` is given. Returns the previous action.
///
/// # Errors
/// The errors of `rt_sigaction`.
pub fn set_real(signal: i32, new: Option<&SignalAction>) -> Result<SignalAction, Errno> {
    let mut old = SignalAction::DEFAULT;
    let new = new.map_or(0, |new| &raw const *new as usize);
    let args = [signal as usize, new, &raw mut old as usize, 8, 0, 0];
    // SAFETY: both structs have the kernel's layout and live until the call returns. The new action
    // is a handler of the gate or one that the program has set, so it may be called.
    unsafe { system_call(libc::SYS_rt_sigaction, args) }.map(|_| old)
}

/// Returns the action that the kernel gets for a handler of the program with these flags.
fn ours(flags: u64) -> SignalAction {
    SignalAction {
        handler: HANDLER.load(SeqCst),
        flags: flags & KEPT
            | SA_RESTORER
            | (libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER) as u64,
        restorer: restorer(),
        mask: !PROTECTED,
    }
}

/// Returns an action that calls `handler`, a handler of the gate, on the thread's alternate stack, if
/// it has one, and with all signals blocked.
pub fn calling(handler: usize) -> SignalAction {
    let flags = SA_RESTORER | (libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART) as u64;
    SignalAction { handler, flags, restorer: restorer(), mask: u64::MAX }
}

/// Makes the gate's handler take SIGSYS, SIGBUS and SIGSEGV.
pub fn install_protected(record: &GateThread) -> Result<(), Errno> {
    [libc::SIGBUS, libc::SIGSEGV, libc::SIGSYS]
        .into_iter()
        .try_for_each(|signal| tell_kernel(signal, &record.actions().of(signal)))
}

/// Reads the program's actions, and makes the gate's handler take each signal for which the program
/// has a handler.
pub fn take_over(record: &GateThread) -> Result<(), Errno> {
    for signal in 1..=SIGNALS as i32 {
        let Ok(now) = set_real(signal, None) else { continue };
        record.actions().with(|actions| actions[signal as usize] = now);
        if now.is_handler() && bit(signal) & PROTECTED == 0 {
            set_real(signal, Some(&ours(now.flags)))?;
        }
    }
    install_protected(record)
}

/// Undoes [`take_over`]: the kernel gets the program's actions back.
pub fn give_back(record: &GateThread) {
    give_back_some(record, u64::MAX);
}

/// Gives the program's actions for the signals of `set` back to the kernel. After [`keep_no_more`]
/// they stay there.
pub fn give_back_some(record: &GateThread, set: u64) {
    for signal in (1..=SIGNALS as i32).filter(|signal| set & bit(*signal) != 0) {
        // Under the lock, so that a change by another thread is made before or after this one.
        record.actions().with(|actions| {
            let _ = set_real(signal, Some(&actions[signal as usize]));
        });
    }
}

/// Whether the kernel gets the program's own actions from now on.
static KEEPS_NONE: AtomicBool = AtomicBool::new(false);

/// Passes each action that the program sets from now on to the kernel as it is.
pub fn keep_no_more() {
    KEEPS_NONE.store(true, SeqCst);
}

/// Sets the kernel's action for a signal whose action in the program is `action`.
pub fn tell_kernel(signal: i32, action: &SignalAction) -> Result<(), Errno> {
    if KEEPS_NONE.load(SeqCst) {
        return set_real(signal, Some(action)).map(drop);
    }
    if bit(signal) & PROTECTED != 0 {
        // A signal that the program ignores or blocks must not end a call.
        let flags = if action.is_handler() { action.flags } else { libc::SA_RESTART as u64 };
        let ours = ours(flags);
        // The handler of SIGSYS makes system calls that wait. Signals of the program must interrupt
        // them.
        let mask = if signal == libc::SIGSYS { 0 } else { ours.mask };
        return set_real(signal, Some(&SignalAction { mask, ..ours })).map(drop);
    }
    let real = if action.is_handler() { ours(action.flags) } else { *action };
    set_real(signal, Some(&real)).map(drop)
}

/// Serves `rt_sigaction`.
pub fn set_action(
    record: &GateThread,
    [signal, new, old, bytes, ..]: &[usize; 6],
) -> Result<(), Errno> {
    let signal = *signal as i32;
    if *bytes != 8 || !(1..=SIGNALS as i32).contains(&signal) {
        return Err(Errno::INVAL);
    }
    let action = match *new {
        0 => None,
        at => Some(read::<SignalAction>(at).map_err(|_| Errno::FAULT)?),
    };
    if action.is_some() && bit(signal) & UNBLOCKABLE != 0 {
        return Err(Errno::INVAL);
    }
    let before = record.actions().with(|actions| {
        let before = actions[signal as usize];
        if let Some(mut action) = action {
            action.flags &= KNOWN;
            action.mask &= !UNBLOCKABLE;
            tell_kernel(signal, &action)?;
            actions[signal as usize] = action;
        }
        Ok(before)
    })?;
    if action.is_some_and(|action| action.handler == libc::SIG_IGN) {
        forget(record, signal);
    }
    if *old != 0 {
        // SAFETY: the program passed this address for the previous action.
        unsafe { write(*old, &before) }.map_err(|_| Errno::FAULT)?;
    }
    Ok(())
}

/// Makes the kernel ignore these signals, for the program that is executed next.
pub fn ignore_really(set: u64) {
    let ignore = SignalAction { handler: libc::SIG_IGN, ..SignalAction::DEFAULT };
    for signal in (1..=SIGNALS as i32).filter(|signal| set & bit(*signal) != 0) {
        let _ = set_real(signal, Some(&ignore));
    }
}
