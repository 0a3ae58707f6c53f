//! The kernel's random generator.
use crate::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

/// Fills `bytes` from it.
///
/// # Errors
/// ENOSYS: no such system call.
pub fn fill(bytes: &mut [u8]) -> Result<(), Errno> {
    let mut done = 0;
    while done < bytes.len() {
        match getrandom(&mut bytes[done..], GetRandomFlags::empty()) {
            Ok(n) => done += n,
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
