//! Mutations of valid inputs for fuzz targets, as libFuzzer makes them in `lab/fuzz`.
use crate::random::Random;

/// Makes one of the changes that fuzzers make, mostly in the first bytes between long payloads.
fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..1 + random.below(4) {
        let at = random.below(bytes.len().max(1));
        match random.below(7) {
            _ if bytes.is_empty() => bytes.push(random.word() as u8),
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.word() as u8,
            2 => bytes.truncate(at),
            3 => bytes.insert(at, random.word() as u8),
            4 => {
                let from = random.below(bytes.len());
                let len = random.below(64).min(bytes.len() - from.max(at));
                bytes.copy_within(from..from + len, at);
            }
            5 => drop(bytes.drain(at..(at + random.below(40)).min(bytes.len()))),
            _ => {
                let end = (at + 8).min(bytes.len());
                bytes[at..end].fill([0, 0xff][random.below(2)]);
            }
        }
    }
}

/// Runs a target on valid inputs, and then on `rounds` mutations of them, the same ones for each
/// `seed`.
pub fn feed(seed: u64, target: fn(&[u8]), inputs: &[Vec<u8>], rounds: usize) {
    let mut random = Random::new(seed);
    inputs.iter().for_each(|input| target(input));
    for round in 0..rounds {
        let mut bytes = inputs[round % inputs.len()].clone();
        mutate(&mut bytes, &mut random);
        target(&bytes);
    }
}
