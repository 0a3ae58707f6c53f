//! When the memory that a process shares with others, because of a fork, is measured again.
//!
//! Each process counts only its part of shared memory, so that the sum is right. The kernel tells
//! that part by walking the whole page table, which is slow. So it is asked only after an event that
//! may have changed the part: a fork, enough faults of this process, or news from a process whose
//! own part has changed.

/// A process shares no memory if others have less than this of it. A smaller change is none.
pub const SHARED_LEAST_BYTES: u64 = 1 << 20;
/// A change of the part is one of this share of it.
const CHANGE_SHARE: u64 = 8;
/// Time from a fork to the measurement, and between two measurements at least, nanoseconds. Most
/// children of a fork end or execute a program before it.
const MEASURE_NS: u64 = 10_000_000;
/// Time from the first of many forks to the measurement, nanoseconds.
const FORKS_NS: u64 = 1_000_000_000;
/// Time between two measurements, at least, as a multiple of the CPU time of one. It doubles with
/// each one that has found no change, up to the second number.
const MEASURE_TIMES: u64 = 10;
const MEASURE_TIMES_MOST: u64 = 100;
/// The faults after which memory is measured double with each measurement that has found no change,
/// so often.
const VAIN_MOST: u32 = 16;

/// What a process has done until a moment. Times are nanoseconds.
#[derive(Copy, Clone, Default)]
pub struct ProcessMoves {
    pub now_ns: u64,
    /// CPU time of the program's threads.
    pub worked_ns: u64,
    /// Bytes of all faults and loads: at most so much shared memory has become private.
    pub moved_bytes: u64,
    /// The resident memory, bytes.
    pub anonymous: u64,
}

/// Shared memory of this process, and when to measure it again.
#[derive(Default)]
pub struct SharingWatch {
    is_sharing: bool,
    /// Whether this process may write to shared memory without paying for the copies.
    is_unpaid: bool,
    /// The part of the resident memory that counts in the processes that share it, bytes.
    pub others: u64,
    /// All resident memory that is shared, bytes.
    pub bytes: u64,
    /// Whether a measurement is due because of this process, or because of news.
    is_due: bool,
    has_news: bool,
    /// None is made before.
    from_ns: u64,
    /// The first fork since the last measurement, by any of the processes that share memory.
    forked_ns: Option<u64>,
    /// The forks of these processes, as they were counted last.
    forks: u32,
    /// The last measurement, its CPU time, and how many in a row have found no change.
    last: ProcessMoves,
    cost_ns: u64,
    vain: u32,
}

impl SharingWatch {
    /// Returns whether this process may share memory, because a fork has made it or a child of it.
    pub fn is_sharing(&self) -> bool {
        self.is_sharing
    }

    /// Notes a fork, in the parent and in the child. In the child all `others` bytes count as
    /// shared until the first measurement.
    pub fn note_fork(&mut self, now_ns: u64, others: Option<u64>) {
        if let Some(others) = others {
            (self.others, self.forked_ns) = (others, None);
        }
        self.wait_after_fork(now_ns);
        (self.is_sharing, self.is_unpaid, self.is_due, self.vain) = (true, true, true, 0);
    }

    /// Notes how many forks the processes have made that share memory with this one. After a new one
    /// it isn't known how many share it.
    pub fn note_forks(&mut self, now_ns: u64, forks: u32) {
        if core::mem::replace(&mut self.forks, forks) != forks {
            self.wait_after_fork(now_ns);
            self.has_news = true;
        }
    }

    /// Puts off the measurement after a fork. Processes that fork again and again are measured too.
    fn wait_after_fork(&mut self, now_ns: u64) {
        let first_ns = *self.forked_ns.get_or_insert(now_ns);
        self.from_ns = self.from_ns.max((now_ns + MEASURE_NS).min(first_ns + FORKS_NS));
    }

    /// Returns whether memory was measured since the last fork that this process knows of, its own or
    /// that of another process.
    pub fn is_counted(&self) -> bool {
        self.forked_ns.is_none()
    }

    /// Asks for a measurement if copies of shared memory are not paid for, because there is too little
    /// memory for them.
    pub fn ask(&mut self) {
        self.is_due |= self.is_sharing && self.is_unpaid;
    }

    /// Notes that each copy is paid for from now on. Returns whether that is new.
    pub fn begin_paying(&mut self) -> bool {
        core::mem::take(&mut self.is_unpaid) && self.is_sharing
    }

    /// Notes that the part of another process has changed, or that it has ended.
    pub fn note_news(&mut self, now_ns: u64) {
        self.from_ns = self.from_ns.max(now_ns + MEASURE_NS);
        self.has_news |= self.is_sharing;
    }

    /// Returns when a measurement is due, if there is reason for one.
    pub fn due_ns(&self) -> Option<u64> {
        (self.is_due || self.has_news).then_some(self.from_ns)
    }

    /// Returns whether to measure now.
    pub fn is_due(&mut self, now: &ProcessMoves) -> bool {
        if !self.is_sharing {
            return false;
        }
        let moved_bytes = now.moved_bytes.saturating_sub(self.last.moved_bytes)
            + self.last.anonymous.saturating_sub(now.anonymous);
        let worked_ns = now.worked_ns.saturating_sub(self.last.worked_ns);
        let least = change_of(self.others);
        let is_paid = worked_ns >= self.cost_ns * MEASURE_TIMES_MOST;
        self.is_due |= moved_bytes >= least << self.vain || moved_bytes >= least && is_paid;
        self.due_ns().is_some_and(|at_ns| now.now_ns >= at_ns)
    }

    /// Notes a measurement that took `cost_ns`: of `bytes` shared memory, `others` count in other
    /// processes. Returns whether the others must know, because this process has changed it.
    pub fn note(&mut self, now: &ProcessMoves, bytes: u64, others: u64, cost_ns: u64) -> bool {
        let is_changed = others.abs_diff(self.others) >= change_of(self.others);
        let is_own = self.is_due;
        self.vain = if is_changed { 0 } else { (self.vain + 1).min(VAIN_MOST) };
        let times = (MEASURE_TIMES << self.vain).min(MEASURE_TIMES_MOST);
        self.from_ns = now.now_ns + MEASURE_NS.max(cost_ns * times);
        (self.is_due, self.has_news, self.forked_ns) = (false, false, None);
        (self.last, self.cost_ns) = (*now, cost_ns);
        self.is_sharing = others >= SHARED_LEAST_BYTES;
        (self.bytes, self.others) = if self.is_sharing { (bytes, others) } else { (0, 0) };
        is_own && is_changed
    }
}

/// Returns the least change of so many bytes that counts.
fn change_of(bytes: u64) -> u64 {
    (bytes / CHANGE_SHARE).max(SHARED_LEAST_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const MS: u64 = 1_000_000;
    const COST_NS: u64 = 5 * MS;

    /// A process that has just been forked, of 100 MiB.
    struct Process {
        watch: SharingWatch,
        moves: ProcessMoves,
        others: u64,
        measured: u64,
    }

    impl Process {
        fn new() -> Process {
            let mut watch = SharingWatch::default();
            watch.note_fork(0, Some(100 * MIB));
            let moves = ProcessMoves { anonymous: 100 * MIB, ..ProcessMoves::default() };
            Process { watch, moves, others: 50 * MIB, measured: 0 }
        }

        /// Looks each millisecond of a second, in which the program works for `percent` of the time
        /// and has so many faults. Returns the number of measurements.
        fn second(&mut self, percent: u64, fault_mib: u64) -> u64 {
            let before = self.measured;
            for n in 0..1000 {
                self.moves.now_ns += MS;
                self.moves.worked_ns += MS / 100 * percent;
                self.moves.moved_bytes += fault_mib * MIB * (n % 10) / 4500;
                if self.watch.is_due(&self.moves) {
                    let shared_bytes = 100 * MIB;
                    self.watch.note(&self.moves, shared_bytes, self.others, COST_NS);
                    self.measured += 1;
                }
            }
            self.measured - before
        }
    }

    #[test]
    fn fork_is_measured_once_and_sleep_is_not() {
        let mut process = Process::new();
        assert_eq!(process.second(0, 0), 1);
        assert_eq!(process.watch.others, 50 * MIB);
        assert_eq!((0..60).map(|_| process.second(0, 0)).sum::<u64>(), 0);
        assert_eq!((0..60).map(|_| process.second(100, 0)).sum::<u64>(), 0, "work without faults");
    }

    #[test]
    fn process_that_forks_again_and_again_is_measured_once_in_a_second() {
        let mut process = Process::new();
        process.second(0, 0);
        let count = (0..5000).filter(|_| {
            process.moves.now_ns += 2 * MS;
            process.watch.note_fork(process.moves.now_ns, None);
            let is_due = process.watch.is_due(&process.moves);
            if is_due {
                process.watch.note(&process.moves, 100 * MIB, 50 * MIB, COST_NS);
            }
            is_due
        });
        assert!((9..=10).contains(&count.count()));
    }

    #[test]
    fn fork_of_another_process_is_unknown_until_the_next_measurement() {
        let mut process = Process::new();
        assert!(!process.watch.is_counted());
        process.second(0, 0);
        assert!(process.watch.is_counted());
        process.watch.note_forks(process.moves.now_ns, 1);
        assert!(!process.watch.is_counted() && !process.watch.is_due(&process.moves));
        assert_eq!(process.second(0, 0), 1);
        process.watch.note_forks(process.moves.now_ns, 1);
        assert!(process.watch.is_counted(), "it is known");
        // Where others fork all the time, it is measured nevertheless.
        for forks in 2..602 {
            process.moves.now_ns += 5 * MS;
            process.watch.note_forks(process.moves.now_ns, forks);
            if process.watch.is_due(&process.moves) {
                process.watch.note(&process.moves, 100 * MIB, 50 * MIB, COST_NS);
                process.measured += 1;
            }
        }
        assert!((2..=3).contains(&(process.measured - 2)), "{}", process.measured);
    }

    #[test]
    fn faults_that_change_nothing_take_one_hundredth_of_the_work() {
        let mut process = Process::new();
        process.second(100, 1000);
        let before = process.moves.worked_ns;
        let count: u64 = (0..60).map(|_| process.second(100, 1000)).sum();
        let cost = count * COST_NS;
        assert!(cost * 100 <= process.moves.worked_ns - before, "{cost}");
        let count: u64 = (0..600).map(|_| process.second(1, 1000)).sum();
        assert!(count <= 1 + 600 / 50, "{count}");
    }

    #[test]
    fn each_change_of_an_eighth_is_seen() {
        let mut process = Process::new();
        process.second(0, 0);
        for _ in 0..6 {
            process.others -= process.others / CHANGE_SHARE;
            process.second(50, 20);
            assert_eq!(process.watch.others, process.others);
        }
        process.moves.anonymous -= 60 * MIB;
        process.others = 0;
        assert_eq!(process.second(0, 0), 1, "memory that was unmapped");
        assert!(!process.watch.is_sharing());
        assert_eq!(process.second(100, 1000), 0);
    }

    #[test]
    fn news_are_measured_and_not_sent_on() {
        let mut process = Process::new();
        process.second(0, 0);
        process.watch.note_news(process.moves.now_ns);
        assert!(!process.watch.is_due(&process.moves), "a process may still be ending");
        process.moves.now_ns += 1000 * MS;
        assert!(process.watch.is_due(&process.moves));
        assert!(!process.watch.note(&process.moves, 100 * MIB, 0, COST_NS), "it is known");
        let mut process = Process::new();
        process.moves.now_ns += 1000 * MS;
        assert!(process.watch.is_due(&process.moves));
        assert!(process.watch.note(&process.moves, 100 * MIB, 50 * MIB, COST_NS));
    }
}
