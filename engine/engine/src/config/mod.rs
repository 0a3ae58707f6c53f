//! Settings, and one way to set them: by the names of [`crate::config::keys::KEYS`].
mod choices;
mod parse;
mod kind;
pub mod keys;

pub use crate::config::choices::{Delivery, DictionarySource, OnFull, PagingKind};
use crate::config::keys::KEYS;
pub use crate::config::keys::{Config, SettingKey};
use crate::config::kind::COUNT_MAX;
use crate::config::parse::path;
pub use crate::config::parse::{Size, parse_size};
use alloc::string::{String, ToString};
use core::fmt::Write;

/// The least memory that a limit may leave for resident pages and frames: four folios of the
/// largest order.
pub const WORKABLE_MIN_BYTES: u64 = 8 << 20;

/// Why a setting was refused. Displays as one line with the mistake and the valid values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError(pub String);

impl core::fmt::Display for ConfigError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(&self.0)
    }
}
impl core::error::Error for ConfigError {}

fn or_cpus(set: usize, cpus: usize) -> usize {
    if set == 0 { cpus.clamp(1, COUNT_MAX as usize) } else { set }
}

impl Config {
    /// Sets the key `name` from text.
    ///
    /// # Errors
    /// An unknown name, or a value that the key doesn't take. The message names the key and its
    /// valid values.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), ConfigError> {
        let Some(key) = KEYS.iter().find(|key| key.name == name) else {
            return Err(ConfigError(alloc::format!("{name:?} is not a setting")));
        };
        (key.set)(self, value).map_err(|why| ConfigError(alloc::format!("--{name}: {why}")))
    }

    /// Checks the settings together.
    ///
    /// # Errors
    /// A limit of zero, above the machine's memory, or too small to work in; no limit at all;
    /// blocks larger than folios.
    pub fn check(&self) -> Result<(), ConfigError> {
        let fail = |why: String| Err(ConfigError(why));
        if self.limit_bytes.is_none() && self.resident_bytes.is_none() && self.slowdown == 0 {
            return fail("No limit given. Give --limit SIZE or --resident SIZE.".to_string());
        }
        for (name, bytes) in [("limit", self.limit_bytes), ("resident", self.resident_bytes)] {
            let Some(bytes) = bytes else { continue };
            if bytes < WORKABLE_MIN_BYTES {
                return fail(alloc::format!(
                    "--{name}: {} is too small to work with. Give at least {}.",
                    Size(bytes),
                    Size(WORKABLE_MIN_BYTES)
                ));
            }
            if bytes > self.memory_bytes {
                return fail(alloc::format!(
                    "--{name}: {} is more than the memory of this machine or cgroup ({}). Give less.",
                    Size(bytes),
                    Size(self.memory_bytes)
                ));
            }
        }
        if self.remote.is_some() && self.swap.is_none() {
            return fail(
                "--remote: data reaches the remote store through the swap file. Give --swap DIR too."
                    .to_string(),
            );
        }
        if self.remote.is_some() && !self.swap_encrypt {
            return fail(
                "--remote: data is sent to other machines only encrypted. Leave --swap-encrypt on."
                    .to_string(),
            );
        }
        if self.block_order > self.folio_order {
            return fail(alloc::format!(
                "--block: {} is larger than the largest folio ({}). Give a smaller block, or raise --folio.",
                Size(self.block_order.bytes() as u64),
                Size(self.folio_order.bytes() as u64)
            ));
        }
        Ok(())
    }

    /// Returns the number of background threads for so many CPUs, 1 to 64: one for each CPU. The
    /// program has priority over them, and its faults compress too when they can't keep up. With a
    /// thread less on two CPUs, a program that fills memory is as fast. But a program that changes
    /// the data it reads takes 1.6 times as long, and redis twice.
    pub fn worker_count(&self, cpus: usize) -> usize {
        or_cpus(self.workers, cpus)
    }

    /// Returns the number of pools for so many CPUs, 1 to 64.
    pub fn pool_count(&self, cpus: usize) -> usize {
        or_cpus(self.pools, cpus)
    }

    /// Returns the most uncompressed memory (mapped pages and frames) that the settings allow while
    /// the pool is empty, bytes.
    pub fn resident_max_bytes(&self) -> u64 {
        self.limit_bytes.unwrap_or(u64::MAX).min(self.resident_bytes.unwrap_or(u64::MAX))
    }

    /// Writes all settings but the defaults as `name=value` lines, for [`Config::decode`] in another
    /// process.
    pub fn encode(&self) -> String {
        let mut out = alloc::format!("memory={}\n", self.memory_bytes);
        // Each process of a run decodes the text when it begins, so it is short.
        let defaults = Config::new(0);
        let keys = KEYS.iter().map(|key| (key.name, (key.get)(self), (key.get)(&defaults)));
        let socket = ("remote-socket", self.remote_socket.clone(), None);
        for (name, value, default) in keys.chain([socket]) {
            if let Some(value) = value.filter(|value| default.as_ref() != Some(value)) {
                let _ = writeln!(out, "{name}={value}");
            }
        }
        out
    }

    /// Reads the settings that [`Config::encode`] wrote.
    ///
    /// # Errors
    /// The errors of [`Config::set`]; also a line that is not `name=value`.
    pub fn decode(text: &str) -> Result<Config, ConfigError> {
        let mut config = Config::new(0);
        for line in text.lines().filter(|l| !l.is_empty()) {
            let (name, value) = line
                .split_once('=')
                .ok_or_else(|| ConfigError(alloc::format!("{line:?} is not NAME=VALUE")))?;
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

#[cfg(test)]
mod tests {
    use super::*;

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
            ("slowdown", "0.5%"),
            ("idle", "5"),
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
            ("paging", "protection"),
            ("shard", "64M"),
            ("adopt-at", "60"),
            ("dont-dump", "fold"),
        ];
        assert_eq!(values.len(), KEYS.len());
        for key in KEYS {
            let value = values.iter().find(|v| v.0 == key.name).expect(key.name).1;
            let before = config.clone();
            config.set(key.name, value).unwrap();
            assert_ne!(before, config, "{} changed nothing", key.name);
            assert!(
                config.set(key.name, "@").is_err()
                    || ["codec", "recompress", "swap", "remote", "remote-auth", "remote-ca"]
                        .contains(&key.name)
            );
        }
        assert!(config.set("remote-expiry", "1").unwrap_err().0.contains("2 seconds"));
        assert!(config.set("swap", "a;b").is_err(), "it would end the setting in the environment");
        assert!(
            config.check().unwrap_err().0.contains("--swap-encrypt"),
            "nothing leaves the machine in the clear"
        );
        config.swap_encrypt = true;
        config.check().unwrap();
        config.remote_socket = Some("/run/user/1/memfold/5.remote".to_string());
        assert_eq!(Config::decode(&config.encode()), Ok(config));
    }

    #[test]
    fn default_settings_are_not_encoded() {
        let config = Config::new(24 << 30);
        assert_eq!(config.encode().lines().count(), 1);
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
        for (size, word) in
            [("0", "too small"), ("1M", "too small"), ("2G", "more than the memory")]
        {
            config.set("limit", size).unwrap();
            assert!(config.check().unwrap_err().0.contains(word), "{size}");
        }
        config.set("limit", "64M").unwrap();
        config.check().unwrap();
        config.set("folio", "4K").unwrap();
        assert!(config.check().unwrap_err().0.contains("--block"));
    }
}
