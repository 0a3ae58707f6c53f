//! Names the memory of `ioctl`. Most requests tell direction and size themselves. A table has those
//! that tell neither. Functions serve those with pointers or arrays inside.
//!
//! Requests that are missing here (graphics, video and drivers without numbers) show up as EFAULT,
//! after which the keeper checks the call.
use super::requests::{self, ArgumentKind};
use super::vectors;
use crate::syscalls::operands::{Operands, TEXT_MAX};
use crate::syscalls::sizes::*;
use memfold_os::units::PAGE_SIZE;

/// Names the memory of `ioctl`, by request.
pub fn ioctl(n: &mut Operands) {
    let (request, at) = (n.int(1), n.arg(2));
    if nested(n, request, at) {
        return;
    }
    match requests::known(request) {
        Some(ArgumentKind::Value) => {}
        Some(ArgumentKind::In(bytes)) => n.reads(at, bytes),
        Some(ArgumentKind::Out(bytes)) => n.writes(at, bytes),
        None => {
            let bytes = (request >> 16 & 0x3fff) as usize;
            match request >> 30 {
                0 => {}
                1 => n.reads(at, bytes),
                _ => n.writes(at, bytes),
            }
        }
    }
}

/// Names the memory of a request that has more than one struct. Returns `false` for other requests.
fn nested(n: &mut Operands, request: u32, at: usize) -> bool {
    match request {
        // SIOCGIFCONF has a length and a buffer.
        0x8912 => {
            if let Some(conf) = n.change::<16>(at) {
                n.writes(conf.word(8), conf.len(0));
            }
        }
        // SIOCADDRT, SIOCDELRT have the name of a device.
        0x890b | 0x890c => {
            if let Some(route) = n.take::<120>(at) {
                n.text(route.word(88), 16);
            }
        }
        // SIOCETHTOOL has a command with its struct. Most are small.
        0x8946 => {
            if let Some(interface) = n.change::<40>(at) {
                n.writes(interface.word(16), PAGE_SIZE);
            }
        }
        // FS_IOC_FIEMAP is followed by an array.
        0xc020_660b => counted(n, at, 32, 24, 56),
        // FIDEDUPERANGE
        0xc018_9436 => {
            let count = n.get::<24>(at).map_or(0, |f| f.short(16));
            n.writes(at, 24 + count * 32);
        }
        0x1269 => partition(n, at),
        0x2285 => scsi(n, at),
        // HDIO_DRIVE_CMD
        0x031f => {
            let sectors = n.half(at).map_or(0, |v| v >> 24) as usize;
            n.writes(at, 4 + sectors * 512);
        }
        // PAGEMAP_SCAN, PROCMAP_QUERY
        0xc060_6610 => {
            if let Some(scan) = n.change::<96>(at) {
                n.writes(scan.word(40), scan.word(48).saturating_mul(24));
            }
        }
        0xc068_6611 => {
            if let Some(query) = n.change::<104>(at) {
                n.writes(query.word(88), query.len(80));
                n.writes(query.word(96), query.len(84));
            }
        }
        _ => {
            return programs(n, request, at) || kvm(n, request, at) || devices(n, request, at);
        }
    }
    true
}

/// Names the filters, texts and lists of requests for tracing, tunnels and the random number pool.
/// Returns `false` for other requests.
fn programs(n: &mut Operands, request: u32, at: usize) -> bool {
    match request {
        // PERF_EVENT_IOC_SET_FILTER, QUERY_BPF
        0x4008_2406 => n.text(at, TEXT_MAX),
        0xc008_240a => counted(n, at, 8, 0, 4),
        // RNDADDENTROPY
        0x4008_5203 => {
            let bytes = n.get::<8>(at).map_or(0, |f| f.len(4));
            n.reads(at, 8 + bytes);
        }
        // TUNATTACHFILTER, TUNDETACHFILTER; PPPIOCSPASS, PPPIOCSACTIVE
        0x4010_54d5 | 0x4010_54d6 | 0x4010_7447 | 0x4010_7446 => vectors::filter(n, at),
        // TUNSETTXFILTER
        0x4004_54d1 => {
            let count = n.get::<4>(at).map_or(0, |f| f.short(2));
            n.reads(at, 4 + count * 6);
        }
        _ => return false,
    }
    true
}

/// Names a struct of `head` bytes, which has a count at byte `count`, and that many parts of `each`
/// bytes after it.
fn counted(n: &mut Operands, at: usize, head: usize, count: usize, each: usize) {
    let parts = n.half(at.wrapping_add(count)).unwrap_or(0) as usize;
    n.writes(at, head + parts.saturating_mul(each));
}

/// Names the memory of BLKPG: a partition.
fn partition(n: &mut Operands, at: usize) {
    if let Some(arg) = n.take::<24>(at) {
        n.reads(arg.word(16), 152);
    }
}

/// Names the memory of SG_IO: command, sense, data.
fn scsi(n: &mut Operands, at: usize) {
    const TO_DEVICE: i32 = -2;
    let Some(io) = n.change::<88>(at) else { return };
    let write = io.half(4) as i32 != TO_DEVICE;
    n.reads(io.word(24), io.0[8] as usize);
    n.writes(io.word(32), io.0[9] as usize);
    match io.short(10) {
        0 => n.touches(io.word(16), io.len(12), write),
        parts => vectors::vector(n, io.word(16), parts, write),
    }
}

/// Names the memory of requests of virtual machines (KVM). Returns `false` for other requests.
fn kvm(n: &mut Operands, request: u32, at: usize) -> bool {
    match request {
        // GET_MSR_INDEX_LIST, GET_MSR_FEATURE_INDEX_LIST
        0xc004_ae02 | 0xc004_ae0a => counted(n, at, 4, 0, 4),
        // GET_SUPPORTED_CPUID, GET_EMULATED_CPUID, SET_CPUID2, GET_CPUID2
        0xc008_ae05 | 0xc008_ae09 | 0x4008_ae90 | 0xc008_ae91 => counted(n, at, 8, 0, 40),
        // GET_MSRS, SET_MSRS
        0xc008_ae88 | 0x4008_ae89 => counted(n, at, 8, 0, 16),
        // GET_DIRTY_LOG has a bit for each page of a slot. The call doesn't tell the slot's size.
        0x4010_ae42 => {
            if let Some(log) = n.take::<16>(at) {
                n.writes(log.word(8), PAGE_SIZE);
            }
        }
        // SET_SIGNAL_MASK
        0x4004_ae8b => {
            let bytes = n.half(at).unwrap_or(0).min(128) as usize;
            n.reads(at, 4 + bytes);
        }
        // SET_GSI_ROUTING
        0x4008_ae6a => counted(n, at, 8, 0, 48),
        // SET_DEVICE_ATTR, GET_DEVICE_ATTR have a pointer to the attribute's value.
        0x4018_aee1 | 0x4018_aee2 => {
            if let Some(attribute) = n.take::<24>(at) {
                n.writes(attribute.word(16), 64);
            }
        }
        _ => return false,
    }
    true
}

/// Names the memory of requests of devices: VFIO has the size of a struct in the struct, vhost has
/// arrays, DRM has texts. Returns `false` for other requests.
fn devices(n: &mut Operands, request: u32, at: usize) -> bool {
    match request {
        0x3b66..=0x3bff => {
            let bytes = n.half(at).unwrap_or(0) as usize;
            n.writes(at, bytes.clamp(4, PAGE_SIZE));
        }
        // VHOST_SET_MEM_TABLE
        0x4008_af03 => {
            let count = n.half(at).unwrap_or(0) as usize;
            n.reads(at, 8 + count.min(PAGE_SIZE) * 32);
        }
        // DRM_IOCTL_VERSION
        0xc040_6400 => {
            if let Some(version) = n.change::<64>(at) {
                for place in [16, 32, 48] {
                    n.writes(version.word(place + 8), version.word(place));
                }
            }
        }
        // USBDEVFS_CONTROL, BULK have data in either direction.
        0xc018_5500 => {
            if let Some(control) = n.change::<24>(at) {
                n.writes(control.word(16), control.short(6));
            }
        }
        0xc018_5502 => {
            if let Some(bulk) = n.change::<24>(at) {
                n.writes(bulk.word(16), bulk.len(4));
            }
        }
        // UFFDIO_COPY: the source
        0xc028_aa03 => {
            if let Some(copy) = n.change::<40>(at) {
                n.reads(copy.word(8), copy.word(16));
            }
        }
        _ => return false,
    }
    true
}

/// Returns whether a request gives memory to another part of the kernel.
pub fn gives_memory(args: &[usize; 6]) -> bool {
    let request = args[1] as u32;
    // KVM_SET_USER_MEMORY_REGION, KVM_SET_USER_MEMORY_REGION2; VFIO_IOMMU_MAP_DMA, UNMAP_DMA;
    // VHOST_SET_MEM_TABLE
    matches!(request, 0x4020_ae46 | 0x40a0_ae49 | 0x3b71 | 0x3b72 | 0x4008_af03)
        // UFFDIO_REGISTER, UNREGISTER, MOVE, WRITEPROTECT and the others
        || request >> 8 & 0xff == 0xaa
}

const _: () = assert!(SOCK_FPROG == 16, "the requests with a filter say 16");
