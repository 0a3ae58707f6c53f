//! The memory of the machine, or of its cgroup if that has less.
pub mod limits;
pub mod oom;
pub mod smaps;

use std::fs;
use std::path::{Path, PathBuf};

/// Returns the bytes of memory that this process may use: MemTotal, or the kernel's own figure if
/// that can't be read. It is lowered to the memory limit of the process's cgroup (v1 or v2) and of
/// that cgroup's ancestors. Percentages of a size refer to it.
pub fn memory_bytes() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = mem_total(&text).unwrap_or_else(memfold_engine::memory_bytes);
    // Without /proc/self/cgroup no limit can be found, so the machine's memory counts.
    cgroup_bytes().unwrap_or(u64::MAX).min(total)
}

/// Returns the memory limit of this process's cgroup (v1 or v2), or of an ancestor if that is
/// lower. Returns `None` without a limit.
pub fn cgroup_bytes() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let limits = limit_files(&groups, &mounts).into_iter().filter_map(|file| read_limit(&file));
    limits.min()
}

fn mem_total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|l| l.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Returns the bytes in a limit file, or `None` if there is no limit, and for a missing file.
fn read_limit(file: &Path) -> Option<u64> {
    let bytes: u64 = fs::read_to_string(file).ok()?.trim().parse().ok()?;
    // Version 1 reports a number near the largest one if there is no limit.
    (bytes < 1 << 60).then_some(bytes)
}

/// Returns the limit files of the cgroup that `/proc/self/cgroup` names, and of every ancestor that
/// is mounted here.
fn limit_files(groups: &str, mounts: &str) -> Vec<PathBuf> {
    folders(groups, mounts).into_iter().map(|folder| folder.limit_file()).collect()
}

/// Returns the folders of the cgroup that `/proc/self/cgroup` names, and of every ancestor that is
/// mounted here, the nearest first.
fn folders(groups: &str, mounts: &str) -> Vec<MemoryFolder> {
    let mut mounts_in_memory = Vec::new();
    for mount in mounts.lines().filter_map(MemoryMount::parse) {
        let Some(group) = groups.lines().find_map(|line| mount.group_of(line)) else { continue };
        // A mount of a subtree (as in containers) shows the paths below its own root.
        let Ok(below) = group.strip_prefix(&mount.root) else { continue };
        let mut at = mount.point.join(below);
        loop {
            mounts_in_memory.push(MemoryFolder { path: at.clone(), v2: mount.v2 });
            if at == mount.point || !at.pop() {
                break;
            }
        }
    }
    mounts_in_memory
}

/// The folder of a cgroup that can limit memory.
#[derive(Clone, Debug)]
struct MemoryFolder {
    path: PathBuf,
    v2: bool,
}

impl MemoryFolder {
    /// Returns the name of its limit.
    fn limit_name(&self) -> &'static str {
        if self.v2 { "memory.max" } else { "memory.limit_in_bytes" }
    }

    fn limit_file(&self) -> PathBuf {
        self.path.join(self.limit_name())
    }
}

/// A mounted hierarchy that can limit memory.
struct MemoryMount {
    root: PathBuf,
    point: PathBuf,
    v2: bool,
}

impl MemoryMount {
    /// Parses a line of mountinfo: `id parent dev ROOT POINT options [fields] - TYPE source SUPER`.
    fn parse(line: &str) -> Option<MemoryMount> {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let (root, point) = (PathBuf::from(fields.next()?), PathBuf::from(fields.next()?));
        let mut rest = file_system.split(' ');
        let kind = rest.next()?;
        let v2 = kind == "cgroup2";
        let memory = kind == "cgroup" && rest.nth(1)?.split(',').any(|option| option == "memory");
        (v2 || memory).then_some(MemoryMount { root, point, v2 })
    }

    /// Returns the path in a line `id:controllers:PATH` of /proc/self/cgroup, if the line is about
    /// this hierarchy.
    fn group_of(&self, line: &str) -> Option<PathBuf> {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let ours = if self.v2 {
            controllers.is_empty()
        } else {
            controllers.split(',').any(|c| c == "memory")
        };
        ours.then(|| PathBuf::from(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_total_is_read_in_bytes() {
        assert_eq!(
            mem_total("MemTotal:       24684084 kB\nMemFree: 1 kB\n"),
            Some(24684084 * 1024)
        );
        assert_eq!(mem_total("MemFree: 1 kB\n"), None);
    }

    #[test]
    fn v2_limits_are_looked_for_up_to_the_mount() {
        let mounts =
            "30 20 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        let files = limit_files("0::/user.slice/job\n", mounts);
        let want = ["user.slice/job/", "user.slice/", ""]
            .map(|d| format!("/sys/fs/cgroup/{d}memory.max").into());
        assert_eq!(files, want as [PathBuf; 3]);
    }

    #[test]
    fn v1_paths_are_taken_below_the_mounted_root() {
        let mounts = "40 30 0:30 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n\
                      41 30 0:31 / /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n";
        let files = limit_files("4:cpu:/x\n3:memory:/docker/abc/in\n", mounts);
        let want =
            ["in/", ""].map(|d| format!("/sys/fs/cgroup/memory/{d}memory.limit_in_bytes").into());
        assert_eq!(files, want as [PathBuf; 2]);
    }

    #[test]
    fn this_machine_has_memory() {
        assert!(memory_bytes() > 1 << 20);
    }
}
