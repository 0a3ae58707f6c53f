//! A directory on a disk that forgets, tears and fails.
//!
//! Faults that the system must survive:
//! - a power cut at any moment: of the data written since the last sync any sectors are on disk, in
//!   any order, one of them in part, or as zeros where a file grew; of the names any changes;
//! - a process that is killed: all that it wrote is there, but nothing more is on disk;
//! - any call that fails, once or from then on, without effect or with a part of it; a write that
//!   is short; a sync after whose failure what was written never reaches the disk, although the
//!   next sync says that it did.
use crate::random::Random;
use memfold_os::Errno;
use memfold_swap::disk::durable::{File, FileAccess, FileIdentity, Folder};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// Bytes that a disk usually writes as a whole.
pub const SECTOR_BYTES: usize = 512;

/// A fault.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The call fails without effect; a sync loses the data.
    Fails(Errno),
    /// A write does a part and fails the next time; a sync succeeds but fails.
    Partly(Errno),
    /// A write is short; nothing else is wrong.
    Short,
}

/// The fate of a change in a power cut.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is on disk.
    Done,
    /// It is lost.
    Lost,
    /// A half of the sector is on disk.
    Torn,
    /// The file grew, and the sector has zeros.
    Zeros,
}

/// A directory, shared by all its clones.
#[derive(Clone)]
pub struct Forgetful(Arc<Mutex<FolderState>>);

#[derive(Clone, Default)]
struct FolderState {
    inodes: Vec<Inode>,
    names: BTreeMap<Vec<u8>, usize>,
    names_on_disk: BTreeMap<Vec<u8>, usize>,
    name_changes: Vec<NameChange>,
    calls: usize,
    /// The first and last call with a fault, and the fault.
    fault: Option<(usize, usize, Fault)>,
    has_no_nameless: bool,
    /// Bytes that all files together may have.
    room: Option<usize>,
    moments: Option<Vec<(usize, FolderState)>>,
    note: usize,
}

#[derive(Clone, Default)]
struct Inode {
    bytes: Vec<u8>,
    on_disk: Vec<u8>,
    changes: Vec<Change>,
    is_locked: bool,
}

#[derive(Clone)]
enum Change {
    /// The fate of one sector.
    Write(usize, Vec<u8>),
    Len(usize),
}

#[derive(Clone)]
enum NameChange {
    Set(Vec<u8>, usize),
    Move(Vec<u8>, Vec<u8>),
    Remove(Vec<u8>),
}

impl Change {
    fn apply(&self, fate: Fate, bytes: &mut Vec<u8>) {
        let (at, new) = match self {
            Change::Len(len) if fate == Fate::Done => return bytes.resize(*len, 0),
            Change::Len(_) => return,
            Change::Write(at, new) => (*at, new),
        };
        let end = at + new.len();
        let old_len = bytes.len();
        match fate {
            Fate::Lost => {}
            Fate::Done => {
                bytes.resize(old_len.max(end), 0);
                bytes[at..end].copy_from_slice(new);
            }
            Fate::Torn => {
                bytes.resize(old_len.max(end), 0);
                bytes[at..at + new.len() / 2].copy_from_slice(&new[..new.len() / 2]);
            }
            Fate::Zeros => bytes.resize(old_len.max(end), 0),
        }
    }
}

impl NameChange {
    fn apply(&self, names: &mut BTreeMap<Vec<u8>, usize>) {
        match self {
            NameChange::Set(name, inode) => drop(names.insert(name.clone(), *inode)),
            NameChange::Move(from, to) => {
                if let Some(inode) = names.remove(from) {
                    names.insert(to.clone(), inode);
                }
            }
            NameChange::Remove(name) => drop(names.remove(name)),
        }
    }
}

impl FolderState {
    /// Counts a call, and returns its fault.
    fn call(&mut self) -> Option<Fault> {
        self.calls += 1;
        let (from, to, fault) = self.fault?;
        (from..to).contains(&(self.calls - 1)).then_some(fault)
    }

    /// Returns the fault of a call that succeeds or fails as a whole.
    fn call_whole(&mut self) -> Result<(), Errno> {
        match self.call() {
            Some(Fault::Fails(error) | Fault::Partly(error)) => Err(error),
            Some(Fault::Short) | None => Ok(()),
        }
    }

    /// Returns the bytes that can be written to a file from `at` on.
    fn room_for(&self, inode: usize, at: usize) -> usize {
        let Some(room) = self.room else { return usize::MAX };
        let sum: usize = self.inodes.iter().map(|inode| inode.bytes.len()).sum();
        room.saturating_sub(sum) + self.inodes[inode].bytes.len().saturating_sub(at)
    }

    fn keep_moment(&mut self) {
        if let Some(mut moments) = self.moments.take() {
            moments.push((self.note, self.clone()));
            self.moments = Some(moments);
        }
    }
}

impl Default for Forgetful {
    fn default() -> Forgetful {
        Forgetful::new()
    }
}

impl Forgetful {
    /// Makes an empty directory.
    pub fn new() -> Forgetful {
        Forgetful(Arc::default())
    }

    fn of(mut state: FolderState) -> Forgetful {
        state.inodes.iter_mut().for_each(|inode| inode.is_locked = false);
        (state.fault, state.moments, state.calls, state.note) = (None, None, 0, 0);
        Forgetful(Arc::new(Mutex::new(state)))
    }

    fn lock(&self) -> MutexGuard<'_, FolderState> {
        self.0.lock().expect("nobody panics with the lock")
    }

    /// Refuses files without a name (O_TMPFILE).
    pub fn refuse_nameless(&self) {
        self.lock().has_no_nameless = true;
    }

    /// Bounds the bytes of all files together: writes beyond that fail with ENOSPC.
    pub fn set_room(&self, bytes: usize) {
        self.lock().room = Some(bytes);
    }

    /// Gives the `count` calls from number `from` on a fault.
    pub fn fail(&self, from: usize, count: usize, fault: Fault) {
        self.lock().fault = Some((from, from.saturating_add(count), fault));
    }

    /// Returns the calls so far.
    pub fn calls(&self) -> usize {
        self.lock().calls
    }

    /// Returns the existing names.
    pub fn names(&self) -> usize {
        self.lock().names.len()
    }

    /// Returns the number of files ever made.
    pub fn files(&self) -> usize {
        self.lock().inodes.len()
    }

    /// Returns the bytes of the file with a name.
    pub fn bytes(&self, name: &[u8]) -> Option<usize> {
        let state = self.lock();
        state.names.get(name).map(|inode| state.inodes[*inode].bytes.len())
    }

    /// Keeps the state before each sync, with the last noted number.
    pub fn record(&self) {
        self.lock().moments = Some(Vec::new());
    }

    /// Sets the number to keep with states.
    pub fn note(&self, number: usize) {
        self.lock().note = number;
    }

    /// Returns the states before each sync, and the present one, each with its number.
    pub fn moments(&self) -> Vec<(usize, Forgetful)> {
        let mut state = self.lock();
        state.keep_moment();
        let moments = state.moments.take().unwrap_or_default();
        moments.into_iter().map(|(note, state)| (note, Forgetful::of(state))).collect()
    }

    /// Returns the changes that may not be on disk.
    pub fn unsynced(&self) -> usize {
        let state = self.lock();
        state.inodes.iter().map(|inode| inode.changes.len()).sum::<usize>()
            + state.name_changes.len()
    }

    /// Returns the state after a power cut with these fates of the changes: of files, and then of
    /// names.
    pub fn after_power_cut(&self, mut fate: impl FnMut(usize) -> Fate) -> Forgetful {
        let mut state = self.lock().clone();
        let mut number = 0;
        for inode in &mut state.inodes {
            for change in std::mem::take(&mut inode.changes) {
                change.apply(fate(number), &mut inode.on_disk);
                number += 1;
            }
            inode.bytes = inode.on_disk.clone();
        }
        for change in std::mem::take(&mut state.name_changes) {
            if fate(number) == Fate::Done {
                change.apply(&mut state.names_on_disk);
            }
            number += 1;
        }
        state.names = state.names_on_disk.clone();
        Forgetful::of(state)
    }

    /// Returns the state after a power cut with random fates.
    pub fn after_any_power_cut(&self, random: &mut Random) -> Forgetful {
        let per_mille = random.pick(&[100, 500, 900]);
        self.after_power_cut(|_| {
            if random.per_mille(per_mille) {
                Fate::Done
            } else {
                random.pick(&[Fate::Lost, Fate::Lost, Fate::Torn, Fate::Zeros])
            }
        })
    }

    /// Returns the state after the process was killed.
    pub fn after_kill(&self) -> Forgetful {
        Forgetful::of(self.lock().clone())
    }

    fn new_file(&self, state: &mut FolderState) -> Box<dyn File> {
        state.inodes.push(Inode::default());
        Box::new(Open {
            folder: self.clone(),
            inode: state.inodes.len() - 1,
            locks: Mutex::new(false),
        })
    }
}

impl Folder for Forgetful {
    fn open(&self, name: &[u8], _access: FileAccess) -> Result<Box<dyn File>, Errno> {
        let mut state = self.lock();
        state.call_whole()?;
        let inode = *state.names.get(name).ok_or(Errno::NOENT)?;
        Ok(Box::new(Open { folder: self.clone(), inode, locks: Mutex::new(false) }))
    }

    fn create(&self, name: &[u8]) -> Result<Box<dyn File>, Errno> {
        let mut state = self.lock();
        state.call_whole()?;
        if state.names.contains_key(name) {
            return Err(Errno::EXIST);
        }
        let file = self.new_file(&mut state);
        let inode = state.inodes.len() - 1;
        state.names.insert(name.to_vec(), inode);
        state.name_changes.push(NameChange::Set(name.to_vec(), inode));
        Ok(file)
    }

    fn create_nameless(&self) -> Result<Box<dyn File>, Errno> {
        let mut state = self.lock();
        state.call_whole()?;
        if state.has_no_nameless {
            return Err(Errno::OPNOTSUPP);
        }
        Ok(self.new_file(&mut state))
    }

    fn rename(&self, from: &[u8], to: &[u8]) -> Result<(), Errno> {
        let mut state = self.lock();
        state.call_whole()?;
        let inode = state.names.remove(from).ok_or(Errno::NOENT)?;
        state.names.insert(to.to_vec(), inode);
        state.name_changes.push(NameChange::Move(from.to_vec(), to.to_vec()));
        Ok(())
    }

    fn remove(&self, name: &[u8]) -> Result<(), Errno> {
        let mut state = self.lock();
        state.call_whole()?;
        state.names.remove(name).ok_or(Errno::NOENT)?;
        state.name_changes.push(NameChange::Remove(name.to_vec()));
        Ok(())
    }

    fn identity(&self, name: &[u8]) -> Result<FileIdentity, Errno> {
        let mut state = self.lock();
        state.call_whole()?;
        state.names.get(name).map(|inode| (0, *inode as u64)).ok_or(Errno::NOENT)
    }

    fn sync(&self) -> Result<(), Errno> {
        let mut state = self.lock();
        state.keep_moment();
        let fault = state.call();
        if !matches!(fault, Some(Fault::Fails(_))) {
            state.names_on_disk = state.names.clone();
            state.name_changes.clear();
        }
        match fault {
            Some(Fault::Fails(error) | Fault::Partly(error)) => Err(error),
            Some(Fault::Short) | None => Ok(()),
        }
    }
}

/// An open file.
struct Open {
    folder: Forgetful,
    inode: usize,
    locks: Mutex<bool>,
}

impl Drop for Open {
    fn drop(&mut self) {
        let mut state = self.folder.lock();
        if *self.locks.lock().expect("nobody panics with the lock") {
            state.inodes[self.inode].is_locked = false;
        }
        if !state.names.values().any(|inode| *inode == self.inode) {
            state.inodes[self.inode].bytes.clear();
        }
    }
}

impl File for Open {
    fn read(&self, at: u64, to: &mut [u8]) -> Result<usize, Errno> {
        let mut state = self.folder.lock();
        state.call_whole()?;
        let rest = state.inodes[self.inode].bytes.get(at as usize..).unwrap_or_default();
        let count = rest.len().min(to.len());
        to[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }

    fn write(&self, at: u64, from: &[u8]) -> Result<usize, Errno> {
        let mut state = self.folder.lock();
        let (at, fault) = (at as usize, state.call());
        let count = match fault {
            Some(Fault::Fails(error)) => return Err(error),
            Some(Fault::Partly(_) | Fault::Short) => from.len().div_ceil(3),
            None => from.len().min(state.room_for(self.inode, at)),
        };
        if count == 0 && !from.is_empty() {
            return Err(Errno::NOSPC);
        }
        let inode = &mut state.inodes[self.inode];
        let (mut next, end) = (at, at + count);
        while next < end {
            let stop = ((next / SECTOR_BYTES + 1) * SECTOR_BYTES).min(end);
            let change = Change::Write(next, from[next - at..stop - at].to_vec());
            change.apply(Fate::Done, &mut inode.bytes);
            inode.changes.push(change);
            next = stop;
        }
        match fault {
            Some(Fault::Partly(error)) => Err(error),
            _ => Ok(count),
        }
    }

    fn set_len(&self, len: u64) -> Result<(), Errno> {
        let mut state = self.folder.lock();
        state.call_whole()?;
        let (inode, change) = (&mut state.inodes[self.inode], Change::Len(len as usize));
        change.apply(Fate::Done, &mut inode.bytes);
        inode.changes.push(change);
        Ok(())
    }

    fn sync(&self) -> Result<(), Errno> {
        let mut state = self.folder.lock();
        state.keep_moment();
        let fault = state.call();
        let inode = &mut state.inodes[self.inode];
        // After a failure the kernel counts the data as written, so no later sync writes it.
        for change in std::mem::take(&mut inode.changes) {
            if !matches!(fault, Some(Fault::Fails(_))) {
                change.apply(Fate::Done, &mut inode.on_disk);
            }
        }
        match fault {
            Some(Fault::Fails(error) | Fault::Partly(error)) => Err(error),
            Some(Fault::Short) | None => Ok(()),
        }
    }

    fn lock(&self) -> Result<(), Errno> {
        let mut state = self.folder.lock();
        state.call_whole()?;
        let inode = &mut state.inodes[self.inode];
        if inode.is_locked {
            return Err(Errno::WOULDBLOCK);
        }
        inode.is_locked = true;
        *self.locks.lock().expect("nobody panics with the lock") = true;
        Ok(())
    }

    fn link(&self, name: &[u8]) -> Result<(), Errno> {
        let mut state = self.folder.lock();
        state.call_whole()?;
        if state.names.contains_key(name) {
            return Err(Errno::EXIST);
        }
        state.names.insert(name.to_vec(), self.inode);
        state.name_changes.push(NameChange::Set(name.to_vec(), self.inode));
        Ok(())
    }

    fn identity(&self) -> Result<FileIdentity, Errno> {
        let mut state = self.folder.lock();
        state.call_whole()?;
        Ok((0, self.inode as u64))
    }
}
