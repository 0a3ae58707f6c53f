//! A copy of the process: `fork`, and `clone` without CLONE_VM.
use crate::actions::PROTECTED;
use crate::dispatch::arm;
use crate::frame::Action;
use crate::keeper::{Keeper, Refused};
use crate::patch::with_patching_stopped;
use crate::record::{KEEPER, Record, with_growth_stopped};
use crate::signals::{block_all, install_protected};
use core::sync::atomic::Ordering::SeqCst;
use memfold_sys::raw::{set_signals_blocked, system_call};

/// Handlers become default in the child.
pub const CLEAR_SIGHAND: usize = 0x1_0000_0000;

/// Makes the copy by the call `nr`, whose arguments name no stack.
pub fn copy(
    keeper: &dyn Keeper,
    record: &'static Record,
    nr: usize,
    args: &[usize; 6],
    flags: usize,
) -> isize {
    block_all();
    with_growth_stopped(|| {
        with_patching_stopped(|| {
            keeper.copy(&mut || {
                // SAFETY: the child goes on here, on its copy of this stack.
                let made = record.actions().with(|_| unsafe { system_call(nr as i64, *args) });
                match made {
                    Ok(0) => {
                        record.pending.store(0, SeqCst);
                        record.sent.set(0);
                        record.actions().forget_sent();
                        record.claim();
                        record.robust.store(0, SeqCst);
                        record.give_back_others();
                        record.begin_as_copy();
                        begin(record, flags);
                        0
                    }
                    Ok(pid) => pid as isize,
                    Err(e) => -(e.raw_os_error() as isize),
                }
            })
        })
    })
}

/// The first thing a task does, with all signals blocked that may be.
pub fn begin(record: &Record, flags: usize) {
    if flags & CLEAR_SIGHAND != 0 {
        record.actions().with(|table| {
            table.iter_mut().filter(|each| each.is_handler()).for_each(|each| {
                *each = Action::DEFAULT;
            });
        });
    }
    let begun = if flags & CLEAR_SIGHAND != 0 { install_protected(record) } else { Ok(()) };
    if let Err(e) = begun.and_then(|()| arm()) {
        // Its calls would meet what is folded. A filter that lets it make no such call can't be
        // told from here.
        if let Some(keeper) = KEEPER.get() {
            keeper.tells(Refused::Task(e));
        }
        set_signals_blocked(PROTECTED);
        // SAFETY: it has done nothing yet.
        let _ = unsafe { system_call(libc::SYS_exit_group, [255, 0, 0, 0, 0, 0]) };
    }
}
