//! Counters of a store.
use crate::pool::Pool;
use crate::pool::size_class::{CLASSES, SizeClass};
use alloc::boxed::Box;
use memfold_os::sync::atomic::{AtomicU64, Ordering::*};
use memfold_os::units::{MAX_ORDER, PAGE_SIZE};

const ORDERS: usize = MAX_ORDER as usize + 1;
/// Workers spread over this many groups of counters, so that few share a cache line.
pub(crate) const GROUPS: usize = 16;

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)*) => {
        /// One group of event counters.
        #[derive(Default)]
        #[repr(align(128))]
        pub(crate) struct Counters {
            $(pub $name: AtomicU64,)*
            pub saves: [AtomicU64; ORDERS],
            pub loads: [AtomicU64; ORDERS],
        }

        /// Counts since the store was made.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct Events {
            $($(#[doc = $doc])+ pub $name: u64,)*
            /// Folios saved, by folio order. Successful saves only.
            pub saves: [u64; ORDERS],
            /// Blocks decompressed by loads, by block order. Successful loads only.
            pub loads: [u64; ORDERS],
        }

        impl Events {
            /// Calls `each` with the name, the meaning and the value of every counter that is one
            /// number.
            pub fn each(&self, mut each: impl FnMut(&'static str, &'static str, u64)) {
                $(each(stringify!($name), concat!($($doc),+), self.$name);)*
            }

            pub(crate) fn sum(groups: &[Counters]) -> Events {
                let mut sum = Events::default();
                for group in groups {
                    $(sum.$name += group.$name.load(Relaxed);)*
                    for order in 0..ORDERS {
                        sum.saves[order] += group.saves[order].load(Relaxed);
                        sum.loads[order] += group.loads[order].load(Relaxed);
                    }
                }
                sum
            }
        }
    };
}

counters! {
    /// Blocks saved.
    blocks_saved,
    /// Bytes of the blocks saved, before compression.
    bytes_saved,
    /// Payload bytes of the blocks saved.
    bytes_stored,
    /// Blocks of zeros saved, which hold no memory.
    zero_blocks,
    /// Same-filled pages in blocks saved, zero blocks included.
    same_pages,
    /// Blocks saved that did not compress enough and were stored raw.
    huge_blocks,
    /// Blocks that looked too dense to be given to the codec, with those of saves that failed
    /// later.
    dense_blocks,
    /// Saves refused because the pool was full.
    refused_full,
    /// Saves refused because a block does not compress.
    refused_incompressible,
    /// Saves that failed in the codec.
    codec_failures,
    /// Saves refused because verification read other bytes.
    verify_mismatches,
    /// Saves cancelled by their caller.
    cancelled,
    /// Loads that failed.
    failed_loads,
    /// Loads of a part of a block.
    partial_loads,
    /// Objects that a stronger codec was tried on.
    recompress_tried,
    /// Objects that it made smaller.
    recompressed,
    /// Payload bytes that it saved.
    recompress_gained,
    /// Loads answered from the cache of decompressed blocks.
    block_cache_hits,
    /// Loads of a part of a block that had to decompress the whole block.
    block_cache_misses,
}

/// Counters of a store at one moment. Each is exact; counters read while threads work may differ by
/// what happened between the reads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Events.
    pub events: Events,
    /// Objects in the pools, without zero blocks.
    pub objects: u64,
    /// Bytes of the blocks behind the objects, before compression.
    pub original_bytes: u64,
    /// Payload bytes of the objects.
    pub stored_bytes: u64,
    /// Bytes of memory held: spans, spans kept for reuse, and metadata.
    pub held_bytes: u64,
    /// Peak of `held_bytes`.
    pub held_bytes_peak: u64,
    /// The part of `held_bytes` in empty spans kept for reuse.
    pub warm_bytes: u64,
    /// The part of `held_bytes` in entries, descriptions of spans, and cached blocks.
    pub metadata_bytes: u64,
    /// Spans in use.
    pub spans: u64,
    /// Objects that compaction moved.
    pub moved: u64,
    /// Bytes that compaction gave back to the kernel.
    pub compacted_bytes: u64,
    /// Times that the lock of a size class was held by another thread.
    pub lock_waits: u64,
    /// Nanoseconds that these waits took, all threads together.
    pub lock_wait_ns: u64,
    /// Frees of dead or damaged handles: each is a bug of the caller or damaged memory.
    pub bad_frees: u64,
}

/// Counters of one size class over all pools.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct ClassStats {
    /// Bytes of a slot.
    pub slot_bytes: u32,
    /// Pages of a span.
    pub span_pages: u16,
    /// Slots of a span.
    pub span_slots: u16,
    /// Spans in use.
    pub spans: u64,
    /// Objects.
    pub objects: u64,
    /// Payload bytes of the objects.
    pub stored_bytes: u64,
}

impl StoreStats {
    /// Returns bytes stored per byte held, 0 when nothing is held.
    pub fn efficiency(&self) -> f64 {
        if self.held_bytes == 0 { 0.0 } else { self.stored_bytes as f64 / self.held_bytes as f64 }
    }

    /// Returns the share of hits among the loads that the cache of decompressed blocks is for, 0
    /// without any.
    pub fn block_cache_hit_rate(&self) -> f64 {
        let all = self.events.block_cache_hits + self.events.block_cache_misses;
        if all == 0 { 0.0 } else { self.events.block_cache_hits as f64 / all as f64 }
    }

    pub(crate) fn gather(groups: &[Counters], pools: &[Pool], held: u64, peak: u64) -> StoreStats {
        let mut stats = StoreStats {
            events: Events::sum(groups),
            held_bytes: held,
            held_bytes_peak: peak,
            ..Default::default()
        };
        for pool in pools {
            stats.add_pool(pool);
        }
        stats
    }

    fn add_pool(&mut self, pool: &Pool) {
        for class in 0..CLASSES.len() {
            let state = pool.classes[class].lock();
            self.objects += state.objects as u64;
            self.stored_bytes += state.stored;
            self.original_bytes += state.original;
            self.spans += state.spans as u64;
        }
        self.metadata_bytes += pool.entries.bytes(&pool.entries.lock());
        let arena = pool.arena.lock();
        self.warm_bytes += arena.warm_bytes;
        self.metadata_bytes += pool.arena.metadata_bytes(&arena);
        drop(arena);
        self.moved += pool.counters.moved.load(Relaxed);
        self.compacted_bytes += pool.counters.compacted.load(Relaxed);
        self.lock_waits += pool.counters.lock_waits.load(Relaxed);
        self.lock_wait_ns += pool.counters.lock_wait_ns.load(Relaxed);
        self.bad_frees += pool.counters.bad_frees.load(Relaxed);
    }
}

/// Calls `each` with the counters of every size class that has a span, smallest first.
pub(crate) fn each_class(pools: &[Pool], mut each: impl FnMut(ClassStats)) {
    for (index, SizeClass { slot_bytes, pages, slots }) in CLASSES.iter().copied().enumerate() {
        let mut sum = ClassStats {
            slot_bytes,
            span_pages: pages,
            span_slots: slots,
            spans: 0,
            objects: 0,
            stored_bytes: 0,
        };
        for pool in pools {
            let state = pool.classes[index].lock();
            sum.spans += state.spans as u64;
            sum.objects += state.objects as u64;
            sum.stored_bytes += state.stored;
        }
        if sum.spans > 0 {
            each(sum);
        }
    }
}

impl ClassStats {
    /// Returns the bytes of the spans.
    pub fn held_bytes(&self) -> u64 {
        self.spans * self.span_pages as u64 * PAGE_SIZE as u64
    }
}

pub(crate) fn groups() -> Box<[Counters]> {
    (0..GROUPS).map(|_| Counters::default()).collect()
}
