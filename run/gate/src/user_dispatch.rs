//! Arms threads by Syscall User Dispatch (Linux 5.11;
//! `Documentation/admin-guide/syscall-user-dispatch.rst`).
//!
//! Each system call of an armed thread becomes SIGSYS, except calls from the code of this library.
//! The kernel compares the address after the instruction with an allowed range. The range is the
//! executable segment of the object that holds this code.
//!
//! A program may use the mechanism too, as Wine does. The kernel has one range and one selector for
//! each thread, and the gate uses both. So the gate keeps the program's own ([`ProgramDispatch`])
//! and does what `kernel/entry/syscall_user_dispatch.c` would do: the call is made, becomes SIGSYS,
//! or ends the process. New threads, children and other programs begin without a dispatch of their
//! own.
use crate::image;
use crate::keeper::BadAddress;
use crate::touch::read;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering::SeqCst};
use elf::abi::{PF_X, PT_LOAD};
use elf::segment::ProgramHeader;
use memfold_os::Errno;
use memfold_os::raw::system_call;

pub(crate) const PR_SET_SYSCALL_USER_DISPATCH: i32 = 59;
const OFF: usize = 0;
/// The mode in which all calls but those from a range are dispatched
/// (PR_SYS_DISPATCH_EXCLUSIVE_ON).
const ON: usize = 1;
const ALLOW: u8 = 0;
const BLOCK: u8 = 1;
/// The `si_code` of a SIGSYS that the dispatch raises.
pub const SYS_USER_DISPATCH: i32 = 2;

/// The gate's selector. It changes once, when the gate retires.
static SELECTOR: AtomicU8 = AtomicU8::new(BLOCK);
/// The selector with which the kernel checks the program's arguments. It lets all calls pass.
static ALLOWING: AtomicU8 = AtomicU8::new(ALLOW);
static START: AtomicUsize = AtomicUsize::new(0);
static END: AtomicUsize = AtomicUsize::new(0);

/// Finds the allowed range and stores it. Returns `false` if there is none.
pub fn find_range() -> bool {
    let address = find_range as *const () as usize;
    let Some(segments) = image::segments() else { return false };
    let load_segments = || segments.iter().filter(|each| each.p_type == PT_LOAD);
    let first = load_segments().next().map_or(0, |each| each.p_vaddr as usize);
    let bias = image::start().wrapping_sub(first);
    let range = |each: &ProgramHeader| {
        let start = bias.wrapping_add(each.p_vaddr as usize);
        start..start.wrapping_add(each.p_memsz as usize)
    };
    let ours = load_segments()
        .filter(|each| each.p_flags & PF_X != 0)
        .find(|each| range(each).contains(&address));
    if let Some(ours) = ours.as_ref().map(range) {
        START.store(ours.start, SeqCst);
        END.store(ours.end, SeqCst);
    }
    ours.is_some()
}

/// Arms the calling thread.
///
/// # Errors
/// The kernel has no Syscall User Dispatch, or the process may not use it.
pub fn arm() -> Result<(), Errno> {
    // SAFETY: the selector is a static byte, so it stays valid.
    unsafe { set(ON, own_range(), SELECTOR.as_ptr() as usize) }
}

/// Whether the gate of this process has retired, or is about to (`threads/retire.rs`).
static RETIRED: AtomicBool = AtomicBool::new(false);

/// Returns whether calls of this process don't pass the gate any more, for good.
pub fn is_retired() -> bool {
    RETIRED.load(SeqCst)
}

/// Notes that the gate retires. Returns whether this is the first time.
pub fn note_retired() -> bool {
    !RETIRED.swap(true, SeqCst)
}

/// Makes the calls of all armed threads pass, for good.
pub fn let_all_pass() {
    SELECTOR.store(ALLOW, SeqCst);
}

/// Disarms the calling thread.
pub fn disarm() {
    // SAFETY: the selector is 0, and dispatch is off.
    let _ = unsafe { set(OFF, [0; 2], 0) };
}

/// Returns the first address and the length of the allowed range.
fn own_range() -> [usize; 2] {
    let start = START.load(SeqCst);
    [start, END.load(SeqCst) - start]
}

/// Sets the calling thread's dispatch in the kernel.
///
/// # Safety
/// - `selector` is 0, or stays valid while dispatch is on, or is never read.
unsafe fn set(mode: usize, [start, len]: [usize; 2], selector: usize) -> Result<(), Errno> {
    let args = [PR_SET_SYSCALL_USER_DISPATCH as usize, mode, start, len, selector, 0];
    // SAFETY: the call's only pointer is `selector`, about which the caller promises that it is 0,
    // stays valid or is never read.
    unsafe { system_call(libc::SYS_prctl, args) }.map(drop)
}

/// The dispatch that the program has set for a thread.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct ProgramDispatch {
    /// The first address of the program's allowed range, which may wrap around.
    start: usize,
    /// The length of that range in bytes.
    len: usize,
    /// The address of the selector, a byte. 0 means that all calls from outside the range are
    /// dispatched.
    selector: usize,
}

/// The effect of the program's own dispatch on a call.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum DispatchVerdict {
    /// The call is made.
    Passes,
    /// The call becomes a SIGSYS for the program.
    Dispatched,
    /// The process ends by this signal, even if the program handles it.
    Ends(i32),
}

impl ProgramDispatch {
    /// Returns the dispatch for which `prctl` asks with these arguments, or `None` if it turns
    /// dispatch off.
    ///
    /// The kernel checks the arguments, because newer kernels know more modes. The gate passes them
    /// to the kernel in two steps: mode and range first, then the selector. In both steps the
    /// gate's own calls pass.
    ///
    /// # Errors
    /// The kernel refuses the arguments. The previous dispatch stays then.
    ///
    /// # Panics
    /// If the kernel refuses to arm the thread again.
    pub fn of(args: &[usize; 6]) -> Result<Option<ProgramDispatch>, Errno> {
        let [_, mode, start, len, selector, _] = *args;
        let selector_shown = if mode == OFF { selector } else { ALLOWING.as_ptr() as usize };
        // SAFETY: in the first step the selector is a static byte, or is never read because
        // dispatch is off. In the second step it is never read, because calls from the gate's own
        // range don't need it, and `arm` replaces it below.
        let outcome = unsafe {
            set(mode, [start, len], selector_shown)?;
            if mode == OFF { Ok(()) } else { set(ON, own_range(), selector) }
        };
        let rearmed = arm();
        assert!(rearmed.is_ok(), "what was armed can be armed again");
        outcome?;
        Ok(match mode {
            OFF => None,
            ON => Some(ProgramDispatch { start, len, selector }),
            // This mode names the range whose calls are dispatched. The allowed range is the rest.
            _ => {
                let (start, len) = (start.wrapping_add(len), len.wrapping_neg());
                Some(ProgramDispatch { start, len, selector })
            }
        })
    }

    /// Returns what happens to a call whose instruction ends at `after`.
    pub fn verdict(&self, after: usize) -> DispatchVerdict {
        if after.wrapping_sub(self.start) < self.len {
            return DispatchVerdict::Passes;
        }
        if self.selector == 0 {
            return DispatchVerdict::Dispatched;
        }
        match read::<u8>(self.selector) {
            Ok(ALLOW) => DispatchVerdict::Passes,
            Ok(BLOCK) => DispatchVerdict::Dispatched,
            Ok(_) => DispatchVerdict::Ends(libc::SIGSYS),
            Err(BadAddress) => DispatchVerdict::Ends(libc::SIGSEGV),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdict_follows_range_and_selector() {
        let byte = AtomicU8::new(BLOCK);
        let at = byte.as_ptr() as usize;
        let own = ProgramDispatch { start: 100, len: 10, selector: at };
        let of = |value: u8, after: usize| {
            byte.store(value, SeqCst);
            own.verdict(after)
        };
        assert_eq!(
            (of(BLOCK, 99), of(BLOCK, 110)),
            (DispatchVerdict::Dispatched, DispatchVerdict::Dispatched)
        );
        assert_eq!(
            (of(BLOCK, 100), of(7, 109)),
            (DispatchVerdict::Passes, DispatchVerdict::Passes)
        );
        assert_eq!(
            (of(ALLOW, 99), of(7, 99)),
            (DispatchVerdict::Passes, DispatchVerdict::Ends(libc::SIGSYS))
        );
        let none = ProgramDispatch { selector: 0, ..own };
        assert_eq!(
            (none.verdict(99), none.verdict(100)),
            (DispatchVerdict::Dispatched, DispatchVerdict::Passes)
        );
        // The inverse of the range 100..110.
        let inverse = ProgramDispatch { start: 110, len: 10usize.wrapping_neg(), selector: 0 };
        let all =
            [99, 100, 109, 110].map(|after| inverse.verdict(after) == DispatchVerdict::Passes);
        assert_eq!(all, [true, false, false, true]);
    }
}
