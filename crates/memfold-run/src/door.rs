//! How a process gets at the shared memory of its run where it doesn't see the process that made
//! it: in another PID namespace, or as another user.
//!
//! Who made it has a socket with a name of its own (not a file: an abstract one). A process sends
//! the first half of a key that only processes of the run have; the answer is the second half, the
//! process's number as it is outside, and the descriptors: of the table of the process's user, and
//! of the bounds of the run. One message each, so nobody can keep the other end busy.
use core::fmt;
use core::time::Duration;
use memfold_os::Errno;
use memfold_os::raw::receive_with_files;
use rustix::fd::OwnedFd;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, sendto, socket_with,
};

/// Half of a key, bytes.
pub const HALF: usize = 16;
/// The length of an answer: half a key, and a number.
pub const ANSWER_BYTES: usize = HALF + 4;
/// The other end may be stopped: so long it is waited for.
const PATIENCE: Duration = Duration::from_secs(5);

/// What opens a door.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct DoorKey {
    /// What is sent to it.
    pub ask: [u8; HALF],
    /// What comes back.
    pub answer: [u8; HALF],
}

impl DoorKey {
    /// From 64 hexadecimal digits.
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

/// 64 hexadecimal digits.
impl fmt::Display for DoorKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.ask.iter().chain(&self.answer).try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// What is had at a door.
pub struct DoorAnswer {
    /// The table of the caller's user.
    pub table: OwnedFd,
    /// The bounds of the run.
    pub bounds: OwnedFd,
    /// The number of this process as the other end sees it; 0 if it doesn't.
    pub number: u32,
}

/// Asks at the door `name`.
///
/// # Errors
/// ECONNREFUSED: there is nobody; EAGAIN: no answer in time; EPROTO: it is somebody else, or has
/// nothing for this user.
pub fn ask(name: &[u8], key: &DoorKey) -> Result<DoorAnswer, Errno> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // Without a name of its own it could not be answered: the kernel chooses one.
    bind(&socket, &SocketAddrUnix::new_unnamed())?;
    set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE))?;
    set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
    sendto(&socket, &key.ask, SendFlags::NOSIGNAL, &SocketAddrUnix::new_abstract_name(name)?)?;
    let mut answer = [0; ANSWER_BYTES];
    match receive_with_files(&socket, &mut answer)? {
        (ANSWER_BYTES, [Some(table), Some(bounds)]) if answer[..HALF] == key.answer => {
            let number = [answer[HALF], answer[HALF + 1], answer[HALF + 2], answer[HALF + 3]];
            Ok(DoorAnswer { table, bounds, number: u32::from_ne_bytes(number) })
        }
        _ => Err(Errno::PROTO),
    }
}
