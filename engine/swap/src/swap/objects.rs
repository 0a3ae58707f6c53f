//! Objects: how they are sealed, written, read and opened.
use crate::location::{ObjectLocation, UNIT_BYTES};
use crate::remote::RemoteError;
use crate::seal::{RawSeal, SealBinding, TAG_BYTES};
use crate::swap::Swap;
use crate::swap::buffers::BufferPurpose;
use crate::tier::SlotReadError;
use alloc::string::String;
use memfold_os::Errno;
use memfold_os::memory::zone::NoPromise;
use memfold_os::page::Page;
use memfold_os::transfer::{Direction, Transfer};
use memfold_os::units::{Order, PAGE_SIZE};

/// Bytes before the payload of a packed object.
pub const HEAD_BYTES: usize = 16 + TAG_BYTES;

/// An object could not be read. Displays as one line that names file and slot, or the remote store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadError {
    name: String,
    slot: u64,
    /// The object of the remote store that has the slot.
    object: Option<u64>,
    cause: ReadFailure,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum ReadFailure {
    /// The bytes that were read are not those that were written. `is_zero`: they begin with zeros,
    /// as a hole of a file does.
    Changed {
        is_zero: bool,
    },
    File(Errno),
    Remote(RemoteError),
}

impl ReadError {
    /// Returns whether bytes were read that are not those that were written.
    pub fn is_damage(&self) -> bool {
        matches!(self.cause, ReadFailure::Changed { .. })
    }

    /// Returns what the user of the program can do about it.
    pub fn remedy(&self) -> &'static str {
        match &self.cause {
            ReadFailure::File(_) => "Check the disk of --swap",
            ReadFailure::Remote(failure) if failure.is_lost => {
                "Configure the servers to keep acknowledged data (docs/usage.md, Add a remote store)"
            }
            ReadFailure::Remote(failure) if failure.is_cut => {
                "Find out what ended the process memfold-remote, and run the program again"
            }
            ReadFailure::Remote(_) => {
                "Start the servers, and run the program again. A larger --remote-timeout waits longer \
                 for servers that restart"
            }
            ReadFailure::Changed { .. } if self.object.is_some() => {
                "Check the servers, and which other clients write to keys that begin with memfold:"
            }
            ReadFailure::Changed { .. } => {
                "Check the disk of --swap and the memory of this machine, and which other processes \
                 write to the file"
            }
        }
    }
}

impl core::fmt::Display for ReadError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self.object {
            Some(number) => {
                write!(f, "remote store {}, object {number} (slot {}): ", self.name, self.slot)?
            }
            None => write!(
                f,
                "swap file {}, slot {} (byte {}): ",
                self.name,
                self.slot,
                self.slot * PAGE_SIZE as u64
            )?,
        }
        match &self.cause {
            ReadFailure::Changed { is_zero } => {
                let zeros = if *is_zero { ": they begin with zeros" } else { "" };
                write!(f, "its bytes are not what was written{zeros}")
            }
            ReadFailure::File(errno) => write!(f, "reading failed: {errno}"),
            ReadFailure::Remote(failure) => write!(f, "reading failed: {failure}"),
        }
    }
}

impl Swap {
    /// Seals `blocks` of `block` bytes each, which fill the start of `bytes` and go to the run at
    /// `slot`.
    pub fn seal_raw(&self, slot: u64, bytes: &mut [u8], block: Order) {
        for (i, bytes) in bytes.chunks_exact_mut(block.bytes()).enumerate() {
            let slot = slot + (i * block.pages()) as u64;
            let number = self.sealer.number();
            let tag = self.sealer.seal(raw_binding(slot, number, block), bytes);
            // SAFETY: the slots are the caller's, so no other thread reads or writes their seals.
            // `raw_seal` returns a place in the table, which is mapped.
            unsafe { self.raw_seal(slot).write(RawSeal { number, tag }) };
        }
    }

    /// Seals one packed object, which goes to `location`. Its payload of `len` bytes lies behind
    /// the head in `bytes`.
    pub fn seal_packed(&self, location: ObjectLocation, fields: u32, len: usize, bytes: &mut [u8]) {
        let number = self.sealer.number();
        let (head, payload) = bytes.split_at_mut(HEAD_BYTES);
        let tag = self.sealer.seal(packed_binding(location, number, fields), &mut payload[..len]);
        payload[len..].fill(0);
        head[..8].copy_from_slice(&number.to_le_bytes());
        head[8..12].copy_from_slice(&fields.to_le_bytes());
        head[12..16].copy_from_slice(&(len as u32).to_le_bytes());
        head[16..].copy_from_slice(&tag);
    }

    /// Returns a write of the first `len` bytes of a buffer to the run at `slot`.
    pub fn write_from(&self, buffer: usize, slot: u64, len: usize) -> Transfer {
        debug_assert!(len <= self.buffers.buffer_bytes());
        let at = self.buffers.start_of(buffer);
        Transfer::new(Direction::Write, slot * PAGE_SIZE as u64, Page::at(at), len)
    }

    /// Makes writes that [`Swap::write_from`] has prepared.
    ///
    /// # Safety
    /// - The caller has taken the buffers and the runs.
    pub unsafe fn write(&self, writes: &mut [Transfer]) {
        // SAFETY: the caller has taken the buffers and runs, so no other thread changes the memory.
        // Slots are read only through handles, and a run that is being written has no handle yet.
        unsafe { self.disk.transfer(writes) };
        let Some(tier) = &self.tier else { return };
        for write in writes.iter().filter(|w| w.result.is_ok()) {
            tier.written(write.offset / PAGE_SIZE as u64, write.len / PAGE_SIZE);
        }
    }

    /// Reads a run of consecutive raw blocks from `location` to `to`, and opens them.
    ///
    /// # Errors
    /// [`ReadError`]; the bytes at `to` must not be used then.
    ///
    /// # Safety
    /// - `to` has room for `count` blocks that no other thread touches; the objects are not freed
    ///   meanwhile.
    pub unsafe fn read_raw(
        &self,
        location: ObjectLocation,
        count: usize,
        block: Order,
        to: *mut Page,
    ) -> Result<(), ReadError> {
        let len = count * block.bytes();
        // SAFETY: the caller promises that `to` has room and no other user, and that the objects
        // are not freed, so no write goes to the slots.
        unsafe { self.read(location.slot, to, len)? };
        for i in 0..count {
            let slot = location.slot + (i * block.pages()) as u64;
            // SAFETY: the seal was written before the object was inserted. The caller promises that
            // `to` has room for all blocks and no other user.
            let (is_zero, is_open) = unsafe {
                let seal = self.raw_seal(slot).read();
                let bytes = core::slice::from_raw_parts_mut(
                    to.add(i * block.pages()).cast(),
                    block.bytes(),
                );
                let is_zero = begins_with_zeros(bytes);
                (is_zero, self.sealer.open(raw_binding(slot, seal.number, block), bytes, &seal.tag))
            };
            if !is_open {
                return Err(self.damage_at(slot, is_zero));
            }
        }
        Ok(())
    }

    /// Reads the bytes of the file from `first` to `last`, which hold packed objects. Calls `each`
    /// with [`PackedObjects`], which opens each of them.
    ///
    /// # Errors
    /// [`ReadError`], or the error of `each`.
    ///
    /// # Panics
    /// If the bytes don't fit a buffer.
    pub fn read_packed<R>(
        &self,
        first: ObjectLocation,
        last: ObjectLocation,
        each: impl FnOnce(&mut PackedObjects<'_>) -> Result<R, ReadError>,
    ) -> Result<R, ReadError> {
        let len = ((last.slot - first.slot) as usize + last.slots()) * PAGE_SIZE;
        assert!(len <= self.buffers.buffer_bytes());
        let buffer = self.take_buffer(BufferPurpose::Read, true).expect("it waits");
        // SAFETY: this thread has taken the buffer, so no other thread uses it, and `bytes` is its
        // only slice. The caller has handles of the objects, so no write goes to the slots.
        let result = unsafe {
            let bytes = self.buffer_mut(buffer);
            self.read(first.slot, Page::at(bytes.as_mut_ptr()), len).and_then(|()| {
                each(&mut PackedObjects { swap: self, slot: first.slot, bytes: &mut bytes[..len] })
            })
        };
        self.give_buffer_back(buffer);
        result
    }

    /// Returns the bytes that [`Swap::read_packed`] reads at once, at most.
    pub fn packed_bytes_max(&self) -> usize {
        self.buffers.buffer_bytes()
    }

    /// Reads `len` bytes from `slot` on to `to`.
    ///
    /// # Safety
    /// - The conditions of [`Disk::transfer`] for a read to `to`.
    /// - The caller has a handle of the objects in the slots, so they are not freed meanwhile.
    unsafe fn read(&self, slot: u64, to: *mut Page, len: usize) -> Result<(), ReadError> {
        if let Some(tier) = &self.tier {
            // SAFETY: the caller promises that `to` has room and no other user; it has handles of
            // the objects, so they are not freed meanwhile.
            let result = unsafe { tier.read(&*self.disk, slot, len / PAGE_SIZE, to) };
            return result.map_err(|why| match why {
                SlotReadError::File(e) => self.unread(slot, e),
                SlotReadError::Remote(number, failure) => ReadError {
                    name: tier.name().into(),
                    slot,
                    object: Some(number),
                    cause: ReadFailure::Remote(failure),
                },
            });
        }
        let mut transfers = [Transfer::new(Direction::Read, slot * PAGE_SIZE as u64, to, len)];
        // SAFETY: the caller promises that `to` has room and no other user. It has a handle, so no
        // write goes to these slots.
        unsafe { self.disk.transfer(&mut transfers) };
        transfers[0].result.map_err(|e| self.unread(slot, e))
    }

    fn unread(&self, slot: u64, errno: Errno) -> ReadError {
        ReadError {
            name: self.disk.name().into(),
            slot,
            object: None,
            cause: ReadFailure::File(errno),
        }
    }

    /// Returns the error for an object whose bytes are not those that were written. `is_zero`: they
    /// begin with zeros.
    pub fn damage_at(&self, slot: u64, is_zero: bool) -> ReadError {
        let far = self.tier.as_ref().and_then(|tier| Some((tier.name(), tier.object_of(slot)?)));
        let (name, object) =
            far.map_or((self.disk.name(), None), |(name, number)| (name, Some(number)));
        ReadError { name: name.into(), slot, object, cause: ReadFailure::Changed { is_zero } }
    }

    fn raw_seal(&self, slot: u64) -> *mut RawSeal {
        let end = (slot as usize + 1) * size_of::<RawSeal>();
        assert!(end <= self.raw_seals.len());
        let outcome = self.raw_seals.need(&self.edge, 0, self.raw_seals.len(), end);
        if outcome.is_err() {
            NoPromise::end("The table of the swap file");
        }
        // SAFETY: the seal lies in the zone.
        unsafe { self.raw_seals.as_ptr().cast::<RawSeal>().add(slot as usize) }
    }
}

/// Packed objects that were read.
pub struct PackedObjects<'a> {
    swap: &'a Swap,
    slot: u64,
    bytes: &'a mut [u8],
}

impl PackedObjects<'_> {
    /// Opens one object, and returns its fields and its payload.
    ///
    /// # Errors
    /// [`ReadError`]: the object's bytes are not those that were written.
    pub fn open(&mut self, location: ObjectLocation) -> Result<(u32, &[u8]), ReadError> {
        let start = (location.start() - self.slot * PAGE_SIZE as u64) as usize;
        let is_zero = begins_with_zeros(&self.bytes[start..start + location.len]);
        let (head, payload) = self.bytes[start..start + location.len].split_at_mut(HEAD_BYTES);
        let word = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().expect("4 bytes"));
        let number = u64::from_le_bytes(head[..8].try_into().expect("8 bytes"));
        let (fields, len) = (word(8), word(12) as usize);
        let tag: &[u8; TAG_BYTES] = head[16..].try_into().expect("16 bytes");
        if len > payload.len() || payload.len() - len >= UNIT_BYTES {
            return Err(self.swap.damage_at(location.slot, is_zero));
        }
        let payload = &mut payload[..len];
        if !self.swap.sealer.open(packed_binding(location, number, fields), payload, tag) {
            return Err(self.swap.damage_at(location.slot, is_zero));
        }
        Ok((fields, payload))
    }
}

fn begins_with_zeros(bytes: &[u8]) -> bool {
    bytes.iter().take(HEAD_BYTES).all(|byte| *byte == 0)
}

fn raw_binding(slot: u64, number: u64, block: Order) -> SealBinding {
    SealBinding { start: slot * PAGE_SIZE as u64, number, header: 1 << 32 | block.get() as u64 }
}

fn packed_binding(location: ObjectLocation, number: u64, fields: u32) -> SealBinding {
    SealBinding { start: location.start(), number, header: 2 << 32 | fields as u64 }
}
