//! Dictionaries in use: the list, the one that saves take, and when an old one can be freed.
//!
//! Each dictionary has a slot, and objects compressed with it have the slot's format id. Workers
//! keep their own list and renew it when the epoch has changed, so using a dictionary costs no
//! shared write. A dictionary is freed when saves take another one (or none), no object uses it,
//! and no worker lists it. Then no worker can store an object with it, and no such object can be
//! loaded. The registry holds the last reference, so workers never free memory.
use crate::block::error::DecodeError;
use crate::block::shuffle;
use crate::codec::{CodecInput, CodecOutput, CodecSpec, Decoder, DigestedDictionary, decoders};
use crate::format;
use crate::pool::budget::PoolBudget;
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec;
use core::ops::Range;
use memfold_os::sync::Mutex;
use memfold_os::sync::atomic::{AtomicU64, Ordering::*, fence};

type Slots = [Option<Arc<DigestedDictionary>>; format::CANNED_SLOTS];

/// The dictionaries of a store.
pub(crate) struct DictionarySet {
    list: Mutex<DictionaryList>,
    /// Changes with the list.
    epoch: AtomicU64,
    bytes: AtomicU64,
    budget: Arc<PoolBudget>,
}

#[derive(Default)]
struct DictionaryList {
    slots: Slots,
    current: Option<SaveDictionary>,
}

/// The dictionary that saves take.
#[derive(Copy, Clone, PartialEq, Eq)]
struct SaveDictionary {
    slot: u8,
    spec: CodecSpec,
}

impl DictionarySet {
    pub fn new(budget: Arc<PoolBudget>) -> DictionarySet {
        DictionarySet {
            list: Mutex::new(DictionaryList::default()),
            epoch: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            budget,
        }
    }

    /// Makes `dictionary` the dictionary of saves with `spec`. Returns `false` if all slots are taken.
    pub fn install(&self, spec: CodecSpec, dictionary: DigestedDictionary) -> bool {
        let mut list = self.list.lock();
        let Some(slot) = list.slots.iter().position(Option::is_none) else { return false };
        self.bytes.fetch_add(dictionary.bytes as u64, Relaxed);
        self.budget.charge(dictionary.bytes as u64);
        list.slots[slot] = Some(Arc::new(dictionary));
        list.current = Some(SaveDictionary { slot: slot as u8, spec });
        self.epoch.fetch_add(1, Release);
        true
    }

    /// Makes saves continue without a dictionary.
    pub fn retire(&self) {
        let mut list = self.list.lock();
        list.current = None;
        self.epoch.fetch_add(1, Release);
    }

    /// Frees dictionaries that are not needed, given how many objects use a slot. Returns their
    /// number.
    pub fn reap(&self, objects: impl Fn(usize) -> u64) -> usize {
        let mut list = self.list.lock();
        let current = list.current.map(|c| c.slot as usize);
        let (mut freed_count, mut wanted_back) = (0, false);
        for (slot, dictionary) in list.slots.iter_mut().enumerate() {
            // Workers copy references only under the lock, so the count can't grow meanwhile. It is
            // read first, because a worker that stores an object lists the dictionary while it
            // does.
            let mut is_unneeded = |c: &mut Arc<DigestedDictionary>| {
                let is_referenced = Arc::strong_count(c) > 1;
                fence(Acquire);
                let is_unused = Some(slot) != current && objects(slot) == 0;
                wanted_back |= is_referenced && is_unused;
                !is_referenced && is_unused
            };
            if let Some(dictionary) = dictionary.take_if(&mut is_unneeded) {
                self.bytes.fetch_sub(dictionary.bytes as u64, Relaxed);
                self.budget.uncharge(dictionary.bytes as u64);
                freed_count += 1;
            }
        }
        if wanted_back {
            // Workers renew their lists, and a later call frees it.
            self.epoch.fetch_add(1, Release);
        }
        freed_count
    }

    /// Returns the dictionary that saves with `spec` take.
    pub fn current(&self, spec: CodecSpec) -> Option<Arc<DigestedDictionary>> {
        let list = self.list.lock();
        let current = list.current.filter(|c| c.spec == spec)?;
        list.slots[current.slot as usize].clone()
    }

    /// Returns the bytes of memory of all dictionaries.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Returns the number of dictionaries.
    pub fn count(&self) -> usize {
        self.list.lock().slots.iter().flatten().count()
    }
}

/// What a thread needs to read objects of every format, and the dictionary for its own.
pub(crate) struct DecoderSet {
    plain: [Box<dyn Decoder>; format::DECODERS],
    /// Planes of a shuffled block.
    planes: Box<[u8]>,
    cans: Arc<DictionarySet>,
    /// The epoch of the list below.
    epoch: u64,
    slots: Slots,
    current: Option<SaveDictionary>,
}

impl DecoderSet {
    /// Makes one for blocks of at most `block_bytes_max`.
    pub fn new(cans: Arc<DictionarySet>, block_bytes_max: usize) -> DecoderSet {
        DecoderSet {
            plain: decoders(),
            planes: vec![0; block_bytes_max].into_boxed_slice(),
            cans,
            epoch: 0,
            slots: Slots::default(),
            current: None,
        }
    }

    /// Renews the list if it is old. Costs one load if not.
    #[inline]
    pub fn sync(&mut self) {
        if self.cans.epoch.load(Acquire) != self.epoch {
            self.renew();
        }
    }

    #[cold]
    fn renew(&mut self) {
        let list = self.cans.list.lock();
        self.epoch = self.cans.epoch.load(Relaxed);
        // Others are added when an object needs them, so that a worker lists none that it does not
        // need.
        self.slots = Slots::default();
        self.current = list.current;
        if let Some(SaveDictionary { slot, .. }) = self.current {
            self.slots[slot as usize] = list.slots[slot as usize].clone();
        }
    }

    /// Writes the pages that `src` was made of in a format to `dst`, at least the bytes of `part`,
    /// which is not empty. The others are undefined, and after an error all are.
    ///
    /// # Safety
    /// - `src` is readable, and no thread writes there meanwhile.
    /// - `dst` is writable, whole pages, does not overlap `src`, and no other thread touches it
    ///   meanwhile.
    pub unsafe fn decode(
        &mut self,
        format: u8,
        src: CodecInput,
        dst: CodecOutput,
        part: Range<usize>,
    ) -> Result<(), DecodeError> {
        if let Some(format) = format::shuffled(format) {
            // SAFETY: the caller vouches for `src` and `dst`; the buffer belongs to this value.
            return unsafe {
                let payload = core::slice::from_raw_parts(src.at, src.len);
                shuffle::decode(&mut *self.plain[format as usize], payload, &mut self.planes, dst)
            };
        }
        let (decoder, dictionary) = self.get(format).ok_or(DecodeError::Format)?;
        // SAFETY: as the caller says.
        let outcome = unsafe {
            if part.len() < dst.len {
                decoder.decode_part(src, dst, part, dictionary)
            } else {
                decoder.decode(src, dst, dictionary)
            }
        };
        outcome.map_err(DecodeError::Codec)
    }

    /// Returns whether [`DecoderSet::decode`] of a format ends with the part that is asked for.
    pub fn stops_early(&mut self, format: u8) -> bool {
        match self.get(format) {
            Some((_, Some(dictionary))) => format::stops_early(dictionary.format),
            _ => format::stops_early(format),
        }
    }

    /// Returns the decoder of a format and its dictionary.
    fn get(&mut self, format: u8) -> Option<(&mut dyn Decoder, Option<&DigestedDictionary>)> {
        let Some(slot) = format::dictionary_slot(format) else {
            return Some((&mut **self.plain.get_mut(format as usize)?, None));
        };
        // The holder of a handle of such an object got it after the dictionary was listed.
        self.sync();
        if self.slots[slot].is_none() {
            self.slots[slot] = self.cans.list.lock().slots[slot].clone();
        }
        let dictionary = self.slots[slot].as_deref()?;
        Some((&mut *self.plain[dictionary.format as usize], Some(dictionary)))
    }

    /// Returns the format and dictionary of saves with `spec`, if they take one. The caller has
    /// called [`DecoderSet::sync`].
    pub fn current(&self, spec: CodecSpec) -> Option<(u8, &DigestedDictionary)> {
        let current = self.current.filter(|c| c.spec == spec)?;
        Some((format::CANNED + current.slot, self.slots[current.slot as usize].as_deref()?))
    }
}
