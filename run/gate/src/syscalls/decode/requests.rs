//! Lists requests of `ioctl` that don't tell direction and size themselves, or tell them wrongly.

/// The kind of a request's argument.
#[derive(Copy, Clone)]
pub enum ArgumentKind {
    /// A number, or nothing.
    Value,
    /// Memory of this many bytes that the kernel reads.
    In(usize),
    /// Memory of this many bytes that the kernel writes to, and may read.
    Out(usize),
}
use ArgumentKind::{In, Out, Value};

/// The size of the kernel's `struct termios`.
const TERMIOS: usize = 36;
const TERMIO: usize = 18;
const IFREQ: usize = 40;

/// Returns the kind of a terminal request (0x54..).
const fn terminal(request: u32) -> Option<ArgumentKind> {
    Some(match request {
        0x5401 | 0x5456 => Out(TERMIOS),
        0x5402..=0x5404 | 0x5457 => In(TERMIOS),
        0x5405 => Out(TERMIO),
        0x5406..=0x5408 => In(TERMIO),
        // TIOCGPGRP, TIOCOUTQ, TIOCMGET, TIOCGSOFTCAR, FIONREAD, TIOCGETD, TIOCGSID, TIOCSERGETLSR
        0x540f | 0x5411 | 0x5415 | 0x5419 | 0x541b | 0x5424 | 0x5429 | 0x5459 => Out(4),
        // TIOCSPGRP, TIOCMBIS, TIOCMBIC, TIOCMSET, TIOCSSOFTCAR, TIOCPKT, FIONBIO, TIOCSETD,
        // FIOASYNC
        0x5410 | 0x5416..=0x5418 | 0x541a | 0x5420 | 0x5421 | 0x5423 | 0x5452 => In(4),
        // TIOCSTI
        0x5412 => In(1),
        0x5413 => Out(8),
        0x5414 => In(8),
        // TIOCLINUX: a byte holds the subcommand, and little follows it.
        0x541c => Out(16),
        0x541e => Out(72),
        0x541f => In(72),
        // TIOCGRS485, TIOCSRS485
        0x542e | 0x542f => Out(32),
        // TIOCGICOUNT
        0x545d => Out(80),
        // FIOQSIZE
        0x5460 => Out(8),
        _ => return None,
    })
}

/// Returns the kind of a console request (0x4b.. and 0x56..).
const fn console(request: u32) -> Option<ArgumentKind> {
    Some(match request {
        // KDGKBTYPE, KDGETLED
        0x4b33 | 0x4b31 => Out(1),
        // KDGETMODE, KDGKBMODE, KDGKBMETA, KDGKBLED
        0x4b3b | 0x4b44 | 0x4b62 => Out(4),
        0x4b64 => Out(1),
        // KDGKBENT, KDSKBENT, KDGKBSENT, KDSKBSENT
        0x4b46 => Out(4),
        0x4b47 => In(4),
        0x4b48 => Out(513),
        0x4b49 => In(513),
        // VT_OPENQRY, VT_GETMODE, VT_SETMODE, VT_GETSTATE
        0x5600 => Out(4),
        0x5601 => Out(8),
        0x5602 => In(8),
        0x5603 => Out(6),
        _ => return None,
    })
}

/// Returns the kind of a request on sockets and interfaces (0x89..).
const fn socket(request: u32) -> Option<ArgumentKind> {
    Some(match request {
        // FIOSETOWN, SIOCSPGRP
        0x8901 | 0x8902 => In(4),
        // FIOGETOWN, SIOCGPGRP, SIOCATMARK, SIOCOUTQNSD
        0x8903..=0x8905 | 0x894b => Out(4),
        // SIOCGSTAMP, SIOCGSTAMPNS
        0x8906 | 0x8907 => Out(16),
        // SIOCDARP, SIOCGARP, SIOCSARP, and RARP's
        0x8953 | 0x8955 | 0x8960 | 0x8962 => In(68),
        0x8954 | 0x8961 => Out(68),
        // SIOCBRADDBR, SIOCBRDELBR
        0x89a0 | 0x89a1 => In(16),
        0x8910..=0x89ff => Out(IFREQ),
        _ => return None,
    })
}

/// Returns the kind of a request on disks (0x12.., 0x03.., 0x22.., 0x53..) or loop devices
/// (0x4c..).
const fn disk(request: u32) -> Option<ArgumentKind> {
    Some(match request {
        0x125d => In(4),
        0x125e | 0x1268 | 0x1278..=0x127c => Out(4),
        // BLKSECTGET, BLKROTATIONAL
        0x1267 | 0x127e => Out(2),
        // BLKGETSIZE, BLKRAGET, BLKFRAGET
        0x1260 | 0x1263 | 0x1265 => Out(8),
        // BLKDISCARD, BLKSECDISCARD, BLKZEROOUT
        0x1277 | 0x127d | 0x127f => In(16),
        // HDIO_GETGEO, HDIO_GET_IDENTITY
        0x0301 => Out(16),
        0x030d => Out(512),
        // SG_GET_VERSION_NUM, SG_GET_TIMEOUT and other numbers; SCSI_IOCTL_GET_IDLUN
        0x2276 | 0x2282 | 0x227d | 0x2272 | 0x2275 => Out(4),
        0x2271 | 0x2275..=0x227c | 0x227e => In(4),
        0x5382 => Out(8),
        0x5386 => Out(4),
        // LOOP_SET_STATUS, GET_STATUS, SET_STATUS64, GET_STATUS64, CONFIGURE
        0x4c02 => In(168),
        0x4c03 => Out(168),
        0x4c04 => In(232),
        0x4c05 => Out(232),
        0x4c0a => In(304),
        _ => return None,
    })
}

/// Returns the kind of a request that breaks the encoding. It has a number where the encoding says
/// pointer, or another length.
const fn other(request: u32) -> Option<ArgumentKind> {
    Some(match request {
        // FIBMAP, FIGETBSZ
        1 | 2 => Out(4),
        // NS_GET_OWNER_UID
        0xb704 => Out(4),
        // FICLONE, EVIOCGRAB, PERF_EVENT_IOC_SET_BPF, numbers of KVM, flags of TUN
        0x4004_9409 | 0x4004_4590 | 0x4004_2408 => Value,
        0x4004_54c8 | 0x4004_54c9 | 0x4004_54cb | 0x4004_54cc | 0x4004_54ce | 0x4004_54d0
        | 0x4004_54cd => Value,
        // TUNSETIFF, TUNGETIFF
        0x4004_54ca | 0x8004_54d2 => Out(IFREQ),
        _ => return None,
    })
}

/// Returns the kind of a request, or `None` if no table has it.
pub const fn known(request: u32) -> Option<ArgumentKind> {
    match request >> 8 {
        0x54 => terminal(request),
        0x4b | 0x56 => console(request),
        0x89 => socket(request),
        0x12 | 0x03 | 0x22 | 0x53 | 0x4c => disk(request),
        _ => other(request),
    }
}
