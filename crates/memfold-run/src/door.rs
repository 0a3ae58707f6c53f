//! How a process gets the shared memory of its run if it cannot see the process that made it: the
//! process is in another PID namespace, or belongs to another user.
//!
//! `memfold run` listens on a socket with an abstract name, not a file. A process sends the first
//! half of a key that only processes of the run have. The answer holds the second half, the number
//! of the process outside its PID namespace, and two descriptors: the table of the process's user,
//! and the bounds of the run. Each side sends one message, so no process can keep the other side
//! busy.
use core::fmt;
use core::time::Duration;
use memfold_os::Errno;
use memfold_os::raw::receive_with_files;
use rustix::fd::OwnedFd;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, sendto, socket_with,
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

/// Asks at the door `name` for the table and the bounds.
///
/// # Errors
/// - ECONNREFUSED: no process listens there.
/// - EAGAIN: no answer came in time.
/// - EPROTO: another program answered, or there is no table for this user.
pub fn ask(name: &[u8], key: &DoorKey) -> Result<DoorAnswer, Errno> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // The answer needs an address, so the kernel chooses a name for this socket.
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
