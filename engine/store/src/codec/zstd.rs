//! Zstandard, with contexts in memory that is allocated once: static contexts never allocate.
use super::coder::{
    CodecError, CodecInput, CodecOutput, DecodeResult, Decoder, EncodeResult, Encoder,
};
use super::dictionary::{CodecDigest, DigestedDictionary};
use super::zstd_dictionary::parameters;
use crate::dictionary::DICTIONARY_BYTES_MAX;
use alloc::boxed::Box;
use alloc::vec;
use memfold_os::units::PAGE_SIZE;
use zstd_safe::zstd_sys as c;

struct ZstdEncoder {
    cctx: *mut c::ZSTD_CCtx,
    /// Holds the context; never touched directly, freed with the encoder.
    _workspace: Box<[u64]>,
}

struct ZstdDecoder {
    dctx: *mut c::ZSTD_DCtx,
    /// Holds the context; never touched directly, freed with the decoder.
    _workspace: Box<[u64]>,
}

// SAFETY: a context lives in the boxed workspace that travels with it, and is only used through
// `&mut self`.
unsafe impl Send for ZstdEncoder {}
// SAFETY: a context lives in the boxed workspace that travels with it, and is only used through
// `&mut self`.
unsafe impl Send for ZstdDecoder {}

pub(super) fn encoder(level: i32, block_bytes_max: usize) -> Box<dyn Encoder> {
    let mut workspace =
        vec![0u64; workspace_bytes(level, block_bytes_max).div_ceil(8)].into_boxed_slice();
    // SAFETY: the workspace is aligned to 8 and as long as said; it is moved only as a box, so its
    // bytes stay in place as long as the context is used. Setting the level of a fresh context only
    // writes to the context.
    let cctx = unsafe {
        let cctx = c::ZSTD_initStaticCCtx(workspace.as_mut_ptr().cast(), workspace.len() * 8);
        assert!(!cctx.is_null(), "zstd refused a workspace of its own estimate");
        for (parameter, value) in [
            (c::ZSTD_cParameter::ZSTD_c_compressionLevel, level),
            // The object's format names the dictionary.
            (c::ZSTD_cParameter::ZSTD_c_dictIDFlag, 0),
        ] {
            let set = c::ZSTD_CCtx_setParameter(cctx, parameter, value);
            assert!(c::ZSTD_isError(set) == 0, "zstd refused {parameter:?} = {value}");
        }
        cctx
    };
    Box::new(ZstdEncoder { cctx, _workspace: workspace })
}

pub(super) fn decoder() -> Box<dyn Decoder> {
    // SAFETY: takes nothing and returns a number.
    let bytes = unsafe { c::ZSTD_estimateDCtxSize() };
    let mut workspace = vec![0u64; bytes.div_ceil(8)].into_boxed_slice();
    // SAFETY: the workspace is aligned to 8 and has the stated length. It is moved only as a box,
    // so its bytes stay in place as long as the context is used.
    let dctx =
        unsafe { c::ZSTD_initStaticDCtx(workspace.as_mut_ptr().cast(), workspace.len() * 8) };
    assert!(!dctx.is_null(), "zstd refused a workspace of its own estimate");
    Box::new(ZstdDecoder { dctx, _workspace: workspace })
}

/// Returns the memory that compressing any number of pages up to `block_bytes_max` needs at
/// `level`.
///
/// zstd chooses other tables for other input sizes, and a larger input may need less than a smaller
/// one.
fn workspace_bytes(level: i32, block_bytes_max: usize) -> usize {
    let pages = block_bytes_max.div_ceil(PAGE_SIZE).max(1);
    // SAFETY: takes and returns plain values.
    let size = |parameters| unsafe { c::ZSTD_estimateCCtxSize_usingCParams(parameters) };
    let estimate = |pages: usize| {
        let size_without = size(parameters(level, pages * PAGE_SIZE, 0));
        size_without.max(size(parameters(level, pages * PAGE_SIZE, DICTIONARY_BYTES_MAX)))
    };
    (1..=pages).map(estimate).max().unwrap_or(0)
}

impl Encoder for ZstdEncoder {
    unsafe fn encode(
        &mut self,
        src: CodecInput,
        dst: CodecOutput,
        dictionary: Option<&DigestedDictionary>,
    ) -> EncodeResult {
        let cdict = match dictionary.map(|c| &c.digest) {
            Some(CodecDigest::Zstd(dictionary)) => dictionary.cdict,
            _ => core::ptr::null(),
        };
        // SAFETY: the context is alive and exclusively borrowed; the caller vouches for both
        // ranges, and for a dictionary that lives during the call. The next call sets another one,
        // or none.
        let size = unsafe {
            // A call that ran out of room leaves its frame open, and no dictionary can be set then.
            c::ZSTD_CCtx_reset(self.cctx, c::ZSTD_ResetDirective::ZSTD_reset_session_only);
            let set = c::ZSTD_CCtx_refCDict(self.cctx, cdict);
            if c::ZSTD_isError(set) != 0 {
                set
            } else {
                c::ZSTD_compress2(self.cctx, dst.at.cast(), dst.len, src.at.cast(), src.len)
            }
        };
        match error_of(size) {
            None if size <= dst.len => Ok(Some(size)),
            Some(c::ZSTD_ErrorCode::ZSTD_error_dstSize_tooSmall) => Ok(None),
            Some(code) => Err(CodecError(code as i64)),
            None => Err(CodecError(size as i64)),
        }
    }
}

impl Decoder for ZstdDecoder {
    unsafe fn decode(
        &mut self,
        src: CodecInput,
        dst: CodecOutput,
        dictionary: Option<&DigestedDictionary>,
    ) -> DecodeResult {
        // SAFETY: the context is alive and exclusively borrowed; the caller vouches for both
        // ranges, and zstd stays within them whatever the input.
        let size = unsafe {
            let (to, from) = (dst.at.cast(), src.at.cast());
            match dictionary.map(|c| &c.digest) {
                Some(CodecDigest::Zstd(dictionary)) => c::ZSTD_decompress_usingDDict(
                    self.dctx,
                    to,
                    dst.len,
                    from,
                    src.len,
                    dictionary.ddict,
                ),
                _ => c::ZSTD_decompressDCtx(self.dctx, to, dst.len, from, src.len),
            }
        };
        match error_of(size) {
            None if size == dst.len => Ok(()),
            None => Err(CodecError(size as i64)),
            Some(code) => Err(CodecError(code as i64)),
        }
    }
}

fn error_of(size: usize) -> Option<c::ZSTD_ErrorCode> {
    // SAFETY: both take a plain number and return one.
    unsafe { (c::ZSTD_isError(size) != 0).then(|| c::ZSTD_getErrorCode(size)) }
}
