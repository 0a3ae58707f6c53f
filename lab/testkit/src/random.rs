//! Random numbers from a seed, the same on every machine. So a failure can be repeated, and the
//! corpus and walks of the benchmarks never change.

/// splitmix64, for tests, whose results depend on its numbers.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Makes the sequence of `seed`.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// Returns the next number.
    pub fn word(&mut self) -> u64 {
        let word = mix(self.0);
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        word
    }

    /// Returns a number below `n`, which is not 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.word() % n as u64) as usize
    }

    /// Returns one element of a slice, which is not empty.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// Returns so many bytes that don't compress.
    pub fn noise(&mut self, len: usize) -> Vec<u8> {
        (0..len.div_ceil(8)).flat_map(|_| self.word().to_le_bytes()).take(len).collect()
    }

    /// Returns true in `n` of 1000 cases.
    pub fn per_mille(&mut self, n: u32) -> bool {
        self.below(1000) < n as usize
    }

    /// Returns a seed for another sequence.
    pub fn fork(&mut self) -> Random {
        Random(self.word())
    }
}

/// Marsaglia's xorshift64* generator, for benchmarks, whose corpus and walks depend on its numbers.
#[derive(Clone, Debug)]
pub struct Sequence(u64);

impl Sequence {
    /// Makes the sequence of `seed`.
    pub fn new(seed: u64) -> Sequence {
        Sequence(mix(seed) | 1)
    }

    /// Returns the next number.
    #[inline]
    pub fn word(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Returns a number below `n`, which is not 0.
    #[inline]
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.word()) * n as u128) >> 64) as usize
    }

    /// Returns a number in 0..1.
    pub fn unit(&mut self) -> f64 {
        (self.word() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns a roughly normal number, mean 0 and deviation 1 (the sum of twelve uniform numbers).
    pub fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.unit()).sum::<f64>() - 6.0
    }

    /// Returns one element of a slice, which is not empty.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// Shuffles a slice.
    pub fn shuffle<T>(&mut self, of: &mut [T]) {
        (1..of.len()).rev().for_each(|i| of.swap(i, self.below(i + 1)));
    }
}

/// Returns the splitmix64 finaliser of `x`, which spreads it well.
#[inline]
pub fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Returns the seed of a randomised test: the variable `MEMFOLD_SEED` if it is set, else `default`.
/// Prints it on standard error, which test runners show when the test fails.
///
/// # Panics
/// If the variable is set to something other than a number.
pub fn seed(default: u64) -> u64 {
    let seed = match std::env::var("MEMFOLD_SEED") {
        Ok(text) => {
            text.parse().unwrap_or_else(|_| panic!("MEMFOLD_SEED is not a number: {text:?}"))
        }
        Err(_) => default,
    };
    eprintln!("seed {seed} (run it again with MEMFOLD_SEED={seed})");
    seed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_one_sequence() {
        let (mut a, mut b) = (Random::new(7), Random::new(7));
        assert!((0..100).all(|_| a.word() == b.word()));
        assert_ne!(Random::new(7).word(), Random::new(8).word());
        assert!((0..1000).all(|_| a.below(10) < 10));
    }
    #[test]
    fn below_stays_below_and_reaches_all() {
        let mut random = Sequence::new(1);
        let mut values = [false; 10];
        (0..1000).for_each(|_| values[random.below(10)] = true);
        assert_eq!(values, [true; 10]);
    }

    #[test]
    fn a_shuffle_keeps_everything() {
        let mut all: Vec<u8> = (0..100).collect();
        Sequence::new(3).shuffle(&mut all);
        assert!(!all.is_sorted());
        all.sort();
        assert!((0..100).eq(all));
    }
}
