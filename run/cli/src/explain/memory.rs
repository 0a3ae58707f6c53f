//! The memory of a process as the kernel describes it, from /proc/PID/smaps.
use crate::machine::smaps::{ProcessMap, kib};
use std::collections::HashSet;
use std::fs;

/// Areas below this size are not managed, bytes.
const SMALL_BYTES: u64 = 64 << 10;

/// Causes that the kernel shows, for anonymous memory that memfold does not manage.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    Locked,
    DontDump,
    Wiped,
    Mergeable,
    Special,
    FileCopy,
    Stack,
    Small,
    /// The heap from before the engine.
    Heap,
}

/// Every cause, in the order in which they are looked for.
pub const CAUSES: [Cause; 9] = [
    Cause::Locked,
    Cause::DontDump,
    Cause::Wiped,
    Cause::Mergeable,
    Cause::Special,
    Cause::FileCopy,
    Cause::Stack,
    Cause::Small,
    Cause::Heap,
];

/// The resident memory of a process, bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessMemory {
    pub anonymous_bytes: u64,
    /// Mapped pages of files, without shared memory.
    pub file_bytes: u64,
    pub shmem_bytes: u64,
    /// The anonymous memory of each of [`CAUSES`].
    pub cause_bytes: [u64; CAUSES.len()],
}

impl ProcessMemory {
    /// Reads the memory of a process. Returns `None` if it has ended. If the kernel does not show
    /// its areas, as those of a process that is not dumpable, the causes are 0.
    pub fn read(pid: u32) -> Option<ProcessMemory> {
        let read_file = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).ok();
        let tmpfs = read_file("mountinfo").map_or(HashSet::new(), |text| tmpfs_devices(&text));
        match read_file("smaps").filter(|text| !text.is_empty()) {
            Some(text) => Some(ProcessMemory::of_areas(&text, &tmpfs)),
            None => of_status(&read_file("status")?),
        }
    }

    /// Returns all resident memory.
    pub fn resident_bytes(&self) -> u64 {
        self.anonymous_bytes + self.file_bytes + self.shmem_bytes
    }

    fn of_areas(smaps: &str, tmpfs: &HashSet<String>) -> ProcessMemory {
        let (mut memory, maps) = (ProcessMemory::default(), ProcessMap::all(smaps));
        maps.iter().for_each(|map| memory.add(map, tmpfs));
        if !maps.iter().any(ProcessMap::is_registered) {
            // Without userfaultfd nothing tells which part of the heap is managed.
            memory.cause_bytes[CAUSES.len() - 1] = 0;
        }
        memory
    }

    fn add(&mut self, map: &ProcessMap, tmpfs: &HashSet<String>) {
        let of_file = map.resident_bytes.saturating_sub(map.anonymous_bytes);
        match is_shmem(map, tmpfs) {
            true => self.shmem_bytes += of_file,
            false => self.file_bytes += of_file,
        }
        self.anonymous_bytes += map.anonymous_bytes;
        if let Some(at) = CAUSES.iter().position(|cause| is_kept_by(map, *cause)) {
            self.cause_bytes[at] += map.anonymous_bytes;
        }
    }
}

/// Returns the memory of a process from /proc/PID/status. `None` without memory: a process that has ended and
/// was not waited for.
fn of_status(status: &str) -> Option<ProcessMemory> {
    let of = |name: &str| status.lines().find_map(|line| kib(line, name));
    Some(ProcessMemory {
        anonymous_bytes: of("RssAnon:")?,
        file_bytes: of("RssFile:")?,
        shmem_bytes: of("RssShmem:")?,
        cause_bytes: Default::default(),
    })
}

/// Returns the devices of the mounts of tmpfs, as smaps writes them.
fn tmpfs_devices(mountinfo: &str) -> HashSet<String> {
    let device = |line: &str| {
        let (mount, file_system) = line.split_once(" - ")?;
        let (major, minor) = mount.split(' ').nth(2)?.split_once(':')?;
        let [major, minor] = [major, minor].map(|number| number.parse::<u32>().ok());
        file_system.starts_with("tmpfs ").then_some(format!("{:02x}:{:02x}", major?, minor?))
    };
    mountinfo.lines().filter_map(device).collect()
}

/// Returns whether the pages of a map's file are shared memory. The kernel's own mount of it has the
/// device 0:1.
fn is_shmem(map: &ProcessMap, tmpfs: &HashSet<String>) -> bool {
    const NAMES: [&str; 3] = ["/memfd:", "/SYSV", "/dev/zero"];
    let is_named = NAMES.iter().any(|name| map.name.starts_with(name));
    map.has_inode() && (is_named || map.device == "00:01" || tmpfs.contains(&map.device))
}

/// Returns whether memfold does not manage a map for this cause. Maps that are registered with a
/// userfaultfd are managed, or of the program's own; unless they are locked.
fn is_kept_by(map: &ProcessMap, cause: Cause) -> bool {
    if map.is_own() || (cause != Cause::Locked && map.is_registered()) {
        return false;
    }
    let any = |flags: &[&str]| flags.iter().any(|flag| map.has(flag));
    match cause {
        Cause::Locked => any(&["lo"]),
        Cause::DontDump => any(&["dd"]) && !map.has_inode(),
        Cause::Wiped => any(&["wf"]),
        Cause::Mergeable => any(&["mg"]),
        Cause::Special => any(&["ht", "io", "pf", "mm", "sl"]),
        Cause::FileCopy => map.has_inode(),
        Cause::Stack => any(&["gd"]) || map.name == "[stack]",
        Cause::Small => map.bytes() < SMALL_BYTES,
        Cause::Heap => map.name == "[heap]",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
55d0c1a2e000-55d0c1a4f000 r-xp 00000000 fe:01 12         /usr/bin/app (deleted)
Rss:                  40 kB
Anonymous:             4 kB
VmFlags: rd ex mr mw me
7f1000000000-7f1000400000 rw-s 00000000 00:01 12         /memfd:a b (deleted)
Rss:                 100 kB
Anonymous:             0 kB
VmFlags: rd wr sh lo
7f2000000000-7f2000400000 rw-p 00000000 00:00 0
Rss:                 200 kB
Anonymous:           200 kB
VmFlags: rd wr um uw ac
7f3000000000-7f3000400000 rw-p 00000000 00:00 0          [anon:locked]
Rss:                  80 kB
Anonymous:            80 kB
VmFlags: rd wr lo ac um
7f4000000000-7f4000400000 rw-p 00000000 00:00 0
Rss:                  16 kB
Anonymous:            16 kB
VmFlags: rd wr nr dd nh
7f5000000000-7f5000008000 rw-p 00000000 00:00 0
Rss:                  12 kB
Anonymous:            12 kB
VmFlags: rd wr mr
560000000000-560000400000 rw-p 00000000 00:00 0          [heap]
Rss:                  24 kB
Anonymous:            24 kB
VmFlags: rd wr mr
7f6000000000-7f6000400000 r--s 00000000 00:2b 7          /dev/shm/x
Rss:                   8 kB
Anonymous:             0 kB
VmFlags: rd mr
";

    #[test]
    fn areas_are_sorted_by_cause() {
        let tmpfs = tmpfs_devices(
            "30 20 0:43 / /dev/shm rw - tmpfs tmpfs rw\n31 20 254:1 / / rw - ext4 /dev/a rw\n",
        );
        assert_eq!(tmpfs, HashSet::from(["00:2b".to_string()]));
        let memory = ProcessMemory::of_areas(SMAPS, &tmpfs);
        let kib = |bytes: u64| bytes >> 10;
        assert_eq!(kib(memory.anonymous_bytes), 4 + 200 + 80 + 16 + 12 + 24);
        assert_eq!((kib(memory.file_bytes), kib(memory.shmem_bytes)), (36, 108));
        assert_eq!(kib(memory.resident_bytes()), 40 + 100 + 200 + 80 + 16 + 12 + 24 + 8);
        let of = |cause| memory.cause_bytes[CAUSES.iter().position(|one| *one == cause).unwrap()];
        assert_eq!([Cause::Locked, Cause::FileCopy, Cause::Small].map(of).map(kib), [80, 4, 12]);
        assert_eq!(of(Cause::Heap), 24 << 10);
        assert_eq!(kib(memory.cause_bytes.iter().sum()), 120, "managed memory and zones have none");
        let without_managed = ProcessMemory::of_areas(&SMAPS.replace(" um", ""), &tmpfs);
        assert_eq!(without_managed.cause_bytes[8], 24 << 10, "areas are write-protected too");
        let without_managed =
            ProcessMemory::of_areas(&SMAPS.replace(" um", "").replace(" uw", ""), &tmpfs);
        assert_eq!(without_managed.cause_bytes[8], 0, "a part of the heap may be managed");
    }

    #[test]
    fn own_memory_is_read_and_status_agrees() {
        let memory = ProcessMemory::read(std::process::id()).unwrap();
        let status = of_status(&fs::read_to_string("/proc/self/status").unwrap()).unwrap();
        let (all, other) = (memory.resident_bytes(), status.resident_bytes());
        assert!(all.abs_diff(other) < all / 4, "{memory:?} {status:?}");
        assert_eq!(ProcessMemory::read(u32::MAX), None);
    }
}
