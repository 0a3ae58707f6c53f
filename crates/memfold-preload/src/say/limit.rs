//! Why the limit can't be kept: what takes the memory, by causes.
use alloc::format;
use alloc::string::String;
use core::fmt::Write;
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

/// The warning that the limit can't be kept: each cause with its own bytes, the least limit that
/// can be kept now, and what to do.
pub fn report(pager: &Pager, smaps: &Smaps) -> String {
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
    let mut text = format!("warning: {}", bound(pager));
    let (refused, kept) = (pager.refused_bytes(), pager.kept_bytes());
    let engine = [
        (refused, "doesn't shrink, or is pinned or shared by a fork"),
        (kept, "would take far more time to fold than it saves memory"),
    ];
    let flagged = CAUSES.iter().map(|(_, name)| *name).chain(NAMES).zip(sums);
    let causes = engine.into_iter().chain(flagged.map(|(name, bytes)| (bytes, name)));
    let mut lead = " Of what is resident, ";
    for (bytes, name) in causes.filter(|(bytes, _)| *bytes >= TOLD_BYTES) {
        let _ = write!(text, "{lead}{} {name}", Size(bytes));
        lead = ", ";
    }
    if lead == ", " {
        text.push('.');
    }
    let stored = pager.own_bytes().saturating_sub(pager.frame_bytes());
    let _ = write!(
        text,
        " What is folded takes {}. The least limit that can be kept now is {}.",
        Size(stored),
        Size(pager.least_limit_bytes()),
    );
    if !pager.has_swap() {
        text.push_str(" With --swap DIR, what doesn't shrink or fit goes to a file.");
    }
    text
}

fn bound(pager: &Pager) -> String {
    let what = if pager.is_limited() { "limit" } else { "resident limit" };
    format!(
        "The {what} of {} can't be kept, and is exceeded so that no data is lost \
         (--on-full stop ends the program instead).",
        Size(pager.bound_bytes())
    )
}

fn cause(area: &Area, about: &Details) -> usize {
    match CAUSES.iter().position(|(flags, _)| about.has(*flags)) {
        Some(n) => n,
        None if area.inode != 0 => FILE,
        None if area.executable => EXECUTABLE,
        None => OTHER,
    }
}
