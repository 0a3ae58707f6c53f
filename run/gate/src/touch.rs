//! Reads, writes and touches the program's memory. If nothing is mapped there, or the access isn't
//! allowed, the function fails like the kernel's own copies.
//!
//! The handler of SIGBUS or SIGSEGV loads a folded page, and the access continues. For all other
//! faults the handler asks [`fix_up`] where to continue.
use crate::keeper::BadAddress;
use core::arch::global_asm;
use core::mem::MaybeUninit;

global_asm!(
    ".pushsection .text.memfold_gate,\"ax\",@progbits",
    // usize copy(to, from, bytes): returns the number of bytes that are left
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
    // usize touch_read(at), touch_write(at): return 0, or 1 after a fault
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
    // u32 exchange(at, from, to): returns 0, or 1 if `*at` isn't `from` or after a fault
    ".balign 16",
    ".globl memfold_gate_exchange",
    ".hidden memfold_gate_exchange",
    "memfold_gate_exchange:",
    " mov %esi,%eax",
    ".globl memfold_gate_exchanging",
    ".hidden memfold_gate_exchanging",
    "memfold_gate_exchanging:",
    " lock cmpxchgl %edx,(%rdi)",
    " setne %al",
    " movzbl %al,%eax",
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
    #[link_name = "memfold_gate_exchange"]
    fn exchange_code(at: usize, from: u32, to: u32) -> u32;
    #[link_name = "memfold_gate_exchanging"]
    fn exchanging();
    #[link_name = "memfold_gate_untouched"]
    fn untouched();
}

/// Returns the address at which a thread continues after a fault at `at` that can't be served.
/// Returns `None` if the instruction at `at` isn't of this code.
pub(crate) fn fix_up(at: usize) -> Option<usize> {
    let address = |code: unsafe extern "C" fn()| code as *const () as usize;
    if at == address(copying) {
        Some(address(copied))
    } else if at == touch_read as *const () as usize
        || at == touch_write as *const () as usize
        || at == address(exchanging)
    {
        Some(address(untouched))
    } else {
        None
    }
}

/// Reads the byte at `addr`, or writes it back unchanged if `write` is true.
///
/// # Errors
/// Nothing is mapped there, or the access isn't allowed.
pub fn touch(addr: usize, write: bool) -> Result<(), BadAddress> {
    // SAFETY: a fault ends the access with an error. A write doesn't change the byte, because it is
    // an atomic addition of 0.
    let rest = unsafe { if write { touch_write(addr) } else { touch_read(addr) } };
    if rest == 0 { Ok(()) } else { Err(BadAddress) }
}

/// Replaces `from` by `to` in an aligned word of the program, in one step. Returns whether it did.
/// It did not if the word has another value, or can't be written.
///
/// # Safety
/// - The program expects that `from` becomes `to` at `addr`.
pub(crate) unsafe fn exchange(addr: usize, from: u32, to: u32) -> bool {
    // SAFETY: the caller promises that the program expects the change. A fault ends the access with
    // an error.
    unsafe { exchange_code(addr, from, to) == 0 }
}

/// Reads bytes of the program.
///
/// # Errors
/// Some bytes can't be read. The bytes before the first of those have been read.
pub fn read_bytes(addr: usize, to: &mut [u8]) -> Result<(), BadAddress> {
    // SAFETY: `to` has `to.len()` bytes that may be written. A fault at `addr` ends the copy with
    // an error.
    let rest = unsafe { copy_code(to.as_mut_ptr() as usize, addr, to.len()) };
    if rest == 0 { Ok(()) } else { Err(BadAddress) }
}

/// Writes bytes of the program.
///
/// # Errors
/// Some bytes can't be written. The bytes before the first of those have been written.
///
/// # Safety
/// - The program expects these bytes at `addr`.
pub unsafe fn write_bytes(addr: usize, from: &[u8]) -> Result<(), BadAddress> {
    // SAFETY: the caller promises that the program expects the bytes there. A fault at `addr` ends
    // the copy with an error. `from` has `from.len()` bytes.
    let rest = unsafe { copy_code(addr, from.as_ptr() as usize, from.len()) };
    if rest == 0 { Ok(()) } else { Err(BadAddress) }
}

/// A type for which any bytes are a valid value, and which has no padding.
///
/// # Safety
/// - Any bytes are a valid value of the type.
/// - The type has no padding.
pub(crate) unsafe trait PlainBytes: Copy {}
// SAFETY: any bytes are a valid integer, and integers have no padding.
unsafe impl PlainBytes for u8 {}
// SAFETY: any bytes are a valid integer, and integers have no padding.
unsafe impl PlainBytes for u32 {}
// SAFETY: any bytes are a valid integer, and integers have no padding.
unsafe impl PlainBytes for u64 {}
// SAFETY: any bytes are a valid integer, and integers have no padding.
unsafe impl PlainBytes for usize {}
// SAFETY: the elements are integers, and arrays have no padding.
unsafe impl PlainBytes for [usize; 2] {}
// SAFETY: the elements are integers, and arrays have no padding.
unsafe impl PlainBytes for [usize; 3] {}
// SAFETY: all fields are integers or such structs, with the C layout and without padding.
unsafe impl PlainBytes for crate::frame::SignalAction {}
// SAFETY: all fields are integers or such structs, with the C layout and without padding.
unsafe impl PlainBytes for crate::frame::AlternateStack {}
// SAFETY: all fields are integers or such structs, with the C layout and without padding.
unsafe impl PlainBytes for crate::frame::SignalInfo {}
// SAFETY: all fields are integers or such structs, with the C layout and without padding.
unsafe impl PlainBytes for crate::frame::SignalFrame {}
// SAFETY: all fields are integers or such structs, with the C layout and without padding.
unsafe impl PlainBytes for crate::frame::SignalContext {}

/// Reads a value of the program.
///
/// # Errors
/// Some of its bytes can't be read.
pub(crate) fn read<T: PlainBytes>(addr: usize) -> Result<T, BadAddress> {
    let mut value = MaybeUninit::<T>::uninit();
    // SAFETY: `value` has room for the bytes that are copied. A fault at `addr` ends the copy with
    // an error.
    let rest = unsafe { copy_code(value.as_mut_ptr() as usize, addr, size_of::<T>()) };
    // SAFETY: all bytes of `value` have been copied, and any bytes are a valid `T`.
    if rest == 0 { Ok(unsafe { value.assume_init() }) } else { Err(BadAddress) }
}

/// Writes a value of the program.
///
/// # Errors
/// Some of its bytes can't be written. The bytes before the first of those have been written.
///
/// # Safety
/// - The program expects the value at `addr`.
pub(crate) unsafe fn write<T: PlainBytes>(addr: usize, value: &T) -> Result<(), BadAddress> {
    // SAFETY: the caller promises that the program expects the value there. A fault at `addr` ends
    // the copy with an error. `value` has no padding, so all its bytes may be read.
    let rest = unsafe { copy_code(addr, &raw const *value as usize, size_of::<T>()) };
    if rest == 0 { Ok(()) } else { Err(BadAddress) }
}

/// Copies bytes from `from` to `to`. Either or both may be memory of the program.
///
/// # Errors
/// Some bytes can't be read or written. The bytes before the first of those have been copied.
///
/// # Safety
/// - The owner of the memory at `to`, which is the program or the gate, expects the bytes there.
pub(crate) unsafe fn copy(to: usize, from: usize, bytes: usize) -> Result<(), BadAddress> {
    // SAFETY: the caller promises that the owner of `to` expects the bytes there. A fault at either
    // address ends the copy with an error.
    if unsafe { copy_code(to, from, bytes) } == 0 { Ok(()) } else { Err(BadAddress) }
}
