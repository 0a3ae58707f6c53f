//! Serves `execve`. The new program starts with the signal mask and the ignored signals that the
//! old one has set.
use crate::actions::{PROTECTED, bit};
use crate::entry;
use crate::frame::{SignalAction, SignalContext};
use crate::keeper::Keeper;
use crate::record::GateThread;
use crate::signals::{hand_over, ignore_really, install_protected};
use crate::threads::behalf::keep_all;
use crate::threads::end::keep_locks;
use memfold_os::raw::set_signals_blocked;

/// Serves `execve` or `execveat`. Returns only if the call fails, with its result.
pub fn execute(
    keeper: &Keeper,
    record: &GateThread,
    context: &SignalContext,
    nr: usize,
    args: &[usize; 6],
) -> isize {
    let ignored_signals = record.actions().with(|actions| {
        let is = |signal: &i32| {
            bit(*signal) & PROTECTED != 0
                && actions[*signal as usize]
                    == SignalAction { handler: libc::SIG_IGN, ..actions[*signal as usize] }
        };
        (1..=31).filter(is).fold(0, |set, signal| set | bit(signal))
    });
    let is_kept = keep_locks(keeper, record);
    let mask = record.blocked.get();
    // The program's own mask and ignored signals are in the kernel only while the call is made: what
    // the keeper reads before may be folded, or not be there, and such a fault would end the process.
    let result = keeper.life.execute(nr, args, &mut |args| {
        ignore_really(ignored_signals);
        if mask != 0 {
            set_signals_blocked(context.mask | mask);
            hand_over(record, mask);
        }
        // SAFETY: the program makes this call itself, and what it names is held. The pending word
        // is the record's, which stays mapped.
        let result = unsafe { entry::call(nr, args, record.pending.as_ptr()) };
        if mask != 0 {
            // A pending signal must stay the only one until it is delivered.
            let waits = record.pending.load(core::sync::atomic::Ordering::SeqCst) != 0;
            set_signals_blocked(if waits { !PROTECTED } else { context.mask });
        }
        if ignored_signals != 0 {
            let _ = install_protected(record);
        }
        result
    });
    if is_kept {
        keep_all(keeper, record, false);
    }
    result
}
