//! Serves `rt_sigreturn`, which leaves a handler of the program by the frame on its stack.
use crate::frame::{SignalContext, SignalInfo, fp_bytes, fp_bytes_at};
use crate::keeper::BadAddress;
use crate::record::GateThread;
use crate::signals::alternate::{checked, is_on};
use crate::signals::deliver::deliver;
use crate::signals::masks::replace_mask;
use crate::touch::{copy, read, read_bytes};

/// Serves `rt_sigreturn`, called at `context`. The program continues as the frame on its stack
/// says.
pub fn resume(record: &GateThread, context: &mut SignalContext) {
    if take(record, context).is_err() {
        deliver(record, context, &SignalInfo::forced(libc::SIGSEGV));
    }
}

fn take(record: &GateThread, context: &mut SignalContext) -> Result<(), BadAddress> {
    let sp = context.regs.rsp as usize;
    let theirs = read::<SignalContext>(sp)?;
    let (from, to) = (theirs.regs.fp as usize, context.regs.fp as usize);
    if from != 0 {
        let mut legacy = [0; 512];
        read_bytes(from, &mut legacy)?;
        let bytes = fp_bytes(&legacy);
        // SAFETY: the kernel wrote the context, so a nonzero `fp` is the address of a state that
        // the kernel wrote too.
        if to == 0 || bytes > unsafe { fp_bytes_at(to) } {
            return Err(BadAddress);
        }
        // SAFETY: the state at `to` has at least `bytes` bytes and only this handler uses it. Its
        // content may be anything, because the kernel checks it.
        unsafe { copy(to, from, bytes)? };
    }
    context.flags = theirs.flags;
    context.regs = theirs.regs;
    context.regs.fp = if from == 0 { 0 } else { to as u64 };
    if !is_on(record, sp)
        && let Ok(stack) = checked(theirs.stack)
    {
        record.alternate.set(stack);
    }
    replace_mask(record, context, theirs.mask);
    Ok(())
}
