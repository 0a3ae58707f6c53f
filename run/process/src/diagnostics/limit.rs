//! Why the limit can't be kept: the causes and the memory that each takes.
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt::{self, Write};
use core::ops::ControlFlow::Continue;
use core::sync::atomic::Ordering::Relaxed;
use memfold_engine::config::Size;
use memfold_engine::limits::gauges::stays;
use memfold_engine::pager::Pager;
use memfold_os::maps::{Smaps, SmapsDetails, Vma, flag};
use memfold_os::memory::zone::overlaps_own;
use memfold_run::member;
use memfold_run::table::{LeastBytes, ProcessSlot};
use memfold_stats::Stats;

/// A process that is not the largest reports that the limit can't be kept only after so much time,
/// nanoseconds.
const LARGEST_NS: u64 = 320_000_000;
/// Causes with fewer bytes are not named.
const TOLD_BYTES: u64 = 256 << 10;

/// Causes that a flag of smaps shows, as they are printed after the number of bytes.
const CAUSES: [(u32, &str); 6] = [
    (flag::LOCKED, "is locked in memory (mlock)"),
    (flag::DONT_DUMP, "is kept out of core dumps (--dont-dump fold folds it)"),
    (flag::WIPE_ON_FORK | flag::DONT_FORK, "is not inherited by children of fork"),
    (flag::MERGEABLE, "may be merged by the kernel (KSM)"),
    (flag::UFFD_MISSING | flag::UFFD_PROTECT, "belongs to a userfaultfd of the program"),
    (
        flag::HUGETLB | flag::IO | flag::PFN | flag::MIXED | flag::SEALED,
        "is special memory (huge pages, devices, sealed)",
    ),
];
/// Indices of the causes that no flag shows.
const FILE: usize = CAUSES.len();
const EXECUTABLE: usize = FILE + 1;
const UNREADABLE: usize = FILE + 2;
const OTHER: usize = FILE + 3;
const NAMES: [&str; 4] = [
    "are written pages of private file mappings",
    "is executable",
    "is not both readable and writable",
    "is a stack, older than the engine, or very new",
];

/// The bytes that the run was given, the least that it can keep now, and the part of that of
/// processes without an engine.
pub struct LimitReach {
    bound: u64,
    least: u64,
    slotless: u64,
    /// Whether no other process has more memory that it can't fold.
    pub is_largest: bool,
}

/// Returns how far the run is past its limit, or `None` if the limit can be kept because other
/// processes fold more.
pub fn reach(pager: &Pager) -> Option<LimitReach> {
    let reach = match member::whole(pager.limits().is_limited()) {
        Some(((limit, resident), LeastBytes { bytes, slotless, largest, has_largest })) => {
            let bound = if pager.limits().is_limited() { limit } else { resident };
            let is_own = |largest: ProcessSlot| member::own().is_none_or(|own| own.is(&largest));
            let is_largest = has_largest && largest.is_none_or(is_own);
            LimitReach { bound, least: bytes, slotless, is_largest }
        }
        None => {
            let (bound, least) = (pager.limits().bound_bytes(), pager.gauges().least_limit_bytes());
            LimitReach { bound, least, slotless: 0, is_largest: true }
        }
    };
    (reach.least > reach.bound).then_some(reach)
}

impl LimitReach {
    /// Records the least limit for the summary, because a program may continue to grow after the
    /// warning.
    pub fn note(&self) {
        member::note_least(self.least);
    }
}

/// Returns the warning that the run's limit can't be kept.
pub fn report(pager: &Pager, smaps: &Smaps, reach: &LimitReach) -> String {
    let mut text = String::from("warning: ");
    let _ = why(pager, smaps, reach, &mut text, "is exceeded so that no data is lost");
    text.push_str(" --on-full stop would end a process instead.");
    text
}

/// Returns the message that says why this process is ended.
pub fn end(pager: &Pager, smaps: &Smaps, reach: &LimitReach) -> String {
    let mut text = String::new();
    let _ = why(pager, smaps, reach, &mut text, "memfold ends this process (--on-full stop)");
    text
}

/// Writes which limit can't be kept and what is done about it. Then come the causes with their
/// bytes, in all processes and in this one, which is mostly the one with most of it. Last come the
/// least limit that can be kept now, and other remedies.
fn why(
    pager: &Pager,
    smaps: &Smaps,
    reach: &LimitReach,
    text: &mut String,
    then: &str,
) -> fmt::Result {
    let what = if pager.limits().is_limited() { "limit" } else { "resident limit" };
    let whose = match member::is_in_a_group() {
        true => ", which the other runs of the group leave to this one,",
        false => "",
    };
    write!(text, "The {what} of {}{whose} can't be kept, and {then}.", Size(reach.bound))?;
    let (_, processes) = member::sum_of(pager.stats(), |_| 0);
    if processes > 1 {
        let names = stays(pager.stats()).map(|(_, name)| name);
        let sum = |n: usize| member::sum_of(pager.stats(), |stats| stays(stats)[n].0).0;
        let outside_bytes =
            member::sum_of(pager.stats(), |stats| stats.unmanaged_bytes.load(Relaxed)).0;
        let outside_bytes = [(outside_bytes, "can't be managed")].into_iter();
        let all =
            outside_bytes.chain(names.into_iter().enumerate().map(|(n, name)| (sum(n), name)));
        list(text, format_args!("In all {processes} processes"), all)?;
    }
    list(text, format_args!("In process {}", member::number()), causes(pager, smaps).into_iter())?;
    list(
        text,
        format_args!("In other processes"),
        [(reach.slotless, "is in processes without an engine")].into_iter(),
    )?;
    let of = |stats: &Stats| stats.pool_bytes.load(Relaxed) + stats.index_bytes.load(Relaxed);
    let stored_bytes = member::sum_of(pager.stats(), of).0;
    write!(text, " Folded memory takes {}.", Size(stored_bytes))?;
    write!(text, " The least limit that can be kept now is {}", Size(reach.least))?;
    text.write_str("; --summary prints the least for the whole run.")?;
    match pager.has_swap() {
        false => {
            text.write_str(" With --swap DIR, data that does not compress or fit goes to a file.")
        }
        true => Ok(()),
    }
}

/// Writes a sentence with the causes that have enough bytes.
fn list(
    text: &mut String,
    place: fmt::Arguments<'_>,
    causes: impl Iterator<Item = (u64, &'static str)>,
) -> fmt::Result {
    let mut causes = causes.filter(|(bytes, _)| *bytes >= TOLD_BYTES);
    let Some((bytes, name)) = causes.next() else { return Ok(()) };
    write!(text, " {place}, {} {name}", Size(bytes))?;
    causes.try_for_each(|(bytes, name)| write!(text, ", {} {name}", Size(bytes)))?;
    text.write_str(".")
}

/// When this process reports that the limit can't be kept.
#[derive(Default)]
pub struct LimitReport {
    /// When a look found that first, nanoseconds, while the process waits for another one's report.
    past_since_ns: Option<u64>,
    is_made: bool,
}

impl LimitReport {
    /// Returns whether the process reports now, at `now_ns`, that the limit can't be kept. It does
    /// once. The largest process reports at once. Others wait, because the largest may be unable to
    /// look.
    pub fn takes_turn(&mut self, is_largest: bool, now_ns: u64) -> bool {
        let since_ns = self.past_since_ns.take().unwrap_or(now_ns);
        let has_turn = !self.is_made && (is_largest || now_ns - since_ns >= LARGEST_NS);
        self.is_made |= has_turn;
        if !self.is_made {
            self.past_since_ns = Some(since_ns);
        }
        has_turn
    }

    /// Notes that the limit can be kept again.
    pub fn wait_no_more(&mut self) {
        self.past_since_ns = None;
    }

    /// Returns when the process has waited long enough for another one's report, if it waits. It may
    /// sleep by then.
    pub fn due_ns(&self) -> Option<u64> {
        self.past_since_ns.map(|since_ns| since_ns + LARGEST_NS)
    }
}

/// Returns the bytes of this process that stay in memory, by cause.
fn causes(pager: &Pager, smaps: &Smaps) -> Vec<(u64, &'static str)> {
    let mut sums = [0u64; CAUSES.len() + NAMES.len()];
    let _ = smaps.each(|area, about| {
        if about.anonymous_bytes > 0
            && !overlaps_own(area.start, area.end)
            && !pager.mappings().manages(area.start)
        {
            sums[cause(area, about)] += about.anonymous_bytes as u64;
        }
        Continue(())
    });
    let causes = CAUSES.iter().map(|(_, name)| *name).chain(NAMES);
    stays(pager.stats()).into_iter().chain(sums.into_iter().zip(causes)).collect()
}

fn cause(area: &Vma, about: &SmapsDetails) -> usize {
    match CAUSES.iter().position(|(flags, _)| about.has(*flags)) {
        Some(n) => n,
        None if area.inode != 0 => FILE,
        None if area.executable => EXECUTABLE,
        None if !area.readable || !area.writable => UNREADABLE,
        None => OTHER,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sentence(causes: &[(u64, &'static str)]) -> String {
        let mut text = String::new();
        list(&mut text, format_args!("In process 7"), causes.iter().copied()).unwrap();
        text
    }

    #[test]
    fn causes_that_matter_are_named_in_one_sentence() {
        let all = [(3 << 20, "is locked"), (TOLD_BYTES - 1, "is small"), (TOLD_BYTES, "is pinned")];
        assert_eq!(sentence(&all), " In process 7, 3.0 MiB is locked, 256.0 KiB is pinned.");
        assert_eq!(sentence(&all[..1]), " In process 7, 3.0 MiB is locked.");
    }

    #[test]
    fn limit_is_reported_once_by_the_largest_or_if_that_does_not() {
        let mut report = LimitReport::default();
        assert!(report.takes_turn(true, 5) && !report.takes_turn(true, 6));
        let mut report = LimitReport::default();
        assert!(!report.takes_turn(false, 5) && !report.takes_turn(false, 4 + LARGEST_NS));
        assert_eq!(report.due_ns(), Some(5 + LARGEST_NS));
        assert!(report.takes_turn(false, 5 + LARGEST_NS) && report.due_ns().is_none());
    }

    #[test]
    fn nothing_is_said_where_no_cause_matters() {
        assert_eq!([sentence(&[]), sentence(&[(5, "is small")])], ["", ""]);
    }
}
