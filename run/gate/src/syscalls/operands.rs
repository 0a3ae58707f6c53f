//! The operands of one call: its arguments, a guarded way to read what they point to, and the
//! ranges found so far. The functions of the table use it.
use crate::keeper::{BadAddress, NamedSpan};

/// The most bytes that the kernel takes or gives in one call.
pub const BYTES_MAX: usize = 0x7fff_f000;

/// The most parts of a vector. If there are more, the kernel refuses the call before it reads
/// anything.
pub const PARTS_MAX: usize = 1024;

/// The length in bytes of the longest path, and of most other texts.
pub const TEXT_MAX: usize = 4096;

/// A function that reads nested memory. Folded pages are loaded. A bad address is an error.
pub type ReadMemory<'a> = &'a dyn Fn(usize, &mut [u8]) -> Result<(), BadAddress>;

/// The operands of one call.
pub struct Operands<'a> {
    /// The call's arguments.
    pub args: [usize; 6],
    read: ReadMemory<'a>,
    out: &'a mut dyn FnMut(NamedSpan),
    bad: bool,
}

impl<'a> Operands<'a> {
    /// Returns the operands of a call, with nothing named yet.
    pub fn new(
        args: &[usize; 6],
        read: ReadMemory<'a>,
        out: &'a mut dyn FnMut(NamedSpan),
    ) -> Operands<'a> {
        Operands { args: *args, read, out, bad: false }
    }

    /// Returns an error if something that had to be read couldn't be.
    pub fn result(&self) -> Result<(), BadAddress> {
        if self.bad { Err(BadAddress) } else { Ok(()) }
    }

    /// Names memory that the kernel reads. A null pointer names nothing.
    pub fn reads(&mut self, start: usize, len: usize) {
        self.put(start, len, false);
    }

    /// Names memory that the kernel writes to, and may read.
    pub fn writes(&mut self, start: usize, len: usize) {
        self.put(start, len, true);
    }

    /// Names memory that the kernel writes to if `write` is true, and otherwise only reads.
    pub fn touches(&mut self, start: usize, len: usize, write: bool) {
        self.put(start, len, write);
    }

    fn put(&mut self, start: usize, len: usize, write: bool) {
        if let Some(span) = NamedSpan::new(start, len.min(BYTES_MAX), write).filter(|_| start != 0)
        {
            (self.out)(span);
        }
    }

    /// Names a text that the kernel reads up to its null byte, and `max` bytes at most.
    pub fn text(&mut self, start: usize, max: usize) {
        if start == 0 {
            return;
        }
        let mut len = 0;
        let mut part = [0u8; 64];
        while len < max {
            let at = start.wrapping_add(len);
            // A read ends at the end of a page, because the next page may not be the program's.
            let bytes = (64 - at % 64).min(max - len);
            if (self.read)(at, &mut part[..bytes]).is_err() {
                // The kernel reads as far as this, and no further.
                self.bad = true;
                break;
            }
            match part[..bytes].iter().position(|&b| b == 0) {
                Some(end) => {
                    len += end + 1;
                    break;
                }
                None => len += bytes,
            }
        }
        self.reads(start, len);
    }

    /// Returns the `N` bytes of the program at `addr`, or `None` if they can't be read.
    pub fn get<const N: usize>(&mut self, addr: usize) -> Option<StructFields<N>> {
        let mut bytes = [0; N];
        if addr == 0 {
            return None;
        }
        match (self.read)(addr, &mut bytes) {
            Ok(()) => Some(StructFields(bytes)),
            Err(BadAddress) => {
                self.bad = true;
                None
            }
        }
    }

    /// Names a struct that the kernel reads, and returns it.
    pub fn take<const N: usize>(&mut self, addr: usize) -> Option<StructFields<N>> {
        self.reads(addr, N);
        self.get(addr)
    }

    /// Names a struct that the kernel reads, and to which it writes depending on what it says.
    /// Returns the struct. It may be read-only if the kernel doesn't write.
    pub fn change<const N: usize>(&mut self, addr: usize) -> Option<StructFields<N>> {
        self.reads(addr, N);
        self.writes(addr, N);
        self.get(addr)
    }

    /// Returns a 64-bit number of the program, or `None` if it can't be read.
    pub fn word(&mut self, addr: usize) -> Option<usize> {
        self.get::<8>(addr).map(|f| f.word(0))
    }

    /// Returns a 32-bit number of the program, or `None` if it can't be read.
    pub fn half(&mut self, addr: usize) -> Option<u32> {
        self.get::<4>(addr).map(|f| f.half(0))
    }

    /// Returns argument `i`.
    pub fn arg(&self, i: usize) -> usize {
        self.args[i]
    }

    /// Returns argument `i` of which the kernel takes 32 bits.
    pub fn int(&self, i: usize) -> u32 {
        self.args[i] as u32
    }
}

/// The bytes of a struct, by offset.
pub struct StructFields<const N: usize>(pub [u8; N]);

impl<const N: usize> StructFields<N> {
    /// Returns the 64 bits at offset `at`.
    pub fn word(&self, at: usize) -> usize {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&self.0[at..at + 8]);
        usize::from_le_bytes(bytes)
    }

    /// Returns the 32 bits at offset `at`.
    pub fn half(&self, at: usize) -> u32 {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&self.0[at..at + 4]);
        u32::from_le_bytes(bytes)
    }

    /// Returns the 32 bits at offset `at`, as a length.
    pub fn len(&self, at: usize) -> usize {
        self.half(at) as usize
    }

    /// Returns the 16 bits at offset `at`.
    pub fn short(&self, at: usize) -> usize {
        u16::from_le_bytes([self.0[at], self.0[at + 1]]) as usize
    }
}
