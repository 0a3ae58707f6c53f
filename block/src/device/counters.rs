//! The table of a device's counters.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)*) => {
        #[derive(Default)]
        pub(crate) struct DeviceCounters {
            $(pub $name: AtomicU64,)*
        }

        /// Counts since the device was made.
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

        impl DeviceCounters {
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
    /// Reads of a part of a block. The block was decompressed whole, or had just been.
    partial_reads,
    /// Writes of a part of a 4 KiB page, which was read, changed and written.
    partial_writes,
    /// Read requests that failed.
    failed_reads,
    /// Write requests that failed, including those to write zeros.
    failed_writes,
    /// Requests beyond the end of the device.
    invalid,
    /// Parts of a block that were discarded or rewritten while the compressed block stays for the
    /// rest.
    deferred_frees,
    /// Blocks of which half was rewritten; the rest is stored page by page.
    blocks_cut,
}

impl DeviceCounters {
    pub fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Relaxed);
    }
}
