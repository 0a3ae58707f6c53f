//! Why memory of a process is in memory: the reasons, and the bytes of each.
use crate::explain::memory::{CAUSES, Cause, ProcessMemory};
use serde_json::Value;

/// A reason why memory is in memory.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    Hot,
    Dense,
    Full,
    Pinned,
    Forked,
    Kept,
    Cause(Cause),
    NotYet,
    Other,
    NoEngine,
    Pool,
    Frames,
    Index,
    Files,
    Shmem,
}

/// A reason as it is printed.
pub struct ReasonText {
    pub reason: Reason,
    /// Its name in JSON.
    pub name: &'static str,
    pub what: &'static str,
    /// The remedy. Every reason has one, if only that nothing needs to be done.
    pub fix: &'static str,
}

const fn row(
    reason: Reason,
    name: &'static str,
    what: &'static str,
    fix: &'static str,
) -> ReasonText {
    ReasonText { reason, name, what, fix }
}

/// Every reason.
pub const REASONS: [ReasonText; 23] = [
    row(
        Reason::Hot,
        "hot",
        "used recently, or the limit leaves room for it",
        "lower the limit to fold more of it: memfold set PID --limit SIZE",
    ),
    row(Reason::Dense, "incompressible", "does not compress", "--swap DIR moves it to a file"),
    row(
        Reason::Full,
        "pool_full",
        "found no room in the pool",
        "raise --max-pool, or give --swap DIR",
    ),
    row(
        Reason::Pinned,
        "pinned",
        "pinned by a device",
        "nothing until the device's driver releases it",
    ),
    row(
        Reason::Forked,
        "fork_shared",
        "shared by processes since a fork",
        "nothing, it counts once; or fork before the data is large",
    ),
    row(
        Reason::Kept,
        "kept",
        "folding it costs far more time than it saves memory",
        "--swap DIR, or a stronger --codec",
    ),
    row(
        Reason::Cause(Cause::Locked),
        "locked",
        "locked in memory (mlock)",
        "let the program lock less",
    ),
    row(
        Reason::Cause(Cause::DontDump),
        "dont_dump",
        "kept out of core dumps (MADV_DONTDUMP)",
        "--dont-dump fold",
    ),
    row(
        Reason::Cause(Cause::Wiped),
        "wipe_on_fork",
        "zeros in children of fork (MADV_WIPEONFORK)",
        "nothing: it is for keys, and small",
    ),
    row(
        Reason::Cause(Cause::Mergeable),
        "mergeable",
        "the kernel may merge it (KSM)",
        "don't set PR_SET_MEMORY_MERGE",
    ),
    row(
        Reason::Cause(Cause::Special),
        "special",
        "huge pages (hugetlb), memory of devices, sealed memory",
        "let the program use plain memory",
    ),
    row(
        Reason::Cause(Cause::FileCopy),
        "file_copies",
        "written pages of private file mappings",
        "nothing: mostly data of programs and libraries",
    ),
    row(Reason::Cause(Cause::Stack), "stack", "the stack of the first thread", "nothing"),
    row(
        Reason::Cause(Cause::Small),
        "small_areas",
        "areas below 64 KiB, which have less than 1 MiB together",
        "let the program map larger areas",
    ),
    row(
        Reason::Cause(Cause::Heap),
        "early_heap",
        "the heap from before the engine",
        "nothing: what the program allocates later is managed",
    ),
    row(
        Reason::NotYet,
        "not_managed_yet",
        "not managed, because the run uses too little of its limit",
        "lower --limit, or --adopt-at",
    ),
    row(
        Reason::Other,
        "other_unmanaged",
        "stacks of threads, other memory from before the engine, very new memory",
        "nothing; memfold stat PID shows whether it grows",
    ),
    row(
        Reason::NoEngine,
        "no_engine",
        "processes without an engine, which are small",
        "nothing; docs/limits.md says when a process gets one",
    ),
    row(Reason::Pool, "pool", "compressed data", "a stronger --codec (zstd), or --swap DIR"),
    row(
        Reason::Frames,
        "frames",
        "memfold's frames: data that is being evicted or was loaded ahead",
        "nothing: it is bounded",
    ),
    row(Reason::Index, "index", "memfold's tables", "a larger --block makes them smaller"),
    row(
        Reason::Files,
        "files",
        "mapped pages of files",
        "nothing: the kernel drops them when it needs memory",
    ),
    row(
        Reason::Shmem,
        "shared_memory",
        "shared memory (memfd, tmpfs, System V)",
        "let the program use less: memfold can't fold it",
    ),
];

impl Reason {
    /// Returns whether the limit of the run counts it.
    pub fn is_counted(self) -> bool {
        !matches!(self, Reason::Files | Reason::Shmem)
    }
}

/// The counters of a process that are read, of [`memfold_stats::FIGURES`].
const COUNTERS: [&str; 11] = [
    "refused_dense_bytes",
    "refused_full_bytes",
    "refused_pinned_bytes",
    "refused_shared_bytes",
    "kept_bytes",
    "resident_bytes",
    "unmanaged_bytes",
    "pool_bytes",
    "frame_bytes",
    "index_bytes",
    "adopted_bytes",
];

/// The memory of some processes by reason.
#[derive(Default)]
pub struct Explanation {
    /// All resident memory by the kernel's count.
    pub resident_bytes: u64,
    /// The bytes of each of [`REASONS`].
    bytes: [u64; REASONS.len()],
}

impl Explanation {
    /// Adds a process with an engine, which has published these counters.
    pub fn add(&mut self, counters: &Value, memory: &ProcessMemory) {
        self.resident_bytes += memory.resident_bytes();
        self.add_files(memory);
        let [
            dense,
            full,
            pinned_bytes,
            forked,
            kept_bytes,
            resident,
            unmanaged_bytes,
            pool,
            frames,
            index,
            adopted_bytes,
        ] = COUNTERS.map(|name| counters[name].as_u64().unwrap_or(0));
        // The counters are of slightly different moments. No part is larger than the whole.
        let managed = [
            (Reason::Dense, dense),
            (Reason::Full, full),
            (Reason::Pinned, pinned_bytes),
            (Reason::Forked, forked),
            (Reason::Kept, kept_bytes),
        ];
        let rest = self.add_parts(resident, managed.into_iter());
        self.raise(Reason::Hot, rest);
        let causes = CAUSES.into_iter().map(Reason::Cause).zip(memory.cause_bytes);
        let rest = self.add_parts(unmanaged_bytes, causes);
        self.raise(if adopted_bytes == 0 { Reason::NotYet } else { Reason::Other }, rest);
        for (reason, bytes) in
            [(Reason::Pool, pool), (Reason::Frames, frames), (Reason::Index, index)]
        {
            self.raise(reason, bytes);
        }
    }

    /// Adds a process without an engine.
    pub fn add_small(&mut self, memory: &ProcessMemory) {
        self.resident_bytes += memory.resident_bytes();
        self.add_files(memory);
        self.raise(Reason::NoEngine, memory.anonymous_bytes);
    }

    /// Adds processes without an engine of which only the private memory is known.
    pub fn add_private(&mut self, bytes: u64) {
        self.resident_bytes += bytes;
        self.raise(Reason::NoEngine, bytes);
    }

    fn add_files(&mut self, memory: &ProcessMemory) {
        self.raise(Reason::Files, memory.file_bytes);
        self.raise(Reason::Shmem, memory.shmem_bytes);
    }

    /// Adds parts of `whole` as long as something of it is left. Returns the rest.
    fn add_parts(&mut self, whole: u64, parts: impl Iterator<Item = (Reason, u64)>) -> u64 {
        parts.fold(whole, |rest, (reason, bytes)| {
            self.raise(reason, bytes.min(rest));
            rest - bytes.min(rest)
        })
    }

    fn raise(&mut self, reason: Reason, bytes: u64) {
        let at = REASONS.iter().position(|row| row.reason == reason);
        self.bytes[at.expect("every reason has a row")] += bytes;
    }

    /// Returns every reason that has bytes, the largest first.
    pub fn rows(&self) -> Vec<(&'static ReasonText, u64)> {
        let mut rows: Vec<_> =
            REASONS.iter().zip(self.bytes).filter(|(_, bytes)| *bytes > 0).collect();
        rows.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        rows
    }

    /// Returns the part of the resident memory that the reasons explain. memfold's counters and the
    /// kernel's are read one after the other. Their difference is unexplained, whichever is larger.
    pub fn explained_bytes(&self) -> u64 {
        let sum: u64 = self.bytes.iter().sum();
        self.resident_bytes.saturating_sub(sum.abs_diff(self.resident_bytes))
    }

    /// Returns that part as percent.
    pub fn explained_percent(&self) -> f64 {
        match self.resident_bytes {
            0 => 100.0,
            all => self.explained_bytes() as f64 * 100.0 / all as f64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(explanation: &Explanation, name: &str) -> u64 {
        explanation.rows().iter().find(|(row, _)| row.name == name).map_or(0, |row| row.1)
    }

    #[test]
    fn every_reason_has_one_row_with_a_remedy() {
        let all = CAUSES.into_iter().map(Reason::Cause);
        for cause in all {
            assert_eq!(REASONS.iter().filter(|row| row.reason == cause).count(), 1, "{cause:?}");
        }
        let mut names: Vec<_> = REASONS.iter().map(|row| row.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), REASONS.len());
        assert!(REASONS.iter().all(|row| !row.what.is_empty() && !row.fix.is_empty()));
        for name in COUNTERS {
            assert!(memfold_stats::FIGURES.iter().any(|figure| figure.name == name), "{name}");
        }
    }

    #[test]
    fn parts_are_no_larger_than_their_whole_and_sums_agree() {
        let counters = json!({"resident_bytes": 1000, "refused_dense_bytes": 300, "kept_bytes": 900,
            "unmanaged_bytes": 500, "pool_bytes": 70, "frame_bytes": 20, "index_bytes": 10, "adopted_bytes": 9});
        let mut memory = ProcessMemory {
            anonymous_bytes: 1600,
            file_bytes: 40,
            shmem_bytes: 60,
            ..Default::default()
        };
        memory.cause_bytes[0] = 400;
        memory.cause_bytes[7] = 300;
        let mut all = Explanation::default();
        all.add(&counters, &memory);
        let expected = [
            ("incompressible", 300),
            ("kept", 700),
            ("hot", 0),
            ("locked", 400),
            ("small_areas", 100),
            ("other_unmanaged", 0),
            ("pool", 70),
            ("frames", 20),
            ("index", 10),
            ("files", 40),
            ("shared_memory", 60),
        ];
        for (name, bytes) in expected {
            assert_eq!(of(&all, name), bytes, "{name}");
        }
        assert_eq!((all.resident_bytes, all.explained_bytes()), (1700, 1700));
        assert_eq!(all.rows()[0].1, 700, "the largest comes first");
        memory.anonymous_bytes += 300;
        let mut more = Explanation::default();
        more.add(&counters, &memory);
        assert_eq!((more.resident_bytes, more.explained_bytes()), (2000, 1700));
        memory.anonymous_bytes -= 600;
        let mut less = Explanation::default();
        less.add(&counters, &memory);
        assert_eq!((less.resident_bytes, less.explained_bytes()), (1400, 1100), "counted too much");
    }

    #[test]
    fn memory_before_adoption_and_without_an_engine_is_told_apart() {
        let memory = ProcessMemory { anonymous_bytes: 800, ..Default::default() };
        let mut all = Explanation::default();
        all.add(&json!({"unmanaged_bytes": 800, "adopted_bytes": 0}), &memory);
        all.add_small(&memory);
        all.add_private(5);
        assert_eq!((of(&all, "not_managed_yet"), of(&all, "no_engine")), (800, 805));
        assert_eq!(all.explained_percent(), 100.0);
        assert_eq!(Explanation::default().explained_percent(), 100.0);
    }
}
