//! The tables that the processes of a run share with memfold, one for each user
//! ([`memfold_run::table`]), the bounds of the run, and how processes get at them: by a path in /proc,
//! or, where that leads nowhere (in a PID namespace, as another user), at a door.
use crate::failure::Failure;
use crate::program::plain;
use crate::table::door::Door;
use memfold::config::Config;
use memfold_run::table::bounds::{Asked, Bounds, USERS};
use memfold_run::table::totals::{PEAKS, Sum, Totals};
use memfold_run::table::{Process, Table, order_in};
use rustix::fd::IntoRawFd;
use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Mutex;

/// Processes that a system has if it doesn't say how many it may have.
const PROCESSES: usize = 1 << 22;
/// Seats in the table of a user other than that of `memfold run`: it may have all of it used.
const OTHERS_SEATS: usize = 1 << 12;

/// The table of one user: mapped here, and open for its processes.
#[derive(Copy, Clone)]
struct User {
    /// The real one of its processes, as this process sees it.
    uid: u32,
    file: &'static OwnedFd,
    table: &'static Table,
}

/// What each user's processes have, as the kernel tells it, bytes.
pub type Measured = HashMap<u32, u64>;

/// The tables of a run. What is in them outlives the processes: a crash loses no figure.
pub struct Slots {
    /// The user of `memfold run` first.
    users: Mutex<Vec<User>>,
    measured: Mutex<Measured>,
    bounds: Bounds,
    bounds_file: &'static OwnedFd,
    /// Of all users at once, if there are several.
    totals: Totals,
    door: Door,
}

/// Gives a descriptor up by the one that made it; it stays open.
fn kept(file: impl IntoRawFd) -> &'static OwnedFd {
    // SAFETY: the descriptor is the caller's alone, who gives it up here.
    Box::leak(Box::new(unsafe { OwnedFd::from_raw_fd(file.into_raw_fd()) }))
}

fn fail(e: io::Error) -> Failure {
    Failure::own(format!("the table of the run: {}", plain(&e)))
}

fn system(e: memfold_sys::Errno) -> Failure {
    match e {
        memfold_sys::Errno::FBIG => Failure::own(
            "the table of the run: `ulimit -f` allows no file for it; raise the hard limit (ulimit -H -f)",
        ),
        e => fail(io::Error::from_raw_os_error(e.raw_os_error())),
    }
}

impl User {
    /// An empty table for one more user.
    fn new(uid: u32, seats: usize, bounds: Bounds, n: usize) -> Result<User, Failure> {
        let lifted = Lifted::begin();
        let made = Table::create(seats, file_bytes_max(), bounds, n);
        drop(lifted);
        let (table, file) = made.map_err(system)?;
        Ok(User { uid, file: kept(file), table: Box::leak(Box::new(table)) })
    }
}

impl Slots {
    /// An empty table for the user of this process.
    ///
    /// # Errors
    /// 125: no memfd, no memory, or no socket.
    pub fn new() -> Result<Slots, Failure> {
        let door = Door::open().map_err(fail)?;
        let lifted = Lifted::begin();
        let made = Bounds::create(file_bytes_max(), door.key());
        drop(lifted);
        let (bounds, file) = made.map_err(system)?;
        // SAFETY: only asks.
        let uid = unsafe { libc::getuid() };
        let own = User::new(uid, processes_max(), bounds, 0)?;
        Ok(Slots {
            users: Mutex::new(vec![own]),
            measured: Mutex::default(),
            bounds,
            bounds_file: kept(file),
            totals: Totals::default(),
            door,
        })
    }

    /// The part of a process's order that leads to the table of this process's user, and to the bounds.
    pub fn order(&self) -> String {
        let path = |file: &OwnedFd| format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        let (table, bounds) = (path(self.users()[0].file), path(self.bounds_file));
        format!("stats={table};bounds={bounds};door={}", self.door.order())
    }

    fn users(&self) -> Vec<User> {
        self.users.lock().expect("nobody panics with the lock").clone()
    }

    /// The tables.
    pub fn tables(&self) -> Vec<&'static Table> {
        self.users().iter().map(|user| user.table).collect()
    }

    /// The bounds.
    pub fn bounds(&self) -> &Bounds {
        &self.bounds
    }

    /// Every process that has had a seat.
    pub fn processes(&self) -> impl Iterator<Item = Process> {
        self.tables().into_iter().flat_map(|table| table.processes())
    }

    /// The numbers of the processes that have one now, with their users.
    pub fn seated(&self) -> HashMap<u32, u32> {
        let of = |user: User| {
            let alive = user.table.processes().filter(Process::is_alive);
            alive.map(move |process| (process.pid(), user.uid))
        };
        self.users().into_iter().flat_map(of).collect()
    }

    /// Whether there are several users.
    pub fn has_others(&self) -> bool {
        self.users().len() > 1
    }

    /// Answers at the door, for ever. Calls `begin` with each table that it makes for another user.
    pub fn serve(&self, begin: impl Fn(&'static Table)) {
        self.door.serve(|uid| {
            let user = match self.users().into_iter().find(|user| user.uid == uid) {
                Some(known) => known,
                None => self.add(uid).inspect(|user| begin(user.table))?,
            };
            let borrowed =
                |file: &'static OwnedFd| -> BorrowedFd<'static> { std::os::fd::AsFd::as_fd(file) };
            Some([borrowed(user.file), borrowed(self.bounds_file)])
        });
    }

    /// A table for one more user, unless there are too many, or the machine has no room.
    fn add(&self, uid: u32) -> Option<User> {
        let n = self.users().len();
        if n == USERS {
            return None;
        }
        let user = User::new(uid, OTHERS_SEATS, self.bounds, n).ok()?;
        // Its processes aren't the program that the run was given.
        user.table.note_process();
        if self.tables().iter().any(|table| table.has_gate()) {
            user.table.note_gate();
        }
        self.users.lock().expect("nobody panics with the lock").push(user);
        self.deal(None);
        Some(user)
    }

    /// What the run may use from now on.
    pub fn set_bounds(&self, config: &Config) {
        let or_none = |bytes: Option<u64>| bytes.unwrap_or(u64::MAX);
        self.bounds.set_given(or_none(config.limit_bytes), or_none(config.resident_bytes));
        self.deal(None);
    }

    /// Shares the bounds between the users, by what their tables say, which is believed up to what
    /// they have as it was `measured` now, or last.
    pub fn deal(&self, measured: Option<Measured>) {
        let mut last = self.measured.lock().expect("nobody panics with the lock");
        *last = measured.unwrap_or_else(|| std::mem::take(&mut last));
        let asked = |user: &User| {
            let most = last.get(&user.uid).copied().unwrap_or(0);
            [true, false].map(|limit| {
                let Asked { mut claim, largest } = user.table.asked(limit);
                claim.least = claim.least.min(most);
                Asked { claim, largest: largest.min(most) }
            })
        };
        self.bounds.deal(&self.users().iter().map(asked).collect::<Vec<_>>());
    }

    /// Raises the peaks to what all processes hold now.
    pub fn note_totals(&self) {
        match &self.tables()[..] {
            [one] => one.note_totals(),
            all => {
                let mut sum = Sum::default();
                all.iter().for_each(|table| table.add_to(&mut sum));
                self.totals.note(sum, self.bounds.seatless().1);
            }
        }
    }

    /// The most that the run held at once, in the order of [`PEAKS`]. What several users held is
    /// looked at from time to time only.
    pub fn peaks(&self) -> [u64; PEAKS.len()] {
        let each = self.tables().into_iter().map(|table| table.totals().peaks());
        each.fold(self.totals.peaks(), |most, peaks| std::array::from_fn(|n| most[n].max(peaks[n])))
    }

    /// The least limit that could have been kept all the time, bytes; 0: the given one was.
    pub fn least_bytes(&self) -> u64 {
        self.tables().iter().map(|table| table.least_bytes()).max().unwrap_or(0)
    }

    /// Whether any process has begun.
    pub fn has_begun(&self) -> bool {
        self.users()[0].table.has_begun()
    }

    /// How often programs were executed that can't be managed, and what is known about the first.
    pub fn unmanaged(&self) -> (u64, Vec<u8>) {
        let all = self.tables().into_iter().map(Table::unmanaged);
        let add = |(count, first): (u64, Vec<u8>), (more, text): (u64, Vec<u8>)| {
            (count.saturating_add(more), if first.is_empty() { text } else { first })
        };
        all.fold((0, Vec::new()), add)
    }
}

/// The run of a process, by the order that it was given: small ones have no seat in the table.
pub fn run_of(pid: u32) -> Option<u32> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let order = order_in(&environment)?;
    let table = order.split(';').find_map(|line| line.strip_prefix("stats=/proc/"))?;
    table.split('/').next()?.parse().ok()
}

/// Processes that there may be at a time.
fn processes_max() -> usize {
    let text = fs::read_to_string("/proc/sys/kernel/pid_max").unwrap_or_default();
    text.trim().parse().unwrap_or(PROCESSES)
}

/// RLIMIT_FSIZE as it was, which is set again when this is gone. Meanwhile it is as large as this
/// process may have it: the table is a file in memory only.
struct Lifted(libc::rlimit);

impl Lifted {
    /// `None` if nothing was changed.
    fn begin() -> Option<Lifted> {
        let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the struct is local.
        if unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut before) } != 0 {
            return None;
        }
        let set = |most| {
            let wanted = libc::rlimit { rlim_cur: most, rlim_max: most };
            // SAFETY: likewise.
            unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const wanted) == 0 }
        };
        // The hard limit can be raised with CAP_SYS_RESOURCE only.
        (set(libc::RLIM_INFINITY) || set(before.rlim_max)).then_some(Lifted(before))
    }
}

impl Drop for Lifted {
    fn drop(&mut self) {
        // SAFETY: the struct is one that the kernel has filled.
        unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const self.0) };
    }
}

/// How long a file of this process may be (RLIMIT_FSIZE): a longer one would end it.
fn file_bytes_max() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the struct is local.
    match unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) } {
        0 => limit.rlim_cur,
        _ => u64::MAX,
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A seat for the calling thread.
    pub fn claim(slots: &Slots, pid: u32) -> Process {
        claim_of(slots.tables()[0], pid)
    }

    fn claim_of(table: &Table, pid: u32) -> Process {
        // SAFETY: threads of tests use no robust mutex.
        unsafe { table.claim(pid) }.expect("there are seats left")
    }

    #[test]
    fn what_a_process_is_told_leads_to_the_table() {
        let slots = Slots::new().unwrap();
        slots.set_bounds(&Config::new(1 << 30));
        let order = slots.order();
        let of = |name: &str| order.split(';').find_map(|line| line.strip_prefix(name)).unwrap();
        let key = of("door=").split_once(',').unwrap().1;
        let key = memfold_run::door::Key::parse(key).unwrap();
        let open = |path, flags| rustix::fs::open(path, flags, rustix::fs::Mode::empty()).unwrap();
        let bounds = Bounds::open(open(of("bounds="), rustix::fs::OFlags::RDONLY), &key).unwrap();
        let other = Table::open(open(of("stats="), rustix::fs::OFlags::RDWR), bounds).unwrap();
        assert_eq!(other.portion().bounds().given(), (u64::MAX, u64::MAX));
        claim(&slots, 77);
        assert_eq!(other.processes().map(|process| process.pid()).collect::<Vec<_>>(), [77]);
    }

    /// What another user's table says takes no more from this one's than memory that it has would.
    #[test]
    fn what_a_user_says_is_believed_up_to_what_the_kernel_says() {
        let slots = Slots::new().unwrap();
        let mut config = Config::new(1 << 30);
        config.set("limit", "100M").unwrap();
        slots.set_bounds(&config);
        let other = slots.add(65534).unwrap();
        assert!(!other.table.note_process(), "it is not the first of the run");
        let (own, theirs) = (claim(&slots, 1), claim_of(other.table, 2));
        own.set_need(90 << 20);
        own.set_least(60 << 20, 0);
        theirs.set_need(u64::MAX);
        theirs.set_least(u64::MAX, 5);
        // SAFETY: only asks.
        let uid = unsafe { libc::getuid() };
        let parts = |their: u64| {
            slots.deal(Some(HashMap::from([(uid, 70 << 20), (65534, their)])));
            let of = |table: &Table| table.bounds_left().0 >> 20;
            (of(slots.tables()[0]), of(other.table), slots.tables()[0].least(true).bytes >> 20)
        };
        assert_eq!(parts(0), (60, 40, 60));
        assert_eq!(parts(10 << 20), (60, 40, 70));
        assert!(slots.tables()[0].least(true).largest.is_some());
        assert_eq!(slots.peaks()[0], 0);
        assert_eq!(slots.seated(), HashMap::from([(1, uid), (2, 65534)]));
    }

    #[test]
    fn there_are_no_tables_without_end() {
        let slots = Slots::new().unwrap();
        assert!((1..USERS as u32).all(|n| slots.add(100_000 + n).is_some()));
        assert!(slots.add(1).is_none() && slots.tables().len() == USERS);
    }
}
