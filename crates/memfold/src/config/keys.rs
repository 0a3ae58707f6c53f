//! The one table of settings: the fields of [`Config`], their defaults, flags, help, what is passed
//! on to other processes and the table of the documents all follow it. A new setting is one entry
//! here.
use crate::config::choices::{Delivery, DictionarySource, OnFull};
use crate::config::kind::{self, ValueKind};
use alloc::string::{String, ToString};
use memfold_sys::units::Order;

/// One setting, as flags and help show it.
pub struct SettingKey {
    /// Name, as in `--name`.
    pub name: &'static str,
    /// What a value looks like.
    pub value: &'static str,
    /// The default, as text; `none` where there is none.
    pub default: &'static str,
    /// One line of help.
    pub help: &'static str,
    /// Whom it is for.
    pub audience: Audience,
    pub(super) set: fn(&mut Config, &str) -> Result<(), String>,
    /// The value as text; `None` if it is not set.
    pub(super) get: fn(&Config) -> Option<String>,
}

/// Whom a setting is for.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Audience {
    /// Whoever uses memfold.
    Users,
    /// Who measures it: kept out of the short help.
    Measuring,
    /// Programs that make regions: `run` has no such flag.
    Libraries,
}

macro_rules! keys {
    ($(#[doc = $doc:literal] $field:ident: $type:ty = $default:expr, $kind:expr;
       $audience:ident $name:literal $value:literal $text:literal $help:literal;)*) => {
        /// All settings of one engine. Made by [`Config::new`], changed by [`Config::set`], judged
        /// whole by [`Config::check`].
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct Config {
            /// Memory of the machine (or of the cgroup), bytes: what a percentage refers to and
            /// what no limit may pass.
            pub memory_bytes: u64,
            /// Socket of the service that speaks with the remote store. No key: whoever starts the
            /// service sets it.
            pub remote_socket: Option<String>,
            $(#[doc = $doc] pub $field: $type,)*
        }

        impl Config {
            /// The defaults, for a machine of `memory_bytes`.
            pub fn new(memory_bytes: u64) -> Config {
                Config { memory_bytes, remote_socket: None, $($field: $default,)* }
            }
        }

        /// Every setting there is.
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

/// What the limit counts: help and documents say it in these words.
pub const COUNTED: &str = "The limit counts the private memory of all processes of the run: anonymous pages, written pages of private file \
    mappings, the compressed pool, and memfold's own tables. A process without an engine, because it is small or can't be managed, counts \
    too. Other pages of files (the page cache), shared memory, and what the kernel holds for the program are not counted; memfold stat \
    shows the mapped ones of files and shared memory for each process.";

keys! {
    /// Bound of resident + frames + pool + index, bytes.
    limit_bytes: Option<u64> = None, kind::SIZE_OR_NONE;
    Users "limit" "SIZE" "none" "physical memory of the whole run: its private memory, the compressed pool and memfold's tables";

    /// Bound of resident + frames, bytes.
    resident_bytes: Option<u64> = None, kind::SIZE_OR_NONE;
    Users "resident" "SIZE" "none" "uncompressed memory: mapped pages and the frames of the swap cache";

    /// Codec spec, such as `lz4` or `zstd:3`; the store checks it.
    codec: String = "lz4".to_string(), kind::TEXT;
    Users "codec" "NAME[:LEVEL]" "lz4" "compression: lz4, lz4hc, zstd, deflate or none, with a level if wanted; with +shuffle for numbers";

    /// Dictionaries (Z8).
    canned: DictionarySource = DictionarySource::Off, kind::CANNED;
    Users "canned" "on|off|FILE" "off" "compress lz4 or zstd against a dictionary: made from folded pages where it wins, or read from FILE";

    /// Largest folio.
    folio_order: Order = Order::MAX, kind::ORDER;
    Users "folio" "SIZE" "2M" "largest folio, 4K to 2M";

    /// Unit of compression.
    block_order: Order = Order::new(2).expect("2 is an order"), kind::ORDER;
    Users "block" "SIZE" "16K" "unit of compression, 4K to 2M; what is touched at random is cut into pages";

    /// How faults arrive.
    delivery: Delivery = Delivery::Thread, kind::DELIVERY;
    Libraries "delivery" "thread|signal|gate" "thread" "who serves a fault of a region: handler threads, or the thread that has it";

    /// What happens at the limit.
    on_full: OnFull = OnFull::Grow, kind::ON_FULL;
    Users "on-full" "grow|stop" "grow" "when nothing more can be folded: exceed the limit with a warning, or end the program with status 125";

    /// Where the swap file is made.
    swap: Option<String> = None, kind::PATH;
    Users "swap" "DIR|FILE" "none" "swap file for what doesn't shrink or fit: nameless in a directory, or in that of a file that isn't there";

    /// The most that it may take, bytes.
    swap_bytes: u64 = 64 << 30, kind::SIZE;
    Users "swap-size" "SIZE" "64G" "the most that the swap file may take";

    /// Encrypted, not only checked.
    swap_encrypt: bool = true, kind::SWITCH;
    Users "swap-encrypt" "on|off" "on" "encrypt the swap file; off keeps checksums only";

    /// What stays free on its file system, bytes.
    swap_keep_free_bytes: u64 = 1 << 30, kind::SIZE;
    Users "swap-keep-free" "SIZE" "1G" "the swap file stops growing when its file system has no more than this left";

    /// Where the remote store is, without credentials.
    remote: Option<String> = None, kind::PATH;
    Users "remote" "URL" "none" "remote store for the cold end of the swap file: redis://HOST:PORT, rediss:// with TLS, several hosts for a cluster";

    /// The most that may lie there, bytes.
    remote_bytes: u64 = 256 << 30, kind::SIZE;
    Users "remote-size" "SIZE" "256G" "the most that may lie in the remote store";

    /// Share of the swap file in use at which data moves there, percent.
    remote_percent: u32 = 90, kind::PERCENT;
    Users "remote-at" "PERCENT" "90" "share of --swap-size in use at which the coldest of it moves to the remote store";

    /// The file with its password; only the service reads it.
    remote_auth: Option<String> = None, kind::PATH;
    Users "remote-auth" "FILE" "none" "password of the remote store, or user and password on a line each; nobody else may read the file";

    /// The file with certificates to trust; only the service reads it.
    remote_ca: Option<String> = None, kind::PATH;
    Users "remote-ca" "FILE" "none" "certificates (PEM) to trust with rediss://, in place of those of the system";

    /// Seconds for which a read is tried.
    remote_timeout_s: u32 = 60, kind::number::<3600>();
    Users "remote-timeout" "SECONDS" "60" "how long a read from the remote store is tried before the program is ended";

    /// Seconds that an object lives in the store when nobody refreshes it.
    remote_expiry_s: u32 = 24 * 60 * 60, kind::EXPIRY;
    Users "remote-expiry" "SECONDS" "86400" "how long data stays in the remote store when nobody refreshes it: longer than run and machine are ever stopped";

    /// Pools; 0 for [`Config::pool_count`] to choose.
    pools: usize = 0, kind::COUNT;
    Users "pools" "N" "0" "compressed pools, 1 to 64; 0 takes one per CPU";

    /// Background threads; 0 for [`Config::worker_count`] to choose.
    workers: usize = 0, kind::COUNT;
    Users "workers" "N" "0" "background threads that compress and read ahead, 1 to 64; 0 takes one per CPU";

    /// Bound of the pools, bytes (Z10).
    max_pool_bytes: Option<u64> = None, kind::SIZE_OR_NONE;
    Users "max-pool" "SIZE" "none" "most memory of the compressed pools; what they refuse stays uncompressed";

    /// Share of that bound below which full pools take pages again, percent (Z10).
    accept_percent: u32 = 90, kind::PERCENT;
    Users "accept-threshold" "PERCENT" "90" "share of --max-pool that full pools must fall to before they take pages again";

    /// Pools count against the limit (Z6).
    pool_counts: bool = true, kind::SWITCH;
    Users "pool-counts" "on|off" "on" "whether the compressed pools count against --limit; off leaves them out, as zram does";

    /// Blocks of a folio compressed at once (Z9).
    batch: usize = 1, kind::BATCH;
    Users "batch" "N" "1" "blocks of a folio, 1 to 64, that are compressed at once on several cores; 1 on the saving thread alone";

    /// Codec for cold blocks (M9); the store checks it.
    recompress: Option<String> = None, kind::TEXT_OR_OFF;
    Users "recompress" "NAME[:LEVEL]" "off" "stronger codec for cold blocks and for those that did not shrink, in the background; off for none";

    /// Seconds without use after which a block is cold.
    recompress_after_s: u32 = 30, kind::number::<65535>();
    Users "recompress-after" "SECONDS" "30" "how long a block is left untouched before it is compressed again";

    /// Percent of one core that recompression may take.
    recompress_cpu_percent: u32 = 5, kind::PERCENT;
    Users "recompress-cpu" "PERCENT" "5" "time of one core that compressing again may take";

    /// Verify mode (Z7).
    verify: bool = false, kind::SWITCH;
    Users "verify" "on|off" "off" "decompress and compare every block before its original is let go";

    /// Budget of clean copies, percent of resident memory.
    clean_percent: u32 = 100, kind::PERCENT;
    Users "clean" "PERCENT" "100" "stored copies that may be kept of mapped memory, as a share of resident memory";

    /// Large windows and read-ahead for streams.
    readahead: bool = true, kind::SWITCH;
    Users "readahead" "on|off" "on" "load large windows of a stream, the next one ahead of its use";

    /// What refaults at a short distance comes back active.
    workingset: bool = true, kind::SWITCH;
    Measuring "workingset" "on|off" "on" "what comes back soon after it left comes back active; off for measuring";

    /// Loads forced onto the small-page path, percent (M6).
    fallback_percent: u32 = 0, kind::PERCENT;
    Measuring "fallback" "PERCENT" "0" "share of loads made to take the small-page path, for measuring";

    /// Use UFFDIO_MOVE if the kernel has it.
    use_move: bool = true, kind::SWITCH;
    Measuring "move" "on|off" "on" "carry pages with UFFDIO_MOVE where the kernel has it; off forces copying, for measuring";

    /// What is away is told of by its protection, and not by a userfaultfd.
    by_protection: bool = false, kind::PAGING;
    Users "paging" "userfaultfd|protection" "userfaultfd" "run: what tells of a touch of folded memory; protection needs no userfaultfd, and is taken where there is none: slower, and folds at least 64K at once";

    /// Address span of one index lock, bytes (C7).
    shard_bytes: u64 = 2 << 20, kind::SHARD;
    Measuring "shard" "SIZE" "2M" "address span that one lock of the index covers, 2M to 1G";

    /// Where `run` begins to adopt, percent of the limit.
    adopt_percent: u32 = 75, kind::PERCENT;
    Users "adopt-at" "PERCENT" "75" "run: share of the limit at which the program's memory is taken under management";

    /// `run` folds what the program keeps out of core dumps.
    fold_dont_dump: bool = false, kind::DONT_DUMP;
    Users "dont-dump" "leave|fold" "leave" "run: memory that the program keeps out of core dumps (secrets, or a database's buffer pool): left alone, or folded";
}
