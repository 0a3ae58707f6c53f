//! Buffers of a connection, allocated once. They read many requests, and send many replies, at a
//! time.
use super::wire::{REQUEST_BYTES, ReplyHead};
use memfold_os::page::PageBuffer;
use memfold_os::units::PAGE_SIZE;
use std::io::{self, IoSlice, Read, Write};
use std::ops::Range;

/// Least bytes that are read at a time.
const INPUT_BYTES: usize = 256 << 10;
/// Least bytes of replies that are sent at a time.
const OUTPUT_BYTES: usize = 512 << 10;
/// Replies, or chunks of replies, that are sent at a time.
const REPLIES_MAX: usize = 64;

/// Bytes that were received and are not used yet.
pub struct ReadBuffer {
    bytes: PageBuffer,
    used: usize,
    end: usize,
}

impl ReadBuffer {
    /// Makes an empty one, with room for a block of so many bytes and more.
    pub fn new(block_bytes: usize) -> ReadBuffer {
        ReadBuffer {
            bytes: PageBuffer::of_pages(INPUT_BYTES.max(2 * block_bytes) / PAGE_SIZE),
            used: 0,
            end: 0,
        }
    }

    /// Returns the bytes that are available.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes.bytes()[self.used..self.end]
    }

    /// Returns the most that [`ReadBuffer::fill`] can provide.
    pub fn room(&self) -> usize {
        self.bytes.len() - PAGE_SIZE
    }

    /// Uses the first `count` available bytes.
    pub fn consume(&mut self, count: usize) {
        self.used += count;
        debug_assert!(self.used <= self.end);
    }

    /// Reads once, so that at least `count` bytes can become available. Returns `false` if the
    /// connection has ended.
    ///
    /// # Errors
    /// The connection's.
    ///
    /// # Panics
    /// If `count` is above [`ReadBuffer::room`].
    pub fn fill(&mut self, link: &mut impl Read, count: usize) -> io::Result<bool> {
        assert!(count <= self.room());
        if self.used == self.end {
            // The data after the first request then begins at a page, and is compressed in place;
            // so does the rest of a long one.
            let first = if count == REQUEST_BYTES { PAGE_SIZE - REQUEST_BYTES } else { 0 };
            (self.used, self.end) = (first, first);
        } else if self.used + count > self.bytes.len() {
            let input = self.used..self.end;
            self.end = input.len();
            self.bytes.bytes_mut().copy_within(input, 0);
            self.used = 0;
        }
        let count = loop {
            match link.read(&mut self.bytes.bytes_mut()[self.end..]) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        self.end += count;
        Ok(count > 0)
    }
}

/// Replies that are not sent yet.
pub struct ReplyBuffer {
    heads: [ReplyHead; REPLIES_MAX],
    /// Position of each reply's data.
    parts: [Range<usize>; REPLIES_MAX],
    count: usize,
    data: PageBuffer,
    used: usize,
}

impl ReplyBuffer {
    /// Makes an empty one, with room for a block of so many bytes.
    pub fn new(block_bytes: usize) -> ReplyBuffer {
        ReplyBuffer {
            heads: [ReplyHead::EMPTY; REPLIES_MAX],
            parts: [const { 0..0 }; REPLIES_MAX],
            count: 0,
            data: PageBuffer::of_pages(OUTPUT_BYTES.max(block_bytes) / PAGE_SIZE),
            used: 0,
        }
    }

    /// Returns the most data that one part can have.
    pub fn room(&self) -> usize {
        self.data.len()
    }

    /// Returns page-aligned memory for `len` bytes of data of the next reply; `None` if the caller
    /// must send first.
    pub fn data(&mut self, len: usize) -> Option<&mut [u8]> {
        self.data.bytes_mut()[self.used..].get_mut(..len)
    }

    /// Returns whether another reply can be pushed.
    pub fn has_room(&self) -> bool {
        self.count < REPLIES_MAX
    }

    /// Adds a reply, with the last `len` bytes written to [`ReplyBuffer::data`].
    ///
    /// # Panics
    /// If there is no room.
    pub fn push(&mut self, head: ReplyHead, len: usize) {
        self.heads[self.count] = head;
        self.parts[self.count] = self.used..self.used + len;
        self.count += 1;
        self.used = (self.used + len).next_multiple_of(PAGE_SIZE);
    }

    /// Sends everything.
    ///
    /// # Errors
    /// The connection's.
    pub fn send(&mut self, link: &mut impl Write) -> io::Result<()> {
        if self.count == 0 {
            return Ok(());
        }
        let mut slices = [IoSlice::new(&[]); 2 * REPLIES_MAX];
        let mut count = 0;
        for (head, part) in self.heads.iter().zip(&self.parts).take(self.count) {
            for bytes in [head.bytes(), &self.data.bytes()[part.clone()]] {
                if !bytes.is_empty() {
                    slices[count] = IoSlice::new(bytes);
                    count += 1;
                }
            }
        }
        let outcome = write_all(link, &mut slices[..count]);
        (self.count, self.used) = (0, 0);
        outcome
    }
}

fn write_all(link: &mut impl Write, mut slices: &mut [IoSlice]) -> io::Result<()> {
    while !slices.is_empty() {
        match link.write_vectored(slices) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(sent) => IoSlice::advance_slices(&mut slices, sent),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    link.flush()
}
