//! Finds the processes of a run, and which of them have no slot in its tables: small ones without
//! an engine yet, and those that no engine can manage. The memory of processes without a slot
//! counts against the limit too, so `memfold run` reads their sizes from the kernel.
//!
//! If the run has several users, the census also measures every process. The figures in a user's
//! table are believed only up to what the kernel says.
//!
//! A process belongs to the run if its parent did when the process was first seen, or if it was
//! given the run's request. It still belongs to the run after its parent has ended.
use crate::users::MeasuredUsers;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

/// A child is young for so many looks.
const LOOKS_YOUNG: u32 = 5;

/// The processes of the system, from which a census is taken.
pub trait Processes {
    /// Returns the numbers of all visible processes.
    fn numbers(&self) -> BTreeSet<u32>;
    /// Returns the parent of a process and its start time, or `None` if the process has ended.
    fn parent_and_start(&self, pid: u32) -> Option<(u32, u64)>;
    /// Returns the process ID of the `memfold run` of a process, from the request that the process
    /// was given.
    fn runner_of(&self, pid: u32) -> Option<u32>;
    /// Returns the counted memory of a process in bytes, or `None` if it has no memory of its own.
    fn bytes_of(&self, pid: u32) -> Option<u64>;
    /// Returns the real user of a process and its anonymous memory in bytes, swap included.
    fn user_and_bytes_of(&self, pid: u32) -> Option<(u32, u64)>;
}

/// The processes of a run that were seen so far.
pub struct Census {
    own: u32,
    /// Start time by process ID. The start time tells a process from a later one that has the same
    /// ID.
    members: BTreeMap<u32, u64>,
    strangers: BTreeSet<u32>,
    /// Members whose parent had a slot when they were first seen, with the number of looks since.
    children: BTreeMap<u32, u32>,
    /// Processes that had a slot at the last look.
    with_slots: BTreeSet<u32>,
    /// Real user and anonymous memory in bytes of each member at the last look. Empty if the run
    /// has one user.
    sizes: BTreeMap<u32, (u32, u64)>,
}

impl Census {
    /// Returns an empty census of the run of the process `own`.
    pub fn new(own: u32) -> Census {
        Census {
            own,
            members: BTreeMap::new(),
            strangers: BTreeSet::new(),
            children: BTreeMap::new(),
            with_slots: BTreeSet::new(),
            sizes: BTreeMap::new(),
        }
    }

    /// Updates the members. Returns how many of them have no slot, and the bytes of their anonymous
    /// memory.
    ///
    /// A process that had a slot at the last look is not counted. It is about to end, or its engine
    /// is about to start anew and to take a slot again. Nor is a new child of a process with a slot
    /// in its first `LOOKS_YOUNG` looks. What it has is mostly its parent's, until it takes a slot
    /// or executes a program.
    ///
    /// `with_slots` returns the processes that have a slot according to the tables, with the user
    /// of each table. `has_others` is whether the run has several users.
    pub fn look(
        &mut self,
        all: &impl Processes,
        with_slots: impl FnOnce() -> BTreeMap<u32, u32>,
        has_others: bool,
    ) -> (u64, u64) {
        self.find(all);
        let size = |pid: &u32| has_others.then(|| Some((*pid, all.user_and_bytes_of(*pid)?)))?;
        self.sizes = self.members.keys().filter_map(size).collect();
        // A table can name any process, so its user is compared with the user from the kernel.
        let is_its =
            |pid: u32, uid: u32| !has_others || self.sizes.get(&pid).is_some_and(|s| s.0 == uid);
        let with_slots: BTreeSet<u32> = with_slots()
            .into_iter()
            .filter(|(pid, uid)| is_its(*pid, *uid))
            .map(|(pid, _)| pid)
            .collect();
        self.note_children(all, &with_slots);
        let is_young = |pid: &u32| self.children.get(pid).is_some_and(|looks| *looks < LOOKS_YOUNG);
        let had_none = |pid: &&u32| {
            !with_slots.contains(pid) && !self.with_slots.contains(pid) && !is_young(pid)
        };
        let sizes = self.members.keys().filter(had_none).map(|pid| all.bytes_of(*pid));
        let sum = sizes
            .flatten()
            .fold((0, 0), |(count, sum), bytes| (count + 1, u64::saturating_add(sum, bytes)));
        self.with_slots = with_slots;
        sum
    }

    /// Counts the looks at children of processes with a slot.
    fn note_children(&mut self, all: &impl Processes, with_slots: &BTreeSet<u32>) {
        let members = &self.members;
        self.children.retain(|pid, _| members.contains_key(pid));
        for pid in members.keys() {
            if let Some(looks) = self.children.get_mut(pid) {
                *looks += 1;
            } else {
                let parent = all.parent_and_start(*pid).map(|(parent, _)| parent);
                let has_slot = parent.is_some_and(|parent| with_slots.contains(&parent));
                self.children.insert(*pid, if has_slot { 0 } else { LOOKS_YOUNG });
            }
        }
    }

    /// Returns the bytes that each user's processes had at the last look. Empty if the run has one
    /// user.
    pub fn measured(&self) -> MeasuredUsers {
        let mut sums = MeasuredUsers::new();
        for (uid, bytes) in self.sizes.values() {
            let sum = sums.entry(*uid).or_default();
            *sum = u64::saturating_add(*sum, *bytes);
        }
        sums
    }

    /// Returns whether a process was seen to belong to the run.
    pub fn has(&self, pid: u32) -> bool {
        self.members.contains_key(&pid)
    }

    /// Adds new processes of the run to the members and removes those that ended.
    pub fn find(&mut self, all: &impl Processes) {
        let numbers = all.numbers();
        self.strangers.retain(|pid| numbers.contains(pid));
        self.members
            .retain(|pid, start| all.parent_and_start(*pid).is_some_and(|(_, now)| now == *start));
        let mut new: Vec<(u32, u32, u64)> = numbers
            .iter()
            .filter(|pid| !self.strangers.contains(pid) && !self.members.contains_key(pid))
            .filter_map(|pid| {
                all.parent_and_start(*pid).map(|(parent, start)| (*pid, parent, start))
            })
            .collect();
        // A parent may have a larger number than its child, so the loop repeats until a pass adds
        // no process.
        loop {
            let before = new.len();
            new.retain(|(pid, parent, start)| {
                let is_member = *parent == self.own || self.members.contains_key(parent);
                if is_member {
                    self.members.insert(*pid, *start);
                }
                !is_member
            });
            if new.len() == before {
                break;
            }
        }
        for (pid, _, start) in new {
            match all.runner_of(pid) == Some(self.own) {
                true => drop(self.members.insert(pid, start)),
                false => drop(self.strangers.insert(pid)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: u32 = 10;
    const UID: u32 = 1000;

    #[derive(Copy, Clone)]
    struct One {
        parent: u32,
        start: u64,
        runner: Option<u32>,
        bytes: Option<u64>,
        user: u32,
    }

    /// Processes that begin and end when a test says so.
    #[derive(Default)]
    struct Fake(BTreeMap<u32, One>);

    impl Fake {
        fn begin(&mut self, pid: u32, parent: u32) -> &mut One {
            let one = One { parent, start: 1, runner: None, bytes: Some(100), user: UID };
            self.0.insert(pid, one);
            self.0.get_mut(&pid).unwrap()
        }

        fn end(&mut self, pid: u32) {
            self.0.remove(&pid);
            self.0.values_mut().filter(|one| one.parent == pid).for_each(|one| one.parent = 1);
        }
    }

    impl Processes for Fake {
        fn numbers(&self) -> BTreeSet<u32> {
            self.0.keys().copied().collect()
        }
        fn parent_and_start(&self, pid: u32) -> Option<(u32, u64)> {
            self.0.get(&pid).map(|one| (one.parent, one.start))
        }
        fn runner_of(&self, pid: u32) -> Option<u32> {
            self.0.get(&pid)?.runner
        }
        fn bytes_of(&self, pid: u32) -> Option<u64> {
            self.0.get(&pid)?.bytes
        }
        fn user_and_bytes_of(&self, pid: u32) -> Option<(u32, u64)> {
            self.0.get(&pid).map(|one| (one.user, one.bytes.unwrap_or(0)))
        }
    }

    fn found(census: &mut Census, all: &Fake) -> Vec<u32> {
        census.find(all);
        all.numbers().into_iter().filter(|pid| census.has(*pid)).collect()
    }

    #[test]
    fn descendants_are_members_whatever_their_numbers() {
        let (mut all, mut census) = (Fake::default(), Census::new(OWN));
        all.begin(OWN, 1);
        all.begin(30, OWN);
        all.begin(20, 30);
        all.begin(5, 20);
        all.begin(40, 1);
        all.begin(41, 40);
        assert_eq!(found(&mut census, &all), [5, 20, 30]);
    }

    #[test]
    fn member_stays_one_when_its_parent_ends() {
        let (mut all, mut census) = (Fake::default(), Census::new(OWN));
        all.begin(20, OWN);
        all.begin(21, 20);
        census.find(&all);
        all.end(20);
        assert_eq!(found(&mut census, &all), [21]);
        all.begin(22, 21);
        assert_eq!(found(&mut census, &all), [21, 22]);
    }

    #[test]
    fn orphan_is_a_member_by_the_request_of_this_run_only() {
        let (mut all, mut census) = (Fake::default(), Census::new(OWN));
        all.begin(20, 1).runner = Some(OWN);
        all.begin(21, 1).runner = Some(OWN + 1);
        assert_eq!(found(&mut census, &all), [20]);
    }

    #[test]
    fn number_that_is_given_again_is_another_process() {
        let (mut all, mut census) = (Fake::default(), Census::new(OWN));
        all.begin(20, OWN);
        all.begin(30, 1);
        census.find(&all);
        all.begin(20, 1).start = 2;
        assert_eq!(found(&mut census, &all), [0; 0]);
        // The number of a stranger can be reused too, once the stranger was seen to be gone.
        all.end(30);
        census.find(&all);
        all.begin(30, OWN).start = 2;
        assert_eq!(found(&mut census, &all), [30]);
    }

    #[test]
    fn processes_without_slot_are_counted() {
        let (mut all, mut census) = (Fake::default(), Census::new(OWN));
        all.begin(20, OWN);
        all.begin(21, 20).bytes = Some(7);
        // This process uses its parent's memory until it executes a program.
        all.begin(22, 20).bytes = None;
        assert_eq!(census.look(&all, BTreeMap::new, false), (2, 107));
        let with_slots = BTreeMap::from([(20, UID)]);
        assert_eq!(census.look(&all, || with_slots, false), (1, 7));
        assert_eq!(census.look(&all, BTreeMap::new, false), (1, 7), "it had one a moment ago");
        assert_eq!(census.look(&all, BTreeMap::new, false), (2, 107));
        assert!(census.measured().is_empty());
    }

    #[test]
    fn young_child_of_a_process_with_a_slot_counts_there() {
        let (mut all, mut census) = (Fake::default(), Census::new(OWN));
        all.begin(20, OWN);
        let with_slots = || BTreeMap::from([(20, UID)]);
        assert_eq!(census.look(&all, with_slots, false), (0, 0));
        all.begin(21, 20);
        all.begin(22, OWN).bytes = Some(7);
        for _ in 0..LOOKS_YOUNG {
            assert_eq!(census.look(&all, with_slots, false), (1, 7));
        }
        assert_eq!(census.look(&all, with_slots, false), (2, 107));
        // The number is given again.
        all.end(21);
        assert_eq!(census.look(&all, with_slots, false), (1, 7));
        all.begin(21, 20).start = 2;
        assert_eq!(census.look(&all, with_slots, false), (1, 7));
    }

    #[test]
    fn slot_counts_only_for_the_user_that_the_kernel_names() {
        let (mut all, mut census) = (Fake::default(), Census::new(OWN));
        all.begin(20, OWN);
        all.begin(21, OWN).user = 5;
        all.begin(22, OWN).user = 5;
        let users = BTreeMap::from([(20, 5), (21, 5), (77, 5)]);
        assert_eq!(census.look(&all, || users, true), (2, 200));
        assert_eq!(census.measured(), MeasuredUsers::from([(UID, 100), (5, 200)]));
    }
}
