//! Zstandard, with contexts in memory that is taken once: static contexts never allocate.
use super::{Canned, CodecError, Decoder, Digest as AnyDigest, Encoder};
use crate::dictionary::{DICTIONARY_BYTES_MAX, DictionaryKind};
use alloc::boxed::Box;
use alloc::vec;
use memfold_sys::units::PAGE_SIZE;
use zstd_safe::zstd_sys as c;

/// A dictionary and zstd's tables of it, for one level.
pub(crate) struct Digest {
    cdict: *const c::ZSTD_CDict,
    ddict: *const c::ZSTD_DDict,
    /// Hold the two; they and the content that they refer to are freed with this.
    workspaces: [Box<[u64]>; 2],
    _content: Box<[u8]>,
}

// SAFETY: both tables are only read once they are made, by any number of threads, as zstd documents; they lie in boxes
// that travel with them.
unsafe impl Send for Digest {}
// SAFETY: as above.
unsafe impl Sync for Digest {}

impl Digest {
    /// `None` if zstd finds the dictionary damaged.
    pub fn new(content: Box<[u8]>, kind: DictionaryKind, level: i32, block_bytes_max: usize) -> Option<Digest> {
        let by_ref = c::ZSTD_dictLoadMethod_e::ZSTD_dlm_byRef;
        let kind = match kind {
            DictionaryKind::Raw => c::ZSTD_dictContentType_e::ZSTD_dct_rawContent,
            DictionaryKind::Zstd => c::ZSTD_dictContentType_e::ZSTD_dct_fullDict,
        };
        let (at, len) = (content.as_ptr().cast(), content.len());
        let parameters = canned_parameters(level, block_bytes_max, len);
        // SAFETY: these take plain values and return numbers.
        let sizes = unsafe {
            [c::ZSTD_estimateCDictSize_advanced(len, parameters, by_ref), c::ZSTD_estimateDDictSize(len, by_ref)]
        };
        let mut workspaces = sizes.map(|bytes| vec![0u64; bytes.div_ceil(8)].into_boxed_slice());
        let [for_c, for_d] = &mut workspaces;
        // SAFETY: the workspaces are aligned to 8 and as long as said, the content is readable; all are moved only as
        // boxes, so their bytes stay in place as long as the tables are used.
        let (cdict, ddict) = unsafe {
            let bytes = for_c.len() * 8;
            let cdict = c::ZSTD_initStaticCDict(for_c.as_mut_ptr().cast(), bytes, at, len, by_ref, kind, parameters);
            let bytes = for_d.len() * 8;
            (cdict, c::ZSTD_initStaticDDict(for_d.as_mut_ptr().cast(), bytes, at, len, by_ref, kind))
        };
        if cdict.is_null() || ddict.is_null() {
            return None;
        }
        Some(Digest { cdict, ddict, workspaces, _content: content })
    }

    /// Bytes of memory besides the content.
    pub fn bytes(&self) -> usize {
        self.workspaces.iter().map(|w| w.len() * 8).sum()
    }
}

fn canned_parameters(level: i32, block_bytes: usize, dictionary_bytes: usize) -> c::ZSTD_compressionParameters {
    // SAFETY: takes plain numbers and returns plain values.
    unsafe { c::ZSTD_getCParams(level, block_bytes as u64, dictionary_bytes) }
}

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

// SAFETY: a context lives in the boxed workspace that travels with it, and is only used through `&mut self`.
unsafe impl Send for ZstdEncoder {}
// SAFETY: as above.
unsafe impl Send for ZstdDecoder {}

pub(super) fn encoder(level: i32, block_bytes_max: usize) -> Box<dyn Encoder> {
    let mut workspace = vec![0u64; workspace_bytes(level, block_bytes_max).div_ceil(8)].into_boxed_slice();
    // SAFETY: the workspace is aligned to 8 and as long as said; it is moved only as a box, so its bytes stay in place
    // as long as the context is used. Setting the level of a fresh context only writes to the context.
    let cctx = unsafe {
        let cctx = c::ZSTD_initStaticCCtx(workspace.as_mut_ptr().cast(), workspace.len() * 8);
        assert!(!cctx.is_null(), "zstd refused a workspace of its own estimate");
        for (parameter, value) in [
            (c::ZSTD_cParameter::ZSTD_c_compressionLevel, level),
            // The object's format says which dictionary.
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
    // SAFETY: as for the encoder.
    let dctx = unsafe { c::ZSTD_initStaticDCtx(workspace.as_mut_ptr().cast(), workspace.len() * 8) };
    assert!(!dctx.is_null(), "zstd refused a workspace of its own estimate");
    Box::new(ZstdDecoder { dctx, _workspace: workspace })
}

/// The memory that compressing any number of pages up to `block_bytes_max` needs at `level`.
///
/// zstd chooses other tables for other input sizes, and a larger input may need less than a smaller one.
fn workspace_bytes(level: i32, block_bytes_max: usize) -> usize {
    let pages = block_bytes_max.div_ceil(PAGE_SIZE).max(1);
    // SAFETY: takes and returns plain values.
    let size = |parameters| unsafe { c::ZSTD_estimateCCtxSize_usingCParams(parameters) };
    let estimate = |pages: usize| {
        let plain = size(canned_parameters(level, pages * PAGE_SIZE, 0));
        plain.max(size(canned_parameters(level, pages * PAGE_SIZE, DICTIONARY_BYTES_MAX)))
    };
    (1..=pages).map(estimate).max().unwrap_or(0)
}

impl Encoder for ZstdEncoder {
    unsafe fn encode(
        &mut self,
        src: *const u8,
        len: usize,
        dst: *mut u8,
        room: usize,
        canned: Option<&Canned>,
    ) -> Result<Option<usize>, CodecError> {
        let cdict = match canned.map(|c| &c.digest) {
            Some(AnyDigest::Zstd(digest)) => digest.cdict,
            _ => core::ptr::null(),
        };
        // SAFETY: the context is alive and exclusively borrowed; the caller vouches for both ranges, and for a dictionary
        // that lives during the call. The next call sets another one, or none.
        let size = unsafe {
            // A call that ran out of room leaves its frame open, and no dictionary can be set then.
            c::ZSTD_CCtx_reset(self.cctx, c::ZSTD_ResetDirective::ZSTD_reset_session_only);
            let set = c::ZSTD_CCtx_refCDict(self.cctx, cdict);
            if c::ZSTD_isError(set) != 0 {
                set
            } else {
                c::ZSTD_compress2(self.cctx, dst.cast(), room, src.cast(), len)
            }
        };
        match error_of(size) {
            None if size <= room => Ok(Some(size)),
            Some(c::ZSTD_ErrorCode::ZSTD_error_dstSize_tooSmall) => Ok(None),
            Some(code) => Err(CodecError(code as i64)),
            None => Err(CodecError(size as i64)),
        }
    }
}

impl Decoder for ZstdDecoder {
    unsafe fn decode(
        &mut self,
        src: *const u8,
        len: usize,
        dst: *mut u8,
        raw_len: usize,
        canned: Option<&Canned>,
    ) -> Result<(), CodecError> {
        // SAFETY: the context is alive and exclusively borrowed; the caller vouches for both ranges, and zstd stays
        // within them whatever the input.
        let size = unsafe {
            let (dst, src) = (dst.cast(), src.cast());
            match canned.map(|c| &c.digest) {
                Some(AnyDigest::Zstd(digest)) => {
                    c::ZSTD_decompress_usingDDict(self.dctx, dst, raw_len, src, len, digest.ddict)
                }
                _ => c::ZSTD_decompressDCtx(self.dctx, dst, raw_len, src, len),
            }
        };
        match error_of(size) {
            None if size == raw_len => Ok(()),
            None => Err(CodecError(size as i64)),
            Some(code) => Err(CodecError(code as i64)),
        }
    }
}

fn error_of(size: usize) -> Option<c::ZSTD_ErrorCode> {
    // SAFETY: both take a plain number and return one.
    unsafe { (c::ZSTD_isError(size) != 0).then(|| c::ZSTD_getErrorCode(size)) }
}
