//! The program under management by the gate: its engine, and how it begins.
use super::paging::Paging;
use super::ranges::{Ranges, without};
use super::threads::ring;
use crate::engine;
use crate::heap::arena;
use crate::proc;
use crate::say;
use crate::say::addresses::Remedy;
use crate::share::{Level, Scale};
use crate::slots;
use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::ControlFlow::Continue;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering::SeqCst};
use memfold::config::Config;
use memfold::delivery::background::Start;
use memfold::known::Known;
use memfold::pager::{Pager, Parts, StartError, StatsPlace, open_remote};
use memfold::stats::Stats;
use memfold_gate::{child, hand_over};
use memfold_swap::disk::file_disk::{FileDisk, FileDiskOptions};
use memfold_swap::remote::socket::SocketRemote;
use memfold_sys::Errno;
use memfold_sys::maps::copied::CopyMark;
use memfold_sys::maps::lookup::Maps;
use memfold_sys::maps::pagemap::Pagemap;
use memfold_sys::maps::{Smaps, each_area, flag};
use memfold_sys::memory::zone::{freeze_list, overlaps_own, unfreeze_list};
use memfold_sys::sync::Mutex;
use memfold_sys::thread::errands::{Errands, Handed};
use memfold_sys::thread::{bare, cpus};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::process::{Resource, getrlimit};

/// Engine threads beside the workers.
const MORE_THREADS: usize = 10;
/// The numbers of the engine's descriptors: from here on, or from this much below the limit.
const NUMBERS_FROM: u64 = 992;
const NUMBERS: u64 = 32;

/// What keeps memory from being managed; or, one of them, from children.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Mark {
    /// It was there at the start; a stack; what the gate reports.
    Own,
    /// Locked in memory.
    Locked,
    /// Not for children: managed, and gone in them.
    DontFork,
    /// Zeros for children.
    Wiped,
    /// Not for dumps.
    DontDump,
    /// Open to merging.
    Mergeable,
    /// Anything else that smaps tells.
    Other,
}

/// Every mark.
pub const MARKS: [Mark; 7] = [
    Mark::Own,
    Mark::Locked,
    Mark::DontFork,
    Mark::Wiped,
    Mark::DontDump,
    Mark::Mergeable,
    Mark::Other,
];

/// Marks by what smaps says.
pub const FLAGS: [(u32, Mark); 6] = [
    (flag::LOCKED, Mark::Locked),
    (flag::DONT_FORK, Mark::DontFork),
    (flag::WIPE_ON_FORK, Mark::Wiped),
    (flag::DONT_DUMP, Mark::DontDump),
    (flag::MERGEABLE, Mark::Mergeable),
    (
        flag::IO
            | flag::PFN
            | flag::MIXED
            | flag::HUGETLB
            | flag::GROWS_DOWN
            | flag::DROPPABLE
            | flag::SHADOW_STACK
            | flag::SEALED
            | flag::UFFD_MISSING
            | flag::UFFD_PROTECT,
        Mark::Other,
    ),
];

/// What changes with the program's mappings.
#[derive(Default)]
pub struct State {
    /// By [`Mark`].
    never: [Ranges; MARKS.len()],
    /// To be taken with what the program maps next: see [`Gated::adopt_later`].
    pub late: Ranges,
    /// What is mapped from now on is locked.
    pub locks_future: bool,
    /// The kernel may merge equal pages of all memory.
    pub merges: bool,
    /// Tasks in this memory that are traced by their own wish: see [`Gated::keep_home`].
    pub traced: u32,
    /// The program serves some of its memory by a userfaultfd of its own.
    pub has_userfault: bool,
    /// Calls that are being made apart.
    apart: Vec<Pending>,
    /// Engine threads that are still to be started, the next one last; `None` before the first try.
    pub pending: Option<Vec<Start>>,
    /// It was told that they can't be started.
    pub told: bool,
    /// Looks at which the limit could not be kept.
    pub past_looks: u32,
    /// It was reported that the limit can't be kept.
    pub told_limit: bool,
    /// The process's size.
    pub level: Level,
    /// So much more has been mapped since it was looked at, bytes.
    pub mapped_since: usize,
}

impl State {
    /// The memory with a mark.
    pub fn marked(&mut self, mark: Mark) -> &mut Ranges {
        &mut self.never[mark as usize]
    }

    /// Something else is in a range: what a call that is made apart has found there is gone.
    pub fn note_new(&mut self, range: &Range<usize>) {
        self.apart.iter_mut().for_each(|pending| pending.new_since.add(range.clone()));
    }

    /// The call apart of a child.
    pub fn apart_of(&self, child: usize) -> Option<Apart> {
        let found = self.apart.iter().find(|pending| pending.child == Some(child))?;
        Some(Apart(found.number))
    }

    /// Children that the process is a copy of had them.
    pub fn forget_apart(&mut self) {
        self.apart.clear();
    }

    /// What of `parts` may be managed.
    pub fn unmarked(&self, parts: Vec<Range<usize>>) -> Vec<Range<usize>> {
        let never = MARKS.iter().filter(|mark| **mark != Mark::DontFork);
        never.fold(parts, |parts, mark| self.never[*mark as usize].cut_out_of(parts))
    }

    /// A range is something else from now on.
    pub fn forget(&mut self, range: &Range<usize>) {
        self.never.iter_mut().for_each(|never| never.remove(range));
    }

    /// What has which mark in a range.
    fn marks_in(&self, range: &Range<usize>) -> Vec<(Mark, Range<usize>)> {
        let of = |mark: Mark| self.never[mark as usize].within(range).into_iter();
        MARKS.into_iter().flat_map(|mark| of(mark).map(move |part| (mark, part))).collect()
    }

    /// What mremap adds to memory is marked as that is.
    pub fn extend(&mut self, before: &Range<usize>, added: Range<usize>) {
        let last = before.end.saturating_sub(1).max(before.start)..before.end;
        for mark in MARKS.into_iter().filter(|mark| *mark != Mark::Own) {
            let marked = self.marked(mark);
            if !marked.within(&last).is_empty() {
                marked.add(added.clone());
            }
        }
    }

    /// Whether anything more is taken under management.
    pub fn takes(&self) -> bool {
        !self.locks_future && !self.merges && self.traced == 0
    }

    /// Whether all engine threads run.
    pub fn has_threads(&self) -> bool {
        self.pending.as_ref().is_some_and(Vec::is_empty)
    }
}

/// See `copy.rs`.
pub static MARK: CopyMark = CopyMark::new();

/// A call that is made with no lock held: see [`Gated::begin_apart`].
pub struct Apart(u64);

/// What is kept of it.
struct Pending {
    number: u64,
    /// The number of the child that makes it.
    child: Option<usize>,
    /// Parts that have a mark for it.
    added: Ranges,
    before: Before,
    /// What was mapped or registered since.
    new_since: Ranges,
}

/// What a call finds in its ranges.
pub struct Before {
    /// Its ranges, or what of them is still as it was.
    pub parts: Vec<Range<usize>>,
    pub marks: Vec<(Mark, Range<usize>)>,
    /// Where faults are the program's own to serve.
    pub faults: Vec<Range<usize>>,
}

/// See the module.
pub struct Gated {
    /// The engine.
    pub pager: Arc<Pager>,
    pub paging: Paging,
    pub pagemap: Arc<Pagemap>,
    pub maps: Maps,
    /// Of the engine's table of descriptors.
    pub smaps: Smaps,
    pub scale: Scale,
    pub config: Config,
    /// Of the first engine thread before it raised itself: of all the others.
    pub nice: i32,
    pub known: Known,
    /// Held by who changes mappings, adopts, or copies the process.
    pub state: Mutex<State>,
    /// Where faults are the program's own to serve: registered with a userfaultfd of its own. Taken
    /// last, and nothing else is done while it is held.
    pub faults_of_program: Mutex<Ranges>,
    /// The program's memory is managed, or about to be.
    pub managing: AtomicBool,
    /// A thread does what children of vfork must not do.
    pub serves_errands: AtomicBool,
    /// So many calls were made apart.
    pub apart_calls: AtomicU64,
    /// A userfaultfd of the program's is told of copies of the process (UFFD_FEATURE_EVENT_FORK).
    pub tells_of_copies: AtomicBool,
    /// A thread's calls don't pass the gate, and the kernel may refuse it what the engine would do.
    pub shut_in: AtomicBool,
    /// A thread has a filter, which may kill it.
    pub filtered: AtomicBool,
    /// The first address past the main thread's stack.
    pub stack_end: usize,
    /// With a swap file: it, and the service of the remote store.
    pub file: Option<Arc<FileDisk>>,
    pub remote: Option<Arc<SocketRemote>>,
}

/// What is opened in the program's own table of descriptors.
struct Opened {
    paging: Paging,
    pagemap: Pagemap,
    maps: Maps,
    file: Option<Arc<FileDisk>>,
}

static OPENED: Mutex<Option<Opened>> = Mutex::new(None);
static GATED: AtomicPtr<Gated> = AtomicPtr::new(core::ptr::null_mut());

/// The program, once it has an engine.
pub fn get() -> Option<&'static Gated> {
    // SAFETY: the pointer is null or a leaked box.
    unsafe { GATED.load(SeqCst).as_ref() }
}

/// There is none any more.
pub fn abandon() {
    GATED.store(core::ptr::null_mut(), SeqCst);
}

/// The same where there is one.
pub fn existing() -> &'static Gated {
    get().expect("it has been created")
}

/// Opens what the program's threads use, or hand on to a child of fork, in their table, and has the
/// engine's threads keep it. Called by the constructor.
///
/// # Errors
/// What is lacking.
pub fn open(config: &Config) -> Result<(), Lacking> {
    let opened = opened(config)?;
    let mut own =
        numbers([opened.paging.fd(), opened.pagemap.fd(), opened.maps.fd()], &opened.file);
    bare::keep_descriptors(&mut own);
    *OPENED.lock() = Some(opened);
    Ok(())
}

/// The same, to see whether it can be done.
///
/// # Errors
/// As [`open`].
pub fn try_open(config: &Config) -> Result<(), Lacking> {
    opened(config).map(drop)
}

fn opened(config: &Config) -> Result<Opened, Lacking> {
    let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let least = NUMBERS_FROM.min(most.saturating_sub(NUMBERS)) as i32;
    let number = |e: Errno| format!("a number for a descriptor: {e}");
    let paging = Paging::open(config, least)?;
    let pagemap = Pagemap::open().map_err(|e| format!("/proc/self/pagemap: {e}"))?;
    let pagemap = pagemap.at_least(least).map_err(number)?;
    let maps = Maps::open().map_err(|e| format!("/proc/self/maps: {e}"))?;
    let maps = maps.at_least(least).map_err(number)?;
    // The rings are the engine's threads' alone.
    let options = FileDiskOptions { uring: false, number: least, ..FileDiskOptions::default() };
    let open = |path: &String| FileDisk::open(path, options);
    let file = config.swap.as_ref().map(open).transpose();
    let file = file.map_err(|e| Lacking(format!("--swap: {e}")))?.map(Arc::new);
    Ok(Opened { paging, pagemap, maps, file })
}

/// Why there is no engine.
pub struct Lacking(pub String);

impl From<String> for Lacking {
    fn from(why: String) -> Lacking {
        Lacking(why)
    }
}

/// The numbers of the engine's descriptors in the program's table.
fn numbers(own: [&OwnedFd; 3], file: &Option<Arc<FileDisk>>) -> Vec<u32> {
    let mut all: Vec<u32> = own.iter().map(|fd| fd.as_raw_fd() as u32).collect();
    if let Some(file) = file {
        file.each_number(|number| all.push(number as u32));
    }
    all
}

/// Makes the engine: called by the first of its threads.
///
/// # Errors
/// One line: what this process lacks.
pub fn create(config: Config, stats: &'static Stats) -> Result<(), String> {
    let opened = OPENED.lock().take().expect("opened by the constructor");
    let Opened { paging, pagemap, maps, file } = opened;
    let pagemap = Arc::new(pagemap);
    let remote = open_remote(&config)?.map(Arc::new);
    let errands = Arc::new(Errands::new(bare::is_current));
    if let Some(file) = &file {
        file.make_rings();
    }
    let disk = file.clone().map(|file| Box::new(Handed::new(file, errands.clone())) as Box<_>);
    let store = remote.clone().map(|store| Box::new(Handed::new(store, errands.clone())) as Box<_>);
    let parts = Parts {
        space: paging.space(&pagemap),
        has_move: config.use_move && !paging.hides(),
        reports_limit: true,
        stats: StatsPlace::shared(stats),
        cpus: cpus(),
        disk,
        remote: store,
        errands: Some(errands),
    };
    let pager = match Pager::new(config.clone(), parts) {
        Ok(pager) => Arc::new(pager),
        Err(why @ StartError::AddressSpace(_)) => return Err(format!("{why}{Remedy}")),
        Err(why) => return Err(format!("{why}")),
    };
    pager.set_process(slots::own());
    let (start, len) = pager.frames_zone();
    paging.register_frames(start, len).map_err(|e| format!("registering frames: {e}"))?;
    let no_room = |e: Errno| format!("no address space: {e}");
    bare::reserve(config.worker_count(pager.cpus()) + MORE_THREADS).map_err(no_room)?;
    let scale = Scale::open(config.clone()).map_err(|e| format!("starting the engine: {e}"))?;
    let smaps = Smaps::open().map_err(|e| format!("/proc/self/smaps: {e}"))?;
    // A process inherits it, also over exec.
    let (mut state, mut stack_end) = (State { merges: proc::merges(), ..State::default() }, 0);
    let present = each_area(|area| {
        if area.is_stack() {
            stack_end = area.end;
        }
        if area.is_private_anonymous() && !overlaps_own(area.start, area.end) {
            state.marked(Mark::Own).add(area.start..area.end);
        }
        Continue(())
    });
    present.map_err(|e| format!("/proc/self/maps: {e}"))?;
    let gated = Box::leak(Box::new(Gated {
        pager,
        paging,
        pagemap,
        maps,
        smaps,
        scale,
        config,
        nice: super::threads::own_nice(),
        known: Known::default(),
        state: Mutex::new(state),
        faults_of_program: Mutex::default(),
        managing: AtomicBool::new(false),
        shut_in: AtomicBool::new(false),
        filtered: AtomicBool::new(proc::is_filtered()),
        serves_errands: AtomicBool::new(false),
        tells_of_copies: AtomicBool::new(false),
        apart_calls: AtomicU64::new(0),
        stack_end,
        file,
        remote,
    }));
    GATED.store(gated, SeqCst);
    Ok(())
}

impl Gated {
    /// Does `what` by a thread of the engine's, if the caller is a child of vfork, which may be killed
    /// while it has a lock. It touches no memory of the program's.
    pub fn on_behalf<T: Send>(&self, what: impl FnOnce() -> T + Send) -> T {
        if !self.serves_errands.load(SeqCst) || child().is_none() {
            return what();
        }
        let (mut what, mut done) = (Some(what), None);
        // SAFETY: it is `Send`, and the rest is said above.
        unsafe { hand_over(&mut || done = what.take().map(|what| what()), ring) };
        done.expect("it waits until it is done")
    }

    /// Whether anything is managed, or about to be.
    pub fn is_managing(&self) -> bool {
        self.managing.load(SeqCst)
    }

    /// Starts the thread that serves children of vfork. Without it they serve themselves.
    pub fn start_serving(&self) {
        if !self.serves_errands.load(SeqCst) {
            engine::have_done(|| {
                if !self.serves_errands.load(SeqCst) {
                    let started = super::threads::start_serving();
                    self.serves_errands.store(started.is_ok(), SeqCst);
                }
            });
        }
    }

    /// A userfaultfd of the program's is to be told of copies of the process.
    pub fn tell_of_copies(&self) {
        MARK.lock();
        self.start_serving();
        self.tells_of_copies.store(true, SeqCst);
    }

    /// Whether a descriptor is the engine's.
    pub fn owns(&self, fd: i32) -> bool {
        let mut owns = [self.paging.fd(), self.pagemap.fd(), self.maps.fd()]
            .iter()
            .any(|own| own.as_raw_fd() == fd);
        if let Some(file) = &self.file {
            file.each_number(|number| owns |= number == fd);
        }
        owns
    }

    /// Has the engine's threads keep what they need of the program's descriptors, before they are
    /// started.
    pub fn keep_descriptors(&self) {
        let own = [self.paging.fd(), self.pagemap.fd(), self.maps.fd()];
        bare::keep_descriptors(&mut numbers(own, &self.file));
    }

    /// Registers a range of the program's, which holds what it holds.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn register(&self, range: &Range<usize>) -> Result<(), Errno> {
        match &self.paging {
            // SAFETY: faults of the program are served from now on, what the kernel touches is
            // held, and no engine thread touches the range.
            Paging::Userfault(uffd) => unsafe {
                uffd.register(range.start, range.len(), self.pager.protects())
            },
            Paging::Protection(protection) => {
                protection.cover(range, self.config.block_order.bytes(), &self.pagemap)
            }
        }
    }

    /// Registers a range that the program has just mapped.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn register_new(&self, range: &Range<usize>) -> Result<(), Errno> {
        match &self.paging {
            Paging::Userfault(_) => self.register(range),
            Paging::Protection(protection) => protection.cover_new(range),
        }
    }

    /// Registers a managed range of the program's that mremap has brought, or left, there. Where
    /// memory is hidden, all of it is, and the engine shows what is there.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn register_again(&self, range: &Range<usize>) -> Result<(), Errno> {
        if self.paging.hides() { self.paging.hide(range) } else { self.register(range) }
    }

    /// Brings a range home, and gives it back to the kernel.
    pub fn leave(&self, range: &Range<usize>) {
        self.pager.leave(range.clone(), |start, end| {
            if let Err(e) = self.paging.unregister(&(start..end)) {
                say::die(format_args!("memory can't leave management: {e}"));
            }
        });
    }

    /// A call on `range` is about to be made with no lock held. It may wait until another thread of
    /// the program has done something, which may change mappings first: of what it faults in, and what
    /// it reports, a userfaultfd or a file system of the program's may be in charge. Or it is made by a
    /// child that may be killed. Until [`Gated::leave_apart`] nothing of the range is managed.
    /// `child`: the number of the caller, if it is a child.
    pub fn begin_apart(
        &self,
        state: &mut State,
        child: Option<usize>,
        ranges: [Range<usize>; 2],
    ) -> Apart {
        let (before, mut added) = (self.before(state, &ranges), Ranges::default());
        for range in &ranges {
            let marked = state.marked(Mark::Other);
            for part in without(range, &marked.within(range)) {
                marked.add(part.clone());
                added.add(part);
            }
            self.leave(range);
        }
        let number = self.apart_calls.fetch_add(1, SeqCst);
        state.apart.push(Pending { number, child, added, before, new_since: Ranges::default() });
        Apart(number)
    }

    /// What there is in some ranges.
    pub fn before(&self, state: &State, ranges: &[Range<usize>]) -> Before {
        let faults = self.faults_of_program.lock();
        Before {
            parts: ranges.to_vec(),
            marks: ranges.iter().flat_map(|range| state.marks_in(range)).collect(),
            faults: ranges.iter().flat_map(|range| faults.within(range)).collect(),
        }
    }

    /// It was made. Gives what it has found. Its parts are those where nothing was mapped or registered
    /// meanwhile.
    pub fn leave_apart(&self, state: &mut State, apart: Apart) -> Before {
        let at = state.apart.iter().position(|pending| pending.number == apart.0);
        let at = at.expect("it is ended once, by who began it");
        let Pending { mut before, added, new_since, .. } = state.apart.swap_remove(at);
        before.parts = new_since.cut_out_of(before.parts);
        for part in before.parts.iter().flat_map(|part| added.within(part)) {
            state.marked(Mark::Other).remove(&part);
        }
        before
    }

    /// The kernel's mappings in a range, as far as they reach. What is managed and lies together is one,
    /// where it is hidden block by block.
    pub fn mappings(&self, range: &Range<usize>) -> Vec<Range<usize>> {
        let hidden = match self.paging.hides() {
            true => self.pager.managed_parts(range),
            false => Vec::new(),
        };
        let is_one = |at: usize| hidden.iter().any(|part| part.start < at && at < part.end);
        let mut all: Vec<Range<usize>> = Vec::new();
        let _ = self.maps.each(range.start, range.end, |found| {
            let (start, end) = (found.start.max(range.start), found.end.min(range.end));
            match all.last_mut() {
                Some(last) if last.end == start && is_one(start) => last.end = end,
                _ => all.push(start..end),
            }
        });
        all
    }

    /// Whether the program may have what happens to a part of a range reported by a userfaultfd of its
    /// own.
    pub fn is_watched(&self, state: &mut State, range: &Range<usize>) -> bool {
        state.has_userfault && !state.marked(Mark::Other).within(range).is_empty()
    }

    /// Nobody allocates, and no zone comes or goes, until [`Gated::allow_allocation`].
    pub fn forbid_allocation(&self) {
        freeze_list();
        arena().freeze();
    }

    /// Ends it.
    ///
    /// # Safety
    /// - [`Gated::forbid_allocation`] was called, in this process or in the parent that it is a
    ///   copy of, and this is called once for it.
    pub unsafe fn allow_allocation(&self) {
        // SAFETY: by the caller's promise.
        unsafe {
            arena().unfreeze();
            unfreeze_list();
        }
    }
}
