//! Names the memory of futex calls, of masks of waiting calls and of asynchronous I/O.
use super::vectors;
use crate::syscalls::operands::Operands;
use crate::syscalls::sizes::*;

/// Names the sixth argument of `pselect6` and `io_pgetevents`: a pointer to a mask, and the mask's
/// size.
pub fn mask_and_size(n: &mut Operands) {
    if let Some(both) = n.take::<16>(n.arg(5)) {
        n.reads(both.word(0), 8);
    }
}

/// Names a futex word. For a shared futex the kernel looks up the page as if to write to it. For a
/// private one it reads the value at most.
fn word(n: &mut Operands, at: usize, write: bool) {
    n.touches(at, 4, write);
}

/// Names the memory of `futex`, by operation.
pub fn futex(n: &mut Operands) {
    let operation = n.int(1) as i32;
    let is_shared = operation & libc::FUTEX_PRIVATE_FLAG == 0;
    let (one, two, time) = (n.arg(0), n.arg(4), n.arg(3));
    let command = operation & !(libc::FUTEX_PRIVATE_FLAG | libc::FUTEX_CLOCK_REALTIME);
    match command {
        libc::FUTEX_WAIT | libc::FUTEX_WAIT_BITSET => word(n, one, is_shared),
        libc::FUTEX_WAKE | libc::FUTEX_WAKE_BITSET if is_shared => word(n, one, true),
        libc::FUTEX_REQUEUE if is_shared => {
            word(n, one, true);
            word(n, two, true);
        }
        libc::FUTEX_CMP_REQUEUE => {
            word(n, one, is_shared);
            if is_shared {
                word(n, two, true);
            }
        }
        libc::FUTEX_WAKE_OP => {
            if is_shared {
                word(n, one, true);
            }
            word(n, two, true);
        }
        libc::FUTEX_WAIT_REQUEUE_PI | libc::FUTEX_CMP_REQUEUE_PI => {
            word(n, one, is_shared);
            word(n, two, true);
        }
        libc::FUTEX_LOCK_PI
        | libc::FUTEX_LOCK_PI2
        | libc::FUTEX_TRYLOCK_PI
        | libc::FUTEX_UNLOCK_PI => word(n, one, true),
        _ => {}
    }
    if matches!(
        command,
        libc::FUTEX_WAIT
            | libc::FUTEX_WAIT_BITSET
            | libc::FUTEX_LOCK_PI
            | libc::FUTEX_LOCK_PI2
            | libc::FUTEX_WAIT_REQUEUE_PI
    ) {
        n.reads(time, TIMESPEC);
    }
}

/// The flag FUTEX2_PRIVATE.
const PRIVATE: u32 = 128;
/// The flag FUTEX2_NUMA. The node follows the word, and the kernel may set it.
const NUMA: u32 = 4;

fn futex2(n: &mut Operands, at: usize, flags: u32) {
    if flags & NUMA != 0 {
        n.writes(at, 8);
    } else {
        word(n, at, flags & PRIVATE == 0);
    }
}

fn waiters(n: &mut Operands, array: usize, count: usize) {
    n.reads(array, count * FUTEX_WAITV);
    for i in 0..count {
        let Some(one) = n.get::<FUTEX_WAITV>(array.wrapping_add(i * FUTEX_WAITV)) else { return };
        futex2(n, one.word(8), one.half(16));
    }
}

/// Names up to 128 futex words.
pub fn futex_waitv(n: &mut Operands) {
    let count = n.int(1) as usize;
    if count <= 128 {
        waiters(n, n.arg(0), count);
    }
}

/// Names one futex word. Of a private one the kernel reads nothing.
pub fn futex_wake(n: &mut Operands) {
    let flags = n.int(3);
    if flags & PRIVATE == 0 || flags & NUMA != 0 {
        futex2(n, n.arg(0), flags);
    }
}

/// Names one futex word. The row names the time, which is the fifth argument.
pub fn futex_wait(n: &mut Operands) {
    futex2(n, n.arg(0), n.int(3));
}

/// Names two futex words. Waiters are moved from the first to the second.
pub fn futex_requeue(n: &mut Operands) {
    waiters(n, n.arg(0), 2);
}

/// Names requests for asynchronous I/O. The kernel marks each as its own, and uses the buffers
/// until the request is done.
pub fn io_submit(n: &mut Operands) {
    let count = n.arg(1).min(PER_CALL_MAX);
    n.reads(n.arg(2), count * 8);
    for i in 0..count {
        let Some(at) = n.word(n.arg(2).wrapping_add(i * 8)) else { return };
        let Some(request) = n.change::<IOCB>(at) else { return };
        let (buffer, len) = (request.word(24), request.word(32));
        match request.short(16) {
            0 => n.writes(buffer, len),
            1 => n.reads(buffer, len),
            7 => vectors::vector(n, buffer, len, true),
            8 => vectors::vector(n, buffer, len, false),
            _ => {}
        }
    }
}

/// The most requests of one call that are named. The kernel takes no more than the context has room
/// for.
const PER_CALL_MAX: usize = 65536;

/// The flag IORING_ENTER_EXT_ARG.
const EXTENDED: u32 = 8;

/// Names the mask that holds while the call waits, or a struct with the mask and a time.
pub fn io_uring_enter(n: &mut Operands) {
    let at = n.arg(4);
    if n.int(3) & EXTENDED == 0 {
        return n.reads(at, 8);
    }
    if let Some(both) = n.take::<24>(at) {
        n.reads(both.word(0), 8);
        n.reads(both.word(16), TIMESPEC);
    }
}

/// Names the memory of `io_uring_register`, by opcode. Registered buffers are pinned from then on.
pub fn io_uring_register(n: &mut Operands) {
    let (at, count) = (n.arg(2), n.int(3) as usize);
    match n.int(1) & 0x7fff_ffff {
        // BUFFERS
        0 => vectors::vector(n, at, count, true),
        // FILES, EVENTFD, EVENTFD_ASYNC
        2 | 4 | 7 => n.reads(at, count * 4),
        // FILES_UPDATE, PROBE, RESTRICTIONS
        6 => {
            if let Some(update) = n.take::<16>(at) {
                n.reads(update.word(8), count * 4);
            }
        }
        8 => n.writes(at, 16 + count * 8),
        11 => n.reads(at, count * 16),
        // FILES2, FILES_UPDATE2, BUFFERS2, BUFFERS_UPDATE
        13..=16 => n.reads(at, count),
        // IOWQ_AFF, IOWQ_MAX_WORKERS, RING_FDS, PBUF_RING and the rest
        17 => n.reads(at, count),
        19 => n.writes(at, 8),
        20 | 21 => n.writes(at, count * 16),
        _ => n.writes(at, 40),
    }
}
