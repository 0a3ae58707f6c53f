//! A program that is managed by the gate: its engine, and how it begins.
// Bottom first: a module imports only from modules listed above it.
mod memory;
mod account;
mod threads;
mod relations;

pub use account::ProgramAccount;
pub use memory::{PLAIN, ProgramMemory};
pub use relations::ProgramRelations;
pub use threads::ProgramThreads;

use crate::diagnostics::addresses::Remedy;
use crate::marks::state::{MemoryMark, ProgramState};
use crate::marks::statics;
use crate::paging::Paging;
use crate::program::memory::MemoryFiles;
use crate::size::process_size;
use crate::size::share::{self, SizeScale};
use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::ControlFlow::Continue;
use core::sync::atomic::{AtomicPtr, Ordering::SeqCst};
use memfold_engine::config::Config;
use memfold_engine::known::TOP;
use memfold_engine::pager::{Pager, PagerParts, StartError, StatsPlace, open_remote};
use memfold_os::Errno;
use memfold_os::maps::copied::CopyMark;
use memfold_os::maps::lookup::Maps;
use memfold_os::maps::pagemap::Pagemap;
use memfold_os::maps::{Smaps, each_area};
use memfold_os::memory::zone::overlaps_own;
use memfold_os::sync::Mutex;
use memfold_os::thread::delegate_queue::{DelegateQueue, Delegated};
use memfold_os::thread::{bare, cpus};
use memfold_run::member;
use memfold_stats::Stats;
use memfold_swap::disk::file_disk::{FileDisk, FileDiskOptions};
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

/// The managed program of this process: its engine, and four parts that own what is known of it.
pub struct ManagedProgram {
    pager: Arc<Pager>,
    memory: ProgramMemory,
    account: ProgramAccount,
    threads: ProgramThreads,
    relations: ProgramRelations,
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
    let is_known =
        |program: &ManagedProgram| program.memory.known().is_set(&(args[0]..args[0] + 1));
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
    let devices = opened(config)?;
    let own = [devices.paging.fd(), devices.pagemap.fd(), devices.maps.fd()];
    let each = |number: &mut dyn FnMut(i32)| {
        devices.file.iter().for_each(|file| file.each_number(&mut *number));
    };
    bare::keep_descriptors(&mut numbers(own, each));
    *OPENED.lock() = Some(devices);
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
fn numbers(own: [&OwnedFd; 3], each_of_file: impl FnOnce(&mut dyn FnMut(i32))) -> Vec<u32> {
    let mut all: Vec<u32> = own.iter().map(|fd| fd.as_raw_fd() as u32).collect();
    each_of_file(&mut |number| all.push(number as u32));
    all.extend(u32::try_from(member::link()));
    all
}

/// Makes the engine's threads keep the program's descriptors that they need. Called before these
/// threads are started.
pub fn keep_descriptors(memory: &ProgramMemory, relations: &ProgramRelations) {
    let each = |number: &mut dyn FnMut(i32)| relations.each_descriptor(number);
    bare::keep_descriptors(&mut numbers(memory.descriptors(), each));
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
    let devices = OPENED.lock().take().expect("opened by the constructor");
    let program = make(config, devices, stats)?;
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
    let worker_count = config.worker_count(pager.cpus());
    bare::reserve(worker_count + MORE_THREADS).map_err(no_room)?;
    let scale =
        SizeScale::open(config.clone()).map_err(|e| format!("Starting the engine failed: {e}"))?;
    let smaps = Smaps::open().map_err(|e| format!("/proc/self/smaps: {e}"))?;
    let present = present().map_err(|e| format!("/proc/self/maps: {e}"))?;
    let files = MemoryFiles { paging, pagemap, maps };
    Ok(ManagedProgram {
        memory: ProgramMemory::new(&pager, files, present, config.block_order.bytes()),
        threads: ProgramThreads::new(&pager, worker_count, process_size::is_filtered()),
        account: ProgramAccount::new(&pager, scale, smaps, config),
        relations: ProgramRelations::new(file, remote),
        pager,
    })
}

/// Returns a program for tests that is managed from now on, or `None` if this kind of paging is
/// unavailable.
#[cfg(test)]
pub fn managed(config: Config) -> Option<&'static ManagedProgram> {
    let stats = Box::leak(Box::new(Stats::new()));
    let program =
        opened(&config).ok().map(|devices| make(config, devices, stats))?.expect("an engine");
    program.memory.set_managing(true);
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
    /// Returns the engine.
    pub fn pager(&self) -> &Pager {
        &self.pager
    }

    /// Returns what of the program's memory is managed.
    pub fn memory(&self) -> &ProgramMemory {
        &self.memory
    }

    /// Returns what the program may have.
    pub fn account(&self) -> &ProgramAccount {
        &self.account
    }

    /// Returns the engine's threads.
    pub fn threads(&self) -> &ProgramThreads {
        &self.threads
    }

    /// Returns what it shares with its children.
    pub fn relations(&self) -> &ProgramRelations {
        &self.relations
    }

    /// Publishes the figures before the process ends, and then runs `rest`. Holds the state, because
    /// a copy of the process must have none of the locks that this takes. A filter may have killed
    /// a thread that had the state. Then the figures stay those of the last look.
    pub fn publish_last(&self, rest: impl FnOnce()) {
        let state = match self.threads.is_filtered() {
            true => self.memory.state().try_lock(),
            false => Some(self.memory.state().lock()),
        };
        if state.is_some() {
            self.pager.gauges().publish();
            rest();
        }
    }

    /// Returns whether a descriptor is the engine's.
    pub fn owns(&self, fd: i32) -> bool {
        let mut owns = self.memory.descriptors().iter().any(|own| own.as_raw_fd() == fd);
        self.relations.each_descriptor(|number| owns |= number == fd);
        owns
    }
}
