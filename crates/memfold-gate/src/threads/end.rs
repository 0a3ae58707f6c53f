//! The end of a thread.
use crate::entry;
use crate::keeper::{Ending, Keeper};
use crate::record::Record;
use crate::touch::{read, touch};
use memfold_sys::raw::{set_signals_blocked, system_call};

/// The kernel follows a list no further (`ROBUST_LIST_LIMIT`).
const ENTRIES_MAX: usize = 2048;

/// `exit`.
pub fn exit(keeper: &dyn Keeper, record: &Record, code: usize) -> ! {
    touch_robust_list();
    keeper.ends(Ending::Thread);
    set_signals_blocked(u64::MAX);
    record.fs.set(0);
    // SAFETY: all signals are blocked.
    unsafe { entry::exit(record.state(), code) }
}

/// Makes present what the kernel is about to read and write: the locks that the thread has.
fn touch_robust_list() {
    let (mut head, mut bytes) = (0usize, 0usize);
    let args = [0, &raw mut head as usize, &raw mut bytes as usize, 0, 0, 0];
    // SAFETY: both have room.
    let known = unsafe { system_call(libc::SYS_get_robust_list, args) };
    if known.is_err() || head == 0 {
        return;
    }
    let Ok([mut entry, offset, waits_for]) = read::<[usize; 3]>(head) else { return };
    let futex = |entry: usize| (entry & !1).wrapping_add(offset);
    for _ in 0..ENTRIES_MAX {
        if entry & !1 == head || touch(futex(entry), true).is_err() {
            break;
        }
        let Ok(next) = read::<usize>(entry & !1) else { break };
        entry = next;
    }
    if waits_for & !1 != 0 {
        let _ = touch(futex(waits_for), true);
    }
}
