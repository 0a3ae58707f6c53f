//! A group: runs of one user that share a limit. Each `memfold run` keeps a record of its claim and
//! its share, which the others read.
//!
//! A run takes a larger share only from what the others neither have as a share nor hold any more.
//! So the sum of all shares stays within the limit, however late a run learns of the others.
use crate::fair_share::{ShareClaim, WEIGHT_MAX, shares};
use alloc::vec::Vec;
use core::mem::size_of;

/// Length of a record, in bytes.
pub const RECORD_BYTES: usize = 64;
/// What a run can't fold varies a little. It gets one part in so many more.
const SPARE: u64 = 16;
/// A run needs at least so many bytes. Its first process has no slot for a while.
const NEED_MIN_BYTES: u64 = 1 << 20;

/// A run of a group: its record.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupRun {
    /// Process ID of `memfold run`.
    pub pid: u32,
    /// In hundredths ([`ShareClaim::weight`]).
    pub weight: u32,
    /// Of what it needs, the run has so many bytes before weights count.
    pub floor_bytes: u64,
    /// All memory of the run, with folded pages counted as if they were not folded.
    pub need_bytes: u64,
    /// The memory that it holds once everything that can be folded is folded.
    pub least_bytes: u64,
    /// The memory that it holds now.
    pub held_bytes: u64,
    /// The bytes that it may use.
    pub share_bytes: u64,
    /// Whether it has hardly worked lately.
    pub is_quiet: bool,
}

impl GroupRun {
    /// Writes the record as bytes.
    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        let words = [
            self.pid.into(),
            self.weight.into(),
            self.floor_bytes,
            self.need_bytes,
            self.least_bytes,
            self.held_bytes,
            self.share_bytes,
            self.is_quiet.into(),
        ];
        let mut bytes = [0; RECORD_BYTES];
        for (to, word) in bytes.chunks_exact_mut(size_of::<u64>()).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads a record. Any bytes are one.
    pub fn decode(bytes: &[u8; RECORD_BYTES]) -> GroupRun {
        let word = |n: usize| {
            let at = n * size_of::<u64>();
            u64::from_le_bytes(core::array::from_fn(|byte| bytes[at + byte]))
        };
        GroupRun {
            pid: word(0) as u32,
            weight: word(1).clamp(1, WEIGHT_MAX.into()) as u32,
            floor_bytes: word(2),
            need_bytes: word(3),
            least_bytes: word(4),
            held_bytes: word(5),
            share_bytes: word(6),
            is_quiet: word(7) != 0,
        }
    }

    /// Returns what the run claims. Floors count only if they leave all runs what they can't fold.
    fn claim(&self, has_floor: bool) -> ShareClaim {
        let spare_bytes = self.least_bytes.saturating_add(self.least_bytes / SPARE);
        let need = self.need_bytes.max(NEED_MIN_BYTES).max(spare_bytes);
        let floor = if has_floor { self.floor_bytes.min(need) } else { 0 };
        ShareClaim { need, least: spare_bytes.max(floor), weight: self.weight }
    }
}

/// Returns the share of `own` beside the other runs of its group. Runs that work come first: a quiet
/// run has what it can't fold, and more if they leave it. A part of the bytes that
/// no run needs is left for the next run.
fn fair(limit: u64, own: &GroupRun, others: &[GroupRun]) -> u64 {
    let claims = |of: &dyn Fn(&GroupRun) -> ShareClaim| -> Vec<ShareClaim> {
        [own].into_iter().chain(others).map(of).chain([ShareClaim::default()]).collect()
    };
    let sum = |claims: &[ShareClaim], of: &dyn Fn(&ShareClaim) -> u64| {
        claims.iter().fold(0, |sum: u64, claim| sum.saturating_add(of(claim)))
    };
    let has_floors = sum(&claims(&|run| run.claim(true)), &|claim| claim.least) <= limit;
    let quiet_claims = claims(&|run| {
        let claim = run.claim(has_floors);
        ShareClaim { need: if run.is_quiet { claim.least } else { claim.need }, ..claim }
    });
    if sum(&quiet_claims, &|claim| claim.need) > limit {
        return shares(limit, &quiet_claims)[0];
    }
    let with_quiet = claims(&|run| {
        let claim = run.claim(has_floors);
        ShareClaim { least: if run.is_quiet { claim.least } else { claim.need }, ..claim }
    });
    shares(limit, &with_quiet)[0]
}

/// Returns the bytes that `own` may ever get beside the other runs of its group, if these fold
/// everything.
pub fn most(limit: u64, others: &[GroupRun]) -> u64 {
    let least = others.iter().fold(0, |sum: u64, other| sum.saturating_add(other.least_bytes));
    limit.saturating_sub(least)
}

/// Returns the bytes that `own` may use from now on, beside the other runs of its group.
pub fn share(limit: u64, own: &GroupRun, others: &[GroupRun]) -> u64 {
    let fair = fair(limit, own, others);
    let bytes_of_others = others
        .iter()
        .fold(0, |sum: u64, other| sum.saturating_add(other.share_bytes.max(other.held_bytes)));
    let most = limit.saturating_sub(bytes_of_others).max(own.share_bytes);
    fair.min(most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_testkit::random::Random;

    const MIB: u64 = 1 << 20;
    const LIMIT: u64 = 1000 * MIB;

    fn run(need: u64) -> GroupRun {
        GroupRun { weight: 100, need_bytes: need * MIB, ..GroupRun::default() }
    }

    /// Lets each run in turn renew its share, and hold it as far as it needs it.
    fn round(limit: u64, runs: &mut [GroupRun]) {
        for n in 0..runs.len() {
            let others = [&runs[..n], &runs[n + 1..]].concat();
            runs[n].share_bytes = share(limit, &runs[n], &others);
            let need = runs[n].need_bytes.max(runs[n].least_bytes);
            runs[n].held_bytes = runs[n].share_bytes.max(runs[n].least_bytes).min(need);
        }
    }

    fn mib(runs: &[GroupRun]) -> Vec<u64> {
        runs.iter().map(|run| (run.share_bytes + MIB / 2) / MIB).collect()
    }

    #[test]
    fn record_is_read_as_it_was_written() {
        let run = GroupRun {
            pid: 1,
            weight: 2,
            floor_bytes: 3,
            need_bytes: 4,
            least_bytes: 5,
            held_bytes: u64::MAX,
            share_bytes: 7,
            is_quiet: true,
        };
        assert_eq!(GroupRun::decode(&run.encode()), run);
        assert_eq!(GroupRun::decode(&[0; RECORD_BYTES]).weight, 1);
        assert_eq!(GroupRun::decode(&[0xff; RECORD_BYTES]).weight, WEIGHT_MAX);
    }

    #[test]
    fn idle_runs_give_to_a_run_that_works() {
        let mut runs = [run(300), run(300), run(300), run(300)];
        (0..4).for_each(|_| round(LIMIT, &mut runs));
        assert_eq!(mib(&runs), [250; 4]);
        for idle in &mut runs[1..] {
            *idle = GroupRun { need_bytes: 0, least_bytes: 50 * MIB, ..*idle };
        }
        (0..6).for_each(|_| round(LIMIT, &mut runs));
        // No run needs 541 MiB of the limit. Each run gets a fifth of them, and a fifth is left.
        assert_eq!(mib(&runs), [408, 161, 161, 161]);
        runs[1].need_bytes = 800 * MIB;
        (0..3).for_each(|_| round(LIMIT, &mut runs));
        assert_eq!(mib(&runs), [300, 594, 53, 53]);
    }

    #[test]
    fn runs_that_work_come_before_quiet_ones() {
        let mut runs = [run(400), run(500), run(600)];
        runs.iter_mut().for_each(|run| run.least_bytes = 64 * MIB);
        (0..4).for_each(|_| round(LIMIT, &mut runs));
        assert_eq!(mib(&runs), [333; 3]);
        runs[0].is_quiet = true;
        runs[1].is_quiet = true;
        (0..4).for_each(|_| round(LIMIT, &mut runs));
        assert_eq!(mib(&runs), [200, 200, 600]);
        runs[2].need_bytes = 2000 * MIB;
        (0..4).for_each(|_| round(LIMIT, &mut runs));
        assert_eq!(mib(&runs), [68, 68, 864]);
        assert_eq!(most(LIMIT, &runs[..2]), 872 * MIB);
    }

    #[test]
    fn floor_holds_only_as_far_as_it_is_needed() {
        let mut runs = [run(400), run(4000)];
        runs[0].floor_bytes = 300 * MIB;
        runs[1].weight = 900;
        (0..4).for_each(|_| round(LIMIT, &mut runs));
        assert_eq!(mib(&runs), [300, 700]);
        runs[1].least_bytes = 800 * MIB;
        (0..4).for_each(|_| round(LIMIT, &mut runs));
        assert_eq!(mib(&runs), [100, 900], "what can't be folded comes before a floor");
        runs[1].least_bytes = 0;
        runs[0].need_bytes = 100 * MIB;
        (0..4).for_each(|_| round(LIMIT, &mut runs));
        assert_eq!(mib(&runs), [100, 900]);
    }

    /// Runs begin, end, and change what they need, each at its own time.
    #[test]
    fn shares_never_exceed_the_limit_and_end_where_they_are_fair() {
        let mut random = Random::new(1);
        for _ in 0..300 {
            let mut runs: Vec<GroupRun> = Vec::new();
            for _ in 0..60 {
                match random.below(4) {
                    0 if runs.len() < 8 => {
                        let floor_bytes = random.below(200) as u64 * MIB;
                        let weight = [10, 100, 400][random.below(3)];
                        runs.push(GroupRun { weight, floor_bytes, ..GroupRun::default() });
                    }
                    1 if !runs.is_empty() => {
                        runs.swap_remove(random.below(runs.len()));
                    }
                    _ if !runs.is_empty() => {
                        let n = random.below(runs.len());
                        runs[n].need_bytes = random.below(1200) as u64 * MIB;
                        runs[n].least_bytes = runs[n].need_bytes / (1 + random.below(9) as u64);
                        runs[n].is_quiet = random.below(3) == 0;
                        let others = [&runs[..n], &runs[n + 1..]].concat();
                        runs[n].share_bytes = share(LIMIT, &runs[n], &others);
                        // Some fold at once, and others later.
                        if random.below(2) == 0 {
                            runs[n].held_bytes = runs[n].share_bytes.min(runs[n].need_bytes);
                        }
                    }
                    _ => {}
                }
                let sum = runs.iter().map(|run| run.share_bytes).sum::<u64>();
                assert!(sum <= LIMIT, "{runs:?}");
            }
            runs.iter_mut().for_each(|run| run.least_bytes = run.least_bytes.min(50 * MIB));
            (0..4).for_each(|_| round(LIMIT, &mut runs));
            let before = mib(&runs);
            round(LIMIT, &mut runs);
            assert_eq!(mib(&runs), before);
            let needs = runs.iter().map(|run| run.claim(true).need).sum::<u64>();
            let is_short = |run: &GroupRun| run.share_bytes < run.claim(true).need;
            assert!(needs > LIMIT || !runs.iter().any(is_short), "{runs:?}");
        }
    }
}
