//! A remote store in memory, with faults on purpose.
//!
//! Faults that the system must survive, without losing a byte or returning a wrong one:
//! - [`RemoteTrouble::Away`]: nothing done, no answer;
//! - [`RemoteTrouble::Silent`]: a put or delete that was done, and whose answer was lost;
//! - [`RemoteTrouble::Half`]: only some of the objects of a call;
//! - being away for any time ([`MemoryRemote::set_away`]);
//! - [`MemoryRemote::lose`], [`MemoryRemote::damage`], [`MemoryRemote::exchange`]: objects that are
//!   gone or not what was put: found, never believed.
use memfold_os::memory::descendant_watch::DescendantWatch;
use memfold_os::sync::Mutex;
use memfold_swap::remote::{
    BYTES_MAX, ENTRIES_MAX, ObjectFetch, Remote, RemoteError, StoredObject,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// A kind of request.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// To store.
    Put,
    /// To read.
    Get,
    /// To delete.
    Delete,
    /// To keep for a copy of the process.
    Lend,
}

/// A fault.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum RemoteTrouble {
    /// Nothing is done.
    Away,
    /// Everything is done, and the answer is lost.
    Silent,
    /// The first half is done.
    Half,
}

/// A store in memory. Clones share it.
#[derive(Clone, Default)]
pub struct MemoryRemote {
    inner: Arc<Mutex<RemoteState>>,
}

#[derive(Default)]
struct RemoteState {
    /// Objects by number, and by the process that put them; the first process is 0.
    objects: BTreeMap<(usize, u64), Vec<u8>>,
    used: BTreeSet<(usize, u64)>,
    /// The process that makes requests.
    process: usize,
    script: Vec<(Ask, u64, RemoteTrouble)>,
    away: bool,
    silent: bool,
    asked: u64,
}

impl MemoryRemote {
    /// Gives the `nth` request of a kind from now (1: the next) a fault.
    pub fn strike(&self, ask: Ask, nth: u64, trouble: RemoteTrouble) {
        self.inner.lock().script.push((ask, nth, trouble));
    }

    /// Makes all requests fail from now on, or none.
    pub fn set_away(&self, away: bool) {
        self.inner.lock().away = away;
    }

    /// Makes the requests come from a child of the present process from now on.
    pub fn begin_in_child(&self) {
        self.inner.lock().process += 1;
    }

    /// Makes the question whether objects are kept go unanswered.
    pub fn set_silent(&self, silent: bool) {
        self.inner.lock().silent = silent;
    }

    /// Forgets all objects.
    pub fn lose(&self) {
        self.inner.lock().objects.clear();
    }

    /// Flips a bit of each page of each object.
    pub fn damage(&self) {
        for bytes in self.inner.lock().objects.values_mut() {
            bytes.iter_mut().step_by(4096).for_each(|b| *b ^= 4);
        }
    }

    /// Gives each object the bytes of another one of the same length, where there is one.
    pub fn exchange(&self) {
        let mut inner = self.inner.lock();
        let numbers: Vec<_> = inner.objects.keys().copied().collect();
        for pair in numbers.chunks_exact(2) {
            let (a, b) = (inner.objects[&pair[0]].clone(), inner.objects[&pair[1]].clone());
            if a.len() == b.len() {
                inner.objects.insert(pair[0], b);
                inner.objects.insert(pair[1], a);
            }
        }
    }

    /// Returns the number of objects.
    pub fn objects(&self) -> usize {
        self.inner.lock().objects.len()
    }

    /// Returns the bytes of all objects.
    pub fn bytes(&self) -> usize {
        self.inner.lock().objects.values().map(Vec::len).sum()
    }

    /// Returns whether the bytes occur in any object.
    pub fn holds(&self, bytes: &[u8]) -> bool {
        self.inner.lock().objects.values().any(|o| o.windows(bytes.len()).any(|w| w == bytes))
    }

    /// Returns the requests so far.
    pub fn asked(&self) -> u64 {
        self.inner.lock().asked
    }
}

impl RemoteState {
    /// How many of `count` to do, and whether to say that all went well.
    fn due(&mut self, ask: Ask, count: usize) -> (usize, Result<(), RemoteError>) {
        self.asked += 1;
        assert!(count <= ENTRIES_MAX, "{count} entries in one request");
        let mut first_trouble = self.away.then_some(RemoteTrouble::Away);
        for (_, nth, trouble) in self.script.iter_mut().filter(|s| s.0 == ask && s.1 > 0) {
            *nth -= 1;
            first_trouble = if *nth == 0 { Some(*trouble) } else { first_trouble };
        }
        let failure = RemoteError { is_lost: false, is_cut: false, why: "on purpose".to_string() };
        match first_trouble {
            None => (count, Ok(())),
            Some(RemoteTrouble::Away) => (0, Err(failure)),
            Some(RemoteTrouble::Silent) => (count, Err(failure)),
            Some(RemoteTrouble::Half) => (count / 2, Err(failure)),
        }
    }
}

impl Remote for MemoryRemote {
    fn put(&self, objects: &[StoredObject<'_>]) -> Result<(), RemoteError> {
        let mut inner = self.inner.lock();
        let (count, result) = inner.due(Ask::Put, objects.len());
        assert!(objects.iter().map(|o| o.bytes.len()).sum::<usize>() <= BYTES_MAX);
        let process = inner.process;
        for object in objects {
            assert!(
                inner.used.insert((process, object.number)),
                "number {} is used again",
                object.number
            );
        }
        for object in &objects[..count] {
            inner.objects.insert((process, object.number), object.bytes.to_vec());
        }
        result
    }

    fn get(&self, fetches: &mut [ObjectFetch<'_>]) -> Result<(), RemoteError> {
        let mut inner = self.inner.lock();
        let (count, result) = inner.due(Ask::Get, fetches.len());
        for fetch in &mut fetches[..count] {
            let part = inner
                .objects
                .get(&(inner.process - fetch.forks, fetch.number))
                .and_then(|o| o.get(fetch.offset..fetch.offset + fetch.to.len()));
            let loss = || RemoteError {
                is_lost: true,
                is_cut: false,
                why: format!("object {} is not there", fetch.number),
            };
            let part = part.ok_or_else(loss)?;
            fetch.to.copy_from_slice(part);
        }
        result
    }

    fn delete(&self, numbers: &[u64]) -> Result<(), RemoteError> {
        let mut inner = self.inner.lock();
        let (count, result) = inner.due(Ask::Delete, numbers.len());
        for number in &numbers[..count] {
            let of = (inner.process, *number);
            inner.objects.remove(&of);
        }
        result
    }

    fn keep(&self, _patience: Duration) -> Result<(), RemoteError> {
        match self.inner.lock().silent {
            true => {
                Err(RemoteError { is_lost: false, is_cut: true, why: "nobody answers".to_string() })
            }
            false => Ok(()),
        }
    }

    fn lend(&self, _copies: &DescendantWatch) -> Result<(), RemoteError> {
        let mut inner = self.inner.lock();
        inner.due(Ask::Lend, 1).1
    }

    fn name(&self) -> &str {
        "memory-remote"
    }
}
