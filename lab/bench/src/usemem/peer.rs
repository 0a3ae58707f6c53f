//! The peers of usemem.

use crate::host::folio::FolioKib;
use crate::walk::peer::{Peer, parse_vs};

/// memfold with settings, the kernel's zram, or its swap file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PagerSetting {
    /// `memfold run` with these settings.
    Memfold {
        /// `--codec`.
        codec: String,
        /// `--folio`.
        folio: FolioKib,
        /// Settings by short names, the words after `+`.
        with: Vec<&'static str>,
    },
    /// zram swap in a memory cgroup.
    Zram {
        /// The kernel's name of its codec.
        codec: String,
        /// The folio size of the kernel.
        folio: FolioKib,
    },
    /// The kernel's swap to a file, with zswap in front or without.
    File {
        /// The kernel's name of zswap's codec.
        zswap: Option<String>,
        /// The folio size of the kernel.
        folio: FolioKib,
    },
}

/// The directory of swap files.
pub const SWAP_DIR: &str = "/var/tmp";

/// Short names of settings, and their flags of `memfold run`. `lean` keeps no stored copy of
/// resident pages; `counted` and `uncounted` put the pool inside the limit and outside of it.
const WITH: [(&str, [&str; 2]); 6] = [
    ("verify", ["--verify", "on"]),
    ("canned", ["--canned", "on"]),
    ("lean", ["--clean", "0"]),
    ("swap", ["--swap", SWAP_DIR]),
    ("counted", ["--pool-counts", "on"]),
    ("uncounted", ["--pool-counts", "off"]),
];

/// memfold's block size, unless folios are smaller.
const BLOCK_KIB: u64 = 16;

impl PagerSetting {
    /// Returns `memfold:lz4:64k+verify`, `zram:lzo-rle:64k`.
    pub fn name(&self) -> String {
        match self {
            PagerSetting::Memfold { codec, folio, with } => {
                let with: String = with.iter().map(|word| format!("+{word}")).collect();
                format!("memfold:{codec}:{}{with}", folio.name())
            }
            PagerSetting::Zram { codec, folio } => format!("zram:{codec}:{}", folio.name()),
            PagerSetting::File { zswap: Some(codec), folio } => {
                format!("zswap:{codec}:{}", folio.name())
            }
            PagerSetting::File { zswap: None, folio } => format!("file:{}", folio.name()),
        }
    }

    /// Returns the settings of `memfold run` for `limit_bytes`. With a swap file the pool counts
    /// against the limit, as the kernel's zswap does. Without one it does not, as zram's memory
    /// does not, unless the peer asks for it.
    pub fn run_args(&self, limit_bytes: u64) -> Vec<String> {
        let PagerSetting::Memfold { codec, folio, with } = self else { return Vec::new() };
        let has_switch = with.contains(&"counted") || with.contains(&"uncounted");
        let bound = if has_switch || with.contains(&"swap") { "--limit" } else { "--resident" };
        // With the pool inside the limit, the usual limit would hardly hold all data.
        let limit_bytes = if has_switch { limit_bytes / 4 * 5 } else { limit_bytes };
        let mut args = vec![
            "run",
            bound,
            &limit_bytes.to_string(),
            "--codec",
            codec,
            "--folio",
            &folio.name(),
        ]
        .into_iter()
        .map(String::from)
        .collect::<Vec<_>>();
        // A block can't be larger than the largest folio.
        args.extend(["--block".into(), FolioKib(folio.0.min(BLOCK_KIB)).name()]);
        for (_, setting) in WITH.iter().filter(|(name, _)| with.contains(name)) {
            args.extend(setting.map(String::from));
        }
        args
    }
}

/// The forms of `--peer`.
pub const FORMS: &str = "memfold[:CODEC[:FOLIO]][+verify][+canned][+lean][+swap][+counted|+uncounted], zram[:CODEC][:FOLIO], zswap:CODEC:FOLIO or file:FOLIO";

/// Parses one `--peer`, as in [`FORMS`].
pub fn parse(text: &str) -> Result<Vec<PagerSetting>, String> {
    if text.starts_with("zram") {
        let pagers = parse_vs(text)?.into_iter().filter_map(|peer| match peer {
            Peer::Zram { codec, folio } => Some(PagerSetting::Zram { codec, folio }),
            Peer::Memfold(_) => None,
        });
        return Ok(pagers.collect());
    }
    let bad = || format!("unknown peer '{text}': {FORMS}");
    let kernel: Vec<&str> = text.split(':').collect();
    match kernel[..] {
        ["zswap", codec, folio] => {
            let folio = FolioKib::parse(folio).ok_or_else(bad)?;
            return Ok(vec![PagerSetting::File { zswap: Some(codec.to_string()), folio }]);
        }
        ["file", folio] => {
            return Ok(vec![PagerSetting::File {
                zswap: None,
                folio: FolioKib::parse(folio).ok_or_else(bad)?,
            }]);
        }
        _ => {}
    }
    let mut words = text.split('+');
    let mut fields = words.next().unwrap_or_default().split(':');
    if fields.next() != Some("memfold") {
        return Err(bad());
    }
    let codec = fields.next().unwrap_or("lz4").to_string();
    let folio = fields.next().map_or(Some(FolioKib(64)), FolioKib::parse).ok_or_else(bad)?;
    let find =
        |word: &str| WITH.iter().map(|(name, _)| *name).find(|name| *name == word).ok_or_else(bad);
    let with = words.map(find).collect::<Result<Vec<_>, _>>()?;
    if fields.next().is_some() {
        return Err(bad());
    }
    Ok(vec![PagerSetting::Memfold { codec, folio, with }])
}

/// Returns the default peers.
pub fn default_peers(quick: bool) -> Vec<&'static str> {
    let quick_peers = vec![
        "memfold:lz4:4k",
        "memfold:lz4:64k",
        "memfold:lz4:2m",
        "memfold:lz4:64k+lean",
        "memfold:zstd:64k",
        "memfold:deflate:64k",
        "memfold:zstd:64k+counted",
        "memfold:zstd:64k+uncounted",
        "zram:lzo-rle:4k,zram:lzo-rle:64k,zram:lz4:64k,zram:lzo-rle:2m",
    ];
    let all = vec![
        "memfold:lz4:4k",
        "memfold:lz4:16k",
        "memfold:lz4:64k",
        "memfold:lz4:2m",
        "memfold:zstd:4k",
        "memfold:zstd:16k",
        "memfold:zstd:64k",
        "memfold:zstd:2m",
        "memfold:deflate:4k",
        "memfold:deflate:16k",
        "memfold:deflate:64k",
        "memfold:deflate:2m",
        "memfold:lz4:64k+verify",
        "memfold:lz4:64k+canned",
        "memfold:lz4:64k+lean",
        "memfold:zstd:64k+canned",
        "memfold:zstd:64k+counted",
        "memfold:zstd:64k+uncounted",
        "memfold:lz4:64k+swap",
        "file:64k",
        "zram:lzo-rle:4k,zram:lzo-rle:64k,zram:lzo-rle:2m,zram:lz4:4k,zram:lz4:64k,zram:lz4:2m",
    ];
    if quick { quick_peers } else { all }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_default_peer_parses_to_its_name() {
        for text in default_peers(true).into_iter().chain(default_peers(false)) {
            let names: Vec<String> = parse(text).unwrap().iter().map(PagerSetting::name).collect();
            assert_eq!(names.join(","), text);
        }
        assert_eq!(parse("zswap:deflate:2m").unwrap()[0].name(), "zswap:deflate:2m");
    }

    #[test]
    fn settings_become_flags_and_unknown_ones_are_refused() {
        let args = parse("memfold:zstd:2m+verify+swap").unwrap()[0].run_args(1 << 20);
        assert_eq!(
            args.join(" "),
            "run --limit 1048576 --codec zstd --folio 2m --block 16k --verify on --swap /var/tmp"
        );
        let args = parse("memfold:zstd:64k+counted").unwrap()[0].run_args(4 << 20);
        assert_eq!(
            args.join(" "),
            "run --limit 5242880 --codec zstd --folio 64k --block 16k --pool-counts on"
        );
        for bad in [
            "",
            "zswap:lzo",
            "file",
            "file:3k",
            "memfold:lz4:3k",
            "memfold+fast",
            "memfold:lz4:4k:4k",
            "zfs",
            "zram:lz4:5k",
        ] {
            assert!(parse(bad).is_err(), "{bad} was taken");
        }
    }
}
