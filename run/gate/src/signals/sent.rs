//! Keeps sent signals of the three kinds that the gate itself needs (SIGBUS, SIGSEGV, SIGSYS) while
//! the program has them blocked. The kernel never has them blocked, so it delivers each at once.
//! The gate keeps such a signal pending, for the thread or for the process, as the kernel keeps
//! others.
//!
//! **The kernel gets them back for a call that may take them**: `sigtimedwait`, `sigsuspend`,
//! `execve`, and `read`, `readv` and `poll` of a `signalfd`. For the call the gate blocks them in
//! the kernel and sends them to the calling thread again. When the call is over, those that it
//! hasn't taken arrive at the gate again. No code that may fault runs in between. If a thread
//! already waits for a `signalfd`, its call is called off and the thread checks again.
//!
//! **A signal for the process goes to a thread that takes it**: one that doesn't block it, or waits
//! for it ([`GateThread::awaits`]). The thread that keeps a signal stores it, and then looks for a
//! taker. A thread that begins to wait sets `awaits`, and then looks for kept signals. So at least
//! one of the two sees the other.
use crate::actions::{PROTECTED, bit};
use crate::entry;
use crate::frame::{SignalInfo, code_of_nudge, code_to_show};
use crate::record::GateThread;
use crate::touch::{read, read_bytes, write, write_bytes};
use core::sync::atomic::{AtomicU64, Ordering::SeqCst};
use memfold_os::raw::{set_signals_blocked, system_call};
use memfold_os::thread::process_id;

/// The number of `io_pgetevents`, which the libc crate lacks.
pub const SYS_IO_PGETEVENTS: i64 = 333;
const SIGNALS: [i32; 3] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGSYS];

/// Returns the place of a pending signal. Each signal that can arrive while another is pending has
/// a place of its own.
pub fn place_of(signal: i32) -> usize {
    match signal {
        libc::SIGSEGV => 1,
        libc::SIGBUS => 2,
        libc::SIGSYS => 3,
        _ => 0,
    }
}

/// Makes a signal pending, unless a signal with its place is pending already. It replaces a nudge.
pub fn put(record: &GateThread, info: &SignalInfo) {
    let place = place_of(info.signal);
    let is_free = record.pending.load(SeqCst) & (1 << place) == 0;
    if is_free || record.deferred[place].get().is_nudge() {
        record.deferred[place].set(*info);
        record.pending.fetch_or(1 << place, SeqCst);
    }
}

/// The signals for which the program has ever asked for a `signalfd`.
static READ: AtomicU64 = AtomicU64::new(0);

/// Notes that the program asks for a `signalfd` of these signals.
pub fn note_read(set: u64) {
    READ.fetch_or(set & PROTECTED, SeqCst);
}

/// Keeps a signal that was sent. A signal for the process is sent on at once if another thread
/// takes it.
pub fn keep(record: &GateThread, info: &SignalInfo) {
    if info.is_nudge() {
        return;
    }
    if info.is_for_thread() {
        record.sent_info[place_of(info.signal)].set(*info);
        record.sent.set(record.sent.get() | bit(info.signal));
        return;
    }
    record.actions().keep_sent(info);
    let mut taker = None;
    record.each_of_process(|each| {
        if taker.is_none() && !core::ptr::eq(each, record) && takes(each, info.signal) {
            taker = Some(each.thread.load(SeqCst));
        }
    });
    if taker.is_none() && READ.load(SeqCst) & bit(info.signal) != 0 {
        // Another thread may wait for the signal by a descriptor.
        record.each_of_process(|each| {
            let thread = each.thread.load(SeqCst);
            if !core::ptr::eq(each, record) && thread != 0 {
                let _ = send(thread, &info.nudge());
            }
        });
    }
    if let Some(thread) = taker
        && let Some(info) = record.actions().take_sent(bit(info.signal))
        && !forward(record, thread, &info)
    {
        // The thread has ended meanwhile.
        record.actions().keep_sent(&info);
    }
}

fn takes(record: &GateThread, signal: i32) -> bool {
    // A thread that has just been made has no number yet.
    let is_there = record.thread.load(SeqCst) != 0;
    is_there && (record.blocked.get() & bit(signal) == 0 || record.awaits.get() & bit(signal) != 0)
}

/// Sends a signal to a thread of this process. Returns `false` if there is no such thread.
pub fn send(thread: u32, info: &SignalInfo) -> bool {
    let args = [
        process_id() as usize,
        thread as usize,
        info.signal as usize,
        &raw const *info as usize,
        0,
        0,
    ];
    // SAFETY: `info` lives until the call returns, and the kernel only reads it.
    unsafe { system_call(libc::SYS_rt_tgsigqueueinfo, args) }.is_ok()
}

/// Sends a signal on to a thread of this process. Returns `false` if there is no such thread.
fn forward(record: &GateThread, thread: u32, info: &SignalInfo) -> bool {
    let is_own = thread == record.thread.load(SeqCst);
    send(thread, &if is_own { *info } else { info.forwarded() })
}

/// Corrects the information that `sigtimedwait` has written at `at`, because the signal may have
/// been sent on.
pub fn tell_as_sent(at: usize) {
    let Ok(info) = read::<SignalInfo>(at) else { return };
    let before = info.shown();
    if before.code != info.code {
        // SAFETY: the program passed this address for the information.
        let _ =
            unsafe { write(at + core::mem::offset_of!(SignalInfo, code), &(before.code as u32)) };
    }
}

/// Returns the signals that are kept for a thread.
pub fn kept(record: &GateThread) -> u64 {
    record.sent.get() | record.actions().sent()
}

fn take(record: &GateThread, set: u64) -> Option<SignalInfo> {
    let own = SIGNALS.into_iter().find(|signal| record.sent.get() & set & bit(*signal) != 0);
    if let Some(signal) = own {
        record.sent.set(record.sent.get() & !bit(signal));
        return Some(record.sent_info[place_of(signal)].get());
    }
    record.actions().take_sent(set)
}

/// Makes those kept signals pending that `mask` doesn't block.
pub fn promote(record: &GateThread, mask: u64) {
    if kept(record) == 0 {
        return;
    }
    while let Some(info) = take(record, !mask) {
        put(record, &info);
    }
}

/// Forgets the kept signals of a kind that is ignored from now on.
pub fn forget(record: &GateThread, signal: i32) {
    record.sent.set(record.sent.get() & !bit(signal));
    record.actions().take_sent(bit(signal));
}

fn change_mask(how: i32, set: u64) {
    let args = [how as usize, &raw const set as usize, 0, 8, 0, 0];
    // SAFETY: the set lives until the call returns, and the kernel only reads it.
    let _ = unsafe { system_call(libc::SYS_rt_sigprocmask, args) };
}

/// Blocks `set` in the kernel, and sends the kept signals of the set to the thread again.
pub fn hand_over(record: &GateThread, set: u64) {
    change_mask(libc::SIG_BLOCK, set & PROTECTED);
    while let Some(info) = take(record, set) {
        let _ = send(record.thread.load(SeqCst), &info);
    }
}

/// Makes a system call that may wait. Meanwhile the kernel has the signals that are kept for the
/// thread and that the call may take.
///
/// # Safety
/// - The conditions of the system call hold. What the call names is held.
pub unsafe fn call(record: &GateThread, nr: usize, args: &[usize; 6]) -> isize {
    // SAFETY: the caller promises that the call may be made. The pending word is the record's,
    // which stays mapped.
    let make = || unsafe { entry::call(nr, args, record.pending.as_ptr()) };
    loop {
        let signals = match may_read(nr) {
            true => kept(record) & READ.load(SeqCst) & record.blocked.get(),
            false => 0,
        };
        let set = signals | record.awaits.get();
        let result = if set == 0 {
            make()
        } else {
            hand_over(record, set & PROTECTED);
            let result = make();
            // Signals that the call hasn't taken arrive here.
            change_mask(libc::SIG_UNBLOCK, set & PROTECTED);
            result
        };
        if result > 0 && gives_bytes(nr) && READ.load(SeqCst) != 0 {
            take_read(record, nr, args, result as usize);
        }
        if result != -(libc::EINTR as isize)
            || !goes_on(nr, args)
            || record.waiting_mask.get().is_some()
            || !put_back(record)
        {
            return result;
        }
    }
}

/// Corrects what a `signalfd` has returned. Each nudge is replaced by the signal that it was about,
/// which isn't kept any longer.
fn take_read(record: &GateThread, nr: usize, args: &[usize; 6], bytes: usize) {
    /// The length of `struct signalfd_siginfo`. The signal is at byte 0, the code at byte 8.
    const INFO_BYTES: usize = 128;
    const CODE_AT: usize = 8;
    if !bytes.is_multiple_of(INFO_BYTES) {
        return;
    }
    for info in (0..bytes).step_by(INFO_BYTES) {
        let word = |at: usize| given(nr, args, info + at);
        let (Some(signal), Some(code)) = (word(0), word(CODE_AT)) else { return };
        let (signal, code) = (signal as i32, code as i32);
        let mut code_shown = code;
        if SIGNALS.contains(&signal)
            && let Some(code_of_signal) = code_of_nudge(code)
            && may_be_signalfd(args[0])
        {
            code_shown = record
                .actions()
                .take_sent(bit(signal))
                .map_or(code_of_signal, |signal_info| signal_info.code);
        }
        code_shown = code_to_show(code_shown);
        if code_shown != code && may_be_signalfd(args[0]) {
            for (at, byte) in (info + CODE_AT..).zip(code_shown.to_ne_bytes()) {
                let place = place_in(nr, args, at);
                // SAFETY: the place lies in a buffer that the program passed for what is read.
                place.map(|place| unsafe { write_bytes(place, &[byte]) });
            }
        }
    }
}

/// Returns four bytes that a call has read, or `None` if they can't be read. They may lie in
/// several of its buffers.
fn given(nr: usize, args: &[usize; 6], from: usize) -> Option<u32> {
    let mut word = [0; 4];
    for (at, byte) in (from..).zip(&mut word) {
        read_bytes(place_in(nr, args, at)?, core::slice::from_mut(byte)).ok()?;
    }
    Some(u32::from_ne_bytes(word))
}

/// Returns the address at which a call of [`gives_bytes`] has put one of its bytes.
fn place_in(nr: usize, args: &[usize; 6], byte: usize) -> Option<usize> {
    if nr as i64 == libc::SYS_read {
        return args[1].checked_add(byte);
    }
    let mut byte_left = byte;
    for n in 0..args[2] {
        let [start, len] =
            read::<[usize; 2]>(args[1].checked_add(n * size_of::<[usize; 2]>())?).ok()?;
        if byte_left < len {
            return start.checked_add(byte_left);
        }
        byte_left -= len;
    }
    None
}

/// Returns whether a descriptor has no file behind it, like a `signalfd`. Bytes of a file may look
/// like a signal.
fn may_be_signalfd(fd: usize) -> bool {
    const NO_FILE: libc::c_long = 0x0904_1934;
    // SAFETY: all fields of `statfs` are integers, for which zeros are valid.
    let mut about: libc::statfs = unsafe { core::mem::zeroed() };
    let args = [fd, &raw mut about as usize, 0, 0, 0, 0];
    // SAFETY: `about` has room for the struct that the kernel writes.
    unsafe { system_call(libc::SYS_fstatfs, args) }.is_err() || about.f_type == NO_FILE
}

/// Returns whether a call may read from a `signalfd`.
fn gives_bytes(nr: usize) -> bool {
    matches!(nr as i64, libc::SYS_read | libc::SYS_readv | libc::SYS_preadv2)
}

/// Returns whether a call may report a signal by a descriptor.
fn may_read(nr: usize) -> bool {
    let waits = matches!(
        nr as i64,
        libc::SYS_poll
            | libc::SYS_ppoll
            | libc::SYS_select
            | libc::SYS_pselect6
            | libc::SYS_epoll_wait
            | libc::SYS_epoll_pwait
            | libc::SYS_epoll_pwait2
    );
    waits || gives_bytes(nr)
}

/// Returns whether a call can be made again that the kernel alone wouldn't have ended. Such a call
/// waits without a limit or until a point in time, or has written back the rest of its time.
fn goes_on(nr: usize, args: &[usize; 6]) -> bool {
    match nr as i64 {
        libc::SYS_poll => (args[2] as i32) < 0,
        libc::SYS_epoll_wait | libc::SYS_epoll_pwait => (args[3] as i32) < 0,
        libc::SYS_clock_nanosleep => args[1] as i32 & libc::TIMER_ABSTIME != 0,
        libc::SYS_futex => {
            let command = args[1] as i32 & !(libc::FUTEX_PRIVATE_FLAG | libc::FUTEX_CLOCK_REALTIME);
            args[3] == 0 || command != libc::FUTEX_WAIT
        }
        libc::SYS_semtimedop => args[3] == 0,
        libc::SYS_rt_sigtimedwait => args[2] == 0,
        libc::SYS_recvmmsg => args[4] == 0,
        libc::SYS_nanosleep
        | libc::SYS_epoll_pwait2
        | libc::SYS_io_getevents
        | SYS_IO_PGETEVENTS
        | libc::SYS_close => false,
        _ => true,
    }
}

/// Keeps all pending signals, if the program has all of them blocked. Returns whether it did. The
/// kernel's mask is the previous one then.
fn put_back(record: &GateThread) -> bool {
    let pending = record.pending.load(SeqCst);
    let is_kept = |signal: &i32| {
        let info = record.deferred[place_of(*signal)].get();
        pending & 1 << place_of(*signal) == 0
            || record.blocked.get() & bit(*signal) != 0 && !info.is_fault()
    };
    if pending == 0 || pending & 1 != 0 || !SIGNALS.iter().all(is_kept) {
        return false;
    }
    for signal in SIGNALS.into_iter().filter(|signal| pending & 1 << place_of(*signal) != 0) {
        let info = record.deferred[place_of(signal)].get();
        record.pending.fetch_and(!(1 << place_of(signal)), SeqCst);
        keep(record, &info);
    }
    set_signals_blocked(record.mask_before.get());
    true
}

/// Serves `rt_sigqueueinfo`, `rt_tgsigqueueinfo` or `pidfd_send_signal` of a signal that claims to
/// come from the kernel. `args[signal]` is the signal, and `args[information]` points to its
/// information. `make` makes the call. The kernel allows this only to the caller itself, so the
/// gate asks it first by the same call with signal 0. Returns `None` if the signal makes no such
/// claim.
pub fn make_up(
    args: &[usize; 6],
    [signal, information]: [usize; 2],
    for_thread: bool,
    mut make: impl FnMut(&[usize; 6]) -> isize,
) -> Option<isize> {
    let info = read::<SignalInfo>(args[information]).ok()?.of(args[signal] as i32);
    let to_send = info.made_up(for_thread)?;
    let mut make = |info: &SignalInfo| {
        let mut args = *args;
        (args[signal], args[information]) = (info.signal as usize, &raw const *info as usize);
        make(&args)
    };
    let may = make(&info.of(0));
    Some(if may == 0 { make(&to_send) } else { may })
}

/// Serves `kill` of the caller's own process by one of these three signals. If the caller takes the
/// signal, it has it before the call returns. Returns `None` for all other calls.
pub fn kill(record: &GateThread, [process, signal, ..]: &[usize; 6]) -> Option<isize> {
    let signal = *signal as i32;
    if *process as i32 != process_id() as i32 || !SIGNALS.contains(&signal) {
        return None;
    }
    let (mut first, mut other) = (None, None);
    record.each_of_process(|each| {
        let thread = each.thread.load(SeqCst);
        if thread == process_id() && takes(each, signal) {
            first = Some(thread);
        } else if takes(each, signal) {
            other = Some(thread);
        }
    });
    let own = takes(record, signal).then(|| record.thread.load(SeqCst));
    let info = SignalInfo::of_user(signal, process_id());
    if !first.or(own).or(other).is_some_and(|thread| forward(record, thread, &info)) {
        keep(record, &info);
    }
    Some(0)
}
