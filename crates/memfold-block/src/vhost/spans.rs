//! Parts of a guest's memory as one run of bytes. What a guest says of them is not to be trusted.
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// A guest's memory, as its VMM shares it.
pub(super) type Memory = GuestMemoryMmap<()>;

/// There is no such memory in the guest, or not as many bytes.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct OutOfMemory;

#[derive(Copy, Clone)]
struct Span {
    at: GuestAddress,
    len: u32,
}

/// Parts of the guest's memory in their order. They are read or written from the front, and are
/// gone then.
///
/// Nothing but `with_capacity` allocates: the device may hold the swap of the machine that it runs
/// on.
pub(super) struct Spans {
    all: Vec<Span>,
    /// Those before it are gone.
    first: usize,
    /// Bytes of the others.
    len: u64,
}

impl Spans {
    pub fn with_capacity(count: usize) -> Spans {
        Spans { all: Vec::with_capacity(count), first: 0, len: 0 }
    }

    pub fn clear(&mut self) {
        self.all.clear();
        (self.first, self.len) = (0, 0);
    }

    /// The most parts that it can hold.
    #[cfg(any(test, fuzzing))]
    pub fn capacity(&self) -> usize {
        self.all.capacity()
    }

    /// Puts a part at the end; `false` if there is no more room.
    pub fn push(&mut self, at: GuestAddress, len: u32) -> bool {
        let fits = self.all.len() < self.all.capacity();
        if fits && len > 0 {
            self.all.push(Span { at, len });
            self.len += u64::from(len);
        }
        fits
    }

    /// Bytes that are left.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Takes the last byte away; `None` if there is none.
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

    /// Takes the first bytes away, into `to`.
    pub fn read(&mut self, memory: &Memory, to: &mut [u8]) -> Result<(), OutOfMemory> {
        let mut done = 0;
        while done < to.len() {
            let (at, count) = self.head(to.len() - done)?;
            memory.read_slice(&mut to[done..][..count], at).map_err(|_| OutOfMemory)?;
            self.advance(count);
            done += count;
        }
        Ok(())
    }

    /// Overwrites the first bytes with `from`, and takes them away.
    pub fn write(&mut self, memory: &Memory, from: &[u8]) -> Result<(), OutOfMemory> {
        let mut done = 0;
        while done < from.len() {
            let (at, count) = self.head(from.len() - done)?;
            memory.write_slice(&from[done..][..count], at).map_err(|_| OutOfMemory)?;
            self.advance(count);
            done += count;
        }
        Ok(())
    }

    /// Where the first bytes are, and how many of them lie together, at most `max`.
    fn head(&self, max: usize) -> Result<(GuestAddress, usize), OutOfMemory> {
        let span = self.all.get(self.first).ok_or(OutOfMemory)?;
        Ok((span.at, max.min(span.len as usize)))
    }

    /// Takes bytes of the first part away, which were accessible.
    fn advance(&mut self, count: usize) {
        let span = &mut self.all[self.first];
        span.len -= count as u32;
        // Can't wrap if anything is left, as memory ends where addresses do.
        span.at = GuestAddress(span.at.0.wrapping_add(count as u64));
        self.first += usize::from(span.len == 0);
        self.len -= count as u64;
    }
}
