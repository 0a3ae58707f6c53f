//! Random numbers from a seed: the same on every machine, so that a failure can be run again.

/// splitmix64.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence of `seed`.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// The next number.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    /// A number below `n`, which is not 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.word() % n as u64) as usize
    }

    /// One of a slice, which is not empty.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// True in `n` of 1000 cases.
    pub fn per_mille(&mut self, n: u32) -> bool {
        self.below(1000) < n as usize
    }

    /// A seed for another sequence.
    pub fn fork(&mut self) -> Random {
        Random(self.word())
    }
}

/// The seed of a randomised test: the variable `MEMFOLD_SEED` if it is set, else `default`. Says on standard error which
/// one it is (test runners show it when the test fails).
///
/// # Panics
/// If the variable is set to something other than a number.
pub fn seed(default: u64) -> u64 {
    let seed = match std::env::var("MEMFOLD_SEED") {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("MEMFOLD_SEED is not a number: {text:?}")),
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
}
