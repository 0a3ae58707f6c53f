//! A program that is managed by the gate: its engine, and how it begins.
use crate::diagnostics;
use crate::diagnostics::addresses::Remedy;
use crate::engine;
use crate::heap::arena;
use crate::marks::ranges::RangeSet;
use crate::marks::state::{ApartCall, FoundRanges, MemoryMark, ProgramState};
use crate::marks::statics;
use crate::paging::Paging;
use crate::size::process_size;
use crate::size::share::{self, SizeScale};
use crate::threads::SERVER;
use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::ControlFlow::Continue;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering::SeqCst};
use memfold_engine::config::Config;
use memfold_engine::known::{FoldableMap, TOP};
use memfold_engine::pager::{Pager, PagerParts, StartError, StatsPlace, open_remote};
use memfold_gate::{child, hand_over};
use memfold_os::Errno;
use memfold_os::maps::copied::CopyMark;
use memfold_os::maps::lookup::Maps;
use memfold_os::maps::pagemap::Pagemap;
use memfold_os::maps::{Smaps, each_area};
use memfold_os::memory::zone::{freeze_list, overlaps_own, unfreeze_list};
use memfold_os::sync::Mutex;
use memfold_os::thread::delegate_queue::{DelegateQueue, Delegated};
use memfold_os::thread::{bare, cpus};
use memfold_run::member;
use memfold_stats::Stats;
use memfold_swap::disk::file_disk::{FileDisk, FileDiskOptions};
use memfold_swap::remote::socket::SocketRemote;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::process::{Resource, getrlimit};

/// Engine threads beside the workers.
const MORE_THREADS: usize = 10;
/// The least number of the engine's descriptors. If the limit is lower, it is the limit less
/// `NUMBERS`.
const NUMBERS_FROM: u64 = 992;
const NUMBERS: u64 = 32;

/// Shows when a copy of the process is complete (`fork.rs`).
pub static MARK: CopyMark = CopyMark::new();

/// The managed program of this process.
pub struct ManagedProgram {
    pub pager: Arc<Pager>,
    pub paging: Paging,
    pub pagemap: Arc<Pagemap>,
    pub maps: Maps,
    /// Opened in the descriptor table of the engine's threads.
    pub smaps: Smaps,
    pub scale: SizeScale,
    pub config: Config,
    /// Nice value of the first engine thread before it raised its priority. All other engine
    /// threads have it.
    pub nice: i32,
    pub known: FoldableMap,
    /// Held by a thread that changes mappings, adopts memory, or copies the process.
    pub state: Mutex<ProgramState>,
    /// Memory where the program handles faults itself, because it is registered with a userfaultfd
    /// of its own. This lock is taken last, and nothing else is done while it is held.
    pub faults_of_program: Mutex<RangeSet>,
    /// Whether the program's memory is managed, or about to be.
    pub managing: AtomicBool,
    /// Whether a thread runs that does what children of vfork must not do.
    pub serves_errands: AtomicBool,
    /// Whether unmanaged memory may be registered, because the process had too many mappings when it
    /// left management. A missing page there is a new one ([`Paging::fills`]). The kernel can't
    /// make it, so system calls touch such memory first.
    pub may_stay_registered: AtomicBool,
    /// Number of calls that were made with no lock held.
    pub apart_calls: AtomicU64,
    /// Whether a userfaultfd of the program gets an event for each copy of the process
    /// (UFFD_FEATURE_EVENT_FORK).
    pub tells_of_copies: AtomicBool,
    /// Whether a thread has a seccomp filter, which may kill it.
    pub filtered: AtomicBool,
    /// Whether this program has set such a filter. One from before has allowed the engine to start.
    pub has_own_filter: AtomicBool,
    /// The first address past the main thread's stack.
    pub stack_end: usize,
    /// The swap file, if there is one. `remote` is the service of the remote store.
    pub file: Option<Arc<FileDisk>>,
    pub remote: Option<Arc<SocketRemote>>,
}

/// Files that are opened in the program's own descriptor table.
struct OpenedFiles {
    paging: Paging,
    pagemap: Pagemap,
    maps: Maps,
    file: Option<Arc<FileDisk>>,
}

/// The engine of a process that has ended in the middle of a change of it, for its child of vfork.
static LOST_PROGRAM: AtomicPtr<ManagedProgram> = AtomicPtr::new(core::ptr::null_mut());
/// Why a child of vfork ends that needs such an engine.
pub const LOST: &str = "A child of vfork needs folded memory of its parent's process. That process has ended, and was changing it at that moment. The child is ended before it reads wrong bytes";

static OPENED: Mutex<Option<OpenedFiles>> = Mutex::new(None);
static PROGRAM: AtomicPtr<ManagedProgram> = AtomicPtr::new(core::ptr::null_mut());

/// Returns the program, once it has an engine.
pub fn get() -> Option<&'static ManagedProgram> {
    // SAFETY: the pointer is null or a leaked box, which is never freed.
    unsafe { PROGRAM.load(SeqCst).as_ref() }
}

/// Abandons the engine: [`get`] returns `None` from now on.
pub fn abandon() {
    PROGRAM.store(core::ptr::null_mut(), SeqCst);
}

/// Abandons the engine as [`abandon`] does, in a child of vfork. [`lost`] returns it.
pub fn lose() {
    LOST_PROGRAM.store(PROGRAM.swap(core::ptr::null_mut(), SeqCst), SeqCst);
}

/// Returns the engine that a child of vfork has lost. It may be in the middle of a change, so
/// nothing is known of the memory that it has folded.
pub fn lost() -> Option<&'static ManagedProgram> {
    // SAFETY: the pointer is null or a leaked box, which is never freed.
    unsafe { LOST_PROGRAM.load(SeqCst).as_ref() }
}

/// Returns whether a call would move memory of an engine that a child of vfork has lost. The kernel
/// would wait for good, because no thread reads its message.
pub fn moves_lost(nr: usize, args: &[usize; 6]) -> bool {
    let is_known = |program: &ManagedProgram| program.known.is_set(&(args[0]..args[0] + 1));
    nr as i64 == libc::SYS_mremap && args[0] < TOP && lost().is_some_and(is_known)
}

/// Returns the program, which must have an engine.
pub fn existing() -> &'static ManagedProgram {
    get().expect("it has been created")
}

/// Opens in the program's descriptor table what its threads use or pass on to a child of fork. The
/// engine's threads keep these descriptors too. The constructor calls it.
///
/// # Errors
/// The reason why there is no engine.
pub fn open(config: &Config) -> Result<(), LackingEngine> {
    let opened = opened(config)?;
    let mut own =
        numbers([opened.paging.fd(), opened.pagemap.fd(), opened.maps.fd()], &opened.file);
    bare::keep_descriptors(&mut own);
    *OPENED.lock() = Some(opened);
    Ok(())
}

/// Checks that [`open`] can succeed, and closes everything again.
///
/// # Errors
/// The errors of [`open`].
pub fn try_open(config: &Config) -> Result<(), LackingEngine> {
    opened(config).map(drop)
}

fn opened(config: &Config) -> Result<OpenedFiles, LackingEngine> {
    let least = number_least();
    let number = |e: Errno| format!("Numbering a descriptor failed: {e}");
    let paging = Paging::open(config, least)?;
    let pagemap = Pagemap::open().map_err(|e| format!("/proc/self/pagemap: {e}"))?;
    let pagemap = pagemap.at_least(least).map_err(number)?;
    let maps = Maps::open().map_err(|e| format!("/proc/self/maps: {e}"))?;
    let maps = maps.at_least(least).map_err(number)?;
    // Only the engine's threads use the rings.
    let options = FileDiskOptions { uring: false, number: least, ..FileDiskOptions::default() };
    let open = |path: &String| FileDisk::open(path, options);
    let file = config.swap.as_ref().map(open).transpose();
    let file = file.map_err(|e| LackingEngine(format!("--swap: {e}")))?.map(Arc::new);
    Ok(OpenedFiles { paging, pagemap, maps, file })
}

/// The reason why there is no engine.
pub struct LackingEngine(pub String);

impl From<String> for LackingEngine {
    fn from(why: String) -> LackingEngine {
        LackingEngine(why)
    }
}

/// Returns the numbers of the engine's descriptors in the program's table.
fn numbers(own: [&OwnedFd; 3], file: &Option<Arc<FileDisk>>) -> Vec<u32> {
    let mut all: Vec<u32> = own.iter().map(|fd| fd.as_raw_fd() as u32).collect();
    if let Some(file) = file {
        file.each_number(|number| all.push(number as u32));
    }
    all.extend(u32::try_from(member::link()));
    all
}

/// Returns the least number of the engine's descriptors.
pub fn number_least() -> i32 {
    let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    NUMBERS_FROM.min(most.saturating_sub(NUMBERS)) as i32
}

/// Makes the engine. The first engine thread calls it.
///
/// # Errors
/// One line that says what this process lacks.
pub fn create(config: Config, stats: &'static Stats) -> Result<(), String> {
    let opened = OPENED.lock().take().expect("opened by the constructor");
    let program = make(config, opened, stats)?;
    PROGRAM.store(Box::leak(Box::new(program)), SeqCst);
    Ok(())
}

/// Returns a program with an engine that manages nothing yet.
///
/// # Errors
/// One line that says what this process lacks.
fn make(
    config: Config,
    opened: OpenedFiles,
    stats: &'static Stats,
) -> Result<ManagedProgram, String> {
    let OpenedFiles { paging, pagemap, maps, file } = opened;
    let pagemap = Arc::new(pagemap);
    let remote = open_remote(&config)?.map(Arc::new);
    let queue = Arc::new(DelegateQueue::new(bare::is_current));
    if let Some(file) = &file {
        file.make_rings();
    }
    let disk = file.clone().map(|file| Box::new(Delegated::new(file, queue.clone())) as Box<_>);
    let store =
        remote.clone().map(|store| Box::new(Delegated::new(store, queue.clone())) as Box<_>);
    let parts = PagerParts {
        space: paging.space(&pagemap),
        has_move: config.use_move && !paging.hides(),
        reports_limit: true,
        stats: StatsPlace::shared(stats),
        cpus: cpus(),
        disk,
        remote: store,
        delegate_queue: Some(queue),
        shared_limit: Some(&share::OwnCharge),
        compressors: None,
    };
    let pager = match Pager::new(config.clone(), parts) {
        Ok(pager) => Arc::new(pager),
        Err(why @ StartError::AddressSpace(_)) => return Err(format!("{why}{Remedy}")),
        Err(why) => return Err(format!("{why}")),
    };
    let (start, len) = pager.frames_zone();
    paging.register_frames(start, len).map_err(|e| format!("Registering frames failed: {e}"))?;
    let no_room = |e: Errno| format!("Reserving address space failed: {e}");
    bare::reserve(config.worker_count(pager.cpus()) + MORE_THREADS).map_err(no_room)?;
    let scale =
        SizeScale::open(config.clone()).map_err(|e| format!("Starting the engine failed: {e}"))?;
    let smaps = Smaps::open().map_err(|e| format!("/proc/self/smaps: {e}"))?;
    let (state, stack_end) = present().map_err(|e| format!("/proc/self/maps: {e}"))?;
    Ok(ManagedProgram {
        pager,
        paging,
        pagemap,
        maps,
        smaps,
        scale,
        config,
        nice: crate::threads::own_nice(),
        known: FoldableMap::default(),
        state: Mutex::new(state),
        faults_of_program: Mutex::default(),
        managing: AtomicBool::new(false),
        filtered: AtomicBool::new(process_size::is_filtered()),
        has_own_filter: AtomicBool::new(false),
        serves_errands: AtomicBool::new(false),
        tells_of_copies: AtomicBool::new(false),
        may_stay_registered: AtomicBool::new(false),
        apart_calls: AtomicU64::new(0),
        stack_end,
        file,
        remote,
    })
}

/// Returns a program for tests that is managed from now on, or `None` if this kind of paging is
/// unavailable.
#[cfg(test)]
pub fn managed(config: Config) -> Option<&'static ManagedProgram> {
    let stats = Box::leak(Box::new(Stats::new()));
    let program =
        opened(&config).ok().map(|opened| make(config, opened, stats))?.expect("an engine");
    program.managing.store(true, SeqCst);
    Some(Box::leak(Box::new(program)))
}

/// Returns the state with the memory that is there at the start and can't be folded, and the end of
/// the main thread's stack.
fn present() -> Result<(ProgramState, usize), Errno> {
    // A process inherits this setting, also across exec.
    let (mut state, mut stack_end) = (ProgramState::default(), 0);
    state.merges = process_size::merges();
    each_area(|area| {
        if area.is_stack() {
            stack_end = area.end;
        }
        if area.is_private_anonymous() && !overlaps_own(area.start, area.end) {
            for part in statics::never_folded(area.start..area.end).take() {
                state.marked(MemoryMark::Own).add(part);
            }
        }
        Continue(())
    })?;
    Ok((state, stack_end))
}

impl ManagedProgram {
    /// Runs `what`. If the caller is a child of vfork, a thread of the engine runs it, because the
    /// child may be killed while it holds a lock. `what` must not touch the program's memory. The
    /// child ends if its parent's process has ended in the middle of this.
    pub fn on_behalf<T: Send>(&self, what: impl FnOnce() -> T + Send) -> T {
        self.try_on_behalf(what).unwrap_or_else(|| diagnostics::die(format_args!("{LOST}")))
    }

    /// Does as [`ManagedProgram::on_behalf`]. Returns `None` if the process of the child's parent
    /// has ended, and with it the engine, or the thread that ran `what`.
    pub fn try_on_behalf<T: Send>(&self, what: impl FnOnce() -> T + Send) -> Option<T> {
        let (mut what, mut done) = (Some(what), None);
        while self.serves_errands.load(SeqCst) && child().is_some() {
            // SAFETY: `what` is `Send`. `done` is only read when no thread runs `what`: when it is
            // done, or after `inherit`. `what` touches no memory of the program, as documented.
            let is_done =
                unsafe { hand_over(&mut || done = what.take().map(|what| what()), &SERVER) };
            if is_done {
                return done;
            }
            engine::inherit();
            if done.is_some() || what.is_none() || get().is_none() {
                return done;
            }
        }
        what.map(|what| what())
    }

    /// Publishes the figures before the process ends, and then runs `rest`. Holds `state`, because
    /// a copy of the process must have none of the locks that this takes. A filter may have killed
    /// a thread that had `state`. Then the figures stay those of the last look.
    pub fn publish_last(&self, rest: impl FnOnce()) {
        let state = match self.filtered.load(SeqCst) {
            true => self.state.try_lock(),
            false => Some(self.state.lock()),
        };
        if state.is_some() {
            self.pager.gauges().publish();
            rest();
        }
    }

    /// Returns whether any memory is managed, or about to be.
    pub fn is_managing(&self) -> bool {
        self.managing.load(SeqCst)
    }

    /// Starts the thread that does errands for children of vfork. Without it they do the work
    /// themselves.
    pub fn start_serving(&self) {
        if !self.serves_errands.load(SeqCst) {
            // A copy of the process must not have a thread that is half started.
            let _state = self.state.lock();
            engine::have_done(|| {
                if !self.serves_errands.load(SeqCst) {
                    let started = crate::threads::start_serving();
                    self.serves_errands.store(started.is_ok(), SeqCst);
                }
            });
        }
    }

    /// Prepares for a userfaultfd of the program that gets an event for each copy of the process.
    pub fn tell_of_copies(&self) {
        MARK.lock();
        self.start_serving();
        self.tells_of_copies.store(true, SeqCst);
    }

    /// Returns whether a descriptor is the engine's.
    pub fn owns(&self, fd: i32) -> bool {
        let mut owns = [self.paging.fd(), self.pagemap.fd(), self.maps.fd()]
            .iter()
            .any(|own| own.as_raw_fd() == fd);
        if let Some(file) = &self.file {
            file.each_number(|number| owns |= number == fd);
        }
        owns
    }

    /// Makes the engine's threads keep the program's descriptors that they need. Called before
    /// these threads are started.
    pub fn keep_descriptors(&self) {
        let own = [self.paging.fd(), self.pagemap.fd(), self.maps.fd()];
        bare::keep_descriptors(&mut numbers(own, &self.file));
    }

    /// Registers a range of the program. Its contents stay as they are. `is_held` is whether a
    /// system call in progress names a part of it.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn register(&self, range: &Range<usize>, is_held: bool) -> Result<(), Errno> {
        match &self.paging {
            // SAFETY: faults of the program are handled from now on. Memory that the kernel touches
            // is held, and no engine thread touches the range.
            Paging::Userfault(uffd) => unsafe {
                uffd.register(range.start, range.len(), self.pager.protects())
            },
            Paging::Protection(protection) => {
                let block = self.config.block_order.bytes();
                protection.cover(range, block, &self.pagemap, is_held)
            }
        }
    }

    /// Loads a range into memory, and ends its management.
    pub fn leave(&self, range: &Range<usize>) {
        self.pager.mappings().leave(range.clone(), |start, end| {
            if self.paging.unregister(&(start..end)).is_err() {
                self.may_stay_registered.store(true, SeqCst);
            }
        });
    }

    /// Does as [`ManagedProgram::leave`]. Guards in the range are no longer registered either: the
    /// kernel resizes and moves one mapping only, and reports moves of registered memory.
    pub fn leave_with_guards(&self, state: &mut ProgramState, range: &Range<usize>) {
        self.leave(range);
        for guard in state.marked(MemoryMark::Guard).within(range) {
            let _ = self.paging.unregister(&guard);
        }
    }

    /// Begins a call on `ranges` that is made with no lock held. Nothing in them is managed until
    /// [`ProgramState::end_apart`]. `child` is the number of the caller, if it is a child.
    ///
    /// The kernel may wait in the call until another thread of the program has done something,
    /// which may change mappings first. That is so if a userfaultfd or a file system of the program
    /// handles its faults or events. Or a child makes the call, and may be killed in it.
    pub fn begin_apart(
        &self,
        state: &mut ProgramState,
        child: Option<usize>,
        ranges: [Range<usize>; 2],
    ) -> ApartCall {
        let before = self.before(state, &ranges);
        let number = self.apart_calls.fetch_add(1, SeqCst);
        let apart = state.begin_apart(number, child, before);
        ranges.iter().for_each(|range| self.leave_with_guards(state, range));
        apart
    }

    /// Returns what there is in some ranges.
    pub fn before(&self, state: &ProgramState, ranges: &[Range<usize>]) -> FoundRanges {
        let faults = self.faults_of_program.lock();
        let faults = ranges.iter().flat_map(|range| faults.within(range)).collect();
        state.before(ranges, faults)
    }

    /// Returns the kernel's mappings in a range, cut to the range. Where memory is hidden block by
    /// block, adjacent managed memory counts as one mapping. Hidden memory and memory of the program
    /// without access count as two.
    pub fn mappings(&self, range: &Range<usize>) -> Vec<Range<usize>> {
        let hidden = match self.paging.hides() {
            true => self.pager.mappings().managed_parts(range),
            false => Vec::new(),
        };
        let is_one = |at: usize| hidden.iter().any(|part| part.start < at && at < part.end);
        let mut all: Vec<Range<usize>> = Vec::new();
        let _ = self.maps.each(range.start, range.end, |found| {
            let (mut start, end) = (found.start.max(range.start), found.end.min(range.end));
            let edges = hidden.iter().flat_map(|part| [part.start, part.end]);
            let inside = |edge: &usize| start < *edge && *edge < end;
            let edges = edges.filter(|edge| found.access == libc::PROT_NONE && inside(edge));
            for end in edges.collect::<Vec<usize>>().into_iter().chain([end]) {
                match all.last_mut() {
                    Some(last) if last.end == start && is_one(start) => last.end = end,
                    _ => all.push(start..end),
                }
                start = end;
            }
        });
        all
    }

    /// Returns whether a userfaultfd of the program may report what happens to a part of a range.
    pub fn is_watched(&self, state: &mut ProgramState, range: &Range<usize>) -> bool {
        state.has_userfault && !state.marked(MemoryMark::Other).within(range).is_empty()
    }

    /// Blocks allocation, and changes of the list of zones, until
    /// [`ManagedProgram::allow_allocation`].
    pub fn forbid_allocation(&self) {
        freeze_list();
        arena().freeze();
    }

    /// Ends [`ManagedProgram::forbid_allocation`].
    ///
    /// # Safety
    /// - [`ManagedProgram::forbid_allocation`] was called, in this process or in the parent that it
    ///   is a copy of.
    /// - This is called once for it.
    pub unsafe fn allow_allocation(&self) {
        // SAFETY: the caller promises that `forbid_allocation` has frozen both, and that this is
        // the one call for it.
        unsafe {
            arena().unfreeze();
            unfreeze_list();
        }
    }
}
