use super::*;
use crate::keeper::BadAddress;
use std::cell::RefCell;

const EIO: isize = -5;
const EINTR: isize = -4;

fn read_own(at: usize, to: &mut [u8]) -> Result<(), BadAddress> {
    // SAFETY: the tests pass addresses of their own buffers, which live while the call is made.
    to.copy_from_slice(unsafe { core::slice::from_raw_parts(at as *const u8, to.len()) });
    Ok(())
}

fn no_memory(_: usize, _: &mut [u8]) -> Result<(), BadAddress> {
    Err(BadAddress)
}

/// Returns the parts of a vector that a piece names.
fn parts_of(at: usize, count: usize) -> Vec<[usize; 2]> {
    (0..count).map(|n| part_at(at, n, &read_own).unwrap()).collect()
}

/// A model of a file that gives or takes `room` bytes, and then ends or fails.
#[derive(Clone)]
struct FileModel {
    at: usize,
    room: usize,
    /// The result when there is no room left.
    then: isize,
    /// The number of bytes after which a signal is pending. Then only a call that ignores signals
    /// is made.
    signal: Option<usize>,
    log: Vec<(usize, usize)>,
}

impl FileModel {
    /// Makes a call like the kernel: a signal ends no call on a file that has begun.
    fn call(&mut self, parts: &[[usize; 2]], at: usize) -> isize {
        let addresses = parts.iter().flat_map(|[start, len]| *start..start + len);
        let places: Vec<_> = addresses.zip(at..self.room.max(at)).collect();
        if places.is_empty() {
            return self.then;
        }
        self.log.extend(&places);
        places.len() as isize
    }

    /// Makes one call at the file's offset.
    fn whole(&mut self, parts: &[[usize; 2]]) -> isize {
        if self.signal == Some(0) {
            return CALLED_OFF;
        }
        let result = self.call(parts, self.at);
        self.at += result.max(0) as usize;
        result
    }

    /// Makes a piece of a call at the file's offset. A pending signal stops it unless `must` is
    /// true.
    fn piece(&mut self, parts: &[[usize; 2]], must: bool) -> isize {
        let signal = self.signal.take_if(|_| must);
        let result = self.whole(parts);
        self.signal = self.signal.or(signal);
        result
    }

    fn seek(&mut self, by: isize) -> isize {
        self.at = (self.at as isize + by) as usize;
        self.at as isize
    }
}

/// Tries all totals, vectors, pieces, ends, failures and signals of a small file. Each must give
/// the same result, the same bytes at the same places, and the same offset afterwards.
#[test]
fn file_in_pieces_is_as_by_one_call() {
    let vectors: &[&[[usize; 2]]] = &[
        &[[1000, 8]],
        &[[1000, 1], [2000, 7]],
        &[[1000, 0], [2000, 3], [3000, 0], [4000, 5], [5000, 0]],
        &[[1000, 1]; 20],
    ];
    for parts in vectors {
        for piece in 1..9 {
            for room in 0..24 {
                for error in [0, EIO] {
                    for signal in [None, Some(0), Some(1), Some(4)] {
                        let one = FileModel { at: 2, room, then: error, signal, log: Vec::new() };
                        compare(parts, piece, TransferKind::File, one.clone());
                        compare(parts, piece, TransferKind::Append, one);
                    }
                }
            }
        }
    }
}

fn compare(parts: &[[usize; 2]], piece: usize, kind: TransferKind, mut one: FileModel) {
    let many = RefCell::new(one.clone());
    let whole = one.whole(parts);
    let total = parts.iter().map(|part| part[1]).sum();
    let buffers = CallBuffers::Vector(parts.as_ptr() as usize, parts.len());
    let args = [3, parts.as_ptr() as usize, parts.len(), 0, 0, 0];
    let writes = kind == TransferKind::Append;
    let nr = if writes { libc::SYS_writev } else { libc::SYS_readv } as usize;
    let (flags, sender) = (0, SenderMemory::default());
    let pieces = CallPieces { nr, args, buffers, writes, total, piece, kind, flags, sender };
    let mut done_count = 0;
    let ask = &mut |nr: usize, args: &[usize; 6]| {
        assert!(!writes, "a write moves the offset itself");
        assert_eq!((nr as i64, args[2]), (libc::SYS_lseek, libc::SEEK_CUR as usize));
        many.borrow_mut().seek(args[1] as isize)
    };
    let result = pieces.run(&read_own, ask, &mut |piece| {
        let mut model = many.borrow_mut();
        if model.signal.is_some_and(|at| at <= done_count) && !piece.must {
            return CALLED_OFF;
        }
        let [_, at, count, offset, ..] = piece.args;
        let parts = parts_of(at, count);
        let mut count = 0;
        piece.names(&mut |span| {
            count += span.len;
            assert_eq!(span.write, !writes);
        });
        assert_eq!(count, parts.iter().map(|part| part[1]).sum::<usize>());
        let result = match writes {
            true => {
                assert_eq!(piece.nr, nr);
                model.piece(&parts, piece.must)
            }
            false => model.call(&parts, offset),
        };
        done_count += result.max(0) as usize;
        result
    });
    assert_eq!(result, Some(whole), "{parts:?}, pieces of {piece}");
    let many = many.into_inner();
    assert_eq!((many.at, &many.log), (one.at, &one.log), "{parts:?}, pieces of {piece}");
}

#[test]
fn parts_are_cut_at_unit_borders() {
    let vector = [[1 << 20, 100], [2 << 20, 3 * UNIT], [3 << 20, 5]];
    let buffers = CallBuffers::Vector(vector.as_ptr() as usize, vector.len());
    let (mut count, mut values) = (0, Vec::new());
    while count < 3 * UNIT + 105 {
        let parts = PieceParts::of(buffers, count, 2 * UNIT, &read_own).unwrap();
        count += parts.bytes;
        values.push(parts.parts[..parts.count].to_vec());
    }
    let start = 2 << 20;
    assert_eq!(
        values,
        [vec![[1 << 20, 100], [start, UNIT]], vec![[start + UNIT, 2 * UNIT]], vec![[3 << 20, 5]]]
    );
}

/// Makes a call on a stream in pieces, with the answers that the socket or pipe gives.
fn stream(
    kind: TransferKind,
    nr: i64,
    says: &[isize],
    data: &[bool],
) -> (isize, Vec<(i64, usize, usize)>) {
    let results = RefCell::new(Vec::new());
    let args = [3, 1000, 10, 0, 0, 0];
    let buffers = CallBuffers::One(1000);
    let writes = matches!(kind, TransferKind::Pour | TransferKind::Send);
    let (nr, total, piece) = (nr as usize, 10, 4);
    let (flags, sender) = (0, SenderMemory::default());
    let pieces = CallPieces { nr, args, buffers, writes, total, piece, kind, flags, sender };
    let (mut says, mut data) = (says.iter(), data.iter());
    let ask = &mut |nr: usize, args: &[usize; 6]| {
        assert_eq!((nr as i64, args[2]), (libc::SYS_poll, 0), "it waits for nothing");
        let Some(true) = data.next() else { return 0 };
        // SAFETY: the caller passes the address of its own `pollfd`, as `poll` requires.
        unsafe { (*(args[0] as *mut libc::pollfd)).revents = libc::POLLIN };
        1
    };
    let result = pieces.run(&no_memory, ask, &mut |piece| {
        let flags = match piece.nr as i64 {
            libc::SYS_preadv2 => piece.args[5],
            libc::SYS_sendmsg | libc::SYS_recvmsg => piece.args[2],
            _ => 0,
        };
        let mut first = None;
        piece.names(&mut |span| first = first.or(Some(span.start)));
        results.borrow_mut().push((piece.nr as i64, first.unwrap(), flags));
        *says.next().unwrap()
    });
    (result.unwrap(), results.into_inner())
}

#[test]
fn stream_waits_and_signals_with_its_first_piece_only() {
    let (send, receive) = (libc::SYS_sendmsg, libc::SYS_recvmsg);
    let quiet = libc::MSG_NOSIGNAL as usize;
    let (result, calls) = stream(TransferKind::Send, 1, &[4, 4, 2], &[]);
    assert_eq!(result, 10);
    assert_eq!(calls, [(1, 1000, 0), (send, 1004, quiet), (send, 1008, quiet)]);
    assert_eq!(stream(TransferKind::Send, 1, &[4, CALLED_OFF], &[]).0, 4);
    assert_eq!(stream(TransferKind::Send, 1, &[CALLED_OFF], &[]).0, CALLED_OFF);
    assert_eq!(stream(TransferKind::Pour, 1, &[4, 1], &[]).0, 5);
    let now = libc::MSG_DONTWAIT as usize;
    let (result, calls) = stream(TransferKind::Receive, 0, &[4, 4], &[true, false]);
    assert_eq!(result, 8);
    assert_eq!(calls, [(0, 1000, 0), (receive, 1004, now)]);
    let (result, calls) = stream(TransferKind::Drain, 0, &[4, -11], &[]);
    assert_eq!(result, 4);
    let now = libc::RWF_NOWAIT as usize;
    assert_eq!(calls, [(0, 1000, 0), (libc::SYS_preadv2, 1004, now)]);
    assert_eq!(stream(TransferKind::Drain, 0, &[EINTR], &[]).0, EINTR);
    let (result, calls) = stream(TransferKind::Interface, 0, &[4, 4], &[true, false]);
    assert_eq!((result, calls), (8, vec![(0, 1000, 0), (0, 1004, 0)]));
    // A full piece of events may be followed by others, which the next call reads.
    assert_eq!(stream(TransferKind::Event, 0, &[4], &[]), (4, vec![(0, 1000, 0)]));
}

fn real(nr: usize, args: &[usize; 6]) -> isize {
    // SAFETY: the call only asks about descriptors, and writes only to the caller's memory.
    unsafe { memfold_os::raw::system_call(nr as i64, *args) }
        .map_or_else(|e| -(e.raw_os_error() as isize), |v| v as isize)
}

fn kind_of(nr: i64, fd: i32, flags: i32) -> Option<TransferKind> {
    let args = [fd as usize, 1 << 20, 1 << 20, flags as usize, 0, 0];
    in_pieces(nr as usize, &args, || UNIT, || true, &no_memory, &mut real).map(|p| p.kind)
}

#[test]
fn kind_of_descriptor_decides_on_pieces() {
    use std::os::fd::{AsRawFd, FromRawFd};
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
    let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let master = std::fs::OpenOptions::new().read(true).write(true).open("/dev/ptmx").unwrap();
    // SAFETY: both calls make a new descriptor, and take no address.
    let [event, epoll] = unsafe { [libc::eventfd(0, 0), libc::epoll_create1(0)] }
        // SAFETY: the descriptors are new, so nothing else owns them.
        .map(|fd| unsafe { std::os::fd::OwnedFd::from_raw_fd(fd) });
    let speaks = std::fs::OpenOptions::new().write(true).open("/proc/self/comm").unwrap();
    // SAFETY: the call makes a new descriptor of a file in memory, and reads only its constant
    // name.
    let memory =
        unsafe { std::os::fd::OwnedFd::from_raw_fd(libc::memfd_create(c"pieces".as_ptr(), 0)) };
    let (patient, _other) = UnixStream::pair().unwrap();
    let (least, option) = (1000i32, libc::SO_RCVLOWAT as usize);
    let at = &raw const least as usize;
    let args = [patient.as_raw_fd() as usize, libc::SOL_SOCKET as usize, option, at, 4, 0];
    assert_eq!(real(libc::SYS_setsockopt as usize, &args), 0);
    let (read_nr, write) = (libc::SYS_read, libc::SYS_write);
    let (pread, receive, send) = (libc::SYS_pread64, libc::SYS_recvfrom, libc::SYS_sendto);
    for (nr, fd, flags, expected) in [
        (read_nr, file.as_raw_fd(), 0, Some(TransferKind::File)),
        (pread, file.as_raw_fd(), 7, Some(TransferKind::At(7))),
        (pread, file.as_raw_fd(), -7, Some(TransferKind::At(-7isize as usize))),
        (write, file.as_raw_fd(), 0, Some(TransferKind::Append)),
        (libc::SYS_pwrite64, file.as_raw_fd(), 9, Some(TransferKind::At(9))),
        (write, memory.as_raw_fd(), 0, Some(TransferKind::Append)),
        (write, speaks.as_raw_fd(), 0, None),
        (libc::SYS_pwrite64, speaks.as_raw_fd(), 0, None),
        (receive, patient.as_raw_fd(), 0, None),
        (send, patient.as_raw_fd(), 0, Some(TransferKind::Send)),
        (write, log.as_raw_fd(), 0, None),
        (read_nr, stream.as_raw_fd(), 0, Some(TransferKind::Receive)),
        (write, stream.as_raw_fd(), 0, Some(TransferKind::Send)),
        (receive, tcp.as_raw_fd(), 0, Some(TransferKind::Receive)),
        (receive, tcp.as_raw_fd(), libc::MSG_WAITALL, None),
        (receive, tcp.as_raw_fd(), libc::MSG_PEEK, None),
        (send, tcp.as_raw_fd(), libc::MSG_NOSIGNAL, Some(TransferKind::Send)),
        (send, file.as_raw_fd(), 0, None),
        (pread, stream.as_raw_fd(), 0, None),
        (read_nr, datagram.as_raw_fd(), 0, None),
        (write, datagram.as_raw_fd(), 0, None),
        (read_nr, reader.as_raw_fd(), 0, Some(TransferKind::Drain)),
        (write, writer.as_raw_fd(), 0, Some(TransferKind::Pour)),
        (read_nr, proc.as_raw_fd(), 0, Some(TransferKind::Interface)),
        (pread, proc.as_raw_fd(), 7, Some(TransferKind::At(7))),
        (read_nr, event.as_raw_fd(), 0, Some(TransferKind::Event)),
        (write, event.as_raw_fd(), 0, None),
        (read_nr, epoll.as_raw_fd(), 0, None),
        (read_nr, udp.as_raw_fd(), 0, Some(TransferKind::Event)),
        (receive, udp.as_raw_fd(), libc::MSG_DONTWAIT, Some(TransferKind::Event)),
        (receive, udp.as_raw_fd(), libc::MSG_PEEK, None),
        (send, udp.as_raw_fd(), 0, None),
        (read_nr, device.as_raw_fd(), 0, None),
        (read_nr, master.as_raw_fd(), 0, Some(TransferKind::Event)),
        (write, master.as_raw_fd(), 0, None),
        (read_nr, -1, 0, None),
        (libc::SYS_readv, file.as_raw_fd(), 0, None),
    ] {
        assert_eq!(kind_of(nr, fd, flags), expected, "call {nr}, descriptor {fd}, flags {flags}");
    }
}

#[test]
fn first_piece_alone_names_the_memory_for_the_sender() {
    use std::os::fd::AsRawFd;
    let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let (stream, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let spans_of = |fd: usize, len: i32, says: isize| {
        let at = &raw const len as usize;
        let args = [fd, 1 << 20, 4 * UNIT, 0, 5000, at];
        let nr = libc::SYS_recvfrom as usize;
        let pieces = in_pieces(nr, &args, || UNIT, || true, &read_own, &mut real)?;
        let mut spans = Vec::new();
        pieces.run(&read_own, &mut |_, _| 0, &mut |piece| {
            piece.names(&mut |span| spans.push((span.start, span.len, span.write)));
            assert_eq!(piece.args[4..], args[4..]);
            says
        });
        assert_eq!(spans.pop(), Some((at, 4, true)));
        Some(spans)
    };
    let (udp, stream) = (udp.as_raw_fd() as usize, stream.as_raw_fd() as usize);
    let buffer = (1 << 20, UNIT, true);
    assert_eq!(spans_of(udp, 16, 9), Some(vec![buffer, (5000, 16, true)]));
    assert_eq!(spans_of(udp, 0, 9), Some(vec![buffer]));
    assert_eq!(spans_of(udp, i32::MAX, 9), Some(vec![buffer, (5000, 128, true)]));
    assert_eq!(spans_of(udp, -1, 9), None, "the kernel refuses it");
    assert_eq!(spans_of(stream, 16, UNIT as isize), Some(vec![buffer, (5000, 16, true)]));
}

#[test]
fn small_and_senseless_counts_are_left_as_they_are() {
    for (start, count) in [(1 << 20, UNIT), (1 << 20, usize::MAX), (1 << 46, 1 << 47)] {
        let args = [0, start, count, 0, 0, 0];
        let ask = &mut |_: usize, _: &[usize; 6]| panic!("nothing is asked");
        assert!(in_pieces(0, &args, || UNIT, || true, &no_memory, ask).is_none());
        let vector = [[start, count]];
        let args = [0, vector.as_ptr() as usize, 1, 0, 0, 0];
        let ask = &mut |_: usize, _: &[usize; 6]| panic!("nothing is asked");
        let nr = libc::SYS_readv as usize;
        assert!(in_pieces(nr, &args, || UNIT, || true, &read_own, ask).is_none());
    }
}
