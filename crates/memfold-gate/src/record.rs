//! A slot for each thread of the program: the stack of the gate's handlers, and the thread's record.
//!
//! The record lies above the stack, so a stack pointer leads to the record. A thread whose stack pointer
//! lies in its slot is in the gate. The slot's stack is empty while code of the program runs. That
//! includes the program's own handlers.
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

/// The bytes of a slot.
pub const SLOT_BYTES: usize = 256 << 10;
const RECORD_BYTES: usize = 2 * PAGE_SIZE;
/// The stack begins after a guard page.
const STACK_AT: usize = PAGE_SIZE;
const STACK_BYTES: usize = SLOT_BYTES - STACK_AT - RECORD_BYTES;
/// Slots come in chunks. Each chunk has twice the slots of the one before.
const CHUNKS: usize = 14;
const FIRST_SLOTS: usize = 4;

static CHUNK: [AtomicUsize; CHUNKS] = [const { AtomicUsize::new(0) }; CHUNKS];
static GROWING: StaticMutex<()> = StaticMutex::new(());

const fn slots(chunk: usize) -> usize {
    FIRST_SLOTS << chunk
}

/// Kinds of signals that can be pending at the same time: one of any kind, and the three that are never
/// blocked in the kernel.
pub const DEFERRED: usize = 4;

/// The result that the gate's code sees of a call that a filter has refused by a signal.
pub const REFUSED: isize = -(libc::ENOSYS as isize);

/// A thread of the program. Cells are used by the thread alone; others may read the atomics.
#[repr(C)]
pub struct GateThread {
    /// A bit for each entry of `deferred` that counts. Assembly reads this word.
    pub pending: AtomicU32,
    /// 0: the slot is free.
    state: AtomicU32,
    /// The thread's `fs`, by which patched sites find the record. 0: they don't. Assembly reads it.
    pub fs: Cell<usize>,
    /// Another thread has the same `fs`, so patched sites can't tell the two apart.
    pub shares_fs: Cell<bool>,
    /// Pending signals. They are delivered when the thread leaves the gate.
    pub deferred: [Cell<SignalInfo>; DEFERRED],
    /// The kernel's mask when the first of them came.
    pub mask_before: Cell<u64>,
    /// The signals of [`crate::actions::PROTECTED`] that the program has blocked, as it believes.
    pub blocked: SignalSet,
    /// Those of `blocked` that the thread takes all the same while it waits in a call.
    pub awaits: SignalSet,
    /// Those of `blocked` that were sent to the thread meanwhile.
    pub sent: Cell<u64>,
    /// The information of `sent`.
    pub sent_info: [Cell<SignalInfo>; DEFERRED],
    /// The alternate stack that the program believes to have.
    pub alternate: Cell<AlternateStack>,
    /// The signal by which a filter of the program's has refused the last call.
    pub refused: Cell<Option<SignalInfo>>,
    /// The thread's calls don't pass the gate, and all memory is resident for it. It is a child of vfork
    /// that has shut itself in, or it has asked to be traced.
    pub traced: Cell<bool>,
    /// The Syscall User Dispatch that the program has set for the thread, as it believes.
    pub dispatch: Cell<Option<ProgramDispatch>>,
    /// Eviction is stopped for the thread.
    pub keeps_all: Cell<bool>,
    /// The work that another task does for it.
    pub errand: VforkErrand,
    /// The hold of its system call.
    pub hold: Cell<Option<KeeperHold>>,
    /// The head of its robust list, which the kernel walks when the thread ends. 0: it has none.
    pub robust: AtomicUsize,
    /// The thread's number in the kernel.
    pub thread: AtomicU32,
    /// The number of the slot. Living threads have different ones, and the numbers are dense.
    pub number: Cell<usize>,
    /// The number of its process: 0 for the first, and a new one for each child that shares the memory.
    process: AtomicU32,
    /// The thread is about to end.
    ends: AtomicBool,
    /// The mask of a call that waits with another one.
    pub waiting_mask: Cell<Option<u64>>,
    /// The signal actions of its process. Null: those of the first process.
    actions: Cell<*const SignalActions>,
    own_actions: SignalActions,
    /// The address of the frame that a new thread leaves the gate by.
    pub frame: Cell<usize>,
    /// Flags of its `clone` that a new thread acts on first.
    pub flags: Cell<usize>,
}

const _: () = assert!(size_of::<GateThread>() <= RECORD_BYTES);

/// A set of signals of a thread. Other threads may read it.
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
    /// Returns the record of the thread whose stack pointer is `sp`. `None`: the thread isn't in the gate.
    pub fn of_stack(sp: usize) -> Option<&'static GateThread> {
        let slot = CHUNK.iter().enumerate().find_map(|(at, start)| {
            let start = start.load(SeqCst);
            let inside = start != 0 && sp.wrapping_sub(start) < slots(at) * SLOT_BYTES;
            inside.then(|| start + (sp - start) / SLOT_BYTES * SLOT_BYTES)
        })?;
        Some(GateThread::at(slot))
    }

    fn at(slot: usize) -> &'static GateThread {
        // SAFETY: slots stay mapped, and zeros are a record; only its thread uses what is in a
        // cell.
        unsafe { &*((slot + SLOT_BYTES - RECORD_BYTES) as *const GateThread) }
    }

    fn slot(&self) -> usize {
        &raw const *self as usize + RECORD_BYTES - SLOT_BYTES
    }

    /// Takes a free slot. `None`: there is no memory or address space for one.
    pub fn take() -> Option<&'static GateThread> {
        for (chunk, start) in CHUNK.iter().enumerate() {
            let mut start = start.load(SeqCst);
            if start == 0 {
                start = grow(chunk)?;
            }
            for slot in 0..slots(chunk) {
                let record = GateThread::at(start + slot * SLOT_BYTES);
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
        // SAFETY: the lowest page of a slot is used for nothing.
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

    /// Gives the slot back.
    pub fn give_back(&self) {
        self.fs.set(0);
        self.state.store(0, SeqCst);
    }

    /// Makes it the calling thread's.
    pub fn claim(&self) {
        self.thread.store(thread_id(), SeqCst);
    }

    /// Puts the thread into the process of `other`, or makes it the first of a new one.
    pub fn join(&self, other: Option<&GateThread>) {
        static LAST: AtomicU32 = AtomicU32::new(0);
        let process = match other {
            Some(other) => other.process.load(SeqCst),
            None => LAST.fetch_add(1, SeqCst) + 1,
        };
        self.process.store(process, SeqCst);
    }

    /// Calls `each` with the records of all threads of its process.
    pub fn each_of_process(&self, mut each: impl FnMut(&GateThread)) {
        let process = self.process.load(SeqCst);
        each_used(|record| {
            if record.process.load(SeqCst) == process {
                each(record);
            }
        });
    }

    /// Whether it is a thread of the first process of this memory.
    pub fn is_of_first_process(&self) -> bool {
        self.process.load(SeqCst) == 0
    }

    /// Makes its process, a copy of another, the first of its own memory.
    pub fn begin_as_copy(&self) {
        self.process.store(0, SeqCst);
    }

    /// Notes that the thread is about to end. Returns whether it is the last of the first process: each
    /// other thread ends, too, or `is_gone`. Of several that end at once, at least one is the last.
    pub fn ends_last(&self, is_gone: fn(&GateThread) -> bool) -> bool {
        self.ends.store(true, SeqCst);
        let mut is_last = self.process.load(SeqCst) == 0;
        self.each_of_process(|each| is_last = is_last && (each.ends.load(SeqCst) || is_gone(each)));
        is_last
    }

    /// Returns the address of the word that [`GateThread::give_back`] stores 0 in.
    pub fn state(&self) -> *const u32 {
        self.state.as_ptr()
    }

    /// Gives back all other slots. Their threads are not in this process, which is a copy.
    pub fn give_back_others(&self) {
        each_used(|record| {
            if !core::ptr::eq(record, self) {
                record.give_back();
            }
        });
    }

    /// Takes the signal by which a filter of the program's has refused the call `nr` with the result
    /// `made`.
    pub fn take_refused(&self, nr: usize, made: isize) -> Option<SignalInfo> {
        if made != REFUSED {
            return None;
        }
        self.refused.take().filter(|info| info.refused() == Some(nr))
    }

    /// Whether a stack pointer lies on the slot's stack.
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
        // SAFETY: a record's own, in a slot, which stays mapped.
        if its.is_null() { &ACTIONS } else { unsafe { &*its } }
    }

    /// Gives its process the actions of `parent`'s: the same ones if `shared`, else a copy.
    pub fn inherit_actions(&'static self, parent: &GateThread, shared: bool) {
        if shared {
            return self.actions.set(parent.actions.get());
        }
        // SAFETY: the slot is this task's alone. A task that had it before may have been killed with
        // the lock held, and uses it no more.
        unsafe { self.own_actions.reset() };
        self.own_actions.copy_from(parent.actions());
        self.actions.set(&raw const self.own_actions);
    }
}

/// Calls `each` with the records of all slots that aren't free. It only reads, so a slot that was never
/// used stays without a page of its own.
pub fn each_used(mut each: impl FnMut(&'static GateThread)) {
    for (chunk, start) in CHUNK.iter().enumerate() {
        let start = start.load(SeqCst);
        if start == 0 {
            return;
        }
        let all = (0..slots(chunk)).map(|slot| GateThread::at(start + slot * SLOT_BYTES));
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

/// A value that is set once, at the start.
pub(crate) struct StartCell<T>(UnsafeCell<Option<T>>);

// SAFETY: it is set before the first other thread, and then only read.
unsafe impl<T: Sync> Sync for StartCell<T> {}

impl<T: Copy> StartCell<T> {
    pub(crate) const fn new() -> StartCell<T> {
        StartCell(UnsafeCell::new(None))
    }

    /// # Safety
    /// - There is one thread.
    pub(crate) unsafe fn set(&self, value: T) {
        // SAFETY: the caller's promise.
        unsafe { *self.0.get() = Some(value) }
    }

    pub(crate) fn get(&self) -> Option<T> {
        // SAFETY: nobody writes any more.
        unsafe { *self.0.get() }
    }
}

/// The owner of the program's memory.
pub(crate) static KEEPER: StartCell<&'static dyn Keeper> = StartCell::new();

/// Keeps threads from adding slots until [`resume_growth`], so that a copy of the process finds the list
/// complete.
pub fn stop_growth() {
    forget(GROWING.lock());
}

/// Ends [`stop_growth`].
///
/// # Safety
/// - That was called, in this process or in the parent that it is a copy of, and this is called once for
///   it.
pub unsafe fn resume_growth() {
    // SAFETY: the guard was forgotten.
    unsafe { GROWING.unlock() };
}
