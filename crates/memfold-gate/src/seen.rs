//! The keeper's threads, where the program looks for its own: the links of `/proc/self/task`, which a
//! program counts that goes on only while it has one thread.
use crate::keeper::Keeper;
use crate::touch::{read, write};
use memfold_sys::raw::system_call;

/// `struct stat` and `struct statx`: places of what is asked for.
const NUMBER: usize = 8;
const LINKS: usize = 16;
const MODE: usize = 24;
const BYTES: usize = 48;
const X_LINKS: usize = 16;
const X_MODE: usize = 28;
const X_NUMBER: usize = 32;
const X_BYTES: usize = 40;
/// A directory has one for itself and one for its name.
const OWN_LINKS: usize = 2;

/// Whether a call says how many links a file has.
pub fn may_show(nr: usize) -> bool {
    matches!(
        nr as i64,
        libc::SYS_stat | libc::SYS_fstat | libc::SYS_lstat | libc::SYS_newfstatat | libc::SYS_statx
    )
}

/// Such a call has succeeded: takes the keeper's threads from what it says of `/proc/self/task`.
pub fn hide_threads(keeper: &dyn Keeper, nr: usize, args: &[usize; 6]) {
    let threads = keeper.threads();
    if threads > 0 {
        // What can't be read or written has been changed by another thread meanwhile.
        let _ = match nr as i64 {
            libc::SYS_statx => in_statx(args[4], threads),
            libc::SYS_newfstatat => in_stat(args[2], threads),
            _ => in_stat(args[1], threads),
        };
    }
}

fn in_stat(at: usize, threads: usize) -> Option<()> {
    let links = read::<usize>(at.checked_add(LINKS)?).ok()?;
    let mode = read::<u32>(at + MODE).ok()?;
    if links > threads + OWN_LINKS
        && mode & libc::S_IFMT == libc::S_IFDIR
        && read::<usize>(at + BYTES).ok()? == 0
        && read::<usize>(at + NUMBER).ok()? == own_number()?
    {
        // SAFETY: the program has asked for it there.
        unsafe { write(at + LINKS, &(links - threads)) }.ok()?;
    }
    Some(())
}

fn in_statx(at: usize, threads: usize) -> Option<()> {
    let links = read::<u32>(at.checked_add(X_LINKS)?).ok()?;
    let mode = read::<u32>(at + X_MODE).ok()?;
    if links as usize > threads + OWN_LINKS
        && mode & libc::S_IFMT == libc::S_IFDIR
        && read::<usize>(at + X_BYTES).ok()? == 0
        && read::<usize>(at + X_NUMBER).ok()? == own_number()?
    {
        // SAFETY: as above.
        unsafe { write(at + X_LINKS, &(links - threads as u32)) }.ok()?;
    }
    Some(())
}

/// The number of `/proc/self/task`, which stays the same while anybody has looked at it lately.
fn own_number() -> Option<usize> {
    // SAFETY: zeros are a value of the type.
    let mut about: libc::stat = unsafe { core::mem::zeroed() };
    let args = [c"/proc/self/task".as_ptr() as usize, &raw mut about as usize, 0, 0, 0, 0];
    // SAFETY: both are there.
    unsafe { system_call(libc::SYS_stat, args) }.ok()?;
    Some(about.st_ino as usize)
}
