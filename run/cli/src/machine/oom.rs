//! How often the kernel has ended processes for lack of memory, by the kernel's own counts.
use crate::machine::{MemoryFolder, folders, read_limit};
use std::fs;
use std::path::{Path, PathBuf};

/// The kernel's counts at one moment.
pub struct OomCounts {
    /// The cgroup of this process and its ancestors, the nearest first.
    groups: Vec<GroupCounts>,
    /// Processes of this machine that were ended.
    machine: u64,
}

struct GroupCounts {
    folder: MemoryFolder,
    /// Processes of the cgroup that were ended.
    kills: u64,
    /// How often the cgroup had no memory left within its own limit.
    shortages: u64,
}

/// The processes that the kernel has ended between two moments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OomKills {
    /// Those of this process's cgroup.
    pub in_group: u64,
    /// Those of this machine, with those of the cgroup.
    pub in_machine: u64,
    /// The limit that was reached. `None` if it is unknown, or if the machine itself was short of memory.
    pub limit: Option<GroupLimit>,
}

/// The memory limit of a cgroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupLimit {
    /// Its folder.
    pub folder: PathBuf,
    /// The kernel's name for the limit.
    pub name: &'static str,
    pub bytes: u64,
}

impl OomCounts {
    /// Reads the present counts. Without cgroups or /proc they are 0.
    pub fn now() -> OomCounts {
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let groups = folders(&groups, &mounts).into_iter().filter_map(GroupCounts::read).collect();
        OomCounts { groups, machine: count(Path::new("/proc/vmstat"), "oom_kill").unwrap_or(0) }
    }

    /// Returns the processes that were ended from this moment to `later`.
    pub fn until(&self, later: &OomCounts) -> OomKills {
        let before =
            |now: &GroupCounts| self.groups.iter().find(|one| one.folder.path == now.folder.path);
        let in_group = later
            .groups
            .first()
            .and_then(|now| Some(now.kills.saturating_sub(before(now)?.kills)))
            .unwrap_or(0);
        let was_short =
            |now: &&GroupCounts| before(now).is_some_and(|b| now.shortages > b.shortages);
        let limit = later.groups.iter().filter(was_short).find_map(|now| now.folder.limit());
        OomKills {
            in_group,
            in_machine: later.machine.saturating_sub(self.machine).max(in_group),
            limit,
        }
    }
}

impl GroupCounts {
    /// Reads the counts of a cgroup. Returns `None` if it has none, as the root of version 2.
    fn read(folder: MemoryFolder) -> Option<GroupCounts> {
        let of = |file: &str, name| count(&folder.path.join(file), name);
        let (kills, shortages) = match folder.v2 {
            true => (of("memory.events", "oom_kill")?, of("memory.events.local", "oom")),
            false => (of("memory.oom_control", "oom_kill")?, of("memory.failcnt", "")),
        };
        Some(GroupCounts { kills, shortages: shortages.unwrap_or(0), folder })
    }
}

impl MemoryFolder {
    fn limit(&self) -> Option<GroupLimit> {
        let bytes = read_limit(&self.limit_file())?;
        Some(GroupLimit { folder: self.path.clone(), name: self.limit_name(), bytes })
    }
}

/// Returns the number in a file's line `NAME NUMBER`. The file has only the number if the name is empty.
fn count(file: &Path, name: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    let rest = |line: &str| line.strip_prefix(name)?.trim().parse().ok();
    text.lines()
        .filter(|line| name.is_empty() || line.split(' ').next() == Some(name))
        .find_map(rest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_testkit::scratch::Scratch;

    /// Writes the files of a cgroup of version 2.
    fn write(folder: &Path, kills: u64, shortages: u64, limit: &str) {
        fs::create_dir_all(folder).unwrap();
        let write_file = |name: &str, text: String| fs::write(folder.join(name), text).unwrap();
        write_file("memory.events", format!("low 0\noom 9\noom_kill {kills}\noom_group_kill 7\n"));
        write_file("memory.events.local", format!("low 0\noom {shortages}\noom_kill {kills}\n"));
        write_file("memory.max", format!("{limit}\n"));
    }

    fn counts(folders: &[&Path], machine: u64) -> OomCounts {
        let read_counts =
            |path: &&Path| GroupCounts::read(MemoryFolder { path: path.to_path_buf(), v2: true });
        OomCounts { groups: folders.iter().filter_map(read_counts).collect(), machine }
    }

    #[test]
    fn limit_that_was_reached_may_be_an_ancestors() {
        let scratch = Scratch::new();
        let (outer, inner) = (scratch.0.join("outer"), scratch.0.join("outer/inner"));
        let folders = [&*inner, &*outer, &*scratch.0];
        write(&outer, 3, 4, "67108864");
        write(&inner, 1, 1, "max");
        let before = counts(&folders, 10);
        assert_eq!(before.groups.len(), 2, "the root has no such files");
        assert_eq!(before.until(&counts(&folders, 10)), OomKills::default());
        write(&outer, 5, 6, "67108864");
        write(&inner, 3, 1, "max");
        let kills = before.until(&counts(&folders, 15));
        let limit = GroupLimit { folder: outer.clone(), name: "memory.max", bytes: 64 << 20 };
        assert_eq!(kills, OomKills { in_group: 2, in_machine: 5, limit: Some(limit) });
        write(&outer, 5, 4, "67108864");
        let kills = before.until(&counts(&folders, 10));
        assert_eq!(kills, OomKills { in_group: 2, in_machine: 2, limit: None }, "of the machine");
    }

    #[test]
    fn counts_of_version_1_are_read() {
        let scratch = Scratch::new();
        let read_counts = || GroupCounts::read(MemoryFolder { path: scratch.0.clone(), v2: false });
        assert!(read_counts().is_none());
        scratch.file("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n", 0o644);
        scratch.file("memory.failcnt", "17\n", 0o644);
        let counts = read_counts().unwrap();
        assert_eq!((counts.kills, counts.shortages), (2, 17));
    }
}
