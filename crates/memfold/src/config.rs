//! Settings, and one way to set them: by the names of [`crate::keys::KEYS`].
pub use crate::text::{Size, parse_size};
use crate::text::{choice, number, on_off, parse_order, parse_shard, path};
use alloc::string::{String, ToString};
use core::fmt::Write;
use memfold_sys::units::Order;

/// The least memory that a limit may leave for resident pages and frames: four folios of the largest order.
pub const WORKABLE_MIN_BYTES: u64 = 8 << 20;

/// How faults reach the engine.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// Handler threads, one pinned to each CPU, read the faults. Right for every access, system calls included.
    Thread,
    /// The faulting thread serves itself in a SIGBUS handler. Fastest, but a system call that is given a folded
    /// buffer fails with EFAULT: for memory that only user code touches, or that is pinned around calls.
    Signal,
}

/// What to do when nothing more can be folded within the limit.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum OnFull {
    /// Go past the limit, with a warning.
    Grow,
    /// End the program with a message.
    Stop,
}

/// Where dictionaries come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Canned {
    /// Nothing is compressed against a dictionary.
    Off,
    /// From the pages that are folded, in the background, where they win.
    On,
    /// From a file that `memfold dict train` made.
    File(String),
}

/// Why a setting was refused. Displays as one line that says what is wrong and what would be right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError(pub String);

impl core::fmt::Display for ConfigError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(&self.0)
    }
}
impl core::error::Error for ConfigError {}

/// All settings of one engine. Made by [`Config::new`], changed by [`Config::set`], judged whole by [`Config::check`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Memory of the machine (or of the cgroup), bytes: what a percentage refers to and what no limit may pass.
    pub memory_bytes: u64,
    /// Bound of resident + frames + pool + index, bytes.
    pub limit_bytes: Option<u64>,
    /// Bound of resident + frames, bytes.
    pub resident_bytes: Option<u64>,
    /// Codec spec, such as `lz4` or `zstd:3`; the store checks it.
    pub codec: String,
    /// Dictionaries (Z8).
    pub canned: Canned,
    /// Largest folio.
    pub folio_order: Order,
    /// Unit of compression.
    pub block_order: Order,
    /// How faults arrive.
    pub delivery: Delivery,
    /// What happens at the limit.
    pub on_full: OnFull,
    /// Where the swap file is made.
    pub swap: Option<String>,
    /// The most that it may take, bytes.
    pub swap_bytes: u64,
    /// Encrypted, not only checked.
    pub swap_encrypt: bool,
    /// What stays free on its file system, bytes.
    pub swap_keep_free_bytes: u64,
    /// Where the remote store is, without credentials.
    pub remote: Option<String>,
    /// The most that may lie there, bytes.
    pub remote_bytes: u64,
    /// Share of the swap file in use at which data moves there, percent.
    pub remote_percent: u32,
    /// The file with its password; only the service reads it.
    pub remote_auth: Option<String>,
    /// The file with certificates to trust; only the service reads it.
    pub remote_ca: Option<String>,
    /// Seconds for which a read is tried.
    pub remote_timeout_s: u32,
    /// Seconds that an object lives in the store when nobody refreshes it.
    pub remote_expiry_s: u32,
    /// Socket of the service that speaks with the store. No key: whoever starts the service sets it.
    pub remote_socket: Option<String>,
    /// Pools; 0 for [`Config::pool_count`] to choose.
    pub pools: usize,
    /// Background threads; 0 for [`Config::worker_count`] to choose.
    pub workers: usize,
    /// Bound of the pools, bytes (Z10).
    pub max_pool_bytes: Option<u64>,
    /// Share of that bound below which full pools take pages again, percent (Z10).
    pub accept_percent: u32,
    /// Pools count against the limit (Z6).
    pub pool_counts: bool,
    /// Blocks of a folio compressed at once (Z9).
    pub batch: usize,
    /// Codec for cold blocks (M9); the store checks it.
    pub recompress: Option<String>,
    /// Seconds without use after which a block is cold.
    pub recompress_after_s: u32,
    /// Percent of one core that recompression may take.
    pub recompress_cpu_percent: u32,
    /// Verify mode (Z7).
    pub verify: bool,
    /// Budget of clean copies, percent of resident memory.
    pub clean_percent: u32,
    /// Large windows and read-ahead for streams.
    pub readahead: bool,
    /// Loads forced onto the small-page path, percent (M6).
    pub fallback_percent: u32,
    /// What refaults at a short distance comes back active.
    pub workingset: bool,
    /// Use UFFDIO_MOVE if the kernel has it.
    pub use_move: bool,
    /// Address span of one index lock, bytes (C7).
    pub shard_bytes: u64,
    /// Where `run` begins to adopt, percent of the limit.
    pub adopt_percent: u32,
    /// `run` folds what the program keeps out of core dumps.
    pub fold_dont_dump: bool,
    /// `run` keeps a thread that faults much on one CPU.
    pub keep_cpu: bool,
}

/// Background threads at most, and pools.
const COUNT_MAX: u32 = 64;

/// A year.
const REMOTE_EXPIRY_MAX_S: u32 = 365 * 24 * 60 * 60;

fn or_cpus(set: usize, cpus: usize) -> usize {
    if set == 0 { cpus.clamp(1, COUNT_MAX as usize) } else { set }
}

impl Config {
    /// The defaults, for a machine of `memory_bytes`.
    pub fn new(memory_bytes: u64) -> Config {
        Config {
            memory_bytes,
            limit_bytes: None,
            resident_bytes: None,
            codec: "lz4".to_string(),
            canned: Canned::Off,
            folio_order: Order::MAX,
            block_order: Order::new(2).expect("2 is an order"),
            delivery: Delivery::Thread,
            on_full: OnFull::Grow,
            swap: None,
            swap_bytes: 64 << 30,
            swap_encrypt: true,
            swap_keep_free_bytes: 1 << 30,
            remote: None,
            remote_bytes: 256 << 30,
            remote_percent: 90,
            remote_auth: None,
            remote_ca: None,
            remote_timeout_s: 10,
            remote_expiry_s: 24 * 60 * 60,
            remote_socket: None,
            pools: 0,
            workers: 0,
            max_pool_bytes: None,
            accept_percent: 90,
            pool_counts: true,
            batch: 1,
            recompress: None,
            recompress_after_s: 30,
            recompress_cpu_percent: 5,
            verify: false,
            clean_percent: 100,
            readahead: true,
            fallback_percent: 0,
            workingset: true,
            use_move: true,
            shard_bytes: 2 << 20,
            adopt_percent: 75,
            fold_dont_dump: false,
            keep_cpu: true,
        }
    }

    /// Sets the key `name` from text.
    ///
    /// # Errors
    /// An unknown name, or a value that the key doesn't take; the message names the key and what it takes.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), ConfigError> {
        let wrong = |why: String| ConfigError(alloc::format!("--{name}: {why}"));
        let size = || parse_size(value, self.memory_bytes).map_err(wrong);
        match name {
            "limit" => self.limit_bytes = Some(size()?),
            "resident" => self.resident_bytes = Some(size()?),
            "codec" => self.codec = value.to_string(),
            "canned" => self.canned = parse_canned(value).map_err(wrong)?,
            "folio" => self.folio_order = parse_order(value).map_err(wrong)?,
            "block" => self.block_order = parse_order(value).map_err(wrong)?,
            "delivery" => {
                self.delivery =
                    choice(value, &[("thread", Delivery::Thread), ("signal", Delivery::Signal)]).map_err(wrong)?
            }
            "on-full" => {
                self.on_full = choice(value, &[("grow", OnFull::Grow), ("stop", OnFull::Stop)]).map_err(wrong)?
            }
            "swap" => self.swap = Some(path(value).map_err(wrong)?),
            "swap-size" => self.swap_bytes = size()?,
            "swap-encrypt" => self.swap_encrypt = on_off(value).map_err(wrong)?,
            "swap-keep-free" => self.swap_keep_free_bytes = size()?,
            "remote" => self.remote = Some(path(value).map_err(wrong)?),
            "remote-size" => self.remote_bytes = size()?,
            "remote-at" => self.remote_percent = number(value.trim_end_matches('%'), 100).map_err(wrong)?,
            "remote-auth" => self.remote_auth = Some(path(value).map_err(wrong)?),
            "remote-ca" => self.remote_ca = Some(path(value).map_err(wrong)?),
            "remote-timeout" => self.remote_timeout_s = number(value, 3600).map_err(wrong)?,
            "remote-expiry" => match number(value, REMOTE_EXPIRY_MAX_S).map_err(wrong)? {
                0 | 1 => return Err(wrong(alloc::format!("{value:?}: give 2 seconds at least, and better a day"))),
                seconds => self.remote_expiry_s = seconds,
            },
            "pools" => self.pools = number(value, COUNT_MAX).map_err(wrong)? as usize,
            "workers" => self.workers = number(value, COUNT_MAX).map_err(wrong)? as usize,
            "max-pool" => self.max_pool_bytes = if value == "none" { None } else { Some(size()?) },
            "accept-threshold" => self.accept_percent = number(value.trim_end_matches('%'), 100).map_err(wrong)?,
            "pool-counts" => self.pool_counts = on_off(value).map_err(wrong)?,
            "batch" => match number(value, 64).map_err(wrong)? {
                0 => return Err(wrong("\"0\": a batch is 1 to 64 blocks".to_string())),
                n => self.batch = n as usize,
            },
            "recompress" => self.recompress = if value == "off" { None } else { Some(value.to_string()) },
            "recompress-after" => self.recompress_after_s = number(value, 65535).map_err(wrong)?,
            "recompress-cpu" => {
                self.recompress_cpu_percent = number(value.trim_end_matches('%'), 100).map_err(wrong)?
            }
            "verify" => self.verify = on_off(value).map_err(wrong)?,
            "clean" => self.clean_percent = number(value.trim_end_matches('%'), 100).map_err(wrong)?,
            "readahead" => self.readahead = on_off(value).map_err(wrong)?,
            "workingset" => self.workingset = on_off(value).map_err(wrong)?,
            "fallback" => self.fallback_percent = number(value.trim_end_matches('%'), 100).map_err(wrong)?,
            "move" => self.use_move = on_off(value).map_err(wrong)?,
            "shard" => self.shard_bytes = parse_shard(value).map_err(wrong)?,
            "adopt-at" => self.adopt_percent = number(value.trim_end_matches('%'), 100).map_err(wrong)?,
            "dont-dump" => self.fold_dont_dump = choice(value, &[("leave", false), ("fold", true)]).map_err(wrong)?,
            "keep-cpu" => self.keep_cpu = on_off(value).map_err(wrong)?,
            _ => {
                return Err(ConfigError(alloc::format!("there is no setting called {name:?}")));
            }
        }
        Ok(())
    }

    /// Judges the settings together.
    ///
    /// # Errors
    /// A limit of zero, above the machine's memory, or too small to work in; no limit at all; blocks larger than folios.
    pub fn check(&self) -> Result<(), ConfigError> {
        let fail = |why: String| Err(ConfigError(why));
        if self.limit_bytes.is_none() && self.resident_bytes.is_none() {
            return fail("give --limit SIZE or --resident SIZE".to_string());
        }
        for (name, bytes) in [("limit", self.limit_bytes), ("resident", self.resident_bytes)] {
            let Some(bytes) = bytes else { continue };
            if bytes < WORKABLE_MIN_BYTES {
                return fail(alloc::format!(
                    "--{name}: {} is too small to work in; give at least {}",
                    Size(bytes),
                    Size(WORKABLE_MIN_BYTES)
                ));
            }
            if bytes > self.memory_bytes {
                return fail(alloc::format!(
                    "--{name}: {} is more than the memory there is ({})",
                    Size(bytes),
                    Size(self.memory_bytes)
                ));
            }
        }
        if self.remote.is_some() && self.swap.is_none() {
            return fail("--remote: give --swap too: what leaves memory goes to the swap file first".to_string());
        }
        if self.remote.is_some() && !self.swap_encrypt {
            return fail("--remote: leave --swap-encrypt on: data goes to other machines encrypted only".to_string());
        }
        if self.block_order > self.folio_order {
            return fail(alloc::format!(
                "--block: {} is larger than the largest folio ({}); make it smaller or raise --folio",
                Size(self.block_order.bytes() as u64),
                Size(self.folio_order.bytes() as u64)
            ));
        }
        Ok(())
    }

    /// Background threads on a machine with so many CPUs, 1 to 64: one for each CPU. They stand back behind the program,
    /// whose faults compress as well when they can't keep up. With a thread less on two CPUs, a program that fills memory
    /// is as fast, but one that changes what it reads takes 1.6 times as long, and redis twice.
    pub fn worker_count(&self, cpus: usize) -> usize {
        or_cpus(self.workers, cpus)
    }

    /// Pools on a machine with so many CPUs, 1 to 64.
    pub fn pool_count(&self, cpus: usize) -> usize {
        or_cpus(self.pools, cpus)
    }

    /// The most uncompressed memory (mapped pages and frames) that the settings allow while the pool is empty, bytes.
    pub fn resident_max_bytes(&self) -> u64 {
        self.limit_bytes.unwrap_or(u64::MAX).min(self.resident_bytes.unwrap_or(u64::MAX))
    }

    /// All settings as `name=value` lines, for [`Config::decode`] in another process.
    pub fn encode(&self) -> String {
        let mut out = String::new();
        let on = |b: bool| if b { "on" } else { "off" };
        let _ = writeln!(out, "memory={}", self.memory_bytes);
        if let Some(bytes) = self.limit_bytes {
            let _ = writeln!(out, "limit={bytes}");
        }
        if let Some(bytes) = self.resident_bytes {
            let _ = writeln!(out, "resident={bytes}");
        }
        if let Some(path) = &self.swap {
            let _ = writeln!(out, "swap={path}");
        }
        let _ = writeln!(out, "swap-size={}\nswap-encrypt={}", self.swap_bytes, on(self.swap_encrypt));
        let _ = writeln!(out, "swap-keep-free={}", self.swap_keep_free_bytes);
        let paths = [
            ("remote", &self.remote),
            ("remote-auth", &self.remote_auth),
            ("remote-ca", &self.remote_ca),
            ("remote-socket", &self.remote_socket),
        ];
        for (name, value) in paths.iter().filter_map(|(name, value)| Some((name, value.as_ref()?))) {
            let _ = writeln!(out, "{name}={value}");
        }
        let _ = writeln!(out, "remote-size={}\nremote-at={}", self.remote_bytes, self.remote_percent);
        let _ = writeln!(out, "remote-timeout={}\nremote-expiry={}", self.remote_timeout_s, self.remote_expiry_s);
        if let Some(bytes) = self.max_pool_bytes {
            let _ = writeln!(out, "max-pool={bytes}");
        }
        let _ = writeln!(out, "recompress={}", self.recompress.as_deref().unwrap_or("off"));
        let _ = write!(
            out,
            "accept-threshold={}\npool-counts={}\nbatch={}\nrecompress-after={}\nrecompress-cpu={}\n",
            self.accept_percent,
            on(self.pool_counts),
            self.batch,
            self.recompress_after_s,
            self.recompress_cpu_percent
        );
        let delivery = if self.delivery == Delivery::Thread { "thread" } else { "signal" };
        let full = if self.on_full == OnFull::Grow { "grow" } else { "stop" };
        let _ = write!(
            out,
            "codec={}\ncanned={}\nfolio={}\nblock={}\ndelivery={delivery}\non-full={full}\npools={}\nworkers={}\nverify={}\nclean={}\n\
             readahead={}\nworkingset={}\nfallback={}\nmove={}\nshard={}\nadopt-at={}\ndont-dump={}\nkeep-cpu={}\n",
            self.codec,
            match &self.canned {
                Canned::Off => "off",
                Canned::On => "on",
                Canned::File(path) => path,
            },
            self.folio_order.bytes(),
            self.block_order.bytes(),
            self.pools,
            self.workers,
            on(self.verify),
            self.clean_percent,
            on(self.readahead),
            on(self.workingset),
            self.fallback_percent,
            on(self.use_move),
            self.shard_bytes,
            self.adopt_percent,
            if self.fold_dont_dump { "fold" } else { "leave" },
            on(self.keep_cpu)
        );
        out
    }

    /// The settings that [`Config::encode`] wrote.
    ///
    /// # Errors
    /// As [`Config::set`]; also a line that is not `name=value`.
    pub fn decode(text: &str) -> Result<Config, ConfigError> {
        let mut config = Config::new(0);
        for line in text.lines().filter(|l| !l.is_empty()) {
            let (name, value) =
                line.split_once('=').ok_or_else(|| ConfigError(alloc::format!("not name=value: {line:?}")))?;
            if name == "memory" {
                config.memory_bytes = parse_size(value, 0).map_err(ConfigError)?;
            } else if name == "remote-socket" {
                config.remote_socket = Some(path(value).map_err(ConfigError)?);
            } else {
                config.set(name, value)?;
            }
        }
        Ok(config)
    }
}

fn parse_canned(text: &str) -> Result<Canned, String> {
    match text {
        "off" => Ok(Canned::Off),
        "on" => Ok(Canned::On),
        // Settings are passed on as lines, joined by semicolons. A bare word is more likely a mistake than a file.
        path if path.contains(['\n', ';']) => Err(alloc::format!("{text:?}: no line breaks and semicolons, please")),
        path if path.contains(['/', '.']) => Ok(Canned::File(path.to_string())),
        _ => Err(alloc::format!("{text:?} is neither on nor off; write a file's name as ./{text}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::KEYS;

    #[test]
    fn sizes_parse_as_people_write_them() {
        assert_eq!(parse_size("2G", 0), Ok(2 << 30));
        assert_eq!(parse_size("1.5m", 0), Ok(3 << 19));
        assert_eq!(parse_size("512 KiB", 0), Ok(512 << 10));
        assert_eq!(parse_size("25%", 1000), Ok(250));
        for bad in ["", "x", "-1", "12Q", "0%", "101%", "99999999999999T", "%", "1.2.3M"] {
            assert!(parse_size(bad, 1000).is_err(), "{bad}");
        }
    }

    #[test]
    fn every_key_can_be_set_and_survives_encoding() {
        let mut config = Config::new(24 << 30);
        let values = [
            ("limit", "25%"),
            ("resident", "256M"),
            ("codec", "zstd:3"),
            ("canned", "/tmp/a.dict"),
            ("folio", "64K"),
            ("block", "32K"),
            ("delivery", "signal"),
            ("on-full", "stop"),
            ("swap", "/var/tmp"),
            ("swap-size", "3G"),
            ("swap-encrypt", "off"),
            ("remote", "redis://127.0.0.1"),
            ("remote-size", "5G"),
            ("remote-at", "70"),
            ("remote-auth", "/tmp/a.auth"),
            ("remote-ca", "/tmp/a.pem"),
            ("remote-timeout", "3"),
            ("remote-expiry", "600"),
            ("swap-keep-free", "100M"),
            ("pools", "3"),
            ("workers", "5"),
            ("max-pool", "64M"),
            ("accept-threshold", "70"),
            ("pool-counts", "off"),
            ("batch", "16"),
            ("recompress", "zstd:6"),
            ("recompress-after", "10"),
            ("recompress-cpu", "20"),
            ("verify", "on"),
            ("clean", "40"),
            ("readahead", "off"),
            ("workingset", "off"),
            ("fallback", "100"),
            ("move", "off"),
            ("shard", "64M"),
            ("adopt-at", "60"),
            ("dont-dump", "fold"),
            ("keep-cpu", "off"),
        ];
        assert_eq!(values.len(), KEYS.len());
        for key in KEYS {
            let value = values.iter().find(|v| v.0 == key.name).expect(key.name).1;
            let before = config.clone();
            config.set(key.name, value).unwrap();
            assert_ne!(before, config, "{} changed nothing", key.name);
            assert!(
                config.set(key.name, "@").is_err()
                    || ["codec", "recompress", "swap", "remote", "remote-auth", "remote-ca"].contains(&key.name)
            );
        }
        assert!(config.set("swap", "a;b").is_err(), "it would end the setting in the environment");
        assert!(config.check().unwrap_err().0.contains("--swap-encrypt"), "nothing leaves the machine in the clear");
        config.swap_encrypt = true;
        config.check().unwrap();
        config.remote_socket = Some("/run/user/1/memfold/5.remote".to_string());
        assert_eq!(Config::decode(&config.encode()), Ok(config));
    }

    #[test]
    fn defaults_in_the_table_are_the_defaults() {
        let mut config = Config::new(1 << 30);
        for key in KEYS.iter().filter(|k| k.default != "none") {
            config.set(key.name, key.default).unwrap();
        }
        assert_eq!(config, Config::new(1 << 30));
    }

    #[test]
    fn impossible_limits_are_refused_with_the_reason() {
        let mut config = Config::new(1 << 30);
        assert!(config.check().unwrap_err().0.contains("--limit"));
        for (size, word) in [("0", "too small"), ("1M", "too small"), ("2G", "more than the memory")] {
            config.set("limit", size).unwrap();
            assert!(config.check().unwrap_err().0.contains(word), "{size}");
        }
        config.set("limit", "64M").unwrap();
        config.check().unwrap();
        config.set("folio", "4K").unwrap();
        assert!(config.check().unwrap_err().0.contains("--block"));
    }
}
