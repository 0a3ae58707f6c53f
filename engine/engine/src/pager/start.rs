//! Construction of a pager from settings and parts.
use crate::area::lock::AreaLock;
use crate::backing::Backing;
use crate::backing::contexts::ContextPool;
use crate::backing::fingerprint::Fingerprints;
use crate::config::{Config, Delivery, DictionarySource};
use crate::folio::table::FolioTable;
use crate::holds::Holds;
use crate::memory::budget::Budget;
use crate::memory::frames::Frames;
use crate::memory::mapper::Mapper;
use crate::memory::unshare::ToUnshare;
use crate::pager::{Pager, PagerParts};
use crate::parts::EngineParts;
use crate::policy::first_touches::FirstTouches;
use crate::policy::stream_readahead::Streams;
use crate::policy::swap_readahead::SwapReadahead;
use crate::requests::background::RequestQueue;
use crate::requests::device_faults::{DeviceFaults, READERS};
use crate::requests::pause::ForkPauses;
use alloc::boxed::Box;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use core::fmt::{Display, Formatter};
use core::time::Duration;
use memfold_os::Errno;
use memfold_os::memory::zone::Zone;
use memfold_os::thread::delegate_queue::DelegateQueue;
use memfold_os::units::{MAX_BYTES, PAGE_SIZE};
use memfold_store::{
    CodecSpec, CompressorPool, DICTIONARY_FILE_BYTES_MAX, Dictionary, SoftwarePool, Store,
    StoreConfig, StoreError,
};
use memfold_swap::disk::Disk;
use memfold_swap::disk::file_disk::{FileDisk, FileDiskOptions};
use memfold_swap::remote::Remote;
use memfold_swap::remote::socket::SocketRemote;
use memfold_swap::{Swap, SwapBounds};

/// Blocks that stay decompressed while their pages are loaded one after another.
const CACHED_BLOCKS: usize = 4;

/// Why an engine could not start. Displays as one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StartError {
    /// Reserving address space failed.
    AddressSpace(Errno),
    /// A setting is invalid, or a resource that it needs is unavailable. The text names it.
    Setting(String),
}

impl From<Errno> for StartError {
    fn from(errno: Errno) -> StartError {
        StartError::AddressSpace(errno)
    }
}

impl From<String> for StartError {
    fn from(why: String) -> StartError {
        StartError::Setting(why)
    }
}

impl Display for StartError {
    fn fmt(&self, f: &mut Formatter<'_>) -> core::fmt::Result {
        match self {
            StartError::AddressSpace(errno) => {
                write!(f, "Reserving address space for the engine failed: {errno}")
            }
            StartError::Setting(why) => f.write_str(why),
        }
    }
}
impl core::error::Error for StartError {}

fn make_store(config: &Config, cpus: usize) -> Result<Store, StartError> {
    let codec = CodecSpec::parse(&config.codec).map_err(|e| e.to_string())?;
    let store = Store::new(&StoreConfig {
        codec,
        block_order: config.block_order,
        pools: config.pool_count(cpus),
        pool_bytes_max: config.max_pool_bytes.unwrap_or(0),
        accept_percent: config.accept_percent as u8,
        verify: config.verify,
        cached_blocks: CACHED_BLOCKS,
        ..StoreConfig::default()
    })
    .map_err(|e| match e {
        StoreError::Memory(errno) => StartError::AddressSpace(errno),
        other => StartError::Setting(other.to_string()),
    })?;
    set_up_dictionaries(&store, &config.canned)?;
    Ok(store)
}

/// Starts threads of libc that compress several blocks at once, with `--batch` above 1.
///
/// # Errors
/// The codec is unknown, or no more threads can be started.
pub fn codec_threads(
    config: &Config,
    cpus: usize,
) -> Result<Option<Box<dyn CompressorPool>>, String> {
    if config.batch <= 1 {
        return Ok(None);
    }
    let codec = CodecSpec::parse(&config.codec).map_err(|e| e.to_string())?;
    let threads = (cpus - 1).clamp(1, 63);
    SoftwarePool::start(codec, config.block_order.bytes(), threads)
        .map(|pool| Some(Box::new(pool) as Box<_>))
        .map_err(|e| format!("Starting the compression threads failed: {e}"))
}

impl Pager {
    /// Makes an engine without areas. The caller registers the frames' zone
    /// ([`Pager::frames_zone`]) and starts threads.
    ///
    /// # Errors
    /// Settings that contradict each other, an unknown codec, or too little address space.
    pub fn new(config: Config, parts: PagerParts) -> Result<Pager, StartError> {
        config.check().map_err(|e| e.to_string())?;
        let store = make_store(&config, parts.cpus)?;
        // Without a limit, no more than the machine has is on its way in or out at once.
        let most = match config.resident_max_bytes() {
            u64::MAX => config.memory_bytes,
            bound => bound,
        };
        let frame_bytes = 2 * most as usize + (64 << 20);
        let readers = if config.swap.is_some() { READERS } else { 0 };
        let count = config.worker_count(parts.cpus) + 2 * parts.cpus + readers + 4;
        let contexts = ContextPool::new(count, config.block_order, parts.compressors, config.batch);
        let recompress = config.recompress.as_deref().map(CodecSpec::parse).transpose();
        let recompress = recompress.map_err(|e| format!("--recompress: {e}"))?;
        let stats = Arc::new(parts.stats);
        let fingerprints =
            Fingerprints::new().map_err(|e| format!("no random bytes from the kernel: {e}"))?;
        let mut backing = Backing::new(store, contexts, fingerprints, stats.clone());
        if let Some(path) = &config.swap {
            let disk = parts.disk.map_or_else(|| open_disk(path), Ok)?;
            let remote = match parts.remote {
                Some(remote) => Some(remote),
                None => open_remote(&config)?.map(|remote| Box::new(remote) as Box<_>),
            };
            backing.set_swap(make_swap(&config, disk, remote, parts.delegate_queue.clone())?);
        }
        let drops_clean =
            matches!(config.delivery, Delivery::Signal | Delivery::Gate) && parts.space.can_drop();
        let frames = Frames::new(frame_bytes, 4)?;
        let window_order = if config.readahead { config.folio_order } else { config.block_order };
        Ok(Pager(EngineParts {
            table: FolioTable::new(
                config.block_order,
                config.shard_bytes,
                config.swap.is_some(),
                stats.clone(),
            )?,
            mapper: Mapper::new(
                parts.space,
                frames,
                parts.has_move && config.use_move,
                drops_clean,
                stats.clone(),
            ),
            backing,
            budget: Budget::new(&config, parts.shared_limit, parts.reports_limit),
            areas: AreaLock::new(),
            streams: Streams::new(config.block_order, window_order),
            first_touches: FirstTouches::new(config.block_order, window_order),
            swap_readahead: SwapReadahead::new(config.block_order),
            requests: RequestQueue::new(),
            reads: DeviceFaults::default(),
            delegate_queue: parts.delegate_queue,
            pauses: ForkPauses::default(),
            to_unshare: ToUnshare::new(),
            holds: Holds::of_process(config.delivery == Delivery::Gate),
            scratch: Zone::reserve(MAX_BYTES, PAGE_SIZE)?,
            recompress,
            cpus: parts.cpus,
            stats,
            config,
        }))
    }
}

fn make_swap(
    config: &Config,
    disk: Box<dyn Disk>,
    remote: Option<Box<dyn Remote>>,
    delegate_queue: Option<Arc<DelegateQueue>>,
) -> Result<Swap, String> {
    let bounds = SwapBounds {
        size_bytes: config.swap_bytes,
        keep_free_bytes: config.swap_keep_free_bytes,
        remote_bytes: config.remote_bytes,
        mark_percent: config.remote_percent as u64,
        remote_expiry: Duration::from_secs(config.remote_expiry_s as u64),
        limit_bytes: config.resident_max_bytes(),
        run_order_max: config.folio_order,
    };
    Swap::new(disk, remote, config.swap_encrypt, bounds)
        .map(|swap| swap.with_delegate_queue(delegate_queue))
        .map_err(|e| format!("--swap: Setting up the swap file failed: {e}"))
}
fn open_disk(path: &str) -> Result<Box<dyn Disk>, String> {
    let disk =
        FileDisk::open(path, FileDiskOptions::default()).map_err(|e| format!("--swap: {e}"))?;
    Ok(Box::new(disk))
}

/// Connects to the service that the settings name. Returns `None` without a remote store.
///
/// # Errors
/// One line with the reason.
pub fn open_remote(config: &Config) -> Result<Option<SocketRemote>, String> {
    let Some(url) = &config.remote else { return Ok(None) };
    let no_service = || {
        "--remote: No service for the remote store runs. Start one with memfold_remote::Service."
            .to_string()
    };
    let socket = config.remote_socket.as_deref().ok_or_else(no_service)?;
    let timeout = Duration::from_secs(config.remote_timeout_s as u64);
    let remote = SocketRemote::new(socket, url, timeout).map_err(|e| format!("--remote: {e}"))?;
    Ok(Some(remote))
}

/// Makes the store use dictionaries: its own, or that of a file.
fn set_up_dictionaries(store: &Store, canned: &DictionarySource) -> Result<(), String> {
    if *canned == DictionarySource::Off {
        return Ok(());
    }
    let codec = store.codec();
    if !codec.takes_dictionaries() {
        return Err(format!(
            "--canned: Codec {codec} does not support dictionaries. Use delta, lz4 or zstd."
        ));
    }
    let DictionarySource::File(path) = canned else {
        store.set_canned(true);
        return Ok(());
    };
    let fail = |e: &dyn core::fmt::Display| format!("--canned: {path}: {e}");
    let bytes = memfold_os::file::read(path, DICTIONARY_FILE_BYTES_MAX).map_err(|e| match e {
        memfold_os::Errno::FBIG => fail(&"The file is too large for a dictionary"),
        e => fail(&e),
    })?;
    let dictionary = Dictionary::from_file(&bytes).map_err(|e| fail(&e))?;
    store.install_dictionary(&dictionary).map_err(|e| fail(&e))
}
