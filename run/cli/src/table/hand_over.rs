//! How processes get the tables of the run ([`memfold_run::users`]) and its bounds: by a path in
//! /proc, or at a door. A process needs the door if the path leads nowhere, because it is in a PID
//! namespace or belongs to another user.
use crate::failure::CommandFailure;
use crate::program::plain;
use crate::table::door::Door;
use memfold_run::request::{self, TableAddress};
use memfold_run::table::RunTable;
use memfold_run::table::bounds::RunBounds;
use memfold_run::users::{UserTable, UserTables};
use rustix::fd::{AsRawFd, OwnedFd};
use std::fs;
use std::io;
use std::os::fd::BorrowedFd;

/// Number of slots if the system does not tell how many processes it may have.
const PROCESSES: usize = 1 << 22;
/// Slots in the table of a user other than that of `memfold run`. Such a user may cause all of them
/// to take memory.
const OTHERS_SLOTS: usize = 1 << 12;

/// The tables of a run, and the ways for its processes to get them.
pub struct HandOver {
    pub tables: UserTables,
    bounds_file: OwnedFd,
    door: Door,
}

fn fail(e: io::Error) -> CommandFailure {
    CommandFailure::own(format!("the table of the run: {}", plain(&e)))
}

fn system(e: memfold_os::Errno) -> CommandFailure {
    match e {
        memfold_os::Errno::FBIG => CommandFailure::own(
            "the table of the run: `ulimit -f` allows no file for it; raise the hard limit (ulimit -H -f)",
        ),
        e => fail(io::Error::from_raw_os_error(e.raw_os_error())),
    }
}

impl HandOver {
    /// Makes an empty table for the user of this process, with bounds and a door.
    ///
    /// # Errors
    /// 125: no memfd, no memory, or no socket is available.
    pub fn new() -> Result<HandOver, CommandFailure> {
        let door = Door::open().map_err(fail)?;
        // SAFETY: getuid has no conditions.
        let uid = unsafe { libc::getuid() };
        let (tables, bounds_file) = with_long_files(|bytes_max| {
            let (bounds, file) = RunBounds::create(bytes_max, door.key())?;
            let tables = UserTables::create(uid, processes_max(), bytes_max, bounds)?;
            Ok((tables, file))
        })
        .map_err(system)?;
        Ok(HandOver { tables, bounds_file, door })
    }

    /// Returns the request to the run's processes: the settings, and where the bounds and the table
    /// of this process's user are.
    pub fn request(&self, settings: &str) -> String {
        let path = |file: &OwnedFd| request::path_of(std::process::id(), file.as_raw_fd());
        let (table, bounds) = (path(self.tables.users()[0].file), path(&self.bounds_file));
        let (door, key) = (self.door.name(), *self.door.key());
        let address = TableAddress { paths: [&table, &bounds], door, key };
        request::RunRequest::write(settings, &address)
    }

    /// Answers at the door. Never returns. Calls `begin` with each table that it makes for another
    /// user.
    pub fn serve(&self, begin: impl Fn(&'static RunTable)) {
        self.door.serve(|uid| {
            let user = match self.tables.of(uid) {
                Some(known) => known,
                None => self.add(uid).inspect(|user| begin(user.table))?,
            };
            Some([borrowed(user.file), borrowed(&self.bounds_file)])
        });
    }

    /// Adds a table for one more user. Returns `None` if there are too many users, or no memory.
    fn add(&self, uid: u32) -> Option<UserTable> {
        with_long_files(|bytes_max| self.tables.add(uid, OTHERS_SLOTS, bytes_max)).ok()
    }
}

/// Borrows the descriptor as a type of std.
fn borrowed(file: &OwnedFd) -> BorrowedFd<'_> {
    // SAFETY: the descriptor stays open as long as its owner is borrowed, which the returned
    // lifetime guarantees.
    unsafe { BorrowedFd::borrow_raw(file.as_raw_fd()) }
}

/// Runs `make` while this process may make files as long as its hard limit permits. `make` is given
/// that length, bytes.
fn with_long_files<T>(make: impl FnOnce(u64) -> T) -> T {
    let _lifted = Lifted::begin();
    make(file_bytes_max())
}

/// Returns how many processes there may be at one time.
fn processes_max() -> usize {
    let text = fs::read_to_string("/proc/sys/kernel/pid_max").unwrap_or_default();
    text.trim().parse().unwrap_or(PROCESSES)
}

/// The former RLIMIT_FSIZE, which the drop restores. Meanwhile the limit is as large as this
/// process may set it. That is harmless, because the table is a file in memory.
struct Lifted(libc::rlimit);

impl Lifted {
    /// Raises the limit. Returns `None` if nothing was changed.
    fn begin() -> Option<Lifted> {
        let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the kernel writes one `rlimit` to `before`, which is local.
        if unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut before) } != 0 {
            return None;
        }
        let set = |most| {
            let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
            // SAFETY: `limit` is local, and the call only reads it.
            unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) == 0 }
        };
        // Only a process with CAP_SYS_RESOURCE can raise the hard limit.
        (set(libc::RLIM_INFINITY) || set(before.rlim_max)).then_some(Lifted(before))
    }
}

impl Drop for Lifted {
    fn drop(&mut self) {
        // SAFETY: the struct was filled by getrlimit, and the call only reads it.
        unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const self.0) };
    }
}

/// Returns the maximum length of a file of this process (RLIMIT_FSIZE), bytes. Writing a longer one
/// would end the process.
pub fn file_bytes_max() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one `rlimit` to `limit`, which is local.
    match unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) } {
        0 => limit.rlim_cur,
        _ => u64::MAX,
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use memfold_run::table::ProcessSlot;

    /// Makes the tables of a run.
    pub fn tables() -> UserTables {
        HandOver::new().unwrap().tables
    }

    /// Claims a slot for the calling thread.
    pub fn claim(tables: &UserTables, pid: u32) -> ProcessSlot {
        // SAFETY: threads of tests use no robust mutex, so their robust lists are not needed.
        unsafe { tables.tables()[0].claim(pid) }.expect("there are slots left")
    }

    #[test]
    fn request_leads_to_the_table() {
        let hand_over = HandOver::new().unwrap();
        hand_over.tables.set_bounds(Some(1 << 30), None);
        let text = hand_over.request("resident=5\n");
        let address = request::RunRequest::new(&text).address().unwrap();
        let open = |path, flags| rustix::fs::open(path, flags, rustix::fs::Mode::empty()).unwrap();
        let bounds = open(address.paths[1], rustix::fs::OFlags::RDONLY);
        let bounds = RunBounds::open(bounds, &address.key).unwrap();
        let table = open(address.paths[0], rustix::fs::OFlags::RDWR);
        let other = RunTable::open(table, bounds).unwrap();
        assert_eq!(other.portion().bounds().given(), (1 << 30, u64::MAX));
        claim(&hand_over.tables, 77);
        assert_eq!(other.processes().map(|process| process.pid()).collect::<Vec<_>>(), [77]);
    }

    #[test]
    fn user_that_comes_to_the_door_has_a_table_of_its_own() {
        let hand_over = HandOver::new().unwrap();
        assert_eq!(hand_over.add(65534).map(|user| user.uid), Some(65534));
        assert!(hand_over.tables.has_others());
    }
}
