//! The C library's open files. In a child of fork it resets their locks before any handler runs, thus before memfold
//! serves the child: they must be in memory when the fork happens.
use core::ffi::c_void;
use core::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use memfold_sys::raw::system_call;

/// Files looked at: past this, a ring is more likely than as many files.
const FILES_MAX: usize = 1 << 20;
/// glibc's `struct _IO_FILE`, the same since 2.1: its size, and where it leads to the next file and to its lock.
const FILE_BYTES: usize = 0xd8;
const CHAIN: usize = 0x68;
const LOCK: usize = 0x88;

/// The address of glibc's `_IO_list_all`; 0 if there is none.
static LIST: AtomicUsize = AtomicUsize::new(0);

/// Finds the list.
pub fn find() {
    // SAFETY: the name is a C string.
    let list = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"_IO_list_all".as_ptr()) };
    LIST.store(list as usize, SeqCst);
}

/// Brings every file of the list into memory. The list may be changing: nothing is read but by system calls, which say
/// so where nothing is mapped.
pub fn touch() {
    let list = LIST.load(SeqCst);
    let mut file = if list == 0 { 0 } else { read(list) };
    for _ in 0..FILES_MAX {
        if file == 0 {
            return;
        }
        read(file + FILE_BYTES - size_of::<usize>());
        read(read(file + LOCK));
        file = read(file + CHAIN);
    }
}

/// The word at an address; 0 if nothing is mapped there.
fn read(addr: usize) -> usize {
    let mut word = 0usize;
    let to = libc::iovec { iov_base: (&raw mut word).cast::<c_void>(), iov_len: size_of::<usize>() };
    let from = libc::iovec { iov_base: addr as *mut c_void, iov_len: size_of::<usize>() };
    let own = rustix::process::getpid().as_raw_nonzero().get() as usize;
    let args = [own, &raw const to as usize, 1, &raw const from as usize, 1, 0];
    // SAFETY: reads this process's own memory into a local word.
    let _ = unsafe { system_call(libc::SYS_process_vm_readv, args) };
    word
}
