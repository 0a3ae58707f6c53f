//! The table that the processes of one user of a run share with `memfold run`: a slot for each
//! process with its claims and figures, and the mailbox for their lines.
//!
//! The table has a slot for every process that the system can have. It takes memory only for slots
//! that were used, and is mapped only that far. A slot belongs to a process as long as the process
//! lives ([`memfold_os::thread::owner`]). The counters of ended processes stay in the sums. The
//! first [`APART`] processes keep their slots for good, so that each can be reported. Later
//! processes reuse the slots of ended ones and add to their counters.
pub mod bounds;
pub mod lending;
mod slot;
pub mod totals;
#[cfg(test)]
mod tests;

pub use self::bounds::LAYOUT_VERSION;
use self::bounds::{AskedShare, RunBounds, UserPortion};
use self::slot::{GROUP, SlotWords, TableCharges, TableGroup};
pub use self::slot::{News, ProcessSlot};
use self::totals::{PeakSums, TablePeaks};
use crate::fair_share::ShareClaim;
use crate::mailbox::Mailbox;
use alloc::vec::Vec;
use core::ffi::c_void;
use core::mem::size_of;
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};
use core::sync::atomic::{
    Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release, Ordering::SeqCst,
};
use memfold_os::memory::shared;
use memfold_os::sync::Mutex;
use memfold_os::thread::now_ns;
use memfold_os::thread::owner::OwnerState;
use memfold_os::{Errno, units::PAGE_SIZE};
use memfold_stats::Stats;
use rustix::fd::{AsFd, OwnedFd};
use rustix::thread::{Timespec, futex};

/// Number of slots that are never reused by another process.
pub const APART: usize = 64;

/// Length of the text about a program that is not managed, in bytes, at most. A longer text is cut
/// off.
pub const UNMANAGED_BYTES_MAX: usize = 240;

/// Programs that cannot be managed. All zeros are none.
#[repr(C)]
struct UnmanagedPrograms {
    count: AtomicU64,
    /// State of the text about the first: 1 while it is written, 2 once it is complete.
    state: AtomicU64,
    first: [AtomicU8; UNMANAGED_BYTES_MAX],
}

/// A smaller change of the bounds is no news, bytes.
const SENT_BYTES: u64 = 256 << 10;
/// Values of [`RunHeader::filters`].
const FILTERS_NONE: u64 = 1;
const FILTERS_SOME: u64 = 2;

/// Places for the forks of families.
const FORKS: usize = 64;

/// The header of a table.
#[repr(C, align(4096))]
struct RunHeader {
    version: AtomicU64,
    /// Index of the user to whom the table belongs.
    user: AtomicU64,
    /// Number of slots from the first to the last that was ever used.
    used: AtomicU64,
    /// 1 once a process of the run has begun, even one without a slot. 2 once a process has found
    /// that engines are available for the gate.
    begun: AtomicU64,
    /// Whether processes of the run may have a seccomp filter: 0 while it is unknown, `FILTERS_NONE`
    /// or `FILTERS_SOME`.
    filters: AtomicU64,
    /// Identifies the run.
    key: [AtomicU64; 2],
    unmanaged: UnmanagedPrograms,
    charges: TableCharges,
    totals: TablePeaks,
    /// 1 once a process has reported that the limit cannot be kept.
    reported: AtomicU64,
    /// The largest least limit that could be kept at any moment, in bytes. 0 if the given limit
    /// could be kept.
    least_bytes: AtomicU64,
    /// A futex: incremented when a process begins or claims a slot. `runner_rests` is 1 while
    /// `memfold run` sleeps on it.
    stirred: AtomicU32,
    runner_rests: AtomicU32,
    /// The bounds of which the processes last got news, bytes.
    sent: [AtomicU64; 2],
    /// The number of families, and the forks of each. Families can have the same place.
    families: AtomicU32,
    forks: [AtomicU32; FORKS],
    mailbox: Mailbox,
}

const _: () = assert!(
    size_of::<RunHeader>().is_multiple_of(PAGE_SIZE) && align_of::<TableGroup>() <= PAGE_SIZE
);

/// Mappings of a table, at most: each one is twice as long as the one before.
const MAPPINGS: usize = usize::BITS as usize;

/// The mappings of a table. A longer mapping replaces a shorter one, which stays mapped for threads
/// that use it.
struct MappedSlots {
    groups: &'static [TableGroup],
    /// Address and length of each mapping.
    all: [(usize, usize); MAPPINGS],
    count: usize,
}

impl MappedSlots {
    fn add(&mut self, at: *mut c_void, len: usize, groups: &'static [TableGroup]) {
        self.all[self.count] = (at as usize, len);
        self.count += 1;
        self.groups = groups;
    }
}

/// A table, mapped as long as this process lives.
pub struct RunTable {
    head: &'static RunHeader,
    portion: UserPortion,
    /// Number of slots, at most.
    slots: usize,
    mapped: Mutex<MappedSlots>,
}

/// The memory that a run holds at least, in bytes.
pub struct LeastBytes {
    /// The bytes of all processes of the run.
    pub bytes: u64,
    /// The part of `bytes` of processes without a slot.
    pub slotless: u64,
    /// The process that holds the most of `bytes`, if it is known to be one of this user's.
    pub largest: Option<ProcessSlot>,
    /// Whether no process of another user holds more of `bytes`.
    pub has_largest: bool,
}

/// Returns the length of the file of a table with `slots` slots, in bytes.
fn len_of(slots: usize) -> usize {
    size_of::<RunHeader>() + slots.div_ceil(GROUP) * size_of::<TableGroup>()
}

impl RunTable {
    /// Creates a table for one user of a run, with room for `slots` processes or as many as fit in
    /// a file of at most `bytes_max` bytes. Returns it with the file.
    ///
    /// # Errors
    /// - The errors of creating and mapping the file.
    /// - EFBIG: `bytes_max` has no room for a group of slots.
    ///
    /// # Panics
    /// If `user` is not less than [`bounds::USERS`].
    pub fn create(
        slots: usize,
        bytes_max: u64,
        bounds: RunBounds,
        user: usize,
    ) -> Result<(RunTable, OwnedFd), Errno> {
        let most = bytes_max.saturating_sub(size_of::<RunHeader>() as u64)
            / size_of::<TableGroup>() as u64;
        let slots = slots.min((most as usize).saturating_mul(GROUP));
        if slots == 0 {
            return Err(Errno::FBIG);
        }
        let file = shared::create(c"memfold-stats", len_of(slots) as u64)?;
        let table = RunTable::map(&file, |_| Ok(bounds.portion(user)))?;
        for (to, from) in table.head.key.iter().zip(bounds.key()) {
            to.store(from, Relaxed);
        }
        table.head.user.store(user as u64, Relaxed);
        table.head.version.store(LAYOUT_VERSION, Relaxed);
        Ok((table, file))
    }

    /// Maps the table of a user of the run with these bounds from its file.
    ///
    /// # Errors
    /// - EINVAL: the file is no table, belongs to another run, or has another version.
    /// - The errors of mapping the file.
    pub fn open(file: impl AsFd, bounds: RunBounds) -> Result<RunTable, Errno> {
        RunTable::map(file, |head| {
            let its = [0, 1].map(|n| head.key[n].load(Relaxed));
            let user = head.user.load(Relaxed) as usize;
            let is_right = head.version.load(Relaxed) == LAYOUT_VERSION && its == bounds.key();
            if is_right && user < bounds::USERS {
                Ok(bounds.portion(user))
            } else {
                Err(Errno::INVAL)
            }
        })
    }

    fn map(
        file: impl AsFd,
        portion: impl FnOnce(&RunHeader) -> Result<UserPortion, Errno>,
    ) -> Result<RunTable, Errno> {
        let len = len_of(1);
        let (at, file_len) = shared::map(file, len)?;
        let slots = (file_len as usize - size_of::<RunHeader>()) / size_of::<TableGroup>() * GROUP;
        // SAFETY: the mapping starts at a page, is long enough for the header and one group, and is
        // never unmapped. Both hold only atomics, for which every bit pattern is valid and which
        // other processes may change at any time.
        let (head, groups) = unsafe { (&*at.cast::<RunHeader>(), groups_at(at, 1)) };
        let mut mappings = MappedSlots { groups: &[], all: [(0, 0); MAPPINGS], count: 0 };
        mappings.add(at, len, groups);
        Ok(RunTable { head, portion: portion(head)?, slots, mapped: Mutex::new(mappings) })
    }

    /// Gives up the table for good. Afterwards no write of this process to it, by any pointer,
    /// reaches another process. The process must have no slot.
    ///
    /// # Errors
    /// ENOMEM: the kernel has no memory to replace a mapping. Other mappings may be replaced
    /// already.
    pub fn give_up(&self) -> Result<(), Errno> {
        let mappings = self.mapped.lock();
        // SAFETY: these are the table's own mappings, and they hold only atomics, for which zeros
        // are valid.
        let replace =
            |(at, len): (usize, usize)| unsafe { shared::replace_by_zeros(at as *mut c_void, len) };
        mappings.all[..mappings.count].iter().copied().try_for_each(replace)
    }

    /// Returns the words that identify the run.
    pub(crate) fn key(&self) -> [u64; 2] {
        [0, 1].map(|n: usize| self.head.key[n].load(Relaxed))
    }

    /// Returns what the run and this table's user may use.
    pub fn portion(&self) -> &UserPortion {
        &self.portion
    }

    /// Returns the bytes that this user's processes with a slot may use, as (limit, resident). What
    /// processes without a slot use is taken off.
    pub fn bounds_left(&self) -> (u64, u64) {
        self.portion.left()
    }

    /// Sends the processes news of their bounds, if these have changed since that was last sent.
    /// Only `memfold run` calls it.
    pub fn send_bounds(&self) {
        let (limit, resident) = self.bounds_left();
        let has_changed = |cell: &AtomicU64, now: u64| {
            let is_changed = cell.load(Relaxed).abs_diff(now) >= SENT_BYTES;
            if is_changed {
                cell.store(now, Relaxed);
            }
            is_changed
        };
        let [sent_limit, sent_resident] = &self.head.sent;
        let is_changed = has_changed(sent_limit, limit) | has_changed(sent_resident, resident);
        if is_changed {
            self.send(None, News::BOUNDS);
        }
    }

    /// Raises the peaks to what the processes hold now, if that is due.
    pub fn note_totals(&self) {
        let count = (self.head.used.load(Relaxed) as usize).min(self.slots);
        if !self.head.totals.is_due(count, now_ns()) {
            return;
        }
        let mut sum = PeakSums::default();
        self.add_to(&mut sum);
        self.head.totals.note(sum, self.portion.bounds().slotless().1);
    }

    /// Adds what the processes with a slot hold now to `sum`.
    pub fn add_to(&self, sum: &mut PeakSums) {
        self.alive().for_each(|process| sum.add(process.stats()));
    }

    /// Returns what the whole run holds at least, however much is folded. `limit` selects the count
    /// for the limit or for the bound of resident memory.
    pub fn least(&self, limit: bool) -> LeastBytes {
        let slotless = self.portion.bounds().slotless().1;
        let (others, has_largest) = self.portion.others(limit);
        let least = |process: &ProcessSlot| process.claim(limit).least;
        let own = self.asked(limit).claim.least;
        let largest = self.alive().max_by_key(|process| (least(process), process.number));
        let bytes = own.saturating_add(slotless).saturating_add(others);
        LeastBytes { bytes, slotless, largest: largest.filter(|_| has_largest), has_largest }
    }

    /// Returns the sum of what this table's processes ask of a bound.
    pub fn asked(&self, limit: bool) -> AskedShare {
        self.alive().fold(AskedShare::default(), |all, process| {
            let ShareClaim { need, least, weight } = process.claim(limit);
            let claim = ShareClaim {
                need: all.claim.need.saturating_add(need),
                least: all.claim.least.saturating_add(least),
                weight,
            };
            AskedShare { claim, largest: all.largest.max(least) }
        })
    }

    /// Returns the sum of a figure over the live processes, and their number.
    pub fn sum_of(&self, of: impl Fn(&Stats) -> u64) -> (u64, usize) {
        self.alive().fold((0, 0), |(sum, count), process| {
            (u64::saturating_add(sum, of(process.stats())), count + 1)
        })
    }

    /// Returns a number for the family of a process that forks for the first time.
    pub fn new_family(&self) -> u32 {
        self.head.families.fetch_add(1, Relaxed).wrapping_add(1).max(1)
    }

    /// Returns the number of live processes of a family that share memory.
    pub fn sharers(&self, family: u32) -> usize {
        self.alive().filter(|process| process.shares_with(family)).count()
    }

    /// Notes that a process of a family is about to fork.
    pub fn note_fork(&self, family: u32) {
        self.head.forks[family as usize % FORKS].fetch_add(1, SeqCst);
    }

    /// Returns the number of forks of a family. It may contain those of others.
    pub fn forks(&self, family: u32) -> u32 {
        self.head.forks[family as usize % FORKS].load(SeqCst)
    }

    fn alive(&self) -> impl Iterator<Item = ProcessSlot> + '_ {
        self.processes().filter(ProcessSlot::is_alive)
    }

    /// Records that at this moment no limit below `bytes` could be kept.
    pub fn note_least(&self, bytes: u64) {
        self.head.least_bytes.fetch_max(bytes, Relaxed);
    }

    /// Returns the least limit in bytes that could have been kept all the time; 0 if the given one
    /// was.
    pub fn least_bytes(&self) -> u64 {
        self.head.least_bytes.load(Relaxed)
    }

    /// Records that the limit cannot be kept. Returns whether this is the first report of the run.
    pub fn report_limit(&self) -> bool {
        self.head.reported.swap(1, Relaxed) == 0
    }

    /// Returns the peaks of what the processes held.
    pub fn totals(&self) -> &'static TablePeaks {
        &self.head.totals
    }

    /// Returns the mailbox of the table.
    pub fn mailbox(&self) -> &'static Mailbox {
        &self.head.mailbox
    }

    /// Returns whether `memfold run` is gone, so that no process reads lines.
    pub fn is_left_alone(&self) -> bool {
        self.portion.bounds().is_left_alone()
    }

    /// Records that a process of the run begins. Returns whether it is the first.
    pub fn note_process(&self) -> bool {
        self.stir();
        self.head.begun.fetch_max(1, Relaxed) == 0
    }

    /// Returns whether any process has begun.
    pub fn has_begun(&self) -> bool {
        self.head.begun.load(Relaxed) > 0
    }

    /// Wakes `memfold run`, because the processes of the run change.
    pub fn stir(&self) {
        self.head.stirred.fetch_add(1, SeqCst);
        if self.head.runner_rests.load(SeqCst) != 0 {
            let _ = futex::wake(&self.head.stirred, futex::Flags::empty(), 1);
        }
    }

    /// Returns the number of calls of [`RunTable::stir`].
    pub fn stirred(&self) -> u32 {
        self.head.stirred.load(SeqCst)
    }

    /// Sleeps until [`RunTable::stir`] is called and there were not `seen` calls, or for `ns`
    /// nanoseconds. Only one thread of `memfold run` calls it.
    pub fn rest(&self, seen: u32, ns: u64) {
        const SECOND_NS: u64 = 1_000_000_000;
        let time = Timespec { tv_sec: (ns / SECOND_NS) as i64, tv_nsec: (ns % SECOND_NS) as i64 };
        self.head.runner_rests.store(1, SeqCst);
        let _ = futex::wait(&self.head.stirred, futex::Flags::empty(), seen, Some(&time));
        self.head.runner_rests.store(0, SeqCst);
    }

    /// Records that processes of the run can have an engine for the gate.
    pub fn note_gate(&self) {
        self.head.begun.fetch_max(2, Relaxed);
    }

    /// Returns whether a process recorded [`RunTable::note_gate`].
    pub fn has_gate(&self) -> bool {
        self.head.begun.load(Relaxed) > 1
    }

    /// Records whether a process of the run has a seccomp filter, which programs that it executes
    /// inherit. Once one has, later calls change nothing.
    pub fn note_filter(&self, has: bool) {
        let filters = if has { FILTERS_SOME } else { FILTERS_NONE };
        self.head.filters.fetch_max(filters, SeqCst);
    }

    /// Returns whether a process of the run may have a seccomp filter; `None` while no process has
    /// looked.
    pub fn has_filters(&self) -> Option<bool> {
        match self.head.filters.load(SeqCst) {
            0 => None,
            found => Some(found == FILTERS_SOME),
        }
    }

    /// Records that a process is about to execute a program that cannot be managed. `about` is its
    /// name and the reason. Returns whether it is the first, whose text is kept.
    pub fn note_unmanaged(&self, about: &[u8]) -> bool {
        let others = &self.head.unmanaged;
        others.count.fetch_add(1, Relaxed);
        self.stir();
        let is_first = others.state.compare_exchange(0, 1, AcqRel, Relaxed).is_ok();
        if is_first {
            let all = about.iter().copied().chain(core::iter::repeat(0));
            others.first.iter().zip(all).for_each(|(to, from)| to.store(from, Relaxed));
            others.state.store(2, Release);
        }
        is_first
    }

    /// Takes back [`RunTable::note_unmanaged`] because the program could not be executed.
    /// `is_first` is what that call returned.
    pub fn forget_unmanaged(&self, is_first: bool) {
        self.head.unmanaged.count.fetch_sub(1, Relaxed);
        if is_first {
            self.head.unmanaged.state.store(0, Release);
        }
    }

    /// Returns how often programs that cannot be managed were executed, and the text about the
    /// first.
    pub fn unmanaged(&self) -> (u64, Vec<u8>) {
        let others = &self.head.unmanaged;
        let is_known = others.state.load(Acquire) == 2;
        let text = others.first.iter().map(|byte| byte.load(Relaxed));
        let text = text.take_while(|byte| is_known && *byte != 0).collect();
        (others.count.load(Relaxed), text)
    }

    /// Claims a slot for the calling thread's process, whose number for `memfold run` is `pid`. The
    /// process holds it until the thread ends or the process executes another program. A process
    /// that executed another program gets its old slot again, and its counters go on. Returns
    /// `None` if no slot is left, or no address space to map it.
    ///
    /// # Safety
    /// - As [`memfold_os::thread::owner::RobustOwner::claim`] requires, the calling thread has no
    ///   robust list that is needed.
    pub unsafe fn claim(&self, pid: u32) -> Option<ProcessSlot> {
        let count = self.head.used.load(Relaxed) as usize;
        let is_left =
            |n: &usize| self.slot(*n).is_some_and(|s| s.owner.state() == OwnerState::Ended);
        let is_kept =
            |n: &usize| is_left(n) && self.slot(*n).is_some_and(|s| s.pid.load(Relaxed) == pid);
        // SAFETY: the caller promises that its thread has no robust list that is needed.
        let take = |n: usize| unsafe { self.take(n, pid) };
        if let Some(process) = (0..count).find(is_kept).and_then(take) {
            return Some(process);
        }
        if count >= APART
            && let Some(process) = (0..count).filter(is_left).find_map(take)
        {
            return Some(process);
        }
        let next = self.head.used.fetch_add(1, AcqRel) as usize;
        if next >= self.slots {
            self.head.used.fetch_sub(1, AcqRel);
            return None;
        }
        take(next)
    }

    /// Claims the `n`th slot if no process holds it.
    ///
    /// # Safety
    /// - The calling thread has no robust list that is needed.
    unsafe fn take(&self, n: usize, pid: u32) -> Option<ProcessSlot> {
        let process = self.process(n)?;
        // SAFETY: the caller promises that its thread has no robust list that is needed. The table
        // is never unmapped, and each slot has a `RobustList` of its own.
        let claim = unsafe { process.slot.owner.claim(&process.place.will) };
        if claim != Ok(true) {
            return None;
        }
        process.slot.sign.store(0, SeqCst);
        process.slot.claims.fetch_add(1, SeqCst);
        process.slot.pid.store(pid, Relaxed);
        if self.head.charges.forget(process.slot) {
            self.send(Some(process), News::SHARING);
        }
        process.set_need(0);
        process.set_least(0, 0);
        process.end_rest();
        process.place.stats.clear_gauges();
        self.stir();
        Some(process)
    }

    /// Returns every process that has had a slot, in the order of the slots.
    pub fn processes(&self) -> impl Iterator<Item = ProcessSlot> + '_ {
        let count = self.head.used.load(Relaxed) as usize;
        (0..count.min(self.slots))
            .map_while(|n| self.process(n))
            .filter(|p| p.slot.owner.state() != OwnerState::Free)
    }

    /// Sends news to all live processes but `own`. News of shared memory go only to processes that
    /// share memory.
    pub fn send(&self, own: Option<ProcessSlot>, news: News) {
        let is_own = |process: &ProcessSlot| own.is_some_and(|own| own.is(process));
        self.alive()
            .filter(|process| !is_own(process))
            .filter(|process| news != News::SHARING || process.shares_memory())
            .for_each(|process| process.send(news));
    }

    /// Returns the claims of the other live processes on the limit, or on the bound of resident
    /// memory. Processes that need nothing are left out. What ended processes were charged with is
    /// released. If one of them shared memory, the processes that share memory get news.
    pub fn claims_of_others(&self, own: Option<ProcessSlot>, limit: bool) -> Vec<ShareClaim> {
        let count = (self.head.used.load(Relaxed) as usize).min(self.slots);
        let own = own.map(|own| own.number);
        let slots =
            self.mapped(count).iter().flat_map(|group| &group.slots).take(count).enumerate();
        let others = slots.filter(|(n, _)| Some(*n) != own);
        let mut has_shared = false;
        let claim = |slot: &SlotWords| match slot.owner.state() {
            OwnerState::Held => Some(slot.claim(limit)).filter(|claim| claim.need > 0),
            _ => {
                has_shared |= self.head.charges.forget(slot);
                None
            }
        };
        let claims = others.map(|(_, slot)| slot).filter_map(claim).collect();
        if has_shared {
            self.send(None, News::SHARING);
        }
        claims
    }

    fn slot(&self, n: usize) -> Option<&'static SlotWords> {
        self.process(n).map(|process| process.slot)
    }

    fn process(&self, n: usize) -> Option<ProcessSlot> {
        let group = self.mapped(n + 1).get(n / GROUP)?;
        let (slot, place) = (&group.slots[n % GROUP], &group.places[n % GROUP]);
        let requests = &group.requests[n % GROUP];
        Some(ProcessSlot {
            number: n,
            charges: &self.head.charges,
            portion: self.portion,
            slot,
            place,
            requests,
        })
    }

    /// Returns the groups of the first `slots` slots, or as many as can be mapped.
    fn mapped(&self, slots: usize) -> &'static [TableGroup] {
        let mut mappings = self.mapped.lock();
        let count = slots.div_ceil(GROUP);
        if count > mappings.groups.len() {
            // The length doubles each time, so all mappings together are less than four times the
            // last.
            let group_count = count.next_power_of_two().min(self.slots / GROUP);
            let at = self.head as *const RunHeader as *mut c_void;
            // SAFETY: the table is mapped at `at`, and `group_count` is at most the number of groups in
            // its file.
            if let Ok(at) = unsafe { shared::map_again(at, len_of(group_count * GROUP)) } {
                // SAFETY: `map_again` mapped the header and `group_count` groups at `at`, which starts
                // at a page. The mapping is never unmapped.
                let groups = unsafe { groups_at(at, group_count) };
                mappings.add(at, len_of(group_count * GROUP), groups);
            }
        }
        &mappings.groups[..count.min(mappings.groups.len())]
    }
}

/// Returns the groups of a table that is mapped at `at`.
///
/// # Safety
/// - A table with `count` groups is mapped at `at` and is never unmapped.
unsafe fn groups_at(at: *mut c_void, count: usize) -> &'static [TableGroup] {
    // SAFETY: the caller promises that the header and `count` groups are mapped there for good. The
    // groups follow the header, which is a multiple of a page long, so they are aligned. They hold
    // only atomics, for which every bit pattern is valid and which other processes may change at
    // any time.
    unsafe {
        core::slice::from_raw_parts(at.cast::<RunHeader>().add(1).cast::<TableGroup>(), count)
    }
}
