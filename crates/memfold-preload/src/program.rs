//! The program's memory: which of it to take under management, and when.
use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::ControlFlow::Continue;
use core::sync::atomic::{AtomicBool, AtomicPtr, Ordering::Relaxed, Ordering::SeqCst};
use memfold::config::Config;
use memfold::delivery::background::{self, Start};
use memfold::delivery::program::{NotCopied, Watcher};
use memfold::pager::{Pager, Parts, StartError, StatsPlace};
use memfold::stats::Stats;
use memfold_sys::maps::pagemap::Pagemap;
use memfold_sys::maps::{Area, each_area, each_detailed, flag, private_anonymous_at};
use memfold_sys::memory::zone::{
    freeze_list, locked_bytes, overlaps_own, set_inherited, unfreeze_list,
};
use memfold_sys::raw::{program_break, set_signals_blocked};
use memfold_sys::sync::Mutex;
use memfold_sys::thread::bare;
use memfold_sys::thread::{cpus, thread_id};
use memfold_sys::uffd::bin::Bin;
use memfold_sys::uffd::space::UffdSpace;
use memfold_sys::uffd::{Uffd, feature};
use memfold_sys::units::PAGE_SIZE;

use crate::engine::Life;
use crate::heap::arena;
use crate::proc;
use crate::say;
use crate::say::addresses::Remedy;
use crate::say::unserved::unserved_later;
use crate::share::{Level, Scale, Seen};

/// Unmanaged memory must have grown by this before the map is read again.
const GROWTH_BYTES: u64 = 4 << 20;
/// The same while the program is past its bounds.
const GROWTH_PAST_BYTES: u64 = 1 << 20;
/// The engine's threads start at one part in this many of what the program may have before anything
/// is taken: on busy CPUs that takes a while, in which a program that grows fast would go past its
/// limit.
pub const START_SHARE: u64 = 2;
/// Time between looks at the program's size, nanoseconds.
pub const LOOK_NS: i64 = 5_000_000;
/// The same while the program grows and isn't far from its bounds.
pub const LOOK_SOON_NS: i64 = 1_000_000;
/// The same while it is past them.
pub const LOOK_PAST_NS: i64 = 250_000;
/// Engine threads beside the workers and a handler for each CPU: those of the swap file, and single
/// ones.
const MORE_THREADS: usize = 10;
/// Areas smaller than this are left alone unless they continue a managed one.
pub const SMALL_BYTES: usize = 64 << 10;
/// Properties that keep an area out of management for good.
const NEVER: u32 = flag::LOCKED
    | flag::DONT_FORK
    | flag::WIPE_ON_FORK
    | flag::IO
    | flag::PFN
    | flag::MIXED
    | flag::HUGETLB
    | flag::GROWS_DOWN
    | flag::DROPPABLE
    | flag::SHADOW_STACK
    | flag::SEALED
    | flag::DONT_DUMP
    | flag::MERGEABLE;

/// The program under management.
pub struct Program {
    /// Its engine.
    pub pager: Arc<Pager>,
    uffd: Arc<Uffd>,
    bin: Arc<Bin>,
    pagemap: Arc<Pagemap>,
    watcher: &'static Watcher,
    scale: Scale,
    config: Config,
    /// Of the first engine thread before it raised itself: of all the others.
    nice: i32,
    /// Never adopted: what was there when the constructor ended, and thread stacks.
    excluded: Mutex<Vec<(usize, usize)>>,
    /// Held while adopting; a fork holds it too.
    adopting: Mutex<State>,
    /// The program has marked memory as never to be folded: see [`Program::release`].
    marked: AtomicBool,
    /// It has taken a mark off: there may be something to adopt though it hasn't grown.
    unmarked: AtomicBool,
}

#[derive(Default)]
struct State {
    /// Engine threads that are still to be started, the next one last; `None` before the first try.
    pending: Option<Vec<Start>>,
    /// Near enough to the limit: what it has is being taken.
    begun: bool,
    /// It was told that they can't be started.
    told: bool,
    /// Everything there was has been taken once.
    adopted: bool,
    unmanaged_at_last_read: u64,
    level: Level,
}

impl State {
    /// Whether all engine threads run.
    fn has_threads(&self) -> bool {
        self.pending.as_ref().is_some_and(Vec::is_empty)
    }
}

static PROGRAM: AtomicPtr<Program> = AtomicPtr::new(core::ptr::null_mut());

/// The program, once it is under management.
pub fn get() -> Option<&'static Program> {
    // SAFETY: the pointer is null or a leaked box.
    unsafe { PROGRAM.load(SeqCst).as_ref() }
}

/// Forgets the program: a child of fork has all its memory and no engine.
pub fn abandon() {
    PROGRAM.store(core::ptr::null_mut(), SeqCst);
}

/// Makes the engine and starts its threads: called by the first of them.
///
/// # Errors
/// One line: what this process lacks.
pub fn create(config: Config, stats: &'static Stats) -> Result<&'static Program, String> {
    let uffd = Arc::new(Uffd::open(feature::HANDLERS, false).map_err(|e| format!("{e}"))?);
    let pagemap = Arc::new(Pagemap::open().map_err(|e| format!("/proc/self/pagemap: {e}"))?);
    let bin = Arc::new(Bin::new(pagemap.clone()).map_err(|e| format!("{e}"))?);
    let parts = Parts {
        space: Box::new(UffdSpace::with_bin(uffd.clone(), pagemap.clone(), bin.clone())),
        has_move: true,
        has_events: true,
        reports_limit: false,
        stats: StatsPlace::shared(stats),
        cpus: cpus(),
        disk: None,
        remote: None,
        errands: None,
    };
    let pager = match Pager::new(config.clone(), parts) {
        Ok(pager) => Arc::new(pager),
        Err(why @ StartError::AddressSpace(_)) => return Err(format!("{why}{Remedy}")),
        Err(why) => return Err(format!("{why}")),
    };
    register_frames(&pager, &uffd)?;
    bare::reserve(config.worker_count(pager.cpus()) + pager.cpus() + MORE_THREADS)
        .map_err(|e| format!("no address space: {e}"))?;
    let opened = Watcher::new(&pager, &uffd, &pagemap, area_of)
        .and_then(|watcher| Scale::open(config.clone()).map(|scale| (watcher, scale)));
    let (watcher, scale) = opened.map_err(|e| format!("starting the engine: {e}"))?;
    let program: &'static Program = Box::leak(Box::new(Program {
        pager,
        uffd,
        bin,
        pagemap,
        watcher,
        scale,
        config,
        nice: own_nice(),
        excluded: Mutex::new(Vec::new()),
        adopting: Mutex::new(State::default()),
        marked: AtomicBool::new(false),
        unmarked: AtomicBool::new(false),
    }));
    PROGRAM.store(program as *const Program as *mut Program, SeqCst);
    // What the C library has allocated by now is never adopted.
    program.exclude_all_present();
    Ok(program)
}

/// What the first engine thread raises itself to where it may: a program grows while it waits for a
/// processor.
const NICE: i32 = -20;

pub fn own_nice() -> i32 {
    rustix::process::getpriority_process(Some(rustix::thread::gettid())).unwrap_or(0)
}

fn set_own_nice(nice: i32) {
    // Not fatal: less than before needs a privilege.
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), nice);
}

/// Of the first engine thread.
pub const LIFE: Life = Life {
    create: |config, stats| create(config, stats).map(drop),
    exists: || get().is_some(),
    begin_as_child: |stats| existing().begin_as_child(stats),
    prepare: raise,
    look: || existing().look(),
};

fn existing() -> &'static Program {
    get().expect("it has been created")
}

/// Starts engine threads, the last one first, at the program's `nice`; the caller is the first of
/// them. Those that can't be had stay in `pending`, which is told once, if the program is past its
/// limit by then.
pub fn start_pending(pending: &mut Vec<Start>, nice: i32, is_past: bool, told: &mut bool) {
    set_own_nice(nice);
    let mut result = Ok(());
    while let (Ok(()), Some(next)) = (result, pending.last()) {
        result = bare::start(next.name, next.main, next.arg);
        if result.is_ok() {
            pending.pop();
        }
    }
    set_own_nice(NICE);
    if let (Err(e), true, false) = (result, is_past, *told) {
        *told = true;
        unserved_later(format_args!("starting engine threads: {e}; it is tried again"));
    }
}

/// Lets the calling thread, the first of the engine, run before all others.
pub fn raise() {
    set_own_nice(NICE);
}

fn register_frames(pager: &Pager, uffd: &Uffd) -> Result<(), String> {
    let (start, len) = pager.frames_zone();
    // SAFETY: the engine never touches a frame that is empty.
    unsafe { uffd.register(start, len, false) }.map_err(|e| format!("registering frames: {e}"))
}

/// The private anonymous area that holds an address at which a fault was, outside of what is
/// managed.
fn area_of(addr: usize) -> Option<(usize, usize)> {
    if overlaps_own(addr, addr + 1) {
        say::die(format_args!(
            "the engine has touched a frame of its own that is empty, at {addr:#x}"
        ));
    }
    private_anonymous_at(addr)
}

impl Program {
    /// In a child of fork, at rest: puts it under management with a userfaultfd and threads of its
    /// own, where the parent was. Called by the first engine thread, while no other thread of the
    /// child runs on. Ends the process with a message if that can't be done.
    pub fn begin_as_child(&self, stats: &'static Stats) {
        // Before anybody asks which pages are there: the parent's map would tell of the parent's.
        if let Err(e) = self.pagemap.reopen() {
            say::die(format_args!("in a child of fork: /proc/self/pagemap: {e}"));
        }
        if let Err(e) = self.uffd.reopen().and_then(|()| self.bin.reopen()) {
            say::die(format_args!("in a child of fork: {e}"));
        }
        // SAFETY: the thread that forked holds the lock, and waits for this one.
        let state = unsafe { self.adopting.peek_mut() };
        // Read before the parent's figures are left to it.
        let measured = self.scale.begin_as_child(&self.pager, &mut state.level);
        self.pager.begin_as_child(stats);
        if let Err(why) = register_frames(&self.pager, &self.uffd) {
            say::die(format_args!("in a child of fork: {why}"));
        }
        let stop = |why: core::fmt::Arguments| -> ! {
            say::die(format_args!("a child of fork was stopped: {why}"))
        };
        let begun =
            measured.map_err(NotCopied::Refused).and_then(|()| self.watcher.begin_as_child());
        match begun.and_then(|()| Ok(self.watcher.find_stray()?)) {
            Ok(None) => {}
            Ok(Some(at)) => stop(format_args!(
                "before memfold could serve it, it read zeros at {at:#x} in place of folded data"
            )),
            Err(NotCopied::Refused(e)) => {
                stop(format_args!("putting it under management failed: {e}"))
            }
            Err(NotCopied::Moving(what)) => stop(format_args!(
                "{what} by other threads when it was made, and what it has of that can't be told"
            )),
        }
        // SAFETY: the caller is the first engine thread of a child of fork, and nobody else calls
        // this.
        if let Err(e) = unsafe { bare::restart_others() } {
            say::die(format_args!("starting engine threads in a child of fork: {e}"));
        }
        // SAFETY: the parent came to rest before it forked.
        unsafe { self.end_quiescence() };
    }

    /// Brings the engine to rest until [`Program::end_quiescence`], for a fork by the calling
    /// thread, which is `alone` or not. No adoption is under way: see [`Program::pause`]. Ends the
    /// process with a message if there is no memory for it.
    pub fn quiesce(&self, alone: bool) {
        let forker = if alone { 0 } else { thread_id() };
        if let Err(e) = self.pager.quiesce(forker) {
            say::die(format_args!("fork: no memory for what other threads do meanwhile: {e}"));
        }
    }

    /// As [`Watcher::lend_to_children`]. Ends the process with a message if that can't be done.
    pub fn lend_to_children(&self, last: bool) -> bool {
        match self.watcher.lend_to_children(last) {
            Ok(still) => still,
            Err(e) => say::die(format_args!("fork: /proc/self/pagemap: {e}")),
        }
    }

    /// The last part of coming to rest: the copy may be made from now on. The caller must not
    /// allocate until [`Program::allow_allocation`].
    pub fn begin_copying(&self) {
        core::mem::forget(self.excluded.lock());
        freeze_list();
        arena().freeze();
        self.pager.begin_copying();
    }

    /// Ends [`Program::quiesce`]. Called by an engine thread.
    ///
    /// # Safety
    /// - `quiesce` has returned, in this process or in the parent that it is a copy of, and this is
    ///   called once for it.
    pub unsafe fn end_quiescence(&self) {
        // SAFETY: by the caller's promise; and the thread that forks has the lock, and waits for
        // this one.
        unsafe {
            self.watcher.end_quiescence();
            self.adopting.peek_mut().level.sharing = true;
        }
    }

    /// The first part of its end: there may be allocations again, and requests to background
    /// threads.
    ///
    /// # Safety
    /// - `quiesce` has returned, in this process or in the parent that it is a copy of, and this is
    ///   called once for it.
    pub unsafe fn allow_allocation(&self) {
        // SAFETY: by the caller's promise.
        unsafe {
            arena().unfreeze();
            unfreeze_list();
            self.excluded.unlock();
            self.pager.allow_requests();
        }
    }

    /// Keeps `[start, end)` out of management.
    pub fn exclude(&self, start: usize, end: usize) {
        let mut excluded = self.excluded.lock();
        // The C library gives the stack of a thread that has ended to the next one.
        if !excluded.iter().any(|r| r.0 <= start && end <= r.1) {
            excluded.push((start, end));
        }
    }

    fn exclude_all_present(&self) {
        let mut excluded = self.excluded.lock();
        let _ = each_area(|area| {
            if area.is_private_anonymous() && !overlaps_own(area.start, area.end) {
                excluded.push((area.start, area.end));
            }
            Continue(())
        });
    }

    /// No adoption until [`Program::resume`].
    pub fn pause(&self) {
        core::mem::forget(self.adopting.lock());
    }

    /// Ends [`Program::pause`].
    ///
    /// # Safety
    /// - `pause` has returned, and this is called once for it.
    pub unsafe fn resume(&self) {
        // SAFETY: `pause` forgot the guard.
        unsafe { self.adopting.unlock() };
    }

    /// Makes a call before or after an adoption or a fork of another thread, not beside one.
    pub fn paused<T>(&self, call: impl FnOnce() -> T) -> T {
        // A handler of a signal that got in between could wait for what this thread holds.
        let blocked = set_signals_blocked(u64::MAX);
        self.pause();
        let result = call();
        // SAFETY: paused above.
        unsafe { self.resume() };
        set_signals_blocked(blocked);
        result
    }

    /// Whether any of the program's memory has come under management.
    pub fn has_adopted(&self) -> bool {
        self.watcher.has_begun()
    }

    /// Whether what the program keeps out of core dumps is folded all the same.
    pub fn folds_dont_dump(&self) -> bool {
        self.config.fold_dont_dump
    }

    /// As [`Watcher::leave_to_children`].
    pub fn leave_to_children(&self) {
        self.watcher.leave_to_children();
    }

    /// As [`Watcher::keep_from_children`].
    pub fn keep_from_children(&self) {
        self.watcher.keep_from_children();
    }

    /// From now on the properties of every area are read before it is adopted: the program marks
    /// some.
    pub fn note_marks(&self) {
        self.marked.store(true, Relaxed);
    }

    /// The next look adopts what is not marked any more.
    pub fn note_unmarked(&self) {
        self.unmarked.store(true, Relaxed);
    }

    /// Locks what the program has in memory or may have there, none of it managed, and brings it
    /// there: what is left of an mlockall that has marked it.
    pub fn lock_all(&self) {
        let mut found = Vec::new();
        let _ = each_area(|area| {
            if !overlaps_own(area.start, area.end) {
                found.push((area.start, area.end));
            }
            Continue(())
        });
        for (start, end) in found {
            // SAFETY: changes no byte. As mlockall, it passes over what can't be locked.
            let _ = unsafe { rustix::mm::mlock(start as *mut _, end - start) };
        }
    }

    /// Brings `[start, end)` home and out of management, as it has a mark of [`NEVER`] now. With
    /// `inherited`, children of fork get it again. Called by an engine thread, while adoption is
    /// paused.
    pub fn release(&self, start: usize, end: usize, inherited: bool) {
        self.watcher.release(start, end, inherited);
        // What is registered and not managed would be taken at its next fault.
        let _ = each_detailed(|area, about| {
            let (start, end) = (area.start.max(start), area.end.min(end));
            if start < end && about.has(flag::UFFD_MISSING) && !overlaps_own(start, end) {
                if inherited {
                    set_inherited(start, end, true);
                }
                let _ = self.uffd.unregister(start, end - start);
            }
            Continue(())
        });
    }

    /// Looks at the program's size; near the limit, takes what it has allocated. Not while adoption
    /// is paused. Returns the time until the next look, nanoseconds.
    pub fn look(&self) -> i64 {
        let Some(mut state) = self.adopting.try_lock() else { return LOOK_NS };
        let Some(seen) = self.scale.look(&self.pager, &mut state.level) else { return LOOK_NS };
        let Seen { before, mut unmanaged, slower } = seen;
        let anonymous = state.level.anonymous;
        let max = self.pager.bound_bytes();
        let past = self.pager.excess_bytes() > 0;
        let (step, next) = match anonymous > max / 2 && anonymous > before {
            _ if past => (GROWTH_PAST_BYTES, LOOK_PAST_NS * slower),
            true => (GROWTH_BYTES, LOOK_SOON_NS),
            false => (GROWTH_BYTES, LOOK_NS * slower),
        };
        let begin = max / 100 * self.config.adopt_percent as u64;
        if !state.has_threads() && anonymous >= begin / START_SHARE {
            self.start_threads(&mut state, anonymous > max);
        }
        if !state.begun && anonymous < begin || !state.has_threads() {
            return next;
        }
        if self.unmarked.swap(false, Relaxed) {
            state.unmanaged_at_last_read = 0;
        }
        if !state.begun || unmanaged >= state.unmanaged_at_last_read + step.min(max / 32) {
            state.begun = true;
            if self.adopt(!state.adopted) {
                state.adopted = true;
                let managed = self.pager.own_bytes() + self.pager.mapped_bytes();
                let anonymous = self.scale.anonymous_bytes().unwrap_or(anonymous);
                unmanaged = anonymous.saturating_sub(managed);
                state.unmanaged_at_last_read = unmanaged;
                self.pager.set_unmanaged_bytes(unmanaged);
                match unmanaged > max {
                    // Why is said where it is found not to suit.
                    true if proc::merges() => {
                        memfold::stats::add(&self.pager.stats().over_limit, 1)
                    }
                    true => self.pager.unmanaged_past_the_limit(),
                    false => {}
                }
            }
        }
        state.unmanaged_at_last_read = state.unmanaged_at_last_read.min(unmanaged);
        next
    }

    /// Starts all engine threads but the first, which calls this: most processes of a run never
    /// come near the limit. Those that can't be had now are tried again at the next look; it is
    /// told once, if meanwhile the program is past its limit.
    fn start_threads(&self, state: &mut State, is_past: bool) {
        let pending = state.pending.get_or_insert_with(|| {
            let workers = self.config.worker_count(self.pager.cpus());
            let mut all = background::threads(&self.pager, workers);
            all.extend(self.watcher.threads());
            all.reverse();
            all
        });
        start_pending(pending, self.nice, is_past, &mut state.told);
    }

    /// Takes every suitable area that isn't managed yet. Returns whether that was possible.
    fn adopt(&self, first: bool) -> bool {
        let candidates = self.candidates(first);
        if candidates.is_empty() {
            if proc::merges() {
                say::warn(format_args!("{}", proc::MERGES));
            }
            return true;
        }
        let again = core::cell::OnceCell::new();
        self.watcher.adopt(&candidates, &mut |start, end| {
            let now: &Vec<(usize, usize)> = again.get_or_init(|| self.candidates(false));
            now.iter().any(|r| r.0 <= start && end <= r.1)
        })
    }

    /// Private anonymous areas, joined where they touch, without what is excluded. `details` asks
    /// the kernel for the properties that only smaps tells, which costs a walk of the page table.
    fn candidates(&self, details: bool) -> Vec<(usize, usize)> {
        let mut found: Vec<(usize, usize)> = Vec::new();
        let mut heap_end = 0;
        let mut add = |area: &Area, allowed: bool| {
            let suits = allowed
                && area.is_private_anonymous()
                && area.readable
                && area.writable
                && !area.executable
                && !area.is_stack()
                && !area.name().starts_with(b"[v")
                && !overlaps_own(area.start, area.end);
            if area.name() == b"[heap]" {
                heap_end = if suits { area.end } else { 0 };
            }
            if !suits {
                return;
            }
            match found.last_mut() {
                // An area that has grown while the map was read is told of twice.
                Some(last) if last.1 >= area.start => last.1 = last.1.max(area.end),
                _ => found.push((area.start, area.end)),
            }
        };
        let never = if self.config.fold_dont_dump { NEVER & !flag::DONT_DUMP } else { NEVER };
        let is_locked = proc::locked_bytes() > locked_bytes() as u64;
        let details = details || self.marked.load(Relaxed) || is_locked || proc::merges();
        let done = if details {
            each_detailed(|area, about| {
                // What is registered but could not be taken yet has this mark from the engine; the
                // program's own would have ended the registration.
                let engines = if about.has(flag::UFFD_MISSING) { flag::DONT_FORK } else { 0 };
                add(area, !about.has(never & !engines));
                Continue(())
            })
        } else {
            each_area(|area| {
                add(area, true);
                Continue(())
            })
        };
        if done.is_err() {
            return Vec::new();
        }
        // A heap that grows fast has grown since: its newest page is the one whose fault makes the
        // program wait.
        if let Some(heap) = found.iter_mut().find(|r| r.1 == heap_end) {
            heap.1 = heap.1.max(program_break().next_multiple_of(PAGE_SIZE));
        }
        self.without_excluded(found)
    }

    fn without_excluded(&self, found: Vec<(usize, usize)>) -> Vec<(usize, usize)> {
        let mut excluded = self.excluded.lock().clone();
        excluded.sort_unstable();
        let mut out = Vec::new();
        for (mut start, end) in found {
            for &(s, e) in excluded.iter() {
                if s >= end || e <= start {
                    continue;
                }
                if s > start {
                    out.push((start, s));
                }
                start = start.max(e);
            }
            if start < end {
                out.push((start, end));
            }
        }
        out.retain(|r| {
            r.1 - r.0 >= SMALL_BYTES || self.pager.manages(r.0 - 1) || self.pager.manages(r.1)
        });
        out
    }
}
