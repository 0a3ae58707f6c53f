//! The identity of an engine's process, which a later process with the same number does not share.
use memfold_os::thread::stat_field;
use std::fs;

/// A process as seen from here: in another PID namespace it may have another number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineProcess {
    /// Its number.
    pub pid: i32,
    /// Its start, in clock ticks after boot. Two processes that have one number in turn differ in
    /// it.
    pub begun: u64,
}

impl EngineProcess {
    /// Returns the process that has a number now; `None` if none is visible from here. A peer in an
    /// invisible namespace has number 0.
    pub fn of(pid: i32) -> Option<EngineProcess> {
        let (_, start_time) = state(pid)?;
        Some(EngineProcess { pid, begun: start_time })
    }

    /// Returns whether it has ended; `false` if that is unknown.
    pub fn has_ended(&self) -> bool {
        match state(self.pid) {
            // A zombie counts as ended, because it may last as long as its parent.
            Some((state, begun)) => begun != self.begun || matches!(state, 'Z' | 'X'),
            // Without /proc it is unknown. This process always exists.
            None => state(std::process::id() as i32).is_some(),
        }
    }
}

/// Returns fields 3 and 22 of proc_pid_stat(5): the state, and the start.
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
        let process = EngineProcess::of(child.id() as i32).unwrap();
        assert!(!process.has_ended());
        let successor = EngineProcess { begun: process.begun + 1, ..process.clone() };
        assert!(successor.has_ended(), "the number is another's");
        // It ends and becomes a zombie.
        drop(child.stdin.take());
        while !process.has_ended() {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(process.has_ended());
        assert_eq!(EngineProcess::of(0), None);
    }
}
