//! How a process gets the shared memory of its run if it cannot see the process that made it: the
//! process is in another PID namespace, or belongs to another user.
//!
//! `memfold run` listens on a socket with an abstract name, not a file. A process sends the first
//! half of a key that only processes of the run have, and one end of a pair of sockets. The answer
//! comes at the other end, so no other process can answer. It holds the second half of the key, the
//! number of the process outside its PID namespace, and two descriptors: the table of the process's
//! user, and the bounds of the run. Each side sends one message, so no process can keep the other
//! side busy.
//!
//! A name belongs to a network namespace. A process that is about to enter another one connects a
//! socket first, which it keeps and passes on to programs that it executes.
use core::ffi::c_int;
use core::fmt;
use core::mem::MaybeUninit;
use core::time::Duration;
use memfold_os::Errno;
use memfold_os::raw::receive_with_files;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::IoSlice;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, sendmsg, sendmsg_addr, socket_with, socketpair,
};

/// Length of half a key, in bytes.
pub const HALF: usize = 16;
/// Length of an answer in bytes: half a key and a process number.
pub const ANSWER_BYTES: usize = HALF + 4;
/// How long a send and a receive wait each. The other side may be stopped.
const PATIENCE: Duration = Duration::from_secs(5);

/// The key that opens a door.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct DoorKey {
    /// The half that is sent.
    pub ask: [u8; HALF],
    /// The half that the answer must hold.
    pub answer: [u8; HALF],
}

impl DoorKey {
    /// Parses a key of 64 hexadecimal digits. Returns `None` for any other text.
    pub fn parse(text: &str) -> Option<DoorKey> {
        let digits = text.as_bytes();
        if digits.len() != 4 * HALF {
            return None;
        }
        let mut bytes = [0; 2 * HALF];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |c: u8| (c as char).to_digit(16);
            *byte = (digit(pair[0])? * 16 + digit(pair[1])?) as u8;
        }
        let (ask, answer) = bytes.split_at(HALF);
        Some(DoorKey { ask: ask.try_into().ok()?, answer: answer.try_into().ok()? })
    }
}

/// Writes the key as 64 hexadecimal digits.
impl fmt::Display for DoorKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.ask.iter().chain(&self.answer).try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The answer at a door.
pub struct DoorAnswer {
    /// The table of the caller's user.
    pub table: OwnedFd,
    /// The bounds of the run.
    pub bounds: OwnedFd,
    /// The number of this process as the other side sees it; 0 if the other side does not see it.
    pub number: u32,
}

/// The address of a door.
#[derive(Copy, Clone)]
pub enum DoorAddress<'a> {
    /// Its name, in the network namespace of `memfold run`.
    Name(&'a [u8]),
    /// A socket that is connected to it.
    Socket(BorrowedFd<'a>),
}

fn new_socket() -> Result<OwnedFd, Errno> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE))?;
    Ok(socket)
}

/// Returns a socket that is connected to the door `name`.
///
/// # Errors
/// ECONNREFUSED: no process listens there.
pub fn connect(name: &[u8]) -> Result<OwnedFd, Errno> {
    let socket = new_socket()?;
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
    Ok(socket)
}

/// Returns the descriptor with this number if it is a socket that is connected to the door `name`.
pub fn connected(number: c_int, name: &[u8]) -> Option<BorrowedFd<'static>> {
    if number < 0 {
        return None;
    }
    // SAFETY: no number of a descriptor is negative. If the descriptor isn't open, or is another
    // file, the call below tells. The gate prevents the program from closing the run's socket.
    let socket = unsafe { BorrowedFd::borrow_raw(number) };
    let peer = SocketAddrUnix::try_from(rustix::net::getpeername(socket).ok()??).ok()?;
    (peer.abstract_name() == Some(name)).then_some(socket)
}

/// Asks at a door for the table and the bounds.
///
/// # Errors
/// - ECONNREFUSED: no process listens there.
/// - EAGAIN: no answer came in time.
/// - EPROTO: there is no table for this user, or `memfold run` ended.
pub fn ask(address: DoorAddress<'_>, key: &DoorKey) -> Result<DoorAnswer, Errno> {
    let (own, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&own, Timeout::Recv, Some(PATIENCE))?;
    let files = [theirs.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&files));
    let parts = [IoSlice::new(&key.ask)];
    match address {
        DoorAddress::Name(name) => {
            let name = SocketAddrUnix::new_abstract_name(name)?;
            sendmsg_addr(new_socket()?, &name, &parts, &mut control, SendFlags::NOSIGNAL)?;
        }
        DoorAddress::Socket(socket) => {
            sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL)?;
        }
    }
    // The end of `memfold run` ends the wait too.
    drop(theirs);
    let mut answer = [0; ANSWER_BYTES];
    match receive_with_files(&own, &mut answer)? {
        (ANSWER_BYTES, [Some(table), Some(bounds)]) if answer[..HALF] == key.answer => {
            let number = [answer[HALF], answer[HALF + 1], answer[HALF + 2], answer[HALF + 3]];
            Ok(DoorAnswer { table, bounds, number: u32::from_ne_bytes(number) })
        }
        _ => Err(Errno::PROTO),
    }
}
