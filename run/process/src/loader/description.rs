//! Tells the kernel what /proc shows of a loaded program: the auxiliary vector, by which debuggers
//! find the program, the addresses of its code and data, and its environment.
use crate::initial_stack::InitialStack;
use crate::loader::image::{ProgramImage, Segment};
use memfold_os::raw::system_call;
use rustix::mm::ProtFlags;

/// `struct prctl_mm_map` (`include/uapi/linux/prctl.h`).
#[repr(C)]
struct MemoryMap {
    start_code: u64,
    end_code: u64,
    start_data: u64,
    end_data: u64,
    start_brk: u64,
    brk: u64,
    start_stack: u64,
    arg_start: u64,
    arg_end: u64,
    env_start: u64,
    env_end: u64,
    auxv: u64,
    auxv_size: u32,
    exe_fd: u32,
}

/// Another file for `/proc/PID/exe` needs a privilege.
const SAME_FILE: u32 = u32::MAX;

/// Describes a program that is mapped `bias` bytes above the addresses in its file. `environment_end`
/// is the end of the part of the environment that is the program's. Kernels without
/// `PR_SET_MM_MAP` (CONFIG_CHECKPOINT_RESTORE), and some before 5.15, go on showing this library.
pub fn give(stack: &InitialStack, image: &ProgramImage, bias: usize, environment_end: usize) {
    let address = |at: usize| at.wrapping_add(bias) as u64;
    let end_in_file = |segment: &Segment| address(segment.at + segment.file_bytes);
    let code = || image.segments().iter().filter(|each| each.access.contains(ProtFlags::EXEC));
    let data = image.segments().iter().rfind(|each| each.access.contains(ProtFlags::WRITE));
    let (Some(first), Some(last)) = (code().next(), code().next_back()) else { return };
    let data = data.unwrap_or(last);
    // SAFETY: with 0 the call only returns the end of the heap.
    let Ok(brk) = (unsafe { system_call(libc::SYS_brk, [0; 6]) }) else { return };
    let start_of = |entry: &[u8]| entry.as_ptr() as usize;
    let environment_start = stack.entries().map(start_of).next().unwrap_or(environment_end);
    let argument_start = stack.arguments().map(start_of).next().unwrap_or(environment_start);
    let pairs = stack.vector_pairs();
    let map = MemoryMap {
        start_code: address(first.at),
        end_code: end_in_file(last),
        start_data: address(data.at),
        end_data: end_in_file(data),
        start_brk: brk as u64,
        brk: brk as u64,
        start_stack: stack.lowest() as u64,
        arg_start: argument_start as u64,
        arg_end: environment_start as u64,
        env_start: environment_start as u64,
        env_end: environment_end as u64,
        auxv: pairs.as_ptr() as u64,
        auxv_size: size_of_val(pairs) as u32,
        exe_fd: SAME_FILE,
    };
    let args = [
        libc::PR_SET_MM as usize,
        libc::PR_SET_MM_MAP as usize,
        &raw const map as usize,
        size_of::<MemoryMap>(),
        0,
        0,
    ];
    // SAFETY: the kernel only reads the struct and the vector, which live until the call returns. The
    // heap's bounds stay as they are, because nothing has moved its end yet. All other values are
    // only shown.
    let _ = unsafe { system_call(libc::SYS_prctl, args) };
}
