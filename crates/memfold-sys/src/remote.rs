//! The remote store as the engine sees it ([`Remote`]: the seam where tests put a faulty one), and [`SocketRemote`], the
//! real one: a client of the service that speaks with the servers, over a Unix socket.
//!
//! The service lives outside of the program, in `memfold run` or wherever a user of the library starts it: a client of such
//! servers needs `std`, `malloc` and TLS, which the engine can't have. It sees sealed bytes only.
//!
//! A message is one [`Request`], its [`Entry`]s, and for [`PUT`] the bytes of all objects one behind the other. The answer is
//! one [`Answer`], and what was asked for, or a line that says what is wrong. Numbers are in the machine's byte order.
use crate::Errno;
use crate::sync::Mutex;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::time::Duration;
use rustix::fd::OwnedFd;
use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt};

/// The first message of a connection: one entry with the number of the engine.
pub const HELLO: u32 = 1;
/// Stores objects, whose numbers were never used before.
pub const PUT: u32 = 2;
/// Reads parts of objects.
pub const GET: u32 = 3;
/// Deletes objects.
pub const DELETE: u32 = 4;
/// Entries of a message, at most.
pub const ENTRIES_MAX: usize = 1024;
/// Bytes of all objects or parts of a message, at most.
pub const BYTES_MAX: usize = 4 << 20;

/// It was done.
pub const DONE: u32 = 0;
/// An object is not there.
pub const LOST: u32 = 1;
/// The servers could not be asked, or have refused.
pub const FAILED: u32 = 2;

/// The head of a message to the service.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// [`HELLO`], [`PUT`], [`GET`] or [`DELETE`].
    pub what: u32,
    /// Entries that follow.
    pub entries: u32,
}

/// One object of a message, or a part of it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The object's number.
    pub number: u64,
    /// Where the part starts, bytes.
    pub offset: u32,
    /// Its length, bytes.
    pub len: u32,
}

/// The head of an answer.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// [`DONE`], [`LOST`] or [`FAILED`].
    pub status: u32,
    /// Bytes that follow.
    pub len: u32,
}

impl Request {
    /// As it is sent.
    pub fn to_bytes(self) -> [u8; 8] {
        pair(self.what, self.entries)
    }

    /// What was sent.
    pub fn of_bytes(bytes: [u8; 8]) -> Request {
        let (what, entries) = unpair(bytes);
        Request { what, entries }
    }
}

impl Answer {
    /// As it is sent.
    pub fn to_bytes(self) -> [u8; 8] {
        pair(self.status, self.len)
    }

    /// What was sent.
    pub fn of_bytes(bytes: [u8; 8]) -> Answer {
        let (status, len) = unpair(bytes);
        Answer { status, len }
    }
}

impl Entry {
    /// Bytes of an entry.
    pub const BYTES: usize = 16;

    /// As it is sent.
    pub fn to_bytes(self) -> [u8; Entry::BYTES] {
        let mut bytes = [0; Entry::BYTES];
        bytes[..8].copy_from_slice(&self.number.to_ne_bytes());
        bytes[8..].copy_from_slice(&pair(self.offset, self.len));
        bytes
    }

    /// What was sent.
    pub fn of_bytes(bytes: [u8; Entry::BYTES]) -> Entry {
        let (number, rest) = bytes.split_at(8);
        let (offset, len) = unpair(rest.try_into().expect("8 bytes"));
        Entry { number: u64::from_ne_bytes(number.try_into().expect("8 bytes")), offset, len }
    }
}

fn pair(a: u32, b: u32) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&a.to_ne_bytes());
    bytes[4..].copy_from_slice(&b.to_ne_bytes());
    bytes
}

fn unpair(bytes: [u8; 8]) -> (u32, u32) {
    let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
    (word(0), word(4))
}

/// Why the remote store did not do something. Displays as what went wrong, without the store's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// It has answered, and an object is not there: trying again is in vain.
    pub is_lost: bool,
    /// The connection to the service has broken off: the servers were not asked, or their answer is unknown.
    pub is_cut: bool,
    /// What went wrong.
    pub why: String,
}

impl core::fmt::Display for Failure {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(&self.why)
    }
}

/// An object to be stored.
#[derive(Copy, Clone, Debug)]
pub struct Object<'a> {
    /// Its number.
    pub number: u64,
    /// Its bytes.
    pub bytes: &'a [u8],
}

/// A part of an object to be read.
#[derive(Debug)]
pub struct Fetch<'a> {
    /// The object's number.
    pub number: u64,
    /// Where the part starts in it, bytes.
    pub offset: usize,
    /// Where it goes.
    pub to: &'a mut [u8],
}

/// Where the cold end of the swap device goes.
///
/// What an implementation must keep: `Ok` of a put means that a later get gives these bytes, until they are deleted. Nothing
/// is believed all the same: who reads verifies. It need not survive the process. Objects and parts are at most
/// [`ENTRIES_MAX`] and [`BYTES_MAX`] a call.
pub trait Remote: Send + Sync {
    /// Stores objects whose numbers were never used before.
    ///
    /// # Errors
    /// Any of them may be stored then or not: their numbers are to be deleted and not used again.
    fn put(&self, objects: &[Object<'_>]) -> Result<(), Failure>;

    /// Reads parts of objects. Tries again for as long as the settings allow.
    ///
    /// # Errors
    /// What was to be read into holds any bytes then.
    fn get(&self, fetches: &mut [Fetch<'_>]) -> Result<(), Failure>;

    /// Deletes objects, whether or not they are there.
    ///
    /// # Errors
    /// Any of them may be left.
    fn delete(&self, numbers: &[u64]) -> Result<(), Failure>;

    /// What to call the store in messages.
    fn name(&self) -> &str;
}

/// Connections that reads use; another one is for what moves objects out.
const READERS: usize = 3;
/// The service answers in time; this much later it is given up.
const GRACE: Duration = Duration::from_secs(10);

/// A client of the service.
pub struct SocketRemote {
    path: String,
    name: String,
    engine: u64,
    patience: Duration,
    mover: Mutex<Option<OwnedFd>>,
    readers: [Mutex<Option<OwnedFd>>; READERS],
}

impl SocketRemote {
    /// A client of the service at the socket `path`, which is connected to when it is needed. `name` is for messages;
    /// the service tries a read again for `timeout`.
    ///
    /// # Errors
    /// The kernel gives no random bytes.
    pub fn new(path: &str, name: &str, timeout: Duration) -> Result<SocketRemote, Errno> {
        let mut engine = [0; 8];
        crate::swapfile::random(&mut engine)?;
        Ok(SocketRemote {
            path: path.to_string(),
            name: name.to_string(),
            engine: u64::from_ne_bytes(engine),
            patience: timeout + GRACE,
            mover: Mutex::new(None),
            readers: [const { Mutex::new(None) }; READERS],
        })
    }

    fn connect(&self) -> Result<OwnedFd, Failure> {
        let open = || {
            let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
            sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(self.patience))?;
            sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(self.patience))?;
            net::connect(&socket, &SocketAddrUnix::new(self.path.as_str())?)?;
            Ok(socket)
        };
        let socket = open().map_err(|e| self.gone(e))?;
        let hello = Entry { number: self.engine, offset: 0, len: 0 };
        self.exchange(&socket, HELLO, &[hello], &[], |_| Ok(()))?;
        Ok(socket)
    }

    fn gone(&self, e: Errno) -> Failure {
        let why = format!("the service of memfold run at {} does not answer: {e}", self.path);
        Failure { is_lost: false, is_cut: true, why }
    }

    /// Sends one message on the connection of `line`, which is made if there is none, and reads the answer.
    fn ask(
        &self,
        line: &mut Option<OwnedFd>,
        what: u32,
        entries: &[Entry],
        bytes: &[&[u8]],
        mut receive: impl FnMut(&OwnedFd) -> Result<(), Errno>,
    ) -> Result<(), Failure> {
        if line.is_none() {
            *line = Some(self.connect()?);
        }
        let socket = line.as_ref().expect("made above");
        let result = self.exchange(socket, what, entries, bytes, &mut receive);
        if result.as_ref().is_err_and(|failure| failure.is_cut) {
            // What comes on it now would be taken for another answer.
            *line = None;
        }
        result
    }

    fn exchange(
        &self,
        socket: &OwnedFd,
        what: u32,
        entries: &[Entry],
        bytes: &[&[u8]],
        mut receive: impl FnMut(&OwnedFd) -> Result<(), Errno>,
    ) -> Result<(), Failure> {
        debug_assert!(entries.len() <= ENTRIES_MAX);
        let mut head = Vec::with_capacity(8 + entries.len() * Entry::BYTES);
        head.extend_from_slice(&Request { what, entries: entries.len() as u32 }.to_bytes());
        entries.iter().for_each(|e| head.extend_from_slice(&e.to_bytes()));
        send(socket, &head).map_err(|e| self.gone(e))?;
        bytes.iter().try_for_each(|b| send(socket, b)).map_err(|e| self.gone(e))?;
        let mut answer = [0; 8];
        read(socket, &mut answer).map_err(|e| self.gone(e))?;
        let answer = Answer::of_bytes(answer);
        if answer.status == DONE {
            let asked: usize = if what == GET { entries.iter().map(|e| e.len as usize).sum() } else { 0 };
            if answer.len as usize != asked {
                return Err(self.gone(Errno::PROTO));
            }
            return receive(socket).map_err(|e| self.gone(e));
        }
        let mut why = alloc::vec![0; answer.len.min(1 << 16) as usize];
        read(socket, &mut why).map_err(|e| self.gone(e))?;
        Err(Failure { is_lost: answer.status == LOST, is_cut: false, why: String::from_utf8_lossy(&why).to_string() })
    }
}

impl Remote for SocketRemote {
    fn put(&self, objects: &[Object<'_>]) -> Result<(), Failure> {
        let entry = |o: &Object<'_>| Entry { number: o.number, offset: 0, len: o.bytes.len() as u32 };
        let entries: Vec<Entry> = objects.iter().map(entry).collect();
        let bytes: Vec<&[u8]> = objects.iter().map(|o| o.bytes).collect();
        self.ask(&mut self.mover.lock(), PUT, &entries, &bytes, |_| Ok(()))
    }

    fn get(&self, fetches: &mut [Fetch<'_>]) -> Result<(), Failure> {
        let free = self.readers.iter().find_map(|line| line.try_lock());
        let mut line = free.unwrap_or_else(|| self.readers[0].lock());
        let entry = |f: &Fetch<'_>| Entry { number: f.number, offset: f.offset as u32, len: f.to.len() as u32 };
        let entries: Vec<Entry> = fetches.iter().map(entry).collect();
        let mut ask = || {
            self.ask(&mut line, GET, &entries, &[], |socket| fetches.iter_mut().try_for_each(|f| read(socket, f.to)))
        };
        match ask() {
            // A connection that has broken off says nothing about the servers.
            Err(failure) if failure.is_cut => ask(),
            other => other,
        }
    }

    fn delete(&self, numbers: &[u64]) -> Result<(), Failure> {
        let entries: Vec<Entry> = numbers.iter().map(|&number| Entry { number, offset: 0, len: 0 }).collect();
        self.ask(&mut self.mover.lock(), DELETE, &entries, &[], |_| Ok(()))
    }

    fn name(&self) -> &str {
        &self.name
    }
}

fn send(socket: &OwnedFd, mut bytes: &[u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match net::send(socket, bytes, SendFlags::NOSIGNAL) {
            Ok(n) => bytes = &bytes[n..],
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn read(socket: &OwnedFd, mut bytes: &mut [u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match net::recv(socket, &mut *bytes, RecvFlags::empty()) {
            Ok((0, _)) => return Err(Errno::CONNRESET),
            Ok((n, _)) => bytes = &mut bytes[n..],
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_as_they_were() {
        let request = Request { what: GET, entries: 7 };
        assert_eq!(Request::of_bytes(request.to_bytes()), request);
        let entry = Entry { number: u64::MAX - 5, offset: 4096, len: 65536 };
        assert_eq!(Entry::of_bytes(entry.to_bytes()), entry);
        let answer = Answer { status: LOST, len: 20 };
        assert_eq!(Answer::of_bytes(answer.to_bytes()), answer);
    }

    #[test]
    fn without_a_service_the_message_names_the_socket() {
        let remote = SocketRemote::new("/nowhere/at.all", "redis://x", Duration::from_secs(1)).unwrap();
        let failure = remote.get(&mut [Fetch { number: 1, offset: 0, to: &mut [0; 16] }]).unwrap_err();
        assert!(!failure.is_lost && failure.why.contains("/nowhere/at.all"), "{failure}");
    }
}
