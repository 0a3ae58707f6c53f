//! The tables as `memfold run` sees them: one for each user of the run, and the bounds shared
//! between them. A table's figures are believed only up to what the kernel says of the user's
//! processes.
use crate::fair_share::ShareClaim;
use crate::table::bounds::{AskedShare, RunBounds, USERS};
use crate::table::totals::{PEAKS, PeakSums, TablePeaks};
use crate::table::{ProcessSlot, RunTable};
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;
use core::sync::atomic::Ordering::Relaxed;
use memfold_os::Errno;
use memfold_os::sync::Mutex;
use memfold_stats::Stats;
use rustix::fd::OwnedFd;

/// The table of one user: mapped here, and open for its processes.
#[derive(Copy, Clone)]
pub struct UserTable {
    /// The real user of the processes, as `memfold run` sees it.
    pub uid: u32,
    /// The file that the processes are given.
    pub file: &'static OwnedFd,
    /// The table.
    pub table: &'static RunTable,
}

/// The bytes that each user's processes have, according to the kernel.
pub type MeasuredUsers = BTreeMap<u32, u64>;

/// The tables of a run. They outlive the processes, so no figure is lost when one crashes.
pub struct UserTables {
    /// The users, that of `memfold run` first.
    users: Mutex<Vec<UserTable>>,
    measured: Mutex<MeasuredUsers>,
    bounds: RunBounds,
    /// The peaks of all users together, if there are several.
    totals: TablePeaks,
}

impl UserTable {
    /// Creates an empty table for the `n`th user, with room for `slots` processes, in a file of at
    /// most `bytes_max` bytes.
    fn create(
        uid: u32,
        slots: usize,
        bytes_max: u64,
        bounds: RunBounds,
        n: usize,
    ) -> Result<UserTable, Errno> {
        let (table, file) = RunTable::create(slots, bytes_max, bounds, n)?;
        Ok(UserTable { uid, file: Box::leak(Box::new(file)), table: Box::leak(Box::new(table)) })
    }
}

/// Returns what the processes of a user ask of a bound, as far as the `measured` bytes confirm it.
fn asked(user: &UserTable, limit: bool, measured: &MeasuredUsers) -> AskedShare {
    let most = measured.get(&user.uid).copied().unwrap_or(0);
    let AskedShare { mut claim, largest } = user.table.asked(limit);
    claim.least = claim.least.min(most);
    AskedShare { claim, largest: largest.min(most) }
}

impl UserTables {
    /// Creates an empty table for the user of `memfold run`, with room for `slots` processes, in a
    /// file of at most `bytes_max` bytes.
    ///
    /// # Errors
    /// The errors of [`RunTable::create`].
    pub fn create(
        uid: u32,
        slots: usize,
        bytes_max: u64,
        bounds: RunBounds,
    ) -> Result<UserTables, Errno> {
        let own = UserTable::create(uid, slots, bytes_max, bounds, 0)?;
        Ok(UserTables {
            users: Mutex::new(vec![own]),
            measured: Mutex::default(),
            bounds,
            totals: TablePeaks::default(),
        })
    }

    /// Adds a table for one more user.
    ///
    /// # Errors
    /// - EUSERS: the run has [`USERS`] users already.
    /// - The errors of [`RunTable::create`].
    pub fn add(&self, uid: u32, slots: usize, bytes_max: u64) -> Result<UserTable, Errno> {
        let n = self.users.lock().len();
        if n == USERS {
            return Err(Errno::USERS);
        }
        let user = UserTable::create(uid, slots, bytes_max, self.bounds, n)?;
        // The program that the run was given is none of this user's processes.
        user.table.note_process();
        if self.tables().iter().any(|table| table.has_gate()) {
            user.table.note_gate();
        }
        self.users.lock().push(user);
        self.deal(None);
        Ok(user)
    }

    /// Returns the users, that of `memfold run` first.
    pub fn users(&self) -> Vec<UserTable> {
        self.users.lock().clone()
    }

    /// Returns the table of a user.
    pub fn of(&self, uid: u32) -> Option<UserTable> {
        self.users.lock().iter().find(|user| user.uid == uid).copied()
    }

    /// Returns all tables.
    pub fn tables(&self) -> Vec<&'static RunTable> {
        self.users.lock().iter().map(|user| user.table).collect()
    }

    /// Returns the bounds of the run.
    pub fn bounds(&self) -> &RunBounds {
        &self.bounds
    }

    /// Returns every process that has had a slot.
    pub fn processes(&self) -> impl Iterator<Item = ProcessSlot> {
        self.tables().into_iter().flat_map(|table| table.processes())
    }

    /// Returns the numbers of the processes that hold a slot now, each with its user.
    pub fn with_slots(&self) -> BTreeMap<u32, u32> {
        let of = |user: UserTable| {
            let alive = user.table.processes().filter(ProcessSlot::is_alive);
            alive.map(move |process| (process.pid(), user.uid))
        };
        self.users().into_iter().flat_map(of).collect()
    }

    /// Returns whether there are several users.
    pub fn has_others(&self) -> bool {
        self.users.lock().len() > 1
    }

    /// Sets the bytes that the run may use from now on; `None` for no bound.
    pub fn set_bounds(&self, limit_bytes: Option<u64>, resident_bytes: Option<u64>) {
        let or_none = |bytes: Option<u64>| bytes.unwrap_or(u64::MAX);
        self.bounds.set_given(or_none(limit_bytes), or_none(resident_bytes));
        self.deal(None);
    }

    /// Sets the bytes of the limit that the run may use now, as a group shares them.
    pub fn set_share(&self, bytes: u64) {
        self.bounds.set_share(bytes);
        self.deal(None);
    }

    /// Returns the CPU time of the programs' threads until now, with what they spent in faults, in
    /// nanoseconds. It falls when a process ends.
    pub fn worked_ns(&self) -> u64 {
        let of =
            |stats: &Stats| stats.own_ns.load(Relaxed).saturating_add(stats.fault_ns.load(Relaxed));
        self.tables().into_iter().fold(0, |sum, table| table.sum_of(of).0.saturating_add(sum))
    }

    /// Shares the bounds between the users by the claims in their tables. A claim is capped at the
    /// user's `measured` bytes; `None` uses the last measurement.
    pub fn deal(&self, measured: Option<MeasuredUsers>) {
        let mut last = self.measured.lock();
        *last = measured.unwrap_or_else(|| core::mem::take(&mut last));
        let claims = |user: &UserTable| [true, false].map(|limit| asked(user, limit, &last));
        let users = self.users();
        self.bounds.deal(&users.iter().map(claims).collect::<Vec<_>>());
        users.iter().for_each(|user| user.table.send_bounds());
    }

    /// Returns what the whole run asks of a limit that it shares with other runs, and the bytes that
    /// it holds now.
    pub fn claim(&self) -> (ShareClaim, u64) {
        let slotless = self.bounds.slotless().1;
        let mut claim = ShareClaim { need: slotless, least: slotless, ..ShareClaim::default() };
        let mut bytes = slotless;
        let last = self.measured.lock();
        for (n, user) in self.users().iter().enumerate() {
            let mut sum = PeakSums::default();
            user.table.add_to(&mut sum);
            // The user of `memfold run` can only harm its own runs.
            let most = match n {
                0 => u64::MAX,
                _ => last.get(&user.uid).copied().unwrap_or(0),
            };
            let user_claim = if n == 0 { user.table.asked(true) } else { asked(user, true, &last) };
            let own = user_claim.claim;
            bytes = bytes.saturating_add(sum.bytes().min(most));
            claim.need = claim.need.saturating_add(own.need);
            claim.least = claim.least.saturating_add(own.least);
        }
        (claim, bytes)
    }

    /// Raises the peaks to what all processes hold now.
    pub fn note_totals(&self) {
        match &self.tables()[..] {
            [one] => one.note_totals(),
            all => {
                let mut sum = PeakSums::default();
                all.iter().for_each(|table| table.add_to(&mut sum));
                self.totals.note(sum, self.bounds.slotless().1);
            }
        }
    }

    /// Returns the most that the run held at once, in the order of [`PEAKS`]. The sum over several
    /// users is only sampled from time to time.
    pub fn peaks(&self) -> [u64; PEAKS.len()] {
        let each = self.tables().into_iter().map(|table| table.totals().peaks());
        each.fold(self.totals.peaks(), |most, peaks| {
            core::array::from_fn(|n| most[n].max(peaks[n]))
        })
    }

    /// Returns the least limit in bytes that could have been kept all the time; 0 if the given one
    /// was.
    pub fn least_bytes(&self) -> u64 {
        self.tables().iter().map(|table| table.least_bytes()).max().unwrap_or(0)
    }

    /// Returns whether any process has begun.
    pub fn has_begun(&self) -> bool {
        self.tables()[0].has_begun()
    }

    /// Returns how often programs that cannot be managed were executed, and the text about the
    /// first.
    pub fn unmanaged(&self) -> (u64, Vec<u8>) {
        let all = self.tables().into_iter().map(RunTable::unmanaged);
        let add = |(count, first): (u64, Vec<u8>), (more, text): (u64, Vec<u8>)| {
            (count.saturating_add(more), if first.is_empty() { text } else { first })
        };
        all.fold((0, Vec::new()), add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::door::{DoorKey, HALF};

    const OWN: u32 = 1000;

    fn tables() -> UserTables {
        let key = DoorKey { ask: [1; HALF], answer: [2; HALF] };
        let (bounds, file) = RunBounds::create(u64::MAX, &key).unwrap();
        core::mem::forget(file);
        UserTables::create(OWN, 64, u64::MAX, bounds).unwrap()
    }

    fn add(tables: &UserTables, uid: u32) -> UserTable {
        tables.add(uid, 64, u64::MAX).unwrap()
    }

    fn claim(table: &RunTable, pid: u32) -> ProcessSlot {
        // SAFETY: threads of these tests use no robust mutex, so their robust lists are not needed.
        unsafe { table.claim(pid) }.expect("there are slots left")
    }

    /// A claim in another user's table takes no more from this user than the memory that the other
    /// user has.
    #[test]
    fn user_is_believed_up_to_what_the_kernel_says() {
        let tables = tables();
        tables.set_bounds(Some(100 << 20), None);
        let other = add(&tables, 65534);
        assert!(!other.table.note_process(), "it is not the first of the run");
        let (own, theirs) = (claim(tables.tables()[0], 1), claim(other.table, 2));
        own.set_need(90 << 20);
        own.set_least(60 << 20, 0);
        theirs.set_need(u64::MAX);
        theirs.set_least(u64::MAX, 5);
        let parts = |their: u64| {
            tables.deal(Some(BTreeMap::from([(OWN, 70 << 20), (65534, their)])));
            let of = |table: &RunTable| table.bounds_left().0 >> 20;
            (of(tables.tables()[0]), of(other.table), tables.tables()[0].least(true).bytes >> 20)
        };
        assert_eq!(parts(0), (60, 40, 60));
        assert_eq!(parts(10 << 20), (60, 40, 70));
        assert!(tables.tables()[0].least(true).largest.is_some());
        assert_eq!(tables.peaks()[0], 0);
        assert_eq!(tables.with_slots(), BTreeMap::from([(1, OWN), (2, 65534)]));
    }

    #[test]
    fn run_asks_for_all_of_its_users() {
        let tables = tables();
        let other = add(&tables, 5);
        let (own, theirs) = (claim(tables.tables()[0], 1), claim(other.table, 2));
        own.set_need(90);
        own.set_least(20, 10);
        own.stats().resident_bytes.store(40, Relaxed);
        theirs.set_need(50);
        theirs.set_least(u64::MAX, 0);
        theirs.stats().resident_bytes.store(u64::MAX, Relaxed);
        tables.bounds().set_slotless(1, 7);
        tables.deal(Some(BTreeMap::from([(5, 30)])));
        let (claim, held_bytes) = tables.claim();
        assert_eq!((claim.need, claim.least, held_bytes), (147, 67, 77));
    }

    #[test]
    fn measure_holds_until_the_next() {
        let tables = tables();
        let other = add(&tables, 5);
        claim(tables.tables()[0], 1).set_need(90);
        let theirs = claim(other.table, 2);
        theirs.set_need(90);
        theirs.set_least(80, 0);
        tables.deal(Some(BTreeMap::from([(5, 70)])));
        tables.set_bounds(Some(100), Some(100));
        assert_eq!(other.table.bounds_left(), (70, 70));
        tables.deal(Some(BTreeMap::new()));
        assert_eq!(other.table.bounds_left(), (50, 50));
    }

    #[test]
    fn number_of_users_is_bounded() {
        let tables = tables();
        assert!((1..USERS as u32).all(|n| tables.add(100_000 + n, 64, u64::MAX).is_ok()));
        assert_eq!(tables.add(1, 64, u64::MAX).err(), Some(Errno::USERS));
        assert_eq!(tables.tables().len(), USERS);
        assert!(tables.of(1).is_none());
        assert_eq!(tables.of(100_003).map(|user| user.uid), Some(100_003));
    }

    #[test]
    fn new_user_knows_what_the_run_has_found_out() {
        let tables = tables();
        let early = add(&tables, 1);
        tables.tables()[0].note_gate();
        let late = add(&tables, 2);
        assert_eq!([early, late].map(|user| user.table.has_gate()), [false, true]);
        assert_eq!([early, late].map(|user| user.table.has_begun()), [true, true]);
        assert!(tables.has_begun() && tables.has_others());
    }

    #[test]
    fn figures_of_the_run_are_of_all_users_at_once() {
        let tables = tables();
        let resident =
            |table: &RunTable, pid| claim(table, pid).stats().resident_bytes.store(40, Relaxed);
        resident(tables.tables()[0], 1);
        tables.note_totals();
        assert_eq!(tables.peaks()[..2], [40, 40]);
        let other = add(&tables, 7).table;
        resident(other, 2);
        tables.bounds().set_slotless(1, 3);
        tables.note_totals();
        assert_eq!(tables.peaks()[..2], [83, 83]);
        tables.tables()[0].note_least(5);
        other.note_least(9);
        assert_eq!(tables.least_bytes(), 9);
        other.note_unmanaged(b"/b: static");
        tables.tables()[0].note_unmanaged(b"/a: static");
        assert_eq!(tables.unmanaged(), (2, b"/a: static".to_vec()));
    }
}
