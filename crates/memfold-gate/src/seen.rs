//! The keeper's threads, where the program looks for its own: the links of `/proc/self/task`, which a
//! program counts that goes on only while it has one thread.
use crate::keeper::Keeper;
use crate::touch::{read, write};
use memfold_sys::raw::system_call;

/// Where a structure has what is asked for.
struct Places {
    number: usize,
    links: usize,
    mode: usize,
    bytes: usize,
}
/// `struct stat`.
const STAT: Places = Places { number: 8, links: 16, mode: 24, bytes: 48 };
/// `struct statx`.
const STATX: Places = Places { number: 32, links: 16, mode: 28, bytes: 40 };
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
            libc::SYS_statx => hide(args[4], &STATX, threads),
            libc::SYS_newfstatat => hide(args[2], &STAT, threads),
            _ => hide(args[1], &STAT, threads),
        };
    }
}

/// Takes `threads` from the links that are told at `at`, if they are those of `/proc/self/task`.
fn hide(at: usize, places: &Places, threads: usize) -> Option<()> {
    // Of a wider number the lower half comes first.
    let links = read::<u32>(at.checked_add(places.links)?).ok()?;
    let mode = read::<u32>(at + places.mode).ok()?;
    if links as usize > threads + OWN_LINKS
        && mode & libc::S_IFMT == libc::S_IFDIR
        && read::<usize>(at + places.bytes).ok()? == 0
        && read::<usize>(at + places.number).ok()? == own_number()?
    {
        // SAFETY: the program has asked for it there.
        unsafe { write(at + places.links, &(links - threads as u32)) }.ok()?;
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
