//! One slot for each thread of the program. A slot holds the stack of the gate's handlers and the
//! thread's record.
//!
//! The record lies above the stack, so the record can be found from a stack pointer. A thread whose
//! stack pointer lies in its slot is in the gate. The slot's stack is empty while code of the
//! program runs, which includes the program's own handlers.
use crate::actions::SignalActions;
use crate::errand::VforkErrand;
use crate::frame::{AlternateStack, SignalInfo};
use crate::keeper::{Keeper, KeeperHold};
use crate::user_dispatch::ProgramDispatch;
use core::cell::{Cell, UnsafeCell};
use core::mem::forget;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::SeqCst};
use memfold_os::memory::zone::Zone;
use memfold_os::raw::system_call;
use memfold_os::sync::StaticMutex;
use memfold_os::thread::thread_id;
use memfold_os::units::PAGE_SIZE;

/// The length of a slot in bytes.
pub const SLOT_BYTES: usize = 256 << 10;
const RECORD_BYTES: usize = 2 * PAGE_SIZE;
/// The offset of the stack in a slot. A guard page lies below it.
const STACK_AT: usize = PAGE_SIZE;
const STACK_BYTES: usize = SLOT_BYTES - STACK_AT - RECORD_BYTES;
/// The number of chunks of slots. Each chunk has twice the slots of the one before.
const CHUNKS: usize = 14;
const FIRST_SLOTS: usize = 4;

static CHUNK: [AtomicUsize; CHUNKS] = [const { AtomicUsize::new(0) }; CHUNKS];
/// For each chunk, the number of its first slots that threads have tried to take. It is raised before
/// a slot is taken, and never lowered.
static USED: [AtomicUsize; CHUNKS] = [const { AtomicUsize::new(0) }; CHUNKS];
static GROWING: StaticMutex<()> = StaticMutex::new(());

const fn slots(chunk: usize) -> usize {
    FIRST_SLOTS << chunk
}

/// The number of signals that can be pending at the same time: one of any kind, and the three that
/// are never blocked in the kernel.
pub const DEFERRED: usize = 4;

/// The result that the gate's code gets from a call that a filter has refused by a signal.
pub const REFUSED: isize = -(libc::ENOSYS as isize);

/// A thread of the program. Only the thread itself uses the cells. Other threads may read the
/// atomics.
#[repr(C)]
pub struct GateThread {
    /// A bit for each entry of `deferred` that is in use. Assembly reads this word.
    pub pending: AtomicU32,
    /// 1 while the slot is in use, and 0 while it is free.
    state: AtomicU32,
    /// The thread's `fs`, by which patched sites find the record. 0 if they must not find it.
    /// Assembly reads this word.
    pub fs: Cell<usize>,
    /// True if another thread has the same `fs`. Patched sites can't distinguish the two then.
    pub shares_fs: Cell<bool>,
    /// The pending signals. They are delivered when the thread leaves the gate.
    pub deferred: [Cell<SignalInfo>; DEFERRED],
    /// The kernel's mask when the first pending signal arrived.
    pub mask_before: Cell<u64>,
    /// The signals of [`crate::actions::PROTECTED`] that the program has blocked. The kernel never
    /// has them blocked.
    pub blocked: SignalSet,
    /// The signals of `blocked` that the thread still takes while it waits in a call.
    pub awaits: SignalSet,
    /// The signals of `blocked` that were sent to the thread and are kept for it.
    pub sent: Cell<u64>,
    /// The information of each signal in `sent`.
    pub sent_info: [Cell<SignalInfo>; DEFERRED],
    /// The alternate stack that the program has set. The kernel has the slot's.
    pub alternate: Cell<AlternateStack>,
    /// The signal by which a filter of the program has refused the last call.
    pub refused: Cell<Option<SignalInfo>>,
    /// The number of the last call from a patched site.
    pub patched: Cell<usize>,
    /// Where the program is while the thread is in the gate, if that is known.
    pub place: Cell<Option<ProgramPlace>>,
    /// True if the thread's calls don't pass the gate and all memory is resident for it. It is a
    /// child of vfork that has asked the kernel to refuse calls that the gate needs, or it has
    /// asked to be traced.
    pub traced: Cell<bool>,
    /// The Syscall User Dispatch that the program has set for the thread. The kernel has the
    /// gate's.
    pub dispatch: Cell<Option<ProgramDispatch>>,
    /// True while eviction is stopped for the thread.
    pub keeps_all: Cell<bool>,
    /// The work that another task does for the thread.
    pub errand: VforkErrand,
    /// The hold of the thread's system call.
    pub hold: Cell<Option<KeeperHold>>,
    /// The head of the thread's robust list, which the kernel walks when the thread ends. 0 if it
    /// has none.
    pub robust: AtomicUsize,
    /// The thread's number in the kernel. 0 if the thread has just been made.
    pub thread: AtomicU32,
    /// The number of the slot. Living threads have different numbers, and the numbers are dense.
    pub number: Cell<usize>,
    /// The number of the thread's process: 0 for the first process, and a new number for each child
    /// that shares the memory.
    process: AtomicU32,
    /// True if the thread is about to end.
    ends: AtomicBool,
    /// The mask of a call that waits with a mask of its own.
    pub waiting_mask: Cell<Option<u64>>,
    /// The signal actions of the thread's process. Null means those of the first process.
    actions: Cell<*const SignalActions>,
    own_actions: SignalActions,
    /// The address of the frame by which a new thread leaves the gate.
    pub frame: Cell<usize>,
    /// The flags of its `clone` that a new thread acts on first.
    pub flags: Cell<usize>,
}

const _: () = assert!(size_of::<GateThread>() <= RECORD_BYTES);

/// The place in the program where a thread has entered the gate: what a walk of its stack begins
/// with.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct ProgramPlace {
    /// The instruction pointer.
    pub ip: usize,
    /// The stack pointer.
    pub sp: usize,
    /// The frame pointer, or what the program has in its register.
    pub bp: usize,
}

impl ProgramPlace {
    /// Takes the place of the calling thread, so that code of the gate that faults meanwhile has
    /// none. Returns `None` if the thread isn't in the gate, or if its place is taken.
    pub fn take() -> Option<TakenPlace> {
        let record = GateThread::of_caller()?;
        record.place.take().map(|place| TakenPlace { place, record })
    }
}

/// A place that was taken. It is put back when this is dropped.
pub struct TakenPlace {
    place: ProgramPlace,
    record: &'static GateThread,
}

impl TakenPlace {
    /// Returns the place.
    pub fn place(&self) -> ProgramPlace {
        self.place
    }

    /// Returns the thread's number in the kernel.
    pub fn thread(&self) -> u32 {
        self.record.thread.load(SeqCst)
    }
}

impl Drop for TakenPlace {
    fn drop(&mut self) {
        self.record.place.set(Some(self.place));
    }
}

/// A set of signals of a thread. Other threads may read it at any time.
pub struct SignalSet(AtomicU64);

impl SignalSet {
    /// Returns the set.
    pub fn get(&self) -> u64 {
        self.0.load(SeqCst)
    }

    /// Replaces the set.
    pub fn set(&self, set: u64) {
        self.0.store(set, SeqCst);
    }
}

/// The signal actions of the first process.
pub static ACTIONS: SignalActions = SignalActions::new();

impl GateThread {
    /// Returns the record of the thread whose stack pointer is `sp`, or `None` if the thread isn't
    /// in the gate.
    pub fn of_stack(sp: usize) -> Option<&'static GateThread> {
        let slot = CHUNK.iter().enumerate().find_map(|(at, start)| {
            let start = start.load(SeqCst);
            let is_inside = start != 0 && sp.wrapping_sub(start) < slots(at) * SLOT_BYTES;
            is_inside.then(|| start + (sp - start) / SLOT_BYTES * SLOT_BYTES)
        })?;
        Some(GateThread::at(slot))
    }

    /// Returns the record of the calling thread, or `None` if it isn't in the gate.
    pub fn of_caller() -> Option<&'static GateThread> {
        let byte = 0u8;
        GateThread::of_stack(&raw const byte as usize)
    }

    fn at(slot: usize) -> &'static GateThread {
        // SAFETY: `slot` is the start of a slot. Slots stay mapped and are aligned to SLOT_BYTES.
        // All fields of a record are valid as zeros. Other threads use only its atomics, and its
        // cells are used by its thread alone.
        unsafe { &*((slot + SLOT_BYTES - RECORD_BYTES) as *const GateThread) }
    }

    fn slot(&self) -> usize {
        &raw const *self as usize + RECORD_BYTES - SLOT_BYTES
    }

    /// Takes a free slot, or returns `None` if there is no memory or address space for one.
    pub fn take() -> Option<&'static GateThread> {
        for (chunk, start) in CHUNK.iter().enumerate() {
            let mut start = start.load(SeqCst);
            if start == 0 {
                start = grow(chunk)?;
            }
            for slot in 0..slots(chunk) {
                let record = GateThread::at(start + slot * SLOT_BYTES);
                USED[chunk].fetch_max(slot + 1, SeqCst);
                if record.state.compare_exchange(0, 1, SeqCst, SeqCst).is_ok() {
                    record.clear();
                    record.number.set(slots(chunk) - FIRST_SLOTS + slot);
                    return Some(record);
                }
            }
        }
        None
    }

    fn clear(&self) {
        let guard = self.slot();
        // SAFETY: the lowest page of a slot is its guard page, which nothing uses.
        let _ = unsafe {
            system_call(libc::SYS_mprotect, [guard, PAGE_SIZE, libc::PROT_NONE as usize, 0, 0, 0])
        };
        self.pending.store(0, SeqCst);
        self.fs.set(0);
        self.shares_fs.set(false);
        self.blocked.set(0);
        self.awaits.set(0);
        self.sent.set(0);
        self.alternate.set(AlternateStack::NONE);
        self.refused.set(None);
        self.place.set(None);
        self.traced.set(false);
        self.dispatch.set(None);
        self.keeps_all.set(false);
        self.hold.set(None);
        self.robust.store(0, SeqCst);
        self.errand.clear();
        self.thread.store(0, SeqCst);
        self.process.store(0, SeqCst);
        self.ends.store(false, SeqCst);
        self.waiting_mask.set(None);
        self.actions.set(core::ptr::null());
    }

    /// Gives the slot back. The thread must not use it any more.
    pub fn give_back(&self) {
        self.fs.set(0);
        self.state.store(0, SeqCst);
    }

    /// Makes the calling thread the owner of the record.
    pub fn claim(&self) {
        self.thread.store(thread_id(), SeqCst);
    }

    /// Puts the thread into the process of `other`. With `None` it becomes the first thread of a
    /// new process.
    pub fn join(&self, other: Option<&GateThread>) {
        static LAST: AtomicU32 = AtomicU32::new(0);
        let process = match other {
            Some(other) => other.process.load(SeqCst),
            None => LAST.fetch_add(1, SeqCst) + 1,
        };
        self.process.store(process, SeqCst);
    }

    /// Calls `each` with the records of all threads of this thread's process.
    pub fn each_of_process(&self, mut each: impl FnMut(&GateThread)) {
        let process = self.process.load(SeqCst);
        each_used(|record| {
            if record.process.load(SeqCst) == process {
                each(record);
            }
        });
    }

    /// Returns whether the thread belongs to the first process of this memory.
    pub fn is_of_first_process(&self) -> bool {
        self.process.load(SeqCst) == 0
    }

    /// Makes the thread's process the first of its own memory. It is a copy of another process.
    pub fn begin_as_copy(&self) {
        self.process.store(0, SeqCst);
    }

    /// Makes the thread's process the first one of its memory, and gives back the slots of the
    /// former first one, which has ended.
    pub fn succeed(&self) {
        let own = self.process.load(SeqCst);
        each_used(|record| match record.process.load(SeqCst) {
            0 => record.give_back(),
            process if process == own => record.process.store(0, SeqCst),
            _ => {}
        });
    }

    /// Notes that the thread is about to end. Returns whether it is the last of the first process,
    /// which means that each other thread is about to end too, or `is_gone`. If several threads end
    /// at once, this is true for at least one of them.
    pub fn ends_last(&self, is_gone: fn(&GateThread) -> bool) -> bool {
        self.ends.store(true, SeqCst);
        let mut is_last = self.process.load(SeqCst) == 0;
        self.each_of_process(|each| is_last = is_last && (each.ends.load(SeqCst) || is_gone(each)));
        is_last
    }

    /// Returns the address of the word in which [`GateThread::give_back`] stores 0.
    pub fn state(&self) -> *const u32 {
        self.state.as_ptr()
    }

    /// Gives back all other slots. This process is a copy that doesn't have their threads.
    pub fn give_back_others(&self) {
        each_used(|record| {
            if !core::ptr::eq(record, self) {
                record.give_back();
            }
        });
    }

    /// Takes the signal by which a filter of the program has refused the call `nr`, whose result is
    /// `made`. Returns `None` if no filter has refused it.
    pub fn take_refused(&self, nr: usize, made: isize) -> Option<SignalInfo> {
        if made != REFUSED {
            return None;
        }
        self.refused.take().filter(|info| info.refused() == Some(nr))
    }

    /// Returns whether a stack pointer lies in the slot.
    pub fn contains(&self, sp: usize) -> bool {
        sp.wrapping_sub(self.slot()) < SLOT_BYTES
    }

    /// Returns the stack in the form that `sigaltstack` takes.
    pub fn stack(&self) -> AlternateStack {
        AlternateStack { sp: self.slot() + STACK_AT, flags: 0, padding: 0, size: STACK_BYTES }
    }

    /// Returns the signal actions of the thread's process.
    pub fn actions(&self) -> &'static SignalActions {
        let its = self.actions.get();
        // SAFETY: a pointer that isn't null points to the `own_actions` of a record. It lies in a
        // slot, which stays mapped, and is shared only by its lock and atomics.
        if its.is_null() { &ACTIONS } else { unsafe { &*its } }
    }

    /// Gives the thread's process the actions of `parent`: the same ones if `shared` is true, and
    /// otherwise a copy.
    pub fn inherit_actions(&'static self, parent: &GateThread, shared: bool) {
        if shared {
            return self.actions.set(parent.actions.get());
        }
        // SAFETY: the slot belongs to this new task alone, so no living task has the lock. A task
        // that had the slot before may have been killed with the lock held, and doesn't use it any
        // more.
        unsafe { self.own_actions.reset() };
        self.own_actions.copy_from(parent.actions());
        self.actions.set(&raw const self.own_actions);
    }
}

/// Calls `each` with the records of all slots that are in use. Slots that no thread has tried to
/// take have no page, and aren't read.
pub fn each_used(mut each: impl FnMut(&'static GateThread)) {
    for (chunk, start) in CHUNK.iter().enumerate() {
        let start = start.load(SeqCst);
        if start == 0 {
            return;
        }
        let all =
            (0..USED[chunk].load(SeqCst)).map(|slot| GateThread::at(start + slot * SLOT_BYTES));
        all.filter(|record| record.state.load(SeqCst) != 0).for_each(&mut each);
    }
}

#[cold]
fn grow(chunk: usize) -> Option<usize> {
    let _alone = GROWING.lock();
    let known = CHUNK[chunk].load(SeqCst);
    if known != 0 {
        return Some(known);
    }
    let zone = Zone::reserve(slots(chunk) * SLOT_BYTES, SLOT_BYTES).ok()?;
    let start = zone.start();
    forget(zone);
    CHUNK[chunk].store(start, SeqCst);
    Some(start)
}

/// A value that is set once, at start-up.
pub(crate) struct StartCell<T>(UnsafeCell<Option<T>>);

// SAFETY: the caller of `set` promises that no other thread uses the cell meanwhile. Afterwards
// threads only read the value, which `T: Sync` allows.
unsafe impl<T: Sync> Sync for StartCell<T> {}

impl<T: Copy> StartCell<T> {
    pub(crate) const fn new() -> StartCell<T> {
        StartCell(UnsafeCell::new(None))
    }

    /// Sets the value.
    ///
    /// # Safety
    /// - No other thread uses the cell meanwhile: the process has one thread, or all others wait.
    pub(crate) unsafe fn set(&self, value: T) {
        // SAFETY: the caller promises that no other thread uses the cell meanwhile.
        unsafe { *self.0.get() = Some(value) }
    }

    pub(crate) fn get(&self) -> Option<T> {
        // SAFETY: `set` runs only while no other thread uses the cell, so nothing writes to it now.
        unsafe { *self.0.get() }
    }
}

/// The owner of the program's memory.
pub(crate) static KEEPER: StartCell<&'static Keeper> = StartCell::new();

/// Stops growth of the list of slots until [`resume_growth`], so that a copy of the process has the
/// whole list.
pub fn stop_growth() {
    forget(GROWING.lock());
}

/// Returns whether a thread makes slots, or has ended while it did.
pub fn is_growing() -> bool {
    GROWING.is_held()
}

/// Releases the lock of [`stop_growth`].
///
/// # Safety
/// - `stop_growth` was called in this process, or in the parent that this process is a copy of.
/// - This is called once for that `stop_growth`.
pub unsafe fn resume_growth() {
    // SAFETY: by the caller's promise `stop_growth` took this lock, and no call has released it
    // since. `stop_growth` forgot its guard, so the guard doesn't release it.
    unsafe { GROWING.unlock() };
}
