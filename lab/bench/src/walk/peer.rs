//! The peers of a walk: memfold in three forms, and the kernel's zram at its folio sizes.

use crate::host::folio::FolioKib;
use clap::ValueEnum;

/// The forms of memfold, for `--peer`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum)]
pub enum Form {
    /// A library region, signal mode
    #[value(name = "memfold-signal")]
    Signal,
    /// A library region, thread mode
    #[value(name = "memfold-thread")]
    Thread,
    /// Plain memory under `memfold run`
    #[value(name = "memfold-run")]
    Run,
}

impl Form {
    /// Returns the name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Form::Signal => "memfold-signal",
            Form::Thread => "memfold-thread",
            Form::Run => "memfold-run",
        }
    }
}

/// A peer: one row of the report.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Peer {
    /// memfold.
    Memfold(Form),
    /// zram swap in a memory cgroup.
    Zram {
        /// The kernel's name of its codec.
        codec: String,
        /// The folio size of the kernel.
        folio: FolioKib,
    },
}

impl Peer {
    /// Returns `memfold-signal`, `zram:lz4:64k`.
    pub fn name(&self) -> String {
        match self {
            Peer::Memfold(form) => form.name().into(),
            Peer::Zram { codec, folio } => format!("zram:{codec}:{}", folio.name()),
        }
    }
}

/// Parses one `--vs` value: `zram`, `zram:64k`, `zram:lzo-rle`, `zram:lz4:2m`, or several with
/// commas. The default codec is lz4. Without a size, all six are returned.
pub fn parse_vs(text: &str) -> Result<Vec<Peer>, String> {
    let mut peers = Vec::new();
    for item in text.split(',') {
        let mut fields = item.split(':');
        if fields.next() != Some("zram") {
            return Err(format!(
                "unknown peer '{item}': zram[:lz4|lzo-rle][:4k|16k|64k|256k|1m|2m]"
            ));
        }
        let (mut codec, mut sizes) = (None, None);
        for field in fields {
            match FolioKib::parse(field) {
                Some(size) if sizes.is_none() => sizes = Some(vec![size]),
                None if codec.is_none() && sizes.is_none() && is_codec(field) => {
                    codec = Some(field)
                }
                _ => {
                    return Err(format!(
                        "unknown field '{field}' in '{item}': a codec, then a folio size (4k to 2m)"
                    ));
                }
            }
        }
        for folio in sizes.unwrap_or_else(|| FolioKib::ALL.to_vec()) {
            let peer = Peer::Zram { codec: codec.unwrap_or("lz4").to_string(), folio };
            if !peers.contains(&peer) {
                peers.push(peer);
            }
        }
    }
    Ok(peers)
}

fn is_codec(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<String> {
        parse_vs(text).unwrap().iter().map(Peer::name).collect()
    }

    #[test]
    fn plain_zram_is_lz4_at_all_six_sizes() {
        let six = ["4k", "16k", "64k", "256k", "1m", "2m"];
        assert_eq!(names("zram"), six.map(|size| format!("zram:lz4:{size}")));
        assert_eq!(names("zram:lzo-rle"), six.map(|size| format!("zram:lzo-rle:{size}")));
    }

    #[test]
    fn fields_and_lists_parse_and_duplicates_are_dropped() {
        assert_eq!(names("zram:64k"), ["zram:lz4:64k"]);
        assert_eq!(
            names("zram:lzo-rle:2m,zram:lz4:4k,zram:4k"),
            ["zram:lzo-rle:2m", "zram:lz4:4k"]
        );
    }

    #[test]
    fn unknown_peers_are_refused() {
        for bad in [
            "",
            "zswap",
            "zram:",
            "zram:64k:lz4",
            "zram:3k",
            "zram:lz4:lzo",
            "zram:lz4:4k:4k",
            "zram,,zram",
        ] {
            assert!(parse_vs(bad).is_err(), "{bad} was taken");
        }
    }
}
