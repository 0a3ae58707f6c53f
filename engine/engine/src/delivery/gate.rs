//! Gate delivery of regions. The faulting thread serves itself, as in signal delivery. Every system
//! call of the process passes the gate, which keeps the call's buffers in regions resident until
//! the call returns. It needs no permission.
//!
//! # Invariants
//! - **No page of a region that a call names is evicted or write-protected until the call returns**
//!   (`holds.rs`), whichever engine the region belongs to.
//! - **Threads of engines never pass the gate.** They are started while their starter's calls
//!   don't, and no engine may exist when the process is armed. They touch the memory of regions
//!   only by moving it.
//! - **Regions are the library's.** Calls of the program that would unmap or replace their memory,
//!   or share it with children, are refused (EINVAL). The engine would not notice them. Calls may
//!   change the access, and give advice that changes no byte.
//! - **A child of `vfork`** shares the memory, and serves its own faults with its own copies of the
//!   descriptors. Python's closes all descriptors. So those of the engine are spared, and have high
//!   numbers, which programs seldom choose. A swap file's are not, because this delivery has no
//!   swap file.
//! - A child of fork is armed and has no regions: the records of them are cleared there.
//!
//! # Limits
//! Requests of io_uring and AIO that name folded memory fail with EFAULT. Those that name resident
//! memory work as long as it is resident: [`crate::Region::pin`] it for them. Another process
//! cannot read folded memory.
use crate::delivery::sigbus;
use crate::fault::PageFault;
use crate::holds::Holds;
use crate::known::{FoldableMap, TOP};
use crate::pager::Pager;
use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use core::ops::Range;
use core::sync::atomic::{
    AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicUsize, Ordering::SeqCst,
};
use memfold_gate::image::is_program;
use memfold_gate::{
    AnyRights, BadAddress, HoldKeeper, Keeper, KeeperHold, LifeKeeper, Names, NoHoldRoom, NoServer,
    NoThreads, OtherProcess, PageKeeper, WhyNot,
};
use memfold_os::memory::zone::{freeze_list, unfreeze_list};
use memfold_os::thread::{process_id, yield_now};
use memfold_os::units::{MAX_BYTES, PAGE_SIZE};
use rustix::process::{Resource, getrlimit};

/// Bytes that a piece of a call should name: the least limit is some MiB.
const PIECE_BYTES: usize = 512 << 10;
/// After so many pages that can't be touched a range is given up, because the kernel stops there
/// too.
const BAD_MAX: usize = 8;
const PAGE_MASK: usize = PAGE_SIZE - 1;

static ARMED: AtomicBool = AtomicBool::new(false);
static KNOWN: AtomicPtr<FoldableMap> = AtomicPtr::new(core::ptr::null_mut());
static ENGINES: AtomicUsize = AtomicUsize::new(0);
/// Descriptors of engines; 0 for none.
static DESCRIPTORS: [AtomicI32; 2 * sigbus::ENGINES_MAX] =
    [const { AtomicI32::new(0) }; 2 * sigbus::ENGINES_MAX];
/// The process that is being armed. A thread that builds an engine counts it and then reads this. A
/// thread that arms writes this and then reads the count. So one of the two sees the other.
static ARMING: AtomicU32 = AtomicU32::new(0);

/// Counts an engine, from before its first thread is started until after its last one has ended.
pub(crate) struct EngineCount(());

impl EngineCount {
    pub fn one_more() -> EngineCount {
        ENGINES.fetch_add(1, SeqCst);
        // In a copy of the process made meanwhile, no thread is arming.
        while ARMING.load(SeqCst) == process_id() {
            yield_now();
        }
        EngineCount(())
    }
}

impl Drop for EngineCount {
    fn drop(&mut self) {
        ENGINES.fetch_sub(1, SeqCst);
    }
}

/// Returns whether the process is armed, so that [`crate::Delivery::Gate`] is available.
pub fn is_armed() -> bool {
    ARMED.load(SeqCst)
}

/// Arms the process for good: from now on all system calls of all its threads pass the gate. A
/// thread that waits in a call continues to wait, as after a signal handler with SA_RESTART.
/// `nanosleep`, `poll`, `epoll_wait`, `select` and similar calls may return EINTR, once.
///
/// # Errors
/// The reason, one line. The process is unchanged then.
///
/// # Safety
/// - This code is in a shared library of its own. Only the engine's code in it makes system calls
///   by its own instructions, because those don't pass the gate.
pub unsafe fn arm() -> Result<(), String> {
    if is_armed() {
        return Ok(());
    }
    let (here, found) = (process_id(), ARMING.load(SeqCst));
    // A child of fork finds its parent's value there.
    if found == here || ARMING.compare_exchange(found, here, SeqCst, SeqCst).is_err() {
        return Err(format!("{}", WhyNot::Busy));
    }
    // SAFETY: the caller promises what `arm_alone` asks for.
    let armed = if is_armed() { Ok(()) } else { unsafe { arm_alone() } };
    ARMING.store(0, SeqCst);
    armed
}

unsafe fn arm_alone() -> Result<(), String> {
    if ENGINES.load(SeqCst) > 0 {
        return Err(String::from("engines with other deliveries exist already"));
    }
    if KNOWN.load(SeqCst).is_null() {
        KNOWN.store(Box::into_raw(Box::new(FoldableMap::default())), SeqCst);
    }
    Holds::of_process(true);
    if is_program() {
        return Err(format!("{}", WhyNot::NoRange));
    }
    // SAFETY: the caller promises what `start` asks for; there is no engine, so no region.
    let process = unsafe { memfold_gate::start(&KEEPER) }.map_err(|why| format!("{why}"))?;
    process.keep();
    ARMED.store(true, SeqCst);
    Ok(())
}

/// Calls `with`, which starts an engine's threads, while the caller's system calls don't pass the
/// gate.
pub(crate) fn apart<T>(with: impl FnOnce() -> T) -> T {
    if !is_armed() {
        return with();
    }
    // SAFETY: building an engine passes no memory of another engine to the kernel.
    unsafe { memfold_gate::apart(with) }
}

/// Returns the least number of an engine's descriptors.
pub(crate) fn least_descriptor() -> i32 {
    /// Numbers begin here, or this much below the limit.
    const FROM: u64 = 896;
    const COUNT: u64 = 2 * sigbus::ENGINES_MAX as u64;
    let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    if is_armed() { FROM.min(most.saturating_sub(COUNT)) as i32 } else { 0 }
}

/// Protects a descriptor from the program's close calls until [`disown`]. Returns `false` if there
/// are too many.
pub(crate) fn own(fd: i32) -> bool {
    DESCRIPTORS.iter().any(|place| place.compare_exchange(0, fd, SeqCst, SeqCst).is_ok())
}

/// Ends the protection of a descriptor, which is about to be closed.
pub(crate) fn disown(fd: i32) {
    DESCRIPTORS.iter().find(|place| place.compare_exchange(fd, 0, SeqCst, SeqCst).is_ok());
}

fn known() -> Option<&'static FoldableMap> {
    // SAFETY: the pointer is null, or that of a leaked box.
    unsafe { KNOWN.load(SeqCst).as_ref() }
}

/// Begins a region: calls that name it are held, before any page of it can be folded.
pub(crate) fn begins(region: &Range<usize>) {
    if let Some(known) = known() {
        known.set(region);
    }
}

/// Ends a region.
pub(crate) fn ends(region: &Range<usize>) {
    if let Some(known) = known() {
        known.unset(region);
    }
}

/// Returns whether a range may contain a part of a region.
fn concerns(range: &Range<usize>) -> bool {
    range.start < TOP && known().is_some_and(|known| known.is_set(range))
}

/// Returns whether a range of whole pages contains a part of a region.
fn meets_region(start: usize, len: usize) -> bool {
    let end = start.saturating_add(len).min(TOP).next_multiple_of(PAGE_SIZE);
    let range = start & !PAGE_MASK..end;
    range.start < range.end
        && concerns(&range)
        && sigbus::any(|pager| pager.mappings().touches(&range))
}

/// Answers the gate's questions.
struct RegionKeeper;

static KEEPER: Keeper = Keeper {
    holds: &RegionKeeper,
    pages: &RegionKeeper,
    life: &RegionKeeper,
    children: &NoServer,
    rights: &AnyRights,
    threads: &NoThreads,
};

impl HoldKeeper for RegionKeeper {
    fn concerns(&self, start: usize, len: usize) -> bool {
        len > 0 && concerns(&(start..start.saturating_add(len)))
    }

    fn hold(
        &self,
        names: Names,
        thread: usize,
        touch: fn(usize, bool) -> Result<(), BadAddress>,
    ) -> Result<Option<KeeperHold>, NoHoldRoom> {
        let holds = Holds::of_process(true);
        let mut holding = holds.begin(thread);
        names(&mut |span| {
            let range = span.start..span.start + span.len;
            if concerns(&range) {
                holding.push(range, span.write);
            }
        });
        let Some(hold) = holding.publish().map_err(|_| NoHoldRoom)? else { return Ok(None) };
        holds.wait(hold);
        holds.each(hold, |pages, write| touch_all(pages, write, touch));
        Ok(Some(KeeperHold(hold.0)))
    }

    fn release(&self, hold: KeeperHold) {
        Holds::of_process(true).release(crate::holds::HoldId(hold.0));
    }

    fn lent(
        &self,
        _process: OtherProcess,
        _parts: &[[usize; 2]],
        _write: bool,
        make: &mut dyn FnMut(usize) -> isize,
    ) -> isize {
        make(0)
    }

    fn piece_bytes(&self) -> usize {
        PIECE_BYTES
    }

    fn refused(&self, _nr: usize, name: &str, words: &[usize]) {
        let lacks = |page: usize, pager: &Pager| {
            pager.mappings().touches(&(page..page + PAGE_SIZE))
                && !pager.0.mapper.space().is_populated(page)
        };
        for page in words.iter().map(|word| word & !PAGE_MASK) {
            // Engines of signal delivery aren't listed here. Their pages are not held, so a refusal
            // is right.
            if concerns(&(page..page + PAGE_SIZE)) && sigbus::any(|pager| lacks(page, pager)) {
                return memfold_os::raw::warn(&[
                    "memfold: warning: The system call ",
                    name,
                    " failed because it met folded memory. This is a bug of memfold: please report it\n",
                ]);
            }
        }
    }
}

impl PageKeeper for RegionKeeper {
    fn hides(&self) -> bool {
        false
    }

    fn fault(&self, fault: memfold_gate::KeeperFault) -> bool {
        let memfold_gate::KeeperFault { address: addr, write, protected } = fault;
        sigbus::serve(PageFault { addr, write, protected })
    }

    fn change(
        &self,
        nr: usize,
        args: &[usize; 6],
        make: &mut dyn FnMut(&[usize; 6]) -> isize,
    ) -> isize {
        if harms_region(nr as i64, args) { -(libc::EINVAL as isize) } else { make(args) }
    }

    fn never_fold(&self, _start: usize, _len: usize) {}

    fn keep_all(&self, keep: bool) {
        let holds = Holds::of_process(true);
        if keep { holds.stop_eviction() } else { holds.allow_eviction() }
    }

    fn keep_home(&self, _keep: bool) -> bool {
        true
    }
}

impl LifeKeeper for RegionKeeper {
    fn expect_copy(&self) {}

    fn begin_copy(&self) {
        // The list is frozen first, because the child maps stacks of threads.
        freeze_list();
    }

    fn end_copy(&self, made: isize) {
        // SAFETY: `begin_copy` has frozen it, here or in the parent.
        unsafe { unfreeze_list() };
        if made == 0 {
            if let Some(known) = known() {
                known.clear();
            }
            // SAFETY: the child has one thread, which holds nothing outside this call.
            unsafe { Holds::of_process(true).reset_in_child() };
        }
    }

    fn execute(
        &self,
        _nr: usize,
        args: &[usize; 6],
        make: &mut dyn FnMut(&[usize; 6]) -> isize,
    ) -> isize {
        make(args)
    }

    fn owns_descriptor(&self, fd: i32) -> bool {
        fd > 0 && DESCRIPTORS.iter().any(|place| place.load(SeqCst) == fd)
    }

    fn ends(&self) {}
}

fn touch_all(range: Range<usize>, write: bool, touch: fn(usize, bool) -> Result<(), BadAddress>) {
    let (mut at, mut bad) = (range.start, 0);
    while at < range.end && bad < BAD_MAX {
        // Where there is no region, whole chunks are skipped.
        let step = if concerns(&(at..at + 1)) {
            bad += touch(at, write).is_err() as usize;
            PAGE_SIZE
        } else {
            MAX_BYTES
        };
        let Some(next) = (at & !(step - 1)).checked_add(step) else { return };
        at = next;
    }
}

/// Returns whether a call would change a region unnoticed by its engine.
fn harms_region(nr: i64, args: &[usize; 6]) -> bool {
    let [start, len, third, fourth, fifth, _] = *args;
    match nr {
        libc::SYS_munmap => meets_region(start, len),
        libc::SYS_mmap => {
            fourth as i32 & libc::MAP_FIXED != 0
                && fourth as i32 & libc::MAP_FIXED_NOREPLACE != libc::MAP_FIXED_NOREPLACE
                && meets_region(start, len)
        }
        libc::SYS_mremap => {
            let moves_onto = fourth as i32 & libc::MREMAP_FIXED != 0;
            meets_region(start, len.max(1)) || moves_onto && meets_region(fifth, third)
        }
        libc::SYS_madvise => !is_harmless(third as i32) && meets_region(start, len),
        libc::SYS_process_madvise => !is_harmless(fourth as i32) && names_region(len, third),
        libc::SYS_prctl => start as i32 == libc::PR_SET_MEMORY_MERGE && len != 0,
        libc::SYS_shmat => third & libc::SHM_REMAP as usize != 0 && meets_region(len, PAGE_SIZE),
        _ => false,
    }
}

/// Returns whether advice changes no byte, and nothing that children inherit.
fn is_harmless(advice: i32) -> bool {
    matches!(
        advice,
        libc::MADV_NORMAL
            | libc::MADV_RANDOM
            | libc::MADV_SEQUENTIAL
            | libc::MADV_WILLNEED
            | libc::MADV_HUGEPAGE
            | libc::MADV_NOHUGEPAGE
            | libc::MADV_DONTDUMP
            | libc::MADV_DODUMP
            | libc::MADV_COLD
            | libc::MADV_PAGEOUT
            | libc::MADV_COLLAPSE
            | libc::MADV_POPULATE_READ
            | libc::MADV_POPULATE_WRITE
    )
}

/// Returns whether one of `count` ranges at `at` contains a part of a region.
fn names_region(at: usize, count: usize) -> bool {
    (0..count.min(libc::UIO_MAXIOV as usize)).any(|n| {
        let mut range = [0u8; 16];
        let outcome = memfold_gate::read_bytes(at + n * 16, &mut range);
        let word = |at: usize| usize::from_ne_bytes(core::array::from_fn(|n| range[at * 8 + n]));
        outcome.is_ok() && meets_region(word(0), word(1))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_past_the_last_place_are_refused() {
        let all = 1..=DESCRIPTORS.len() as i32;
        assert!(all.clone().all(own));
        assert!(!own(1000));
        disown(1000);
        disown(7);
        assert!(own(1000));
        all.chain([1000]).for_each(disown);
        assert!(DESCRIPTORS.iter().all(|place| place.load(SeqCst) == 0));
    }
}
