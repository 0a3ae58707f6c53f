//! What is blocked: the kernel's mask has none of the gate's own signals, the record has them.
use crate::actions::{PROTECTED, UNBLOCKABLE};
use crate::frame::Context;
use crate::record::Record;
use crate::signals::deliver::promote_sent;
use crate::touch::{read, write};
use core::sync::atomic::Ordering::SeqCst;
use memfold_sys::Errno;
use memfold_sys::raw::{set_signals_blocked, system_call};

/// What the program believes to be blocked.
pub fn mask_of(record: &Record, context: &Context) -> u64 {
    context.mask | record.blocked.get()
}

/// Blocks from when the context is gone on with.
pub fn replace_mask(record: &Record, context: &mut Context, mask: u64) {
    context.mask = mask & !(PROTECTED | UNBLOCKABLE);
    record.blocked.set(mask & PROTECTED);
    promote_sent(record, mask);
}

/// Blocks all signals but the gate's own until the gate is left.
pub fn block_all() {
    set_signals_blocked(!PROTECTED);
}

/// What a call of `rt_sigprocmask` changes.
struct Change {
    how: i32,
    /// `None`: nothing.
    set: Option<u64>,
}

impl Change {
    fn of([how, new, _, bytes, ..]: &[usize; 6]) -> Result<Change, Errno> {
        let how = *how as i32;
        if *bytes != 8 {
            return Err(Errno::INVAL);
        }
        let set = match *new {
            0 => None,
            at => Some(read::<u64>(at).map_err(|_| Errno::FAULT)?),
        };
        let is_known = matches!(how, libc::SIG_BLOCK | libc::SIG_UNBLOCK | libc::SIG_SETMASK);
        if set.is_some() && !is_known { Err(Errno::INVAL) } else { Ok(Change { how, set }) }
    }

    /// `None`: nothing changes.
    fn after(&self, before: u64) -> Option<u64> {
        self.set.map(|set| match self.how {
            libc::SIG_BLOCK => before | set,
            libc::SIG_UNBLOCK => before & !set,
            _ => set,
        })
    }
}

/// Tells the program what was blocked before.
fn tell(before: u64, [_, _, old, ..]: &[usize; 6]) -> Result<(), Errno> {
    if *old == 0 {
        return Ok(());
    }
    // SAFETY: the program wants it there.
    unsafe { write(*old, &before) }.map_err(|_| Errno::FAULT)
}

/// `rt_sigprocmask`.
pub fn set_mask(record: &Record, context: &mut Context, args: &[usize; 6]) -> Result<(), Errno> {
    let change = Change::of(args)?;
    let before = mask_of(record, context);
    if let Some(mask) = change.after(before) {
        replace_mask(record, context, mask);
    }
    tell(before, args)
}

/// `rt_sigprocmask` of a patched site, where no context is. `None`: it must come as SIGSYS.
pub fn set_mask_now(record: &Record, args: &[usize; 6]) -> Option<Result<(), Errno>> {
    let change = match Change::of(args) {
        Ok(change) => change,
        Err(e) => return Some(Err(e)),
    };
    // Nothing is put off between the look and the change. The program's memory isn't touched
    // meanwhile.
    let real = set_signals_blocked(u64::MAX);
    // What was put off is handled when the gate is left, with this mask in its context.
    let is_put_off = record.pending.load(SeqCst) != 0;
    let own = if is_put_off { record.mask_before.get() } else { real };
    let before = own | record.blocked.get();
    let mask = change.after(before).unwrap_or(before);
    let comes_now = record.sent.get() & !mask != 0;
    if !comes_now {
        record.blocked.set(mask & PROTECTED);
        record.mask_before.set(mask & !(PROTECTED | UNBLOCKABLE));
    }
    let stays = is_put_off || comes_now;
    set_signals_blocked(if stays { real } else { record.mask_before.get() });
    if comes_now { None } else { Some(tell(before, args)) }
}

/// `rt_sigpending`.
pub fn pending(record: &Record, [set, bytes, ..]: &[usize; 6]) -> Result<(), Errno> {
    if *bytes > 8 {
        return Err(Errno::INVAL);
    }
    let mut real = 0u64;
    // SAFETY: it has room for them.
    unsafe { system_call(libc::SYS_rt_sigpending, [&raw mut real as usize, 8, 0, 0, 0, 0]) }?;
    let seen = (real | record.sent.get()).to_ne_bytes();
    // SAFETY: the program wants it there.
    unsafe { crate::touch::write_bytes(*set, &seen[..*bytes]) }.map_err(|_| Errno::FAULT)
}
