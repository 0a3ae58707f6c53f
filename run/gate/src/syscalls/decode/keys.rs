//! Names the memory of calls on keys of the kernel.
use super::vectors;
use crate::syscalls::operands::{Operands, TEXT_MAX};

/// Names the memory of `keyctl`, by operation.
pub fn keyctl(n: &mut Operands) {
    let [_, a, b, c, d, _] = n.args;
    match n.int(0) {
        // JOIN_SESSION_KEYRING
        1 => n.text(a, TEXT_MAX),
        // UPDATE, INSTANTIATE
        2 | 12 => n.reads(b, c),
        // DESCRIBE, READ, GET_SECURITY
        6 | 11 | 17 => n.writes(b, c),
        // SEARCH, RESTRICT_KEYRING
        10 | 29 => {
            n.text(b, TEXT_MAX);
            n.text(c, TEXT_MAX);
        }
        // INSTANTIATE_IOV
        20 => vectors::vector(n, b, c, false),
        // DH_COMPUTE has three keys, a result, and a way to derive it.
        23 => {
            n.reads(a, 12);
            n.writes(b, c);
            if let Some(derive) = n.take::<56>(d) {
                n.text(derive.word(0), 128);
                n.reads(derive.word(8), derive.len(16));
            }
        }
        // PKEY_QUERY
        24 => {
            n.text(c, TEXT_MAX);
            n.writes(d, 40);
        }
        25..=28 => asymmetric(n),
        // CAPABILITIES
        31 => n.writes(a, b),
        _ => {}
    }
}

/// Names the memory of PKEY_ENCRYPT, DECRYPT, SIGN and VERIFY. The struct has two lengths.
fn asymmetric(n: &mut Operands) {
    const VERIFY: u32 = 28;
    let [_, a, b, c, d, _] = n.args;
    n.text(b, TEXT_MAX);
    if let Some(lengths) = n.take::<40>(a) {
        n.reads(c, lengths.len(4));
        n.touches(d, lengths.len(8), n.int(0) != VERIFY);
    }
}
