//! Processes of a run that have no seat in its tables: small ones without an engine yet, and those
//! that no engine can manage. Their memory counts against the limit too, so memfold looks at them
//! from outside. And at all processes, if they are of several users: what a user's table says is
//! believed up to what the kernel says.
//!
//! A process is of the run if its parent was when it was first seen, or if it was given the run's
//! order. It stays so when its parent ends.
use crate::table::slots::{Measured, Slots, run_of};
use std::collections::{HashMap, HashSet};
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

/// Time between two looks while a process without a seat has [`SMALL_BYTES`], and otherwise.
const PERIOD: Duration = Duration::from_millis(100);
const PERIOD_MAX: Duration = Duration::from_secs(1);
/// Time between two looks if there are several users, who learn of one another by them.
const PERIOD_USERS: Duration = Duration::from_millis(10);
/// A look takes at most one part in so many of a CPU.
const COST: u32 = 50;
const SMALL_BYTES: u64 = 1 << 20;
/// From so much on it is asked what a process shares with others, which takes longer.
const LARGE_BYTES: u64 = 4 << 20;
/// The place of a process's start in /proc/PID/stat, behind its name.
const START: usize = 19;

/// A process, by its number and its start.
type Name = (u32, u64);

/// Who is of the run, as far as was seen.
struct Seatless {
    own: u32,
    members: HashMap<u32, u64>,
    strangers: HashSet<u32>,
    /// Those with a seat at the last look.
    seated: HashSet<u32>,
    /// The real user and the anonymous memory of each member at the last look, if there are several
    /// users.
    sizes: HashMap<u32, (u32, u64)>,
}

/// Looks for as long as this process lives.
pub fn watch(slots: &Slots) {
    let mut seatless = Seatless::new(std::process::id());
    let mut period = PERIOD / 2;
    loop {
        let begin = Instant::now();
        let (count, bytes) = seatless.look(slots);
        slots.bounds().set_seatless(count, bytes);
        slots.deal(Some(seatless.measured()));
        slots.note_totals();
        period = match bytes >= SMALL_BYTES {
            _ if slots.has_others() => PERIOD_USERS,
            true => PERIOD,
            false => (period * 2).min(PERIOD_MAX),
        };
        thread::sleep(period.max(begin.elapsed() * COST));
    }
}

impl Seatless {
    /// That of the run of the process `own`.
    fn new(own: u32) -> Seatless {
        Seatless {
            own,
            members: HashMap::new(),
            strangers: HashSet::new(),
            seated: HashSet::new(),
            sizes: HashMap::new(),
        }
    }

    /// How many processes of the run have no seat, and their anonymous memory, bytes. One that had a
    /// seat a moment ago is about to end, or to have it again (its engine starts anew).
    fn look(&mut self, slots: &Slots) -> (u64, u64) {
        self.find();
        let has_others = slots.has_others();
        let size = |pid: &u32| has_others.then(|| Some((*pid, sizes_of(*pid)?)))?;
        self.sizes = self.members.keys().filter_map(size).collect();
        // A table can name what process it likes.
        let is_its = |pid: u32, uid: u32| {
            !has_others || self.sizes.get(&pid).is_some_and(|size| size.0 == uid)
        };
        let seated: HashSet<u32> = slots
            .seated()
            .into_iter()
            .filter(|(pid, uid)| is_its(*pid, *uid))
            .map(|(pid, _)| pid)
            .collect();
        let had_none = |pid: &&u32| !seated.contains(pid) && !self.seated.contains(pid);
        let sizes = self.members.keys().filter(had_none).map(|pid| size_of(*pid));
        let sum = sizes.flatten().fold((0, 0), |(count, sum), bytes| (count + 1, sum + bytes));
        self.seated = seated;
        sum
    }

    /// What each user's processes had at the last look, if there are several users.
    fn measured(&self) -> Measured {
        let mut measured = Measured::new();
        for (uid, bytes) in self.sizes.values() {
            *measured.entry(*uid).or_default() += bytes;
        }
        measured
    }

    /// Brings the members up to date.
    fn find(&mut self) {
        let all: HashSet<u32> = numbers();
        self.strangers.retain(|pid| all.contains(pid));
        self.members.retain(|pid, start| stat(*pid).is_some_and(|(_, now)| now == *start));
        let mut new: Vec<(u32, u32, u64)> = all
            .iter()
            .filter(|pid| !self.strangers.contains(pid) && !self.members.contains_key(pid))
            .filter_map(|pid| stat(*pid).map(|(parent, start)| (*pid, parent, start)))
            .collect();
        // A parent may have a larger number than its child: until none is added.
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
            match run_of(pid) == Some(self.own) {
                true => drop(self.members.insert(pid, start)),
                false => drop(self.strangers.insert(pid)),
            }
        }
    }
}

/// The numbers of all processes that can be seen.
fn numbers() -> HashSet<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// The parent of a process, and when it started.
fn stat(pid: u32) -> Option<Name> {
    let text = fs::read(format!("/proc/{pid}/stat")).ok()?;
    // Its name, in parentheses, may have any byte in it.
    let end = text.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(&text[end + 1..]).ok()?;
    let mut fields = rest.split_ascii_whitespace().skip(1);
    let parent = fields.next()?.parse().ok()?;
    Some((parent, fields.nth(START - 2)?.parse().ok()?))
}

/// What counts of a process: its anonymous memory, bytes, with its part of what a fork shares.
/// `None` if it has none of its own: it has ended, or uses its parent's until it executes something.
fn size_of(pid: u32) -> Option<u64> {
    let (len, bytes) = statm(pid)?;
    if bytes < SMALL_BYTES {
        return (len > 0).then_some(bytes);
    }
    let parent = stat(pid)?.0;
    // Where the kernel doesn't tell, those of one length have.
    let has_same_length = || statm(parent).is_some_and(|(other, _)| other == len);
    if have_one_memory(pid, parent).unwrap_or_else(has_same_length) {
        return None;
    }
    let part = || {
        let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("Pss_Anon:"))?;
        Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
    };
    let part = if bytes >= LARGE_BYTES { part() } else { None };
    Some(part.unwrap_or(bytes))
}

/// The real user of a process, and its anonymous memory, also in swap, bytes.
fn sizes_of(pid: u32) -> Option<(u32, u64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let number = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_ascii_whitespace().next()?.parse().ok()
    };
    let kib = |name: &str| number(name).unwrap_or(0);
    Some((number("Uid:")? as u32, (kib("RssAnon:") + kib("VmSwap:")) << 10))
}

/// Address space and anonymous memory of a process, bytes.
fn statm(pid: u32) -> Option<(u64, u64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let mut pages = text.split_ascii_whitespace().map(|field| field.parse::<u64>().ok());
    let (len, resident, shared) = (pages.next()??, pages.next()??, pages.next()??);
    let page_bytes = rustix::param::page_size() as u64;
    Some((len * page_bytes, resident.saturating_sub(shared) * page_bytes))
}

/// Whether two processes have one address space, as after vfork; `None`: the kernel doesn't tell.
fn have_one_memory(pid: u32, other: u32) -> Option<bool> {
    const KCMP_VM: libc::c_long = 1;
    let (pid, other) = (libc::c_long::from(pid), libc::c_long::from(other));
    // SAFETY: only asks; the last two arguments are not used for this question.
    let answer = unsafe { libc::syscall(libc::SYS_kcmp, pid, other, KCMP_VM, 0, 0) };
    (answer >= 0).then_some(answer == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::slots::tests::claim;
    use std::io::{Read, Write};
    use std::process::{Child, Command, Stdio};

    /// A shell that has `mib` MiB of its own, and a child of it that has the same again. Both are
    /// that large when this returns.
    fn start(mib: usize) -> Child {
        let script =
            format!("x=$(head -c {mib}M /dev/zero | tr '\\0' x); (echo; read y; : $x); : $x");
        let mut command = Command::new("sh");
        command.args(["-c", &script]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        child
    }

    #[test]
    fn memory_of_processes_without_a_seat_counts_once() {
        let (slots, mut seatless) = (Slots::new().unwrap(), Seatless::new(std::process::id()));
        let mut child = start(8);
        let (count, bytes) = seatless.look(&slots);
        assert!(count >= 2, "{count}");
        let least = 8 << 20;
        assert!((least..2 * least).contains(&bytes), "a fork shares it: {bytes}");
        claim(&slots, child.id());
        let with_a_seat = seatless.look(&slots);
        assert_eq!(with_a_seat.0, count - 1);
        child.stdin.take().unwrap().write_all(b"\n").unwrap();
        child.wait().unwrap();
        assert_eq!(seatless.look(&slots).1, 0);
    }

    #[test]
    fn a_process_stays_of_the_run_when_its_parent_ends() {
        let mut seatless = Seatless::new(std::process::id());
        // The first child prints the number of its own child, and ends when it has read a line.
        let script = "sh -c 'read y' <&3 & echo $!; read x";
        let mut command = Command::new("sh");
        command.args(["-c", &format!("exec 3<&0; {script}")]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let out = child.stdout.take().unwrap();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).unwrap();
        let pid: u32 = line.trim().parse().unwrap();
        seatless.find();
        assert!(seatless.members.contains_key(&child.id()) && seatless.members.contains_key(&pid));
        child.kill().unwrap();
        child.wait().unwrap();
        seatless.find();
        assert!(!seatless.members.contains_key(&child.id()) && seatless.members.contains_key(&pid));
        drop(child.stdin.take());
    }
}
