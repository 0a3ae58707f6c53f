//! Which process an engine is in, such that another one that gets its number later isn't taken for
//! it.
use memfold_sys::thread::stat_field;
use std::fs;

/// A process, as it is seen from here: in another PID namespace it may have another number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its number.
    pub pid: i32,
    /// When it began, clock ticks after boot: two processes that have the same number one after the
    /// other differ in it.
    pub begun: u64,
}

impl Process {
    /// The process that has a number now; `None` if there is none that can be seen from here. Who
    /// has asked for a peer's number gets 0 for one in a namespace that can't be seen.
    pub fn of(pid: i32) -> Option<Process> {
        let (_, begun) = state(pid)?;
        Some(Process { pid, begun })
    }

    /// Whether it runs no more. `false` if nobody can tell.
    pub fn has_ended(&self) -> bool {
        match state(self.pid) {
            // Nobody has waited for it yet, which may last as long as its parent lives.
            Some((state, begun)) => begun != self.begun || matches!(state, 'Z' | 'X'),
            // Without /proc nobody can tell; this process is always there.
            None => state(std::process::id() as i32).is_some(),
        }
    }
}

/// Fields 3 and 22 of proc_pid_stat(5): the state, and when it began.
fn state(pid: i32) -> Option<(char, u64)> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    let state = stat_field(&stat, 3)?.chars().next()?;
    Some((state, stat_field(&stat, 22)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn dead_or_renumbered_process_counts_as_ended() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let process = Process::of(child.id() as i32).unwrap();
        assert!(!process.has_ended());
        let successor = Process { begun: process.begun + 1, ..process.clone() };
        assert!(successor.has_ended(), "the number is another's");
        // It ends, and is not waited for.
        drop(child.stdin.take());
        while !process.has_ended() {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(process.has_ended());
        assert_eq!(Process::of(0), None);
    }
}
