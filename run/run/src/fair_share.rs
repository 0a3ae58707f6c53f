//! How the processes of a run share its limit.
//!
//! There is one level for all processes. A process may have what it needs up to that level, and a
//! process that needs less leaves the rest to the others. As long as the limit suffices, no process
//! is given less than it can reach by folding all its memory. The other processes fold more in that
//! case.
//!
//! The runs of a group share its limit in the same way. A run's level is the common one times its
//! weight.

use alloc::vec::Vec;

/// The weight of a claim that has no other, in hundredths.
pub const WEIGHT: u32 = 100;
/// The largest weight, in hundredths.
pub const WEIGHT_MAX: u32 = 10_000;

/// The claim of a process on the limit, in bytes.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct ShareClaim {
    /// All its memory, with folded pages counted as if they were not folded.
    pub need: u64,
    /// The memory that it holds once everything that can be folded is folded.
    pub least: u64,
    /// From 1 to [`WEIGHT_MAX`]: the part of the common level that it may have, in hundredths.
    pub weight: u32,
}

impl Default for ShareClaim {
    fn default() -> ShareClaim {
        ShareClaim { need: 0, least: 0, weight: WEIGHT }
    }
}

impl ShareClaim {
    fn need(&self) -> u64 {
        self.need.max(self.least)
    }

    fn of(&self, bytes: u64) -> u64 {
        let part = u128::from(bytes) * u128::from(self.weight) / u128::from(WEIGHT);
        part.try_into().unwrap_or(u64::MAX)
    }

    /// Returns the share of this process at a level.
    fn at(&self, level: u64) -> u64 {
        self.of(level).clamp(self.least, self.need())
    }
}

/// Returns the share of `limit` for a process with the claim `own` beside `others`.
///
/// - If the needs of all processes fit, the process gets everything that the others do not need.
/// - Otherwise it gets its share at the highest level at which the sum of all shares is within the
///   limit.
/// - If the sum of `least` of all processes does not fit, the smallest processes get theirs and the
///   largest get less.
///
/// Every process that computes the shares from the same claims finds the same level.
pub fn share(limit: u64, own: ShareClaim, others: &[ShareClaim]) -> u64 {
    let sum = |of: &dyn Fn(&ShareClaim) -> u64| {
        others.iter().fold(of(&own), |sum, claim| sum.saturating_add(of(claim)))
    };
    if sum(&ShareClaim::need) <= limit {
        return limit - (sum(&ShareClaim::need) - own.need());
    }
    if sum(&|claim| claim.least) <= limit {
        // Even a claim of the smallest weight reaches the limit at this level.
        let most = limit.saturating_mul(u64::from(WEIGHT));
        let within = |level: u64| sum(&|claim| claim.at(level)) <= limit;
        return own.at(highest(most, within));
    }
    own.least.min(highest(limit, |level| sum(&|claim| claim.least.min(level)) <= limit))
}

/// Returns the shares of `limit` for users with these claims, as [`share`] does. If the needs of all
/// users fit, each user also gets a part of the rest, by its weight. The sum of the shares is at most
/// `limit`, so users that have not learned of each other's growth keep the limit.
pub fn shares(limit: u64, claims: &[ShareClaim]) -> Vec<u64> {
    let needs = claims.iter().fold(0, |sum, claim| u64::saturating_add(sum, claim.need()));
    let Some(rest) = limit.checked_sub(needs) else {
        let own = |n: usize| share(limit, claims[n], &[&claims[..n], &claims[n + 1..]].concat());
        return (0..claims.len()).map(own).collect();
    };
    let all: u64 = claims.iter().map(|claim| u64::from(claim.weight)).sum();
    let part = |claim: &ShareClaim| u128::from(rest) * u128::from(claim.weight) / u128::from(all);
    claims.iter().map(|claim| claim.need() + part(claim) as u64).collect()
}

/// Returns the highest level up to `most` that `fits`. If a level fits, every lower one must.
fn highest(most: u64, fits: impl Fn(u64) -> bool) -> u64 {
    let (mut low, mut high) = (0, most);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) { low = middle } else { high = middle - 1 }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_testkit::random::Random;

    fn needs<const N: usize>(all: [u64; N]) -> [ShareClaim; N] {
        all.map(|need| ShareClaim { need, ..ShareClaim::default() })
    }

    fn of(limit: u64, own: u64, others: &[ShareClaim]) -> u64 {
        share(limit, ShareClaim { need: own, ..ShareClaim::default() }, others)
    }

    #[test]
    fn process_has_what_the_others_leave_where_there_is_room() {
        assert_eq!(of(100, 500, &[]), 100);
        assert_eq!(of(100, 20, &needs([30, 40])), 30);
    }

    #[test]
    fn process_that_needs_more_gets_what_the_modest_leave() {
        assert_eq!(of(100, 500, &needs([500])), 50);
        assert_eq!(of(100, 500, &needs([10, 500])), 45);
        assert_eq!(of(100, 500, &needs([500, 10, 0])), 45);
        assert_eq!(of(100, 45, &needs([500, 500])), 33);
        assert_eq!(of(100, 10, &needs([500, 500])), 10);
    }

    #[test]
    fn process_that_cant_fold_has_room_and_others_fold_more() {
        let stiff = ShareClaim { need: 90, least: 80, weight: WEIGHT };
        let soft = ShareClaim { least: 5, ..stiff };
        assert_eq!((share(100, stiff, &[soft]), share(100, soft, &[stiff])), (80, 20));
        let more = ShareClaim { need: 130, least: 110, weight: WEIGHT };
        assert_eq!((share(100, more, &[soft]), share(100, soft, &[more])), (95, 5));
    }

    /// Runs `check` with random claims of one to six processes and a limit. They are chosen so that
    /// each of the three cases occurs.
    fn each_case(mut check: impl FnMut(u64, &[ShareClaim], &[u64])) {
        let mut random = Random::new(1);
        for _ in 0..4000 {
            let count = 1 + random.below(6);
            let limit = random.below(3000) as u64;
            let claims: Vec<ShareClaim> = (0..count)
                .map(|_| {
                    let need = random.below(1000) as u64;
                    let least = random.below(need as usize + 50) as u64;
                    ShareClaim { need, least, weight: [1, 50, 100, 100, 900][random.below(5)] }
                })
                .collect();
            let share_of = |me: usize| {
                let mut others = claims.clone();
                let own = others.remove(me);
                share(limit, own, &others)
            };
            let shares: Vec<u64> = (0..count).map(share_of).collect();
            check(limit, &claims, &shares);
        }
    }

    #[test]
    fn shares_add_up_to_no_more_than_the_limit() {
        each_case(|limit, claims, shares| {
            let use_of = |(share, claim): (&u64, &ShareClaim)| *share.min(&claim.need());
            let sum = shares.iter().zip(claims).map(use_of).sum::<u64>();
            let expected = claims.iter().map(ShareClaim::need).sum::<u64>().min(limit);
            // By the next level the sum grows by so much at most.
            let step = claims.iter().map(|claim| 1 + u64::from(claim.weight / WEIGHT)).sum::<u64>();
            assert!(sum <= limit && sum + step > expected, "{limit} {claims:?} {shares:?}");
        });
    }

    #[test]
    fn share_is_no_less_than_a_process_can_reach() {
        each_case(|limit, claims, shares| {
            if claims.iter().map(|claim| claim.least).sum::<u64>() <= limit {
                let below = shares.iter().zip(claims).find(|(share, claim)| **share < claim.least);
                assert_eq!(below, None, "{limit} {claims:?}");
            } else {
                let short = |n: &usize| shares[*n] < claims[*n].least;
                let level = (0..claims.len()).filter(short).map(|n| claims[n].least).min();
                let spare_level =
                    (0..claims.len()).filter(|n| !short(n)).map(|n| claims[n].least).max();
                assert!(level.is_some() && spare_level <= level, "{limit} {claims:?} {shares:?}");
            }
        });
    }

    #[test]
    fn users_shares_never_exceed_the_limit() {
        each_case(|limit, claims, of_processes| {
            let of_users = shares(limit, claims);
            assert!(of_users.iter().sum::<u64>() <= limit, "{limit} {claims:?} {of_users:?}");
            let needs = claims.iter().map(ShareClaim::need).sum::<u64>();
            for ((user, process), claim) in of_users.iter().zip(of_processes).zip(claims) {
                let is_fair = if needs <= limit { *user >= claim.need() } else { user == process };
                assert!(is_fair, "{limit} {claims:?} {of_users:?}");
            }
        });
        assert_eq!(shares(100, &needs([20, 0, 50])), [30, 10, 60]);
    }

    #[test]
    fn short_process_has_no_less_than_another_beyond_its_least() {
        each_case(|limit, claims, shares| {
            for (share, claim) in shares.iter().zip(claims) {
                let is_short = *share < claim.need();
                // What a share is of the common level, with a part of a byte in favour of the claim.
                let level = |bytes: u64, claim: &ShareClaim| bytes * 100 / u64::from(claim.weight);
                let above = |(other, its): (&u64, &ShareClaim)| {
                    let more = *other.min(&its.need()) > its.least.max(1);
                    more && level(other.min(&its.need()) - 1, its) > level(share + 1, claim)
                };
                let sum = claims.iter().map(|claim| claim.least).sum::<u64>();
                let is_too_much = is_short && sum <= limit && shares.iter().zip(claims).any(above);
                assert!(!is_too_much, "{limit} {claims:?} {shares:?}");
            }
        });
    }

    #[test]
    fn shares_follow_the_weights() {
        let [light, medium, heavy] =
            [50, 100, 300].map(|weight| ShareClaim { need: 1000, least: 0, weight });
        assert_eq!(shares(900, &[light, medium, heavy]), [100, 200, 600]);
        // Who needs less leaves the rest to the others.
        let modest = ShareClaim { need: 150, ..heavy };
        assert_eq!(shares(900, &[light, medium, modest]), [250, 500, 150]);
        let floor = ShareClaim { least: 400, ..light };
        assert_eq!(shares(900, &[floor, medium, heavy]), [400, 125, 375]);
        assert_eq!(shares(4000, &[medium, heavy]), [1500, 2500]);
    }
}
