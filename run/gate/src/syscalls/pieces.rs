//! Makes calls on large buffers in pieces, so that only a piece of the buffer must be resident at a
//! time.
//!
//! How each kind of call is made:
//! - **Reads and writes of regular files and block devices at a given offset**: in a loop, until a
//!   piece is short.
//! - **Reads at the file's own offset**: the offset is moved past the whole read first, and back by
//!   what was not read. So threads and processes that share the offset get separate parts, as with
//!   one call. The loop reads at given offsets.
//! - **Writes at the file's own offset**: in a loop, in which each piece moves the offset. A
//!   process that is killed meanwhile leaves the offset where it has written to, as with one call.
//! - **Writes to pipes**: in a loop. A write of more than PIPE_BUF bytes isn't atomic anyway.
//! - **Sends to stream sockets**: in a loop. Later pieces raise no SIGPIPE, as one call that has
//!   sent something raises none.
//! - **Reads from pipes and stream sockets**: the first piece is made like the call. Later ones are
//!   made only while data is there.
//! - **Reads from files of /proc and sysfs**: like these. A piece that isn't full ends the call.
//! - **Reads of events, of IP datagrams, and from terminals**: in one piece, which is longer than any
//!   datagram and any line. Other input stays for the next call. So a buffer that is far longer is not
//!   touched.
//!
//! All other calls are made whole:
//! - writes to terminals, calls on other datagrams and other devices, messages with a header, and sends
//!   to an address, because each call is a message, and may be of any length. A look at the length
//!   of the next message would not do, because another process may receive that one first;
//! - calls on other file systems without blocks, and writes to sysfs and /proc, for that reason too;
//! - calls on sockets with SO_RCVLOWAT, because the call waits for that much;
//! - appending writes, because another write could come between;
//! - writes under a limit of file sizes, because a piece past the limit would raise SIGXFSZ too
//!   late;
//! - calls with other flags (MSG_WAITALL, MSG_PEEK, RWF_*).
//!
//! A piece of a file is made even if a signal is pending, because the kernel finishes file I/O too.
//! Other calls end with what they have done. These differences from one call remain:
//! - a file system may promise that a read sees all of a write or nothing. Here that holds for each
//!   piece;
//! - two writes at once at a shared offset may alternate by pieces;
//! - a send timeout counts for each piece;
//! - a socket error that comes before a later piece is consumed. The call returns only how much it
//!   sent.
//!
//! A thread that waits for input holds at most a piece of its buffer. So the gate need not poll for
//! input first. The program could notice such a poll: the descriptor may be another file by then,
//! and no signal restarts `poll`.
use crate::call_state::CALLED_OFF;
use crate::keeper::NamedSpan;
use crate::syscalls::operands::{BYTES_MAX, ReadMemory};
use memfold_os::text::path_of;

/// The unit of pieces in bytes. A piece is a multiple of it, and parts are cut at multiples. Direct
/// I/O needs aligned parts, and packets of a pipe end there.
const UNIT: usize = 64 << 10;
/// The most parts of a vector in one piece, and in one call.
const PARTS: usize = 16;
const VECTOR_MAX: usize = 1024;

const ERRORS_MAX: isize = 4095;
/// The program's addresses have this many bits.
const TOP_SHIFT: u32 = 47;

/// One piece of a call.
pub struct CallPiece<'a> {
    /// The number of the call.
    pub nr: usize,
    /// The arguments of the call.
    pub args: [usize; 6],
    /// The program's memory that the piece names: first addresses and lengths.
    parts: &'a [[usize; 2]],
    /// The memory for the sender's address, which the kernel writes to. Empty for most calls.
    sender: SenderMemory,
    writes: bool,
    /// True if the piece is made even if a signal is pending.
    pub must: bool,
}

impl CallPiece<'_> {
    /// Calls `each` with the ranges of the program's memory that the piece names.
    pub fn names(&self, each: &mut dyn FnMut(NamedSpan)) {
        let spans =
            self.parts.iter().filter_map(|[start, len]| NamedSpan::new(*start, *len, !self.writes));
        spans.for_each(&mut *each);
        let SenderMemory { address, bytes, len } = self.sender;
        let of_sender = [NamedSpan::new(address, bytes, true), NamedSpan::new(len, 4, true)];
        of_sender.into_iter().flatten().filter(|_| address != 0).for_each(each);
    }
}

/// Where `recvfrom` stores the sender's address. All are 0 if it doesn't.
#[derive(Copy, Clone, Debug, Default)]
struct SenderMemory {
    address: usize,
    /// The most bytes of it.
    bytes: usize,
    /// The address of its length.
    len: usize,
}

impl SenderMemory {
    /// Returns the memory that a call of `recvfrom` names. Returns `None` if its length can't be read,
    /// or if the kernel refuses it.
    fn of(args: &[usize; 6], read: ReadMemory) -> Option<SenderMemory> {
        const ADDRESS_MAX: usize = size_of::<libc::sockaddr_storage>();
        let [.., address, len] = *args;
        let mut bytes = [0; 4];
        if address == 0 {
            return Some(SenderMemory::default());
        }
        read(len, &mut bytes).ok()?;
        let bytes = usize::try_from(i32::from_ne_bytes(bytes)).ok()?.min(ADDRESS_MAX);
        Some(SenderMemory { address, bytes, len })
    }
}

/// A function that makes a system call with a number and arguments, and returns the result. The
/// memory that the call names is on the caller's stack.
pub type AskKernel<'a> = &'a mut dyn FnMut(usize, &[usize; 6]) -> isize;

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum TransferKind {
    /// Transfers at given offsets, from this one on.
    At(usize),
    /// Reads at the file's own offset.
    File,
    /// Writes at the file's own offset, which each piece moves.
    Append,
    /// Writes to a pipe.
    Pour,
    /// Writes to a socket.
    Send,
    /// Reads from a pipe.
    Drain,
    /// Reads from a socket.
    Receive,
    /// Reads from a file of /proc or sysfs, which moves its own offset.
    Interface,
    /// Reads events or a datagram.
    Event,
}

/// The buffers of the program that a call names.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum CallBuffers {
    /// The address of a buffer.
    One(usize),
    /// The address of an array of iovec, and the number of its entries.
    Vector(usize, usize),
}

/// A call that is made in pieces.
#[derive(Copy, Clone, Debug)]
pub struct CallPieces {
    nr: usize,
    args: [usize; 6],
    buffers: CallBuffers,
    writes: bool,
    total: usize,
    piece: usize,
    kind: TransferKind,
    /// The flags of a call on a socket.
    flags: usize,
    sender: SenderMemory,
}

/// The parts of the next piece: first addresses and lengths.
#[derive(Copy, Clone)]
pub struct PieceParts {
    parts: [[usize; 2]; PARTS],
    count: usize,
    /// The number of bytes of all parts.
    pub bytes: usize,
}

/// `struct msghdr`.
#[repr(C)]
struct MessageHeader {
    name: usize,
    name_bytes: usize,
    parts: usize,
    count: usize,
    control: usize,
    control_bytes: usize,
    flags: usize,
}

/// Returns the pieces of a call that should be made in pieces of about `most` bytes, or `None` if
/// it should be made whole. `concerns` returns whether the call names memory of the keeper. `ask`
/// is used to find out the kind of file. For most calls this costs two comparisons.
pub fn in_pieces(
    nr: usize,
    args: &[usize; 6],
    most: impl FnOnce() -> usize,
    concerns: impl FnOnce() -> bool,
    read: ReadMemory,
    ask: AskKernel,
) -> Option<CallPieces> {
    let (buffers, writes) = match nr as i64 {
        libc::SYS_read | libc::SYS_pread64 | libc::SYS_recvfrom => {
            (CallBuffers::One(args[1]), false)
        }
        libc::SYS_write | libc::SYS_pwrite64 | libc::SYS_sendto => {
            (CallBuffers::One(args[1]), true)
        }
        libc::SYS_readv | libc::SYS_preadv => (CallBuffers::Vector(args[1], args[2]), false),
        libc::SYS_writev | libc::SYS_pwritev => (CallBuffers::Vector(args[1], args[2]), true),
        _ => return None,
    };
    let total = match buffers {
        CallBuffers::One(start) => checked(start, args[2])?,
        CallBuffers::Vector(at, count) => total_of(at, count, read)?,
    };
    // Smaller calls are never cut.
    if total <= UNIT {
        return None;
    }
    let piece = (most() & !(UNIT - 1)).max(UNIT);
    if total <= piece || !concerns() {
        return None;
    }
    let (kind, flags) = kind(nr, args, writes, ask)?;
    let sender = match nr as i64 {
        libc::SYS_recvfrom => SenderMemory::of(args, read)?,
        _ => SenderMemory::default(),
    };
    let is_short = matches!(kind, TransferKind::Interface | TransferKind::Event);
    let piece = if is_short { UNIT } else { piece };
    Some(CallPieces { nr, args: *args, buffers, writes, total, piece, kind, flags, sender })
}

/// Checks a buffer as the kernel does before it begins. Returns the length, or `None` if the length
/// is negative or the buffer reaches past the program's addresses.
fn checked(start: usize, bytes: usize) -> Option<usize> {
    start.checked_add(bytes).filter(|end| end >> TOP_SHIFT == 0).map(|_| bytes.min(BYTES_MAX))
}

/// Returns the number of bytes of a vector, which the kernel checks before it begins. Returns `None` if
/// it can't be read, or if the kernel refuses it.
pub fn total_of(at: usize, count: usize, read: ReadMemory) -> Option<usize> {
    let mut total = 0;
    for n in 0..count.min(VECTOR_MAX + 1) {
        let [start, bytes] = part_at(at, n, read)?;
        total += checked(start, bytes)?;
    }
    (count <= VECTOR_MAX).then_some(total.min(BYTES_MAX))
}

/// Returns the first address and the length of a part of a vector, or `None` if it can't be read.
pub fn part_at(at: usize, n: usize, read: ReadMemory) -> Option<[usize; 2]> {
    let mut bytes = [0; 16];
    read(at.wrapping_add(n * 16), &mut bytes).ok()?;
    let [start, len] =
        [0, 8].map(|at: usize| usize::from_ne_bytes(core::array::from_fn(|byte| bytes[at + byte])));
    Some([start, len])
}

/// Returns the kind of transfer, and the flags for a socket. Returns `None` if the call must be
/// made whole.
fn kind(
    nr: usize,
    args: &[usize; 6],
    writes: bool,
    ask: AskKernel,
) -> Option<(TransferKind, usize)> {
    let fd = args[0];
    // st_mode is at byte 24, st_size at byte 48.
    let mut about = [0u64; 18];
    if ask(libc::SYS_fstat as usize, &[fd, &raw mut about as usize, 0, 0, 0, 0]) < 0 {
        return None;
    }
    let (mode, size) = (about[3] as u32, about[6]);
    let is_message = matches!(nr as i64, libc::SYS_recvfrom | libc::SYS_sendto);
    let is_positioned = matches!(
        nr as i64,
        libc::SYS_pread64 | libc::SYS_pwrite64 | libc::SYS_preadv | libc::SYS_pwritev
    );
    let on_file = match writes {
        _ if is_positioned => TransferKind::At(args[3]),
        true => TransferKind::Append,
        false => TransferKind::File,
    };
    let kind = match mode & libc::S_IFMT {
        libc::S_IFSOCK if !is_positioned && is_stream(fd, ask) => {
            if writes {
                TransferKind::Send
            } else {
                // One call waits for this many bytes, and then takes all that is there.
                let waits_for = option(fd, libc::SO_RCVLOWAT, ask);
                waits_for.is_some_and(|bytes| bytes <= 1).then_some(TransferKind::Receive)?
            }
        }
        libc::S_IFSOCK if !is_positioned && !writes && is_ip_datagram(fd, ask) => {
            TransferKind::Event
        }
        _ if is_message => return None,
        libc::S_IFREG if !writes && is_interface(fd, ask) => match is_positioned {
            true => on_file,
            false => TransferKind::Interface,
        },
        libc::S_IFREG if size == 0 && !writes || !has_blocks(fd, ask) => return None,
        libc::S_IFREG | libc::S_IFBLK if writes => {
            (!appends(fd, ask) && !is_limited(ask)).then_some(on_file)?
        }
        libc::S_IFREG | libc::S_IFBLK => on_file,
        libc::S_IFIFO if !is_positioned => {
            if writes {
                TransferKind::Pour
            } else {
                TransferKind::Drain
            }
        }
        0 if !is_positioned && !writes && has_short_events(fd, ask) => TransferKind::Event,
        libc::S_IFCHR if !is_positioned && !writes && is_terminal(fd, ask) => TransferKind::Event,
        _ => return None,
    };
    let flags = if is_message { args[3] } else { 0 };
    let simple = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | libc::MSG_MORE;
    let is_simple = flags & !(simple as usize) == 0 && !(is_message && writes && args[4] != 0);
    is_simple.then_some((kind, flags))
}

fn appends(fd: usize, ask: AskKernel) -> bool {
    let flags = ask(libc::SYS_fcntl as usize, &[fd, libc::F_GETFL as usize, 0, 0, 0, 0]);
    flags < 0 || flags as i32 & libc::O_APPEND != 0
}

fn is_limited(ask: AskKernel) -> bool {
    let mut limit = [0u64; 2];
    let args = [0, libc::RLIMIT_FSIZE as usize, 0, &raw mut limit as usize, 0, 0];
    ask(libc::SYS_prlimit64 as usize, &args) < 0 || limit[0] != u64::MAX
}

/// Returns whether a file lies in a file system that stores bytes. File systems that are interfaces
/// of the kernel have no blocks.
fn has_blocks(fd: usize, ask: AskKernel) -> bool {
    // `struct statfs`: the kind is at byte 0, blocks at 16.
    let mut about = [0u64; 15];
    let result = ask(libc::SYS_fstatfs as usize, &[fd, &raw mut about as usize, 0, 0, 0, 0]);
    // These file systems report no blocks if they have no limit.
    let in_memory = [libc::TMPFS_MAGIC as u64, 0x8584_58f6];
    result >= 0 && (about[2] > 0 || in_memory.contains(&about[0]))
}

/// Returns whether a file is one of /proc or sysfs.
fn is_interface(fd: usize, ask: AskKernel) -> bool {
    let mut about = [0u64; 15];
    let result = ask(libc::SYS_fstatfs as usize, &[fd, &raw mut about as usize, 0, 0, 0, 0]);
    let interfaces = [libc::PROC_SUPER_MAGIC as u64, libc::SYSFS_MAGIC as u64];
    result >= 0 && interfaces.contains(&about[0])
}

/// Returns whether a file without a type reports events of at most [`UNIT`] bytes.
fn has_short_events(fd: usize, ask: AskKernel) -> bool {
    let (path, mut target) = (path_of(fd as i32), [0u8; 32]);
    let Ok(path) = path.as_c_str() else { return false };
    let args = [path.as_ptr() as usize, target.as_mut_ptr() as usize, target.len(), 0, 0, 0];
    let len = ask(libc::SYS_readlink as usize, &args).max(0) as usize;
    let kinds: [&[u8]; 4] = [b"[eventfd]", b"[timerfd]", b"[signalfd]", b"inotify"];
    target[..len].strip_prefix(b"anon_inode:").is_some_and(|kind| kinds.contains(&kind))
}

fn is_terminal(fd: usize, ask: AskKernel) -> bool {
    // Longer than the kernel's `struct termios`.
    let mut settings = [0u8; 256];
    let at = settings.as_mut_ptr() as usize;
    ask(libc::SYS_ioctl as usize, &[fd, libc::TCGETS as usize, at, 0, 0, 0]) >= 0
}

/// Returns the value of an option of a socket, or `None` if `fd` isn't a socket that has it.
fn option(fd: usize, name: i32, ask: AskKernel) -> Option<i32> {
    let (mut value, mut len) = (0i32, 4u32);
    let (value_at, len_at) = (&raw mut value as usize, &raw mut len as usize);
    let args = [fd, libc::SOL_SOCKET as usize, name as usize, value_at, len_at, 0];
    (ask(libc::SYS_getsockopt as usize, &args) >= 0).then_some(value)
}

fn is_stream(fd: usize, ask: AskKernel) -> bool {
    let mut option = |name: i32| option(fd, name, ask);
    option(libc::SO_TYPE) == Some(libc::SOCK_STREAM)
        && matches!(option(libc::SO_DOMAIN), Some(libc::AF_UNIX | libc::AF_INET | libc::AF_INET6))
        && matches!(option(libc::SO_PROTOCOL), Some(0 | libc::IPPROTO_TCP | libc::IPPROTO_MPTCP))
}

/// Returns whether a socket is one of IP datagrams, which are shorter than [`UNIT`].
fn is_ip_datagram(fd: usize, ask: AskKernel) -> bool {
    let mut option = |name: i32| option(fd, name, ask);
    option(libc::SO_TYPE) == Some(libc::SOCK_DGRAM)
        && matches!(option(libc::SO_DOMAIN), Some(libc::AF_INET | libc::AF_INET6))
}

/// Returns whether a file has data to read, and no error or urgent data. A read would consume the
/// error, and urgent data ends a read.
fn has_data(fd: usize, ask: AskKernel) -> bool {
    let events = libc::POLLIN | libc::POLLPRI;
    let mut entry = libc::pollfd { fd: fd as i32, events, revents: 0 };
    let at = &raw mut entry as usize;
    ask(libc::SYS_poll as usize, &[at, 1, 0, 0, 0, 0]) == 1
        && entry.revents & (libc::POLLIN | libc::POLLPRI | libc::POLLERR) == libc::POLLIN
}

impl PieceParts {
    /// Returns the parts of `buffers` from byte `done` on, with `most` bytes at most. Returns
    /// `None` if there are none or they can't be read.
    pub fn of(
        buffers: CallBuffers,
        done: usize,
        most: usize,
        read: ReadMemory,
    ) -> Option<PieceParts> {
        let mut parts = PieceParts { parts: [[0; 2]; PARTS], count: 0, bytes: 0 };
        let (at, count) = match buffers {
            CallBuffers::One(start) => {
                (parts.parts[0], parts.count, parts.bytes) = ([start + done, most], 1, most);
                return Some(parts);
            }
            CallBuffers::Vector(at, count) => (at, count),
        };
        let (mut before, mut n) = (0, 0);
        while n < count && parts.count < PARTS && parts.bytes < most {
            let [start, len] = part_at(at, n, read)?;
            let skip = done.saturating_sub(before).min(len);
            let rest = most - parts.bytes;
            let is_cut = len - skip > rest;
            let take = if is_cut { (rest / UNIT * UNIT).max(UNIT).min(rest) } else { len - skip };
            if is_cut && rest < UNIT && parts.count > 0 {
                break;
            }
            if take > 0 {
                parts.parts[parts.count] = [start + skip, take];
                parts.count += 1;
                parts.bytes += take;
            }
            if is_cut {
                break;
            }
            (before, n) = (before + len, n + 1);
        }
        Some(parts).filter(|parts| parts.count > 0)
    }

    /// Returns the parts.
    pub fn named(&self) -> &[[usize; 2]] {
        &self.parts[..self.count]
    }

    /// Cuts the parts to the first `most` bytes.
    pub fn cut(&mut self, most: usize) {
        while self.bytes > most {
            let [_, len] = &mut self.parts[self.count - 1];
            let less = (self.bytes - most).min(*len);
            *len -= less;
            self.bytes -= less;
            self.count -= (*len == 0) as usize;
        }
    }
}

impl CallPieces {
    /// Makes the call in pieces by `make`, which holds the memory that each piece names. Returns
    /// the result that one call would have, or `CALLED_OFF` if nothing was done. Returns `None` if
    /// the call must be made whole.
    pub fn run(
        &self,
        read: ReadMemory,
        ask: AskKernel,
        make: &mut dyn FnMut(&CallPiece) -> isize,
    ) -> Option<isize> {
        let TransferKind::File = self.kind else {
            return Some(self.pieces(self.kind, read, ask, make));
        };
        let fd = self.args[0];
        let mut seek = |by: isize| {
            let args = [fd, by as usize, libc::SEEK_CUR as usize, 0, 0, 0];
            ask(libc::SYS_lseek as usize, &args)
        };
        let end = seek(self.total as isize);
        if end < self.total as isize {
            return None;
        }
        let result =
            self.pieces(TransferKind::At(end as usize - self.total), read, &mut |_, _| 0, make);
        let rest = self.total - result.max(0) as usize;
        if rest > 0 {
            seek(-(rest as isize));
        }
        Some(result)
    }

    fn pieces(
        &self,
        kind: TransferKind,
        read: ReadMemory,
        ask: AskKernel,
        make: &mut dyn FnMut(&CallPiece) -> isize,
    ) -> isize {
        let mut count = 0;
        while count < self.total {
            let looks = matches!(kind, TransferKind::Receive | TransferKind::Interface);
            if count > 0 && looks && !has_data(self.args[0], ask) {
                break;
            }
            let most = (self.total - count).min(self.piece);
            let Some(parts) = PieceParts::of(self.buffers, count, most, read) else {
                return if count > 0 { count as isize } else { -(libc::EFAULT as isize) };
            };
            let result = self.one(kind, count, &parts, make);
            if result == CALLED_OFF || (-ERRORS_MAX..0).contains(&result) {
                // A call that has done something returns how much, and not the error.
                return if count > 0 { count as isize } else { result };
            }
            count += result as usize;
            if (result as usize) < parts.bytes || kind == TransferKind::Event {
                break;
            }
        }
        count as isize
    }

    /// Makes the piece that begins at byte `done`, and returns its result.
    fn one(
        &self,
        kind: TransferKind,
        done: usize,
        parts: &PieceParts,
        make: &mut dyn FnMut(&CallPiece) -> isize,
    ) -> isize {
        let fd = self.args[0];
        let parts_named = &parts.parts[..parts.count];
        let vector = parts.parts.as_ptr() as usize;
        let header = MessageHeader {
            name: 0,
            name_bytes: 0,
            parts: vector,
            count: parts.count,
            control: 0,
            control_bytes: 0,
            flags: 0,
        };
        let message = &raw const header as usize;
        let (nr, args) = match kind {
            TransferKind::At(from) => {
                let nr = if self.writes { libc::SYS_pwritev } else { libc::SYS_preadv };
                (nr, [fd, vector, parts.count, from.wrapping_add(done), 0, 0])
            }
            TransferKind::Send if done > 0 => {
                let flags = self.flags | libc::MSG_NOSIGNAL as usize;
                (libc::SYS_sendmsg, [fd, message, flags, 0, 0, 0])
            }
            TransferKind::Receive if done > 0 => {
                let flags = self.flags | libc::MSG_DONTWAIT as usize;
                (libc::SYS_recvmsg, [fd, message, flags, 0, 0, 0])
            }
            TransferKind::Drain if done > 0 => {
                let flags = libc::RWF_NOWAIT as usize;
                (libc::SYS_preadv2, [fd, vector, parts.count, usize::MAX, 0, flags])
            }
            _ => match self.buffers {
                CallBuffers::One(_) => {
                    let [[start, len], ..] = parts.parts;
                    let SenderMemory { address, len: address_len, .. } = self.sender;
                    (self.nr as i64, [fd, start, len, self.flags, address, address_len])
                }
                CallBuffers::Vector(..) => (self.nr as i64, [fd, vector, parts.count, 0, 0, 0]),
            },
        };
        let must = matches!(kind, TransferKind::At(_) | TransferKind::Append) && done > 0;
        let sender = if done == 0 { self.sender } else { SenderMemory::default() };
        make(&CallPiece {
            nr: nr as usize,
            args,
            parts: parts_named,
            sender,
            writes: self.writes,
            must,
        })
    }
}

#[cfg(test)]
mod tests;
