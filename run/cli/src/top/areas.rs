//! The areas of a process's address space, from /proc/PID/smaps.
//!
//! The kernel shows which maps have a userfaultfd, and how much of each is resident. It doesn't
//! know whether a missing page of such a map is folded or was never touched. With page protection
//! no map has a userfaultfd, so it doesn't show which memory without a file is managed.
use crate::machine::smaps::ProcessMap;
use crate::printable::printable;
use crate::program::plain;
use std::cmp::Reverse;
use std::fs;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Least time between two reads. A read takes at most a CPU's time divided by `COST`.
const PERIOD: Duration = Duration::from_secs(1);
const COST: u32 = 50;

/// The name of a map without one.
const ANONYMOUS: &str = "anonymous";

/// Maps next to each other with one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedArea {
    /// The file, or what the kernel calls it; `anonymous` without a name.
    pub name: String,
    pub bytes: u64,
    pub resident_bytes: u64,
    /// Whether memfold may fold it; `None` if that is not known.
    pub is_managed: Option<bool>,
    /// Address of its end.
    end: u64,
}

impl MappedArea {
    /// Returns the bytes that are not resident.
    pub fn missing_bytes(&self) -> u64 {
        self.bytes.saturating_sub(self.resident_bytes)
    }
}

/// Returns the areas of a process, managed ones first, each kind by size. memfold's own maps are
/// left out.
pub fn parse(smaps: &str) -> Vec<MappedArea> {
    let mut all: Vec<MappedArea> = Vec::new();
    let maps = ProcessMap::all(smaps).into_iter();
    maps.filter(|map| !map.is_own()).for_each(|map| push(&mut all, &map));
    if all.iter().all(|area| area.is_managed == Some(false)) {
        let is_fileless = |area: &&mut MappedArea| {
            let name = area.name.as_str();
            name == ANONYMOUS || name == "[heap]" || name.starts_with("[anon:")
        };
        all.iter_mut().filter(is_fileless).for_each(|area| area.is_managed = None);
    }
    all.sort_by_key(|area| {
        let is_other = area.is_managed == Some(false);
        (is_other, Reverse(if is_other { area.resident_bytes } else { area.bytes }))
    });
    all
}

/// Adds a map to the area before it, or as an area.
fn push(all: &mut Vec<MappedArea>, map: &ProcessMap) {
    let name = if map.name.is_empty() { ANONYMOUS.to_string() } else { printable(&map.name) };
    let is_managed = Some(map.is_registered());
    if let Some(last) = all.last_mut()
        && last.end == map.start
        && last.is_managed == is_managed
        && last.name == name
    {
        last.bytes += map.bytes();
        last.resident_bytes += map.resident_bytes;
        last.end = map.end;
        return;
    }
    let (bytes, resident_bytes) = (map.bytes(), map.resident_bytes);
    all.push(MappedArea { name, bytes, resident_bytes, is_managed, end: map.end });
}

/// The areas of the process that is looked at, or why there are none.
pub type ReadAreas = Result<Vec<MappedArea>, String>;

/// Reads the areas of one process at a time, in a thread, because that may take long.
#[derive(Default)]
pub struct AreaReader {
    looked: Option<LookedAt>,
}

struct LookedAt {
    pid: u32,
    areas: Arc<Mutex<Option<ReadAreas>>>,
}

impl AreaReader {
    /// Begins to read the areas of this process, and ends to read those of another.
    pub fn look_at(&mut self, pid: Option<u32>) {
        if self.looked.as_ref().map(|looked| looked.pid) == pid {
            return;
        }
        self.looked = pid.map(|pid| {
            let areas = Arc::new(Mutex::new(None));
            let to = Arc::downgrade(&areas);
            let watch = move || {
                while to.strong_count() > 0 {
                    let begin = Instant::now();
                    let areas = fs::read(format!("/proc/{pid}/smaps"));
                    let areas = areas.map(|text| parse(&String::from_utf8_lossy(&text)));
                    let areas = areas.map_err(|e| plain(&e));
                    let time = begin.elapsed();
                    let Some(to) = to.upgrade() else { return };
                    *to.lock().expect("no thread panics with the lock") = Some(areas);
                    drop(to);
                    thread::sleep(PERIOD.max(time * COST));
                }
            };
            // Without a thread the page shows no areas.
            drop(thread::Builder::new().name("memfold-areas".to_string()).spawn(watch));
            LookedAt { pid, areas }
        });
    }

    /// Returns the areas that were read last; `None` before the first read.
    pub fn areas(&self) -> Option<ReadAreas> {
        let looked = self.looked.as_ref()?;
        looked.areas.lock().expect("no thread panics with the lock").clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
7d00000000-7d00010000 rw-p 00000000 00:00 0 
Size:                 64 kB
Rss:                  16 kB
VmFlags: rd wr mr mw me um uw ac 
7d00010000-7d00030000 rw-p 00000000 00:00 0 
Rss:                   4 kB
VmFlags: rd wr mr mw me um uw ac 
7d00030000-7d10030000 rw-p 00000000 00:00 0 
Rss:                  40 kB
VmFlags: rd wr mr mw me nr dd nh 
7e00000000-7e00001000 r--p 00002000 fe:00 18500                      /opt/my program
Rss:                   4 kB
VmFlags: rd mr mw me 
7e10000000-7e10800000 rw-p 00000000 00:00 0                          [heap]
Rss:                 512 kB
VmFlags: rd wr mr mw me um uw ac 
";

    #[test]
    fn areas_are_merged_and_told_apart() {
        let areas_shown: Vec<_> = parse(SMAPS)
            .into_iter()
            .map(|a| (a.name, a.bytes >> 10, a.resident_bytes >> 10, a.is_managed))
            .collect();
        let of =
            |name: &str, kib, resident, managed| (name.to_string(), kib, resident, Some(managed));
        assert_eq!(
            areas_shown,
            [
                of("[heap]", 8192, 512, true),
                of("anonymous", 192, 20, true),
                of("/opt/my program", 4, 4, false)
            ]
        );
    }

    #[test]
    fn without_a_userfaultfd_it_is_not_known_what_is_managed() {
        let areas = parse(&SMAPS.replace(" um uw", ""));
        let areas_shown: Vec<_> =
            areas.iter().map(|area| (area.bytes >> 10, area.is_managed)).collect();
        assert_eq!(areas_shown, [(8192, None), (192, None), (4, Some(false))]);
    }

    #[test]
    fn own_areas_are_read_until_another_process_is_looked_at() {
        let mut reader = AreaReader::default();
        reader.look_at(Some(std::process::id()));
        let end = Instant::now() + Duration::from_secs(60);
        while reader.areas().is_none() && Instant::now() < end {
            thread::yield_now();
        }
        let areas = reader.areas().expect("it was read").expect("it can be read");
        assert!(areas.iter().any(|area| area.resident_bytes > 0 && area.is_managed == Some(false)));
        reader.look_at(None);
        assert_eq!(reader.areas(), None);
    }
}
