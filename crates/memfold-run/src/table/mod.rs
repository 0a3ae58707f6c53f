//! The table that the processes of one user of a run share with `memfold run`: a slot for each
//! process with what it needs and its figures, and the lines that processes leave to be said.
//!
//! It has a slot for each process that the system can have, takes memory for those that were used,
//! and is mapped as far. A slot belongs to a process as long as that lives
//! ([`memfold_os::thread::owner`]); the counters of those that have ended stay in the sums. The
//! first [`APART`] processes have slots of their own for good, so that each is told of; later ones
//! go on with the slots of ended ones.
pub mod bounds;
mod slot;
pub mod totals;
#[cfg(test)]
mod tests;

pub use self::bounds::LAYOUT_VERSION;
use self::bounds::{AskedShare, RunBounds, UserPortion};
pub use self::slot::ProcessSlot;
use self::slot::{GROUP, SlotWords, TableCharges, TableGroup};
use self::totals::{PeakSums, TablePeaks};
use crate::fair_share::ShareClaim;
use crate::mailbox::Mailbox;
use alloc::vec::Vec;
use core::ffi::c_void;
use core::mem::size_of;
use core::sync::atomic::{AtomicU8, AtomicU64};
use core::sync::atomic::{
    Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use memfold_os::memory::shared;
use memfold_os::sync::Mutex;
use memfold_os::thread::now_ns;
use memfold_os::thread::owner::OwnerState;
use memfold_os::{Errno, units::PAGE_SIZE};
use memfold_stats::Stats;
use rustix::fd::{AsFd, OwnedFd};

/// Seats that are not given again.
pub const APART: usize = 64;

/// Bytes of what is told of a program that isn't managed; the rest is cut off.
pub const UNMANAGED_BYTES_MAX: usize = 240;

/// Programs that can't be managed. All zeros are none.
#[repr(C)]
struct UnmanagedPrograms {
    count: AtomicU64,
    /// Of the text about the first: 1 while it is written, 2 once it is whole.
    state: AtomicU64,
    first: [AtomicU8; UNMANAGED_BYTES_MAX],
}

/// What stands in front.
#[repr(C, align(4096))]
struct RunHeader {
    version: AtomicU64,
    /// Which user of the run it belongs to.
    user: AtomicU64,
    /// Seats from the first to the last that was ever used.
    used: AtomicU64,
    /// 1 once a process of the run has begun, which may do without a slot; 2 once one has seen that
    /// an engine can be had for the gate.
    begun: AtomicU64,
    /// Tells this table from that of any other run.
    key: [AtomicU64; 2],
    unmanaged: UnmanagedPrograms,
    charges: TableCharges,
    totals: TablePeaks,
    /// 1 once a process has reported that the limit can't be kept.
    reported: AtomicU64,
    /// The largest of the least limits that could be kept at a moment, bytes; 0: the given one could.
    least_bytes: AtomicU64,
    mailbox: Mailbox,
}

const _: () = assert!(
    size_of::<RunHeader>().is_multiple_of(PAGE_SIZE) && align_of::<TableGroup>() <= PAGE_SIZE
);

/// A table is mapped so often at most: each time twice as far.
const MAPPINGS: usize = usize::BITS as usize;

/// Where a table is mapped. A longer mapping takes the place of a shorter one, which stays for those
/// who use it.
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

/// The table, mapped for as long as this process lives.
pub struct RunTable {
    head: &'static RunHeader,
    portion: UserPortion,
    /// Seats at most.
    slots: usize,
    mapped: Mutex<MappedSlots>,
}

/// What a run holds at least, bytes.
pub struct LeastBytes {
    /// All of its processes.
    pub bytes: u64,
    /// Of that, those without a slot.
    pub slotless: u64,
    /// Who holds most of it, if that is known to be a process of this user's.
    pub largest: Option<ProcessSlot>,
    /// No process of another user's holds more of it.
    pub has_largest: bool,
}

/// Length of the file of a table with `slots` slots, bytes.
fn len_of(slots: usize) -> usize {
    size_of::<RunHeader>() + slots.div_ceil(GROUP) * size_of::<TableGroup>()
}

impl RunTable {
    /// A new one of one user of a run, with room for `slots` processes, in a file of at most
    /// `bytes_max`; and the file.
    ///
    /// # Errors
    /// What making or mapping the file says; EFBIG: it may not even be long enough for a few.
    ///
    /// # Panics
    /// If a run can't have so many users.
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

    /// That of a user of the run with these bounds, from its file.
    ///
    /// # Errors
    /// EINVAL: it is another file, another run's, or of another version; what mapping it says.
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
        // SAFETY: the mapping is page-aligned, long enough for both, and stays; what is in it is
        // atomics only, for which every bit pattern is valid and which other processes may change
        // at any time.
        let (head, groups) = unsafe { (&*at.cast::<RunHeader>(), groups_at(at, 1)) };
        let mut mapped = MappedSlots { groups: &[], all: [(0, 0); MAPPINGS], count: 0 };
        mapped.add(at, len, groups);
        Ok(RunTable { head, portion: portion(head)?, slots, mapped: Mutex::new(mapped) })
    }

    /// Gives the table up for good: from now on nothing that this process writes there, by whatever
    /// pointer, comes to anybody else. It must have no slot.
    ///
    /// # Errors
    /// ENOMEM, in part done: the kernel has no room to note it.
    pub fn give_up(&self) -> Result<(), Errno> {
        let mapped = self.mapped.lock();
        // SAFETY: these are its mappings, in which are atomics only.
        let replace =
            |(at, len): (usize, usize)| unsafe { shared::replace_by_zeros(at as *mut c_void, len) };
        mapped.all[..mapped.count].iter().copied().try_for_each(replace)
    }

    /// What the run and this table's user may use.
    pub fn portion(&self) -> &UserPortion {
        &self.portion
    }

    /// What the user's processes with a slot may use: what those without use, or have taken and may
    /// use before anybody looks, is taken off.
    pub fn bounds_left(&self) -> (u64, u64) {
        self.portion.left(self.head.charges.waiting_bytes.load(Relaxed))
    }

    /// What processes without a slot hold, or have taken and may use before anybody looks, bytes.
    fn slotless_bytes(&self) -> u64 {
        self.portion.bounds().slotless().1.max(self.head.charges.waiting_bytes.load(Relaxed))
    }

    /// Raises the peaks to what processes hold now, if that is due.
    pub fn note_totals(&self) {
        let used = (self.head.used.load(Relaxed) as usize).min(self.slots);
        if !self.head.totals.is_due(used, now_ns()) {
            return;
        }
        let mut sum = PeakSums::default();
        self.add_to(&mut sum);
        self.head.totals.note(sum, self.portion.bounds().slotless().1);
    }

    /// Adds what processes with a slot hold now.
    pub fn add_to(&self, sum: &mut PeakSums) {
        self.alive().for_each(|process| sum.add(process.stats()));
    }

    /// What all processes of the run hold at least, bytes, however much is folded; of it, what
    /// processes without a slot hold. And the process that holds most of it, if it is one of this
    /// user's.
    pub fn least(&self, limit: bool) -> LeastBytes {
        let slotless = self.slotless_bytes();
        let (others, has_largest) = self.portion.others(limit);
        let least = |process: &ProcessSlot| process.claim(limit).least;
        let own = self.asked(limit).claim.least;
        let largest = self.alive().max_by_key(|process| (least(process), process.number));
        let bytes = own.saturating_add(slotless).saturating_add(others);
        LeastBytes { bytes, slotless, largest: largest.filter(|_| has_largest), has_largest }
    }

    /// What its processes ask of a bound together.
    pub fn asked(&self, limit: bool) -> AskedShare {
        self.alive().fold(AskedShare::default(), |all, process| {
            let ShareClaim { need, least } = process.claim(limit);
            let claim = ShareClaim {
                need: all.claim.need.saturating_add(need),
                least: all.claim.least.saturating_add(least),
            };
            AskedShare { claim, largest: all.largest.max(least) }
        })
    }

    /// The sum of a figure over the processes that are alive, and how many there are.
    pub fn sum_of(&self, of: impl Fn(&Stats) -> u64) -> (u64, usize) {
        self.alive().fold((0, 0), |(sum, count), process| {
            (u64::saturating_add(sum, of(process.stats())), count + 1)
        })
    }

    fn alive(&self) -> impl Iterator<Item = ProcessSlot> + '_ {
        self.processes().filter(ProcessSlot::is_alive)
    }

    /// At this moment no limit below `bytes` could be kept.
    pub fn note_least(&self, bytes: u64) {
        self.head.least_bytes.fetch_max(bytes, Relaxed);
    }

    /// The least limit that could have been kept all the time, bytes; 0: the given one was.
    pub fn least_bytes(&self) -> u64 {
        self.head.least_bytes.load(Relaxed)
    }

    /// The limit can't be kept. `true`: no process of the run has reported it yet.
    pub fn report_limit(&self) -> bool {
        self.head.reported.swap(1, Relaxed) == 0
    }

    /// What its processes held at most.
    pub fn totals(&self) -> &'static TablePeaks {
        &self.head.totals
    }

    /// Where lines are left.
    pub fn mailbox(&self) -> &'static Mailbox {
        &self.head.mailbox
    }

    /// Whether `memfold run` is gone, so that nobody reads a line.
    pub fn is_left_alone(&self) -> bool {
        self.portion.bounds().is_left_alone()
    }

    /// A process of the run begins. `true`: no other has yet.
    pub fn note_process(&self) -> bool {
        self.head.begun.fetch_max(1, Relaxed) == 0
    }

    /// Whether any has.
    pub fn has_begun(&self) -> bool {
        self.head.begun.load(Relaxed) > 0
    }

    /// Processes of the run can have an engine for the gate.
    pub fn note_gate(&self) {
        self.head.begun.fetch_max(2, Relaxed);
    }

    /// Whether one has said so.
    pub fn has_gate(&self) -> bool {
        self.head.begun.load(Relaxed) > 1
    }

    /// A process without an engine is about to map `bytes` more. `false`: all of them together would
    /// have more than `most`. What a process has that is killed counts for good: then others have an
    /// engine sooner.
    pub fn take_waiting(&self, bytes: u64, most: u64) -> bool {
        let more = |now: u64| now.checked_add(bytes).filter(|sum| *sum <= most);
        self.head.charges.waiting_bytes.fetch_update(AcqRel, Relaxed, more).is_ok()
    }

    /// It has them no more, or has an engine.
    pub fn give_back_waiting(&self, bytes: u64) {
        self.head.charges.waiting_bytes.fetch_sub(bytes, AcqRel);
    }

    /// A process is about to execute a program that can't be managed; `about`: its name, and why.
    /// Returns whether it is the first, about which the text is kept.
    pub fn note_unmanaged(&self, about: &[u8]) -> bool {
        let unmanaged = &self.head.unmanaged;
        unmanaged.count.fetch_add(1, Relaxed);
        let is_first = unmanaged.state.compare_exchange(0, 1, AcqRel, Relaxed).is_ok();
        if is_first {
            let all = about.iter().copied().chain(core::iter::repeat(0));
            unmanaged.first.iter().zip(all).for_each(|(to, from)| to.store(from, Relaxed));
            unmanaged.state.store(2, Release);
        }
        is_first
    }

    /// It could not be executed.
    pub fn forget_unmanaged(&self, is_first: bool) {
        self.head.unmanaged.count.fetch_sub(1, Relaxed);
        if is_first {
            self.head.unmanaged.state.store(0, Release);
        }
    }

    /// How often programs were executed that can't be managed, and what is known about the first.
    pub fn unmanaged(&self) -> (u64, Vec<u8>) {
        let unmanaged = &self.head.unmanaged;
        let is_known = unmanaged.state.load(Acquire) == 2;
        let text = unmanaged.first.iter().map(|byte| byte.load(Relaxed));
        let text = text.take_while(|byte| is_known && *byte != 0).collect();
        (unmanaged.count.load(Relaxed), text)
    }

    /// A slot for the calling thread's process, `pid` as `memfold run` sees it: until the thread
    /// ends or the process executes another program. One that has executed another keeps its slot,
    /// and its counters go on. `None` if there is none left, or no address space to map it.
    ///
    /// # Safety
    /// - As for [`memfold_os::thread::owner::RobustOwner::claim`]: the calling thread has no robust list that anybody needs.
    pub unsafe fn claim(&self, pid: u32) -> Option<ProcessSlot> {
        let used = self.head.used.load(Relaxed) as usize;
        let is_left =
            |n: &usize| self.slot(*n).is_some_and(|s| s.owner.state() == OwnerState::Ended);
        let is_kept =
            |n: &usize| is_left(n) && self.slot(*n).is_some_and(|s| s.pid.load(Relaxed) == pid);
        // SAFETY: the caller's promise.
        let take = |n: usize| unsafe { self.take(n, pid) };
        if let Some(kept) = (0..used).find(is_kept).and_then(take) {
            return Some(kept);
        }
        if used >= APART
            && let Some(left) = (0..used).filter(is_left).find_map(take)
        {
            return Some(left);
        }
        let next = self.head.used.fetch_add(1, AcqRel) as usize;
        if next >= self.slots {
            self.head.used.fetch_sub(1, AcqRel);
            return None;
        }
        take(next)
    }

    /// # Safety
    /// - As for [`RunTable::claim`].
    unsafe fn take(&self, n: usize, pid: u32) -> Option<ProcessSlot> {
        let process = self.process(n)?;
        // SAFETY: the caller's promise; the table is never unmapped, and each slot has a will of
        // its own.
        let taken = unsafe { process.slot.owner.claim(&process.place.will) };
        if taken != Ok(true) {
            return None;
        }
        process.slot.pid.store(pid, Relaxed);
        self.head.charges.forget(process.slot);
        process.set_need(0);
        process.set_least(0, 0);
        process.place.stats.clear_gauges();
        Some(process)
    }

    /// Every process that has had a slot, in the order of the slots.
    pub fn processes(&self) -> impl Iterator<Item = ProcessSlot> + '_ {
        let used = self.head.used.load(Relaxed) as usize;
        (0..used.min(self.slots))
            .map_while(|n| self.process(n))
            .filter(|p| p.slot.owner.state() != OwnerState::Free)
    }

    /// What the other processes of the run ask of its limit, or of its bound of resident memory: of
    /// those that live and need any. What ended ones held is free.
    pub fn claims_of_others(&self, own: Option<ProcessSlot>, limit: bool) -> Vec<ShareClaim> {
        let used = (self.head.used.load(Relaxed) as usize).min(self.slots);
        let own = own.map(|own| own.number);
        let slots = self.mapped(used).iter().flat_map(|group| &group.slots).take(used).enumerate();
        let others = slots.filter(|(n, _)| Some(*n) != own);
        let claim = |slot: &SlotWords| match slot.owner.state() {
            OwnerState::Held => Some(slot.claim(limit)).filter(|claim| claim.need > 0),
            _ => {
                self.head.charges.forget(slot);
                None
            }
        };
        others.filter_map(|(_, slot)| claim(slot)).collect()
    }

    fn slot(&self, n: usize) -> Option<&'static SlotWords> {
        self.process(n).map(|process| process.slot)
    }

    fn process(&self, n: usize) -> Option<ProcessSlot> {
        let group = self.mapped(n + 1).get(n / GROUP)?;
        let (slot, place) = (&group.slots[n % GROUP], &group.places[n % GROUP]);
        Some(ProcessSlot {
            number: n,
            charges: &self.head.charges,
            portion: self.portion,
            slot,
            place,
        })
    }

    /// The groups of the first `slots` slots, or as many as can be mapped.
    fn mapped(&self, slots: usize) -> &'static [TableGroup] {
        let mut mapped = self.mapped.lock();
        let count = slots.div_ceil(GROUP);
        if count > mapped.groups.len() {
            // Twice as much each time: all of them together are less than four times the last.
            let wanted = count.next_power_of_two().min(self.slots / GROUP);
            let at = self.head as *const RunHeader as *mut c_void;
            // SAFETY: the table is mapped from there, and its file has that many slots.
            if let Ok(at) = unsafe { shared::map_again(at, len_of(wanted * GROUP)) } {
                // SAFETY: as in `map_any`.
                let groups = unsafe { groups_at(at, wanted) };
                mapped.add(at, len_of(wanted * GROUP), groups);
            }
        }
        &mapped.groups[..count.min(mapped.groups.len())]
    }
}

/// # Safety
/// - At `at` a table with so many groups is mapped, and stays.
unsafe fn groups_at(at: *mut c_void, count: usize) -> &'static [TableGroup] {
    // SAFETY: by the caller's promise; atomics only, as in `map_any`.
    unsafe {
        core::slice::from_raw_parts(at.cast::<RunHeader>().add(1).cast::<TableGroup>(), count)
    }
}
