//! Entries: 16 bytes per object with its place, its header, and its checksum.
use crate::handle::{GENERATION_BITS, INDEX_BITS};
// Entries live in zone memory, whose zero bytes must be valid entries: `core`'s atomics, never a
// model checker's.
use core::sync::atomic::{AtomicU64, Ordering::*};

/// Bits of a span's number within its pool.
pub(crate) const SPAN_BITS: u32 = 26;
const SLOT_BITS: u32 = 7;
const LEN_BITS: u32 = 22;
const ORDER_BITS: u32 = 4;
const FORMAT_BITS: u32 = 5;

/// The place of an object.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) struct PoolLocation {
    pub span: u32,
    pub slot: u8,
}

/// The header of an object, which is stored beside it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) struct ObjectHeader {
    /// Payload bytes.
    pub len: u32,
    /// Order of the block.
    pub order: u8,
    /// Format of the payload, a constant of [`crate::format`].
    pub format: u8,
    /// Whether the payload starts with a list of same-filled pages.
    pub mixed: bool,
    /// The result of [`checksum`].
    pub checksum: u32,
}

/// `place`: span 26 | slot 7 | generation 14 | live 1 | guard 16. `header`: len 22 | order 4 |
/// format 5 | mixed 1 | checksum 32.
///
/// All zeros is an entry that was never used. The guard covers every other bit of the first word
/// and the entry's index, so a flipped bit in either word is found: in the first by the guard, in
/// the second by the checksum.
#[derive(Default)]
#[repr(C, align(16))]
pub(crate) struct ObjectEntry {
    place: AtomicU64,
    header: AtomicU64,
}

/// The first word, read once and verified.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) struct EntrySnapshot {
    word: u64,
}

const GENERATION_SHIFT: u32 = SPAN_BITS + SLOT_BITS;
const LIVE: u64 = 1 << (GENERATION_SHIFT + GENERATION_BITS);
const GUARD_SHIFT: u32 = 48;
const GUARD_K: u64 = 0x9E37_79B9_7F4A_7C15;

impl EntrySnapshot {
    pub fn is_live(self) -> bool {
        self.word & LIVE != 0
    }
    pub fn generation(self) -> u16 {
        ((self.word >> GENERATION_SHIFT) & ((1 << GENERATION_BITS) - 1)) as u16
    }
    pub fn place(self) -> PoolLocation {
        PoolLocation {
            span: (self.word & ((1 << SPAN_BITS) - 1)) as u32,
            slot: ((self.word >> SPAN_BITS) & ((1 << SLOT_BITS) - 1)) as u8,
        }
    }
}

impl ObjectEntry {
    /// Returns the first word, or the damaged word if its guard is wrong.
    #[inline]
    pub fn snapshot(&self, index: u32) -> Result<EntrySnapshot, u64> {
        let word = self.place.load(SeqCst);
        if word == 0 || word >> GUARD_SHIFT == guard(word, index) {
            Ok(EntrySnapshot { word })
        } else {
            Err(word)
        }
    }

    /// Returns whether the first word still equals `snapshot`.
    #[inline]
    pub fn is_still(&self, snapshot: EntrySnapshot) -> bool {
        self.place.load(SeqCst) == snapshot.word
    }

    /// Makes the entry live at `place`. Callers hold the lock of the object's class.
    pub fn set_place(&self, index: u32, generation: u16, place: PoolLocation) {
        self.store_place(
            index,
            generation,
            LIVE | place.span as u64 | (place.slot as u64) << SPAN_BITS,
        );
    }

    /// Makes the entry free, with the index of the next free one in the second word. Callers hold
    /// the list's lock.
    pub fn set_free(&self, index: u32, generation: u16, next: u32) {
        self.store_place(index, generation, 0);
        self.header.store(next as u64, Relaxed);
    }

    fn store_place(&self, index: u32, generation: u16, rest: u64) {
        let word = rest | (generation as u64) << GENERATION_SHIFT;
        self.place.store(word | guard(word, index) << GUARD_SHIFT, SeqCst);
    }

    /// Returns the next entry in the list of free entries.
    pub fn next_free(&self) -> u32 {
        self.header.load(Relaxed) as u32
    }

    #[inline]
    pub fn header(&self) -> ObjectHeader {
        ObjectHeader::unpack(self.header.load(Acquire))
    }

    pub fn set_header(&self, header: ObjectHeader) {
        self.header.store(header.pack(), Release);
    }

    /// Returns the generation in the raw first word, for an entry that is free or about to be.
    pub fn generation_unchecked(&self) -> u16 {
        EntrySnapshot { word: self.place.load(Relaxed) }.generation()
    }

    /// Flips one of the entry's 128 bits: damage, for tests.
    #[cfg(test)]
    pub fn flip(&self, bit: u32) {
        let word = if bit < 64 { &self.place } else { &self.header };
        word.fetch_xor(1 << (bit % 64), SeqCst);
    }
}

impl ObjectHeader {
    fn pack(self) -> u64 {
        debug_assert!(
            self.len < 1 << LEN_BITS
                && self.order < 1 << ORDER_BITS
                && self.format < 1 << FORMAT_BITS
        );
        self.fields() as u64 | (self.checksum as u64) << 32
    }

    /// Returns everything but the checksum.
    pub fn fields(self) -> u32 {
        self.len
            | (self.order as u32) << LEN_BITS
            | (self.format as u32) << (LEN_BITS + ORDER_BITS)
            | (self.mixed as u32) << (LEN_BITS + ORDER_BITS + FORMAT_BITS)
    }

    /// Makes a header with these fields, without its checksum.
    pub fn of_fields(fields: u32) -> ObjectHeader {
        ObjectHeader::unpack(fields as u64)
    }

    fn unpack(word: u64) -> ObjectHeader {
        let fields = word as u32;
        ObjectHeader {
            len: fields & ((1 << LEN_BITS) - 1),
            order: (fields >> LEN_BITS & ((1 << ORDER_BITS) - 1)) as u8,
            format: (fields >> (LEN_BITS + ORDER_BITS) & ((1 << FORMAT_BITS) - 1)) as u8,
            mixed: fields >> 31 != 0,
            checksum: (word >> 32) as u32,
        }
    }
}

/// Returns the checksum of an object's header with these fields, index and payload hash.
///
/// A change of the fields alone always changes it: multiplication by an odd number maps no two
/// values to one.
pub(crate) fn checksum(fields: u32, index: u32, payload_hash: u64) -> u32 {
    (payload_hash as u32)
        ^ fields.wrapping_mul(0x9E37_79B1)
        ^ index.wrapping_mul(0x85EB_CA77).rotate_left(16)
}

fn guard(word: u64, index: u32) -> u64 {
    let word_covered = word & ((1 << GUARD_SHIFT) - 1);
    let mix = word_covered ^ (index as u64).wrapping_mul(0xC2B2_AE3D_27D4_EB4F) >> 16;
    mix.wrapping_mul(GUARD_K) >> GUARD_SHIFT
}

// Flipping bit i adds or subtracts GUARD_K << i. So the guard certainly changes if that product's
// top bits are neither all zeros nor all ones (a carry from below adds at most one).
const _: () = {
    let mut i = 0;
    while i < GUARD_SHIFT {
        let top = GUARD_K.wrapping_shl(i) >> GUARD_SHIFT;
        assert!(top != 0 && top != 0xffff);
        i += 1;
    }
};
const _: () = assert!(GENERATION_SHIFT + GENERATION_BITS + 1 == GUARD_SHIFT);
const _: () = assert!(LEN_BITS + ORDER_BITS + FORMAT_BITS + 1 == 32);
const _: () = assert!(memfold_os::units::MAX_BYTES < 1 << LEN_BITS);
const _: () = assert!(crate::pool::size_class::SLOTS_MAX <= 1 << SLOT_BITS);
const _: () = assert!(INDEX_BITS <= 32);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_come_back_and_every_flip_of_the_first_is_found() {
        let entry = ObjectEntry::default();
        let place = PoolLocation { span: (1 << SPAN_BITS) - 1, slot: 127 };
        for index in [0, 1, 12345, (1 << INDEX_BITS) - 1] {
            entry.set_place(index, 9999, place);
            let snapshot = entry.snapshot(index).unwrap();
            assert!(snapshot.is_live());
            assert_eq!((snapshot.place(), snapshot.generation()), (place, 9999));
            for bit in 0..64 {
                entry.flip(bit);
                assert!(entry.snapshot(index).is_err(), "bit {bit}");
                assert!(!entry.is_still(snapshot));
                entry.flip(bit);
            }
            entry.set_free(index, 3, 77);
            assert!(!entry.snapshot(index).unwrap().is_live());
            assert_eq!((entry.next_free(), entry.generation_unchecked()), (77, 3));
        }
    }

    #[test]
    fn headers_come_back_and_every_flip_changes_the_checksum() {
        let header = ObjectHeader {
            len: 1 << 21,
            order: 9,
            format: crate::format::SAME,
            mixed: true,
            checksum: 0xdead_beef,
        };
        assert_eq!(ObjectHeader::unpack(header.pack()), header);
        for bit in 0..32 {
            let other_header = ObjectHeader::unpack(header.pack() ^ 1 << bit);
            assert_ne!(checksum(header.fields(), 5, 42), checksum(other_header.fields(), 5, 42));
        }
        assert_ne!(checksum(header.fields(), 5, 42), checksum(header.fields(), 6, 42));
    }
}
