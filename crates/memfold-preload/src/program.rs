//! The program's memory: which of it to take under management, and when.
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::ControlFlow::Continue;
use core::sync::atomic::{AtomicPtr, Ordering::SeqCst};
use memfold::config::Config;
use memfold::pager::{Pager, Parts, StatsPlace};
use memfold::stats::Stats;
use memfold::watch::Watcher;
use memfold_sys::maps::{Area, each_area, each_detailed, flag};
use memfold_sys::space::UffdSpace;
use memfold_sys::sync::Mutex;
use memfold_sys::thread::{Thread, cpus, sleep_ns};
use memfold_sys::uffd::{Uffd, feature};
use memfold_sys::zone::overlaps_own;

use crate::proc::Statm;
use crate::say;

/// Time between looks at the program's size.
const LOOK_NS: u64 = 5_000_000;
/// Unmanaged memory must have grown by this before the map is read again.
const GROWTH_BYTES: u64 = 4 << 20;
/// Areas smaller than this are left alone unless they continue a managed one.
const SMALL_BYTES: usize = 64 << 10;
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
    watcher: AtomicPtr<Watcher>,
    config: Config,
    /// Never adopted: what was there when the constructor ended, and thread stacks.
    excluded: Mutex<Vec<(usize, usize)>>,
    /// Held while adopting; a fork holds it too.
    adopting: Mutex<State>,
}

#[derive(Default)]
struct State {
    begun: bool,
    unmanaged_at_last_read: u64,
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

/// Starts the engine and its threads. Ends the process with a message if that can't be done.
pub fn start(config: Config, stats: &'static Stats) {
    let features =
        feature::MOVE | feature::THREAD_ID | feature::EVENT_REMAP | feature::EVENT_REMOVE | feature::EVENT_UNMAP;
    let uffd = match Uffd::open(features, false) {
        Ok(uffd) => Arc::new(uffd),
        Err(e) => say::die(format_args!("{e}")),
    };
    let parts = Parts {
        space: Box::new(UffdSpace::new(uffd.clone())),
        has_move: true,
        has_events: true,
        stats: StatsPlace::Shared(stats),
        cpus: cpus(),
        disk: None,
    };
    let workers = if config.workers == 0 { parts.cpus } else { config.workers };
    let pager = match Pager::new(config.clone(), parts) {
        Ok(pager) => Arc::new(pager),
        Err(why) => say::die(format_args!("{why}")),
    };
    let (start, len) = pager.frames_zone();
    // SAFETY: the engine never touches a frame that is empty.
    if let Err(e) = unsafe { uffd.register(start, len, false) } {
        say::die(format_args!("registering frames: {e}"));
    }
    let program: &'static Program = Box::leak(Box::new(Program {
        pager: pager.clone(),
        watcher: AtomicPtr::new(core::ptr::null_mut()),
        config,
        excluded: Mutex::new(Vec::new()),
        adopting: Mutex::new(State::default()),
    }));
    PROGRAM.store(program as *const Program as *mut Program, SeqCst);
    let started = memfold::worker::start(&pager, workers)
        .and_then(|_| Watcher::start(&pager, &uffd, area_of))
        .and_then(|watcher| {
            program.watcher.store(watcher as *const Watcher as *mut Watcher, SeqCst);
            Thread::start(c"memfold-adopt", None, adopt_forever, program as *const Program as usize)
        });
    if let Err(e) = started {
        say::die(format_args!("starting engine threads: {e}"));
    }
    // What the engine's threads and the C library have allocated by now is never adopted.
    program.exclude_all_present();
}

fn adopt_forever(program: usize) {
    // SAFETY: `start` leaked the program.
    let program = unsafe { &*(program as *const Program) };
    let Ok(statm) = Statm::open() else { return };
    loop {
        program.look(&statm);
        sleep_ns(LOOK_NS);
    }
}

/// The private anonymous area that holds an address at which a fault was, outside of what is managed.
fn area_of(addr: usize) -> Option<(usize, usize)> {
    if overlaps_own(addr, addr + 1) {
        say::die(format_args!("the engine has touched a frame of its own that is empty, at {addr:#x}"));
    }
    let mut found = None;
    let _ = each_area(|area| {
        if area.start <= addr && addr < area.end && area.is_private_anonymous() {
            found = Some((area.start, area.end));
        }
        Continue(())
    });
    found
}

impl Program {
    fn watcher(&self) -> Option<&'static Watcher> {
        // SAFETY: the pointer is null or a leaked box.
        unsafe { self.watcher.load(SeqCst).as_ref() }
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

    /// Looks at the program's size; near the limit, takes what it has allocated.
    fn look(&self, statm: &Statm) {
        let mut state = self.adopting.lock();
        let Some(anonymous) = statm.anonymous_bytes() else { return };
        let managed = self.pager.own_bytes() + self.pager.mapped_bytes();
        let unmanaged = anonymous.saturating_sub(managed);
        self.pager.publish();
        let max = self.config.resident_max_bytes();
        if !state.begun && anonymous < max / 100 * self.config.adopt_percent as u64 {
            return;
        }
        if !state.begun || unmanaged >= state.unmanaged_at_last_read + GROWTH_BYTES.min(max / 32) {
            let first = !state.begun;
            state.begun = true;
            if self.adopt(first) {
                let managed = self.pager.own_bytes() + self.pager.mapped_bytes();
                let anonymous = statm.anonymous_bytes().unwrap_or(anonymous);
                state.unmanaged_at_last_read = anonymous.saturating_sub(managed);
            }
        }
        state.unmanaged_at_last_read = state.unmanaged_at_last_read.min(unmanaged);
        self.pager.set_unmanaged_bytes(unmanaged);
    }

    /// Takes every suitable area that isn't managed yet. Returns whether that was possible.
    fn adopt(&self, first: bool) -> bool {
        let Some(watcher) = self.watcher() else { return false };
        let candidates = self.candidates(first);
        if candidates.is_empty() {
            return true;
        }
        let again = core::cell::OnceCell::new();
        watcher.adopt(&candidates, &mut |start, end| {
            let now: &Vec<(usize, usize)> = again.get_or_init(|| self.candidates(false));
            now.iter().any(|r| r.0 <= start && end <= r.1)
        })
    }

    /// Private anonymous areas, joined where they touch, without what is excluded. `details` asks the kernel for the
    /// properties that only smaps tells, which costs a walk of the page table.
    fn candidates(&self, details: bool) -> Vec<(usize, usize)> {
        let mut found: Vec<(usize, usize)> = Vec::new();
        let mut add = |area: &Area| {
            let suits = area.is_private_anonymous()
                && area.readable
                && area.writable
                && !area.executable
                && !area.is_stack()
                && !area.name().starts_with(b"[v")
                && !overlaps_own(area.start, area.end);
            if !suits {
                return;
            }
            match found.last_mut() {
                Some(last) if last.1 == area.start => last.1 = area.end,
                _ => found.push((area.start, area.end)),
            }
        };
        let done = if details || crate::proc::locked_bytes() > 0 {
            each_detailed(|area, about| {
                if !about.has(NEVER) {
                    add(area);
                }
                Continue(())
            })
        } else {
            each_area(|area| {
                add(area);
                Continue(())
            })
        };
        if done.is_err() {
            return Vec::new();
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
        out.retain(|r| r.1 - r.0 >= SMALL_BYTES || self.pager.manages(r.0 - 1) || self.pager.manages(r.1));
        out
    }
}
