//! A dictionary prepared for Zstandard.
use crate::dictionary::DictionaryKind;
use alloc::boxed::Box;
use alloc::vec;
use zstd_safe::zstd_sys as c;

/// A dictionary and zstd's tables of it, for one level.
pub(crate) struct ZstdDictionary {
    pub(super) cdict: *const c::ZSTD_CDict,
    pub(super) ddict: *const c::ZSTD_DDict,
    /// The memory of the two; freed with them and the content that they refer to.
    workspaces: [Box<[u64]>; 2],
    _content: Box<[u8]>,
}

// SAFETY: after their creation both tables are only read, by any number of threads, as zstd
// documents; they lie in boxes that travel with them.
unsafe impl Send for ZstdDictionary {}
// SAFETY: after their creation both tables are only read, by any number of threads, as zstd
// documents; they lie in boxes that travel with them.
unsafe impl Sync for ZstdDictionary {}

impl ZstdDictionary {
    /// Prepares a dictionary. Returns `None` if zstd finds it damaged.
    pub fn new(
        content: Box<[u8]>,
        kind: DictionaryKind,
        level: i32,
        block_bytes_max: usize,
    ) -> Option<ZstdDictionary> {
        let by_ref = c::ZSTD_dictLoadMethod_e::ZSTD_dlm_byRef;
        let kind = match kind {
            DictionaryKind::Raw => c::ZSTD_dictContentType_e::ZSTD_dct_rawContent,
            DictionaryKind::Zstd => c::ZSTD_dictContentType_e::ZSTD_dct_fullDict,
        };
        let (at, len) = (content.as_ptr().cast(), content.len());
        let parameters = parameters(level, block_bytes_max, len);
        // SAFETY: these take plain values and return numbers.
        let sizes = unsafe {
            [
                c::ZSTD_estimateCDictSize_advanced(len, parameters, by_ref),
                c::ZSTD_estimateDDictSize(len, by_ref),
            ]
        };
        let mut workspaces = sizes.map(|bytes| vec![0u64; bytes.div_ceil(8)].into_boxed_slice());
        let [for_c, for_d] = &mut workspaces;
        // SAFETY: the workspaces are aligned to 8 and as long as said, the content is readable; all
        // are moved only as boxes, so their bytes stay in place as long as the tables are used.
        let (cdict, ddict) = unsafe {
            let bytes = for_c.len() * 8;
            let cdict = c::ZSTD_initStaticCDict(
                for_c.as_mut_ptr().cast(),
                bytes,
                at,
                len,
                by_ref,
                kind,
                parameters,
            );
            let bytes = for_d.len() * 8;
            (
                cdict,
                c::ZSTD_initStaticDDict(for_d.as_mut_ptr().cast(), bytes, at, len, by_ref, kind),
            )
        };
        if cdict.is_null() || ddict.is_null() {
            return None;
        }
        Some(ZstdDictionary { cdict, ddict, workspaces, _content: content })
    }

    /// Returns the bytes of memory besides the content.
    pub fn bytes(&self) -> usize {
        self.workspaces.iter().map(|w| w.len() * 8).sum()
    }
}

/// Returns parameters for blocks of this size with a dictionary of that size, 0 for none.
pub(super) fn parameters(
    level: i32,
    block_bytes: usize,
    dictionary_bytes: usize,
) -> c::ZSTD_compressionParameters {
    // SAFETY: takes plain numbers and returns plain values.
    unsafe { c::ZSTD_getCParams(level, block_bytes as u64, dictionary_bytes) }
}
