//! The remote store as the engine sees it ([`Remote`], which tests replace with a faulty one), and
//! the messages to the service that talks to the servers. [`crate::remote::socket`] is the real
//! one: a client of the service.
//!
//! The service runs outside of the program, in a process of `memfold run`, or in one that a user of
//! the library starts. A client of such servers needs `std`, `malloc` and TLS, which the engine
//! can't have. The service gets sealed bytes only.
//!
//! A message is one [`RequestHead`], its [`RequestEntry`]s, and for [`PUT`] the bytes of all
//! objects, consecutively. The answer is one [`AnswerHead`], followed by the requested bytes, or by
//! a line with the error. A connection may have several requests in progress. Their answers come in
//! any order and have the requests' numbers. A connection begins with [`HELLO`], which has no
//! answer. Numbers are in the machine's byte order.
//!
//! Objects belong to an engine, and are dropped when its process has ended. A child of fork is
//! another engine, which reads its ancestors' objects too. So the parent lends them before the copy
//! is made ([`LEND`]).
pub mod socket;

use alloc::string::String;
use core::time::Duration;
use memfold_os::memory::descendant_watch::DescendantWatch;
use memfold_os::thread::delegate_queue::Delegated;

/// The first message of a connection: one entry with its engine. It has no answer.
pub const HELLO: u32 = 1;
/// Stores objects of the connection's engine, whose numbers were never used before.
pub const PUT: u32 = 2;
/// Reads parts of objects of any engine of the run.
pub const GET: u32 = 3;
/// Deletes objects of the connection's engine.
pub const DELETE: u32 = 4;
/// Asks whether the objects are kept from expiring.
pub const KEEP: u32 = 5;
/// Keeps the objects of the connection's engine as long as a [`DescendantWatch`] isn't over. The
/// watch's descriptor is sent with the first byte.
pub const LEND: u32 = 6;
/// Entries of a message, at most.
pub const ENTRIES_MAX: usize = 1024;
/// Bytes of all objects or parts of a message, at most.
pub const BYTES_MAX: usize = 4 << 20;

/// The request succeeded.
pub const DONE: u32 = 0;
/// An object is missing.
pub const LOST: u32 = 1;
/// The servers could not be reached, or have refused.
pub const FAILED: u32 = 2;

/// The head of a message to the service.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct RequestHead {
    /// [`HELLO`], [`PUT`], [`GET`], [`DELETE`], [`KEEP`] or [`LEND`].
    pub what: u32,
    /// Its number, which the answer repeats.
    pub id: u32,
    /// Entries that follow.
    pub entries: u32,
}

/// One object of a message, or a part of it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct RequestEntry {
    /// The engine whose object it is.
    pub engine: u64,
    /// The object's number.
    pub number: u64,
    /// Start of the part, bytes.
    pub offset: u32,
    /// The part's length, bytes.
    pub len: u32,
}

/// The head of an answer.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct AnswerHead {
    /// [`DONE`], [`LOST`] or [`FAILED`].
    pub status: u32,
    /// The number of the request.
    pub id: u32,
    /// Bytes that follow.
    pub len: u32,
}

impl RequestHead {
    /// Bytes of the head.
    pub const BYTES: usize = 12;

    /// Returns the bytes that are sent.
    pub fn to_bytes(self) -> [u8; RequestHead::BYTES] {
        triple([self.what, self.id, self.entries])
    }

    /// Returns the head of the bytes that were sent.
    pub fn of_bytes(bytes: [u8; RequestHead::BYTES]) -> RequestHead {
        let [what, id, entries] = untriple(bytes);
        RequestHead { what, id, entries }
    }
}

impl AnswerHead {
    /// Bytes of the head.
    pub const BYTES: usize = 12;

    /// Returns the bytes that are sent.
    pub fn to_bytes(self) -> [u8; AnswerHead::BYTES] {
        triple([self.status, self.id, self.len])
    }

    /// Returns the head of the bytes that were sent.
    pub fn of_bytes(bytes: [u8; AnswerHead::BYTES]) -> AnswerHead {
        let [status, id, len] = untriple(bytes);
        AnswerHead { status, id, len }
    }
}

impl RequestEntry {
    /// Bytes of an entry.
    pub const BYTES: usize = 24;

    /// Returns the bytes that are sent.
    pub fn to_bytes(self) -> [u8; RequestEntry::BYTES] {
        let mut bytes = [0; RequestEntry::BYTES];
        bytes[..8].copy_from_slice(&self.engine.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.number.to_ne_bytes());
        bytes[16..20].copy_from_slice(&self.offset.to_ne_bytes());
        bytes[20..].copy_from_slice(&self.len.to_ne_bytes());
        bytes
    }

    /// Returns the entry of the bytes that were sent.
    pub fn of_bytes(bytes: [u8; RequestEntry::BYTES]) -> RequestEntry {
        let long = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let (offset, len) = (word(&bytes[16..20]), word(&bytes[20..]));
        RequestEntry { engine: long(0), number: long(8), offset, len }
    }
}

fn triple(words: [u32; 3]) -> [u8; 12] {
    let mut bytes = [0; 12];
    bytes
        .chunks_exact_mut(4)
        .zip(words)
        .for_each(|(to, word)| to.copy_from_slice(&word.to_ne_bytes()));
    bytes
}

fn untriple(bytes: [u8; 12]) -> [u32; 3] {
    [word(&bytes[..4]), word(&bytes[4..8]), word(&bytes[8..])]
}

fn word(bytes: &[u8]) -> u32 {
    u32::from_ne_bytes(bytes.try_into().expect("4 bytes"))
}

/// The error of a request. Displays as the cause, without the store's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteError {
    /// The store has answered that an object is missing. Trying again is useless.
    pub is_lost: bool,
    /// The connection to the service has broken off. The servers were not reached, or their answer
    /// is unknown.
    pub is_cut: bool,
    /// The cause.
    pub why: String,
}

impl core::fmt::Display for RemoteError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(&self.why)
    }
}

/// An object to be stored.
#[derive(Copy, Clone, Debug)]
pub struct StoredObject<'a> {
    /// Its number.
    pub number: u64,
    /// Its bytes.
    pub bytes: &'a [u8],
}

/// A part of an object to be read.
#[derive(Debug)]
pub struct ObjectFetch<'a> {
    /// The generation of the object: this process's at 0, its parent's at 1, and so on.
    pub forks: usize,
    /// The object's number.
    pub number: u64,
    /// Start of the part in the object, bytes.
    pub offset: usize,
    /// The destination.
    pub to: &'a mut [u8],
}

/// The store for the cold end of the swap device.
///
/// Condition for an implementation: `Ok` of a put means that a later get gives these bytes, until
/// they are deleted. The caller verifies them all the same. Data need not survive the process. A
/// call has at most [`ENTRIES_MAX`] objects or parts, and [`BYTES_MAX`] bytes.
pub trait Remote: Send + Sync {
    /// Stores objects whose numbers were never used before.
    ///
    /// # Errors
    /// The store's error. Any of the objects may be stored then. The caller deletes their numbers,
    /// and never uses them again.
    fn put(&self, objects: &[StoredObject<'_>]) -> Result<(), RemoteError>;

    /// Reads parts of objects. Tries again for as long as the settings allow.
    ///
    /// # Errors
    /// The store's error. The destinations hold any bytes then.
    fn get(&self, fetches: &mut [ObjectFetch<'_>]) -> Result<(), RemoteError>;

    /// Deletes objects, whether or not they exist.
    ///
    /// # Errors
    /// The store's error. Any of the objects may remain then.
    fn delete(&self, numbers: &[u64]) -> Result<(), RemoteError>;

    /// Asks whether the objects are kept from expiring. It is called now and then while there are
    /// any. Waits for `patience` at most.
    ///
    /// # Errors
    /// The objects are not kept, and the service has reported that to the user. If `is_cut`, there
    /// is no answer instead.
    fn keep(&self, patience: Duration) -> Result<(), RemoteError>;

    /// Keeps this process's objects for copies of it that the watch sees, also after its end.
    /// Called while the watch isn't over, by a thread that has its descriptor.
    ///
    /// # Errors
    /// The store's error. The objects may be gone once the process has ended.
    fn lend(&self, copies: &DescendantWatch) -> Result<(), RemoteError>;

    /// Returns the store's name for messages.
    fn name(&self) -> &str;
}

impl<R: Remote + ?Sized> Remote for Delegated<R> {
    fn put(&self, objects: &[StoredObject<'_>]) -> Result<(), RemoteError> {
        self.with(|remote| remote.put(objects))
    }

    fn get(&self, fetches: &mut [ObjectFetch<'_>]) -> Result<(), RemoteError> {
        self.with(|remote| remote.get(fetches))
    }

    fn delete(&self, numbers: &[u64]) -> Result<(), RemoteError> {
        self.with(|remote| remote.delete(numbers))
    }

    fn keep(&self, patience: Duration) -> Result<(), RemoteError> {
        self.with(|remote| remote.keep(patience))
    }

    fn lend(&self, copies: &DescendantWatch) -> Result<(), RemoteError> {
        self.with(|remote| remote.lend(copies))
    }

    fn name(&self) -> &str {
        self.itself().name()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_as_they_were() {
        let request = RequestHead { what: GET, id: u32::MAX - 1, entries: 7 };
        assert_eq!(RequestHead::of_bytes(request.to_bytes()), request);
        let entry =
            RequestEntry { engine: 9 << 40, number: u64::MAX - 5, offset: 4096, len: 65536 };
        assert_eq!(RequestEntry::of_bytes(entry.to_bytes()), entry);
        let answer = AnswerHead { status: LOST, id: 77, len: 20 };
        assert_eq!(AnswerHead::of_bytes(answer.to_bytes()), answer);
    }
}
