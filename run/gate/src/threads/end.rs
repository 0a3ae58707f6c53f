//! Ends threads.
use crate::entry;
use crate::keeper::Keeper;
use crate::record::{GateThread, each_used};
use crate::signals::block_all;
use crate::threads::behalf::keep_all;
use crate::touch::{exchange, read, touch};
use crate::user_dispatch::is_retired;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering::SeqCst};
use memfold_os::Errno;
use memfold_os::raw::{set_signals_blocked, system_call};
use memfold_os::thread::{process_id, thread_id};

/// The most entries of a robust list that the kernel follows (`ROBUST_LIST_LIMIT`).
const ENTRIES_MAX: usize = 2048;

/// The size of a `struct robust_list_head`.
const HEAD_BYTES: usize = size_of::<[usize; 3]>();

/// An entry of a robust list.
struct Lock {
    /// Whether the mutex has priority inheritance. The kernel wakes those who wait for it itself.
    inherits: bool,
    /// Whether the thread was about to take or to release it.
    is_pending: bool,
}

/// The code that the process's first thread has passed to `exit`. Before Linux 6.0 this is the exit
/// code of the process. Later it is that of the last thread.
static CODE: AtomicUsize = AtomicUsize::new(0);
/// The number of the process whose first thread has called `exit`.
static EXITED: AtomicU32 = AtomicU32::new(0);

/// Returns whether the process's first thread has called `exit`.
pub fn first_has_exited() -> bool {
    EXITED.load(SeqCst) == process_id()
}

/// Serves `exit`. The keeper's threads would keep the process alive, so the last thread of the
/// program ends the process.
pub fn exit(keeper: &Keeper, record: &GateThread, code: usize) -> ! {
    release_locks(record);
    // The gate's own signals stay open until the locks have been released.
    block_all();
    if thread_id() == process_id() {
        CODE.store(code, SeqCst);
        EXITED.store(process_id(), SeqCst);
    }
    // The kernel ends a process without the keeper's threads with its last one.
    if !is_retired() && record.ends_last(is_gone) {
        keep_locks(keeper, record);
        keeper.life.ends();
        let code = if last_decides() { code } else { CODE.load(SeqCst) };
        let args = [code, 0, 0, 0, 0, 0];
        // SAFETY: the call takes no pointers. No other thread of the program is left.
        let _ = unsafe { system_call(libc::SYS_exit_group, args) };
    }
    set_signals_blocked(u64::MAX);
    record.fs.set(0);
    // SAFETY: all signals are blocked. The state is a word of the thread's slot, which stays
    // mapped.
    unsafe { entry::exit(record.state(), code) }
}

/// Returns whether the last thread of a process decides the exit code of the process, as it does
/// from Linux 6.0 on.
fn last_decides() -> bool {
    const FIRST: u32 = 6;
    const FIELD_BYTES: usize = 65;
    /// The offset of the release in `struct utsname`, where it is the third field.
    const RELEASE_AT: usize = 2 * FIELD_BYTES;
    let mut names = [0u8; 6 * FIELD_BYTES];
    // SAFETY: `names` has room for the six fields that the kernel writes.
    let result =
        unsafe { system_call(libc::SYS_uname, [names.as_mut_ptr() as usize, 0, 0, 0, 0, 0]) };
    let digits = names[RELEASE_AT..].iter().take_while(|byte| byte.is_ascii_digit());
    let major = digits.fold(0, |value: u32, digit| value * 10 + u32::from(digit - b'0'));
    result.is_ok() && major >= FIRST
}

/// Returns whether a filter has killed a thread. The kernel lists the process's first thread until
/// the process ends, but clears its robust list.
pub(super) fn is_gone(record: &GateThread) -> bool {
    let thread = record.thread.load(SeqCst);
    if thread == 0 {
        return false;
    }
    let args = [process_id() as usize, thread as usize, 0, 0, 0, 0];
    // SAFETY: signal 0 isn't sent. The call only asks whether the thread exists.
    if let Err(e) = unsafe { system_call(libc::SYS_tgkill, args) } {
        return e == Errno::SRCH;
    }
    let had_list = thread == process_id() && record.robust.load(SeqCst) != 0;
    had_list && list_of(thread) == Some(0) && last_decides()
}

/// Returns whether a filter has killed the program's last thread, so that no thread ends the
/// process. A thread of the keeper asks this. Returns `false` if it can't be known: before Linux
/// 6.0, or if the first thread has no robust list.
pub fn all_are_gone() -> bool {
    // The record of a killed thread stays in use. Before the gate has begun there is no record, so
    // nothing has been killed.
    let (mut all, mut any) = (true, false);
    each_used(|each| {
        if all && each.is_of_first_process() {
            all = is_gone(each);
            any = true;
        }
    });
    all && any
}

/// Makes the locks of all threads resident for good, because the process is about to end or to
/// execute a program. The kernel reads and writes them then. Returns `false` if no thread has any.
pub fn keep_locks(keeper: &Keeper, record: &GateThread) -> bool {
    let mut is_kept = false;
    record.each_of_process(|each| {
        let head = each.robust.load(SeqCst);
        if has_locks(head) {
            if !is_kept {
                keep_all(keeper, record, true);
                is_kept = true;
            }
            touch_locks(head);
        }
    });
    is_kept
}

/// Returns the head of the calling thread's robust list, or 0 if it has none.
pub fn robust_list() -> usize {
    list_of(0).unwrap_or(0)
}

/// Returns the head of a thread's robust list, or `None` if the kernel refuses to tell. Thread 0 is
/// the caller.
fn list_of(thread: u32) -> Option<usize> {
    let (mut head, mut bytes) = (0usize, 0usize);
    let args = [thread as usize, &raw mut head as usize, &raw mut bytes as usize, 0, 0, 0];
    // SAFETY: `head` and `bytes` have room for the two words that the kernel writes.
    unsafe { system_call(libc::SYS_get_robust_list, args) }.ok().map(|_| head)
}

/// Reads a `struct robust_list_head`: the first entry, the distance from an entry to its lock, and
/// the entry of the lock that the thread waits for. Returns `None` if `head` is 0 or can't be read.
fn read_head(head: usize) -> Option<[usize; 3]> {
    if head == 0 { None } else { read::<[usize; 3]>(head).ok() }
}

fn has_locks(head: usize) -> bool {
    read_head(head).is_some_and(|[entry, _, waits_for]| entry & !1 != head || waits_for & !1 != 0)
}

/// Calls `each` with each lock of a thread and its address, in the kernel's order, until `each`
/// returns `false`.
fn each_lock(head: usize, each: &mut dyn FnMut(usize, Lock) -> bool) {
    let Some([mut entry, offset, waits_for]) = read_head(head) else { return };
    let futex = |entry: usize| (entry & !1).wrapping_add(offset);
    for _ in 0..ENTRIES_MAX {
        if entry & !1 == head {
            break;
        }
        // A thread that takes a released lock changes the lock's entry, so the entry is read first.
        let next = read::<usize>(entry & !1);
        let is_owned = entry & !1 != waits_for & !1;
        let inherits = entry & 1 != 0;
        if is_owned && !each(futex(entry), Lock { inherits, is_pending: false }) {
            return;
        }
        let Ok(next) = next else { return };
        entry = next;
    }
    if waits_for & !1 != 0 {
        each(futex(waits_for), Lock { inherits: waits_for & 1 != 0, is_pending: true });
    }
}

/// Makes the locks of a thread resident, because the kernel is about to read and write them.
fn touch_locks(head: usize) {
    each_lock(head, &mut |futex, _| touch(futex, true).is_ok());
}

/// Marks the locks of the calling thread as those of a dead thread, and wakes threads that wait for
/// them. The kernel does so when a thread ends, but stops at the first folded lock. The locks are
/// not held, so an evictor might fold them before the kernel has walked them.
fn release_locks(record: &GateThread) {
    let head = record.robust.load(SeqCst);
    if !has_locks(head) {
        return;
    }
    let own = thread_id();
    each_lock(head, &mut |futex, lock| release(futex, lock, own));
    // Of a thread with a list that the kernel has cleared, `is_gone` says that it was killed.
    record.robust.store(0, SeqCst);
    // The entries may be part of another thread's list by now. If the call fails, the kernel finds
    // that the caller owns none of these locks.
    // SAFETY: the call takes no memory. The kernel's walk of an empty list touches none.
    let _ = unsafe { system_call(libc::SYS_set_robust_list, [0, HEAD_BYTES, 0, 0, 0, 0]) };
}

/// Releases one lock, as the kernel's `handle_futex_death` does. Returns `false` if it can't be
/// read or written.
fn release(futex: usize, lock: Lock, own: u32) -> bool {
    if !futex.is_multiple_of(4) {
        return false;
    }
    loop {
        let Ok(word) = read::<u32>(futex) else { return false };
        let owner = word & libc::FUTEX_TID_MASK;
        if lock.is_pending && !lock.inherits && owner == 0 {
            wake_one(futex);
            return true;
        }
        if owner != own {
            return true;
        }
        let dead = word & libc::FUTEX_WAITERS | libc::FUTEX_OWNER_DIED;
        // SAFETY: the program has put the lock into its robust list, so that the word changes in
        // this way when the owner ends. The owner is the caller, which ends now.
        if unsafe { exchange(futex, word, dead) } {
            if !lock.inherits && word & libc::FUTEX_WAITERS != 0 {
                wake_one(futex);
            }
            return true;
        }
        if touch(futex, true).is_err() {
            return false;
        }
    }
}

/// Wakes a thread that waits for a lock. It holds the lock's page while it waits.
fn wake_one(futex: usize) {
    // SAFETY: the call reads and writes no memory of the program.
    let _ = unsafe { system_call(libc::SYS_futex, [futex, libc::FUTEX_WAKE as usize, 1, 0, 0, 0]) };
}
