//! Processes that have no engine yet. Most processes of a script or a build stay small and end
//! soon, and making an engine costs more than everything else they do. So a process begins without
//! one. Its calls pass the gate all the same, so its growth is seen.
//!
//! The engine is made before the process has more than [`SMALL_BYTES`], or [`SHARE`] of the limit.
//! A larger process may sleep from then on, and without an engine a lower limit would not reach it.
//!
//! - **Nothing is missed.** What the program maps without an engine is noted (`marks/statics.rs`).
//!   No call is in progress whose buffers are unknown, because the process has one thread: it gets
//!   its engine before it gets a second one. A child of `vfork` makes no engine, because it is
//!   another process in the same memory.
//! - **The engine can still be made.** It is made at once before a call that gives up rights
//!   (`chroot`, `setuid`, a filter).
//! - **What isn't counted.** A process without an engine has no slot in the run's table. So its
//!   memory, less than [`SMALL_BYTES`] beside its stack, counts only once the census has seen it.
//! - **A lower limit** reaches a process without an engine at its next call that changes mappings.
use crate::adoption::look::SizeLooks;
use crate::diagnostics::unserved::unserved_later;
use crate::engine::{self, EngineLife};
use crate::mappings::given::gives;
use crate::marks::statics;
use crate::program::{self, LackingEngine, get, open};
use crate::residency::lender::MemoryLender;
use crate::restart::EngineRestart;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use memfold_engine::config::Config;
use memfold_gate::child;
use memfold_os::memory::zone::counts_reservations;
use memfold_os::raw::program_break;
use memfold_os::sync::Mutex;
use memfold_os::thread::process_id;
use memfold_run::member;
use rustix::process::{Resource, getrlimit};

/// A process gets an engine when it has mapped this many bytes, or the limit divided by [`SHARE`]
/// if that is less.
const SMALL_BYTES: usize = 4 << 20;
const SHARE: u64 = 16;

/// The work of the first engine thread.
pub const LIFE: EngineLife = EngineLife {
    create: program::create,
    exists: || get().is_some(),
    begin_as_child: |stats| EngineRestart::of(program::existing()).begin_as_child(stats),
    go_on: |stats| EngineRestart::of(program::existing()).go_on(stats),
    inherit: crate::heir::inherit,
    prepare: crate::threads::raise,
    lend: |places| MemoryLender::of(program::existing()).lend(places),
    end_lending: |places| MemoryLender::of(program::existing()).end_lending(places),
    look: |is_rung| SizeLooks::of(program::existing()).look(is_rung),
};

/// The settings for the engine, and the ID of the process that waits for it.
static WAITING: Mutex<Option<(Config, u32)>> = Mutex::new(None);
/// Whether this process waits for its engine.
static IS_WAITING: AtomicBool = AtomicBool::new(false);
/// Bytes that this process has had or mapped without an engine. What it unmaps stays counted.
static MAPPED: AtomicUsize = AtomicUsize::new(0);
/// The end of the process's heap.
static BREAK: AtomicUsize = AtomicUsize::new(0);

/// Returns whether this process may wait for its engine. It must have one from its start if it is
/// large, if making one may fail, or if the engine has files to make. Such failures are reported
/// before the program begins. The constructor calls it once.
pub fn may_wait(config: &Config) -> bool {
    let is_free = |what| getrlimit(what).current.is_none();
    let is_bounded = !is_free(Resource::As) || !is_free(Resource::Data) || counts_reservations();
    let statics = statics::note();
    MAPPED.store(statics, Relaxed);
    may_wait_with(config, is_bounded, statics)
}

/// Returns [`may_wait`] for a program with `statics` bytes of data. `is_bounded` is whether the
/// address space is limited.
fn may_wait_with(config: &Config, is_bounded: bool, statics: usize) -> bool {
    !is_bounded && config.swap.is_none() && !is_large(config, statics)
}

/// Returns whether a process that has mapped so many bytes must have an engine.
fn is_large(config: &Config, mapped: usize) -> bool {
    mapped >= SMALL_BYTES.min((bound(config) / SHARE) as usize)
}

/// Returns the bytes that the run may use now; `u64::MAX` without a bound.
fn bound(config: &Config) -> u64 {
    let or_none = |bytes: Option<u64>| bytes.unwrap_or(u64::MAX);
    let begun_with = || (or_none(config.limit_bytes), or_none(config.resident_bytes));
    let (limit, resident) = member::given().unwrap_or_else(begun_with);
    limit.min(resident)
}

/// Lets this process wait for its engine until it is large. The constructor calls it.
pub fn wait(config: Config) {
    BREAK.store(program_break(), Relaxed);
    statics::begin(program_break());
    *WAITING.lock() = Some((config, process_id()));
    IS_WAITING.store(true, Relaxed);
}

/// Returns whether this process has no engine and may get one.
pub fn is_waiting() -> bool {
    IS_WAITING.load(Relaxed)
}

/// Makes the engine of a process that is about to be copied, if it is large by now: the limit was
/// lowered, or a child of vfork has made it grow. Otherwise its children would be large too.
pub fn expect_copy() {
    begin_if_large();
}

/// Makes the engine, if this process waits for one and is large.
fn begin_if_large() {
    let mapped_bytes = MAPPED.load(Relaxed);
    if WAITING.lock().as_ref().is_some_and(|(config, _)| is_large(config, mapped_bytes)) {
        begin();
    }
}

/// Begins in the child after a waiting process was copied.
pub fn begin_as_child() {
    member::begin_as_child();
    // SAFETY: this is the only thread, and its parent had no other one, so no thread holds the
    // lock.
    if let Some((_, process)) = unsafe { WAITING.peek_mut() } {
        *process = process_id();
    }
}

/// Returns the bytes of foldable memory that a call adds. `heap_end` is the present end of the
/// heap. Returns `usize::MAX` if only an engine can make the call.
fn growth(nr: usize, args: &[usize; 6], heap_end: usize) -> usize {
    match nr as i64 {
        libc::SYS_mmap => match (args[3] as i32, args[2] as i32 & libc::PROT_WRITE != 0) {
            (flags, _) if flags & libc::MAP_PRIVATE == 0 => 0,
            (flags, false) if flags & libc::MAP_ANONYMOUS == 0 => 0,
            _ => args[1],
        },
        libc::SYS_mprotect | libc::SYS_pkey_mprotect => {
            if args[2] as i32 & libc::PROT_WRITE != 0 {
                args[1]
            } else {
                0
            }
        }
        libc::SYS_mremap => args[2].saturating_sub(args[1]),
        libc::SYS_brk if args[0] == 0 => 0,
        libc::SYS_brk => args[0].saturating_sub(heap_end),
        libc::SYS_munmap | libc::SYS_madvise | libc::SYS_shmat => 0,
        libc::SYS_ioctl if !gives(args[1]) => 0,
        _ => usize::MAX,
    }
}

/// Examines a call that changes mappings before a waiting process makes it. Makes the engine first
/// if the process is large with the call, or if only an engine can make it.
pub fn see(nr: usize, args: &[usize; 6]) {
    let grows = growth(nr, args, BREAK.load(Relaxed));
    if nr as i64 == libc::SYS_ioctl && grows > 0 && child().is_none() {
        // The gate asked for this before there was an engine to hold it.
        statics::keep_named(args[2]);
    }
    if nr as i64 == libc::SYS_brk && args[0] != 0 {
        BREAK.store(args[0], Relaxed);
    }
    let _ = MAPPED
        .fetch_update(Relaxed, Relaxed, |mapped_bytes| Some(mapped_bytes.saturating_add(grows)));
    // A child of vfork takes no lock, because it may be killed. Its parent makes the engine at its
    // own next call if it is needed.
    if child().is_none() {
        begin_if_large();
    }
}

/// Notes a call that changes mappings after a waiting process has made it.
pub fn seen(nr: usize, args: &[usize; 6], made: isize) {
    if is_waiting() && child().is_none() {
        statics::note_call(nr, args, made);
    }
}

/// Returns whether the engine that this process waits for pages by protection; `None` if it waits
/// for none.
pub fn is_by_protection() -> Option<bool> {
    WAITING.lock().as_ref().map(|(config, _)| config.paging.hides())
}

/// Makes this process wait no more. Returns the settings for its engine, if it waited for one.
pub fn give_up() -> Option<Config> {
    let mut start = WAITING.lock();
    if start.as_ref().is_none_or(|(_, process)| *process != process_id()) {
        return None;
    }
    IS_WAITING.store(false, Relaxed);
    member::note_begun();
    start.take().map(|(config, _)| config)
}

/// Makes the engine, if this process waits for one.
pub fn begin() {
    let Some(config) = give_up() else { return };
    match open(&config) {
        Ok(()) => engine::start(config, &LIFE),
        Err(LackingEngine(why)) => unserved_later(format_args!("{why}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn config(limit_mib: u64, resident_mib: Option<u64>) -> Config {
        let mut config = Config::new(8 << 30);
        config.limit_bytes = Some(limit_mib << 20);
        config.resident_bytes = resident_mib.map(|mib| mib << 20);
        config
    }

    fn of(nr: i64, args: [usize; 6]) -> usize {
        growth(nr as usize, &args, 0x5000)
    }

    #[test]
    fn small_process_waits_with_a_part_of_its_limit() {
        let waits = |limit_mib, resident_mib, statics| {
            may_wait_with(&config(limit_mib, resident_mib), false, statics)
        };
        assert!(waits(1024, None, SMALL_BYTES - 1) && !waits(1024, None, SMALL_BYTES));
        assert!(waits(32, None, 2 * MIB - 1) && !waits(32, None, 2 * MIB));
        assert!(waits(1024, Some(16), MIB - 1) && !waits(1024, Some(16), MIB));
        assert!(!waits(1024, None, usize::MAX), "a call that only an engine can make");
    }

    #[test]
    fn engine_that_may_fail_is_made_before_the_program_begins() {
        assert!(!may_wait_with(&config(1024, None), true, 0));
        let mut config = config(1024, None);
        config.swap = Some("/var/tmp".into());
        assert!(!may_wait_with(&config, false, 0));
    }

    #[test]
    fn mapping_grows_a_process_if_it_may_come_to_be_folded() {
        let map = |access: i32, flags: i32| {
            of(libc::SYS_mmap, [0, MIB, access as usize, flags as usize, 0, 0])
        };
        let (anonymous, write) = (libc::MAP_ANONYMOUS, libc::PROT_READ | libc::PROT_WRITE);
        assert_eq!(map(write, libc::MAP_PRIVATE | anonymous), MIB);
        // Reserved memory is written to later.
        assert_eq!(map(libc::PROT_NONE, libc::MAP_PRIVATE | anonymous), MIB);
        assert_eq!(map(write, libc::MAP_PRIVATE), MIB, "written pages of a file are its own");
        assert_eq!(map(libc::PROT_READ, libc::MAP_PRIVATE), 0);
        assert_eq!(map(write, libc::MAP_SHARED | anonymous), 0);
    }

    #[test]
    fn growth_is_what_a_call_adds() {
        assert_eq!(of(libc::SYS_mremap, [0x1000, MIB, 3 * MIB, 0, 0, 0]), 2 * MIB);
        assert_eq!(of(libc::SYS_mremap, [0x1000, MIB, 0x1000, 0, 0, 0]), 0);
        assert_eq!(of(libc::SYS_brk, [0x9000, 0, 0, 0, 0, 0]), 0x4000);
        assert_eq!(of(libc::SYS_brk, [0x1000, 0, 0, 0, 0, 0]), 0);
        assert_eq!(of(libc::SYS_brk, [0; 6]), 0, "it only asks");
        let protect = |access: i32| of(libc::SYS_mprotect, [0, MIB, access as usize, 0, 0, 0]);
        assert_eq!([protect(libc::PROT_READ), protect(libc::PROT_WRITE)], [0, MIB]);
        for nr in [libc::SYS_munmap, libc::SYS_madvise, libc::SYS_shmat] {
            assert_eq!(of(nr, [0x1000, MIB, 0, 0, 0, 0]), 0);
        }
    }

    #[test]
    fn call_that_only_an_engine_can_do_needs_one_at_once() {
        const UFFDIO_REGISTER: usize = 0xc020_aa00;
        assert_eq!(of(libc::SYS_ioctl, [3, UFFDIO_REGISTER, 0, 0, 0, 0]), usize::MAX);
        assert_eq!(of(libc::SYS_ioctl, [3, 0x5401, 0, 0, 0, 0]), 0);
        for nr in [libc::SYS_mlock, libc::SYS_mlockall, libc::SYS_io_uring_setup] {
            assert_eq!(of(nr, [0; 6]), usize::MAX);
        }
    }
}
