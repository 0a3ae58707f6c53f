//! What the gate knows of a thread, and the stack that its handlers run on.
//!
//! Both lie in one slot: stack below, record on top, so that a stack pointer tells the record. A
//! thread whose stack pointer lies in its slot is in the gate. While code of the program runs, its
//! own handlers included, the slot's stack is empty.
use crate::actions::SignalActions;
use crate::errand::VforkErrand;
use crate::frame::{AlternateStack, SignalInfo};
use crate::keeper::{Hold, Keeper};
use crate::user_dispatch::ProgramDispatch;
use core::cell::{Cell, UnsafeCell};
use core::mem::forget;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::SeqCst};
use memfold_sys::memory::zone::Zone;
use memfold_sys::raw::system_call;
use memfold_sys::sync::StaticMutex;
use memfold_sys::thread::thread_id;
use memfold_sys::units::PAGE_SIZE;

/// Stack and record.
pub const SLOT_BYTES: usize = 256 << 10;
const RECORD_BYTES: usize = 2 * PAGE_SIZE;
/// Where the stack begins: after a page that nobody may touch.
const STACK_AT: usize = PAGE_SIZE;
const STACK_BYTES: usize = SLOT_BYTES - STACK_AT - RECORD_BYTES;
/// Each chunk has twice the slots of the one before.
const CHUNKS: usize = 14;
const FIRST_SLOTS: usize = 4;

static CHUNK: [AtomicUsize; CHUNKS] = [const { AtomicUsize::new(0) }; CHUNKS];
static GROWING: StaticMutex<()> = StaticMutex::new(());

const fn slots(chunk: usize) -> usize {
    FIRST_SLOTS << chunk
}

/// Kinds of signals that can be put off at the same time: those that aren't blocked by then.
pub const DEFERRED: usize = 4;

/// What the gate's code gets of a call that a filter has refused by a signal.
pub const REFUSED: isize = -(libc::ENOSYS as isize);

/// A thread.
#[repr(C)]
pub struct ThreadRecord {
    /// A bit for each of `deferred` that counts. The first word: [`crate::entry`] looks at it.
    pub pending: AtomicU32,
    /// 0: the slot is free.
    state: AtomicU32,
    /// The thread's `fs`, by which patched sites find it; 0: they don't. The second word.
    pub fs: Cell<usize>,
    /// Another thread has the same.
    pub shares_fs: Cell<bool>,
    /// Signals to be handled when the gate is left.
    pub deferred: [Cell<SignalInfo>; DEFERRED],
    /// What the kernel had blocked when the first of them came.
    pub mask_before: Cell<u64>,
    /// Those of [`crate::actions::PROTECTED`] that the program believes to have blocked.
    pub blocked: SignalSet,
    /// Those of them that it takes all the same while it waits in a call.
    pub awaits: SignalSet,
    /// Those of them that were sent to the thread meanwhile.
    pub sent: Cell<u64>,
    /// Their information.
    pub sent_info: [Cell<SignalInfo>; DEFERRED],
    /// The alternate stack that the program believes to have.
    pub alternate: Cell<AlternateStack>,
    /// What a filter of the program's has said of the last call that it has refused.
    pub refused: Cell<Option<SignalInfo>>,
    /// A child of vfork whose calls don't pass the gate, for which all memory is home; or it is traced by
    /// its own wish.
    pub traced: Cell<bool>,
    /// The Syscall User Dispatch that the program believes to have for it.
    pub dispatch: Cell<Option<ProgramDispatch>>,
    /// Nothing is evicted for it.
    pub keeps_all: Cell<bool>,
    /// What it has done by another task.
    pub errand: VforkErrand,
    /// What its call holds.
    pub hold: Cell<Option<Hold>>,
    /// The head of its list of locks, which the kernel walks at its end; 0: it has none.
    pub robust: AtomicUsize,
    /// Its number, for the kernel.
    pub thread: AtomicU32,
    /// Of threads that live at the same time no two have the same; they are dense.
    pub number: Cell<usize>,
    /// Its process, 0 for the first: threads have that of who has made them.
    process: AtomicU32,
    /// The thread is about to end.
    ends: AtomicBool,
    /// The mask of a call that waits with another one.
    pub waiting_mask: Cell<Option<u64>>,
    /// The actions of its process; 0: those of [`crate::start`]'s.
    actions: Cell<*const SignalActions>,
    own_actions: SignalActions,
    /// Where the child's frame is, for a new thread.
    pub frame: Cell<usize>,
    /// Something that the child must do first; what it is, is [`crate::threads`]'s.
    pub flags: Cell<usize>,
}

const _: () = assert!(size_of::<ThreadRecord>() <= RECORD_BYTES);

/// A set of signals of a thread's, which others may read.
pub struct SignalSet(AtomicU64);

impl SignalSet {
    /// What it is.
    pub fn get(&self) -> u64 {
        self.0.load(SeqCst)
    }

    /// Makes it another one.
    pub fn set(&self, set: u64) {
        self.0.store(set, SeqCst);
    }
}

/// What the process does on each signal.
pub static ACTIONS: SignalActions = SignalActions::new();

impl ThreadRecord {
    /// That of the thread whose stack pointer is `sp`; `None` if it isn't in the gate.
    pub fn of_stack(sp: usize) -> Option<&'static ThreadRecord> {
        let slot = CHUNK.iter().enumerate().find_map(|(at, start)| {
            let start = start.load(SeqCst);
            let inside = start != 0 && sp.wrapping_sub(start) < slots(at) * SLOT_BYTES;
            inside.then(|| start + (sp - start) / SLOT_BYTES * SLOT_BYTES)
        })?;
        Some(ThreadRecord::at(slot))
    }

    fn at(slot: usize) -> &'static ThreadRecord {
        // SAFETY: slots stay mapped, and zeros are a record; only its thread uses what is in a
        // cell.
        unsafe { &*((slot + SLOT_BYTES - RECORD_BYTES) as *const ThreadRecord) }
    }

    fn slot(&self) -> usize {
        &raw const *self as usize + RECORD_BYTES - SLOT_BYTES
    }

    /// Takes a free slot; `None`: there is no memory or address space for one.
    pub fn take() -> Option<&'static ThreadRecord> {
        for (chunk, start) in CHUNK.iter().enumerate() {
            let mut start = start.load(SeqCst);
            if start == 0 {
                start = grow(chunk)?;
            }
            for slot in 0..slots(chunk) {
                let record = ThreadRecord::at(start + slot * SLOT_BYTES);
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

    /// It is the calling thread's.
    pub fn claim(&self) {
        self.thread.store(thread_id(), SeqCst);
    }

    /// It is a thread of `other`'s process, or the first of another.
    pub fn join(&self, other: Option<&ThreadRecord>) {
        static LAST: AtomicU32 = AtomicU32::new(0);
        let process = match other {
            Some(other) => other.process.load(SeqCst),
            None => LAST.fetch_add(1, SeqCst) + 1,
        };
        self.process.store(process, SeqCst);
    }

    /// Calls `each` with the records of all threads of its process.
    pub fn each_of_process(&self, mut each: impl FnMut(&ThreadRecord)) {
        let process = self.process.load(SeqCst);
        each_used(|record| {
            if record.process.load(SeqCst) == process {
                each(record);
            }
        });
    }

    /// It is a thread of the first process of this memory.
    pub fn is_of_first_process(&self) -> bool {
        self.process.load(SeqCst) == 0
    }

    /// The process is a copy of the one that it was in: it is the first of its own memory.
    pub fn begin_as_copy(&self) {
        self.process.store(0, SeqCst);
    }

    /// The thread is about to end. Returns whether no other thread of the first process of this memory
    /// goes on: each has ended, or `is_gone`. Of several that end at once, at least one is the last.
    pub fn ends_last(&self, is_gone: fn(&ThreadRecord) -> bool) -> bool {
        self.ends.store(true, SeqCst);
        let mut is_last = self.process.load(SeqCst) == 0;
        self.each_of_process(|each| is_last = is_last && (each.ends.load(SeqCst) || is_gone(each)));
        is_last
    }

    /// The word that [`ThreadRecord::give_back`] stores 0 in.
    pub fn state(&self) -> *const u32 {
        self.state.as_ptr()
    }

    /// Gives back the slots of all others: their threads are not in this process.
    pub fn give_back_others(&self) {
        each_used(|record| {
            if !core::ptr::eq(record, self) {
                record.give_back();
            }
        });
    }

    /// What the program's filter has said of its call `nr`, which has given `made`; once.
    pub fn take_refused(&self, nr: usize, made: isize) -> Option<SignalInfo> {
        if made != REFUSED {
            return None;
        }
        self.refused.take().filter(|info| info.refused() == Some(nr))
    }

    /// Whether a stack pointer lies on the slot's stack.
    pub fn holds(&self, sp: usize) -> bool {
        sp.wrapping_sub(self.slot()) < SLOT_BYTES
    }

    /// The stack, as the kernel is told of it.
    pub fn stack(&self) -> AlternateStack {
        AlternateStack { sp: self.slot() + STACK_AT, flags: 0, padding: 0, size: STACK_BYTES }
    }

    /// What the thread's process does on each signal.
    pub fn actions(&self) -> &'static SignalActions {
        let its = self.actions.get();
        // SAFETY: a record's own, in a slot, which stays mapped.
        if its.is_null() { &ACTIONS } else { unsafe { &*its } }
    }

    /// It has the actions of `parent`'s process, for good or as they are now.
    pub fn inherit_actions(&'static self, parent: &ThreadRecord, shared: bool) {
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

/// Calls `each` with all that aren't free. A slot that was never used stays without a page of its
/// own.
pub fn each_used(mut each: impl FnMut(&'static ThreadRecord)) {
    for (chunk, start) in CHUNK.iter().enumerate() {
        let start = start.load(SeqCst);
        if start == 0 {
            return;
        }
        let all = (0..slots(chunk)).map(|slot| ThreadRecord::at(start + slot * SLOT_BYTES));
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

/// The keeper's place.
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

/// The owner of the memory.
pub(crate) static KEEPER: StartCell<&'static dyn Keeper> = StartCell::new();

/// No thread makes room for slots until [`resume_growth`], so that a copy of the process finds that at
/// rest.
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
