//! Delta: a codec for pages of memory. Each 64-byte line is stored as its difference (xor) from an
//! earlier one.
//!
//! Objects of a heap repeat at fixed distances: the same pointers, the same upper bytes, small numbers.
//! LZ4 looks for equal runs of bytes, one after another, which takes 4 us a page. This codec chooses up
//! to 15 distances for a page, predicts each line at one of them, and stores the bytes that differ. It
//! has no loop over matches and almost no branch, so it takes 0.8 us (`layout.rs`: the format, `votes.rs`:
//! the distances, `form.rs`: the instructions).
//!
//! It builds on known ideas: words that are almost equal to earlier ones (WKdm, Wilson, Kaplan and
//! Smaragdakis 1999), lines as small differences from a base (BDI, Pekhimenko and others 2012), and xor
//! with a predicted word of which only the bytes that are not 0 are kept (FPC, Burtscher and Ratanaworabhan
//! 2009; Gorilla, Pelkonen and others 2015).
//!
//! # Blocks
//! A block is its pages, one by one, so each can be decoded without the others:
//!
//! ```text
//! version and shape 1 byte | length and kind of each page, 2 bytes each | pages
//! ```
//!
//! A page is stored raw, by its lines, or by LZ4. Most text does not repeat at fixed distances. A block
//! whose pages mostly look like text (`text.rs`) is compressed as one by LZ4. So is a block that is not
//! whole pages, and every block where the processor has no fast instructions for this codec. With a
//! dictionary, the output is LZ4's, in its own format.
mod layout;
mod votes;
mod avx2;
mod avx512;
mod form;
mod text;
mod pages;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
#[cfg(test)]
mod tests;

use self::form::Form;
use self::pages::{PageEncoder, PageTable};
use super::coder::{
    CodecError, CodecInput, CodecOutput, DecodeResult, Decoder, EncodeResult, Encoder,
};
use super::dictionary::DigestedDictionary;
use super::lz4;
use crate::format::huge_threshold;
use alloc::boxed::Box;
use core::ops::Range;
use memfold_os::units::PAGE_SIZE;

/// The version of the format, in the upper half of the first byte.
const VERSION: u8 = 1 << 4;
/// The pages of the block, one by one.
const PAGES: u8 = VERSION;
/// One LZ4 block.
const WHOLE: u8 = VERSION | 1;
/// A damaged payload: its first byte, the table of its pages, or a page.
const DAMAGED: CodecError = CodecError(-1);

struct DeltaEncoder {
    pages: PageEncoder,
    whole: Box<dyn Encoder>,
}

struct DeltaDecoder {
    form: Form,
    lz4: Box<dyn Decoder>,
}

pub(super) fn encoder(_level: i32, block_bytes_max: usize) -> Box<dyn Encoder> {
    Box::new(DeltaEncoder {
        pages: PageEncoder::new(Form::best()),
        whole: lz4::encoder(1, block_bytes_max),
    })
}

pub(super) fn decoder() -> Box<dyn Decoder> {
    Box::new(DeltaDecoder { form: Form::best(), lz4: lz4::decoder() })
}

impl DeltaEncoder {
    /// Compresses the block as one by LZ4.
    ///
    /// # Safety
    /// - As for [`Encoder::encode`].
    unsafe fn encode_whole(&mut self, src: CodecInput, dst: CodecOutput) -> EncodeResult {
        let Some(room) = dst.len.checked_sub(1) else { return Ok(None) };
        // SAFETY: the caller vouches for both; one byte of `dst` is the first.
        let size = unsafe {
            dst.at.write(WHOLE);
            self.whole.encode(src, CodecOutput { at: dst.at.add(1), len: room }, None)?
        };
        Ok(size.map(|size| size + 1))
    }
}

impl Encoder for DeltaEncoder {
    unsafe fn encode(
        &mut self,
        src: CodecInput,
        dst: CodecOutput,
        dictionary: Option<&DigestedDictionary>,
    ) -> EncodeResult {
        // SAFETY: as the caller says; whole pages where the encoder of pages needs them.
        unsafe {
            if dictionary.is_some() {
                return self.whole.encode(src, dst, dictionary);
            }
            if !self.pages.encodes() || src.len == 0 || !src.len.is_multiple_of(PAGE_SIZE) {
                return self.encode_whole(src, dst);
            }
            let is_text = pages::looks_like_text(src);
            if is_text {
                let room = dst.len.min(huge_threshold(src.len));
                let size = self.encode_whole(src, CodecOutput { at: dst.at, len: room })?;
                if size.is_some() {
                    return Ok(size);
                }
            }
            self.pages.encode(src, dst, is_text)
        }
    }

    // A dense page costs a sample, and a look at a quarter of its lines.
    fn gives_up_fast(&self) -> bool {
        true
    }
}

impl Decoder for DeltaDecoder {
    unsafe fn decode(
        &mut self,
        src: CodecInput,
        dst: CodecOutput,
        _dictionary: Option<&DigestedDictionary>,
    ) -> DecodeResult {
        // SAFETY: as the caller says.
        unsafe { self.decode_range(src, dst, 0..dst.len) }
    }

    unsafe fn decode_part(
        &mut self,
        src: CodecInput,
        dst: CodecOutput,
        part: Range<usize>,
        _dictionary: Option<&DigestedDictionary>,
    ) -> DecodeResult {
        // SAFETY: as the caller says.
        unsafe { self.decode_range(src, dst, part) }
    }
}

impl DeltaDecoder {
    /// Decodes at least the bytes of `part` to their places in `dst`.
    ///
    /// # Safety
    /// - As for [`Decoder::decode_part`]; the part may be all of `dst`.
    unsafe fn decode_range(
        &mut self,
        src: CodecInput,
        dst: CodecOutput,
        part: Range<usize>,
    ) -> DecodeResult {
        // SAFETY: the caller vouches for `src`, which no thread writes.
        let payload = unsafe { core::slice::from_raw_parts(src.at, src.len) };
        match payload.split_first() {
            Some((&WHOLE, rest)) => {
                let src = CodecInput { at: rest.as_ptr(), len: rest.len() };
                // SAFETY: as the caller says.
                unsafe {
                    match part.end == dst.len {
                        true => self.lz4.decode(src, dst, None),
                        false => self.lz4.decode_part(src, dst, 0..part.end, None),
                    }
                }
            }
            Some((&PAGES, rest)) => {
                let table = PageTable::read(rest, dst.len).ok_or(DAMAGED)?;
                let pages = part.start / PAGE_SIZE..part.end.div_ceil(PAGE_SIZE);
                for (page, payload) in pages.clone().zip(table.pages(pages)) {
                    // SAFETY: the table says that `dst` is whole pages, and `page` is one of them; the
                    // caller vouches for it.
                    unsafe {
                        let to = dst.at.add(page * PAGE_SIZE);
                        pages::decode(self.form, &mut *self.lz4, payload, to)?;
                    }
                }
                Ok(())
            }
            _ => Err(DAMAGED),
        }
    }
}
