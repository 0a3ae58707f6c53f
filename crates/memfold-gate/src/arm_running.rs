//! Arms a process that has threads.
//!
//! The gate sends each thread a signal. In its handler the thread arms itself and waits until the
//! last thread has arrived. Then the gate takes over the program's signal actions, and all threads
//! continue. If one thread can't be interrupted, none is armed, and all continue unarmed. So no
//! armed thread ever runs beside an unarmed one.
//!
//! - **The signal** is one that libc reserves and blocks only for a few instructions. When another
//!   sender uses it (`setuid` of libc), the gate's handler calls the previous handler. The gate
//!   sends the signal with the number of the round, so a late or doubled one has no effect.
//! - **The threads** are those of `/proc/self/task`. The gate reads the list until it finds no
//!   thread that hasn't arrived. Running threads may create new ones between two reads. A new
//!   thread is in the list before its `clone` returns. A thread that has ended isn't in it, except
//!   the first one, which stays as a zombie.
//! - **The stack** of the handler is the thread's own, because a thread can't change the alternate
//!   stack that it runs on. If a thread runs on its alternate stack, all threads continue and are
//!   interrupted again. Go's stacks are too small for a signal frame. If Go's runtime handles the
//!   signals, no thread is interrupted.
//! - **Waiting calls** behave as after a handler with SA_RESTART. The kernel restarts `read`,
//!   `futex`, `accept` and `wait4`, and they pass the gate then. `nanosleep`, `poll`, `epoll_wait`,
//!   `select` and `pause` return EINTR once.
//! - **A thread in a handler of the program** returns from it by libc's instruction, which traps.
//!   The kernel wrote that frame. The gate takes mask and alternate stack from it as from a frame
//!   of its own.
//! - **A parent in `vfork`** arrives when its child has executed a program. The child is another
//!   process and stays as it is.
//! - **A thread that ends** meanwhile disappears from the list, or arrives first.
//! - **A process that forks** meanwhile: the child has one thread, which is unarmed and stays so.
//!
//! This code waits for no lock of the program and allocates nothing, because a thread that waits in
//! the handler may hold a lock.
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
use memfold_os::thread::{each_thread, now_ns, process_id, sleep_ns, stat_field, thread_id};
use memfold_os::units::PAGE_SIZE;

/// The signal that interrupts threads: SIGSETXID of glibc, SIGCANCEL of musl. Both handlers check
/// the sender.
const CALL: i32 = 33;
const SI_QUEUE: i32 = -1;
/// The most threads that can be interrupted.
const CALLED_MAX: usize = 1 << 15;
/// The time to wait for the last thread. A thread that hasn't arrived by then is stuck in the
/// kernel, or blocks the signal. It is also the time for which all threads are interrupted again
/// because one runs on its alternate stack.
const WAIT_NS: u64 = 1_000_000_000;
/// The pause before threads are interrupted again. It doubles each time, up to `PAUSE_NS_MAX`.
const PAUSE_NS: u64 = 100_000;
const PAUSE_NS_MAX: u64 = 10_000_000;
/// The pause between two checks whether all threads have arrived.
const LOOK_NS: u64 = 50_000;
/// After this time the gate checks whether a missing thread is a zombie, and sends it the signal
/// again.
const ASK_NS: u64 = 20_000_000;

/// States of a thread that is interrupted. The word also has the number of the round.
const CALLED: u32 = 0;
const CAME: u32 = 1;
const ARMED: u32 = 2;
/// The thread runs on its alternate stack.
const STANDS: u32 = 3;
const NO_MEMORY: u32 = 4;
const NO_DISPATCH: u32 = 5;
/// The thread has left the handler.
const WENT: u32 = 6;
/// The thread is a zombie and will never arrive.
const ZOMBIE: u32 = 7;

/// The verdict on the round. The word also has the number of the round.
const WAIT: u32 = 0;
const GO: u32 = 1;
const BACK: u32 = 2;

/// The shift of the round's number in these words.
const ROUND_SHIFT: u32 = 4;
const ROUNDS: u32 = 1 << 20;

#[repr(C)]
struct CalledThread {
    thread: AtomicU32,
    /// The state and the round in one word, so that a thread that arrives late for one round can't
    /// change its state in the next.
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
/// The action of the signal before the gate's. It changes only while no handler reads it.
static PREVIOUS: StaticMutex<SignalAction> = StaticMutex::new(SignalAction::DEFAULT);
static PREVIOUS_HANDLER: AtomicUsize = AtomicUsize::new(0);
static ALONE: StaticMutex<()> = StaticMutex::new(());

fn called(at: usize) -> &'static CalledThread {
    // SAFETY: `start_late` reserved the zone before the first call, and it is never unmapped. `at`
    // is below CALLED_MAX, for which the zone has room. All fields are atomics, so zeros are valid
    // and shared references are allowed.
    unsafe { &*(LIST.load(SeqCst) as *const CalledThread).add(at) }
}

/// Arms a process that has threads, as [`crate::start`] does with one thread.
///
/// # Errors
/// The process can't be armed. No call passes the gate then.
///
/// # Safety
/// - It isn't called again after it has succeeded.
/// - The process has no thread of the engine yet. Threads that must not pass the gate are started
///   by [`crate::apart`] afterwards.
/// - The keeper makes system calls only by instructions in the same executable segment.
/// - The keeper manages no memory yet.
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
    // SAFETY: the caller keeps the conditions of `start_late`, and all signals are blocked above.
    let done = unsafe { arm_all(keeper, record, before) };
    if done.is_err() {
        record.give_back();
    }
    set_signals_blocked(if done.is_ok() { before & !PROTECTED } else { before });
    done
}

/// Returns whether Go's runtime handles the signals. The stacks of its goroutines have a few KiB.
fn has_small_stacks() -> bool {
    let of = |signal| set_real(signal, None).unwrap_or(SignalAction::DEFAULT);
    let (urgent, fault) = (of(libc::SIGURG), of(libc::SIGSEGV));
    urgent.is_handler()
        && urgent.handler == fault.handler
        && urgent.flags & libc::SA_ONSTACK as u64 != 0
}

/// Arms the calling thread and all others. `before` is the caller's signal mask. On an error all
/// threads continue unarmed, and the caller has its previous alternate stack.
///
/// # Safety
/// - The conditions of [`start_late`] hold.
/// - The calling thread has all signals blocked.
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
        // SAFETY: `call_all` has succeeded, so all other threads wait in the handler. The rest is
        // the caller's promise.
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

/// Arms the calling thread, and makes the gate's handler take all signals of the process.
///
/// # Safety
/// - All other threads wait in the gate's handler.
/// - The conditions of [`start_late`] hold.
unsafe fn arm_caller(keeper: &'static dyn Keeper, record: &GateThread) -> Result<(), WhyNot> {
    user_dispatch::arm().map_err(WhyNot::NoDispatch)?;
    // SAFETY: all other threads wait in the handler, which doesn't use the cell.
    unsafe { KEEPER.set(keeper) };
    HANDLER.store(on_signal as *const () as usize, SeqCst);
    if let Err(e) = take_over(record) {
        give_back(record);
        user_dispatch::disarm();
        return Err(WhyNot::NoHandlers(e));
    }
    let previous = *PREVIOUS.lock();
    if !previous.is_handler() {
        // The kernel still had the gate's handler for this signal, so `take_over` took that for the
        // program's.
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

/// Interrupts all other threads and waits until they have arrived.
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
    // Every thread is in the handler, or the round is given up. libc's handler ignores a signal
    // that comes late. The default action would end the process, so it isn't restored.
    let previous = *PREVIOUS.lock();
    if previous.is_handler() {
        set_real(CALL, Some(&previous)).map_err(WhyNot::NoHandlers)?;
    }
    came
}

/// Reads the list of threads until it finds no missing thread twice in a row. One read may miss a
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

/// Sends the signal to new threads, and returns how many haven't arrived. `count` is the number of
/// threads that have been sent the signal, and is increased. With `asks`, missing threads are
/// checked for being zombies and are sent the signal again.
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
            // A known number may be that of a new thread, after the thread that had it has ended.
            CALLED if asks || known.is_none() => call(thread, at),
            STANDS => refused = Some(WhyNot::Unreachable),
            NO_MEMORY => refused = Some(WhyNot::NoMemory),
            NO_DISPATCH => refused = Some(WhyNot::NoDispatch(Errno::PERM)),
            _ => {}
        }
        missing += usize::from(matches!(entry.state(), CALLED | CAME));
    })
    .map_err(|_| WhyNot::Unreachable)?;
    refused.map_or(Ok(missing), Err)
}

/// Publishes the verdict, and waits until every thread in the handler has left it.
fn let_go(verdict: u32) {
    VERDICT.store(in_round(ROUND.load(SeqCst), verdict), SeqCst);
    futex(&VERDICT, libc::FUTEX_WAKE, i32::MAX as usize);
    // A thread that arrives later finds the verdict and continues at once.
    while anybody(ARMED) || anybody(CAME) {
        sleep_ns(LOOK_NS);
    }
}

fn futex(word: &AtomicU32, operation: i32, value: usize) {
    let operation = (operation | libc::FUTEX_PRIVATE_FLAG) as usize;
    // SAFETY: the futex word is a static, so the kernel may read it at any time.
    let _ = unsafe {
        system_call(libc::SYS_futex, [word.as_ptr() as usize, operation, value, 0, 0, 0])
    };
}

/// Sends the signal to a thread, whose entry in the list is `at`.
fn call(thread: u32, at: usize) {
    let number = u64::from(ROUND.load(SeqCst)) << 32 | at as u64;
    let info = SignalInfo::queued(CALL, SI_QUEUE, process_id(), number);
    let args =
        [process_id() as usize, thread as usize, CALL as usize, &raw const info as usize, 0, 0];
    // SAFETY: `info` lives until the call returns, and the kernel only reads it. If the thread has
    // ended, the call fails.
    let _ = unsafe { system_call(libc::SYS_rt_tgsigqueueinfo, args) };
}

/// Handles the signal in a thread that is interrupted.
unsafe extern "C" fn on_call(signal: i32, info: *const SignalInfo, context: *mut SignalContext) {
    // SAFETY: the kernel passes pointers to structs that it wrote on this stack. They stay until
    // the handler returns, and no other code uses them.
    let (its, context) = unsafe { (&*info, &mut *context) };
    if its.code != SI_QUEUE || its.sender() != process_id() {
        let previous = PREVIOUS_HANDLER.load(SeqCst);
        if previous > libc::SIG_IGN {
            type SignalHandler = unsafe extern "C" fn(i32, *const SignalInfo, *mut SignalContext);
            // SAFETY: `previous` is neither SIG_DFL nor SIG_IGN, so it is the function that libc
            // installed for this signal. libc's handler takes these three arguments.
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
                // The return from this handler sets the alternate stack that the frame names.
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

/// Gives the calling thread a slot for its handlers and arms it. Returns the record and the
/// thread's previous alternate stack.
///
/// # Errors
/// NO_MEMORY, STANDS or NO_DISPATCH. The thread is as it was.
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

/// Returns whether a thread has ended and only its number is left.
fn is_zombie(thread: u32) -> bool {
    let mut stat = [0u8; 512];
    let read = memfold_os::thread::read_stat(thread, &mut stat);
    read.is_some_and(|len| matches!(stat_field(&stat[..len], 3), Some("Z" | "X")))
}
