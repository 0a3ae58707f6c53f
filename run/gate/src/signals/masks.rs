//! Serves the calls on signal masks. The kernel's mask never has the gate's own signals. The record
//! keeps those.
use crate::actions::{PROTECTED, UNBLOCKABLE};
use crate::frame::SignalContext;
use crate::record::GateThread;
use crate::signals::sent::{kept, promote};
use crate::touch::{read, write};
use memfold_os::Errno;
use memfold_os::raw::{set_signals_blocked, system_call};

/// Returns the mask that the program has set.
pub fn mask_of(record: &GateThread, context: &SignalContext) -> u64 {
    context.mask | record.blocked.get()
}

/// Sets the mask with which the program continues at `context`.
pub fn replace_mask(record: &GateThread, context: &mut SignalContext, mask: u64) {
    context.mask = mask & !(PROTECTED | UNBLOCKABLE);
    record.blocked.set(mask & PROTECTED);
    promote(record, mask);
}

/// Blocks all signals but the gate's own, until the thread leaves the gate.
pub fn block_all() {
    set_signals_blocked(!PROTECTED);
}

/// Serves `rt_sigprocmask`.
pub fn set_mask(
    record: &GateThread,
    context: &mut SignalContext,
    [how, new, old, bytes, ..]: &[usize; 6],
) -> Result<(), Errno> {
    if *bytes != 8 {
        return Err(Errno::INVAL);
    }
    let before = mask_of(record, context);
    if *new != 0 {
        let set = read::<u64>(*new).map_err(|_| Errno::FAULT)?;
        let mask = match *how as i32 {
            libc::SIG_BLOCK => before | set,
            libc::SIG_UNBLOCK => before & !set,
            libc::SIG_SETMASK => set,
            _ => return Err(Errno::INVAL),
        };
        replace_mask(record, context, mask);
    }
    if *old != 0 {
        // SAFETY: the program passed this address for the previous mask.
        unsafe { write(*old, &before) }.map_err(|_| Errno::FAULT)?;
    }
    Ok(())
}

/// Serves `rt_sigpending`.
pub fn pending(record: &GateThread, [set, bytes, ..]: &[usize; 6]) -> Result<(), Errno> {
    if *bytes > 8 {
        return Err(Errno::INVAL);
    }
    let mut real = 0u64;
    // SAFETY: `real` has room for the eight bytes that the kernel writes.
    unsafe { system_call(libc::SYS_rt_sigpending, [&raw mut real as usize, 8, 0, 0, 0, 0]) }?;
    let bytes_shown = (real | kept(record)).to_ne_bytes();
    // SAFETY: the program passed this address for a set of `bytes` bytes.
    unsafe { crate::touch::write_bytes(*set, &bytes_shown[..*bytes]) }.map_err(|_| Errno::FAULT)
}
