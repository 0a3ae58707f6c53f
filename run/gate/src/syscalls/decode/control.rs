//! Names the memory of calls that have many commands: `fcntl`, `prctl`, `ptrace`, options of
//! sockets.
use super::vectors;
use crate::syscalls::operands::Operands;
use crate::syscalls::sizes::*;

/// Names the locks, owners and hints of `fcntl`.
pub fn fcntl(n: &mut Operands) {
    let at = n.arg(2);
    match n.int(1) {
        // F_GETLK, F_OFD_GETLK
        5 | 36 => n.writes(at, FLOCK),
        // F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW
        6 | 7 | 37 | 38 => n.reads(at, FLOCK),
        // F_SETOWN_EX, F_GETOWN_EX, F_GETOWNER_UIDS
        15 => n.reads(at, F_OWNER_EX),
        16 | 17 => n.writes(at, F_OWNER_EX),
        // F_GET_RW_HINT, F_SET_RW_HINT, F_GET_FILE_RW_HINT, F_SET_FILE_RW_HINT
        1035 | 1037 => n.writes(at, 8),
        1036 | 1038 => n.reads(at, 8),
        _ => {}
    }
}

/// Returns whether an `fcntl` asks about a descriptor. Programs ask by it whether a descriptor is
/// open.
pub fn asks_for_descriptor(args: &[usize; 6]) -> bool {
    let commands =
        [libc::F_GETFD, libc::F_SETFD, libc::F_GETFL, libc::F_DUPFD, libc::F_DUPFD_CLOEXEC];
    commands.contains(&(args[1] as i32))
}

const SOL_SOCKET: u32 = 1;
const SOL_TCP: u32 = 6;

/// Returns a length in bytes. The kernel refuses a negative one, so it counts as 0.
fn bytes_of(int: u32) -> usize {
    usize::try_from(int as i32).unwrap_or(0)
}

/// Names the value of an option, and the program of a filter.
pub fn setsockopt(n: &mut Operands) {
    let bytes = bytes_of(n.int(4));
    n.reads(n.arg(3), bytes);
    // SO_ATTACH_FILTER, SO_ATTACH_REUSEPORT_CBPF
    if n.int(1) == SOL_SOCKET && matches!(n.int(2), 26 | 51) && bytes == SOCK_FPROG {
        vectors::filter(n, n.arg(3));
    }
    // PACKET_FANOUT_DATA with a classic program
    if n.int(1) == 263 && n.int(2) == 22 && bytes == SOCK_FPROG {
        vectors::filter(n, n.arg(3));
    }
}

/// Names the value of an option, and its length.
pub fn getsockopt(n: &mut Operands) {
    let (at, length) = (n.arg(3), n.arg(4));
    n.writes(length, 4);
    let Some(half) = n.half(length) else { return };
    let bytes = bytes_of(half);
    match (n.int(1), n.int(2)) {
        // SO_GET_FILTER counts instructions.
        (SOL_SOCKET, 26) => n.writes(at, bytes * SOCK_FILTER),
        // TCP_ZEROCOPY_RECEIVE has a buffer for what can't be mapped.
        (SOL_TCP, 35) => {
            n.writes(at, bytes);
            if bytes >= 40
                && let Some(arg) = n.get::<40>(at)
            {
                n.writes(arg.word(24), usize::try_from(arg.half(32) as i32).unwrap_or(0));
            }
        }
        _ => n.writes(at, bytes),
    }
}

/// The option PR_SET_VMA.
const SET_VMA: u32 = 0x5356_4d41;
/// The option PR_GET_AUXV.
const GET_AUXV: u32 = 0x4155_5856;

/// Names the memory of `prctl`, by option.
pub fn prctl(n: &mut Operands) {
    let [_, a, b, _, d, _] = n.args;
    match n.int(0) {
        // GET_PDEATHSIG, GET_UNALIGN, GET_FPEMU, GET_FPEXC, GET_ENDIAN, GET_TSC,
        // GET_CHILD_SUBREAPER
        2 | 5 | 9 | 11 | 19 | 25 | 37 => n.writes(a, 4),
        // SET_NAME, GET_NAME
        15 => n.text(a, 15),
        16 => n.writes(a, 16),
        // SET_SECCOMP with a filter
        22 if a == 2 => vectors::filter(n, b),
        // GET_TID_ADDRESS
        40 => n.writes(a, 8),
        35 => memory_map(n),
        // SET_SYSCALL_USER_DISPATCH: the selector, which is read from now on.
        59 => n.reads(d, 1),
        // SCHED_CORE_GET
        62 if a == 0 => n.writes(d, 8),
        SET_VMA if a == 0 => n.text(d, 80),
        GET_AUXV => n.writes(a, b),
        _ => {}
    }
}

/// Names the memory of PR_SET_MM.
fn memory_map(n: &mut Operands) {
    const MAP: usize = 104;
    let [_, what, at, len, ..] = n.args;
    match what {
        // AUXV
        12 => n.reads(at, len),
        // MAP points to the auxiliary vector.
        14 => {
            n.reads(at, len);
            if len == MAP
                && let Some(map) = n.get::<MAP>(at)
            {
                n.reads(map.word(88), map.len(96));
            }
        }
        // MAP_SIZE
        15 => n.writes(at, 4),
        _ => {}
    }
}

/// Returns whether a `prctl` changes mappings: SET_MM, SET_THP_DISABLE, SET_MEMORY_MERGE, SET_VMA,
/// and the lasting protection MDWE.
pub fn changes_mappings(args: &[usize; 6]) -> bool {
    matches!(args[0] as u32, 35 | 41 | 67 | SET_VMA | 65)
}

/// Names the memory of `arch_prctl`, by code.
pub fn arch_prctl(n: &mut Operands) {
    match n.int(0) {
        // GET_FS, GET_GS, GET_XCOMP_SUPP, GET_XCOMP_PERM, GET_XCOMP_GUEST_PERM, GET_UNTAG_MASK,
        // GET_MAX_TAG_BITS, SHSTK_STATUS
        0x1003 | 0x1004 | 0x1021 | 0x1022 | 0x1024 | 0x4001 | 0x4003 | 0x5005 => {
            n.writes(n.arg(1), 8);
        }
        _ => {}
    }
}

/// Names the tracer's memory that `ptrace` uses, by request.
pub fn ptrace(n: &mut Operands) {
    let (request, addr, data) = (n.arg(0), n.arg(2), n.arg(3));
    match request {
        // PEEKTEXT, PEEKDATA, PEEKUSER, GETEVENTMSG, GETSIGMASK
        1..=3 | 0x4201 | 0x420a => n.writes(data, 8),
        0x420b => n.reads(data, 8),
        12 => n.writes(data, USER_REGS),
        13 => n.reads(data, USER_REGS),
        14 => n.writes(data, USER_FPREGS),
        15 => n.reads(data, USER_FPREGS),
        // GET_THREAD_AREA, SET_THREAD_AREA
        25 => n.writes(data, 16),
        26 => n.reads(data, 16),
        // ARCH_PRCTL that gets a value
        30 if matches!(data, 0x1003 | 0x1004) => n.writes(addr, 8),
        0x4202 => n.writes(data, SIGINFO),
        0x4203 => n.reads(data, SIGINFO),
        // GETREGSET, SETREGSET. The kernel writes back how much there was.
        0x4204 | 0x4205 => {
            if let Some(part) = n.change::<IOVEC>(data) {
                n.touches(part.word(0), part.word(8), request == 0x4204);
            }
        }
        // PEEKSIGINFO
        0x4209 => {
            if let Some(args) = n.take::<16>(addr) {
                let count = usize::try_from(args.half(12) as i32).unwrap_or(0);
                n.writes(data, count.saturating_mul(SIGINFO));
            }
        }
        // SECCOMP_GET_FILTER, for the longest filter
        0x420c => n.writes(data, 4096 * SOCK_FILTER),
        // SECCOMP_GET_METADATA, GET_SYSCALL_INFO, GET_RSEQ_CONFIGURATION,
        // GET_SYSCALL_USER_DISPATCH_CONFIG
        0x420d..=0x420f | 0x4211 => n.writes(data, addr),
        0x4210 | 0x4212 => n.reads(data, addr),
        _ => {}
    }
}

/// Names the filter, or a number of bytes by operation.
pub fn seccomp(n: &mut Operands) {
    match n.int(0) {
        1 => vectors::filter(n, n.arg(2)),
        2 => n.reads(n.arg(2), 4),
        3 => n.writes(n.arg(2), 6),
        _ => {}
    }
}
