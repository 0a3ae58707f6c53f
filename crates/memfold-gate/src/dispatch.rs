//! Syscall User Dispatch (Linux 5.11; `Documentation/admin-guide/syscall-user-dispatch.rst`): each
//! system call of an armed thread becomes SIGSYS, but those from the code of this library.
//!
//! The kernel compares the address after the instruction with the range that is let through, which
//! is the executable segment of the object that holds this code.
use crate::image;
use core::sync::atomic::{AtomicU8, AtomicUsize, Ordering::SeqCst};
use elf::abi::{PF_X, PT_LOAD};
use elf::segment::ProgramHeader;
use memfold_sys::Errno;
use memfold_sys::raw::system_call;

pub(crate) const PR_SET_SYSCALL_USER_DISPATCH: usize = 59;
const OFF: usize = 0;
const ON: usize = 1;
/// `si_code` of such a SIGSYS.
pub const SYS_USER_DISPATCH: i32 = 2;

/// SYSCALL_DISPATCH_FILTER_BLOCK, for good.
static SELECTOR: AtomicU8 = AtomicU8::new(1);
static START: AtomicUsize = AtomicUsize::new(0);
static END: AtomicUsize = AtomicUsize::new(0);

/// Finds the range; `false`: there is none.
pub fn find_range() -> bool {
    let here = find_range as *const () as usize;
    let Some(segments) = image::segments() else { return false };
    let loaded = || segments.iter().filter(|each| each.p_type == PT_LOAD);
    let first = loaded().next().map_or(0, |each| each.p_vaddr as usize);
    let bias = image::start().wrapping_sub(first);
    let range = |each: &ProgramHeader| {
        let start = bias.wrapping_add(each.p_vaddr as usize);
        start..start.wrapping_add(each.p_memsz as usize)
    };
    let ours =
        loaded().filter(|each| each.p_flags & PF_X != 0).find(|each| range(each).contains(&here));
    if let Some(ours) = ours.as_ref().map(range) {
        START.store(ours.start, SeqCst);
        END.store(ours.end, SeqCst);
    }
    ours.is_some()
}

/// Arms the calling thread.
///
/// # Errors
/// The kernel has no such thing, or the process may not use it.
pub fn arm() -> Result<(), Errno> {
    let (start, end) = (START.load(SeqCst), END.load(SeqCst));
    let selector = SELECTOR.as_ptr() as usize;
    let args = [PR_SET_SYSCALL_USER_DISPATCH, ON, start, end - start, selector, 0];
    // SAFETY: the selector is static.
    unsafe { system_call(libc::SYS_prctl, args) }.map(drop)
}

/// Lets the calling thread's system calls pass.
pub fn disarm() {
    // SAFETY: nothing is named.
    let _ =
        unsafe { system_call(libc::SYS_prctl, [PR_SET_SYSCALL_USER_DISPATCH, OFF, 0, 0, 0, 0]) };
}
