//! Names the memory of `bpf`. All commands share one struct, and each has its fields at other
//! places in it.
use super::ask::ask;
use super::process::cpus_possible;
use crate::syscalls::operands::{Operands, StructFields, TEXT_MAX};
use memfold_os::units::PAGE_SIZE;

/// The length in bytes of the part of the struct that has pointers.
const LOOKED_AT: usize = 152;

type BpfAttributes = StructFields<LOOKED_AT>;

/// Names the memory of `bpf`, by command. The kernel writes results into the struct.
pub fn bpf(n: &mut Operands) {
    let (command, at, size) = (n.int(0), n.arg(1), n.int(2) as usize);
    if size > PAGE_SIZE {
        return;
    }
    n.reads(at, size);
    n.writes(at, size);
    let mut fields = StructFields([0; LOOKED_AT]);
    // Bytes past the end of a shorter struct count as zeros.
    for i in 0..LOOKED_AT.min(size).div_ceil(8) {
        let rest = size - i * 8;
        let place = at.wrapping_add(i * 8);
        let part = match rest {
            8.. => n.get::<8>(place).map(|f| f.0),
            _ => n.get::<4>(place).map(|f| [f.0[0], f.0[1], f.0[2], f.0[3], 0, 0, 0, 0]),
        };
        let Some(part) = part else { return };
        fields.0[i * 8..i * 8 + 8].copy_from_slice(&part);
    }
    match command {
        1..=4 | 21 => element(n, command, &fields),
        5 => program(n, &fields),
        // OBJ_PIN, OBJ_GET
        6 | 7 => n.text(fields.word(0), TEXT_MAX),
        // PROG_TEST_RUN
        10 => {
            n.reads(fields.word(16), fields.len(8));
            n.writes(fields.word(24), fields.len(12));
            n.reads(fields.word(48), fields.len(40));
            n.writes(fields.word(56), fields.len(44));
        }
        // OBJ_GET_INFO_BY_FD
        15 => n.writes(fields.word(8), fields.len(4)),
        // PROG_QUERY
        16 => n.writes(fields.word(16), fields.len(24) * 4),
        // RAW_TRACEPOINT_OPEN
        17 => n.text(fields.word(0), 128),
        // BTF_LOAD
        18 => {
            n.reads(fields.word(0), fields.len(16));
            n.writes(fields.word(8), fields.len(20));
        }
        // TASK_FD_QUERY
        20 => n.writes(fields.word(16), fields.len(12)),
        24..=27 => batch(n, command, &fields),
        // LINK_CREATE of an iterator
        28 if fields.len(24) <= PAGE_SIZE => n.reads(fields.word(16), fields.len(24)),
        _ => {}
    }
}

/// Returns the bytes of a map's key and of a value, as user space sees it. Returns `None` if the
/// kernel doesn't tell.
fn sizes(map: u32) -> Option<(usize, usize)> {
    let mut info = [0u32; 20];
    let about = [map as u64 | (size_of_val(&info) as u64) << 32, &raw mut info as u64];
    let args = [15, &raw const about as usize, size_of_val(&about), 0, 0, 0];
    // SAFETY: `about` tells the kernel the address and the length of `info`, so it writes only to
    // `info` and to `about`. Both live until the call returns. `about` isn't read again.
    unsafe { ask(libc::SYS_bpf, args) }?;
    let [kind, _, key, value, ..] = info;
    let (key, value) = (key as usize, value as usize);
    // A value of a per-CPU map has one part for each CPU.
    let per_cpu = matches!(kind, 5 | 6 | 10 | 21);
    Some((key, if per_cpu { value.next_multiple_of(8) * cpus_possible() } else { value }))
}

fn element(n: &mut Operands, command: u32, fields: &BpfAttributes) {
    let Some((key, value)) = sizes(fields.half(0)) else { return };
    // Queues and stacks have no key, but the program may pass one.
    n.reads(fields.word(8), key);
    match command {
        1 | 21 => n.writes(fields.word(16), value),
        2 => n.reads(fields.word(16), value),
        4 => n.writes(fields.word(16), key),
        _ => {}
    }
}

fn batch(n: &mut Operands, command: u32, fields: &BpfAttributes) {
    let Some((key, value)) = sizes(fields.half(36)) else { return };
    let count = fields.len(32);
    let looks_up = matches!(command, 24 | 25);
    n.reads(fields.word(0), key.max(8));
    n.writes(fields.word(8), key.max(8));
    n.touches(fields.word(16), key.saturating_mul(count), looks_up);
    n.touches(fields.word(24), value.saturating_mul(count), looks_up);
}

fn program(n: &mut Operands, fields: &BpfAttributes) {
    n.reads(fields.word(8), fields.len(4) * 8);
    n.text(fields.word(16), 128);
    n.writes(fields.word(32), fields.len(28));
    n.reads(fields.word(80), fields.len(76).saturating_mul(fields.len(88)));
    n.reads(fields.word(96), fields.len(92).saturating_mul(fields.len(104)));
    n.reads(fields.word(128), fields.len(116).saturating_mul(fields.len(136)));
    // Older structs have no length for the array of descriptors. Then what is named ends with a
    // page.
    if fields.word(120) != 0 {
        let count = if fields.half(144) != 0 { fields.len(144) * 4 } else { 256 };
        n.reads(fields.word(120), count);
    }
}
