//! The end of a thread.
use crate::entry;
use crate::keeper::{Ending, Keeper};
use crate::record::Record;
use crate::threads::behalf::keep_all;
use crate::touch::{read, touch};
use core::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use memfold_sys::raw::{set_signals_blocked, system_call};
use memfold_sys::thread::{process_id, thread_id};

/// The kernel follows a list no further (`ROBUST_LIST_LIMIT`).
const ENTRIES_MAX: usize = 2048;

/// What the process's first thread has given to its `exit`: the process ends with that.
static CODE: AtomicUsize = AtomicUsize::new(0);

/// `exit`. The owner's threads would go on after the last of the program's, and the process with
/// them: the last one ends it.
pub fn exit(keeper: &dyn Keeper, record: &Record, code: usize) -> ! {
    touch_locks(record.robust.load(SeqCst));
    keeper.ends(Ending::Thread);
    set_signals_blocked(u64::MAX);
    if thread_id() == process_id() {
        CODE.store(code, SeqCst);
    }
    if record.ends_last() {
        keep_locks(keeper, record);
        keeper.ends(Ending::Process);
        let args = [CODE.load(SeqCst), 0, 0, 0, 0, 0];
        // SAFETY: no thread of the program's is left.
        let _ = unsafe { system_call(libc::SYS_exit_group, args) };
    }
    record.fs.set(0);
    // SAFETY: all signals are blocked.
    unsafe { entry::exit(record.state(), code) }
}

/// The process is about to end, or to execute something: what the kernel reads and writes at the
/// end of its threads, their locks, is made present, and stays. `false`: there are none.
pub fn keep_locks(keeper: &dyn Keeper, record: &Record) -> bool {
    let mut kept = false;
    record.each_of_process(|each| {
        let head = each.robust.load(SeqCst);
        if has_locks(head) {
            if !kept {
                keep_all(keeper, record, true);
                kept = true;
            }
            touch_locks(head);
        }
    });
    kept
}

/// The head of the calling thread's list of locks; 0: it has none.
pub fn robust_list() -> usize {
    let (mut head, mut bytes) = (0usize, 0usize);
    let args = [0, &raw mut head as usize, &raw mut bytes as usize, 0, 0, 0];
    // SAFETY: both have room.
    let known = unsafe { system_call(libc::SYS_get_robust_list, args) };
    known.map_or(0, |_| head)
}

/// `struct robust_list_head`: the first entry, from there to an entry's lock, and the entry of the
/// lock that is waited for.
fn read_head(head: usize) -> Option<[usize; 3]> {
    if head == 0 { None } else { read::<[usize; 3]>(head).ok() }
}

fn has_locks(head: usize) -> bool {
    read_head(head).is_some_and(|[entry, _, waits_for]| entry & !1 != head || waits_for & !1 != 0)
}

/// Makes present what the kernel is about to read and write: the locks that a thread has.
fn touch_locks(head: usize) {
    let Some([mut entry, offset, waits_for]) = read_head(head) else { return };
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
