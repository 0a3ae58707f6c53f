//! Files that reach each other by arrows.

use std::collections::{BTreeMap, BTreeSet};

/// The groups of two and more of `0..count` that reach each other, each in order.
pub fn find(count: usize, arrows: &BTreeSet<(usize, usize)>) -> Vec<Vec<usize>> {
    let mut next: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for &(from, to) in arrows {
        next.entry(from).or_default().push(to);
    }
    let reached: Vec<BTreeSet<usize>> = (0..count).map(|start| reach(start, &next)).collect();
    let both =
        |one: usize, other: usize| reached[one].contains(&other) && reached[other].contains(&one);
    let group = |one: usize| (0..count).filter(|&other| both(one, other)).collect();
    let groups: BTreeSet<Vec<usize>> = (0..count).map(group).collect();
    groups.into_iter().filter(|group| group.len() > 1).collect()
}

/// All that arrows lead to from `start`, by one step or more.
fn reach(start: usize, next: &BTreeMap<usize, Vec<usize>>) -> BTreeSet<usize> {
    let mut found = BTreeSet::new();
    let mut waiting = vec![start];
    while let Some(at) = waiting.pop() {
        for &to in next.get(&at).into_iter().flatten() {
            if found.insert(to) {
                waiting.push(to);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn circles_are_found_and_chains_are_none() {
        let arrows = |list: &[(usize, usize)]| list.iter().copied().collect();
        assert_eq!(find(4, &arrows(&[(3, 2), (2, 1), (3, 1), (1, 0)])), Vec::<Vec<usize>>::new());
        assert_eq!(find(4, &arrows(&[(0, 1), (1, 0), (2, 3), (3, 1)])), [vec![0, 1]]);
        assert_eq!(
            find(5, &arrows(&[(0, 1), (1, 2), (2, 0), (3, 4), (4, 3)])),
            [vec![0, 1, 2], vec![3, 4]]
        );
    }
}
