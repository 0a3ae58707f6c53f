//! Counters as JSON, with zram's names where zram has them.
use crate::device::{DeviceMemory, ObjectState};
use crate::export::Export;
use memfold_os::units::PAGE_SIZE;
use serde_json::{Map, Value, json};
use std::sync::Arc;

const PAGE: u64 = PAGE_SIZE as u64;

/// Returns the counters of all devices together.
pub fn of_backing(backing: &DeviceMemory, exports: &[Arc<Export>]) -> Value {
    let stats = backing.stats();
    let (huge_pages, same_pages) = backing.huge_and_same_pages();
    let zero_pages: u64 = exports.iter().map(|export| export.device().zero_pages()).sum();
    let of_devices = |figure: fn(&crate::device::DeviceStats) -> u64| -> u64 {
        exports.iter().map(|export| figure(&export.device().stats())).sum()
    };
    let spill = stats.spill.clone().unwrap_or_default();
    let mut events = Map::new();
    stats.store.events.each(|name, _, value| drop(events.insert(name.to_string(), value.into())));
    json!({
        "mm_stat": {
            "orig_data_size": stats.store.original_bytes,
            "compr_data_size": stats.store.stored_bytes,
            "mem_used_total": stats.held_bytes,
            "mem_limit": stats.limit_bytes,
            "mem_used_max": stats.store.held_bytes_peak + stats.table_bytes,
            "same_pages": zero_pages + same_pages,
            "pages_compacted": stats.store.compacted_bytes / PAGE,
            "huge_pages": huge_pages,
            "huge_pages_since": stats.store.events.huge_blocks,
        },
        "io_stat": {
            "failed_reads": of_devices(|s| s.failed_reads),
            "failed_writes": of_devices(|s| s.failed_writes),
            "invalid_io": of_devices(|s| s.invalid),
            "notify_free": of_devices(|s| s.zeroings),
        },
        "bd_stat": {
            "bd_count": spill.original_bytes / PAGE,
            "bd_reads": spill.read_bytes / PAGE,
            "bd_writes": spill.written_bytes / PAGE,
        },
        "limit_bytes": limit(stats.limit_bytes),
        "table_bytes": stats.table_bytes,
        "writeback": stats.spill.map(|spill| json!({
            "objects": spill.objects,
            "used_bytes": spill.used_bytes,
            "failed_reads": spill.failed_reads,
            "failed_writes": spill.failed_writes,
            "limit_bytes": spill.limit_left_bytes,
            "error": spill.error,
        })),
        "store": events,
    })
}

/// Returns the counters of one device.
pub fn of_export(export: &Export) -> Value {
    let mut counters = Map::new();
    export
        .device()
        .stats()
        .each(|name, _, value| drop(counters.insert(name.to_string(), value.into())));
    json!({
        "name": export.name(),
        "size_bytes": export.device().size(),
        "read_only": export.is_read_only(),
        "sector_bytes": export.sector_bytes(),
        "block_bytes": export.device().block_bytes(),
        "image_bytes": export.journal().map(|journal| journal.bytes()),
        "image_error": export.journal().and_then(|journal| journal.error()),
        "counters": counters,
    })
}

/// Returns an object with zram's flags: s same-filled, w written back, h huge, i idle, r
/// recompressed, n incompressible.
pub fn of_object(object: &ObjectState) -> Value {
    let flags = [
        ('s', object.is_same),
        ('w', object.is_written_back),
        ('h', object.is_huge),
        ('i', object.is_idle),
        ('r', object.is_tried && !object.is_huge),
        ('n', object.is_tried && object.is_huge),
    ];
    let flags: String = flags.iter().map(|(flag, on)| if *on { *flag } else { '.' }).collect();
    json!([object.offset, object.bytes, object.stored_bytes, flags])
}

/// Returns a limit, `null` for none.
pub fn limit(bytes: u64) -> Value {
    if bytes == 0 { Value::Null } else { bytes.into() }
}
