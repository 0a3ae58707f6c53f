//! A child of fork does not have the folded arrays of its parent (except copies that were asked
//! for). A touch of one ends the child. The handler here prints the reason before the signal takes
//! its former effect.
use crate::engine::heaps;
use libc::{c_int, c_void, sigaction, siginfo_t};
use pyo3::prelude::*;
use std::mem::{MaybeUninit, zeroed};
use std::ops::Range;
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

const SENTENCE: &[u8] = b"memfold: this process was forked, and touched a folded array of its parent, which it doesn't have: \
start workers by multiprocessing.get_context(\"spawn\") or pass arrays as arguments, or make the Memory with fork=\"copy\"\n";

/// Addresses of the parent's arrays, and the former action of SIGSEGV.
struct Guard {
    ranges: Vec<Range<usize>>,
    previous: sigaction,
}

static GUARD: OnceLock<Guard> = OnceLock::new();

extern "C" fn on_segv(_: c_int, info: *mut siginfo_t, _: *mut c_void) {
    let Some(guard) = GUARD.get() else { return };
    // SAFETY: the kernel gives the handler the complete siginfo of a fault. `write` and `sigaction`
    // may be called in a handler, with bytes that live forever and an action that was in force.
    unsafe {
        let address = (*info).si_addr() as usize;
        if guard.ranges.iter().any(|range| range.contains(&address)) {
            libc::write(2, SENTENCE.as_ptr().cast(), SENTENCE.len());
        }
        // The thread faults once more, because nothing was loaded.
        libc::sigaction(libc::SIGSEGV, &guard.previous, null_mut());
    }
}

/// Reserves free addresses of the parent's arrays in the child: memory mapped there would look like
/// the parent's.
fn keep_free(addrs: Range<usize>) {
    let flags =
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: the mapping replaces none and is inaccessible.
    unsafe {
        libc::mmap(
            addrs.start as *mut c_void,
            addrs.end - addrs.start,
            libc::PROT_NONE,
            flags,
            -1,
            0,
        )
    };
}

/// Prepares a child of fork before it continues: reserves its parent's addresses, and sets the
/// message for a touch of them.
#[pyfunction]
pub fn after_fork_in_child() {
    let heaps_of_parent: Vec<_> =
        heaps().into_iter().filter(|core| !core.heap.is_at_home()).collect();
    for core in &heaps_of_parent {
        let mut ranges = core.lent.lock().unwrap_or_else(|e| e.into_inner());
        ranges.sort_unstable_by_key(|addrs| addrs.start);
        for region in core.heap.regions() {
            let mut at = region.start;
            for piece in ranges.iter().filter(|piece| region.contains(&piece.start)) {
                keep_free(at..piece.start);
                at = piece.end;
            }
            keep_free(at..region.end);
        }
    }
    let ranges: Vec<_> = heaps_of_parent.iter().flat_map(|core| core.heap.regions()).collect();
    if ranges.is_empty() || GUARD.get().is_some() {
        return;
    }
    // SAFETY: zeros are a valid action; both calls get complete ones, and the handler does only
    // what a handler may do.
    unsafe {
        let mut previous = MaybeUninit::uninit();
        if libc::sigaction(libc::SIGSEGV, null(), previous.as_mut_ptr()) != 0 {
            return;
        }
        let _ = GUARD.set(Guard { ranges, previous: previous.assume_init() });
        let mut action: sigaction = zeroed();
        action.sa_sigaction = on_segv as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigaction(libc::SIGSEGV, &action, null_mut());
    }
}
