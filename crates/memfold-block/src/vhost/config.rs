//! What a device offers, and what a driver reads of it: features and configuration space.
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
/// Parts of the guest's memory in a request: with header and status, they fit a queue of the usual
/// 128 descriptors.
const SEGMENTS_MAX: u32 = 126;
/// What one range discards or zeroes at most: 1 GiB. Larger ones are done all the same.
const RANGE_SECTORS_MAX: u32 = 1 << 21;
/// Bytes of the configuration space, up to what is said of zeroing.
const SPACE_BYTES: usize = offset_of!(Space, write_zeroes_may_unmap) + 4;

/// Virtio's features.
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

/// The protocol's features. Not among them is a log of written pages, without which no VMM migrates
/// a guest away: its device would stay behind. Nor is a record of requests under way: a queue's
/// requests are ended in their order, so who connects again begins with the first that has not
/// ended.
pub(super) fn protocol_features() -> VhostUserProtocolFeatures {
    VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::RESET_DEVICE
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
}

/// `size` bytes of the configuration space from `offset` on. Beyond its end all are zero.
pub(super) fn config(export: &Export, offset: u32, size: u32) -> Vec<u8> {
    let all = space(export);
    (offset..offset.saturating_add(size))
        .map(|at| all.get(at as usize).copied().unwrap_or(0))
        .collect()
}

fn space(export: &Export) -> [u8; SPACE_BYTES] {
    let sector = export.sector_bytes();
    let preferred = export.preferred_bytes();
    let physical = preferred.min(4096).max(sector);
    let mut space = [0; SPACE_BYTES];
    let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
    put(offset_of!(Space, capacity), &(export.device().size() / SECTOR_BYTES).to_le_bytes());
    put(offset_of!(Space, seg_max), &SEGMENTS_MAX.to_le_bytes());
    put(offset_of!(Space, blk_size), &sector.to_le_bytes());
    put(offset_of!(Space, physical_block_exp), &[(physical / sector).ilog2() as u8]);
    put(offset_of!(Space, min_io_size), &((physical / sector) as u16).to_le_bytes());
    put(offset_of!(Space, opt_io_size), &(preferred / sector).to_le_bytes());
    put(offset_of!(Space, num_queues), &(QUEUES_MAX as u16).to_le_bytes());
    if !export.is_read_only() {
        put(offset_of!(Space, max_discard_sectors), &RANGE_SECTORS_MAX.to_le_bytes());
        put(offset_of!(Space, max_discard_seg), &(RANGES_MAX as u32).to_le_bytes());
        // Any range can be discarded; memory comes back for whole pages.
        put(
            offset_of!(Space, discard_sector_alignment),
            &(physical / SECTOR_BYTES as u32).to_le_bytes(),
        );
        put(offset_of!(Space, max_write_zeroes_sectors), &RANGE_SECTORS_MAX.to_le_bytes());
        put(offset_of!(Space, max_write_zeroes_seg), &(RANGES_MAX as u32).to_le_bytes());
        put(offset_of!(Space, write_zeroes_may_unmap), &[1]);
    }
    space
}
