//! The seal of data outside of memory: encryption with authentication, or only a checksum.
//!
//! The cipher is AES-256-GCM under a random key of this run. The key is kept in memory only: in a
//! page that is locked there, left out of core dumps and of children, and wiped at the end. **No
//! nonce is used twice with the key.** The nonce is a number from one counter of this [`Sealer`].
//! One atomic addition takes each number once, 2^64 of them are never used up, and no other
//! `Sealer` has the key. A write that is tried again takes a new number.
//!
//! A child of fork that continues its parent's engine gets the parent's key, to read what was
//! written. It seals with another key, for numbers from there on. So the number shows which key was
//! used.
//!
//! The number and the place of an object are authenticated with it. So bytes from another place, of
//! another time or under another key are refused. An older state of the same place under its own
//! number would pass here. The fingerprint of the block, which the engine keeps in memory beside
//! the handle, detects it.
//!
//! Without encryption the tag is an XXH3-128 of the same data: it finds damage before the data is
//! decoded. Only the fingerprint detects forged bytes.
use alloc::vec::Vec;
use memfold_os::Errno;
use memfold_os::memory::secret::{Secret, wipe_bytes};
use memfold_os::random;
use memfold_os::sync::ForkCell;
use memfold_os::sync::atomic::{AtomicU64, Ordering::Relaxed};
use memfold_store::xxh3_128;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, Tag, UnboundKey};

/// Bytes of a tag.
pub const TAG_BYTES: usize = 16;

/// The place and time that a sealed object is bound to.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct SealBinding {
    /// Its first byte in the file.
    pub start: u64,
    /// The number that [`Sealer::number`] returned for it alone.
    pub number: u64,
    /// Further data that must be the same when it is opened.
    pub header: u64,
}

/// The seal of a raw object, which is kept in memory.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct RawSeal {
    /// The object's number.
    pub number: u64,
    /// The tag that opens it.
    pub tag: [u8; TAG_BYTES],
}

type MakeKey = fn(&mut [u8]) -> Result<(), Errno>;

/// Seals and opens objects.
pub struct Sealer {
    /// Each cipher is for numbers from its first on, up to the next one's. If there is none, tags
    /// are checksums.
    ciphers: ForkCell<Vec<(u64, Secret<LessSafeKey>)>>,
    next: AtomicU64,
}

fn cipher_of(make: MakeKey) -> Result<Secret<LessSafeKey>, Errno> {
    Secret::new(|| {
        let mut key = [0; 32];
        make(&mut key)?;
        // "Less safe" means that the caller chooses the nonces, which the module comment argues.
        let cipher = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &key).expect("32 bytes"));
        wipe_bytes(&mut key);
        Ok(cipher)
    })
}

impl Sealer {
    /// Makes a sealer with a key of its own, or with checksums only.
    ///
    /// # Errors
    /// The kernel gives no random bytes, or no page for the key.
    pub fn new(encrypt: bool) -> Result<Sealer, Errno> {
        Sealer::with_key(encrypt.then_some(random::fill))
    }

    fn with_key(make: Option<MakeKey>) -> Result<Sealer, Errno> {
        let cipher = make.map(cipher_of).transpose()?;
        let ciphers = cipher.map(|cipher| (1, cipher)).into_iter().collect();
        Ok(Sealer { ciphers: ForkCell::new(ciphers), next: AtomicU64::new(1) })
    }

    /// Lets a child of fork get the keys, until [`Sealer::end_copy`].
    pub fn begin_copy(&self) {
        self.ciphers.iter().for_each(|(_, cipher)| cipher.begin_copy());
    }

    /// Ends [`Sealer::begin_copy`], in the parent, and in a child that got the keys.
    pub fn end_copy(&self) {
        self.ciphers.iter().for_each(|(_, cipher)| cipher.end_copy());
    }

    /// Begins in a child of fork, which has got the keys of its parent. It seals with a key of its
    /// own from now on. With `reads`, it can open what they have sealed; otherwise they are wiped.
    ///
    /// # Errors
    /// The errors of [`Sealer::new`].
    ///
    /// # Safety
    /// - The caller is the only thread of the process.
    pub unsafe fn begin_in_child(&self, reads: bool) -> Result<(), Errno> {
        // SAFETY: the caller promises that it is the only thread, so no other thread uses the
        // ciphers.
        let ciphers = unsafe { self.ciphers.change() };
        if ciphers.is_empty() {
            return Ok(());
        }
        let own = (self.next.load(Relaxed), cipher_of(random::fill)?);
        match reads {
            true => ciphers.iter().for_each(|(_, cipher)| cipher.lock_again()),
            false => ciphers.clear(),
        }
        ciphers.push(own);
        Ok(())
    }

    /// Returns the cipher for a number, or `None` if tags are checksums.
    fn cipher(&self, number: u64) -> Option<&LessSafeKey> {
        let after = self.ciphers.partition_point(|(first, _)| *first <= number);
        Some(&self.ciphers[after.checked_sub(1)?].1)
    }

    /// Returns a number that no other object has, for [`SealBinding::number`].
    pub fn number(&self) -> u64 {
        self.next.fetch_add(1, Relaxed)
    }

    /// Seals `bytes` in place, and returns the tag that opens them.
    pub fn seal(&self, binding: SealBinding, bytes: &mut [u8]) -> [u8; TAG_BYTES] {
        match self.cipher(binding.number) {
            Some(cipher) => {
                let tag = cipher.seal_in_place_separate_tag(
                    nonce(binding),
                    Aad::from(associated_data(binding)),
                    bytes,
                );
                tag.expect("less than 64 GiB").as_ref().try_into().expect("16 bytes")
            }
            None => checksum(binding, bytes),
        }
    }

    /// Opens `bytes` in place. Returns `false` if they are not those sealed for this place under
    /// this number with this key; they must not be used then.
    #[must_use]
    pub fn open(&self, binding: SealBinding, bytes: &mut [u8], tag: &[u8; TAG_BYTES]) -> bool {
        match self.cipher(binding.number) {
            None if !self.ciphers.is_empty() => false,
            Some(cipher) => {
                let associated_data = Aad::from(associated_data(binding));
                cipher
                    .open_in_place_separate_tag(
                        nonce(binding),
                        associated_data,
                        Tag::from(*tag),
                        bytes,
                        0..,
                    )
                    .is_ok()
            }
            None => checksum(binding, bytes) == *tag,
        }
    }
}

fn nonce(binding: SealBinding) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    nonce[..8].copy_from_slice(&binding.number.to_le_bytes());
    Nonce::assume_unique_for_key(nonce)
}

fn associated_data(binding: SealBinding) -> [u8; 16] {
    let mut associated_data = [0; 16];
    associated_data[..8].copy_from_slice(&binding.start.to_le_bytes());
    associated_data[8..].copy_from_slice(&binding.header.to_le_bytes());
    associated_data
}

fn checksum(binding: SealBinding, bytes: &[u8]) -> [u8; TAG_BYTES] {
    let [low, high] = xxh3_128(bytes);
    let words = [low, high, binding.start, binding.number, binding.header];
    let mut all = [0; 40];
    all.chunks_exact_mut(8)
        .zip(words)
        .for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
    let [low, high] = xxh3_128(&all);
    let mut tag = [0; TAG_BYTES];
    tag[..8].copy_from_slice(&low.to_le_bytes());
    tag[8..].copy_from_slice(&high.to_le_bytes());
    tag
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain() -> Vec<u8> {
        (0..5000u32).map(|i| ((i * 7) >> 3) as u8).collect()
    }

    #[test]
    fn sealed_bytes_come_back_and_every_change_is_refused() {
        for encrypt in [true, false] {
            let seal = Sealer::new(encrypt).unwrap();
            let binding = SealBinding { start: 8192, number: seal.number(), header: 77 };
            let mut bytes = plain();
            let tag = seal.seal(binding, &mut bytes);
            assert_eq!(bytes != plain(), encrypt);
            let opens = |binding: SealBinding, bytes: &[u8], tag: [u8; TAG_BYTES]| {
                let mut bytes = bytes.to_vec();
                let is_open = seal.open(binding, &mut bytes, &tag);
                assert!(!is_open || bytes == plain());
                is_open
            };
            assert!(opens(binding, &bytes, tag));
            // Any flipped bit is detected.
            for bit in (0..bytes.len() * 8).step_by(997) {
                let mut bytes_flipped = bytes.clone();
                bytes_flipped[bit / 8] ^= 1 << (bit % 8);
                assert!(!opens(binding, &bytes_flipped, tag), "bit {bit}, encrypt {encrypt}");
            }
            for bit in 0..TAG_BYTES * 8 {
                let mut tag_flipped = tag;
                tag_flipped[bit / 8] ^= 1 << (bit % 8);
                assert!(!opens(binding, &bytes, tag_flipped), "bit {bit} of the tag");
            }
            // Bytes of another slot, of another time, or with another header are refused.
            assert!(!opens(SealBinding { start: 4096, ..binding }, &bytes, tag));
            assert!(!opens(SealBinding { number: seal.number(), ..binding }, &bytes, tag));
            assert!(!opens(SealBinding { header: 78, ..binding }, &bytes, tag));
        }
    }

    /// Returns byte `n` of a key. Only the place under test has it unchanged.
    fn key_byte(n: usize) -> u8 {
        (n as u8).wrapping_mul(73) ^ 0x5a
    }

    /// Returns addresses of this process's writable memory that hold the first half of that key.
    fn places_of_key() -> Vec<usize> {
        use std::os::unix::fs::FileExt;
        let memory = std::fs::File::open("/proc/self/mem").unwrap();
        let mut places = Vec::new();
        let mut buffer = std::vec![0u8; 1 << 20];
        let own = buffer.as_ptr() as usize..buffer.as_ptr() as usize + buffer.len();
        for line in std::fs::read_to_string("/proc/self/maps")
            .unwrap()
            .lines()
            .filter(|line| line.contains(" rw-p "))
        {
            let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
            let [start, end] = [start, end].map(|text| usize::from_str_radix(text, 16).unwrap());
            // Reservations of terabytes hold hardly any data; reading them would make their pages.
            let pagemap = memfold_os::maps::pagemap::Pagemap::open().unwrap();
            let _ = pagemap.for_each_populated(start, end, |start, end| {
                let mut at = start;
                while at < end {
                    let len = buffer.len().min(end - at);
                    let count = memory.read_at(&mut buffer[..len], at as u64).unwrap_or(0);
                    let windows = buffer[..count].windows(16).enumerate();
                    let matches = windows.filter(|(_, bytes)| {
                        bytes.iter().enumerate().all(|(n, byte)| *byte == key_byte(n))
                    });
                    places.extend(
                        matches.map(|(offset, _)| at + offset).filter(|at| !own.contains(at)),
                    );
                    at += len;
                }
            });
        }
        places
    }

    /// The key is its own first round key, so its cipher holds it.
    #[test]
    fn key_is_only_in_its_locked_page_and_is_wiped_at_the_end() {
        fn make(key: &mut [u8]) -> Result<(), Errno> {
            key.iter_mut().enumerate().for_each(|(n, byte)| *byte = key_byte(n));
            Ok(())
        }
        let seal = Sealer::with_key(Some(make)).unwrap();
        let binding = SealBinding { start: 8192, number: seal.number(), header: 77 };
        let mut bytes = plain();
        let tag = seal.seal(binding, &mut bytes);
        assert!(seal.open(binding, &mut bytes, &tag));
        let cipher: &LessSafeKey = seal.cipher(1).unwrap();
        let page = &raw const *cipher as usize;
        let places = places_of_key();
        assert!(!places.is_empty(), "the test looks for what isn't there");
        let elsewhere: Vec<_> = places
            .iter()
            .filter(|at| **at < page || **at >= page + size_of::<LessSafeKey>())
            .collect();
        assert_eq!(elsewhere, [&0; 0]);
        drop(seal);
        assert_eq!(places_of_key(), []);
    }

    #[test]
    fn another_key_opens_nothing_and_equal_bytes_look_different() {
        let (a, b) = (Sealer::new(true).unwrap(), Sealer::new(true).unwrap());
        let binding = SealBinding { start: 0, number: 1, header: 0 };
        let mut bytes = plain();
        let tag = a.seal(binding, &mut bytes);
        assert!(!b.open(binding, &mut bytes.clone(), &tag));
        let mut again = plain();
        a.seal(SealBinding { number: 2, ..binding }, &mut again);
        assert_ne!(bytes, again);
    }

    #[test]
    fn child_opens_its_parents_seals_and_has_a_key_of_its_own() {
        for encrypt in [true, false] {
            let seal = Sealer::new(encrypt).unwrap();
            let seal_one = |seal: &Sealer| {
                let binding = SealBinding { start: 8192, number: seal.number(), header: 77 };
                let mut bytes = plain();
                let tag = seal.seal(binding, &mut bytes);
                (binding, bytes, tag)
            };
            let opens =
                |seal: &Sealer, (binding, bytes, tag): &(SealBinding, Vec<u8>, [u8; TAG_BYTES])| {
                    let mut bytes = bytes.clone();
                    seal.open(*binding, &mut bytes, tag) && bytes == plain()
                };
            let mut all = std::vec![seal_one(&seal), seal_one(&seal)];
            for _ in 0..3 {
                let parent: Vec<usize> =
                    seal.ciphers.iter().map(|(_, key)| &raw const **key as usize).collect();
                // SAFETY: no other thread uses the sealer, as in a child.
                unsafe { seal.begin_in_child(true) }.unwrap();
                all.push(seal_one(&seal));
                assert!(all.iter().all(|object| opens(&seal, object)));
                if encrypt {
                    let number = all.last().unwrap().0.number;
                    let own = &raw const *seal.cipher(number).unwrap() as usize;
                    assert!(!parent.contains(&own));
                }
            }
            // SAFETY: no other thread uses the sealer, as in a child.
            unsafe { seal.begin_in_child(false) }.unwrap();
            assert!(opens(&seal, &seal_one(&seal)));
            assert_eq!(all.iter().any(|object| opens(&seal, object)), !encrypt);
        }
    }

    #[test]
    fn no_number_is_given_twice() {
        let seal = Sealer::new(true).unwrap();
        let mut numbers: Vec<u64> = std::thread::scope(|s| {
            let threads: Vec<_> =
                (0..4).map(|_| s.spawn(|| (0..5000).map(|_| seal.number()).collect())).collect();
            threads
                .into_iter()
                .flat_map(|t: std::thread::ScopedJoinHandle<'_, Vec<u64>>| t.join().unwrap())
                .collect()
        });
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 20_000);
    }
}
