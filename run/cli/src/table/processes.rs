//! The census of a run's processes ([`memfold_run::census`]), taken from /proc.
use memfold_run::census::{Census, Processes};
use memfold_run::request::RunRequest;
use memfold_run::users::UserTables;
use std::collections::BTreeSet;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

/// Time between two looks while a process without a slot has [`SMALL_BYTES`]. `PERIOD_MAX` is the
/// time while there are smaller ones, whose growth is no event. `PERIOD_REST` is the time otherwise.
const PERIOD: Duration = Duration::from_millis(100);
const PERIOD_MAX: Duration = Duration::from_secs(1);
const PERIOD_REST: Duration = Duration::from_secs(10);
/// Time between two looks if there are several users, and between two deals of the bounds.
const PERIOD_USERS: Duration = Duration::from_millis(10);
/// A look takes at most a CPU's time divided by this.
const COST: u32 = 50;
const SMALL_BYTES: u64 = 1 << 20;
/// From this size on, the part of a process's memory that it shares is measured, which takes
/// longer.
const LARGE_BYTES: u64 = 4 << 20;
/// Index of a process's start time in /proc/PID/stat, counted after its name.
const START: usize = 19;

/// Takes looks for as long as this process lives, and deals the bounds between several users. The
/// thread that adds a user must stir the first table, so that the first deal is not late. Calls
/// `after` after each look.
pub fn watch(tables: &UserTables, mut after: impl FnMut()) {
    let mut census = Census::new(std::process::id());
    let mut period = PERIOD / 2;
    loop {
        let (begin, stirs) = (Instant::now(), tables.tables()[0].stirred());
        let (count, bytes) = look(&mut census, tables);
        tables.bounds().set_slotless(count, bytes);
        tables.deal(Some(census.measured()));
        tables.note_totals();
        after();
        period = match bytes >= SMALL_BYTES {
            _ if tables.has_others() => PERIOD_USERS,
            true => PERIOD,
            false => (period * 2).min(if count > 0 { PERIOD_MAX } else { PERIOD_REST }),
        };
        let (cost, had_others) = (begin.elapsed() * COST, tables.has_others());
        if deal_until(begin + cost, begin + period.max(cost), tables, (stirs, had_others)) {
            period = PERIOD / 2;
        }
    }
}

/// Deals the bounds between several users until `end`. Unlike a look this costs next to nothing,
/// because it reads the tables only. For one user, rests. The end comes sooner, but not before
/// `least`, if the processes have changed since they were stirred `seen` times, or at once if the
/// second user came after `seen`: then it returns `true`.
fn deal_until(least: Instant, end: Instant, tables: &UserTables, seen: (u32, bool)) -> bool {
    let (own, (stirred, had_others)) = (tables.tables()[0], seen);
    loop {
        let (now, has_others) = (Instant::now(), tables.has_others());
        let has_changed = own.stirred() != stirred;
        // Processes that begin one after another end only one rest. The first deal between several
        // users is not late.
        if now >= end || has_changed && (now >= least || has_others != had_others) {
            // So much is left for those that begin together.
            thread::sleep(if has_changed { PERIOD / 10 } else { Duration::ZERO });
            return has_changed;
        }
        let time_left = if has_changed { least } else { end }.saturating_duration_since(now);
        if !has_others && !has_changed {
            own.rest(stirred, time_left.as_nanos() as u64);
            continue;
        }
        thread::sleep(time_left.min(PERIOD_USERS));
        if has_others {
            tables.deal(None);
            tables.note_totals();
        }
    }
}

/// Takes a look with [`Census::look`]. Whether there are several users is read before the processes
/// with slots.
fn look(census: &mut Census, tables: &UserTables) -> (u64, u64) {
    census.look(&ProcFiles, || tables.with_slots(), tables.has_others())
}

/// Returns the run of a process, from the request that it was given. A small process has no slot in
/// the table.
pub fn run_of(pid: u32) -> Option<u32> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    RunRequest::find(&environment)?.runner()
}

/// The processes in /proc.
struct ProcFiles;

impl Processes for ProcFiles {
    fn numbers(&self) -> BTreeSet<u32> {
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
    }

    fn parent_and_start(&self, pid: u32) -> Option<(u32, u64)> {
        stat(pid)
    }

    fn runner_of(&self, pid: u32) -> Option<u32> {
        run_of(pid)
    }

    fn bytes_of(&self, pid: u32) -> Option<u64> {
        size_of(pid)
    }

    fn user_and_bytes_of(&self, pid: u32) -> Option<(u32, u64)> {
        sizes_of(pid)
    }
}

/// Returns the parent of a process and its start time.
fn stat(pid: u32) -> Option<(u32, u64)> {
    let text = fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may have any byte in it.
    let end = text.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(&text[end + 1..]).ok()?;
    let mut fields = rest.split_ascii_whitespace().skip(1);
    let parent = fields.next()?.parse().ok()?;
    Some((parent, fields.nth(START - 2)?.parse().ok()?))
}

/// Returns the counted memory of a process, bytes: its anonymous memory, with only its part of
/// memory that is shared after a fork. Returns `None` if it has no memory of its own: it has ended,
/// or it uses its parent's until it executes a program.
fn size_of(pid: u32) -> Option<u64> {
    let (len, bytes) = statm(pid)?;
    if bytes < SMALL_BYTES {
        return (len > 0).then_some(bytes);
    }
    let parent = stat(pid)?.0;
    // If the kernel doesn't tell, address spaces of the same length are taken for the same one.
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

/// Returns the real user of a process, and its anonymous memory including swap, bytes.
fn sizes_of(pid: u32) -> Option<(u32, u64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let number = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_ascii_whitespace().next()?.parse().ok()
    };
    let kib = |name: &str| number(name).unwrap_or(0);
    Some((number("Uid:")? as u32, (kib("RssAnon:") + kib("VmSwap:")) << 10))
}

/// Returns the length of a process's address space and its anonymous memory, bytes.
fn statm(pid: u32) -> Option<(u64, u64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let mut pages = text.split_ascii_whitespace().map(|field| field.parse::<u64>().ok());
    let (len, resident, shared_pages) = (pages.next()??, pages.next()??, pages.next()??);
    let page_bytes = rustix::param::page_size() as u64;
    Some((len * page_bytes, resident.saturating_sub(shared_pages) * page_bytes))
}

/// Returns whether two processes share one address space, as after vfork. Returns `None` if the
/// kernel doesn't tell.
fn have_one_memory(pid: u32, other: u32) -> Option<bool> {
    const KCMP_VM: libc::c_long = 1;
    let (pid, other) = (libc::c_long::from(pid), libc::c_long::from(other));
    // SAFETY: the call only compares and has no pointers. The last two arguments are not used with
    // KCMP_VM.
    let answer = unsafe { libc::syscall(libc::SYS_kcmp, pid, other, KCMP_VM, 0, 0) };
    (answer >= 0).then_some(answer == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::hand_over::tests::{claim, tables};
    use std::io::{Read, Write};
    use std::process::{Child, Command, Stdio};

    /// Starts a shell that has `mib` MiB of its own, and a child of it that has as much again. Both
    /// have reached that size when this returns.
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
        let (tables, mut census) = (tables(), Census::new(std::process::id()));
        let mut child = start(8);
        let (count, bytes) = look(&mut census, &tables);
        assert!(count >= 2, "{count}");
        let least = 8 << 20;
        assert!((least..2 * least).contains(&bytes), "a fork shares it: {bytes}");
        claim(&tables, child.id());
        let with_a_slot = look(&mut census, &tables);
        assert_eq!(with_a_slot.0, count - 1);
        child.stdin.take().unwrap().write_all(b"\n").unwrap();
        child.wait().unwrap();
        assert_eq!(look(&mut census, &tables).1, 0);
    }

    #[test]
    fn a_process_stays_of_the_run_when_its_parent_ends() {
        let mut census = Census::new(std::process::id());
        // The first child prints the process ID of its own child, and ends when it has read a line.
        let script = "sh -c 'read y' <&3 & echo $!; read x";
        let mut command = Command::new("sh");
        command.args(["-c", &format!("exec 3<&0; {script}")]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let out = child.stdout.take().unwrap();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).unwrap();
        let pid: u32 = line.trim().parse().unwrap();
        census.find(&ProcFiles);
        assert!(census.has(child.id()) && census.has(pid));
        child.kill().unwrap();
        child.wait().unwrap();
        census.find(&ProcFiles);
        assert!(!census.has(child.id()) && census.has(pid));
        drop(child.stdin.take());
    }
}
