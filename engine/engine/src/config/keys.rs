//! The one table of settings. The fields of [`Config`], their defaults, flags and help, and the
//! settings passed to other processes follow it, and so does the table of the documents. A new
//! setting is one entry here.
use crate::config::choices::{Delivery, DictionarySource, OnFull, PagingKind};
use crate::config::kind::{self, ValueKind};
use alloc::string::{String, ToString};
use memfold_os::units::Order;

/// One setting, as flags and help show it.
pub struct SettingKey {
    /// Name, as in `--name`.
    pub name: &'static str,
    /// The form of a value, for help.
    pub value: &'static str,
    /// The default, as text; `none` where there is none.
    pub default: &'static str,
    /// One line of help.
    pub help: &'static str,
    /// Its users.
    pub audience: Audience,
    pub(super) set: fn(&mut Config, &str) -> Result<(), String>,
    /// Returns the value as text; `None` if it is not set.
    pub(super) get: fn(&Config) -> Option<String>,
}

/// The users of a setting.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Audience {
    /// Users of memfold.
    Users,
    /// Developers who measure memfold: it is not in the short help.
    Measuring,
    /// Programs that make regions: `run` has no such flag.
    Libraries,
}

macro_rules! keys {
    ($(#[doc = $doc:literal] $field:ident: $type:ty = $default:expr, $kind:expr;
       $audience:ident $name:literal $value:literal $text:literal $help:literal;)*) => {
        /// All settings of one engine. Made by [`Config::new`], changed by [`Config::set`], checked
        /// as a whole by [`Config::check`].
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct Config {
            /// Memory of the machine (or of the cgroup), bytes. Percentages refer to it, and no
            /// limit may exceed it.
            pub memory_bytes: u64,
            /// Socket of the service for the remote store. It has no key: the code that starts the
            /// service sets it.
            pub remote_socket: Option<String>,
            $(#[doc = $doc] pub $field: $type,)*
        }

        impl Config {
            /// Returns the defaults, for a machine of `memory_bytes`.
            pub fn new(memory_bytes: u64) -> Config {
                Config { memory_bytes, remote_socket: None, $($field: $default,)* }
            }
        }

        /// Every setting.
        pub const KEYS: &[SettingKey] = &[$(SettingKey {
            name: $name,
            value: $value,
            default: $text,
            help: $help,
            audience: Audience::$audience,
            set: |config, text| {
                const KIND: ValueKind<$type> = $kind;
                config.$field = (KIND.parse)(text, config.memory_bytes)?;
                Ok(())
            },
            get: |config| {
                const KIND: ValueKind<$type> = $kind;
                (KIND.show)(&config.$field)
            },
        },)*];
    };
}

/// States what the limit counts, for help and documents.
pub const COUNTED: &str = "The limit counts the private memory of all processes of the run: anonymous pages, written pages of private file \
    mappings, the compressed pool, and memfold's own tables. Processes without an engine count too. It does not count other pages of \
    files (the page cache), shared memory, or kernel memory; memfold stat shows the mapped pages of files and the shared memory of \
    each process.";

keys! {
    /// Bound of resident + frames + pool + index, bytes.
    limit_bytes: Option<u64> = None, kind::SIZE_OR_NONE;
    Users "limit" "SIZE" "none" "Physical memory of the whole run: its private memory, the compressed pool and memfold's tables";

    /// Bound of resident + frames, bytes.
    resident_bytes: Option<u64> = None, kind::SIZE_OR_NONE;
    Users "resident" "SIZE" "none" "Uncompressed memory: resident pages and the swap cache";

    /// CPU time that folding may take, ten-thousandths of its own; 0: bounds alone decide.
    slowdown: u32 = 0, kind::SLOWDOWN;
    Users "slowdown" "PERCENT|off" "off" "Fold what the program does not use, as long as that slows it down by at most so much; without a limit, 2% is the default";

    /// Seconds without work after which a process is idle.
    idle_s: u32 = 30, kind::number::<86400>();
    Users "idle" "SECONDS" "30" "With --slowdown: time without work after which all memory of a process is folded";

    /// Codec spec, such as `lz4` or `zstd:3`; the store checks it.
    codec: String = "delta".to_string(), kind::TEXT;
    Users "codec" "NAME[:LEVEL]" "delta" "Compression: delta, lz4, lz4hc, zstd, deflate or none; :LEVEL is optional; add +shuffle for arrays of numbers";

    /// Dictionaries (Z8).
    canned: DictionarySource = DictionarySource::Off, kind::CANNED;
    Users "canned" "on|off|FILE" "off" "Compress with a dictionary (delta, lz4 and zstd only): on makes one from folded pages and uses it where it helps; FILE is a dictionary from memfold dict train";

    /// Largest folio.
    folio_order: Order = Order::MAX, kind::ORDER;
    Users "folio" "SIZE" "2M" "Largest folio, which is the unit of eviction, 4K to 2M";

    /// Unit of compression.
    block_order: Order = Order::new(2).expect("2 is an order"), kind::ORDER;
    Users "block" "SIZE" "16K" "Unit of compression, 4K to 2M; blocks that are accessed at random are split into pages";

    /// How faults arrive.
    delivery: Delivery = Delivery::Thread, kind::DELIVERY;
    Libraries "delivery" "thread|signal|gate" "thread" "How page faults of a region are handled: by handler threads (thread) or in the faulting thread (signal, gate)";

    /// Action at the limit.
    on_full: OnFull = OnFull::Grow, kind::ON_FULL;
    Users "on-full" "grow|stop" "grow" "When nothing more can be folded: exceed the limit with a warning (grow), or end the process with status 125 (stop)";

    /// Directory of the swap file.
    swap: Option<String> = None, kind::PATH;
    Users "swap" "DIR" "none" "Directory for an unnamed swap file, which takes data that does not compress or fit";

    /// Its maximum size, bytes.
    swap_bytes: u64 = 64 << 30, kind::SIZE;
    Users "swap-size" "SIZE" "64G" "Largest size of the swap file";

    /// Whether it is encrypted, or only checked.
    swap_encrypt: bool = true, kind::SWITCH;
    Users "swap-encrypt" "on|off" "on" "Encrypt the swap file; off keeps checksums only";

    /// Bytes that stay free on its file system.
    swap_keep_free_bytes: u64 = 1 << 30, kind::SIZE;
    Users "swap-keep-free" "SIZE" "1G" "Space that the swap file leaves free on its file system";

    /// Address of the remote store, without credentials.
    remote: Option<String> = None, kind::PATH;
    Users "remote" "URL" "none" "Remote store for the coldest data of the swap file: redis://HOST:PORT, rediss:// with TLS, several hosts for a cluster";

    /// Maximum size of its data, bytes.
    remote_bytes: u64 = 256 << 30, kind::SIZE;
    Users "remote-size" "SIZE" "256G" "Most data that the remote store may hold";

    /// Share of the swap file in use at which data moves there, percent.
    remote_percent: u32 = 90, kind::PERCENT;
    Users "remote-at" "PERCENT" "90" "Share of --swap-size in use above which the coldest data moves to the remote store";

    /// The file with its password; only the service reads it.
    remote_auth: Option<String> = None, kind::PATH;
    Users "remote-auth" "FILE" "none" "File with the password of the remote store, or with user and password on a line each; only this user may be able to read it";

    /// The file with certificates to trust; only the service reads it.
    remote_ca: Option<String> = None, kind::PATH;
    Users "remote-ca" "FILE" "none" "Certificates (PEM) to trust with rediss://, instead of those of the system";

    /// Seconds for which a read is retried.
    remote_timeout_s: u32 = 60, kind::number::<3600>();
    Users "remote-timeout" "SECONDS" "60" "Time after which a read that keeps failing ends the program";

    /// Seconds that an object lives in the store unless it is refreshed.
    remote_expiry_s: u32 = 24 * 60 * 60, kind::EXPIRY;
    Users "remote-expiry" "SECONDS" "86400" "Time after which the remote store deletes data that is no longer refreshed; choose more than the machine ever sleeps";

    /// Pools; 0 for [`Config::pool_count`] to choose.
    pools: usize = 0, kind::COUNT;
    Users "pools" "N" "0" "Compressed pools, 1 to 64; 0 means one per CPU";

    /// Background threads; 0 for [`Config::worker_count`] to choose.
    workers: usize = 0, kind::COUNT;
    Users "workers" "N" "0" "Background threads that compress and read ahead, 1 to 64; 0 means one per CPU";

    /// Bound of the pools, bytes (Z10).
    max_pool_bytes: Option<u64> = None, kind::SIZE_OR_NONE;
    Users "max-pool" "SIZE" "none" "Most memory for the compressed pools; data that does not fit stays uncompressed";

    /// Share of that bound below which full pools take pages again, percent (Z10).
    accept_percent: u32 = 90, kind::PERCENT;
    Users "accept-threshold" "PERCENT" "90" "Share of --max-pool that full pools must fall to before they accept pages again";

    /// Pools count against the limit (Z6).
    pool_counts: bool = true, kind::SWITCH;
    Users "pool-counts" "on|off" "on" "Count the compressed pools against --limit; off leaves them out, as zram does";

    /// Blocks of a folio compressed at once (Z9).
    batch: usize = 1, kind::BATCH;
    Libraries "batch" "N" "1" "Blocks of a folio that are compressed at once on several cores, 1 to 64";

    /// Codec for cold blocks (M9); the store checks it.
    recompress: Option<String> = None, kind::TEXT_OR_OFF;
    Users "recompress" "NAME[:LEVEL]" "off" "Stronger codec, used in the background for cold blocks and for blocks that did not compress; off for none";

    /// Seconds without use after which a block is cold.
    recompress_after_s: u32 = 30, kind::number::<65535>();
    Users "recompress-after" "SECONDS" "30" "Time without access after which a block is compressed again";

    /// Percent of one core that recompression may take.
    recompress_cpu_percent: u32 = 5, kind::PERCENT;
    Users "recompress-cpu" "PERCENT" "5" "Share of one core that recompression may use";

    /// Verify mode (Z7).
    verify: bool = false, kind::SWITCH;
    Users "verify" "on|off" "off" "Decompress and compare every block before its original is freed";

    /// Budget of clean copies, percent of resident memory.
    clean_percent: u32 = 100, kind::PERCENT;
    Users "clean" "PERCENT" "100" "Stored copies of resident pages that may be kept, as a share of resident memory";

    /// Large windows and read-ahead for streams.
    readahead: bool = true, kind::SWITCH;
    Users "readahead" "on|off" "on" "Load sequential data in large windows, ahead of its use";

    /// Folios that refault at a short distance become active.
    workingset: bool = true, kind::SWITCH;
    Measuring "workingset" "on|off" "on" "Make pages that refault soon after their eviction active; off is for measurements";

    /// Loads forced onto the small-page path, percent (M6).
    fallback_percent: u32 = 0, kind::PERCENT;
    Measuring "fallback" "PERCENT" "0" "Share of loads that are forced onto the single-page path, for measurements";

    /// Use UFFDIO_MOVE if the kernel has it.
    use_move: bool = true, kind::SWITCH;
    Measuring "move" "on|off" "on" "Move pages with UFFDIO_MOVE where the kernel has it; off forces copies, for measurements";

    /// How a touch of folded memory is reported.
    paging: PagingKind = PagingKind::Userfaultfd, kind::PAGING;
    Users "paging" "userfaultfd|guard|protection" "userfaultfd" "How memfold run detects an access to folded memory; guard pages (Linux 6.16) are slower, and are chosen where userfaultfd is unavailable; protection is slower still and folds at least 64K at once, and is chosen where both are";

    /// Address span of one index lock, bytes (C7).
    shard_bytes: u64 = 2 << 20, kind::SHARD;
    Measuring "shard" "SIZE" "2M" "Address range that one lock of the index covers, 2M to 1G";

    /// Percent of the limit from which on `run` adopts.
    adopt_percent: u32 = 75, kind::PERCENT;
    Users "adopt-at" "PERCENT" "75" "Share of the limit that the program must use before memfold run manages its memory";

    /// `run` folds memory that the program keeps out of core dumps.
    fold_dont_dump: bool = false, kind::DONT_DUMP;
    Users "dont-dump" "leave|fold" "leave" "What memfold run does with memory that the program keeps out of core dumps (secrets, or a database's buffer pool): leave it, or fold it";
}
