//! A process whose equal pages the kernel merges: a test binary of its own, as that is for all of the
//! process.
use memfold_engine::{Delivery, Memory};
use memfold_os::maps::{each_detailed, flag};
use std::ops::{ControlFlow, Range};

/// Of each mapping in a range, whether the kernel may merge its pages.
fn merged_in(range: Range<usize>) -> Vec<bool> {
    let mut areas = Vec::new();
    let outcome = each_detailed(|area, about| {
        if area.start < range.end && area.end > range.start {
            areas.push(about.has(flag::MERGEABLE));
        }
        ControlFlow::Continue(())
    });
    outcome.expect("/proc/self/smaps");
    areas
}

/// The kernel ends the write protection of what it merges, which tells what is clean.
#[test]
fn kernel_merges_no_pages_of_a_region_in_a_merged_process() {
    // SAFETY: changes no byte.
    if unsafe { libc::prctl(libc::PR_SET_MEMORY_MERGE, 1, 0, 0, 0) } != 0 {
        eprintln!("SKIPPED: this kernel merges no pages, or not for a whole process (Linux 6.4)");
        return;
    }
    for delivery in [Delivery::Signal, Delivery::Thread] {
        let memory = Memory::builder().resident_bytes(16 << 20).delivery(delivery).build().unwrap();
        let region = memory.region(32 << 20).unwrap();
        let other = vec![1u8; 32 << 20];
        let [own, others] = [region.as_ptr() as usize, other.as_ptr() as usize]
            .map(|start| merged_in(start..start + (32 << 20)));
        assert!(others.contains(&true), "not for the process: {others:?}");
        assert!(!own.is_empty() && !own.contains(&true), "{own:?}");
    }
}
