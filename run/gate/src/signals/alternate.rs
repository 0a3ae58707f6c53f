//! Serves `sigaltstack`. The kernel always has the slot's stack. The record keeps the stack that
//! the program has set.
use crate::frame::{AlternateStack, SignalContext};
use crate::record::GateThread;
use crate::touch::{read, write};
use memfold_os::Errno;

const SS_AUTODISARM: i32 = i32::MIN;

/// Returns whether a thread whose stack pointer is `sp` runs on the program's alternate stack.
pub fn is_on(record: &GateThread, sp: usize) -> bool {
    let stack = record.alternate.get();
    stack.flags & SS_AUTODISARM == 0 && stack.contains(sp)
}

/// Serves `sigaltstack`. Returns the new stack if the program has set one.
///
/// # Errors
/// The errors of `sigaltstack`: EFAULT, EPERM if the thread runs on its alternate stack, ENOMEM,
/// EINVAL.
pub fn set_alternate(
    record: &GateThread,
    context: &SignalContext,
    [new, old, ..]: &[usize; 6],
) -> Result<Option<AlternateStack>, Errno> {
    let stack = match *new {
        0 => None,
        at => Some(read::<AlternateStack>(at).map_err(|_| Errno::FAULT)?),
    };
    let sp = context.regs.rsp as usize;
    let (before, on) = (record.alternate.get(), is_on(record, sp));
    if let Some(stack) = stack {
        if on {
            return Err(Errno::PERM);
        }
        record.alternate.set(checked(stack)?);
    }
    if *old != 0 {
        let state = match () {
            () if on => libc::SS_ONSTACK,
            () if before.size == 0 => libc::SS_DISABLE,
            () => 0,
        };
        let answer = AlternateStack { flags: state | before.flags & SS_AUTODISARM, ..before };
        // SAFETY: the program passed this address for the previous stack.
        unsafe { write(*old, &answer) }.map_err(|_| Errno::FAULT)?;
    }
    Ok(stack.map(|_| record.alternate.get()))
}

/// Returns a stack in the form in which the kernel would keep it.
///
/// # Errors
/// ENOMEM if the stack is too small, EINVAL for unknown flags.
pub fn checked(wanted: AlternateStack) -> Result<AlternateStack, Errno> {
    match wanted.flags & !SS_AUTODISARM {
        libc::SS_DISABLE => Ok(AlternateStack { flags: wanted.flags, ..AlternateStack::NONE }),
        0 | libc::SS_ONSTACK if wanted.size < libc::MINSIGSTKSZ => Err(Errno::NOMEM),
        0 | libc::SS_ONSTACK => Ok(AlternateStack { padding: 0, ..wanted }),
        _ => Err(Errno::INVAL),
    }
}

/// Notes that a handler has entered the program's alternate stack.
pub fn entered(record: &GateThread) {
    if record.alternate.get().flags & SS_AUTODISARM != 0 {
        record.alternate.set(AlternateStack::NONE);
    }
}
