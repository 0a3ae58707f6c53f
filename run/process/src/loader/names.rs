//! The names by which others see a loaded program.
use core::ffi::CStr;
use memfold_gate::syscalls::own_program;

/// Longest name of a thread, with its final zero (TASK_COMM_LEN).
const NAME_BYTES: usize = 16;

/// Gives the process the name that the kernel gives to a program that was executed by this name.
/// Linux 6.14 and newer look at the file if a descriptor named it.
pub fn give(name: &[u8]) {
    let own = own_program();
    let path = match name.strip_prefix(b"/dev/fd/") {
        Some(number) if !number.contains(&b'/') => own.map_or(name, CStr::to_bytes),
        _ => name,
    };
    let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    let mut text = [0u8; NAME_BYTES];
    let len = name.len().min(NAME_BYTES - 1);
    text[..len].copy_from_slice(&name[..len]);
    if let Ok(name) = CStr::from_bytes_until_nul(&text) {
        // A failure leaves the library's name, which only people see.
        let _ = rustix::thread::set_name(name);
    }
}
