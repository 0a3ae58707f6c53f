//! Plain anonymous memory, for walks on the kernel's own swap and under `memfold run`.

use std::io::{Error, Result};

const HUGE: usize = 2 << 20;

/// A private anonymous mapping aligned to 2 MiB.
pub struct PlainArea {
    base: *mut libc::c_void,
    base_len: usize,
    start: *mut u8,
}

impl PlainArea {
    /// Maps `len` bytes. `huge` asks for large folios (MADV_HUGEPAGE). Without it the kernel would
    /// not reclaim for a large folio at a cgroup's limit, and would use small ones.
    pub fn new(len: usize, huge: bool) -> Result<PlainArea> {
        let base_len =
            len.checked_add(HUGE).ok_or_else(|| Error::from_raw_os_error(libc::ENOMEM))?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), base_len, protection, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(Error::last_os_error());
        }
        // SAFETY: align_offset is below HUGE, and base_len is len + HUGE.
        let start = unsafe {
            base.cast::<u8>().add((base as usize).next_multiple_of(HUGE) - base as usize)
        };
        let area = PlainArea { base, base_len, start };
        // SAFETY: advice on a range of our own mapping; it changes no content.
        if huge && unsafe { libc::madvise(start.cast(), len, libc::MADV_HUGEPAGE) } != 0 {
            return Err(Error::last_os_error());
        }
        Ok(area)
    }

    /// Returns the start of the area, aligned to 2 MiB.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start
    }
}

impl Drop for PlainArea {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `new`; users of the pointer don't outlive the area.
        unsafe { libc::munmap(self.base, self.base_len) };
    }
}
