//! A memory cgroup for one run, version 1 or 2.

use crate::common::refusal::Refusal;
use crate::host::journal::{CGROUP_PREFIX, Journal, Undo};
use anyhow::Context;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

/// The version and mount point of the memory controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hierarchy {
    /// Version 1, mounted here.
    V1(PathBuf),
    /// Version 2, mounted here.
    V2(PathBuf),
}

/// A cgroup whose members are reclaimed to swap above a limit.
pub struct Cgroup {
    dir: PathBuf,
    v2: bool,
}

impl Hierarchy {
    /// Finds the memory controller of this machine.
    pub fn find() -> Result<Hierarchy, Refusal> {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        find_in(&mounts, |root| {
            fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default()
        })
        .ok_or_else(|| {
            Refusal::Machine("no memory cgroup controller is mounted (version 1 or 2)".into())
        })
    }
}

impl Cgroup {
    /// Makes an empty cgroup with a limit of `limit_bytes`.
    pub fn create(
        journal: &mut Journal,
        hierarchy: &Hierarchy,
        limit_bytes: u64,
    ) -> anyhow::Result<Cgroup> {
        let (Hierarchy::V1(root) | Hierarchy::V2(root)) = hierarchy;
        let v2 = matches!(hierarchy, Hierarchy::V2(_));
        if v2 {
            enable_v2_memory(journal, root)?;
        }
        let dir = root.join(format!("{CGROUP_PREFIX}{}", std::process::id()));
        journal.record(&Undo::RemoveCgroup { dir: dir.clone() })?;
        fs::create_dir(&dir).with_context(|| format!("making cgroup {}", dir.display()))?;
        let cgroup = Cgroup { dir, v2 };
        if v2 {
            cgroup.write("memory.max", &limit_bytes.to_string())?;
        } else {
            cgroup.write("memory.limit_in_bytes", &limit_bytes.to_string())?;
            cgroup.write("memory.swappiness", "100")?;
        }
        Ok(cgroup)
    }

    /// Moves a process into the cgroup. Its further allocations are charged here.
    pub fn add(&self, pid: i32) -> anyhow::Result<()> {
        self.write("cgroup.procs", &pid.to_string())
    }

    /// Keeps the kernel's figures of the cgroup up to date until the result is dropped.
    ///
    /// The kernel uses them to decide whether to age refaulting pages, and updates them only every
    /// few seconds (Linux 6.18, `mem_cgroup_flush_stats_ratelimited`). A program that touches all
    /// its memory at random is killed within that time, though all of it could be swapped. Reading
    /// `memory.stat` also updates them.
    pub fn keep_current(&self) -> Current {
        let (stop, path) = (Arc::new(AtomicBool::new(false)), self.dir.join("memory.stat"));
        let stop_of_thread = stop.clone();
        let thread = std::thread::spawn(move || {
            while !stop_of_thread.load(Relaxed) {
                let _ = fs::read(&path);
                std::thread::sleep(RENEWAL);
            }
        });
        Current { stop, thread: Some(thread) }
    }

    /// Returns the peak of charged memory in bytes. `None` if the kernel doesn't count it.
    pub fn peak_bytes(&self) -> Option<u64> {
        let name = if self.v2 { "memory.peak" } else { "memory.max_usage_in_bytes" };
        fs::read_to_string(self.dir.join(name)).ok()?.trim().parse().ok()
    }

    /// Returns how often the kernel killed a member because nothing could be reclaimed.
    pub fn oom_kills(&self) -> u64 {
        let name = if self.v2 { "memory.events" } else { "memory.oom_control" };
        let text = fs::read_to_string(self.dir.join(name)).unwrap_or_default();
        text.lines()
            .find_map(|line| line.strip_prefix("oom_kill "))
            .and_then(|n| n.trim().parse().ok())
            .unwrap_or(0)
    }

    fn write(&self, name: &str, value: &str) -> anyhow::Result<()> {
        let path = self.dir.join(name);
        fs::write(&path, value).with_context(|| format!("writing '{value}' to {}", path.display()))
    }
}

/// The interval between updates of a cgroup's figures.
const RENEWAL: Duration = Duration::from_millis(10);

/// Updates a cgroup's figures until it is dropped; see [`Cgroup::keep_current`].
pub struct Current {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Current {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Enables the memory controller for children of the root. The undo disables it.
fn enable_v2_memory(journal: &mut Journal, root: &Path) -> anyhow::Result<()> {
    let path = root.join("cgroup.subtree_control");
    let controllers =
        fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    if controllers.split_whitespace().any(|name| name == "memory") {
        return Ok(());
    }
    journal.record(&Undo::Write { path: path.clone(), value: "-memory".into() })?;
    fs::write(&path, "+memory").with_context(|| format!("writing '+memory' to {}", path.display()))
}

fn find_in(mounts: &str, controllers: impl Fn(&Path) -> String) -> Option<Hierarchy> {
    for line in mounts.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let [_, root, kind, options, ..] = fields[..] else { continue };
        let root = PathBuf::from(root);
        match kind {
            "cgroup" if options.split(',').any(|option| option == "memory") => {
                return Some(Hierarchy::V1(root));
            }
            "cgroup2" if controllers(&root).split_whitespace().any(|name| name == "memory") => {
                return Some(Hierarchy::V2(root));
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_controller_is_found_in_either_version() {
        let v1 = "cgroup /cg/cpu cgroup rw,cpu 0 0\ncgroup /cg/memory cgroup rw,memory 0 0\ncgroup2 /cg/u cgroup2 rw 0 0";
        assert_eq!(find_in(v1, |_| String::new()), Some(Hierarchy::V1("/cg/memory".into())));
        let v2 = "proc /proc proc rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0";
        assert_eq!(
            find_in(v2, |_| "cpu io memory".into()),
            Some(Hierarchy::V2("/sys/fs/cgroup".into()))
        );
        assert_eq!(find_in(v2, |_| "cpu io".into()), None);
    }
}
