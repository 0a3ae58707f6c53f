//! The features and the configuration space of a device.
use super::request::RANGES_MAX;
use crate::device::SECTOR_BYTES;
use crate::export::Export;
use std::mem::offset_of;
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use virtio_bindings::virtio_blk::{self as blk, virtio_blk_config as Space};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

/// Queues that a VMM may use.
pub(super) const QUEUES_MAX: usize = 64;
/// The largest queue, in descriptors.
pub(super) const QUEUE_SIZE_MAX: usize = 1024;
/// Parts of the guest's memory in a request. With header and status they fit a queue of the usual
/// 128 descriptors.
const SEGMENTS_MAX: u32 = 126;
/// Most bytes that one range discards or zeroes: 1 GiB. Longer ranges work too.
const RANGE_SECTORS_MAX: u32 = 1 << 21;
/// Bytes of the configuration space, up to the fields about zeroing.
const SPACE_BYTES: usize = offset_of!(Space, write_zeroes_may_unmap) + 4;

/// Returns the features of virtio.
pub(super) fn features(export: &Export) -> u64 {
    let bit = |n: u32| 1_u64 << n;
    let mut all = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
        | bit(VIRTIO_F_VERSION_1)
        | bit(VIRTIO_RING_F_INDIRECT_DESC)
        | bit(VIRTIO_RING_F_EVENT_IDX)
        | bit(blk::VIRTIO_BLK_F_SEG_MAX)
        | bit(blk::VIRTIO_BLK_F_BLK_SIZE)
        | bit(blk::VIRTIO_BLK_F_TOPOLOGY)
        | bit(blk::VIRTIO_BLK_F_FLUSH)
        | bit(blk::VIRTIO_BLK_F_MQ);
    if export.is_read_only() {
        all |= bit(blk::VIRTIO_BLK_F_RO);
    } else {
        all |= bit(blk::VIRTIO_BLK_F_DISCARD) | bit(blk::VIRTIO_BLK_F_WRITE_ZEROES);
    }
    all
}

/// Returns the protocol's features. A log of written pages is not among them, so no VMM migrates a
/// guest away and leaves its device behind. Nor is a record of requests in progress: requests of a
/// queue end in order, so a new connection begins with the first unfinished one.
pub(super) fn protocol_features() -> VhostUserProtocolFeatures {
    VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::RESET_DEVICE
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
}

/// Returns `size` bytes of the configuration space from `offset` on. Bytes beyond its end are zero.
pub(super) fn config(export: &Export, offset: u32, size: u32) -> Vec<u8> {
    let all = space(export);
    (offset..offset.saturating_add(size))
        .map(|at| all.get(at as usize).copied().unwrap_or(0))
        .collect()
}

fn space(export: &Export) -> [u8; SPACE_BYTES] {
    let sector = export.sector_bytes();
    let preferred_bytes = export.preferred_bytes();
    let physical = preferred_bytes.min(4096).max(sector);
    let mut space = [0; SPACE_BYTES];
    let mut copy = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
    copy(offset_of!(Space, capacity), &(export.device().size() / SECTOR_BYTES).to_le_bytes());
    copy(offset_of!(Space, seg_max), &SEGMENTS_MAX.to_le_bytes());
    copy(offset_of!(Space, blk_size), &sector.to_le_bytes());
    copy(offset_of!(Space, physical_block_exp), &[(physical / sector).ilog2() as u8]);
    copy(offset_of!(Space, min_io_size), &((physical / sector) as u16).to_le_bytes());
    copy(offset_of!(Space, opt_io_size), &(preferred_bytes / sector).to_le_bytes());
    copy(offset_of!(Space, num_queues), &(QUEUES_MAX as u16).to_le_bytes());
    if !export.is_read_only() {
        copy(offset_of!(Space, max_discard_sectors), &RANGE_SECTORS_MAX.to_le_bytes());
        copy(offset_of!(Space, max_discard_seg), &(RANGES_MAX as u32).to_le_bytes());
        // Any range can be discarded; only whole pages free memory.
        copy(
            offset_of!(Space, discard_sector_alignment),
            &(physical / SECTOR_BYTES as u32).to_le_bytes(),
        );
        copy(offset_of!(Space, max_write_zeroes_sectors), &RANGE_SECTORS_MAX.to_le_bytes());
        copy(offset_of!(Space, max_write_zeroes_seg), &(RANGES_MAX as u32).to_le_bytes());
        copy(offset_of!(Space, write_zeroes_may_unmap), &[1]);
    }
    space
}
