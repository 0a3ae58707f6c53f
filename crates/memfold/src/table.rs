//! The table that the processes of a run share with `memfold run`: the bounds of the run, a seat
//! for each process with what it needs and its figures, and the lines that processes leave to be
//! said.
//!
//! It has a seat for each process that the system can have, takes memory for those that were used,
//! and is mapped as far. A seat belongs to a process as long as that lives
//! ([`memfold_sys::thread::owner`]); the counters of those that have ended stay in the sums. The
//! first [`APART`] processes have seats of their own for good, so that each is told of; later ones
//! go on with the seats of ended ones.
use crate::policy::fair_share::Claim;
use crate::stats::Stats;
use crate::totals::{Sum, Totals};
use alloc::vec::Vec;
use core::ffi::c_void;
use core::mem::size_of;
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};
use core::sync::atomic::{
    Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use memfold_sys::memory::shared;
use memfold_sys::run::door::{HALF, Key};
use memfold_sys::run::mailbox::Mailbox;
use memfold_sys::sync::Mutex;
use memfold_sys::thread::now_ns;
use memfold_sys::thread::owner::{Owner, Ownership, Will};
use memfold_sys::{Errno, units::PAGE_SIZE};
use rustix::fd::{AsFd, OwnedFd};

/// Version of the layout; another is refused.
pub const LAYOUT_VERSION: u64 = 12;
/// Seats that are not given again.
pub const APART: usize = 64;
/// Seats that lie together.
const GROUP: usize = 64;
/// A process is charged for what it takes in steps of so many bytes.
const CHARGE_BYTES: u64 = 256 << 10;

/// Bytes of what is told of a program that isn't managed; the rest is cut off.
pub const UNMANAGED_BYTES_MAX: usize = 240;

/// Programs that can't be managed. All zeros are none.
#[repr(C)]
struct Unmanaged {
    count: AtomicU64,
    /// Of the text about the first: 1 while it is written, 2 once it is whole.
    state: AtomicU64,
    first: [AtomicU8; UNMANAGED_BYTES_MAX],
}

/// What stands in front.
#[repr(C, align(4096))]
struct Head {
    version: AtomicU64,
    /// As `--limit`, bytes; `u64::MAX` for none.
    limit_bytes: AtomicU64,
    /// As `--resident`, bytes; `u64::MAX` for none.
    resident_bytes: AtomicU64,
    /// Seats from the first to the last that was ever used.
    used: AtomicU64,
    /// 1 once a process of the run has begun, which may do without a seat; 2 once one has seen that
    /// an engine can be had for the gate.
    begun: AtomicU64,
    /// Tells this table from that of any other run.
    key: [AtomicU64; 2],
    /// `memfold run`.
    runner: Owner,
    will: Will,
    unmanaged: Unmanaged,
    /// What processes without an engine have mapped past what each may have, bytes.
    waiting_bytes: AtomicU64,
    /// What all processes with a seat are charged with.
    charged_bytes: AtomicU64,
    totals: Totals,
    /// 1 once a process has reported that the limit can't be kept.
    reported: AtomicU64,
    /// The largest of the least limits that could be kept at a moment, bytes; 0: the given one could.
    least_bytes: AtomicU64,
    mailbox: Mailbox,
}

/// The environment variable by which `memfold run` gives each process of a run its order.
pub const ORDER: &str = "MEMFOLD_RUN";

/// The order in an environment as `/proc/PID/environ` has it: memfold's library hides it from the
/// program's own. `None`: the process is of no run.
pub fn order_in(environment: &[u8]) -> Option<&str> {
    let value = environment.split(|byte| *byte == 0).find_map(|entry| {
        let value = entry.strip_prefix(ORDER.as_bytes())?.strip_prefix(b"=")?;
        Some(value).filter(|value| !value.is_empty())
    })?;
    core::str::from_utf8(value).ok()
}

/// What all processes look at all the time.
#[repr(C)]
struct Seat {
    owner: Owner,
    /// The process, by its number as `memfold run` sees it.
    pid: AtomicU32,
    need_bytes: AtomicU64,
    /// What it can't fold, uncompressed, and what is folded.
    least_bytes: AtomicU64,
    stored_bytes: AtomicU64,
    /// Its part of what all are charged with.
    charged_bytes: AtomicU64,
}

impl Seat {
    /// What it asks of a bound; `limit`: of one that counts what is folded.
    fn claim(&self, limit: bool) -> Claim {
        let stored = if limit { self.stored_bytes.load(Relaxed) } else { 0 };
        Claim {
            need: self.need_bytes.load(Relaxed),
            least: self.least_bytes.load(Relaxed).saturating_add(stored),
        }
    }
}

#[repr(C, align(64))]
struct Place {
    will: Will,
    stats: Stats,
}

#[repr(C)]
struct Group {
    seats: [Seat; GROUP],
    places: [Place; GROUP],
}

const _: () =
    assert!(size_of::<Head>().is_multiple_of(PAGE_SIZE) && align_of::<Group>() <= PAGE_SIZE);

/// The table, mapped for as long as this process lives.
pub struct Table {
    head: &'static Head,
    /// Seats at most.
    seats: usize,
    /// The groups that are mapped. A longer mapping takes the place of a shorter one, which stays
    /// for those who use it.
    groups: Mutex<&'static [Group]>,
}

/// A process of the run.
#[derive(Copy, Clone)]
pub struct Process {
    /// Of its seat, which is at several addresses where several mappings have it.
    number: usize,
    head: &'static Head,
    seat: &'static Seat,
    place: &'static Place,
}

/// What a run holds at least, bytes.
pub struct Least {
    /// All of its processes.
    pub bytes: u64,
    /// Of that, those without a seat.
    pub seatless: u64,
    /// Who holds most of it.
    pub largest: Option<Process>,
}

/// Length of the file of a table with `seats` seats, bytes.
fn len_of(seats: usize) -> usize {
    size_of::<Head>() + seats.div_ceil(GROUP) * size_of::<Group>()
}

fn words(half: &[u8; HALF]) -> [u64; 2] {
    let half = u128::from_ne_bytes(*half);
    [half as u64, (half >> 64) as u64]
}

impl Head {
    fn bounds_left(&self) -> (u64, u64) {
        let used = self.seatless_bytes();
        let left =
            |bound: u64| if bound == u64::MAX { bound } else { bound.saturating_sub(used).max(1) };
        (left(self.limit_bytes.load(Relaxed)), left(self.resident_bytes.load(Relaxed)))
    }

    /// What processes without a seat hold, or have taken and may use before anybody looks.
    fn seatless_bytes(&self) -> u64 {
        self.totals.seatless().1.max(self.waiting_bytes.load(Relaxed))
    }

    /// A process that has ended, or begins, holds nothing.
    fn forget_charge(&self, seat: &Seat) {
        if seat.charged_bytes.load(Relaxed) > 0 {
            let charged = seat.charged_bytes.swap(0, AcqRel);
            self.charged_bytes.fetch_sub(charged, AcqRel);
        }
    }
}

impl Table {
    /// A new one with room for `seats` processes, in a file of at most `bytes_max`; and the file.
    ///
    /// # Errors
    /// What making or mapping the file says; EFBIG: it may not even be long enough for a few.
    pub fn create(seats: usize, bytes_max: u64, key: &Key) -> Result<(Table, OwnedFd), Errno> {
        let most = bytes_max.saturating_sub(size_of::<Head>() as u64) / size_of::<Group>() as u64;
        let seats = seats.min((most as usize).saturating_mul(GROUP));
        if seats == 0 {
            return Err(Errno::FBIG);
        }
        let file = shared::create(c"memfold-stats", len_of(seats) as u64)?;
        let table = Table::map_any(&file)?;
        for (to, from) in table.head.key.iter().zip(words(&key.answer)) {
            to.store(from, Relaxed);
        }
        table.head.version.store(LAYOUT_VERSION, Relaxed);
        Ok((table, file))
    }

    /// That of the run with this key, from its file.
    ///
    /// # Errors
    /// EINVAL: it is another file, another run's, or of another version; what mapping it says.
    pub fn open(file: impl AsFd, key: &Key) -> Result<Table, Errno> {
        let table = Table::map_any(file)?;
        let its = [0, 1].map(|n| table.head.key[n].load(Relaxed));
        if table.head.version.load(Relaxed) != LAYOUT_VERSION || its != words(&key.answer) {
            return Err(Errno::INVAL);
        }
        Ok(table)
    }

    fn map_any(file: impl AsFd) -> Result<Table, Errno> {
        let (at, len) = shared::map(file, len_of(1))?;
        let seats = (len as usize - size_of::<Head>()) / size_of::<Group>() * GROUP;
        // SAFETY: the mapping is page-aligned, long enough for both, and stays; what is in it is
        // atomics only, for which every bit pattern is valid and which other processes may change
        // at any time.
        let (head, groups) = unsafe { (&*at.cast::<Head>(), groups_at(at, 1)) };
        Ok(Table { head, seats, groups: Mutex::new(groups) })
    }

    /// What the run may use from now on, bytes (limit, resident); `u64::MAX` for no bound.
    pub fn set_bounds(&self, limit: u64, resident: u64) {
        self.head.limit_bytes.store(limit, Relaxed);
        self.head.resident_bytes.store(resident, Relaxed);
    }

    /// What the run may use now, likewise.
    pub fn bounds(&self) -> (u64, u64) {
        (self.head.limit_bytes.load(Relaxed), self.head.resident_bytes.load(Relaxed))
    }

    /// What processes with a seat may use of it: what those without use, or have taken and may use
    /// before anybody looks, is taken off.
    pub fn bounds_left(&self) -> (u64, u64) {
        self.head.bounds_left()
    }

    /// Raises the peaks of the run to what its processes hold now, if that is due.
    pub fn note_totals(&self) {
        let used = (self.head.used.load(Relaxed) as usize).min(self.seats);
        if !self.head.totals.is_due(used, now_ns()) {
            return;
        }
        self.head.totals.note(self.sum());
    }

    /// What processes with a seat hold now.
    fn sum(&self) -> Sum {
        let mut sum = Sum::default();
        self.processes().filter(Process::is_alive).for_each(|process| sum.add(process.stats()));
        sum
    }

    /// What all processes of the run hold at least, bytes, however much is folded; of it, what
    /// processes without a seat hold. And the process that holds most of it, if any does.
    pub fn least(&self, limit: bool) -> Least {
        let seatless = self.head.seatless_bytes();
        let least = |process: &Process| process.claim(limit).least;
        let alive = || self.processes().filter(Process::is_alive);
        let bytes = alive().fold(seatless, |sum, process| sum.saturating_add(least(&process)));
        let largest = alive().max_by_key(|process| (least(process), process.number));
        Least { bytes, seatless, largest }
    }

    /// The sum of a figure over the processes that are alive, and how many there are.
    pub fn sum_of(&self, of: impl Fn(&Stats) -> u64) -> (u64, usize) {
        let alive = self.processes().filter(Process::is_alive);
        alive.fold((0, 0), |(sum, count), process| {
            (u64::saturating_add(sum, of(process.stats())), count + 1)
        })
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

    /// What the run as a whole holds, and held at most.
    pub fn totals(&self) -> &'static Totals {
        &self.head.totals
    }

    /// Where lines are left.
    pub fn mailbox(&self) -> &'static Mailbox {
        &self.head.mailbox
    }

    /// The calling thread is that of `memfold run`, which reads the lines while it lives.
    ///
    /// # Errors
    /// As [`Owner::claim`].
    ///
    /// # Safety
    /// - The calling thread uses no robust mutex.
    pub unsafe fn run_here(&self) -> Result<(), Errno> {
        // SAFETY: the caller's promise; the table is never unmapped.
        unsafe { self.head.runner.claim(&self.head.will).map(drop) }
    }

    /// Whether `memfold run` is gone, so that nobody reads a line.
    pub fn is_left_alone(&self) -> bool {
        self.head.runner.state() == Ownership::Ended
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
        self.head.waiting_bytes.fetch_update(AcqRel, Relaxed, more).is_ok()
    }

    /// It has them no more, or has an engine.
    pub fn give_back_waiting(&self, bytes: u64) {
        self.head.waiting_bytes.fetch_sub(bytes, AcqRel);
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

    /// A seat for the calling thread's process, `pid` as `memfold run` sees it: until the thread
    /// ends or the process executes another program. One that has executed another keeps its seat,
    /// and its counters go on. `None` if there is none left, or no address space to map it.
    ///
    /// # Safety
    /// - As for [`Owner::claim`]: the calling thread has no robust list that anybody needs.
    pub unsafe fn claim(&self, pid: u32) -> Option<Process> {
        let used = self.head.used.load(Relaxed) as usize;
        let is_left =
            |n: &usize| self.seat(*n).is_some_and(|s| s.owner.state() == Ownership::Ended);
        let is_kept =
            |n: &usize| is_left(n) && self.seat(*n).is_some_and(|s| s.pid.load(Relaxed) == pid);
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
        if next >= self.seats {
            self.head.used.fetch_sub(1, AcqRel);
            return None;
        }
        take(next)
    }

    /// # Safety
    /// - As for [`Table::claim`].
    unsafe fn take(&self, n: usize, pid: u32) -> Option<Process> {
        let process = self.process(n)?;
        // SAFETY: the caller's promise; the table is never unmapped, and each seat has a will of
        // its own.
        let taken = unsafe { process.seat.owner.claim(&process.place.will) };
        if taken != Ok(true) {
            return None;
        }
        process.seat.pid.store(pid, Relaxed);
        self.head.forget_charge(process.seat);
        process.set_need(0);
        process.set_least(0, 0);
        process.place.stats.clear_gauges();
        Some(process)
    }

    /// Every process that has had a seat, in the order of the seats.
    pub fn processes(&self) -> impl Iterator<Item = Process> + '_ {
        let used = self.head.used.load(Relaxed) as usize;
        (0..used.min(self.seats))
            .map_while(|n| self.process(n))
            .filter(|p| p.seat.owner.state() != Ownership::Free)
    }

    /// What the other processes of the run ask of its limit, or of its bound of resident memory: of
    /// those that live and need any. What ended ones held is free.
    pub fn claims_of_others(&self, own: Option<Process>, limit: bool) -> Vec<Claim> {
        let used = (self.head.used.load(Relaxed) as usize).min(self.seats);
        let own = own.map(|own| own.number);
        let seats = self.mapped(used).iter().flat_map(|group| &group.seats).take(used).enumerate();
        let others = seats.filter(|(n, _)| Some(*n) != own);
        let claim = |seat: &Seat| match seat.owner.state() {
            Ownership::Held => Some(seat.claim(limit)).filter(|claim| claim.need > 0),
            _ => {
                self.head.forget_charge(seat);
                None
            }
        };
        others.filter_map(|(_, seat)| claim(seat)).collect()
    }

    fn seat(&self, n: usize) -> Option<&'static Seat> {
        self.process(n).map(|process| process.seat)
    }

    fn process(&self, n: usize) -> Option<Process> {
        let group = self.mapped(n + 1).get(n / GROUP)?;
        let (seat, place) = (&group.seats[n % GROUP], &group.places[n % GROUP]);
        Some(Process { number: n, head: self.head, seat, place })
    }

    /// The groups of the first `seats` seats, or as many as can be mapped.
    fn mapped(&self, seats: usize) -> &'static [Group] {
        let mut groups = self.groups.lock();
        let count = seats.div_ceil(GROUP);
        if count > groups.len() {
            // Twice as much each time: all of them together are less than four times the last.
            let wanted = count.next_power_of_two().min(self.seats / GROUP);
            let at = self.head as *const Head as *mut c_void;
            // SAFETY: the table is mapped from there, and its file has that many seats.
            if let Ok(at) = unsafe { shared::map_again(at, len_of(wanted * GROUP)) } {
                // SAFETY: as in `map_any`.
                *groups = unsafe { groups_at(at, wanted) };
            }
        }
        &groups[..count.min(groups.len())]
    }
}

/// # Safety
/// - At `at` a table with so many groups is mapped, and stays.
unsafe fn groups_at(at: *mut c_void, count: usize) -> &'static [Group] {
    // SAFETY: by the caller's promise; atomics only, as in `map_any`.
    unsafe { core::slice::from_raw_parts(at.cast::<Head>().add(1).cast::<Group>(), count) }
}

impl Process {
    /// Its number, as `memfold run` sees it.
    pub fn pid(&self) -> u32 {
        self.seat.pid.load(Relaxed)
    }

    /// Whether it is still there, and its program is the one that has the seat.
    pub fn is_alive(&self) -> bool {
        self.seat.owner.state() == Ownership::Held
    }

    /// Its figures.
    pub fn stats(&self) -> &'static Stats {
        &self.place.stats
    }

    /// What it needs of the limit, bytes.
    pub fn set_need(&self, bytes: u64) {
        self.seat.need_bytes.store(bytes, Relaxed);
    }

    /// What it can't fold, uncompressed, and what it has folded takes, bytes.
    pub fn set_least(&self, bytes: u64, stored: u64) {
        self.seat.least_bytes.store(bytes, Relaxed);
        self.seat.stored_bytes.store(stored, Relaxed);
    }

    /// Whether both are the same process.
    pub fn is(&self, other: &Process) -> bool {
        self.number == other.number
    }

    /// What it asks of the limit, or of the bound of resident memory.
    pub fn claim(&self, limit: bool) -> Claim {
        self.seat.claim(limit)
    }

    /// Charges this process with `bytes` in all, unless it is charged with so much already: before
    /// it takes memory. `false`: all processes together would be past the limit, or past the bound
    /// of resident memory, and nothing was charged. Costs one load while there is room in the step.
    ///
    /// Processes that grow at once learn of each other so. The sum is never below what the seats are
    /// charged with, also where a process is killed in between: the sum is raised first, and
    /// lowered last.
    pub fn charge(&self, bytes: u64, limit: bool) -> bool {
        let own = self.seat.charged_bytes.load(Relaxed);
        if bytes <= own {
            return true;
        }
        let bounds = self.head.bounds_left();
        let most = if limit { bounds.0 } else { bounds.1 };
        let step = (bytes - own).next_multiple_of(CHARGE_BYTES);
        [step, bytes - own].into_iter().any(|more| {
            let fits = |sum: u64| sum.checked_add(more).filter(|sum| *sum <= most);
            let is_charged = self.head.charged_bytes.fetch_update(AcqRel, Relaxed, fits).is_ok();
            if is_charged {
                self.seat.charged_bytes.fetch_add(more, AcqRel);
            }
            is_charged
        })
    }

    /// Charges it with what it holds, bytes: no more and no less.
    pub fn settle(&self, bytes: u64) {
        let own = self.seat.charged_bytes.load(Relaxed);
        if bytes > own {
            self.head.charged_bytes.fetch_add(bytes - own, AcqRel);
            self.seat.charged_bytes.fetch_add(bytes - own, AcqRel);
        } else {
            let less = |now: u64| now.checked_sub(own - bytes);
            if self.seat.charged_bytes.fetch_update(AcqRel, Relaxed, less).is_ok() {
                self.head.charged_bytes.fetch_sub(own - bytes, AcqRel);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::boxed::Box;
    use std::collections::HashSet;
    use std::sync::Barrier;

    const KEY: Key = Key { ask: [1; HALF], answer: [2; HALF] };

    fn table(seats: usize) -> &'static Table {
        Box::leak(Box::new(Table::create(seats, u64::MAX, &KEY).unwrap().0))
    }

    fn claim(table: &Table, pid: u32) -> Option<Process> {
        // SAFETY: threads of these tests use no robust mutex.
        unsafe { table.claim(pid) }
    }

    /// Claims a seat in a thread that ends, and waits until that has been noted.
    fn claim_and_end(table: &'static Table, pid: u32) -> Process {
        let process = std::thread::spawn(move || claim(table, pid).unwrap()).join().unwrap();
        while process.is_alive() {
            std::thread::yield_now();
        }
        process
    }

    #[test]
    fn order_is_found_in_an_environment() {
        let order = |text: &'static str| order_in(text.as_bytes());
        assert_eq!(order("A=1\0MEMFOLD_RUN=limit=5;x\0B=2\0"), Some("limit=5;x"));
        let none = ["", "A=1\0MEMFOLD_RUN=\0", "XMEMFOLD_RUN=1\0MEMFOLD_RUNS=2\0"];
        assert_eq!(none.map(order), [None; 3]);
    }

    #[test]
    fn another_opener_has_the_same_table_and_only_with_its_key() {
        let (table, file) = Table::create(1000, u64::MAX, &KEY).unwrap();
        table.set_bounds(5, 6);
        let other = Table::open(&file, &KEY).unwrap();
        assert_eq!((other.bounds(), other.note_process()), ((5, 6), true));
        claim(&table, 77).unwrap().stats().faults.store(3, Relaxed);
        let seen: Vec<_> =
            other.processes().map(|p| (p.pid(), p.stats().faults.load(Relaxed))).collect();
        assert_eq!((seen, table.note_process()), (std::vec![(77, 3)], false));
        assert!(table.has_begun() && !table.has_gate());
        table.note_gate();
        assert!(!other.note_process() && other.has_gate());
        assert!(Table::open(&file, &Key { answer: [3; HALF], ..KEY }).is_err());
        let other =
            rustix::fs::open(c"/dev/null", rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty())
                .unwrap();
        assert!(Table::open(other, &KEY).is_err());
        assert!(rustix::fs::ftruncate(&file, 0).is_err());
    }

    #[test]
    fn processes_without_an_engine_have_a_bound_in_common() {
        let table = table(64);
        assert!(table.take_waiting(60, 100) && !table.take_waiting(41, 100));
        assert!(table.take_waiting(40, 100) && !table.take_waiting(u64::MAX, u64::MAX));
        table.give_back_waiting(60);
        assert!(table.take_waiting(60, 100) && !table.take_waiting(1, 100));
    }

    #[test]
    fn processes_are_charged_together_up_to_the_bound_and_an_ended_one_holds_nothing() {
        const MIB: u64 = 1 << 20;
        let table = table(64);
        table.set_bounds(4 * MIB, 2 * MIB);
        let first = claim(table, 1).unwrap();
        let second = claim_and_end(table, 2);
        assert!(first.charge(MIB, true) && second.charge(3 * MIB - 4096, true));
        assert!(second.charge(3 * MIB, true), "it was charged with a whole step");
        assert!(!first.charge(MIB + 1, true) && !first.charge(MIB + 1, false));
        second.settle(2 * MIB);
        assert!(first.charge(2 * MIB, true) && !first.charge(2 * MIB + 1, true));
        table.claims_of_others(Some(first), true);
        assert!(first.charge(4 * MIB, true), "the other has ended");
        first.settle(MIB);
        assert_eq!(table.head.charged_bytes.load(Relaxed), MIB);
    }

    #[test]
    fn a_program_that_is_not_executed_after_all_is_not_counted_as_unmanaged() {
        let table = table(64);
        assert_eq!(table.unmanaged(), (0, std::vec![]));
        let first = table.note_unmanaged(b"/no: static");
        table.forget_unmanaged(first);
        assert_eq!(table.unmanaged(), (0, std::vec![]));
        assert!(table.note_unmanaged(b"/a: static"));
        let second = table.note_unmanaged(b"/b: static");
        assert!(!second && table.unmanaged() == (2, b"/a: static".to_vec()));
        table.forget_unmanaged(second);
        assert_eq!(table.unmanaged(), (1, b"/a: static".to_vec()));
    }

    /// More than were ever mapped at first, all at the same time.
    #[test]
    fn each_of_many_processes_has_a_seat_of_its_own_and_sees_what_all_others_need() {
        const COUNT: usize = 300;
        let (table, barrier) = (table(32768), Barrier::new(COUNT));
        let seats: Vec<_> = std::thread::scope(|scope| {
            let begin = |pid| {
                let barrier = &barrier;
                scope.spawn(move || {
                    let own = claim(table, pid as u32).unwrap();
                    own.set_need(1 + pid as u64);
                    barrier.wait();
                    let others = table.claims_of_others(Some(own), true);
                    let others = others.iter().map(|claim| claim.need).sum::<u64>();
                    barrier.wait();
                    assert_eq!(others, (COUNT * (COUNT + 1) / 2 - pid - 1) as u64);
                    own.number
                })
            };
            let threads: Vec<_> = (0..COUNT).map(begin).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(seats.iter().collect::<HashSet<_>>().len(), COUNT);
        assert_eq!(table.processes().map(|p| p.pid()).collect::<HashSet<_>>().len(), COUNT);
        while table.processes().any(|p| p.is_alive()) {
            std::thread::yield_now();
        }
        assert!(table.claims_of_others(None, true).is_empty());
    }

    #[test]
    fn a_process_that_executes_another_program_keeps_its_seat_and_counters() {
        let table = table(100);
        let first = claim_and_end(table, 5);
        first.stats().faults.store(9, Relaxed);
        first.stats().pool_bytes.store(8, Relaxed);
        claim_and_end(table, 6);
        let again = claim_and_end(table, 5);
        assert_eq!(first.number, again.number);
        assert_eq!(
            (again.stats().faults.load(Relaxed), again.stats().pool_bytes.load(Relaxed)),
            (9, 0)
        );
        assert_eq!(table.processes().count(), 2);
    }

    /// Two that live one after the other never held their sum; two at once did.
    #[test]
    fn peaks_of_a_run_are_those_of_processes_that_lived_at_once() {
        let table = table(100);
        let hold = |pid, bytes| {
            let stats = claim(table, pid).unwrap().stats();
            stats.resident_bytes.store(bytes, Relaxed);
            stats.folded_bytes.store(2 * bytes, Relaxed);
        };
        let live = |pid| {
            std::thread::spawn(move || (hold(pid, 100), table.note_totals())).join().unwrap();
            while table.processes().any(|p| p.is_alive()) {
                std::thread::yield_now();
            }
        };
        (1..4).for_each(live);
        assert_eq!(table.totals().peaks(), [100, 100, 0, 0, 200]);
        for pid in 4..6 {
            hold(pid, 70);
        }
        table.totals().set_seatless(3, 5);
        while table.totals().peaks()[0] == 100 {
            table.note_totals();
        }
        assert_eq!(table.totals().peaks(), [145, 145, 0, 0, 280]);
        assert_eq!(table.totals().seatless(), (3, 5));
        for ((limit, resident), left) in
            [((50, u64::MAX), (45, u64::MAX)), ((u64::MAX, 7), (u64::MAX, 2)), ((3, 5), (1, 1))]
        {
            table.set_bounds(limit, resident);
            assert_eq!(table.bounds_left(), left);
        }
    }

    #[test]
    fn a_run_of_many_short_processes_takes_no_more_seats_than_live_at_once_and_keeps_their_counters()
     {
        let table = table(32768);
        for pid in 0..1000 {
            crate::stats::add(&claim_and_end(table, pid).stats().faults, 1);
        }
        let faults = table.processes().map(|p| p.stats().faults.load(Relaxed)).sum::<u64>();
        assert_eq!((table.processes().count(), faults), (APART, 1000));
    }

    #[test]
    fn a_table_with_no_seat_left_says_so() {
        let table = table(64);
        let held: Vec<_> = (0..64).map(|pid| claim(table, pid)).collect();
        assert!(held.iter().all(Option::is_some) && claim(table, 64).is_none());
        assert_eq!(table.processes().count(), 64);
        assert!(Table::create(1, 4096, &KEY).is_err());
    }
}
