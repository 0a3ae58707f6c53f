//! `sigaltstack`: the kernel has the gate's stack for good, the program its own as it believes.
use crate::frame::{Context, Stack};
use crate::record::Record;
use crate::touch::{read, write};
use memfold_sys::Errno;

const SS_AUTODISARM: i32 = i32::MIN;

/// Whether a thread whose stack pointer is `sp` is on the program's alternate stack.
pub fn is_on(record: &Record, sp: usize) -> bool {
    let stack = record.alternate.get();
    stack.flags & SS_AUTODISARM == 0 && stack.holds(sp)
}

/// `sigaltstack`; gives the new one.
pub fn set_alternate(
    record: &Record,
    context: &Context,
    [new, old, ..]: &[usize; 6],
) -> Result<Option<Stack>, Errno> {
    let wanted = match *new {
        0 => None,
        at => Some(read::<Stack>(at).map_err(|_| Errno::FAULT)?),
    };
    let sp = context.regs.rsp as usize;
    let (before, on) = (record.alternate.get(), is_on(record, sp));
    if let Some(wanted) = wanted {
        if on {
            return Err(Errno::PERM);
        }
        record.alternate.set(checked(wanted)?);
    }
    if *old != 0 {
        let state = match () {
            () if on => libc::SS_ONSTACK,
            () if before.size == 0 => libc::SS_DISABLE,
            () => 0,
        };
        let seen = Stack { flags: state | before.flags & SS_AUTODISARM, ..before };
        // SAFETY: the program wants it there.
        unsafe { write(*old, &seen) }.map_err(|_| Errno::FAULT)?;
    }
    Ok(wanted.map(|_| record.alternate.get()))
}

/// A stack as the kernel would keep it.
pub fn checked(wanted: Stack) -> Result<Stack, Errno> {
    match wanted.flags & !SS_AUTODISARM {
        libc::SS_DISABLE => Ok(Stack { flags: wanted.flags, ..Stack::NONE }),
        0 | libc::SS_ONSTACK if wanted.size < libc::MINSIGSTKSZ => Err(Errno::NOMEM),
        0 | libc::SS_ONSTACK => Ok(Stack { padding: 0, ..wanted }),
        _ => Err(Errno::INVAL),
    }
}

/// It has been entered by a handler.
pub fn entered(record: &Record) {
    if record.alternate.get().flags & SS_AUTODISARM != 0 {
        record.alternate.set(Stack::NONE);
    }
}
