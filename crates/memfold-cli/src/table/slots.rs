//! The table that the processes of a run share with memfold ([`memfold::table`]), and how they get
//! at it: by a path in /proc, or, where that leads nowhere (in a PID namespace, as another user),
//! at a door.
use crate::failure::Failure;
use crate::program::plain;
use crate::table::door::Door;
use memfold::config::Config;
use memfold::table::{Table, order_in};
use rustix::fd::IntoRawFd;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Processes that a system has if it doesn't say how many it may have.
const PROCESSES: usize = 1 << 22;

/// A table, mapped here and open for the processes of the run. What is in it outlives them: a crash
/// loses no figure.
pub struct Slots {
    file: OwnedFd,
    table: Table,
    door: Door,
}

impl Slots {
    /// An empty table.
    ///
    /// # Errors
    /// 125: no memfd, no memory, or no socket.
    pub fn new() -> Result<Slots, Failure> {
        let fail = |e: io::Error| Failure::own(format!("the table of the run: {}", plain(&e)));
        let door = Door::open().map_err(fail)?;
        let lifted = Lifted::begin();
        let made = Table::create(processes_max(), file_bytes_max(), door.key());
        drop(lifted);
        let (table, file) = made.map_err(|e| match e {
            memfold_sys::Errno::FBIG => Failure::own(
                "the table of the run: `ulimit -f` allows no file for it; raise the hard limit (ulimit -H -f)",
            ),
            e => fail(io::Error::from_raw_os_error(e.raw_os_error())),
        })?;
        // SAFETY: the descriptor is this function's alone, and given up by the one that made it.
        let file = unsafe { OwnedFd::from_raw_fd(file.into_raw_fd()) };
        Ok(Slots { file, table, door })
    }

    /// What a process of the run is told, so that it finds the table.
    pub fn order(&self) -> String {
        format!(
            "stats=/proc/{}/fd/{};door={}",
            std::process::id(),
            self.file.as_raw_fd(),
            self.door.order()
        )
    }

    /// The table.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Gives it to processes that ask at the door, for ever.
    pub fn serve(&self) {
        self.door.serve(&self.file);
    }

    /// What the run may use from now on.
    pub fn set_bounds(&self, config: &Config) {
        let or_none = |bytes: Option<u64>| bytes.unwrap_or(u64::MAX);
        self.table.set_bounds(or_none(config.limit_bytes), or_none(config.resident_bytes));
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
    use memfold::table::Process;

    /// A seat for the calling thread.
    pub fn claim(slots: &Slots, pid: u32) -> Process {
        // SAFETY: threads of tests use no robust mutex.
        unsafe { slots.table().claim(pid) }.expect("there are seats left")
    }

    #[test]
    fn what_a_process_is_told_leads_to_the_table() {
        let slots = Slots::new().unwrap();
        slots.set_bounds(&Config::new(1 << 30));
        let order = slots.order();
        let (path, door) =
            order.strip_prefix("stats=").and_then(|rest| rest.split_once(";door=")).unwrap();
        let (_, key) = door.split_once(',').unwrap();
        let key = memfold_sys::run::door::Key::parse(key).unwrap();
        let file =
            rustix::fs::open(path, rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty()).unwrap();
        let other = Table::open(file, &key).unwrap();
        assert_eq!(other.bounds(), (u64::MAX, u64::MAX));
        claim(&slots, 77);
        assert_eq!(other.processes().map(|process| process.pid()).collect::<Vec<_>>(), [77]);
    }
}
