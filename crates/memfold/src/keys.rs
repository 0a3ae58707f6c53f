//! The one table of settings: flags, help and the README's table follow it.

/// One setting, as flags and help show it.
pub struct Key {
    /// Name, as in `--name`.
    pub name: &'static str,
    /// What a value looks like.
    pub value: &'static str,
    /// The default, as text.
    pub default: &'static str,
    /// One line of help.
    pub help: &'static str,
}

/// Every setting there is.
pub const KEYS: &[Key] = &[
    Key {
        name: "limit",
        value: "SIZE",
        default: "none",
        help: "physical memory for everything: mapped pages, frames, compressed pool and index",
    },
    Key {
        name: "resident",
        value: "SIZE",
        default: "none",
        help: "uncompressed memory: mapped pages and the frames of the swap cache",
    },
    Key {
        name: "codec",
        value: "NAME[:LEVEL]",
        default: "lz4",
        help: "compression: lz4, lz4hc, zstd, deflate or none, with a level if wanted",
    },
    Key {
        name: "canned",
        value: "on|off|FILE",
        default: "off",
        help: "compress lz4 or zstd against a dictionary: made from folded pages where it wins, or read from FILE",
    },
    Key { name: "folio", value: "SIZE", default: "2M", help: "largest folio, 4K to 2M" },
    Key {
        name: "block",
        value: "SIZE",
        default: "16K",
        help: "unit of compression, 4K to 2M; what is touched at random is cut into pages",
    },
    Key {
        name: "delivery",
        value: "thread|signal",
        default: "thread",
        help: "who serves a fault: pinned handler threads, or the faulting thread itself",
    },
    Key {
        name: "on-full",
        value: "grow|stop",
        default: "grow",
        help: "when nothing more can be folded: go past the limit with a warning, or end the program",
    },
    Key {
        name: "swap",
        value: "DIR|FILE",
        default: "none",
        help: "swap file for what doesn't shrink or fit: nameless in a directory, or in that of a file that isn't there",
    },
    Key { name: "swap-size", value: "SIZE", default: "64G", help: "the most that the swap file may take" },
    Key {
        name: "swap-encrypt",
        value: "on|off",
        default: "on",
        help: "encrypt the swap file; off keeps checksums only",
    },
    Key {
        name: "swap-keep-free",
        value: "SIZE",
        default: "1G",
        help: "the swap file stops growing when its file system has no more than this left",
    },
    Key {
        name: "remote",
        value: "URL",
        default: "none",
        help: "remote store for the cold end of the swap file: redis://HOST:PORT, rediss:// with TLS, several hosts for a cluster",
    },
    Key { name: "remote-size", value: "SIZE", default: "256G", help: "the most that may lie in the remote store" },
    Key {
        name: "remote-at",
        value: "PERCENT",
        default: "90",
        help: "share of --swap-size in use at which the coldest of it moves to the remote store",
    },
    Key {
        name: "remote-auth",
        value: "FILE",
        default: "none",
        help: "password of the remote store, or user and password on a line each; nobody else may read the file",
    },
    Key {
        name: "remote-ca",
        value: "FILE",
        default: "none",
        help: "certificates (PEM) to trust with rediss://, in place of those of the system",
    },
    Key {
        name: "remote-timeout",
        value: "SECONDS",
        default: "10",
        help: "how long a read from the remote store is tried before the program is ended",
    },
    Key {
        name: "remote-expiry",
        value: "SECONDS",
        default: "86400",
        help: "how long data stays in the remote store when nobody refreshes it: longer than run and machine are ever stopped",
    },
    Key { name: "pools", value: "N", default: "0", help: "compressed pools, 1 to 64; 0 takes one per CPU" },
    Key {
        name: "workers",
        value: "N",
        default: "0",
        help: "background threads that compress and read ahead, 1 to 64; 0 takes one per CPU",
    },
    Key {
        name: "max-pool",
        value: "SIZE",
        default: "none",
        help: "most memory of the compressed pools; what they refuse stays uncompressed",
    },
    Key {
        name: "accept-threshold",
        value: "PERCENT",
        default: "90",
        help: "share of --max-pool that full pools must fall to before they take pages again",
    },
    Key {
        name: "pool-counts",
        value: "on|off",
        default: "on",
        help: "whether the compressed pools count against --limit; off leaves them out, as zram does",
    },
    Key {
        name: "batch",
        value: "N",
        default: "1",
        help: "blocks of a folio, 1 to 64, that are compressed at once on several cores; 1 on the saving thread alone",
    },
    Key {
        name: "recompress",
        value: "NAME[:LEVEL]",
        default: "off",
        help: "stronger codec for cold blocks and for those that did not shrink, in the background; off for none",
    },
    Key {
        name: "recompress-after",
        value: "SECONDS",
        default: "30",
        help: "how long a block is left untouched before it is compressed again",
    },
    Key {
        name: "recompress-cpu",
        value: "PERCENT",
        default: "5",
        help: "time of one core that compressing again may take",
    },
    Key {
        name: "verify",
        value: "on|off",
        default: "off",
        help: "decompress and compare every block before its original is let go",
    },
    Key {
        name: "clean",
        value: "PERCENT",
        default: "100",
        help: "stored copies that may be kept of mapped memory, as a share of resident memory",
    },
    Key {
        name: "readahead",
        value: "on|off",
        default: "on",
        help: "load large windows of a stream, the next one ahead of its use",
    },
    Key {
        name: "workingset",
        value: "on|off",
        default: "on",
        help: "what comes back soon after it left comes back active; off for measuring",
    },
    Key {
        name: "fallback",
        value: "PERCENT",
        default: "0",
        help: "share of loads made to take the small-page path, for measuring",
    },
    Key {
        name: "move",
        value: "on|off",
        default: "on",
        help: "carry pages with UFFDIO_MOVE where the kernel has it; off forces copying, for measuring",
    },
    Key {
        name: "shard",
        value: "SIZE",
        default: "2M",
        help: "address span that one lock of the index covers, 2M to 1G",
    },
    Key {
        name: "adopt-at",
        value: "PERCENT",
        default: "75",
        help: "run: share of the limit at which the program's memory is taken under management",
    },
    Key {
        name: "dont-dump",
        value: "leave|fold",
        default: "leave",
        help: "run: memory that the program keeps out of core dumps (secrets, or a database's buffer pool): left alone, or folded",
    },
    Key {
        name: "keep-cpu",
        value: "on|off",
        default: "on",
        help: "run: threads that fault all the time are kept on the CPU where their faults are served, for 50 ms at a time",
    },
];
