//! Parts of a guest's memory as one run of bytes. The guest's descriptions are not trusted.
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// A guest's memory, as its VMM shares it.
pub(super) type GuestMap = GuestMemoryMmap<()>;

/// The guest has no such memory, or fewer bytes.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct OutOfMemory;

#[derive(Copy, Clone)]
struct GuestSpan {
    at: GuestAddress,
    len: u32,
}

/// Parts of the guest's memory in order. They are read or written from the front, and are then
/// removed.
///
/// Only `with_capacity` allocates, because the device may hold the swap of its own machine.
pub(super) struct GuestSpans {
    all: Vec<GuestSpan>,
    /// The parts before it are removed.
    first: usize,
    /// Bytes of the other parts.
    len: u64,
}

impl GuestSpans {
    pub fn with_capacity(count: usize) -> GuestSpans {
        GuestSpans { all: Vec::with_capacity(count), first: 0, len: 0 }
    }

    pub fn clear(&mut self) {
        self.all.clear();
        (self.first, self.len) = (0, 0);
    }

    /// Returns the most parts that it can hold.
    #[cfg(any(test, fuzzing))]
    pub fn capacity(&self) -> usize {
        self.all.capacity()
    }

    /// Adds a part at the end. Returns `false` if there is no room.
    pub fn push(&mut self, at: GuestAddress, len: u32) -> bool {
        let fits = self.all.len() < self.all.capacity();
        if fits && len > 0 {
            self.all.push(GuestSpan { at, len });
            self.len += u64::from(len);
        }
        fits
    }

    /// Returns the remaining bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Removes and returns the address of the last byte; `None` if there is none.
    pub fn take_last_byte(&mut self) -> Option<GuestAddress> {
        let last = self.all[self.first..].last_mut()?;
        let at = last.at.0.checked_add(u64::from(last.len) - 1)?;
        last.len -= 1;
        self.len -= 1;
        if last.len == 0 {
            self.all.pop();
        }
        Some(GuestAddress(at))
    }

    /// Moves the first bytes into `to`.
    pub fn read(&mut self, memory: &GuestMap, to: &mut [u8]) -> Result<(), OutOfMemory> {
        let mut done_bytes = 0;
        while done_bytes < to.len() {
            let (at, count) = self.head(to.len() - done_bytes)?;
            memory.read_slice(&mut to[done_bytes..][..count], at).map_err(|_| OutOfMemory)?;
            self.advance(count);
            done_bytes += count;
        }
        Ok(())
    }

    /// Overwrites the first bytes with `from`, and removes them.
    pub fn write(&mut self, memory: &GuestMap, from: &[u8]) -> Result<(), OutOfMemory> {
        let mut done_bytes = 0;
        while done_bytes < from.len() {
            let (at, count) = self.head(from.len() - done_bytes)?;
            memory.write_slice(&from[done_bytes..][..count], at).map_err(|_| OutOfMemory)?;
            self.advance(count);
            done_bytes += count;
        }
        Ok(())
    }

    /// Returns the position of the first bytes, and how many of them are contiguous, at most `max`.
    fn head(&self, max: usize) -> Result<(GuestAddress, usize), OutOfMemory> {
        let span = self.all.get(self.first).ok_or(OutOfMemory)?;
        Ok((span.at, max.min(span.len as usize)))
    }

    /// Removes bytes of the first part, which were accessible.
    fn advance(&mut self, count: usize) {
        let span = &mut self.all[self.first];
        span.len -= count as u32;
        // This can't wrap while bytes remain, because memory ends where addresses do.
        span.at = GuestAddress(span.at.0.wrapping_add(count as u64));
        self.first += usize::from(span.len == 0);
        self.len -= count as u64;
    }
}
