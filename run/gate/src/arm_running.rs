//! Interrupts and arms the other threads of a process.
//!
//! The gate sends each thread a signal. In its handler the thread arms itself and waits. When the
//! last thread has arrived, the caller arms itself (`start.rs`), and all threads continue. If one
//! thread can't be interrupted, none is armed, and all continue unarmed.
//!
//! - **The signal** is one that libc reserves and blocks only for a few instructions. When another
//!   sender uses it (`setuid` of libc), the gate's handler calls the previous handler. The gate
//!   sends the signal with the number of the round, so a late or doubled one has no effect.
//! - **The threads** are those of `/proc/self/task`. The gate reads the list until each thread in it
//!   has arrived, and it has as many threads as the kernel counts. Running threads may create new
//!   ones between two reads. A new thread is in the list before its `clone` returns. A thread that
//!   has ended isn't in it, except the first one, which stays as a zombie.
//! - **The stack** of the handler is the thread's alternate stack, if it has one: Go's stacks are too
//!   small for a signal frame. A thread can't change the alternate stack that it runs on. So the
//!   handler continues on the stack of a slot, with a copy of its frame, and leaves by the copy. The
//!   slot is taken before the signal is sent, so little of the thread's own stack is needed.
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
use crate::entry::{leave, on_stack};
use crate::frame::{SignalAction, SignalContext, SignalInfo, copy_context};
use crate::record::GateThread;
use crate::signals::{calling, deliver_pending, set_real};
use crate::threads::robust_list;
use crate::user_dispatch;
use crate::{WhyNot, set_alternate};
use core::mem::forget;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering::SeqCst};
use memfold_os::Errno;
use memfold_os::memory::zone::Zone;
use memfold_os::raw::system_call;
use memfold_os::sync::StaticMutex;
use memfold_os::thread::{
    each_thread, now_ns, process_id, sleep_ns, stat_field, thread_count, thread_id,
};
use memfold_os::units::PAGE_SIZE;

/// The signal that interrupts threads: SIGSETXID of glibc, SIGCANCEL of musl. Both handlers check
/// the sender.
const CALL: i32 = 33;
const SI_QUEUE: i32 = -1;
/// The most threads that can be interrupted.
const CALLED_MAX: usize = 1 << 15;
/// The time to wait for the last thread. A thread that hasn't arrived by then is stuck in the
/// kernel, or blocks the signal.
const WAIT_NS: u64 = 1_000_000_000;
/// The pause between two checks whether all threads have arrived.
const LOOK_NS: u64 = 50_000;
/// After this time the gate checks whether a missing thread is a zombie, and sends it the signal
/// again.
const ASK_NS: u64 = 20_000_000;

/// States of a thread that is interrupted. The word also has the number of the round.
const CALLED: u32 = 0;
const CAME: u32 = 1;
const ARMED: u32 = 2;
const NO_DISPATCH: u32 = 3;
/// The thread has left the handler, or never arrived there.
const WENT: u32 = 4;
/// The thread is a zombie and will never arrive.
const ZOMBIE: u32 = 5;

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
    /// The address of the slot's record. It belongs to the thread once that has arrived.
    record: AtomicUsize,
}

impl CalledThread {
    fn turn(&self, round: u32, from: u32, to: u32) -> bool {
        let (from, to) = (in_round(round, from), in_round(round, to));
        self.state.compare_exchange(from, to, SeqCst, SeqCst).is_ok()
    }

    fn state(&self) -> u32 {
        self.state.load(SeqCst) & ((1 << ROUND_SHIFT) - 1)
    }

    fn record(&self) -> &'static GateThread {
        // SAFETY: `look` stores the address of a record before it sends the signal. Records stay
        // mapped.
        unsafe { &*(self.record.load(SeqCst) as *const GateThread) }
    }

    /// Gives the slot back if the thread hasn't arrived. It can't arrive any more then.
    fn give_up(&self, round: u32, state: u32) {
        if self.turn(round, CALLED, state) {
            self.record().give_back();
        }
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

fn called(at: usize) -> &'static CalledThread {
    // SAFETY: `stop` reserved the zone before the first call, and it is never unmapped. `at`
    // is below CALLED_MAX, for which the zone has room. All fields are atomics, so zeros are valid
    // and shared references are allowed.
    unsafe { &*(LIST.load(SeqCst) as *const CalledThread).add(at) }
}

/// Ends what a thread of the parent had begun at a fork.
///
/// # Safety
/// - The caller is the only thread of the process that arms it.
pub unsafe fn begin() {
    // SAFETY: only the thread that arms uses the lock, and that is the caller.
    unsafe { PREVIOUS.reset() };
}

/// Makes all other threads wait in the gate's handler until [`let_go`], which isn't called after an
/// error.
///
/// # Errors
/// A thread can't be interrupted or armed. All threads continue as they were.
pub fn stop() -> Result<(), WhyNot> {
    if LIST.load(SeqCst) == 0 {
        let zone = Zone::reserve(CALLED_MAX * size_of::<CalledThread>(), PAGE_SIZE);
        let Ok(zone) = zone else { return Err(WhyNot::NoMemory) };
        LIST.store(zone.start(), SeqCst);
        forget(zone);
    }
    let came = call_all();
    if came.is_err() {
        let_go(false);
    }
    came
}

/// Keeps the gate's handler of [`CALL`] if the program has none. A signal that arrives late would
/// end the process by the default action. Called after the gate has taken over the program's
/// actions, or has given them back.
pub fn keep_handler(record: &GateThread) {
    let previous = *PREVIOUS.lock();
    if !previous.is_handler() {
        // The kernel still had the gate's handler for this signal, so `take_over` took that for the
        // program's.
        record.actions().with(|actions| actions[CALL as usize] = previous);
        let _ = set_real(CALL, Some(&calling(on_call as *const () as usize)));
    }
}

/// Returns the entries of all threads that were interrupted.
fn all_called() -> impl Iterator<Item = &'static CalledThread> {
    (0..CALLED_MAX).map(called).take_while(|each| each.thread.load(SeqCst) != 0)
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

/// Reads the list of threads until all of them have arrived. One read may miss a thread while
/// another ends. So the list must also have as many threads as the process.
fn wait_for_all() -> Result<(), WhyNot> {
    let start_ns = now_ns();
    let (mut last_signal_ns, mut count) = (start_ns, 0);
    loop {
        let now = now_ns();
        let asks = now - last_signal_ns > ASK_NS;
        if asks {
            last_signal_ns = now;
        }
        let (listed_threads, missing_threads) = look(&mut count, asks)?;
        // Threads that have arrived don't end, so each thread of the process is one of them.
        if missing_threads == 0 && thread_count() == Some(listed_threads) {
            return Ok(());
        }
        if now - start_ns > WAIT_NS {
            return Err(WhyNot::Unreachable);
        }
        sleep_ns(LOOK_NS);
    }
}

/// Sends the signal to new threads. Returns how many threads the process has, and how many of them
/// haven't arrived. `count` is the number of threads that have been sent the signal, and is
/// increased. With `asks`, missing threads are checked for being zombies and are sent the signal
/// again.
fn look(count: &mut usize, asks: bool) -> Result<(usize, usize), WhyNot> {
    let (mut listed_threads, mut missing_threads, mut refusal) = (0, 0, None);
    let (round, own, mut has_own) = (ROUND.load(SeqCst), thread_id(), false);
    each_thread(|thread| {
        listed_threads += 1;
        if thread == own {
            has_own = true;
            return;
        }
        let known = (0..*count).find(|at| called(*at).thread.load(SeqCst) == thread);
        let at = known.unwrap_or(*count);
        let entry = called(at);
        if known.is_none() {
            if at == CALLED_MAX - 1 {
                refusal = Some(WhyNot::NoMemory);
                return;
            }
            let Some(record) = GateThread::take() else {
                refusal = Some(WhyNot::NoMemory);
                return;
            };
            entry.record.store(&raw const *record as usize, SeqCst);
            entry.state.store(in_round(round, CALLED), SeqCst);
            called(at + 1).thread.store(0, SeqCst);
            entry.thread.store(thread, SeqCst);
            *count += 1;
        }
        match entry.state() {
            CALLED if asks && is_zombie(thread) => entry.give_up(round, ZOMBIE),
            // A known number may be that of a new thread, after the thread that had it has ended.
            CALLED if asks || known.is_none() => call(thread, at),
            NO_DISPATCH => refusal = Some(WhyNot::NoDispatch(Errno::PERM)),
            _ => {}
        }
        missing_threads += usize::from(matches!(entry.state(), CALLED | CAME));
    })
    .map_err(|_| WhyNot::Unreachable)?;
    if !has_own {
        // /proc shows the threads by their numbers in another namespace.
        return Err(WhyNot::Unreachable);
    }
    refusal.map_or(Ok((listed_threads, missing_threads)), Err)
}

/// Lets all threads in the handler continue, armed or as they were. Waits until each of them has
/// left the handler.
pub fn let_go(armed: bool) {
    let round = ROUND.load(SeqCst);
    // A thread that has ended leaves a slot behind.
    all_called().for_each(|each| each.give_up(round, WENT));
    VERDICT.store(in_round(round, if armed { GO } else { BACK }), SeqCst);
    futex(&VERDICT, libc::FUTEX_WAKE, i32::MAX as usize);
    while all_called().any(|each| matches!(each.state(), CAME | ARMED)) {
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
    let record = called(at).record();
    // SAFETY: the kernel wrote the context for this handler. The slot belongs to this thread, and its
    // stack is empty.
    let copy = unsafe { copy_context(context, &record.stack()) };
    let arrival = ArrivedThread { record, round, at, copy: &raw mut *copy };
    let top = (arrival.copy as usize - BELOW_COPY) & !15;
    // SAFETY: no other code uses the slot's stack, and the copy lies above `top`. `arrival` stays
    // until `wait` has returned, or for good if it doesn't.
    unsafe { on_stack(top, wait, &raw const arrival as usize) };
    // The thread runs on its own stack again, so it can give up the slot's.
    let _ = set_alternate(&context.stack);
    record.give_back();
    let from = called(at).state();
    called(at).turn(round, from, if from == ARMED { WENT } else { NO_DISPATCH });
}

/// The bytes between the copy of a frame and the stack of [`wait`].
const BELOW_COPY: usize = 256;

/// A thread that has arrived in the handler.
struct ArrivedThread {
    record: &'static GateThread,
    round: u32,
    /// Its place in the list.
    at: usize,
    /// The copy of the handler's context on the slot's stack.
    copy: *mut SignalContext,
}

/// Arms the calling thread, which runs on the slot's stack, and waits for the verdict. Returns if the
/// thread must continue as it was, and disarms it then. Otherwise leaves the handler by the copy of
/// its context.
///
/// # Safety
/// - `arrived` is the address of an [`ArrivedThread`] of the calling thread.
unsafe extern "C" fn wait(arrived: usize) {
    // SAFETY: the caller promises the address. The handler doesn't use it meanwhile.
    let ArrivedThread { record, round, at, copy } = unsafe { &*(arrived as *const ArrivedThread) };
    record.claim();
    record.robust.store(robust_list(), SeqCst);
    if set_alternate(&record.stack()).is_err() || user_dispatch::arm().is_err() {
        return;
    }
    called(*at).turn(*round, CAME, ARMED);
    let waits = in_round(*round, WAIT);
    while VERDICT.load(SeqCst) == waits {
        futex(&VERDICT, libc::FUTEX_WAIT, waits as usize);
    }
    if VERDICT.load(SeqCst) != in_round(*round, GO) {
        return user_dispatch::disarm();
    }
    // SAFETY: the handler made the copy for this thread, and doesn't use it.
    let context = unsafe { &mut **copy };
    record.blocked.set(context.mask & PROTECTED);
    record.alternate.set(context.stack);
    context.mask &= !PROTECTED;
    // The return from the handler sets the alternate stack that the frame names.
    context.stack = record.stack();
    called(*at).turn(*round, ARMED, WENT);
    // SAFETY: the copy is a context on this stack, and no frame below it is needed any more. The
    // first word of the record tells what is pending.
    unsafe { leave(*copy as usize, &raw const **record as usize, deliver_pending) }
}

/// Returns whether a thread has ended and only its number is left.
fn is_zombie(thread: u32) -> bool {
    let mut stat = [0u8; 512];
    let outcome = memfold_os::thread::read_stat(thread, &mut stat);
    outcome.is_some_and(|len| matches!(stat_field(&stat[..len], 3), Some("Z" | "X")))
}
