//! Blocks of pages: which of three ways makes a page smallest, and the table of the pages.
use super::form::Form;
use super::layout::ROOM;
use super::text::has_dense_words;
use super::votes::Scratch;
use super::{DAMAGED, PAGES};
use crate::codec::coder::{CodecInput, CodecOutput, DecodeResult, Decoder, EncodeResult, Encoder};
use crate::codec::lz4;
use crate::format::huge_threshold;
use crate::history::ShrinkHistory;
use alloc::boxed::Box;
use core::ops::Range;
use memfold_os::units::PAGE_SIZE;

/// Bits of a page's length in the table; its kind is above.
const LEN_BITS: u32 = 13;
const RAW: u16 = 0;
const LINES: u16 = 1;
const LZ4: u16 = 2;
const _: () = assert!(PAGE_SIZE < 1 << LEN_BITS);

/// A page that takes more than this by its lines may be smaller by LZ4. LZ4 takes 4 us to tell.
const OPEN_MAX: usize = 2048;
/// The most bytes of a page by LZ4.
const LZ4_MAX: usize = huge_threshold(PAGE_SIZE);
/// LZ4 loads slower, so it must be smaller by this part.
const LZ4_WORTH: usize = 8;

/// Returns whether most pages of a block look like text.
///
/// # Safety
/// - `src` is readable, whole pages, and no thread writes there meanwhile.
pub(super) unsafe fn looks_like_text(src: CodecInput) -> bool {
    let pages = src.len / PAGE_SIZE;
    // SAFETY: the page lies in the block.
    let is_dense = |page: &usize| unsafe { has_dense_words(src.at.add(page * PAGE_SIZE)) };
    pages > 1 && (0..pages).filter(is_dense).count() > pages / 2
}

/// Encodes blocks as pages.
pub(super) struct PageEncoder {
    form: Form,
    scratch: Box<Scratch>,
    lz4: Box<dyn Encoder>,
    /// A page by its lines, where the output has too little room for the encoder.
    lines: Box<[u8; ROOM]>,
    /// A page by LZ4, to compare.
    other: Box<[u8; PAGE_SIZE]>,
    /// Whether LZ4 has made the latest pages smaller that their lines did not.
    lz4_history: ShrinkHistory,
    /// Whether their lines have made the latest pages smaller that LZ4 did not.
    lines_history: ShrinkHistory,
}

impl PageEncoder {
    pub fn new(form: Form) -> PageEncoder {
        PageEncoder {
            form,
            scratch: Box::new(Scratch::new()),
            lz4: lz4::encoder(1, PAGE_SIZE),
            lines: Box::new([0; ROOM]),
            other: Box::new([0; PAGE_SIZE]),
            lz4_history: ShrinkHistory::default(),
            lines_history: ShrinkHistory::default(),
        }
    }

    pub fn encodes(&self) -> bool {
        self.form.encodes()
    }

    /// Encodes a block of whole pages. `is_dense`: LZ4 did not make it much smaller as one.
    ///
    /// # Safety
    /// - As for [`Encoder::encode`].
    pub unsafe fn encode(
        &mut self,
        src: CodecInput,
        dst: CodecOutput,
        is_dense: bool,
    ) -> EncodeResult {
        let pages = src.len / PAGE_SIZE;
        let mut len = 1 + 2 * pages;
        if dst.len < len {
            return Ok(None);
        }
        // SAFETY: there is room for the first byte and the table.
        unsafe { dst.at.write(PAGES) };
        for page in 0..pages {
            // SAFETY: the page lies in `src`, the rest behind `len` and the entry in `dst`.
            unsafe {
                let from = src.at.add(page * PAGE_SIZE);
                let rest = CodecOutput { at: dst.at.add(len), len: dst.len - len };
                let Some((kind, size)) = self.encode_page(from, rest, is_dense)? else {
                    return Ok(None);
                };
                let entry = (size as u16 | kind << LEN_BITS).to_le_bytes();
                dst.at.add(1 + 2 * page).cast::<[u8; 2]>().write(entry);
                len += size;
            }
        }
        Ok(Some(len))
    }

    /// Encodes a page to the front of `dst`. Returns kind and length, `None` if it does not fit.
    ///
    /// # Safety
    /// - As for [`Encoder::encode`], for a page at `page`.
    unsafe fn encode_page(
        &mut self,
        page: *const u8,
        dst: CodecOutput,
        is_dense: bool,
    ) -> Result<Option<(u16, usize)>, super::CodecError> {
        // SAFETY: as the caller says, here and below.
        let (by_lines, by_lz4) = unsafe {
            if has_dense_words(page) {
                let is_tried = !is_dense || self.lz4_history.tries();
                let by_lz4 = if is_tried { self.encode_lz4(page, LZ4_MAX)? } else { None };
                if is_dense && is_tried {
                    self.lz4_history.note(by_lz4.is_some());
                }
                let is_open = by_lz4.is_none() && self.lines_history.tries();
                let by_lines = if is_open { self.encode_lines(page, dst) } else { None };
                if is_open {
                    self.lines_history.note(by_lines.is_some());
                }
                (by_lines, by_lz4)
            } else {
                let by_lines = self.encode_lines(page, dst);
                let is_open =
                    by_lines.is_none_or(|size| size > OPEN_MAX) && self.lz4_history.tries();
                let room = by_lines.map_or(LZ4_MAX, |size| size - size / LZ4_WORTH);
                let by_lz4 = if is_open { self.encode_lz4(page, room)? } else { None };
                if is_open {
                    self.lz4_history.note(by_lz4.is_some());
                }
                (by_lines, by_lz4)
            }
        };
        let (kind, from, size) = match (by_lz4, by_lines) {
            (Some(size), _) => (LZ4, self.other.as_ptr(), size),
            (None, Some(size)) if dst.len >= ROOM => return Ok(Some((LINES, size))),
            (None, Some(size)) => (LINES, self.lines.as_ptr(), size),
            (None, None) => (RAW, page, PAGE_SIZE),
        };
        if size > dst.len {
            return Ok(None);
        }
        // SAFETY: `from` is `size` bytes of a buffer of this encoder, or the page; `dst` has room.
        unsafe { core::ptr::copy_nonoverlapping(from, dst.at, size) };
        Ok(Some((kind, size)))
    }

    /// Encodes a page by its lines, to the front of `dst` if it has [`ROOM`], else to `self.lines`.
    ///
    /// # Safety
    /// - As for [`Encoder::encode`], for a page at `page`.
    unsafe fn encode_lines(&mut self, page: *const u8, dst: CodecOutput) -> Option<usize> {
        let to = if dst.len >= ROOM { dst.at } else { self.lines.as_mut_ptr() };
        // SAFETY: the caller vouches for page and `dst`; both places have room.
        unsafe { self.form.encode(&mut self.scratch, page, to) }
    }

    /// Encodes a page by LZ4, to at most `room` bytes of `self.other`.
    ///
    /// # Safety
    /// - As for [`Encoder::encode`], for a page at `page`.
    unsafe fn encode_lz4(&mut self, page: *const u8, room: usize) -> EncodeResult {
        let src = CodecInput { at: page, len: PAGE_SIZE };
        // SAFETY: the caller vouches for the page; the buffer belongs to this encoder.
        unsafe { self.lz4.encode(src, CodecOutput::of(&mut self.other[..room]), None) }
    }
}

/// The lengths and kinds of a block's pages, and the pages.
pub(super) struct PageTable<'a> {
    entries: &'a [[u8; 2]],
    pages: &'a [u8],
}

impl PageTable<'_> {
    /// Reads the table of a block of `block_len` bytes. Returns `None` if it is not whole pages, or the
    /// pages are not as long as the table says.
    pub fn read(bytes: &[u8], block_len: usize) -> Option<PageTable<'_>> {
        let count = block_len / PAGE_SIZE;
        let (entries, pages) = bytes.split_at_checked(2 * count)?;
        let table = PageTable { entries: entries.as_chunks().0, pages };
        let is_whole = block_len.is_multiple_of(PAGE_SIZE) && table.start(count) == pages.len();
        is_whole.then_some(table)
    }

    /// Returns where page `page` begins.
    fn start(&self, page: usize) -> usize {
        self.entries[..page].iter().map(|entry| split(*entry).1).sum()
    }

    /// Returns kind and bytes of each of these pages.
    pub fn pages(&self, pages: Range<usize>) -> impl Iterator<Item = (u16, &[u8])> {
        let mut rest = &self.pages[self.start(pages.start)..];
        self.entries[pages].iter().map(move |entry| {
            let (kind, len) = split(*entry);
            let (page, behind) = rest.split_at(len);
            rest = behind;
            (kind, page)
        })
    }
}

/// Returns kind and length of an entry.
fn split(entry: [u8; 2]) -> (u16, usize) {
    let word = u16::from_le_bytes(entry);
    (word >> LEN_BITS, (word & ((1 << LEN_BITS) - 1)) as usize)
}

/// Decodes a page to `to`.
///
/// # Safety
/// - `to` is writable for a page, does not overlap the payload, and no other thread touches it
///   meanwhile.
pub(super) unsafe fn decode(
    form: Form,
    lz4: &mut dyn Decoder,
    (kind, payload): (u16, &[u8]),
    to: *mut u8,
) -> DecodeResult {
    let src = CodecInput { at: payload.as_ptr(), len: payload.len() };
    match kind {
        // SAFETY: both are a page; the caller vouches for `to`.
        RAW if payload.len() == PAGE_SIZE => unsafe {
            core::ptr::copy_nonoverlapping(src.at, to, PAGE_SIZE);
            Ok(())
        },
        // SAFETY: the caller vouches for `to`.
        LINES => match unsafe { form.decode(payload, to) } {
            true => Ok(()),
            false => Err(DAMAGED),
        },
        // SAFETY: the payload is borrowed; the caller vouches for `to`.
        LZ4 => unsafe { lz4.decode(src, CodecOutput { at: to, len: PAGE_SIZE }, None) },
        _ => Err(DAMAGED),
    }
}
