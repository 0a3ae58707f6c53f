//! Syscall User Dispatch (Linux 5.11; `Documentation/admin-guide/syscall-user-dispatch.rst`): each
//! system call of an armed thread becomes SIGSYS, but those from the code of this library.
//!
//! The kernel compares the address after the instruction with the range that is let through, which
//! is the executable segment of the object that holds this code.
use core::sync::atomic::{AtomicU8, AtomicUsize, Ordering::SeqCst};
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

/// `Elf64_Ehdr`, of which only this is asked.
#[repr(C)]
struct Header {
    identity: [u8; 16],
    kind: [u16; 2],
    version: u32,
    entry: usize,
    programs: usize,
    sections: usize,
    flags: u32,
    bytes: u16,
    program_bytes: u16,
    program_count: u16,
}

/// `Elf64_Phdr`.
#[repr(C)]
struct Program {
    kind: u32,
    flags: u32,
    offset: usize,
    address: usize,
    physical: usize,
    file_bytes: usize,
    bytes: usize,
    align: usize,
}

const PT_LOAD: u32 = 1;
const PF_X: u32 = 1;

unsafe extern "C" {
    /// The linker's: the object's own header.
    static __ehdr_start: Header;
}

/// Finds the range; `false`: there is none.
pub fn find_range() -> bool {
    let here = find_range as *const () as usize;
    let base = &raw const __ehdr_start as usize;
    // SAFETY: the linker puts the header into the first segment, as it does its program headers.
    let programs = unsafe {
        let header = &*(base as *const Header);
        let first = (base + header.programs) as *const Program;
        core::slice::from_raw_parts(first, header.program_count as usize)
    };
    let first = programs.iter().find(|each| each.kind == PT_LOAD).map_or(0, |each| each.address);
    let bias = base.wrapping_sub(first);
    let ours = programs.iter().find(|each| {
        let start = bias.wrapping_add(each.address);
        each.kind == PT_LOAD && each.flags & PF_X != 0 && here.wrapping_sub(start) < each.bytes
    });
    if let Some(ours) = ours {
        START.store(bias + ours.address, SeqCst);
        END.store(bias + ours.address + ours.bytes, SeqCst);
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

/// Whether this code is part of the program itself, whose own system calls would be let through.
pub fn is_in_program() -> bool {
    let base = &raw const __ehdr_start as usize;
    // SAFETY: as in `find_range`; asking has no conditions.
    unsafe { base + (*(base as *const Header)).programs == libc::getauxval(libc::AT_PHDR) as usize }
}
