//! What comes and what goes, in memory taken once: requests are read many at a time, and replies
//! are sent so.
use super::wire::{Head, REQUEST_BYTES};
use memfold_sys::page::PageBuffer;
use memfold_sys::units::PAGE_SIZE;
use std::io::{self, IoSlice, Read, Write};
use std::ops::Range;

/// Bytes that are read at a time, at least.
const INPUT_BYTES: usize = 256 << 10;
/// Bytes of replies that are sent at a time, at least.
const OUTPUT_BYTES: usize = 512 << 10;
/// Replies, or chunks of them, that are sent at a time.
const REPLIES_MAX: usize = 64;

/// Bytes that came and are not used yet.
pub struct Input {
    bytes: PageBuffer,
    used: usize,
    end: usize,
}

impl Input {
    /// An empty one, with room for a block of so many bytes and more.
    pub fn new(block_bytes: usize) -> Input {
        Input {
            bytes: PageBuffer::of_pages(INPUT_BYTES.max(2 * block_bytes) / PAGE_SIZE),
            used: 0,
            end: 0,
        }
    }

    /// What is there.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes.bytes()[self.used..self.end]
    }

    /// The most that [`Input::fill`] can be asked for.
    pub fn room(&self) -> usize {
        self.bytes.len() - PAGE_SIZE
    }

    /// Uses the first `count` bytes of what is there.
    pub fn consume(&mut self, count: usize) {
        self.used += count;
        debug_assert!(self.used <= self.end);
    }

    /// Reads once, in a way that at least `count` bytes can be there in the end. `false`: the
    /// connection has ended.
    ///
    /// # Errors
    /// The connection's.
    ///
    /// # Panics
    /// If `count` is above [`Input::room`].
    pub fn fill(&mut self, link: &mut impl Read, count: usize) -> io::Result<bool> {
        assert!(count <= self.room());
        if self.used == self.end {
            // What follows the first request then begins where a page does, and is compressed where
            // it lies; so does what is left of a long one.
            let first = if count == REQUEST_BYTES { PAGE_SIZE - REQUEST_BYTES } else { 0 };
            (self.used, self.end) = (first, first);
        } else if self.used + count > self.bytes.len() {
            let there = self.used..self.end;
            self.end = there.len();
            self.bytes.bytes_mut().copy_within(there, 0);
            self.used = 0;
        }
        let read = loop {
            match link.read(&mut self.bytes.bytes_mut()[self.end..]) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        self.end += read;
        Ok(read > 0)
    }
}

/// Replies that are not sent yet.
pub struct Output {
    heads: [Head; REPLIES_MAX],
    /// Where the data of each lies.
    parts: [Range<usize>; REPLIES_MAX],
    count: usize,
    data: PageBuffer,
    used: usize,
}

impl Output {
    /// An empty one, with room for a block of so many bytes.
    pub fn new(block_bytes: usize) -> Output {
        Output {
            heads: [Head::EMPTY; REPLIES_MAX],
            parts: [const { 0..0 }; REPLIES_MAX],
            count: 0,
            data: PageBuffer::of_pages(OUTPUT_BYTES.max(block_bytes) / PAGE_SIZE),
            used: 0,
        }
    }

    /// The most data that one part can have.
    pub fn room(&self) -> usize {
        self.data.len()
    }

    /// Memory for `len` bytes of data, page-aligned, for the reply that is pushed next. `None`:
    /// send first.
    pub fn data(&mut self, len: usize) -> Option<&mut [u8]> {
        self.data.bytes_mut()[self.used..].get_mut(..len)
    }

    /// Whether another reply can be pushed.
    pub fn has_room(&self) -> bool {
        self.count < REPLIES_MAX
    }

    /// Adds a reply, with `len` bytes of what was last written to [`Output::data`].
    ///
    /// # Panics
    /// If there is no room.
    pub fn push(&mut self, head: Head, len: usize) {
        self.heads[self.count] = head;
        self.parts[self.count] = self.used..self.used + len;
        self.count += 1;
        self.used = (self.used + len).next_multiple_of(PAGE_SIZE);
    }

    /// Sends all.
    ///
    /// # Errors
    /// The connection's.
    pub fn send(&mut self, link: &mut impl Write) -> io::Result<()> {
        if self.count == 0 {
            return Ok(());
        }
        let mut slices = [IoSlice::new(&[]); 2 * REPLIES_MAX];
        let mut used = 0;
        for (head, part) in self.heads.iter().zip(&self.parts).take(self.count) {
            for bytes in [head.bytes(), &self.data.bytes()[part.clone()]] {
                if !bytes.is_empty() {
                    slices[used] = IoSlice::new(bytes);
                    used += 1;
                }
            }
        }
        let sent = write_all(link, &mut slices[..used]);
        (self.count, self.used) = (0, 0);
        sent
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
