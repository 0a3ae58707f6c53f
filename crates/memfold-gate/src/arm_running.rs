//! Arms a process that has threads.
//!
//! Each thread is called into a handler. There it arms itself, and waits until the last thread has come.
//! Then the gate takes over the program's signal actions, and all threads continue. If one thread can't be
//! interrupted, none is armed, and all continue unarmed. So no armed thread ever runs beside an unarmed one.
//!
//! - **The signal** is one that libc reserves and blocks only for a few instructions. When another sender
//!   uses it (`setuid` of libc), the signal is passed to the handler before. The gate sends it with the
//!   number of the round, so that a late or doubled one has no effect.
//! - **The threads** are those of `/proc/self/task`, until a look finds no thread that hasn't come. Running
//!   threads may create new ones between two looks. A new thread is in the list before its `clone`
//!   returns. A thread that has ended isn't in it, but for the first one, which stays as a zombie.
//! - **The stack** of the handler is the thread's own: a thread can't change the alternate stack that it
//!   stands on. If a thread does stand on one, all threads continue and are interrupted again. Go's stacks are too small
//!   for a frame. Where Go's runtime has the signals, no thread is called.
//! - **Waiting calls** behave as after a handler with SA_RESTART. `read`, `futex`, `accept` and `wait4` are
//!   made again, and pass the gate. `nanosleep`, `poll`, `epoll_wait`, `select` and `pause` return EINTR
//!   once.
//! - **A thread in a handler of the program's** returns from it by libc's instruction, which traps. The
//!   kernel wrote that frame, and the gate takes mask and alternate stack from it as from its own.
//! - **A parent in `vfork`** comes when its child has executed a program. The child is another process,
//!   which stays as it is.
//! - **A thread that ends** meanwhile is gone, or comes first.
//! - **A process that forks** meanwhile: the copy has one thread, unarmed, and goes on unarmed.
//!
//! This code waits for no lock of the program's and allocates nothing: a thread that has come may hold a
//! lock.
use crate::actions::PROTECTED;
use crate::frame::{AlternateStack, SignalAction, SignalContext, SignalInfo};
use crate::image;
use crate::keeper::Keeper;
use crate::patch;
use crate::record::{GateThread, KEEPER};
use crate::signals::{HANDLER, calling, give_back, set_real, take_over};
use crate::threads::robust_list;
use crate::trap::{on_patched, on_signal};
use crate::user_dispatch;
use crate::{WhyNot, set_alternate};
use core::mem::forget;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering::SeqCst};
use memfold_os::Errno;
use memfold_os::memory::zone::Zone;
use memfold_os::raw::{set_signals_blocked, system_call};
use memfold_os::sync::StaticMutex;
use memfold_os::thread::{now_ns, process_id, sleep_ns, stat_field, thread_id};
use memfold_os::units::PAGE_SIZE;

/// The signal: SIGSETXID of glibc, SIGCANCEL of musl. Both handlers check the sender.
const CALL: i32 = 33;
const SI_QUEUE: i32 = -1;
/// The most threads that can be called.
const CALLED_MAX: usize = 1 << 15;
/// The time to wait for the last thread. One that hasn't come by then is held by the kernel, or
/// blocks the signal. For the same time all are called again because one stands on its alternate
/// stack.
const WAIT_NS: u64 = 1_000_000_000;
/// The pause until threads are called again. It doubles each time, up to the second value.
const PAUSE_NS: u64 = 100_000;
const PAUSE_NS_MAX: u64 = 10_000_000;
/// The pause between two looks whether all have come.
const LOOK_NS: u64 = 50_000;
/// After this time a thread that hasn't come is checked for being a zombie, and called again.
const ASK_NS: u64 = 20_000_000;

/// States of a thread that is called. The word also has the number of the round.
const CALLED: u32 = 0;
const CAME: u32 = 1;
const ARMED: u32 = 2;
/// The thread stands on its alternate stack.
const STANDS: u32 = 3;
const NO_MEMORY: u32 = 4;
const NO_DISPATCH: u32 = 5;
/// The thread has left the handler.
const WENT: u32 = 6;
/// The thread will never come.
const ZOMBIE: u32 = 7;

/// Verdicts. The word also has the number of the round.
const WAIT: u32 = 0;
const GO: u32 = 1;
const BACK: u32 = 2;

/// The place of the round's number in these words.
const ROUND_SHIFT: u32 = 4;
const ROUNDS: u32 = 1 << 20;

#[repr(C)]
struct CalledThread {
    thread: AtomicU32,
    /// State and round in one word: a thread that comes late for a round can't change the next
    /// one's state.
    state: AtomicU32,
}

impl CalledThread {
    fn turn(&self, round: u32, from: u32, to: u32) -> bool {
        let (from, to) = (in_round(round, from), in_round(round, to));
        self.state.compare_exchange(from, to, SeqCst, SeqCst).is_ok()
    }

    fn state(&self) -> u32 {
        self.state.load(SeqCst) & ((1 << ROUND_SHIFT) - 1)
    }
}

fn in_round(round: u32, what: u32) -> u32 {
    round << ROUND_SHIFT | what
}

static LIST: AtomicUsize = AtomicUsize::new(0);
static ROUND: AtomicU32 = AtomicU32::new(0);
static VERDICT: AtomicU32 = AtomicU32::new(WAIT);
/// The signal's action before. Handlers read it while it can't change.
static PREVIOUS: StaticMutex<SignalAction> = StaticMutex::new(SignalAction::DEFAULT);
static PREVIOUS_HANDLER: AtomicUsize = AtomicUsize::new(0);
static ALONE: StaticMutex<()> = StaticMutex::new(());

fn called(at: usize) -> &'static CalledThread {
    // SAFETY: the zone has room for all, stays, and zeros are a value.
    unsafe { &*(LIST.load(SeqCst) as *const CalledThread).add(at) }
}

/// Arms a process that has threads, as [`crate::start`] does with one thread.
///
/// # Errors
/// The process can't be armed. No call passes the gate then.
///
/// # Safety
/// - Called until it succeeds, and not again, in a process without threads of the engine's. Threads
///   that shall not pass the gate are started by [`crate::apart`] afterwards.
/// - The keeper makes system calls only by instructions in the same executable segment.
/// - The keeper has no memory yet.
pub unsafe fn start_late(keeper: &'static dyn Keeper) -> Result<(), WhyNot> {
    let Some(_alone) = ALONE.try_lock() else { return Err(WhyNot::Busy) };
    if !user_dispatch::find_range() || image::is_program() {
        return Err(WhyNot::NoRange);
    }
    if has_small_stacks() {
        return Err(WhyNot::SmallStacks);
    }
    if LIST.load(SeqCst) == 0 {
        let zone = Zone::reserve(CALLED_MAX * size_of::<CalledThread>(), PAGE_SIZE);
        let Ok(zone) = zone else { return Err(WhyNot::NoMemory) };
        LIST.store(zone.start(), SeqCst);
        forget(zone);
    }
    let record = GateThread::take().ok_or(WhyNot::NoMemory)?;
    record.robust.store(robust_list(), SeqCst);
    let before = set_signals_blocked(u64::MAX);
    // SAFETY: the caller's promise.
    let done = unsafe { arm_all(keeper, record, before) };
    if done.is_err() {
        record.give_back();
    }
    set_signals_blocked(if done.is_ok() { before & !PROTECTED } else { before });
    done
}

/// Whether Go's runtime handles the signals: its stacks have a few KiB.
fn has_small_stacks() -> bool {
    let of = |signal| set_real(signal, None).unwrap_or(SignalAction::DEFAULT);
    let (urgent, fault) = (of(libc::SIGURG), of(libc::SIGSEGV));
    urgent.is_handler()
        && urgent.handler == fault.handler
        && urgent.flags & libc::SA_ONSTACK as u64 != 0
}

unsafe fn arm_all(
    keeper: &'static dyn Keeper,
    record: &'static GateThread,
    before: u64,
) -> Result<(), WhyNot> {
    record.claim();
    record.blocked.set(before & PROTECTED);
    let theirs = set_alternate(&record.stack()).map_err(WhyNot::NoHandlers)?;
    record.alternate.set(theirs);
    let (begun, mut pause_ns) = (now_ns(), PAUSE_NS);
    let done = loop {
        // SAFETY: the caller's promise; if all have come, they stand.
        let done = call_all().and_then(|()| unsafe { arm_caller(keeper, record) });
        let again = done == Err(WhyNot::Unreachable) && anybody(STANDS);
        let_go(if done.is_ok() { GO } else { BACK });
        if !again || now_ns() - begun > WAIT_NS {
            break done;
        }
        sleep_ns(pause_ns);
        pause_ns = (pause_ns * 2).min(PAUSE_NS_MAX);
    };
    if done.is_ok() {
        patch::allow(on_patched);
    } else {
        let _ = set_alternate(&theirs);
    }
    done
}

/// Arms the calling thread, and has the gate's handler take all signals of the process.
///
/// # Safety
/// - All other threads stand.
unsafe fn arm_caller(keeper: &'static dyn Keeper, record: &GateThread) -> Result<(), WhyNot> {
    user_dispatch::arm().map_err(WhyNot::NoDispatch)?;
    // SAFETY: the caller's promise.
    unsafe { KEEPER.set(keeper) };
    HANDLER.store(on_signal as *const () as usize, SeqCst);
    if let Err(e) = take_over(record) {
        give_back(record);
        user_dispatch::disarm();
        return Err(WhyNot::NoHandlers(e));
    }
    let previous = *PREVIOUS.lock();
    if !previous.is_handler() {
        // The gate's own handler is still set, and was taken for the program's.
        record.actions().with(|actions| actions[CALL as usize] = previous);
        let _ = set_real(CALL, Some(&calling(on_call as *const () as usize)));
    }
    Ok(())
}

fn anybody(state: u32) -> bool {
    (0..CALLED_MAX)
        .map(called)
        .take_while(|each| each.thread.load(SeqCst) != 0)
        .any(|each| each.state() == state)
}

/// Calls all other threads, until they have come.
fn call_all() -> Result<(), WhyNot> {
    let previous = set_real(CALL, None).map_err(WhyNot::NoHandlers)?;
    if previous.handler != on_call as *const () as usize {
        *PREVIOUS.lock() = previous;
        PREVIOUS_HANDLER.store(previous.handler, SeqCst);
    }
    let round = (ROUND.load(SeqCst) + 1) % ROUNDS;
    ROUND.store(round, SeqCst);
    VERDICT.store(in_round(round, WAIT), SeqCst);
    called(0).thread.store(0, SeqCst);
    set_real(CALL, Some(&calling(on_call as *const () as usize))).map_err(WhyNot::NoHandlers)?;
    let came = wait_for_all();
    // Every thread is in the handler, or the round is given up. libc's handler ignores a signal that comes late. The
    // default action would end the process.
    let previous = *PREVIOUS.lock();
    if previous.is_handler() {
        set_real(CALL, Some(&previous)).map_err(WhyNot::NoHandlers)?;
    }
    came
}

/// Looks at all threads until two looks in a row find none that hasn't come. One look may miss a
/// thread while another ends.
fn wait_for_all() -> Result<(), WhyNot> {
    let begun = now_ns();
    let (mut asked, mut count, mut complete) = (begun, 0, 0);
    while complete < 2 {
        let now = now_ns();
        let asks = now - asked > ASK_NS;
        if asks {
            asked = now;
        }
        match look(&mut count, asks)? {
            0 => complete += 1,
            _ if now - begun > WAIT_NS => return Err(WhyNot::Unreachable),
            _ => {
                complete = 0;
                sleep_ns(LOOK_NS);
            }
        }
    }
    Ok(())
}

/// Calls new threads, and returns how many haven't come. `count` threads were called before. With
/// `asks`, checks why those don't come.
fn look(count: &mut usize, asks: bool) -> Result<usize, WhyNot> {
    let (mut missing, mut refused, round) = (0, None, ROUND.load(SeqCst));
    each_thread(|thread| {
        if thread == thread_id() {
            return;
        }
        let known = (0..*count).find(|at| called(*at).thread.load(SeqCst) == thread);
        let at = known.unwrap_or(*count);
        let entry = called(at);
        if known.is_none() {
            if at == CALLED_MAX - 1 {
                refused = Some(WhyNot::NoMemory);
                return;
            }
            entry.state.store(in_round(round, CALLED), SeqCst);
            called(at + 1).thread.store(0, SeqCst);
            entry.thread.store(thread, SeqCst);
            *count += 1;
        }
        match entry.state() {
            CALLED if asks && is_zombie(thread) => {
                entry.turn(round, CALLED, ZOMBIE);
            }
            // A known number may be a new thread's, after another has ended.
            CALLED if asks || known.is_none() => call(thread, at),
            STANDS => refused = Some(WhyNot::Unreachable),
            NO_MEMORY => refused = Some(WhyNot::NoMemory),
            NO_DISPATCH => refused = Some(WhyNot::NoDispatch(Errno::PERM)),
            _ => {}
        }
        missing += usize::from(matches!(entry.state(), CALLED | CAME));
    })?;
    refused.map_or(Ok(missing), Err)
}

/// Publishes the verdict, and waits until every thread in the handler has left it.
fn let_go(verdict: u32) {
    VERDICT.store(in_round(ROUND.load(SeqCst), verdict), SeqCst);
    futex(&VERDICT, libc::FUTEX_WAKE, i32::MAX as usize);
    // A thread that hasn't come finds the verdict when it does, and goes on at once.
    while anybody(ARMED) || anybody(CAME) {
        sleep_ns(LOOK_NS);
    }
}

fn futex(word: &AtomicU32, operation: i32, value: usize) {
    let operation = (operation | libc::FUTEX_PRIVATE_FLAG) as usize;
    // SAFETY: the word is static.
    let _ = unsafe {
        system_call(libc::SYS_futex, [word.as_ptr() as usize, operation, value, 0, 0, 0])
    };
}

/// Sends the signal.
fn call(thread: u32, at: usize) {
    let number = u64::from(ROUND.load(SeqCst)) << 32 | at as u64;
    let info = SignalInfo::queued(CALL, SI_QUEUE, process_id(), number);
    let args =
        [process_id() as usize, thread as usize, CALL as usize, &raw const info as usize, 0, 0];
    // SAFETY: the information is alive. A thread that has ended is an error.
    let _ = unsafe { system_call(libc::SYS_rt_tgsigqueueinfo, args) };
}

/// Handles the signal in a thread that is called.
unsafe extern "C" fn on_call(signal: i32, info: *const SignalInfo, context: *mut SignalContext) {
    // SAFETY: the kernel's, on this stack.
    let (its, context) = unsafe { (&*info, &mut *context) };
    if its.code != SI_QUEUE || its.sender() != process_id() {
        let previous = PREVIOUS_HANDLER.load(SeqCst);
        if previous > libc::SIG_IGN {
            type SignalHandler = unsafe extern "C" fn(i32, *const SignalInfo, *mut SignalContext);
            // SAFETY: libc has installed it for this signal, and its handler takes these arguments.
            unsafe {
                core::mem::transmute::<usize, SignalHandler>(previous)(signal, info, context);
            }
        }
        return;
    }
    let (round, at) = ((its.call >> 32) as u32, its.call as u32 as usize);
    let waits = in_round(round, WAIT);
    if at >= CALLED_MAX || VERDICT.load(SeqCst) != waits || !called(at).turn(round, CALLED, CAME) {
        return;
    }
    match prepare() {
        Ok((record, theirs)) => {
            called(at).turn(round, CAME, ARMED);
            while VERDICT.load(SeqCst) == waits {
                futex(&VERDICT, libc::FUTEX_WAIT, waits as usize);
            }
            if VERDICT.load(SeqCst) == in_round(round, GO) {
                record.blocked.set(context.mask & PROTECTED);
                record.alternate.set(theirs);
                context.mask &= !PROTECTED;
                // The return from this handler sets what the frame says.
                context.stack = record.stack();
            } else {
                user_dispatch::disarm();
                let _ = set_alternate(&theirs);
                record.give_back();
            }
            called(at).turn(round, ARMED, WENT);
        }
        Err(why) => {
            called(at).turn(round, CAME, why);
        }
    }
}

/// Switches the calling thread's dispatch on, with a slot for its handlers.
fn prepare() -> Result<(&'static GateThread, AlternateStack), u32> {
    let record = GateThread::take().ok_or(NO_MEMORY)?;
    record.claim();
    record.robust.store(robust_list(), SeqCst);
    let theirs = set_alternate(&record.stack()).map_err(|_| {
        record.give_back();
        STANDS
    })?;
    if user_dispatch::arm().is_err() {
        let _ = set_alternate(&theirs);
        record.give_back();
        return Err(NO_DISPATCH);
    }
    Ok((record, theirs))
}

/// Calls `each` with the number of each thread of the process.
fn each_thread(mut each: impl FnMut(u32)) -> Result<(), WhyNot> {
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
    let at = libc::AT_FDCWD as usize;
    let path = c"/proc/self/task".as_ptr() as usize;
    // SAFETY: the path is a constant.
    let opened = unsafe { system_call(libc::SYS_openat, [at, path, flags as usize, 0, 0, 0]) };
    let Ok(directory) = opened else { return Err(WhyNot::Unreachable) };
    let mut buffer = [0u64; 256];
    let bytes = size_of_val(&buffer);
    loop {
        let args = [directory as usize, buffer.as_mut_ptr() as usize, bytes, 0, 0, 0];
        // SAFETY: the buffer has so many bytes.
        let Ok(read @ 1..) = (unsafe { system_call(libc::SYS_getdents64, args) }) else { break };
        // SAFETY: as above.
        let entries =
            unsafe { core::slice::from_raw_parts(buffer.as_ptr().cast::<u8>(), read as usize) };
        let mut at = 0;
        // An inode, an offset, the entry's length, its kind, its name.
        while at + 19 < entries.len() {
            let len = usize::from(u16::from_ne_bytes([entries[at + 16], entries[at + 17]]));
            let name = entries[at + 19..at + len].split(|byte| *byte == 0).next();
            let name = name.and_then(|name| core::str::from_utf8(name).ok());
            if let Some(thread) = name.and_then(|name| name.parse().ok()) {
                each(thread);
            }
            at += len;
        }
    }
    // SAFETY: it was opened above.
    let _ = unsafe { system_call(libc::SYS_close, [directory as usize, 0, 0, 0, 0, 0]) };
    Ok(())
}

/// Whether a thread has ended, and only its number is left.
fn is_zombie(thread: u32) -> bool {
    let mut stat = [0u8; 512];
    let read = memfold_os::thread::read_stat(thread, &mut stat);
    read.is_some_and(|len| matches!(stat_field(&stat[..len], 3), Some("Z" | "X")))
}
