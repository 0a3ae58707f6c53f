//! What each process of a run may have of its limit.

/// The share of `limit` of a process that needs `own` bytes beside others that need `others`: all
/// that the others leave, if everybody can have what it needs; else the level up to which each can
/// have it, so that whoever needs less leaves the rest to the others. Everybody who computes it
/// from the same needs comes to the same level.
pub fn share(limit: u64, own: u64, others: &mut [u64]) -> u64 {
    let sum = others.iter().fold(0u64, |sum, need| sum.saturating_add(*need));
    if sum.saturating_add(own) <= limit {
        return limit - sum;
    }
    others.sort_unstable();
    let (mut left, mut count) = (limit, others.len() as u64 + 1);
    let mut own = Some(own);
    for &need in others.iter() {
        if let Some(mine) = own.filter(|mine| *mine <= need) {
            if mine > left / count {
                return left / count;
            }
            (left, count, own) = (left - mine, count - 1, None);
        }
        if need > left / count {
            return left / count;
        }
        (left, count) = (left - need, count - 1);
    }
    left / count.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_testkit::random::Random;

    #[test]
    fn alone_or_with_room_for_all_a_process_has_what_the_others_leave() {
        assert_eq!(share(100, 500, &mut []), 100);
        assert_eq!(share(100, 20, &mut [30, 40]), 30);
    }

    #[test]
    fn who_needs_more_gets_what_the_modest_leave() {
        assert_eq!(share(100, 500, &mut [500]), 50);
        assert_eq!(share(100, 500, &mut [10, 500]), 45);
        assert_eq!(share(100, 500, &mut [500, 10, 0]), 45);
        assert_eq!(share(100, 10, &mut [500, 500]), 45);
    }

    #[test]
    fn shares_of_all_never_exceed_the_limit() {
        let mut random = Random::new(1);
        for _ in 0..2000 {
            let needs: Vec<u64> = (0..5).map(|_| random.below(1000) as u64).collect();
            let got = |me: usize| {
                let mut others = needs.clone();
                let own = others.remove(me);
                share(1000, own, &mut others).min(own)
            };
            assert!((0..5).map(got).sum::<u64>() <= 1000, "{needs:?}");
            let level =
                |me: usize| share(1000, needs[me], &mut [&needs[..me], &needs[me + 1..]].concat());
            let starved = (0..5).find(|&me| got(me) < needs[me] && level(me) < 1000 / 5);
            assert_eq!(starved, None, "{needs:?}");
        }
    }
}
