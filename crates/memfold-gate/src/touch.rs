//! Reads, writes and touches the program's memory. Where nothing is mapped, or the access isn't allowed,
//! the function fails, as the kernel's own copies do.
//!
//! A folded page is loaded by the handler of SIGBUS or SIGSEGV, and the access goes on. For all other
//! faults the handler asks [`fix_up`] where to go on.
use crate::keeper::BadAddress;
use core::arch::global_asm;
use core::mem::MaybeUninit;

global_asm!(
    ".pushsection .text.memfold_gate,\"ax\",@progbits",
    // usize copy(to, from, bytes): what is left
    ".balign 16",
    ".globl memfold_gate_copy",
    ".hidden memfold_gate_copy",
    "memfold_gate_copy:",
    " mov %rdx,%rcx",
    ".globl memfold_gate_copying",
    ".hidden memfold_gate_copying",
    "memfold_gate_copying:",
    " rep movsb",
    ".globl memfold_gate_copied",
    ".hidden memfold_gate_copied",
    "memfold_gate_copied:",
    " mov %rcx,%rax",
    " ret",
    // usize touch_read(at), touch_write(at): 0, or 1
    ".globl memfold_gate_touch_read",
    ".hidden memfold_gate_touch_read",
    "memfold_gate_touch_read:",
    " movb (%rdi),%al",
    " xor %eax,%eax",
    " ret",
    ".globl memfold_gate_touch_write",
    ".hidden memfold_gate_touch_write",
    "memfold_gate_touch_write:",
    " lock addb $0,(%rdi)",
    " xor %eax,%eax",
    " ret",
    ".globl memfold_gate_untouched",
    ".hidden memfold_gate_untouched",
    "memfold_gate_untouched:",
    " mov $1,%eax",
    " ret",
    ".popsection",
    options(att_syntax)
);

unsafe extern "C" {
    #[link_name = "memfold_gate_copy"]
    fn copy_code(to: usize, from: usize, bytes: usize) -> usize;
    #[link_name = "memfold_gate_copying"]
    fn copying();
    #[link_name = "memfold_gate_copied"]
    fn copied();
    #[link_name = "memfold_gate_touch_read"]
    fn touch_read(at: usize) -> usize;
    #[link_name = "memfold_gate_touch_write"]
    fn touch_write(at: usize) -> usize;
    #[link_name = "memfold_gate_untouched"]
    fn untouched();
}

/// Returns where a thread goes on whose fault at `at` can't be served. `None`: the fault isn't of
/// this code.
pub(crate) fn fix_up(at: usize) -> Option<usize> {
    let address = |code: unsafe extern "C" fn()| code as *const () as usize;
    if at == address(copying) {
        Some(address(copied))
    } else if at == touch_read as *const () as usize || at == touch_write as *const () as usize {
        Some(address(untouched))
    } else {
        None
    }
}

/// Reads the byte at `addr`, or writes it without a change.
///
/// # Errors
/// Nothing is mapped there, or it may not be written.
pub fn touch(addr: usize, write: bool) -> Result<(), BadAddress> {
    // SAFETY: an access that isn't allowed is an error; one that is changes nothing.
    let left = unsafe { if write { touch_write(addr) } else { touch_read(addr) } };
    if left == 0 { Ok(()) } else { Err(BadAddress) }
}

/// Reads bytes of the program's.
///
/// # Errors
/// They aren't all there. Those before the first that isn't have been read.
pub fn read_bytes(addr: usize, to: &mut [u8]) -> Result<(), BadAddress> {
    // SAFETY: `to` is ours, and what can't be read is an error.
    let left = unsafe { copy_code(to.as_mut_ptr() as usize, addr, to.len()) };
    if left == 0 { Ok(()) } else { Err(BadAddress) }
}

/// Writes bytes of the program's.
///
/// # Errors
/// They can't all be written. Those before the first that can't have been.
///
/// # Safety
/// - The program expects them there.
pub unsafe fn write_bytes(addr: usize, from: &[u8]) -> Result<(), BadAddress> {
    // SAFETY: what can't be written is an error, and the rest is the caller's promise.
    let left = unsafe { copy_code(addr, from.as_ptr() as usize, from.len()) };
    if left == 0 { Ok(()) } else { Err(BadAddress) }
}

/// Types of which any bytes are a value, with no padding that matters.
///
/// # Safety
/// - As it says.
pub(crate) unsafe trait PlainBytes: Copy {}
// SAFETY: integers.
unsafe impl PlainBytes for u8 {}
// SAFETY: integers.
unsafe impl PlainBytes for u32 {}
// SAFETY: integers.
unsafe impl PlainBytes for u64 {}
// SAFETY: integers.
unsafe impl PlainBytes for usize {}
// SAFETY: integers.
unsafe impl PlainBytes for [usize; 2] {}
// SAFETY: integers.
unsafe impl PlainBytes for [usize; 3] {}
// SAFETY: integers.
unsafe impl PlainBytes for crate::frame::SignalAction {}
// SAFETY: integers.
unsafe impl PlainBytes for crate::frame::AlternateStack {}
// SAFETY: integers.
unsafe impl PlainBytes for crate::frame::SignalInfo {}
// SAFETY: integers.
unsafe impl PlainBytes for crate::frame::SignalFrame {}
// SAFETY: integers.
unsafe impl PlainBytes for crate::frame::SignalContext {}

/// Reads a value of the program's.
///
/// # Errors
/// As [`read_bytes`].
pub(crate) fn read<T: PlainBytes>(addr: usize) -> Result<T, BadAddress> {
    let mut value = MaybeUninit::<T>::uninit();
    // SAFETY: the place is ours, and what can't be read is an error.
    let left = unsafe { copy_code(value.as_mut_ptr() as usize, addr, size_of::<T>()) };
    // SAFETY: all of it has been read, and any bytes are a value.
    if left == 0 { Ok(unsafe { value.assume_init() }) } else { Err(BadAddress) }
}

/// Writes a value of the program's.
///
/// # Errors
/// As [`write_bytes`].
///
/// # Safety
/// - The program expects it there.
pub(crate) unsafe fn write<T: PlainBytes>(addr: usize, value: &T) -> Result<(), BadAddress> {
    // SAFETY: what can't be written is an error, and the rest is the caller's promise.
    let left = unsafe { copy_code(addr, &raw const *value as usize, size_of::<T>()) };
    if left == 0 { Ok(()) } else { Err(BadAddress) }
}

/// Copies bytes, either or both of which are the program's.
///
/// # Errors
/// As [`read_bytes`] and [`write_bytes`].
///
/// # Safety
/// - Whoever has `to` expects them there.
pub(crate) unsafe fn copy(to: usize, from: usize, bytes: usize) -> Result<(), BadAddress> {
    // SAFETY: the caller's promise.
    if unsafe { copy_code(to, from, bytes) } == 0 { Ok(()) } else { Err(BadAddress) }
}
