//! What a device counts: the one table.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)*) => {
        #[derive(Default)]
        pub(crate) struct Counters {
            $(pub $name: AtomicU64,)*
        }

        /// How often things happened to a device since it was made.
        #[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
        pub struct DeviceStats {
            $($(#[doc = $doc])+ pub $name: u64,)*
        }

        impl DeviceStats {
            /// Calls `each` with the name, the meaning and the value of every counter.
            pub fn each(&self, mut each: impl FnMut(&'static str, &'static str, u64)) {
                $(each(stringify!($name), concat!($($doc),+).trim_start(), self.$name);)*
            }
        }

        impl Counters {
            pub fn stats(&self) -> DeviceStats {
                DeviceStats { $($name: self.$name.load(Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Read requests.
    reads,
    /// Write requests.
    writes,
    /// Bytes read.
    bytes_read,
    /// Bytes written.
    bytes_written,
    /// Requests to discard or to write zeros.
    zeroings,
    /// Bytes discarded or zeroed.
    bytes_zeroed,
    /// Blocks read whole, each by one decompression.
    block_reads,
    /// Blocks written whole, without a read.
    block_writes,
    /// Single 4 KiB pages read.
    page_reads,
    /// Single 4 KiB pages written whole, without a read.
    page_writes,
    /// Reads of a part of a block, which was decompressed whole or had been just before.
    partial_reads,
    /// Writes of a part of a 4 KiB page: it was read, changed and written.
    partial_writes,
    /// Read requests that failed.
    failed_reads,
    /// Write requests that failed, also those that were to write zeros.
    failed_writes,
    /// Requests beyond the end of the device.
    invalid,
    /// Parts of a block that were given up, or written anew, while the compressed block stays for
    /// the rest.
    deferred_frees,
    /// Blocks half of which had been written anew: what was left of them is kept page by page.
    blocks_cut,
}

impl Counters {
    pub fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Relaxed);
    }
}
