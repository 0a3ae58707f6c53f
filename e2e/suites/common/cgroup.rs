//! A memory cgroup for a test, of version 1 or 2.
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// A cgroup with a memory limit. Dropping it removes it; its processes must have ended.
pub struct MemoryCgroup {
    pub folder: PathBuf,
}

impl MemoryCgroup {
    /// Makes a cgroup below that of the test, or else below the root. Where that can't be, as for
    /// users and in containers, prints a line and returns `None`.
    pub fn new(limit_bytes: u64) -> Option<MemoryCgroup> {
        let cgroup =
            parents().into_iter().find_map(|parent| MemoryCgroup::below(&parent, limit_bytes));
        if cgroup.is_none() {
            eprintln!("SKIPPED, NOTHING WAS TESTED: no memory cgroup can be made here");
        }
        cgroup
    }

    fn below(parent: &Path, limit_bytes: u64) -> Option<MemoryCgroup> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("memfold-test-{}-{}", std::process::id(), COUNT.fetch_add(1, Relaxed));
        let folder = parent.join(name);
        fs::create_dir(&folder).ok()?;
        let cgroup = MemoryCgroup { folder };
        let limit = |name: &str| cgroup.folder.join(name);
        let limit = ["memory.max", "memory.limit_in_bytes"].map(limit);
        let file = limit.iter().find(|file| file.exists())?;
        fs::write(file, limit_bytes.to_string()).ok()?;
        Some(cgroup)
    }

    /// Returns a script that moves itself into the cgroup and then executes its arguments.
    pub fn script(&self) -> String {
        format!("echo $$ >{}/cgroup.procs && exec \"$@\"", self.folder.display())
    }

    /// Returns the most memory that its processes had at once, or `None` where the kernel does not
    /// say (version 2 before Linux 5.19). A page that several processes share counts once.
    pub fn peak_bytes(&self) -> Option<u64> {
        let files = ["memory.peak", "memory.max_usage_in_bytes"];
        let text = files.iter().find_map(|name| fs::read_to_string(self.folder.join(name)).ok())?;
        Some(text.trim().parse().unwrap())
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.folder);
    }
}

/// Returns the folders below which a cgroup may be made.
fn parents() -> Vec<PathBuf> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let path = |is: &dyn Fn(&str) -> bool| {
        own.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let (controllers, path) = (fields.next()?, fields.next()?);
            is(controllers).then(|| path.trim_start_matches('/').to_string())
        })
    };
    let v1 = path(&|names| names.split(',').any(|name| name == "memory"));
    let v2 = path(&|names| names.is_empty());
    [("/sys/fs/cgroup/memory", v1), ("/sys/fs/cgroup", v2)]
        .into_iter()
        .flat_map(|(mount, path)| {
            let mount = Path::new(mount);
            path.into_iter().flat_map(move |path| [mount.join(path), mount.to_path_buf()])
        })
        .filter(|folder| folder.is_dir())
        .collect()
}
