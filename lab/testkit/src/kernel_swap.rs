//! Kernel swap for tests: on its own zram device, or in a file where zram is unavailable.
//!
//! A shell sets it up, and removes it when its input ends: when the [`KernelSwap`] is dropped, and
//! also when the test is killed. Other processes of the machine may be swapped to it meanwhile,
//! without harm.
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};

/// Takes the size in MiB and, for a file, its path. Prints `on` when it swaps.
const SCRIPT: &str = r#"
    trap '' INT TERM HUP
    if number=$(cat /sys/class/zram-control/hot_add 2>/dev/null); then
        device=/dev/zram$number
        echo "$1M" >/sys/block/zram$number/disksize
    else
        device=$2
        (umask 077 && dd if=/dev/zero of="$device" bs=1M count="$1" status=none)
    fi
    mkswap "$device" >/dev/null && swapon "$device" && echo on
    exec >/dev/null
    cat
    until swapoff "$device" || ! grep -q "^$device " /proc/swaps; do sleep 1; done
    if test -n "$number"; then
        echo 1 >/sys/block/zram$number/reset
        echo "$number" >/sys/class/zram-control/hot_remove
    else
        rm -f "$device"
    fi"#;

/// The kernel swaps while this lives.
pub struct KernelSwap {
    keeper: Child,
}

impl KernelSwap {
    /// Gives the kernel `mib` MiB more swap. Returns `None` without root, and prints that nothing
    /// was tested.
    ///
    /// # Panics
    /// If that can't be done, by root or under `CI=true`.
    pub fn on(mib: u32) -> Option<KernelSwap> {
        let is_root = std::fs::metadata("/proc/self")
            .is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0);
        if !is_root {
            assert!(std::env::var("CI").as_deref() != Ok("true"), "CI runs as root");
            eprintln!("SKIPPED, NOTHING WAS TESTED: to have the kernel swap needs root");
            return None;
        }
        let file = std::env::temp_dir().join(format!("memfold-test-swap-{}", std::process::id()));
        let mut shell = Command::new("sh");
        shell.args(["-c", SCRIPT, "sh", &mib.to_string()]).arg(file);
        shell.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut keeper = shell.spawn().expect("sh");
        let mut line = String::new();
        BufReader::new(keeper.stdout.take().expect("piped"))
            .read_line(&mut line)
            .expect("what the shell says");
        if line != "on\n" {
            drop(keeper.stdin.take());
            let mut why = String::new();
            let _ = keeper.stderr.take().expect("piped").read_to_string(&mut why);
            let _ = keeper.wait();
            panic!("the kernel can't be made to swap: {why}");
        }
        Some(KernelSwap { keeper })
    }
}

impl Drop for KernelSwap {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}

/// Makes the kernel swap out or drop what it can of `[start, start + len)`, whole pages of this
/// process.
pub fn swap_out(start: usize, len: usize) {
    // SAFETY: MADV_PAGEOUT changes no byte, except in memory that was discarded before.
    let _ = unsafe { rustix::mm::madvise(start as *mut _, len, rustix::mm::Advice::LinuxPageOut) };
}

/// Makes the kernel swap out all private memory of this process that has no file.
pub fn swap_all_out() {
    let mut areas = Vec::new();
    let _ = memfold_os::maps::each_area(|area| {
        if area.is_private_anonymous() && area.readable {
            areas.push((area.start, area.len()));
        }
        std::ops::ControlFlow::Continue(())
    });
    areas.into_iter().for_each(|(start, len)| swap_out(start, len));
}

/// Returns the swapped-out bytes of this process's areas that touch `[start, end)`.
pub fn swapped_bytes(start: usize, end: usize) -> usize {
    let mut bytes = 0;
    let _ = memfold_os::maps::each_detailed(|area, about| {
        if area.start < end && start < area.end {
            bytes += about.swapped_bytes;
        }
        std::ops::ControlFlow::Continue(())
    });
    bytes
}
