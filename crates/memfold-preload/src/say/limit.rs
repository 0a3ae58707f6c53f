//! Why the limit can't be kept: what takes the memory, by causes.
use crate::slots;
use alloc::format;
use alloc::string::String;
use core::fmt::{self, Write};
use core::ops::ControlFlow::Continue;
use memfold::config::Size;
use memfold::pager::Pager;
use memfold_sys::maps::{Area, Details, Smaps, flag};
use memfold_sys::memory::zone::overlaps_own;

/// A cause of less isn't named.
const TOLD_BYTES: u64 = 256 << 10;

/// Why memory isn't managed, as it is said after the number of bytes.
const CAUSES: [(u32, &str); 6] = [
    (flag::LOCKED, "is locked in memory"),
    (flag::DONT_DUMP, "is kept out of core dumps (--dont-dump fold folds it)"),
    (flag::WIPE_ON_FORK | flag::DONT_FORK, "is kept from children of fork"),
    (flag::MERGEABLE, "is open to merging by the kernel"),
    (flag::UFFD_MISSING | flag::UFFD_PROTECT, "is served by a userfaultfd of the program"),
    (flag::HUGETLB | flag::IO | flag::PFN | flag::MIXED | flag::SEALED, "is of a special kind"),
];
/// The same of what no flag tells.
const FILE: usize = CAUSES.len();
const EXECUTABLE: usize = FILE + 1;
const OTHER: usize = FILE + 2;
const NAMES: [&str; 3] = [
    "are written pages of private file mappings",
    "is executable",
    "was there before the engine, is a stack, or came lately",
];

/// What the run was given, the least that it can keep now, and what processes without an engine
/// have of that, bytes.
pub struct Reach {
    bound: u64,
    least: u64,
    seatless: u64,
}

/// How far the run is past its limit. `None`: it keeps it by now, as others hold less.
pub fn reach(pager: &Pager) -> Option<Reach> {
    let own = (pager.bound_bytes(), pager.least_limit_bytes());
    let (bound, least, seatless) = match slots::whole() {
        Some(((limit, resident), held, seatless)) => {
            let bound = if pager.is_limited() { limit } else { resident };
            (bound, if pager.is_limited() { held.max(own.1) } else { own.1 }, seatless)
        }
        None => (own.0, own.1, 0),
    };
    (least > bound).then_some(Reach { bound, least, seatless })
}

impl Reach {
    /// For the summary: a program may go on to grow after the warning.
    pub fn note(&self) {
        slots::note_least(self.least);
    }
}

/// The warning that the run's limit can't be kept: each cause in this process with its own bytes,
/// the least limit that can be kept now, and what to do.
pub fn report(pager: &Pager, smaps: &Smaps, reach: &Reach) -> String {
    let &Reach { bound, least, seatless } = reach;
    let what = if pager.is_limited() { "limit" } else { "resident limit" };
    let mut text = format!(
        "warning: The {what} of {} can't be kept, and is exceeded so that no data is lost \
         (--on-full stop ends the program instead).",
        Size(bound)
    );
    let _ = causes(pager, smaps, seatless, &mut text);
    let stored = pager.own_bytes().saturating_sub(pager.frame_bytes());
    let _ = write!(
        text,
        " What is folded takes {}. The least limit that can be kept now is {}; \
         --summary gives the least of the whole run.",
        Size(stored),
        Size(least),
    );
    if !pager.has_swap() {
        text.push_str(" With --swap DIR, what doesn't shrink or fit goes to a file.");
    }
    text
}

/// What of this process stays in memory, and why.
fn causes(pager: &Pager, smaps: &Smaps, seatless: u64, text: &mut String) -> fmt::Result {
    let mut sums = [0u64; CAUSES.len() + NAMES.len()];
    let _ = smaps.each(|area, about| {
        if about.anonymous_bytes > 0
            && !overlaps_own(area.start, area.end)
            && !pager.manages(area.start)
        {
            sums[cause(area, about)] += about.anonymous_bytes as u64;
        }
        Continue(())
    });
    let engine = [(seatless, "is in processes without an engine")].into_iter().chain(pager.stays());
    let flagged = CAUSES.iter().map(|(_, name)| *name).chain(NAMES).zip(sums);
    let all = engine.chain(flagged.map(|(name, bytes)| (bytes, name)));
    let mut all = all.filter(|(bytes, _)| *bytes >= TOLD_BYTES);
    let Some((bytes, name)) = all.next() else { return Ok(()) };
    write!(text, " In process {}, {} {name}", slots::number(), Size(bytes))?;
    all.try_for_each(|(bytes, name)| write!(text, ", {} {name}", Size(bytes)))?;
    text.write_str(".")
}

fn cause(area: &Area, about: &Details) -> usize {
    match CAUSES.iter().position(|(flags, _)| about.has(*flags)) {
        Some(n) => n,
        None if area.inode != 0 => FILE,
        None if area.executable => EXECUTABLE,
        None => OTHER,
    }
}
