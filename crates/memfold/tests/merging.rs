//! A process whose equal pages the kernel merges: a test binary of its own, as that is for all of the
//! process.
use memfold::{Delivery, Memory};
use std::ops::Range;

/// The flags (`VmFlags` of proc_pid_smaps(5)) of each mapping in a range.
fn flags_in(range: Range<usize>) -> Vec<String> {
    let mut inside = false;
    let mut found = Vec::new();
    for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        let bounds = line.split(' ').next().and_then(|word| word.split_once('-'));
        let number = |text: &str| usize::from_str_radix(text, 16);
        if let Some((Ok(start), Ok(end))) = bounds.map(|(a, b)| (number(a), number(b))) {
            inside = start < range.end && end > range.start;
        } else if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| inside) {
            found.push(flags.to_string());
        }
    }
    found
}

/// The kernel ends the write protection of what it merges, which tells what is clean.
#[test]
fn the_kernel_merges_no_pages_of_a_region_in_a_process_whose_pages_it_merges() {
    // SAFETY: changes no byte.
    if unsafe { libc::prctl(libc::PR_SET_MEMORY_MERGE, 1, 0, 0, 0) } != 0 {
        eprintln!("SKIPPED: this kernel merges no pages, or not for a whole process (Linux 6.4)");
        return;
    }
    let is_merged = |flags: &String| flags.split(' ').any(|flag| flag == "mg");
    for delivery in [Delivery::Signal, Delivery::Thread] {
        let memory = Memory::builder().resident_bytes(16 << 20).delivery(delivery).build().unwrap();
        let region = memory.region(32 << 20).unwrap();
        let other = vec![1u8; 32 << 20];
        let [own, others] = [region.as_ptr() as usize, other.as_ptr() as usize]
            .map(|start| flags_in(start..start + (32 << 20)));
        assert!(others.iter().any(is_merged), "not for the process: {others:?}");
        assert!(!own.is_empty() && !own.iter().any(is_merged), "{own:?}");
    }
}
