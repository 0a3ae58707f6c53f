//! This process's slot in the table that `memfold run` keeps, and the run's bounds there.
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::sync::atomic::Ordering::{AcqRel, Relaxed};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64};
use memfold::stats::{Bounds, LAYOUT_VERSION, Stats};
use memfold_sys::Errno;
use memfold_sys::sync::Mutex;
use rustix::fs::{Mode, OFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::Pid;

/// The table, once it is mapped; it is never unmapped. A child of fork inherits the mapping.
static TABLE: Mutex<&'static [Stats]> = Mutex::new(&[]);
/// The bounds in front of it; null without a table.
static BOUNDS: AtomicPtr<Bounds> = AtomicPtr::new(core::ptr::null_mut());
/// Nobody had claimed a slot when the table was mapped.
static FIRST: AtomicBool = AtomicBool::new(false);

/// What the whole run may use now, bytes (limit, resident); `None` without a table.
pub fn bounds() -> Option<(u64, u64)> {
    // SAFETY: the pointer is null or leads to the table, which is never unmapped.
    let bounds = unsafe { BOUNDS.load(Relaxed).as_ref()? };
    Some((bounds.limit_bytes.load(Relaxed), bounds.resident_bytes.load(Relaxed)))
}

/// Maps the table at `path`, as far as that can be done, and allocates nothing.
pub fn open(path: &str) {
    if let Ok(table) = map(path) {
        FIRST.store(table.iter().all(|slot| slot.pid.load(Relaxed) == 0), Relaxed);
        *TABLE.lock() = table;
    }
}

/// Whether this is the program that `memfold run` was given, and has begun nothing yet. Only then has no process of the run a
/// slot: each claims one before its `main`. `false` without a table, which that program always has.
pub fn is_first() -> bool {
    FIRST.load(Relaxed)
}

/// A slot of this process. Without a table, or with every slot taken by a living process, the figures are kept in memory of our
/// own that nobody reads: a program never fails for lack of figures.
pub fn claim() -> &'static Stats {
    let table = *TABLE.lock();
    let own = rustix::process::getpid().as_raw_nonzero().get() as u64;
    // A program that executes another keeps its slot; its counters go on.
    let kept = table.iter().find(|slot| slot.pid.load(Relaxed) == own);
    let free = || table.iter().find(|slot| take(&slot.pid, 0, own));
    // The counters of a process that has ended stay in the sums when another goes on with them.
    let left = || {
        table.iter().find(|slot| {
            let pid = slot.pid.load(Relaxed);
            has_ended(pid) && take(&slot.pid, pid, own)
        })
    };
    match kept.or_else(free).or_else(left) {
        Some(slot) => {
            clear_gauges(slot);
            slot
        }
        None => Box::leak(Box::new(Stats::new())),
    }
}

/// What the other processes of the run need of the limit, as far as they are alive. At most one for each slot.
pub fn needs_of_others() -> Vec<u64> {
    let table = *TABLE.lock();
    let own = rustix::process::getpid().as_raw_nonzero().get() as u64;
    let live = |slot: &&Stats| {
        let pid = slot.pid.load(Relaxed);
        pid != 0 && pid != own && slot.need_bytes.load(Relaxed) > 0 && !has_ended(pid)
    };
    table.iter().filter(live).map(|slot| slot.need_bytes.load(Relaxed)).collect()
}

fn take(pid: &AtomicU64, from: u64, own: u64) -> bool {
    pid.compare_exchange(from, own, AcqRel, Relaxed).is_ok()
}

fn has_ended(pid: u64) -> bool {
    Pid::from_raw(pid as i32).is_some_and(|pid| rustix::process::test_kill_process(pid) == Err(Errno::SRCH))
}

/// The present values of a new process image are zero; its peaks go on.
fn clear_gauges(stats: &Stats) {
    for gauge in [
        &stats.resident_bytes,
        &stats.frame_bytes,
        &stats.pool_bytes,
        &stats.index_bytes,
        &stats.folded_bytes,
        &stats.stored_bytes,
        &stats.unmanaged_bytes,
        &stats.folios,
        &stats.need_bytes,
    ] {
        gauge.store(0, Relaxed);
    }
}

/// Maps the table. The path goes through another process's descriptors, and where that process is gone or invisible it
/// may lead anywhere: only a sealed memfd of whole slots in our layout is taken.
fn map(path: &str) -> Result<&'static [Stats], Errno> {
    let file =
        rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY, Mode::empty())?;
    let seals = rustix::fs::fcntl_get_seals(&file)?;
    let len = rustix::fs::fstat(&file)?.st_size as usize;
    let slots = len.saturating_sub(size_of::<Bounds>());
    if !seals.contains(SealFlags::SHRINK) || slots == 0 || !slots.is_multiple_of(size_of::<Stats>()) {
        return Err(Errno::INVAL);
    }
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
    let at = unsafe { rustix::mm::mmap(core::ptr::null_mut(), len, access, MapFlags::SHARED, &file, 0)? };
    // SAFETY: the mapping is `len` bytes long, page-aligned, never unmapped if it is kept, and its seal keeps the file from
    // shrinking under it. Both types are atomics only, for which every bit pattern is valid.
    let (bounds, table) = unsafe {
        let bounds = at.cast::<Bounds>();
        (&*bounds, core::slice::from_raw_parts(bounds.add(1).cast::<Stats>(), slots / size_of::<Stats>()))
    };
    if bounds.version.load(Relaxed) != LAYOUT_VERSION {
        // SAFETY: the mapping made above, which nobody uses: `bounds` and `table` end here.
        unsafe { rustix::mm::munmap(at, len)? };
        return Err(Errno::INVAL);
    }
    BOUNDS.store(at.cast(), Relaxed);
    Ok(table)
}
