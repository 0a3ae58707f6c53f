//! Blocks as payloads: finds same-filled pages, compresses the rest, and decodes both.
//!
//! A block without same-filled pages becomes its compressed bytes, or its raw bytes if it does not
//! compress. A block of one pattern becomes those 8 bytes. Any other (*mixed*) starts with a list
//! of its same-filled pages,
//!
//! ```text
//! mode 1 byte | bitmap of same-filled pages, 1 bit each | patterns, 8 bytes each
//! ```
//!
//! (mode 0: all patterns are zero, none is stored; 1: one pattern for all; 2: one for each page),
//! and continues with the other pages, gathered in order and compressed as one.
pub(crate) mod error;
pub(crate) mod set;
pub(crate) mod same_filled;
pub(crate) mod entropy;
pub(crate) mod shuffle;
pub(crate) mod dictionaries;

use crate::block::dictionaries::DecoderSet;
pub(crate) use crate::block::error::DecodeError;
use crate::block::same_filled::{fill, pattern_of};
use crate::block::set::BlockSet;
use crate::block::shuffle::plan::ShufflePlan;
use crate::codec::{CodecError, CodecInput, CodecOutput, DigestedDictionary, Encoder};
use crate::format::{self, huge_threshold};
use crate::history::ShrinkHistory;
use crate::pool::entry::ObjectHeader;
use alloc::boxed::Box;
use alloc::vec;
use core::ops::Range;
use memfold_os::page::PageBuffer;
use memfold_os::units::{MAX_PAGES, Order, PAGE_SIZE};

const MODE_ZERO: u8 = 0;
const MODE_ONE: u8 = 1;
const MODE_EACH: u8 = 2;
/// The longest list of same-filled pages.
const HEAD_MAX: usize = 1 + MAX_PAGES / 8 + 8 * MAX_PAGES;

/// Buffers for encoding, allocated once.
pub(crate) struct EncodeScratch {
    /// The list of same-filled pages, ending at `BODY`, and from there the compressed bytes: one
    /// payload.
    packed: Box<[u8]>,
    /// Pages gathered from between same-filled ones. Free for other use between blocks.
    pub gathered: PageBuffer,
    /// The result without the dictionary, to compare.
    plain: Box<[u8]>,
    luck: ShrinkHistory,
    /// The planes of a block.
    planes: Box<[u8]>,
    /// Whether planes have made the latest blocks smaller, and whether the codec alone would have
    /// been better for those.
    shuffling: [ShrinkHistory; 2],
    patterns: Box<[u64; MAX_PAGES]>,
    /// Blocks that were not given to the codec because they looked too dense. The reader resets it.
    pub dense_blocks: u64,
}

/// Where the compressed bytes start in `Scratch::packed`.
const BODY: usize = HEAD_MAX.next_multiple_of(64);

/// A dictionary must make a block smaller by this part of its size, or the block is stored without
/// it, because that loads faster.
const CANNED_GAIN: usize = 64;
/// Most room that codecs need beyond their output: lz4 some bytes for its last literals, zstd a
/// block header.
const CODEC_ROOM: usize = 64;
/// The output of the codec alone must be smaller than the planes by this part.
const SHUFFLED_WORTH: usize = 8;

/// What compresses a block.
pub(crate) struct BlockPacker<'a> {
    pub encoder: &'a mut dyn Encoder,
    /// Format of the output without a dictionary.
    pub format: u8,
    /// A dictionary to try, and the format of its output.
    pub dictionary: Option<(u8, &'a DigestedDictionary)>,
    /// Whether blocks of numbers are split into planes.
    pub shuffle: bool,
}

/// A block that is ready to be stored.
pub(crate) enum EncodedBlock {
    /// All zeros.
    Zero,
    /// The payload is `head_len` bytes at `head` (0 unless mixed), then `len` bytes at `body`. Each
    /// lies in the scratch or in the block itself.
    Object {
        format: u8,
        mixed: bool,
        head: *const u8,
        head_len: usize,
        body: *const u8,
        len: usize,
        same_pages: usize,
    },
}

impl EncodeScratch {
    pub fn new(block_order: Order) -> EncodeScratch {
        let block_bytes_max = block_order.bytes();
        // More than any codec needs in the worst case, so that none has to check its output for
        // room.
        let body = block_bytes_max + block_bytes_max / 128 + 1024;
        EncodeScratch {
            packed: vec![0; BODY + body].into_boxed_slice(),
            gathered: PageBuffer::new(block_order),
            plain: vec![0; body].into_boxed_slice(),
            luck: ShrinkHistory::default(),
            planes: vec![0; block_bytes_max].into_boxed_slice(),
            shuffling: Default::default(),
            patterns: vec![0; MAX_PAGES]
                .into_boxed_slice()
                .try_into()
                .expect("the length is the array's"),
            dense_blocks: 0,
        }
    }

    /// Flips a bit of the compressed bytes: damage, for tests.
    pub fn damage(&mut self) {
        self.packed[BODY] ^= 0x10;
    }

    /// Returns the payload whose head has `head_len` bytes.
    fn payload(&self, head_len: usize) -> *const u8 {
        self.packed[BODY - head_len..].as_ptr()
    }
}

/// Compresses the block of `order` at `src`.
///
/// # Safety
/// - `src` points to a block of `order`, page-aligned and readable; no thread writes there while
///   the result is in use.
/// - `scratch` and the packer's encoder were made for blocks of at least that size.
pub(crate) unsafe fn encode(
    scratch: &mut EncodeScratch,
    mut packer: BlockPacker<'_>,
    src: *const u8,
    order: Order,
) -> Result<EncodedBlock, CodecError> {
    let pages = order.pages();
    let mut same_set = BlockSet::EMPTY;
    let mut same_pages = 0;
    for page in 0..pages {
        // SAFETY: the page lies in the block.
        if let Some(pattern) = unsafe { pattern_of(src.add(page * PAGE_SIZE)) } {
            same_set.insert(page);
            scratch.patterns[same_pages] = pattern;
            same_pages += 1;
        }
    }
    if same_pages == 0 {
        // SAFETY: the whole block is to be compressed.
        let outcome =
            unsafe { compress(scratch, &mut packer, CodecInput { at: src, len: order.bytes() })? };
        let (format, body, len) = match outcome {
            Some((format, size)) => (format, scratch.payload(0), size),
            None => (format::NONE, src, order.bytes()),
        };
        return Ok(EncodedBlock::Object {
            format,
            mixed: false,
            head: body,
            head_len: 0,
            body,
            len,
            same_pages,
        });
    }
    if same_pages == pages && scratch.patterns[..pages].iter().all(|p| *p == scratch.patterns[0]) {
        return Ok(one_pattern(scratch, pages));
    }
    // SAFETY: as the caller says.
    unsafe { encode_mixed(scratch, &mut packer, src, pages, &same_set, same_pages) }
}

/// # Safety
/// - As for [`encode`]; `same` has `same_pages` pages, all below `pages`, whose patterns are in the
///   scratch.
unsafe fn encode_mixed(
    scratch: &mut EncodeScratch,
    packer: &mut BlockPacker<'_>,
    src: *const u8,
    pages: usize,
    same: &BlockSet,
    same_pages: usize,
) -> Result<EncodedBlock, CodecError> {
    let head_len = write_head(scratch, same, same_pages, pages);
    let raw_len = (pages - same_pages) * PAGE_SIZE;
    let head = scratch.payload(head_len);
    let (mut format_used, mut body, mut len) = (format::NONE, scratch.payload(0), raw_len);
    if raw_len > 0 {
        // SAFETY: the block is readable, and the scratch was made for it.
        let raw = unsafe { gather(scratch, same, src, pages) };
        // SAFETY: `raw` has `raw_len` readable bytes, of the block or of `gathered`.
        match unsafe { compress(scratch, packer, CodecInput { at: raw, len: raw_len })? } {
            Some(packed) => (format_used, len) = packed,
            // Stored from where they are.
            None => body = raw,
        }
    }
    Ok(EncodedBlock::Object {
        format: format_used,
        mixed: true,
        head,
        head_len,
        body,
        len,
        same_pages,
    })
}

/// Compresses `src` to the scratch body. Returns format and size; `None` if they don't compress
/// enough, or look so. A dictionary is used only if that is smaller than without.
///
/// # Safety
/// - `src` is readable, outside the scratch or in its `gathered`, and no thread writes there.
/// - `scratch` and the packer's encoder were made for at least as many bytes, which are whole pages
///   and not 0.
unsafe fn compress(
    scratch: &mut EncodeScratch,
    packer: &mut BlockPacker<'_>,
    src: CodecInput,
) -> Result<Option<(u8, usize)>, CodecError> {
    // SAFETY: as the caller says.
    if let Some(result) = unsafe { compress_shuffled(scratch, packer, src)? } {
        return Ok(Some(result));
    }
    // SAFETY: as the caller says; whole pages.
    let is_dense = || unsafe { entropy::is_dense(src.at, src.len) };
    if packer.format != format::NONE && !packer.encoder.gives_up_fast() && is_dense() {
        scratch.dense_blocks += 1;
        return Ok(None);
    }
    if let Some((format, dictionary)) = packer.dictionary
        && scratch.luck.tries()
    {
        // SAFETY: as the caller says.
        let with =
            unsafe { compress_with_dictionary(scratch, &mut *packer.encoder, dictionary, src)? };
        scratch.luck.note(matches!(with, DictionaryTry::With(_)));
        match with {
            DictionaryTry::With(size) => return Ok(Some((format, size))),
            DictionaryTry::Without(size) => return Ok(Some((packer.format, size))),
            DictionaryTry::Unknown => {}
        }
    }
    let body = &mut scratch.packed[BODY..];
    // SAFETY: as the caller says; `body` is writable for its length.
    let size = unsafe { packer.encoder.encode(src, CodecOutput::of(body), None)? };
    Ok(size.filter(|size| *size <= huge_threshold(src.len)).map(|size| (packer.format, size)))
}

/// Writes the planes of a block of numbers to the scratch body, unless the codec alone is better.
/// Returns format and size; `None` if it is no such block.
///
/// # Safety
/// - As for [`compress`].
unsafe fn compress_shuffled(
    scratch: &mut EncodeScratch,
    packer: &mut BlockPacker<'_>,
    src: CodecInput,
) -> Result<Option<(u8, usize)>, CodecError> {
    if !packer.shuffle || !scratch.shuffling[0].tries() {
        return Ok(None);
    }
    // SAFETY: as the caller says.
    let Some(plan) = (unsafe { shuffle::plan(src) }) else { return Ok(None) };
    // SAFETY: as the caller says.
    let size = unsafe { shuffled_size(scratch, packer, plan, src)? };
    scratch.shuffling[0].note(size.is_some());
    Ok(size.map(|size| (format::SHUFFLED + packer.format, size)))
}

/// # Safety
/// - As for [`compress`].
unsafe fn shuffled_size(
    scratch: &mut EncodeScratch,
    packer: &mut BlockPacker<'_>,
    plan: ShufflePlan,
    src: CodecInput,
) -> Result<Option<usize>, CodecError> {
    let EncodeScratch {
        packed: packed_bytes,
        planes,
        plain: plain_bytes,
        shuffling: [_, others],
        ..
    } = scratch;
    let codes = packer.format != format::NONE;
    // SAFETY: the caller vouches for `src`; `planes` has room for a block.
    let size = unsafe {
        shuffle::encode(&mut *packer.encoder, codes, plan, src, planes, &mut packed_bytes[BODY..])?
    };
    let Some(size) = size.filter(|size| *size <= huge_threshold(src.len)) else { return Ok(None) };
    if !codes || !others.tries() {
        return Ok(Some(size));
    }
    // Planes load faster, so the codec alone must be smaller by a part.
    let most = size - size / SHUFFLED_WORTH;
    let room = (most + CODEC_ROOM).min(plain_bytes.len());
    // SAFETY: as the caller says; `plain_bytes` is writable for `room` bytes.
    let size_alone =
        unsafe { packer.encoder.encode(src, CodecOutput::of(&mut plain_bytes[..room]), None)? };
    let is_less = size_alone.is_some_and(|size| size <= most);
    others.note(is_less);
    Ok((!is_less).then_some(size))
}

/// The result of a try with a dictionary, in the scratch body, and its size.
enum DictionaryTry {
    With(usize),
    Without(usize),
    /// Nothing: it does not compress enough with the dictionary.
    Unknown,
}

/// Compresses with a dictionary and without, and keeps the smaller result.
///
/// # Safety
/// - As for [`compress`].
unsafe fn compress_with_dictionary(
    scratch: &mut EncodeScratch,
    encoder: &mut dyn Encoder,
    dictionary: &DigestedDictionary,
    src: CodecInput,
) -> Result<DictionaryTry, CodecError> {
    let body = &mut scratch.packed[BODY..];
    // SAFETY: as the caller says; `body` is writable for its length.
    let with = unsafe { encoder.encode(src, CodecOutput::of(body), Some(dictionary))? };
    let Some(with) = with.filter(|size| *size <= huge_threshold(src.len)) else {
        return Ok(DictionaryTry::Unknown);
    };
    // A larger output would lose, so the codec may stop there.
    let most = (with + with / CANNED_GAIN).min(huge_threshold(src.len));
    let room = (most + CODEC_ROOM).min(scratch.plain.len());
    // SAFETY: as the caller says; `plain` is writable for `room` bytes.
    let without =
        unsafe { encoder.encode(src, CodecOutput::of(&mut scratch.plain[..room]), None)? };
    let Some(without) = without.filter(|size| *size <= most) else {
        return Ok(DictionaryTry::With(with));
    };
    scratch.packed[BODY..][..without].copy_from_slice(&scratch.plain[..without]);
    Ok(DictionaryTry::Without(without))
}

/// Writes at least `pages` of the block that `header` describes to their places in `dst`; there is at
/// least one. What other pages hold is undefined, and after an error all are.
///
/// # Safety
/// - `payload` is readable for `header.len` bytes, and no thread writes there meanwhile.
/// - `dst` is writable for a block of `order`, page-aligned; no other thread touches it meanwhile.
pub(crate) unsafe fn decode(
    decoders: &mut DecoderSet,
    header: ObjectHeader,
    payload: *const u8,
    dst: *mut u8,
    order: Order,
    pages: Range<usize>,
) -> Result<(), DecodeError> {
    debug_assert!(!pages.is_empty() && pages.end <= order.pages());
    let len = header.len as usize;
    if header.format == format::SAME {
        if len != 8 || header.mixed {
            return Err(DecodeError::Layout);
        }
        // SAFETY: 8 readable bytes; the caller vouches for `dst`.
        unsafe { fill(dst, pages.end * PAGE_SIZE, payload.cast::<u64>().read_unaligned()) };
        return Ok(());
    }
    if !header.mixed {
        let (from, to) =
            (CodecInput { at: payload, len }, CodecOutput { at: dst, len: order.bytes() });
        // SAFETY: as the caller says.
        return unsafe { decoders.decode(header.format, from, to, bytes_of(pages)) };
    }
    // SAFETY: the payload is `len` readable bytes that no thread writes.
    let bytes = unsafe { core::slice::from_raw_parts(payload, len) };
    let head = SameFilledHead::read(bytes, order.pages()).ok_or(DecodeError::Layout)?;
    let others = order.pages() - head.same.count();
    let body = &bytes[head.len..];
    if others == 0 && !body.is_empty() {
        return Err(DecodeError::Layout);
    }
    let rank = |page: usize| page - (0..page).filter(|page| head.same.contains(*page)).count();
    let ranks = rank(pages.start)..rank(pages.end);
    if !ranks.is_empty() {
        let (from, to) = (
            CodecInput { at: body.as_ptr(), len: body.len() },
            CodecOutput { at: dst, len: others * PAGE_SIZE },
        );
        // SAFETY: `body` is a part of the payload; `others` pages fit the block at `dst`.
        unsafe { decoders.decode(header.format, from, to, bytes_of(ranks.clone()))? };
    }
    // SAFETY: the pages of these ranks at `dst` are the gathered ones of those `pages`.
    unsafe { spread(&head, dst, pages, ranks.end) };
    Ok(())
}

/// Returns the bytes of these pages.
fn bytes_of(pages: Range<usize>) -> Range<usize> {
    pages.start * PAGE_SIZE..pages.end * PAGE_SIZE
}

fn one_pattern(scratch: &mut EncodeScratch, pages: usize) -> EncodedBlock {
    let pattern = scratch.patterns[0];
    if pattern == 0 {
        return EncodedBlock::Zero;
    }
    scratch.packed[BODY..BODY + 8].copy_from_slice(&pattern.to_ne_bytes());
    let body = scratch.payload(0);
    EncodedBlock::Object {
        format: format::SAME,
        mixed: false,
        head: body,
        head_len: 0,
        body,
        len: 8,
        same_pages: pages,
    }
}

/// Writes the list of same-filled pages so that it ends where the body starts. Returns its length.
fn write_head(scratch: &mut EncodeScratch, same: &BlockSet, count: usize, pages: usize) -> usize {
    let patterns = &scratch.patterns[..count];
    let (mode, word_count) = if patterns.iter().all(|p| *p == 0) {
        (MODE_ZERO, 0)
    } else if patterns.iter().all(|p| *p == patterns[0]) {
        (MODE_ONE, 1)
    } else {
        (MODE_EACH, count)
    };
    let bitmap_len = pages.div_ceil(8);
    let len = 1 + bitmap_len + 8 * word_count;
    let head = &mut scratch.packed[BODY - len..BODY];
    head[0] = mode;
    for (i, byte) in head[1..1 + bitmap_len].iter_mut().enumerate() {
        *byte = (same.words()[i / 8] >> (i % 8 * 8)) as u8;
    }
    for (bytes, pattern) in head[1 + bitmap_len..].chunks_exact_mut(8).zip(&patterns[..word_count])
    {
        bytes.copy_from_slice(&pattern.to_ne_bytes());
    }
    len
}

/// Returns the pages that are not same-filled, in one run: in place if they are one already, else
/// copied together.
///
/// # Safety
/// - `src` is readable for `pages` pages; the scratch was made for as many.
unsafe fn gather(
    scratch: &mut EncodeScratch,
    same: &BlockSet,
    src: *const u8,
    pages: usize,
) -> *const u8 {
    let mut others = (0..pages).filter(|p| !same.contains(*p));
    let first = others.next().unwrap_or(0);
    let (count, last) = others.fold((1, first), |(count, _), page| (count + 1, page));
    if last + 1 - first == count {
        // SAFETY: page `first` lies in the block.
        return unsafe { src.add(first * PAGE_SIZE) };
    }
    assert!(count * PAGE_SIZE <= scratch.gathered.len());
    for (rank, page) in (0..pages).filter(|p| !same.contains(*p)).enumerate() {
        let to = scratch.gathered.bytes_mut()[rank * PAGE_SIZE..][..PAGE_SIZE].as_mut_ptr();
        // SAFETY: page `page` lies in the block; `to` has room for a page and lies in another
        // buffer.
        unsafe { core::ptr::copy_nonoverlapping(src.add(page * PAGE_SIZE), to, PAGE_SIZE) };
    }
    scratch.gathered.as_ptr()
}

/// Moves the gathered pages of `pages`, of which the last is before rank `rank_end`, to their positions,
/// and fills the same-filled ones between.
///
/// Goes from the last page to the first: the gathered position of a page is never behind the page
/// itself, so no page is overwritten before it moved.
///
/// # Safety
/// - `dst` is writable for `pages.end` pages, aligned to 8.
/// - `rank_end` is the number of gathered pages before `pages.end`.
unsafe fn spread(head: &SameFilledHead, dst: *mut u8, pages: Range<usize>, rank_end: usize) {
    let (mut same_left, mut others_left) = (pages.end - rank_end, rank_end);
    for page in pages.rev() {
        // SAFETY: `page` and `others_left` are below `pages.end`; different pages do not overlap.
        unsafe {
            let to = dst.add(page * PAGE_SIZE);
            if head.same.contains(page) {
                same_left -= 1;
                fill(to, PAGE_SIZE, head.pattern(same_left));
            } else {
                others_left -= 1;
                if others_left != page {
                    core::ptr::copy_nonoverlapping(dst.add(others_left * PAGE_SIZE), to, PAGE_SIZE);
                }
            }
        }
    }
}

/// A valid list of same-filled pages.
struct SameFilledHead<'a> {
    same: BlockSet,
    mode: u8,
    patterns: &'a [u8],
    len: usize,
}

impl SameFilledHead<'_> {
    fn read(bytes: &[u8], pages: usize) -> Option<SameFilledHead<'_>> {
        let (mode, rest) = bytes.split_first()?;
        let bitmap = rest.get(..pages.div_ceil(8))?;
        let bits = bitmap.iter().enumerate();
        let same_set: BlockSet = bits
            .flat_map(|(i, byte)| {
                (0..8).filter(move |b| byte & 1 << b != 0).map(move |b| i * 8 + b)
            })
            .collect();
        let word_count = match *mode {
            MODE_ZERO => 0,
            MODE_ONE => 1,
            MODE_EACH => same_set.count(),
            _ => return None,
        };
        let patterns = rest.get(bitmap.len()..bitmap.len() + 8 * word_count)?;
        if same_set.end() > pages {
            return None;
        }
        Some(SameFilledHead {
            same: same_set,
            mode: *mode,
            patterns,
            len: 1 + bitmap.len() + patterns.len(),
        })
    }

    /// Returns the pattern of the same-filled page of this rank.
    fn pattern(&self, rank: usize) -> u64 {
        let at = match self.mode {
            MODE_ZERO => return 0,
            MODE_ONE => 0,
            _ => rank * 8,
        };
        let bytes = self.patterns[at..at + 8].try_into();
        u64::from_ne_bytes(bytes.expect("8 bytes"))
    }
}
