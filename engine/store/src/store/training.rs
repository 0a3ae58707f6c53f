//! Canned mode (Z8): dictionaries made from saved blocks, and used where they win.
use crate::block::dictionaries::{DecoderSet, DictionarySet};
use crate::block::{BlockPacker, EncodeScratch, EncodedBlock, encode};
use crate::codec::{CodecSpec, DigestedDictionary};
use crate::dictionary::cover::SampleCover;
use crate::dictionary::{DICTIONARY_BYTES_MAX, Dictionary, DictionaryKind};
use crate::format;
use crate::store::Store;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use memfold_os::page::PageBuffer;
use memfold_os::sync::atomic::Ordering::*;
use memfold_os::units::Order;

/// Share of their size by which a dictionary must make held-out blocks smaller, in percent.
pub const CANNED_MARGIN_PERCENT: u64 = 3;

/// Multiple of its own memory that a dictionary must save of the memory that pools hold now.
const WORTH: u64 = 2;

/// Sizes to try: bytes of the dictionary, bytes of a piece.
const TRIED: &[(usize, usize)] =
    &[(64 << 10, 1024), (64 << 10, 256), (64 << 10, 64), (16 << 10, 256), (16 << 10, 64)];

/// Why a dictionary can't be used.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum CannedError {
    /// The store's codec takes no dictionary of that kind, or finds it damaged.
    Codec(CodecSpec),
    /// Eight dictionaries are in use by objects.
    Slots,
}

/// Sizes of compressed blocks.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct SizeComparison {
    /// Without a dictionary.
    pub off: u64,
    /// With it.
    pub on: u64,
}

impl SizeComparison {
    /// Returns whether the dictionary wins by the margin.
    pub fn wins(&self) -> bool {
        self.on * 100 < self.off * (100 - CANNED_MARGIN_PERCENT)
    }
}

/// The result of a round of canned mode.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum CannedStep {
    /// Nothing: canned mode is off, too little is sampled yet, or there is nothing new to judge.
    Nothing,
    /// A new dictionary is used from now on.
    Installed(SizeComparison),
    /// The present one still wins and is kept.
    Kept(SizeComparison),
    /// No dictionary wins; none is used from now on. Holds the best one's comparison.
    Off(SizeComparison),
}

/// Compresses blocks for the comparison.
pub struct DictionaryTrial {
    spec: CodecSpec,
    order: Order,
    scratch: EncodeScratch,
    buffer: PageBuffer,
    encoder: alloc::boxed::Box<dyn crate::codec::Encoder>,
}

impl DictionaryTrial {
    /// Makes one for blocks of `order`.
    pub fn new(spec: CodecSpec, order: Order) -> DictionaryTrial {
        let (scratch, encoder) = (EncodeScratch::new(order), spec.encoder(order.bytes()));
        DictionaryTrial { spec, order, scratch, buffer: PageBuffer::new(order), encoder }
    }

    /// Returns the payload bytes of `blocks` without a dictionary.
    pub fn without<'a>(&mut self, blocks: impl Iterator<Item = &'a [u8]>) -> u64 {
        blocks.map(|block| self.size(block, None)).sum()
    }

    /// Returns the payload bytes of `blocks` with `dictionary`, or `None` if the codec can't use
    /// it.
    pub fn with<'a>(
        &mut self,
        blocks: impl Iterator<Item = &'a [u8]>,
        dictionary: &Dictionary,
    ) -> Option<u64> {
        let digest = self.spec.digest(dictionary, self.order.bytes())?;
        Some(blocks.map(|block| self.size(block, Some(&digest))).sum())
    }

    /// Returns the dictionary of several that makes `blocks` smallest, and their size.
    pub fn best<'a>(
        &mut self,
        blocks: impl Iterator<Item = &'a [u8]> + Clone,
        dictionaries: impl Iterator<Item = Dictionary>,
    ) -> Option<(u64, Dictionary)> {
        let candidates = dictionaries.filter_map(|d| Some((self.with(blocks.clone(), &d)?, d)));
        candidates.min_by_key(|(bytes, _)| *bytes)
    }

    fn size(&mut self, block: &[u8], dictionary: Option<&DigestedDictionary>) -> u64 {
        assert!(block.len() == self.order.bytes());
        // SAFETY: the buffer has room for a block of the order; then it is a whole block that no
        // thread writes, and scratch and encoder were made for it.
        let block_encoded = unsafe {
            core::ptr::copy_nonoverlapping(block.as_ptr(), self.buffer.as_mut_ptr(), block.len());
            let dictionary = dictionary.map(|digest| (format::CANNED, digest));
            let packer = BlockPacker {
                encoder: &mut *self.encoder,
                format: self.spec.format(),
                dictionary,
                shuffle: self.spec.shuffles(),
            };
            encode(&mut self.scratch, packer, self.buffer.as_ptr(), self.order)
        };
        match block_encoded {
            Ok(EncodedBlock::Zero) => 0,
            Ok(EncodedBlock::Object { head_len, len, .. }) => (head_len + len) as u64,
            Err(_) => block.len() as u64,
        }
    }
}

/// Makes dictionaries of raw content from samples of `sample_bytes` each, for a [`DictionaryTrial`] to judge.
pub fn raw_dictionaries(samples: &[u8], sample_bytes: usize) -> impl Iterator<Item = Dictionary> {
    let cover = SampleCover::new(samples, sample_bytes);
    TRIED.iter().filter_map(move |(bytes, piece)| {
        let content = cover.choose((*bytes).min(DICTIONARY_BYTES_MAX), *piece);
        Dictionary::new(DictionaryKind::Raw, content).ok()
    })
}

impl Store {
    /// Compresses with `dictionary` from now on, in workers of the store's present codec.
    ///
    /// Existing objects keep theirs, which is freed when none uses it.
    ///
    /// # Errors
    /// The codec can't use it, or too many old ones are in use.
    pub fn install_dictionary(&self, dictionary: &Dictionary) -> Result<(), CannedError> {
        let spec = self.codec();
        let digest =
            spec.digest(dictionary, self.block_order.bytes()).ok_or(CannedError::Codec(spec))?;
        self.reap_dictionaries();
        if self.cans.install(spec, digest) { Ok(()) } else { Err(CannedError::Slots) }
    }

    /// Returns whether a dictionary would save more than its own memory, by what the pools hold
    /// now.
    fn is_worth_it(&self, dictionary: &Dictionary, comparison: SizeComparison) -> bool {
        let Some(digest) = self.codec().digest(dictionary, self.block_order.bytes()) else {
            return false;
        };
        let bytes_saved = self.pool_bytes() as u128 * (comparison.off - comparison.on) as u128
            / comparison.off as u128;
        bytes_saved >= (WORTH * digest.bytes as u64) as u128
    }

    /// Compresses without a dictionary from now on.
    pub fn retire_dictionary(&self) {
        self.cans.retire();
    }

    /// Frees dictionaries that no object uses. Returns their number. For a background thread: this
    /// is the only place that frees them.
    pub fn reap_dictionaries(&self) -> usize {
        self.cans.reap(|slot| {
            self.pools.iter().map(|pool| pool.counters.dictionary_objects[slot].load(SeqCst)).sum()
        })
    }

    /// Returns the number of dictionaries, with old ones, and their bytes of memory.
    pub fn dictionaries(&self) -> (usize, u64) {
        (self.cans.count(), self.cans.bytes())
    }

    /// Turns the making of dictionaries from saved blocks on or off. [`Store::canned_step`] does
    /// the work. After turning off, the present dictionary stays in use.
    pub fn set_canned(&self, on: bool) {
        self.sampler.set_on(on);
    }

    /// Does one round of canned mode, for a background thread: takes samples, makes dictionaries of
    /// them, judges them, and frees old ones. Takes some 100 ms when there is something to judge.
    /// Allocates.
    pub fn canned_step(&self) -> CannedStep {
        self.reap_dictionaries();
        let Some(samples) =
            self.sampler.collect(self.counters.iter().map(|c| c.blocks_saved.load(Relaxed)).sum())
        else {
            return CannedStep::Nothing;
        };
        let (spec, order) = (self.codec(), samples.order);
        let blocks = samples.bytes.chunks_exact(order.bytes()).enumerate();
        let (teach, judge): (Vec<_>, Vec<_>) = blocks.partition(|(nth, _)| nth % 4 != 3);
        let teach = teach.iter().flat_map(|(_, block)| block.iter().copied()).collect::<Vec<u8>>();
        let judge = judge.iter().map(|(_, block)| *block);
        let mut trial = DictionaryTrial::new(spec, order);
        let off = trial.without(judge.clone());
        let present = self
            .cans
            .current(spec)
            .map(|digest| judge.clone().map(|b| trial.size(b, Some(&digest))).sum());
        let best = trial.best(judge, raw_dictionaries(&teach, order.bytes()));
        self.decide(off, present, best)
    }

    fn decide(
        &self,
        off: u64,
        present: Option<u64>,
        best: Option<(u64, Dictionary)>,
    ) -> CannedStep {
        // A new one must beat the present one by the margin too.
        if let Some((on, dictionary)) = &best
            && (SizeComparison { off, on: *on }).wins()
            && self.is_worth_it(dictionary, SizeComparison { off, on: *on })
            && present.is_none_or(|present| (SizeComparison { off: present, on: *on }).wins())
            && self.install_dictionary(dictionary).is_ok()
        {
            return CannedStep::Installed(SizeComparison { off, on: *on });
        }
        let comparison_kept = present.map(|on| SizeComparison { off, on });
        if let Some(comparison) = comparison_kept.filter(SizeComparison::wins) {
            return CannedStep::Kept(comparison);
        }
        self.cans.retire();
        CannedStep::Off(SizeComparison { off, on: best.map_or(off, |(on, _)| on) })
    }
}

impl fmt::Display for CannedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CannedError::Codec(spec) => {
                write!(
                    f,
                    "codec {spec} can't use the dictionary: lz4 takes raw ones, zstd also those it trained"
                )
            }
            CannedError::Slots => write!(f, "too many old dictionaries are still in use"),
        }
    }
}

impl core::error::Error for CannedError {}

const _: () = {
    const fn is_shared<T: Send + Sync>() {}
    is_shared::<Arc<DictionarySet>>();
    const fn is_sent<T: Send>() {}
    is_sent::<DecoderSet>();
};
