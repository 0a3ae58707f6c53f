//! The public Rust API: [`Builder`] -> [`Memory`] -> [`Region`].
//!
//! All of them belong to the process that made them. A child of fork inherits copies. Their
//! userfaultfd acts on the parent's memory, and their threads and locks are the parent's. So in the
//! child every call does nothing, and dropped values are forgotten.
use crate::config::{Config, ConfigError, Delivery};
use crate::delivery::background::{self, EngineThread};
use crate::delivery::region::FaultHandlers;
use crate::delivery::{gate, sigbus};
use crate::mappings::ranges::KeyRanges;
use crate::pager::{Pager, PagerParts, StartError, codec_threads};
use crate::stats_place::StatsPlace;
use alloc::boxed::Box;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem::{ManuallyDrop, forget, take};
use core::ops::Range;
use memfold_os::Errno;
use memfold_os::maps::pagemap::Pagemap;
use memfold_os::memory::process_tag::ProcessTag;
use memfold_os::memory::zone::{self, Zone};
use memfold_os::raw::SignalsBlocked;
use memfold_os::thread::{Thread, cpus, memory_bytes};
use memfold_os::uffd::space::UffdSpace;
use memfold_os::uffd::{OpenError, Uffd, feature};
use memfold_os::units::{MAX_BYTES, PAGE_SHIFT, PAGE_SIZE};
use memfold_stats::Stats;
use rustix::fd::AsRawFd;

/// Why folded memory is unavailable. Displays as one line that says what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// A setting is wrong.
    Config(String),
    /// The kernel gives no userfaultfd.
    Userfaultfd(OpenError),
    /// A system call failed; the text names the step.
    System(&'static str, Errno),
    /// The memory belongs to a parent of this process.
    Inherited,
}

impl core::fmt::Display for Error {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Error::Config(why) => f.write_str(why),
            Error::Userfaultfd(why) => why.fmt(f),
            Error::System(what, errno) => write!(f, "{what}: {errno}"),
            Error::Inherited => f.write_str(INHERITED),
        }
    }
}
impl core::error::Error for Error {}

impl From<StartError> for Error {
    fn from(why: StartError) -> Error {
        match why {
            StartError::AddressSpace(errno) => {
                Error::System("Reserving address space for the engine failed", errno)
            }
            StartError::Setting(why) => Error::Config(why),
        }
    }
}

const INHERITED: &str =
    "This folded memory belongs to the parent process. A child of fork must build its own.";

/// Settings of a [`Memory`]. Made by [`Memory::builder`].
#[derive(Clone, Debug)]
pub struct Builder {
    config: Config,
    wrong: Option<ConfigError>,
}

impl Builder {
    /// Sets any key of [`crate::config::keys::KEYS`] from text, as the flags of `memfold run` do.
    #[must_use]
    pub fn set(mut self, name: &str, value: &str) -> Builder {
        if let Err(e) = self.config.set(name, value) {
            self.wrong.get_or_insert(e);
        }
        self
    }

    /// Bounds resident + frames + pool + index, in bytes.
    #[must_use]
    pub fn limit_bytes(mut self, bytes: u64) -> Builder {
        self.config.limit_bytes = Some(bytes);
        self
    }

    /// Bounds uncompressed memory (mapped pages and frames), in bytes.
    #[must_use]
    pub fn resident_bytes(mut self, bytes: u64) -> Builder {
        self.config.resident_bytes = Some(bytes);
        self
    }

    /// Sets the codec, such as `lz4` or `zstd:3`.
    #[must_use]
    pub fn codec(self, spec: &str) -> Builder {
        self.set("codec", spec)
    }

    /// Sets how faults are delivered.
    #[must_use]
    pub fn delivery(mut self, delivery: Delivery) -> Builder {
        self.config.delivery = delivery;
        self
    }

    /// Sets the socket of the service for the remote store of the key `remote`.
    /// `memfold_remote::Service` is such a service.
    #[must_use]
    pub fn remote_socket(mut self, path: &str) -> Builder {
        self.config.remote_socket = Some(String::from(path));
        self
    }

    /// Starts the engine.
    ///
    /// # Errors
    /// An [`Error`] with the cause.
    pub fn build(self) -> Result<Memory, Error> {
        if let Some(e) = self.wrong {
            return Err(Error::Config(e.0));
        }
        Memory::start(self.config)
    }
}

/// Folded memory: an engine with its threads. Regions keep it alive. A child of fork doesn't have
/// it, and builds its own.
#[derive(Clone)]
pub struct Memory {
    engine: Arc<RegionEngine>,
}

struct RegionEngine {
    process_tag: ProcessTag,
    pager: Arc<Pager>,
    uffd: Arc<Uffd>,
    handlers: Option<FaultHandlers>,
    workers: Vec<Thread>,
    /// The descriptors that a child of `vfork` needs.
    descriptors: [i32; 2],
    /// Dropped last, when there are no threads any more.
    _counted: gate::EngineCount,
}

type Opened = (Arc<Uffd>, Option<Arc<Pagemap>>, bool);

impl Memory {
    /// Returns the default settings. Set at least a limit.
    pub fn builder() -> Builder {
        Builder { config: Config::new(memory_bytes()), wrong: None }
    }

    fn start(config: Config) -> Result<Memory, Error> {
        if config.delivery == Delivery::Gate && !gate::is_armed() {
            return Err(Error::Config(String::from(
                "delivery: gate works only under memfold run and in libraries that have armed the process. Use thread or signal.",
            )));
        }
        if config.delivery == Delivery::Gate && (config.swap.is_some() || config.remote.is_some()) {
            return Err(Error::Config(String::from(
                "delivery: gate does not support swap and remote in regions yet. Use thread or signal.",
            )));
        }
        if config.paging.hides() {
            return Err(Error::Config(String::from(
                "paging: guard and protection work only under memfold run; regions of a library need userfaultfd. Leave the setting out.",
            )));
        }
        if zone::are_crowded() {
            return Err(Error::System(
                "another engine: nearly all areas that engines and regions of a process can have are \
                 in use, so end some of these",
                Errno::NOMEM,
            ));
        }
        let engine_count = gate::EngineCount::one_more();
        // Before the first thread is started.
        gate::apart(|| Memory::start_apart(config, engine_count))
    }

    fn start_apart(config: Config, counted: gate::EngineCount) -> Result<Memory, Error> {
        let is_signal = config.delivery != Delivery::Thread;
        let (uffd, pagemap, has_move) = Memory::open(is_signal, config.use_move)?;
        let pagemap_number = pagemap.as_ref().map_or(0, |pagemap| pagemap.fd().as_raw_fd());
        let parts = PagerParts {
            space: Box::new(UffdSpace::new(uffd.clone(), pagemap)),
            has_move,
            reports_limit: false,
            stats: StatsPlace::Own(Box::default()),
            cpus: cpus(),
            disk: None,
            remote: None,
            delegate_queue: None,
            shared_limit: None,
            compressors: codec_threads(&config, cpus()).map_err(StartError::Setting)?,
        };
        let workers = config.worker_count(parts.cpus);
        let pager = Arc::new(Pager::new(config, parts)?);
        let (start, len) = pager.frames_zone();
        // SAFETY: the engine never touches an empty frame.
        unsafe { uffd.register(start, len, !has_move) }
            .map_err(|e| Error::System("Registering frames failed", e))?;
        let process_tag = ProcessTag::new().map_err(|e| {
            Error::System("Mapping a page that children of fork don't inherit failed", e)
        })?;
        let descriptors = match gate::is_armed() {
            true => [uffd.fd().as_raw_fd(), pagemap_number],
            false => [0; 2],
        };
        let mut engine = RegionEngine {
            process_tag,
            pager,
            uffd,
            handlers: None,
            workers: Vec::new(),
            descriptors,
            _counted: counted,
        };
        if !descriptors.into_iter().filter(|fd| *fd != 0).all(gate::own) {
            return Err(Error::Config(alloc::format!(
                "A process with the gate can have at most {} engines. Drop one first.",
                sigbus::ENGINES_MAX
            )));
        }
        engine.start(workers, is_signal)?;
        Ok(Memory { engine: Arc::new(engine) })
    }

    /// Opens the descriptors of an engine, and finds out whether it can move pages.
    fn open(is_signal: bool, use_move: bool) -> Result<Opened, Error> {
        let supported = Uffd::probe().map_err(Error::Userfaultfd)?;
        // Without /proc, pages are copied.
        let number = |e| Error::System("Numbering a descriptor failed", e);
        let least = gate::least_descriptor();
        let pagemap = Pagemap::open().ok().map(|pagemap| pagemap.at_least(least));
        let pagemap = pagemap.transpose().map_err(number)?.map(Arc::new);
        let has_move = use_move && supported & feature::MOVE != 0 && pagemap.is_some();
        let mut features = if has_move { feature::MOVE } else { feature::WP };
        // WP is needed to drop clean pages. Without it they are moved out.
        features |= if is_signal { feature::SIGBUS | supported & feature::WP } else { 0 };
        let uffd = Uffd::open(features, is_signal).map_err(Error::Userfaultfd)?;
        let uffd = uffd.at_least(least).map_err(number)?;
        Ok((Arc::new(uffd), pagemap, has_move))
    }

    /// Makes a region of `len` bytes (rounded up to pages). It is all zeros, and takes no memory
    /// until it is touched.
    ///
    /// # Errors
    /// - EINVAL: the length is zero.
    /// - ENOMEM: no address space, too many regions, or too much folded data.
    /// - The errors of registering it.
    /// - [`Error::Inherited`] in a child of fork.
    pub fn region(&self, len: usize) -> Result<Region, Error> {
        if !self.engine.is_here() {
            return Err(Error::Inherited);
        }
        if len == 0 {
            return Err(Error::System("A region must have at least 1 byte", Errno::INVAL));
        }
        let len = len
            .checked_next_multiple_of(PAGE_SIZE)
            .ok_or(Error::System("The region is too large", Errno::NOMEM))?;
        if zone::are_crowded() {
            return Err(Error::System(
                "There is no room for another region: the process has nearly as many regions as it \
                 can have. Drop some",
                Errno::NOMEM,
            ));
        }
        self.engine.pager.0.table.room_for_more().map_err(|e| {
            Error::System(
                "There is no room for another region: the engine's tables are nearly full. Drop some \
                 regions, or use larger blocks",
                e,
            )
        })?;
        let zone = Zone::reserve(len, MAX_BYTES)
            .map_err(|e| Error::System("Reserving address space for a region failed", e))?;
        zone.keep_from_children();
        zone.keep_from_merging();
        zone.show_in_dumps();
        let engine = self.engine.clone();
        let _unsignalled = SignalsBlocked::new();
        let mut areas = engine.pager.0.areas.write();
        let protects = engine.pager.protects();
        if engine.pager.config().delivery == Delivery::Gate {
            gate::begins(&(zone.start()..zone.start() + len));
        }
        // SAFETY: the engine serves the area from now on, and its threads never touch it.
        unsafe { engine.uffd.register(zone.start(), len, protects) }
            .map_err(|e| Error::System("Registering a region failed", e))?;
        areas.add((zone.start() >> PAGE_SHIFT) as u64, ((zone.start() + len) >> PAGE_SHIFT) as u64);
        drop(areas);
        Ok(Region { zone: ManuallyDrop::new(zone), engine })
    }

    /// Returns the counters, brought up to date. A child of fork gets the last values before the
    /// fork.
    pub fn stats(&self) -> &Stats {
        if self.engine.is_here() {
            let _unsignalled = SignalsBlocked::new();
            self.engine.pager.gauges().publish();
        }
        self.engine.pager.stats()
    }

    /// Returns the counters of the compressed store, such as the waits for its locks.
    pub fn store_stats(&self) -> memfold_store::StoreStats {
        let _unsignalled = SignalsBlocked::new();
        self.engine.pager.0.backing.store().stats()
    }

    /// Returns how faults are delivered.
    pub fn delivery(&self) -> Delivery {
        self.engine.pager.config().delivery
    }

    /// Verifies the engine's structures. Slow; for tests. No other thread may use the memory
    /// meanwhile.
    ///
    /// # Errors
    /// The first condition that does not hold, or that this is a child of fork.
    pub fn check(&self) -> Result<(), String> {
        if !self.engine.is_here() {
            return Err(String::from(INHERITED));
        }
        let _unsignalled = SignalsBlocked::new();
        self.engine.pager.check()
    }
}

impl RegionEngine {
    /// Returns whether the caller is in the process that made it. No other process may use it.
    fn is_here(&self) -> bool {
        self.process_tag.is_here()
    }

    /// Starts its background threads, and what serves its faults: the signal handler, or threads.
    fn start(&mut self, workers: usize, is_signal: bool) -> Result<(), Error> {
        let no_threads = |e| Error::System("Starting engine threads failed", e);
        let starts = background::threads(&self.pager, workers);
        self.workers = starts
            .iter()
            .map(EngineThread::by_libc)
            .collect::<Result<_, _>>()
            .map_err(no_threads)?;
        if !is_signal {
            let handlers = FaultHandlers::start(&self.pager, &self.uffd).map_err(no_threads)?;
            self.handlers = Some(handlers);
            return Ok(());
        }
        // The gate's handler uses the same list.
        let is_listed = sigbus::enlist(&self.pager, !gate::is_armed())
            .map_err(|e| Error::System("Mapping a page for the list of engines failed", e))?;
        if !is_listed {
            return Err(Error::Config(alloc::format!(
                "At most {} engines of a process can use signal delivery. Drop one, or use delivery thread.",
                sigbus::ENGINES_MAX
            )));
        }
        Ok(())
    }
}

impl Drop for RegionEngine {
    fn drop(&mut self) {
        if !self.is_here() {
            // This is a copy. Its threads don't exist here, its descriptors act on the parent, and
            // its locks may be held for ever.
            forget((self.handlers.take(), take(&mut self.workers), self.pager.clone()));
            return;
        }
        self.handlers = None;
        self.pager.stop();
        self.workers.drain(..).for_each(Thread::join);
        let _unsignalled = SignalsBlocked::new();
        sigbus::delist(&self.pager);
        self.descriptors.into_iter().filter(|fd| *fd != 0).for_each(gate::disown);
    }
}

/// A region of folded memory. Dropping it discards its contents.
///
/// A child of fork doesn't have it: touching it there is a segmentation fault. The methods do
/// nothing there, and dropping it changes nothing, in the child or in the parent.
///
/// Any thread may read and write it through [`Region::as_ptr`], by the same rules as other memory.
/// In gate delivery that holds for system calls too. In signal delivery a system call fails with
/// EFAULT if it is passed a folded part. It fails too if it is to write to a page that was only
/// read since it was folded. [`Region::pin`] it around the call.
///
/// Contents are discarded by [`Region::discard`] only, not by `madvise`. The kernel merges none of
/// its pages with equal ones. In signal delivery the program must not request that later, by
/// MADV_MERGEABLE or PR_SET_MEMORY_MERGE: writes would be lost.
pub struct Region {
    /// Dropped by `drop`, but not in a child, which may have other memory at its addresses.
    zone: ManuallyDrop<Zone>,
    engine: Arc<RegionEngine>,
}

/// Keeps a part of a region in memory until dropped.
pub struct PinnedRange<'a> {
    region: &'a Region,
    addrs: Range<usize>,
}

impl Region {
    /// Returns the address of the first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.zone.as_ptr()
    }

    /// Returns the length in bytes, rounded up to pages.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.zone.len()
    }

    /// Returns the bytes, for reading.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the zone is mapped and readable for its whole length while `self` lives; faults
        // are served by the engine, which never changes a byte.
        unsafe { core::slice::from_raw_parts(self.zone.as_ptr(), self.zone.len()) }
    }

    /// Returns the bytes, for writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the zone is mapped and writable for its whole length while `self` lives; the
        // engine serves faults, and never changes a byte. `&mut self` makes the borrow unique.
        unsafe { core::slice::from_raw_parts_mut(self.zone.as_ptr(), self.zone.len()) }
    }

    /// Folds the pages of a byte range now (rounded inwards to pages). Returns the number of
    /// evicted pages.
    ///
    /// # Panics
    /// If the range reaches past the region.
    pub fn pageout(&self, range: Range<usize>) -> u64 {
        let _unsignalled = SignalsBlocked::new();
        self.addrs(&range).map_or(0, |addrs| self.engine.pager.mappings().page_out_at(addrs))
    }

    /// Makes the pages of a byte range (rounded inwards) the first to be folded when memory is
    /// needed.
    ///
    /// # Panics
    /// If the range reaches past the region.
    pub fn cold(&self, range: Range<usize>) {
        if let Some(addrs) = self.addrs(&range) {
            let _unsignalled = SignalsBlocked::new();
            self.engine.pager.mappings().cool_at(addrs);
        }
    }

    /// Loads the folded pages of a byte range (rounded outwards).
    ///
    /// # Panics
    /// If the range reaches past the region.
    pub fn willneed(&self, range: Range<usize>) {
        if let Some(addrs) = self.addrs(&range) {
            let _unsignalled = SignalsBlocked::new();
            self.engine.pager.mappings().need_at(addrs);
        }
    }

    /// Loads a byte range (rounded outwards) and keeps it in memory as long as the pin lives. It is
    /// readable and writable for the kernel too. Untouched pages are made.
    ///
    /// # Panics
    /// If the range reaches past the region.
    pub fn pin(&self, range: Range<usize>) -> PinnedRange<'_> {
        let Some(addrs) = self.addrs(&range) else {
            return PinnedRange { region: self, addrs: 0..0 };
        };
        let unsignalled = SignalsBlocked::new();
        self.engine.pager.mappings().pin_at(addrs.clone());
        // Signals are allowed again before the loop, which faults.
        drop(unsignalled);
        let at = range.start & !(PAGE_SIZE - 1);
        for page in (at..range.end).step_by(PAGE_SIZE) {
            // SAFETY: the address is inside the region. A read makes the page present; pinned, it
            // stays.
            unsafe { self.zone.as_ptr().add(page).read_volatile() };
        }
        PinnedRange { region: self, addrs }
    }

    /// Keeps the loaded pages of a range in memory until [`Region::unpin`], for a fork. Untouched
    /// pages stay untouched.
    pub(crate) fn hold(&self, range: Range<usize>) {
        self.engine.pager.0.to_unshare.note_unseen_forks();
        let _unsignalled = SignalsBlocked::new();
        self.engine.pager.mappings().pin_at(self.at(&range));
    }

    /// Ends a pin whose guard was forgotten. The range is that of the pin.
    pub(crate) fn unpin(&self, range: Range<usize>) {
        let _unsignalled = SignalsBlocked::new();
        self.engine.pager.mappings().unpin_at(self.at(&range));
    }

    fn at(&self, range: &Range<usize>) -> Range<usize> {
        let start = self.as_ptr() as usize;
        start + range.start..start + range.end
    }

    /// Drops the contents of a byte range (rounded inwards to pages): it reads as zeros.
    ///
    /// # Safety
    /// - No reference into the range is alive, and no other thread is using it.
    ///
    /// # Panics
    /// If the range reaches past the region.
    pub unsafe fn discard(&self, range: Range<usize>) {
        if let Some(addrs) = self.addrs(&range) {
            let _unsignalled = SignalsBlocked::new();
            // SAFETY: the caller promises that no reference is alive, and no other thread uses the
            // range.
            unsafe { self.engine.pager.mappings().discard_at(addrs) };
        }
    }

    /// Returns the addresses of a range; `None` in a child of fork.
    fn addrs(&self, range: &Range<usize>) -> Option<Range<usize>> {
        assert!(
            range.start <= range.end && range.end <= self.zone.len(),
            "the range reaches past the region"
        );
        let start = self.zone.start();
        self.engine.is_here().then(|| start + range.start..start + range.end)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if !self.engine.is_here() {
            return;
        }
        let pager = &self.engine.pager;
        let _unsignalled = SignalsBlocked::new();
        let mut areas = pager.0.areas.write();
        // Unregistered first: from now on no fault arrives for it.
        let _ = self.engine.uffd.unregister(self.zone.start(), self.zone.len());
        KeyRanges::new(&pager.0).forget(
            &mut areas,
            self.zone.start(),
            self.zone.start() + self.zone.len(),
            false,
        );
        drop(areas);
        if pager.config().delivery == Delivery::Gate {
            gate::ends(&(self.zone.start()..self.zone.start() + self.zone.len()));
        }
        // SAFETY: the region is being dropped, so no thread uses the zone again.
        unsafe { ManuallyDrop::drop(&mut self.zone) };
    }
}

impl Drop for PinnedRange<'_> {
    fn drop(&mut self) {
        if self.region.engine.is_here() {
            let _unsignalled = SignalsBlocked::new();
            self.region.engine.pager.mappings().unpin_at(self.addrs.clone());
        }
    }
}
