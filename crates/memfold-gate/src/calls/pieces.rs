//! Calls on large buffers, made in pieces, so that only a piece of the buffer need be present.
//!
//! `read`, `write`, `pread64` and `pwrite64` on regular files, block devices, pipes and stream
//! sockets: there the kernel's own semantics allow a short count, or a loop gives the same result.
//! The rest is made whole: datagrams, terminals and other devices (a call is a message), files
//! whose size is 0 (those of /proc and the like may give a message a call too), appended writes
//! (another's could come between), writes under a limit of file sizes (a piece past it would raise
//! SIGXFSZ after all that was wanted is written), and vectors.
//!
//! What differs from one call: two threads that read or write large parts of one file at its shared
//! offset at once may interleave by pieces; a send timeout counts for each piece; a socket's error
//! in a later piece is taken by this call, which says only how much it has sent.
use crate::calls::naming::BYTES_MAX;

/// A piece's bytes are a multiple of this: direct I/O wants aligned ones, and packets of a pipe end
/// at such places.
const UNIT: usize = 64 << 10;

const ERRORS_MAX: isize = 4095;

/// A system call: number, arguments, result.
pub type Make<'a> = &'a mut dyn FnMut(usize, &[usize; 6]) -> isize;

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Kind {
    /// A loop to the end, or until a piece is short.
    Loop,
    /// A loop, whose later pieces must raise no SIGPIPE: one call that has sent something doesn't.
    Socket,
    /// One piece is enough: who reads a stream must expect less than was asked for.
    Once,
}

/// How a call is made in pieces.
#[derive(Copy, Clone, Debug)]
pub struct Pieces {
    nr: usize,
    args: [usize; 6],
    total: usize,
    piece: usize,
    kind: Kind,
}

/// Whether a call should be made in pieces of about `most` bytes. `ask` makes calls on memory of
/// the caller's stack, to learn what the descriptor is. For most calls: two comparisons.
pub fn in_pieces(nr: usize, args: &[usize; 6], most: usize, ask: Make) -> Option<Pieces> {
    let writes = match nr as i64 {
        libc::SYS_read | libc::SYS_pread64 => false,
        libc::SYS_write | libc::SYS_pwrite64 => true,
        _ => return None,
    };
    // A negative count is an error, and so is one that reaches past the program's addresses: the
    // kernel looks at all of it first.
    let total = args[2].min(BYTES_MAX);
    let piece = (most & !(UNIT - 1)).max(UNIT);
    if total <= piece || args[1].checked_add(args[2]).is_none_or(|end| end >> 47 != 0) {
        return None;
    }
    let kind = kind(nr, args[0], writes, ask)?;
    Some(Pieces { nr, args: *args, total, piece, kind })
}

fn kind(nr: usize, fd: usize, writes: bool, ask: Make) -> Option<Kind> {
    // st_mode is at byte 24, st_size at byte 48.
    let mut about = [0u64; 18];
    if ask(libc::SYS_fstat as usize, &[fd, &raw mut about as usize, 0, 0, 0, 0]) < 0 {
        return None;
    }
    let (mode, size) = (about[3] as u32, about[6]);
    let positioned = matches!(nr as i64, libc::SYS_pread64 | libc::SYS_pwrite64);
    let stream = |output| Some(if writes { output } else { Kind::Once });
    match mode & libc::S_IFMT {
        libc::S_IFREG | libc::S_IFBLK if writes => {
            (!appends(fd, ask) && !is_limited(ask)).then_some(Kind::Loop)
        }
        libc::S_IFREG => (size > 0).then_some(Kind::Loop),
        libc::S_IFBLK => Some(Kind::Loop),
        _ if positioned => None,
        libc::S_IFIFO => stream(Kind::Loop),
        libc::S_IFSOCK if is_stream(fd, ask) => stream(Kind::Socket),
        _ => None,
    }
}

fn appends(fd: usize, ask: Make) -> bool {
    let flags = ask(libc::SYS_fcntl as usize, &[fd, libc::F_GETFL as usize, 0, 0, 0, 0]);
    flags < 0 || flags as i32 & libc::O_APPEND != 0
}

fn is_limited(ask: Make) -> bool {
    let mut limit = [0u64; 2];
    let args = [0, libc::RLIMIT_FSIZE as usize, 0, &raw mut limit as usize, 0, 0];
    ask(libc::SYS_prlimit64 as usize, &args) < 0 || limit[0] != u64::MAX
}

fn is_stream(fd: usize, ask: Make) -> bool {
    let mut option = |name: i32| {
        let (mut value, mut len) = (0i32, 4u32);
        let (value_at, len_at) = (&raw mut value as usize, &raw mut len as usize);
        let args = [fd, libc::SOL_SOCKET as usize, name as usize, value_at, len_at, 0];
        (ask(libc::SYS_getsockopt as usize, &args) >= 0).then_some(value)
    };
    option(libc::SO_TYPE) == Some(libc::SOCK_STREAM)
        && matches!(option(libc::SO_DOMAIN), Some(libc::AF_UNIX | libc::AF_INET | libc::AF_INET6))
        && matches!(option(libc::SO_PROTOCOL), Some(0 | libc::IPPROTO_TCP | libc::IPPROTO_MPTCP))
}

impl Pieces {
    /// Makes the call by `make`, which holds what each piece names, and returns what one call
    /// would.
    pub fn run(&self, make: Make) -> isize {
        let mut done = 0;
        while done < self.total {
            let bytes = (self.total - done).min(self.piece);
            let (nr, args) = self.part(done, bytes);
            let ret = make(nr, &args);
            if (-ERRORS_MAX..0).contains(&ret) {
                // What has been done counts more than why it went no further.
                return if done > 0 { done as isize } else { ret };
            }
            done += ret as usize;
            if (ret as usize) < bytes || self.kind == Kind::Once {
                break;
            }
        }
        done as isize
    }

    fn part(&self, done: usize, bytes: usize) -> (usize, [usize; 6]) {
        let [fd, start, _, offset, ..] = self.args;
        if self.kind == Kind::Socket && done > 0 {
            let quiet = libc::MSG_NOSIGNAL as usize;
            return (libc::SYS_sendto as usize, [fd, start + done, bytes, quiet, 0, 0]);
        }
        // Only calls with an offset look at the fourth argument.
        (self.nr, [fd, start + done, bytes, offset.wrapping_add(done), 0, 0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    const EIO: isize = -5;

    /// A file or stream that gives or takes `room` bytes, and then ends or fails.
    #[derive(Clone)]
    struct Model {
        at: usize,
        room: usize,
        /// What it says where there is no room left.
        then: isize,
        /// So much is moved at most in one call that is interrupted, once.
        interrupted: Option<usize>,
        log: Vec<(usize, usize)>,
    }

    impl Model {
        fn call(&mut self, buffer: usize, len: usize, offset: Option<usize>) -> isize {
            let at = offset.unwrap_or(self.at);
            let mut n = len.min(self.room.saturating_sub(at));
            if let Some(most) = self.interrupted
                && at + n > most
            {
                n = most.saturating_sub(at);
                self.interrupted = None;
                if n == 0 {
                    return -4;
                }
            }
            if n == 0 {
                return self.then;
            }
            self.log.extend((0..n).map(|i| (buffer + i, at + i)));
            if offset.is_none() {
                self.at += n;
            }
            n as isize
        }
    }

    /// All totals, pieces, ends, failures and interruptions of a small file: the same result, the
    /// same bytes at the same places, the same offset afterwards.
    #[test]
    fn a_loop_of_pieces_gives_what_one_call_gives() {
        for (nr, positioned) in [(libc::SYS_read, false), (libc::SYS_pread64, true)] {
            for total in 1..9 {
                for piece in 1..9 {
                    for room in 0..12 {
                        for then in [0, EIO] {
                            for interrupted in [None, Some(0), Some(2), Some(5)] {
                                let one = Model { at: 0, room, then, interrupted, log: Vec::new() };
                                compare(nr as usize, positioned, total, piece, one);
                            }
                        }
                    }
                }
            }
        }
    }

    fn compare(nr: usize, positioned: bool, total: usize, piece: usize, mut one: Model) {
        let mut many = one.clone();
        let offset = |at: usize| positioned.then_some(at);
        let whole = one.call(1000, total, offset(1));
        let args = [3, 1000, total, 1, 0, 0];
        let pieces = Pieces { nr, args, total, piece, kind: Kind::Loop };
        let ret = pieces.run(&mut |made, a| {
            assert_eq!((made, a[0]), (nr, 3));
            assert!(a[2] <= piece);
            many.call(a[1], a[2], offset(a[3]))
        });
        assert_eq!(ret, whole, "total {total}, piece {piece}");
        assert_eq!((many.at, &many.log), (one.at, &one.log));
    }

    #[test]
    fn a_stream_is_read_once_and_later_pieces_sent_raise_no_signal() {
        let args = [3, 1000, 10, 0, 0, 0];
        let made = RefCell::new(Vec::new());
        let mut make = |nr: usize, a: &[usize; 6]| {
            made.borrow_mut().push((nr as i64, a[1], a[2], a[3]));
            a[2] as isize
        };
        let pieces = Pieces { nr: 0, args, total: 10, piece: 4, kind: Kind::Once };
        assert_eq!(pieces.run(&mut make), 4);
        let pieces = Pieces { nr: 1, kind: Kind::Socket, ..pieces };
        assert_eq!(pieces.run(&mut make), 10);
        let quiet = libc::MSG_NOSIGNAL as usize;
        let send = libc::SYS_sendto;
        assert_eq!(
            made.into_inner(),
            [(0, 1000, 4, 0), (1, 1000, 4, 0), (send, 1004, 4, quiet), (send, 1008, 2, quiet)]
        );
    }

    fn real(nr: usize, args: &[usize; 6]) -> isize {
        // SAFETY: only asks what descriptors are, into the caller's memory.
        unsafe { memfold_sys::raw::system_call(nr as i64, *args) }
            .map_or_else(|e| -(e.raw_os_error() as isize), |v| v as isize)
    }

    fn kind_of(nr: i64, fd: i32) -> Option<Kind> {
        let args = [fd as usize, 1 << 20, 1 << 20, 0, 0, 0];
        in_pieces(nr as usize, &args, UNIT, &mut real).map(|p| p.kind)
    }

    #[test]
    fn what_a_descriptor_is_decides() {
        use std::os::fd::AsRawFd;
        use std::os::unix::net::{UnixDatagram, UnixStream};
        let path = std::env::temp_dir().join(format!("memfold-gate-pieces-{}", std::process::id()));
        std::fs::write(&path, b"some").unwrap();
        let file = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let log = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let (stream, _other) = UnixStream::pair().unwrap();
        let (datagram, _end) = UnixDatagram::pair().unwrap();
        let (reader, writer) = std::io::pipe().unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let proc = std::fs::File::open("/proc/self/maps").unwrap();
        let device = std::fs::File::open("/dev/zero").unwrap();
        let (read, write) = (libc::SYS_read, libc::SYS_write);
        for (nr, fd, expected) in [
            (read, file.as_raw_fd(), Some(Kind::Loop)),
            (libc::SYS_pread64, file.as_raw_fd(), Some(Kind::Loop)),
            (write, file.as_raw_fd(), Some(Kind::Loop)),
            (write, log.as_raw_fd(), None),
            (read, stream.as_raw_fd(), Some(Kind::Once)),
            (write, stream.as_raw_fd(), Some(Kind::Socket)),
            (read, tcp.as_raw_fd(), Some(Kind::Once)),
            (write, tcp.as_raw_fd(), Some(Kind::Socket)),
            (libc::SYS_pread64, stream.as_raw_fd(), None),
            (read, datagram.as_raw_fd(), None),
            (write, datagram.as_raw_fd(), None),
            (read, reader.as_raw_fd(), Some(Kind::Once)),
            (write, writer.as_raw_fd(), Some(Kind::Loop)),
            (read, proc.as_raw_fd(), None),
            (read, device.as_raw_fd(), None),
            (read, -1, None),
            (libc::SYS_readv, file.as_raw_fd(), None),
        ] {
            assert_eq!(kind_of(nr, fd), expected, "call {nr}, descriptor {fd}");
        }
    }

    #[test]
    fn small_and_senseless_counts_are_left_as_they_are() {
        for (start, count) in [(1 << 20, UNIT), (1 << 20, usize::MAX), (1 << 46, 1 << 47)] {
            let args = [0, start, count, 0, 0, 0];
            assert!(in_pieces(0, &args, UNIT, &mut |_, _| panic!("nothing is asked")).is_none());
        }
    }
}
