//! The kernel swaps out a managed program and memfold's own memory in it, while the program changes
//! its address space. Needs root. Rows B1, Z1.
use crate::common::assert_right;
use memfold_testkit::kernel_swap::KernelSwap;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// The most bytes that one call takes.
const MOST: usize = 1 << 30;

/// Returns the PIDs that run the program `name`.
fn processes(name: &str) -> Vec<i32> {
    let pids = std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let runs = |pid: &i32| {
        std::fs::read_link(format!("/proc/{pid}/exe"))
            .is_ok_and(|exe: PathBuf| exe.file_name().is_some_and(|n| n == name))
    };
    pids.filter(runs).collect()
}

/// Resident anonymous memory from which on a process is swapped out. It is more than 75% of 8 MiB,
/// where memfold adopts a process's memory. A process below that is never folded.
const GROWN_BYTES: u64 = 13 << 19;

/// Returns a line of a process's status, in bytes.
fn status(pid: i32, name: &str) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().trim_end_matches(" kB").parse::<u64>().ok()? << 10)
}

/// Makes the kernel swap out all anonymous memory of a process that has grown. Returns the
/// process's bytes in swap afterwards.
fn swap_out(pid: i32) -> Option<u64> {
    if status(pid, "RssAnon:")? < GROWN_BYTES {
        return None;
    }
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    // SAFETY: the call touches no memory.
    let process = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if process < 0 {
        return None;
    }
    for line in maps.lines().filter(|line| line.contains(" rw-p ")) {
        let (start, end) = line.split(' ').next()?.split_once('-')?;
        let address = |text| usize::from_str_radix(text, 16).ok();
        let (start, end) = (address(start)?, address(end)?);
        for at in (start..end).step_by(MOST) {
            let range = libc::iovec { iov_base: at as *mut _, iov_len: MOST.min(end - at) };
            // SAFETY: `range` is valid for the call, and MADV_PAGEOUT changes no byte.
            unsafe {
                libc::syscall(
                    libc::SYS_process_madvise,
                    process,
                    &raw const range,
                    1,
                    libc::MADV_PAGEOUT,
                    0,
                )
            };
        }
    }
    // SAFETY: the descriptor was opened above, and nothing else owns it.
    unsafe { libc::close(process as i32) };
    status(pid, "VmSwap:")
}

/// Runs [`assert_right`] while the kernel repeatedly swaps out all that it can.
#[track_caller]
fn assert_right_swapped(name: &str, least_units: u64, promises: &[&str]) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let Some(_swap) = KernelSwap::on(256) else { return };
    let (is_done, most) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Relaxed) {
                for pid in processes(name) {
                    most.fetch_max(swap_out(pid).unwrap_or(0), Relaxed);
                }
            }
        });
        // Ends the thread also if an assertion fails.
        struct End<'a>(&'a AtomicBool);
        impl Drop for End<'_> {
            fn drop(&mut self) {
                self.0.store(true, Relaxed);
            }
        }
        let _end = End(&is_done);
        assert_right(name, least_units, promises);
    });
    assert!(
        most.load(Relaxed) > 1 << 20,
        "{} bytes at most were in the kernel's swap",
        most.load(Relaxed)
    );
}

#[test]
fn concurrent_discards_of_kernel_swapped_pages_keep_bytes() {
    assert_right_swapped("threads", 16, &["slots", "shared"]);
}

#[test]
fn a_heap_that_the_kernel_swaps_out_stays_right() {
    assert_right_swapped("heap", 32, &["brk", "realloc"]);
}

#[test]
fn children_of_what_the_kernel_swaps_out_stay_right() {
    assert_right_swapped("children", 48, &["copies", "grown"]);
}

#[test]
fn a_child_reuses_frames_of_protected_pages_that_the_kernel_has_swapped_out() {
    assert_right_swapped("children", 16, &["swapped"]);
}
