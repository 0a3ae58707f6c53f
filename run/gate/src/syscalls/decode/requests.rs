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

// The names are the kernel's. The libc crate has some of them, with another type.

// Requests of terminals.
const TCGETS: u32 = libc::TCGETS as u32;
const TCSETS: u32 = libc::TCSETS as u32;
const TCSETSF: u32 = libc::TCSETSF as u32;
const TCGETA: u32 = libc::TCGETA as u32;
const TCSETA: u32 = libc::TCSETA as u32;
const TCSETAF: u32 = libc::TCSETAF as u32;
const TIOCGPGRP: u32 = libc::TIOCGPGRP as u32;
const TIOCSPGRP: u32 = libc::TIOCSPGRP as u32;
const TIOCOUTQ: u32 = libc::TIOCOUTQ as u32;
const TIOCSTI: u32 = libc::TIOCSTI as u32;
const TIOCGWINSZ: u32 = libc::TIOCGWINSZ as u32;
const TIOCSWINSZ: u32 = libc::TIOCSWINSZ as u32;
const TIOCMGET: u32 = libc::TIOCMGET as u32;
const TIOCMBIS: u32 = libc::TIOCMBIS as u32;
const TIOCMSET: u32 = libc::TIOCMSET as u32;
const TIOCGSOFTCAR: u32 = libc::TIOCGSOFTCAR as u32;
const TIOCSSOFTCAR: u32 = libc::TIOCSSOFTCAR as u32;
const FIONREAD: u32 = libc::FIONREAD as u32;
const TIOCLINUX: u32 = libc::TIOCLINUX as u32;
const TIOCGSERIAL: u32 = libc::TIOCGSERIAL as u32;
const TIOCSSERIAL: u32 = libc::TIOCSSERIAL as u32;
const TIOCPKT: u32 = libc::TIOCPKT as u32;
const FIONBIO: u32 = libc::FIONBIO as u32;
const TIOCSETD: u32 = libc::TIOCSETD as u32;
const TIOCGETD: u32 = libc::TIOCGETD as u32;
const TIOCGSID: u32 = libc::TIOCGSID as u32;
const TIOCGRS485: u32 = libc::TIOCGRS485 as u32;
const TIOCSRS485: u32 = libc::TIOCSRS485 as u32;
const FIOASYNC: u32 = libc::FIOASYNC as u32;
const TIOCGLCKTRMIOS: u32 = libc::TIOCGLCKTRMIOS as u32;
const TIOCSLCKTRMIOS: u32 = libc::TIOCSLCKTRMIOS as u32;
const TIOCSERGETLSR: u32 = libc::TIOCSERGETLSR as u32;
const TIOCGICOUNT: u32 = libc::TIOCGICOUNT as u32;
const FIOQSIZE: u32 = libc::FIOQSIZE as u32;

// Requests of consoles.
const KDGETLED: u32 = 0x4b31;
const KDGKBTYPE: u32 = 0x4b33;
const KDGETMODE: u32 = 0x4b3b;
const KDGKBMODE: u32 = 0x4b44;
const KDGKBENT: u32 = 0x4b46;
const KDSKBENT: u32 = 0x4b47;
const KDGKBSENT: u32 = 0x4b48;
const KDSKBSENT: u32 = 0x4b49;
const KDGKBMETA: u32 = 0x4b62;
const KDGKBLED: u32 = 0x4b64;
const VT_OPENQRY: u32 = 0x5600;
const VT_GETMODE: u32 = 0x5601;
const VT_SETMODE: u32 = 0x5602;
const VT_GETSTATE: u32 = 0x5603;

// Requests of sockets and interfaces.
const FIOSETOWN: u32 = 0x8901;
const SIOCSPGRP: u32 = 0x8902;
const FIOGETOWN: u32 = 0x8903;
const SIOCATMARK: u32 = 0x8905;
const SIOCGSTAMP_OLD: u32 = 0x8906;
const SIOCGSTAMPNS_OLD: u32 = 0x8907;
const SIOCGIFNAME: u32 = 0x8910;
const SIOCOUTQNSD: u32 = 0x894b;
const SIOCDARP: u32 = 0x8953;
const SIOCGARP: u32 = 0x8954;
const SIOCSARP: u32 = 0x8955;
const SIOCDRARP: u32 = 0x8960;
const SIOCGRARP: u32 = 0x8961;
const SIOCSRARP: u32 = 0x8962;
// The last number of a request on sockets.
const SOCKET_LAST: u32 = 0x89ff;
const SIOCBRADDBR: u32 = 0x89a0;
const SIOCBRDELBR: u32 = 0x89a1;

// Requests of disks and loop devices.
const BLKROSET: u32 = 0x125d;
const BLKROGET: u32 = 0x125e;
const BLKGETSIZE: u32 = 0x1260;
const BLKRAGET: u32 = 0x1263;
const BLKFRAGET: u32 = 0x1265;
const BLKSECTGET: u32 = 0x1267;
const BLKSSZGET: u32 = libc::BLKSSZGET as u32;
const BLKDISCARD: u32 = 0x1277;
const BLKIOMIN: u32 = libc::BLKIOMIN as u32;
const BLKDISCARDZEROES: u32 = 0x127c;
const BLKSECDISCARD: u32 = 0x127d;
const BLKROTATIONAL: u32 = 0x127e;
const BLKZEROOUT: u32 = 0x127f;
const HDIO_GETGEO: u32 = 0x0301;
const HDIO_GET_IDENTITY: u32 = 0x030d;
const SG_SET_TIMEOUT: u32 = 0x2201;
const SG_GET_COMMAND_Q: u32 = 0x2270;
const SG_SET_COMMAND_Q: u32 = 0x2271;
const SG_GET_RESERVED_SIZE: u32 = 0x2272;
const SG_SET_RESERVED_SIZE: u32 = 0x2275;
const SG_GET_SCSI_ID: u32 = 0x2276;
const SG_SET_FORCE_LOW_DMA: u32 = 0x2279;
const SG_GET_LOW_DMA: u32 = 0x227a;
const SG_SET_FORCE_PACK_ID: u32 = 0x227b;
const SG_GET_PACK_ID: u32 = 0x227c;
const SG_GET_NUM_WAITING: u32 = 0x227d;
const SG_SET_DEBUG: u32 = 0x227e;
const SG_GET_SG_TABLESIZE: u32 = 0x227f;
const SG_GET_VERSION_NUM: u32 = 0x2282;
const SG_NEXT_CMD_LEN: u32 = 0x2283;
const SG_SET_KEEP_ORPHAN: u32 = 0x2287;
const SG_GET_KEEP_ORPHAN: u32 = 0x2288;
/// The size of the kernel's `struct sg_scsi_id`.
const SG_SCSI_ID: usize = 32;
const SCSI_IOCTL_GET_IDLUN: u32 = 0x5382;
const SCSI_IOCTL_GET_BUS_NUMBER: u32 = 0x5386;
const LOOP_SET_STATUS: u32 = 0x4c02;
const LOOP_GET_STATUS: u32 = 0x4c03;
const LOOP_SET_STATUS64: u32 = 0x4c04;
const LOOP_GET_STATUS64: u32 = 0x4c05;
const LOOP_CONFIGURE: u32 = 0x4c0a;

// Requests of files, namespaces, events and tunnels.
const FIBMAP: u32 = 1;
const FIGETBSZ: u32 = 2;
const NS_GET_OWNER_UID: u32 = libc::NS_GET_OWNER_UID as u32;
const FICLONE: u32 = libc::FICLONE as u32;
const EVIOCGRAB: u32 = 0x4004_4590;
const PERF_EVENT_IOC_SET_BPF: u32 = 0x4004_2408;
const TUNSETNOCSUM: u32 = libc::TUNSETNOCSUM as u32;
const TUNSETDEBUG: u32 = libc::TUNSETDEBUG as u32;
const TUNSETIFF: u32 = libc::TUNSETIFF as u32;
const TUNSETPERSIST: u32 = libc::TUNSETPERSIST as u32;
const TUNSETOWNER: u32 = libc::TUNSETOWNER as u32;
const TUNSETLINK: u32 = libc::TUNSETLINK as u32;
const TUNSETGROUP: u32 = libc::TUNSETGROUP as u32;
const TUNSETOFFLOAD: u32 = libc::TUNSETOFFLOAD as u32;
const TUNGETIFF: u32 = libc::TUNGETIFF as u32;

/// Returns the kind of a terminal request (0x54..).
const fn terminal(request: u32) -> Option<ArgumentKind> {
    Some(match request {
        TCGETS | TIOCGLCKTRMIOS => Out(TERMIOS),
        TCSETS..=TCSETSF | TIOCSLCKTRMIOS => In(TERMIOS),
        TCGETA => Out(TERMIO),
        TCSETA..=TCSETAF => In(TERMIO),
        TIOCGPGRP | TIOCOUTQ | TIOCMGET | TIOCGSOFTCAR | FIONREAD | TIOCGETD | TIOCGSID
        | TIOCSERGETLSR => Out(4),
        TIOCSPGRP
        | TIOCMBIS..=TIOCMSET
        | TIOCSSOFTCAR
        | TIOCPKT
        | FIONBIO
        | TIOCSETD
        | FIOASYNC => In(4),
        TIOCSTI => In(1),
        TIOCGWINSZ => Out(8),
        TIOCSWINSZ => In(8),
        // A byte holds the subcommand, and little follows it.
        TIOCLINUX => Out(16),
        TIOCGSERIAL => Out(72),
        TIOCSSERIAL => In(72),
        TIOCGRS485 | TIOCSRS485 => Out(32),
        TIOCGICOUNT => Out(80),
        FIOQSIZE => Out(8),
        _ => return None,
    })
}

/// Returns the kind of a console request (0x4b.. and 0x56..).
const fn console(request: u32) -> Option<ArgumentKind> {
    Some(match request {
        KDGKBTYPE | KDGETLED => Out(1),
        KDGETMODE | KDGKBMODE | KDGKBMETA => Out(4),
        KDGKBLED => Out(1),
        KDGKBENT => Out(4),
        KDSKBENT => In(4),
        KDGKBSENT => Out(513),
        KDSKBSENT => In(513),
        VT_OPENQRY => Out(4),
        VT_GETMODE => Out(8),
        VT_SETMODE => In(8),
        VT_GETSTATE => Out(6),
        _ => return None,
    })
}

/// Returns the kind of a request on sockets and interfaces (0x89..).
const fn socket(request: u32) -> Option<ArgumentKind> {
    Some(match request {
        FIOSETOWN | SIOCSPGRP => In(4),
        FIOGETOWN..=SIOCATMARK | SIOCOUTQNSD => Out(4),
        SIOCGSTAMP_OLD | SIOCGSTAMPNS_OLD => Out(16),
        SIOCDARP | SIOCSARP | SIOCDRARP | SIOCSRARP => In(68),
        SIOCGARP | SIOCGRARP => Out(68),
        SIOCBRADDBR | SIOCBRDELBR => In(16),
        SIOCGIFNAME..=SOCKET_LAST => Out(IFREQ),
        _ => return None,
    })
}

/// Returns the kind of a request on disks (0x12.., 0x03.., 0x22.., 0x53..) or loop devices
/// (0x4c..).
const fn disk(request: u32) -> Option<ArgumentKind> {
    Some(match request {
        BLKROSET => In(4),
        BLKROGET | BLKSSZGET | BLKIOMIN..=BLKDISCARDZEROES => Out(4),
        BLKSECTGET | BLKROTATIONAL => Out(2),
        BLKGETSIZE | BLKRAGET | BLKFRAGET => Out(8),
        BLKDISCARD | BLKSECDISCARD | BLKZEROOUT => In(16),
        HDIO_GETGEO => Out(16),
        HDIO_GET_IDENTITY => Out(512),
        SG_GET_SCSI_ID => Out(SG_SCSI_ID),
        SG_GET_COMMAND_Q | SG_GET_RESERVED_SIZE | SG_GET_LOW_DMA | SG_GET_PACK_ID
        | SG_GET_NUM_WAITING | SG_GET_SG_TABLESIZE | SG_GET_VERSION_NUM | SG_GET_KEEP_ORPHAN => {
            Out(4)
        }
        SG_SET_TIMEOUT | SG_SET_COMMAND_Q | SG_SET_RESERVED_SIZE | SG_SET_FORCE_LOW_DMA
        | SG_SET_FORCE_PACK_ID | SG_SET_DEBUG | SG_NEXT_CMD_LEN | SG_SET_KEEP_ORPHAN => In(4),
        SCSI_IOCTL_GET_IDLUN => Out(8),
        SCSI_IOCTL_GET_BUS_NUMBER => Out(4),
        LOOP_SET_STATUS => In(168),
        LOOP_GET_STATUS => Out(168),
        LOOP_SET_STATUS64 => In(232),
        LOOP_GET_STATUS64 => Out(232),
        LOOP_CONFIGURE => In(304),
        _ => return None,
    })
}

/// Returns the kind of a request that breaks the encoding. It has a number where the encoding says
/// pointer, or another length.
const fn other(request: u32) -> Option<ArgumentKind> {
    Some(match request {
        FIBMAP | FIGETBSZ => Out(4),
        NS_GET_OWNER_UID => Out(4),
        // These have a number where the encoding says pointer.
        FICLONE | EVIOCGRAB | PERF_EVENT_IOC_SET_BPF => Value,
        TUNSETNOCSUM | TUNSETDEBUG | TUNSETPERSIST | TUNSETOWNER | TUNSETGROUP | TUNSETOFFLOAD
        | TUNSETLINK => Value,
        TUNSETIFF | TUNGETIFF => Out(IFREQ),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A request that the kernel answers by writing fails on folded memory if it is taken for one
    /// that it only reads.
    #[test]
    fn requests_of_scsi_devices_are_as_the_kernels_header_names_them() {
        const HEADER: &str = "/usr/include/scsi/sg.h";
        let header = std::fs::read_to_string(HEADER).expect("libc's headers are installed");
        let mut count = 0;
        for line in header.lines() {
            let mut words = line.split_ascii_whitespace();
            let (Some("#define"), Some(name), Some(number)) =
                (words.next(), words.next(), words.next())
            else {
                continue;
            };
            let Some(Ok(request)) = number.strip_prefix("0x").map(|n| u32::from_str_radix(n, 16))
            else {
                continue;
            };
            let answers = name.starts_with("SG_GET_");
            let is_request = answers || name.starts_with("SG_SET_") || name == "SG_NEXT_CMD_LEN";
            match known(request) {
                Some(kind) if is_request => {
                    assert_eq!(matches!(kind, Out(_)), answers, "{name}");
                    count += 1;
                }
                _ => {}
            }
        }
        assert_eq!(count, 17);
    }
}
