//! The kernel's random generator.
use crate::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

/// Fills `bytes` from it.
///
/// # Errors
/// ENOSYS: no such system call.
pub fn fill(bytes: &mut [u8]) -> Result<(), Errno> {
    let mut filled_bytes = 0;
    while filled_bytes < bytes.len() {
        match getrandom(&mut bytes[filled_bytes..], GetRandomFlags::empty()) {
            Ok(n) => filled_bytes += n,
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Returns a random number.
///
/// # Errors
/// ENOSYS: no such system call.
pub fn word() -> Result<u64, Errno> {
    let mut bytes = [0; 8];
    fill(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}
