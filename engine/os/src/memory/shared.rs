//! Memory that processes share by a sealed file without a name (memfd). It is mapped from its
//! start, as far as it is needed.
use crate::Errno;
use core::ffi::{CStr, c_void};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags};

/// Makes a file of `len` bytes. They read as zeros and take memory when they are written. No
/// process can truncate it under the others.
///
/// # Errors
/// The errors of `memfd_create`, `ftruncate` or sealing.
pub fn create(name: &CStr, len: u64) -> Result<OwnedFd, Errno> {
    let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, len)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// Makes a file like [`create`], mapped for the caller to write to. No other process can ever write
/// to it, even with its descriptor. Returns the file and the address.
///
/// # Errors
/// The errors of [`create`] and `mmap`. EINVAL: the kernel is older than 5.1.
pub fn create_to_show(name: &CStr, len: usize) -> Result<(OwnedFd, *mut c_void), Errno> {
    let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, len as u64)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
    let (at, _) = map(&file, len)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::FUTURE_WRITE | SealFlags::SEAL)?;
    Ok((file, at))
}

/// Maps the first `len` bytes of a file that [`create`] has made. It is left out of core dumps.
/// Returns the address, and the length of the file.
///
/// # Errors
/// EINVAL: it is another file, or a shorter one. The errors of `mmap`.
pub fn map(file: impl AsFd, len: usize) -> Result<(*mut c_void, u64), Errno> {
    map_for(file, len, ProtFlags::READ | ProtFlags::WRITE)
}

/// Maps a file that [`create_to_show`] has made, only for reading.
///
/// # Errors
/// The errors of [`map`].
pub fn map_to_read(file: impl AsFd, len: usize) -> Result<*mut c_void, Errno> {
    map_for(file, len, ProtFlags::READ).map(|(at, _)| at)
}

fn map_for(file: impl AsFd, len: usize, access: ProtFlags) -> Result<(*mut c_void, u64), Errno> {
    // An unsealed file could shrink under the mapping. Other files have no seals: EINVAL.
    let seals = rustix::fs::fcntl_get_seals(&file)?;
    let size = rustix::fs::fstat(&file)?.st_size as u64;
    if !seals.contains(SealFlags::SHRINK) || size < len as u64 {
        return Err(Errno::INVAL);
    }
    // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
    let at = unsafe {
        rustix::mm::mmap(core::ptr::null_mut(), len, access, MapFlags::SHARED, &file, 0)?
    };
    // SAFETY: the advice changes no byte of the mapping just made. Failure is harmless.
    let _ = unsafe { rustix::mm::madvise(at, len, Advice::LinuxDontDump) };
    Ok((at, size))
}

/// Maps the same file again at another address, from its start for `len` bytes; needs no
/// descriptor.
///
/// # Errors
/// The errors of `mremap`.
///
/// # Safety
/// - `at` is the address of a mapping of [`map`] or of this function, and its file has `len` bytes.
pub unsafe fn map_again(at: *mut c_void, len: usize) -> Result<*mut c_void, Errno> {
    // SAFETY: an old length of 0 leaves the old mapping as it is; the kernel chooses the new
    // address.
    unsafe { rustix::mm::mremap(at, 0, len, MremapFlags::MAYMOVE) }
}

/// Replaces a mapping by private memory of zeros. Threads that still have a pointer into it read
/// and write that.
///
/// # Errors
/// ENOMEM: the kernel has no memory for it; the mapping is unchanged.
///
/// # Safety
/// - `at` and `len` are of a mapping of this module, in which any value may be read at any time.
pub unsafe fn replace_by_zeros(at: *mut c_void, len: usize) -> Result<(), Errno> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: by the caller's promise the addresses are that mapping's, and zeros may be read
    // there.
    unsafe { rustix::mm::mmap_anonymous(at, len, access, MapFlags::PRIVATE | MapFlags::FIXED) }?;
    Ok(())
}

/// Ends a mapping.
///
/// # Safety
/// - `at` and `len` are of a mapping of this module, and no thread uses it from now on.
pub unsafe fn unmap(at: *mut c_void, len: usize) {
    // SAFETY: by the caller's promise the mapping is this module's, and not in use.
    let _ = unsafe { rustix::mm::munmap(at, len) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_mapping_is_the_same_memory_and_longer() {
        const LEN: usize = 64 << 20;
        let file = create(c"memfold-test", LEN as u64).unwrap();
        let (first, size) = map(&file, 4096).unwrap();
        assert_eq!(size, LEN as u64);
        drop(file);
        // SAFETY: the file has this length.
        let second = unsafe { map_again(first, LEN) }.unwrap();
        // SAFETY: both mappings have this length, and only this test uses them.
        unsafe {
            first.cast::<u64>().write_volatile(7);
            assert_eq!(second.cast::<u64>().read_volatile(), 7);
            let last = second.cast::<u8>().add(LEN - 1);
            assert_eq!(last.read_volatile(), 0);
            last.write_volatile(1);
            unmap(first, 4096);
            unmap(second, LEN);
        }
    }

    #[test]
    fn only_the_maker_writes_to_shared_memory() {
        let (file, at) = create_to_show(c"memfold-test", 8192).unwrap();
        // SAFETY: the mapping has this length, and only this test uses it.
        unsafe { at.cast::<u64>().write_volatile(7) };
        assert_eq!(map(&file, 8192).err(), Some(Errno::PERM));
        assert_eq!(rustix::io::pwrite(&file, &[1], 0), Err(Errno::PERM));
        let mapping = map_to_read(&file, 8192).unwrap();
        // SAFETY: the mapping has this address and length, and only this test uses it.
        let (value, outcome) = unsafe {
            let access = rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE;
            (mapping.cast::<u64>().read_volatile(), rustix::mm::mprotect(mapping, 8192, access))
        };
        assert_eq!((value, outcome), (7, Err(Errno::ACCESS)));
    }

    #[test]
    fn memory_replaced_by_zeros_is_shared_no_more() {
        let file = create(c"memfold-test", 8192).unwrap();
        let ((first, _), (second, _)) = (map(&file, 8192).unwrap(), map(&file, 8192).unwrap());
        // SAFETY: both mappings have this length, and only this test uses them.
        unsafe {
            first.cast::<u64>().write_volatile(7);
            replace_by_zeros(second, 8192).unwrap();
            assert_eq!(second.cast::<u64>().read_volatile(), 0);
            second.cast::<u64>().write_volatile(9);
            assert_eq!(first.cast::<u64>().read_volatile(), 7);
            unmap(first, 8192);
            unmap(second, 8192);
        }
    }

    #[test]
    fn files_that_could_shrink_are_refused() {
        let open =
            rustix::fs::memfd_create(c"open", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
                .unwrap();
        rustix::fs::ftruncate(&open, 8192).unwrap();
        assert_eq!(map(&open, 4096).err(), Some(Errno::INVAL));
        let memory = create(c"short", 4096).unwrap();
        assert_eq!(map(&memory, 8192).err(), Some(Errno::INVAL));
        assert!(rustix::fs::ftruncate(&memory, 0).is_err());
        let other =
            rustix::fs::open(c"/dev/null", rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty())
                .unwrap();
        assert!(map(&other, 4096).is_err());
    }
}
