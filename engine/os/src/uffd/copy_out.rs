//! Evicts pages by copy, where UFFDIO_MOVE is unavailable (before Linux 6.8).
//!
//! They are write-protected, copied, and then freed **by the kernel's own reclaim**. MADV_FREE
//! declares that they are not needed unless they are written to again, and MADV_PAGEOUT reclaims
//! them now. The kernel frees such a page only if it was not written to since, and has no other
//! holder (`mm/rmap.c` `try_to_unmap_one`, `mm/vmscan.c` `shrink_page_list`, Linux 6.1). A device,
//! or another process (`process_vm_writev`), may be writing past the page table. MADV_DONTNEED
//! would lose that write. Here its page stays, and is put back unchanged.
//!
//! **Pages are read once more after MADV_FREE.** Such a write may have ended between the first
//! reading and MADV_FREE, unnoticed. With one reading, 1 in 3000 writes of another process into
//! pages that are evicted and loaded all the time was lost. The first reading is for pages that the
//! kernel reclaims on its own before the second.
use crate::Errno;
use crate::maps::pagemap::Pagemap;
use crate::raw::{read_if_there, system_call, write_if_there};
use crate::thread::yield_now;
use crate::uffd::Uffd;
use crate::units::PAGE_SIZE;

/// Evicts pages: see [`crate::uffd::space::Space::take_by_copy`].
///
/// # Safety
/// - The conditions of [`crate::uffd::space::Space::take_by_copy`].
pub unsafe fn take(
    uffd: &Uffd,
    pagemap: Option<&Pagemap>,
    address: usize,
    to: *mut u8,
    len: usize,
) -> usize {
    // The kernel would not free a page that a fork shares.
    let len = pagemap.map_or(len, |pagemap| pagemap.unshared_bytes(address, len));
    let protected_bytes = protect(uffd, address, len);
    let is_there = |page: usize| pagemap.is_none_or(|pagemap| pagemap.is_populated(page));
    let mut read_bytes = 0;
    while read_bytes < protected_bytes {
        // SAFETY: `to` has room for so many more bytes.
        let more = unsafe {
            read_if_there(address + read_bytes, to.add(read_bytes), protected_bytes - read_bytes)
        };
        read_bytes += more.unwrap_or(0) & !(PAGE_SIZE - 1);
        if read_bytes == protected_bytes || is_there(address + read_bytes) {
            break;
        }
        // SAFETY: `to` has room for the page.
        unsafe { to.add(read_bytes).write_bytes(0, PAGE_SIZE) };
        read_bytes += PAGE_SIZE;
    }
    let dropped_bytes = match pagemap {
        // SAFETY: the bytes are at `to`, which has room for so many.
        Some(pagemap) => unsafe {
            drop_unused(pagemap, address, read_bytes, || read_again(address, to, read_bytes))
        },
        // Without the page map it is unknown which pages remain.
        None => {
            // SAFETY: the bytes are at `to`.
            unsafe { advise(address, read_bytes, libc::MADV_DONTNEED) }.map_or(0, |()| read_bytes)
        }
    };
    for at in (dropped_bytes..protected_bytes).step_by(PAGE_SIZE) {
        // SAFETY: its bytes are at `to`, if it may have been freed.
        unsafe { put_back(uffd, address + at, (at < read_bytes).then_some(to.add(at))) };
    }
    dropped_bytes
}

/// Reads the present pages of a range.
///
/// # Safety
/// - `to` is writable for `len` bytes.
unsafe fn read_again(address: usize, to: *mut u8, len: usize) {
    let mut at = 0;
    while at < len {
        // SAFETY: `to` has room for so many more bytes.
        let more = unsafe { read_if_there(address + at, to.add(at), len - at) };
        // A missing page ends the reading, and is skipped.
        at += (more.unwrap_or(0) & !(PAGE_SIZE - 1)).max(PAGE_SIZE);
    }
}

/// Protects as much of a range as possible. A range may lie in several of the kernel's areas, which
/// older kernels refuse.
fn protect(uffd: &Uffd, address: usize, len: usize) -> usize {
    if len == 0 || uffd.protect(address, len, true).is_ok() {
        return len;
    }
    let mut pages = (0..len).step_by(PAGE_SIZE);
    pages.find(|at| uffd.protect(address + at, PAGE_SIZE, true).is_err()).unwrap_or(len)
}

/// # Safety
/// - The bytes of the range are not needed any more, unless they are written to.
unsafe fn advise(start: usize, len: usize, advice: i32) -> Result<(), Errno> {
    // SAFETY: by the caller's promise the bytes are not needed.
    unsafe { system_call(libc::SYS_madvise, [start, len, advice as usize, 0, 0, 0]) }.map(drop)
}

/// Drops protected pages that have no other user. `read_again` is called when each later write
/// keeps its page. Returns the number of dropped bytes, from the first on. Later pages may be gone
/// too.
///
/// # Safety
/// - The bytes of the range are not needed any more, unless they are written to.
pub(crate) unsafe fn drop_unused(
    pagemap: &Pagemap,
    start: usize,
    len: usize,
    read_again: impl FnOnce(),
) -> usize {
    // SAFETY: by the caller's promise the bytes are not needed, unless they are written to.
    if unsafe { advise(start, len, libc::MADV_FREE) }.is_err() {
        return 0;
    }
    read_again();
    // SAFETY: by the caller's promise the bytes are not needed, unless they are written to.
    if unsafe { advise(start, len, libc::MADV_PAGEOUT) }.is_err() {
        return 0;
    }
    let mut first_missing = len;
    let outcome = pagemap.for_each_populated(start, start + len, |page, _| {
        first_missing = first_missing.min(page - start)
    });
    outcome.map_or(0, |()| first_missing)
}

/// Ends the protection of a page that stays. `bytes` are its contents, if MADV_FREE may have been
/// applied.
///
/// # Safety
/// - They are readable, and the program expects them there.
unsafe fn put_back(uffd: &Uffd, page: usize, bytes: Option<*mut u8>) {
    while uffd.protect(page, PAGE_SIZE, false) == Err(Errno::AGAIN) {
        yield_now();
    }
    let Some(bytes) = bytes else { return };
    // A write ends the effect of MADV_FREE.
    if write_if_there(page) {
        return;
    }
    // The page is gone, or isn't writable, and might be freed later.
    // SAFETY: `bytes` are its contents, as no thread can have written to it.
    let _ = unsafe { advise(page, PAGE_SIZE, libc::MADV_DONTNEED) };
    loop {
        // SAFETY: by the caller's promise `bytes` are readable, and the program expects them there.
        match unsafe { uffd.copy(page, bytes, PAGE_SIZE, true) } {
            Err(partial) if matches!(partial.errno, Errno::AGAIN | Errno::NOMEM) => yield_now(),
            // Or the page is not mapped any more.
            _ => return,
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::memory::zone::{SharedZone, Zone};
    use crate::sync::MutexGuard;
    use crate::thread::pin;
    use crate::uffd::feature;
    use core::sync::atomic::{AtomicU32, Ordering::SeqCst};

    const PAGES: usize = 16;

    /// A test's zones, with the lock of forks, because pages that a fork shares aren't evicted.
    struct Setup {
        _alone: MutexGuard<'static, ()>,
        uffd: Uffd,
        pagemap: Pagemap,
        memory: Zone,
        frame: Zone,
    }

    impl Setup {
        /// Makes pages that hold their number, except for one that is missing.
        fn new() -> Setup {
            let _alone = crate::FORKS.lock();
            // A page that another CPU has just been given is in that CPU's batch, and stays.
            pin(rustix::thread::sched_getcpu());
            let uffd = Uffd::open(feature::GATE, true).expect("userfaultfd");
            let len = PAGES * PAGE_SIZE;
            let [memory, frame] = [(); 2].map(|()| Zone::reserve(len, PAGE_SIZE).unwrap());
            for page in (0..PAGES).filter(|page| *page != 3) {
                // SAFETY: the page is inside the zone.
                unsafe { memory.as_ptr().add(page * PAGE_SIZE).write_bytes(page as u8, PAGE_SIZE) };
            }
            // SAFETY: the test doesn't touch missing pages.
            unsafe { uffd.register(memory.start(), len, true).unwrap() };
            Setup { _alone, uffd, pagemap: Pagemap::open().unwrap(), memory, frame }
        }

        fn take(&self, map: bool) -> usize {
            let map = map.then_some(&self.pagemap);
            // SAFETY: only the test uses the zones.
            unsafe {
                let (address, to) = (self.memory.start(), self.frame.as_ptr());
                take(&self.uffd, map, address, to, self.memory.len())
            }
        }

        fn is_there(&self, page: usize) -> bool {
            self.pagemap.is_populated(self.memory.start() + page * PAGE_SIZE)
        }

        /// Returns the first byte of a page that is present or was evicted.
        fn byte(&self, zone: &Zone, page: usize) -> u8 {
            // SAFETY: the page is inside the zone.
            unsafe { zone.as_ptr().add(page * PAGE_SIZE).read_volatile() }
        }
    }

    #[test]
    fn pages_go_with_their_bytes_and_what_is_missing_is_zeros() {
        for map in [true, false] {
            let setup = Setup::new();
            if !map {
                // Without the page map all pages count as present.
                // SAFETY: the page is missing.
                unsafe {
                    setup.uffd.zero(setup.memory.start() + 3 * PAGE_SIZE, PAGE_SIZE).unwrap()
                };
            }
            // SAFETY: the bytes are inside the zone.
            unsafe { setup.frame.as_ptr().write_bytes(0xAA, setup.frame.len()) };
            assert_eq!(setup.take(map), PAGES * PAGE_SIZE);
            for page in 0..PAGES {
                let byte = if page == 3 { 0 } else { page as u8 };
                assert!(!setup.is_there(page) && setup.byte(&setup.frame, page) == byte, "{page}");
            }
        }
    }

    /// A pipe holds a page, like a device that writes to it.
    #[test]
    fn a_page_that_somebody_holds_stays_with_those_behind_it() {
        let setup = Setup::new();
        let (mut out, into) = std::io::pipe().unwrap();
        let span = [setup.memory.start() + 7 * PAGE_SIZE, PAGE_SIZE];
        let number = std::os::fd::AsRawFd::as_raw_fd(&into) as usize;
        // SAFETY: the page is present; no thread writes to it while the pipe has it.
        let result = unsafe {
            system_call(libc::SYS_vmsplice, [number, span.as_ptr() as usize, 1, 0, 0, 0])
        };
        assert_eq!(result.unwrap(), PAGE_SIZE as i64);
        assert_eq!(setup.take(true), 7 * PAGE_SIZE);
        for page in 7..PAGES {
            assert!(
                setup.is_there(page) && setup.byte(&setup.memory, page) == page as u8,
                "{page}"
            );
            // SAFETY: the page is inside the zone, and writable.
            unsafe { setup.memory.as_ptr().add(page * PAGE_SIZE).write_volatile(99) };
        }
        assert_eq!((setup.is_there(6), setup.byte(&setup.frame, 6)), (false, 6));
        let mut bytes = [0; PAGE_SIZE];
        std::io::Read::read_exact(&mut out, &mut bytes).unwrap();
        drop((out, into));
        // It is evicted when the pipe no longer holds it.
        assert_eq!(setup.take(true), PAGES * PAGE_SIZE);
        assert_eq!(setup.byte(&setup.frame, 9), 99);
    }

    /// Runs the other process of the test below. It writes to all pages at once, again and again,
    /// and counts those that have other contents afterwards.
    fn write_from_outside(parent: usize, address: usize, [stop, written, lost]: &[AtomicU32; 3]) {
        let transfer = |number: i64, bytes: *mut u32, there: usize, len: usize| {
            let (own, remote_span) = ([bytes as usize, len], [there, len]);
            let (own, remote_span) = (own.as_ptr() as usize, remote_span.as_ptr() as usize);
            // SAFETY: `bytes` has room; the other range is the zone of the test.
            let result = unsafe { system_call(number, [parent, own, 1, remote_span, 1, 0]) };
            result.map_or(0, |bytes| bytes as usize / PAGE_SIZE)
        };
        for turn in 1.. {
            let mut bytes = [turn; PAGES * PAGE_SIZE / 4];
            let mut back = [0; PAGE_SIZE / 4];
            let len = size_of_val(&bytes);
            let count = transfer(libc::SYS_process_vm_writev, bytes.as_mut_ptr(), address, len);
            written.fetch_add(count as u32, SeqCst);
            for page in (0..count).map(|page| address + page * PAGE_SIZE) {
                while transfer(libc::SYS_process_vm_readv, back.as_mut_ptr(), page, PAGE_SIZE) == 0
                {
                    if stop.load(SeqCst) != 0 {
                        return;
                    }
                }
                lost.fetch_add((back[..] != bytes[..PAGE_SIZE / 4]) as u32, SeqCst);
            }
            if stop.load(SeqCst) != 0 {
                return;
            }
        }
    }

    #[test]
    fn a_write_by_another_process_is_refused_or_lasts() {
        let setup = Setup::new();
        let zone = SharedZone::reserve(PAGE_SIZE).unwrap();
        // SAFETY: the page is zeros, and both processes share it.
        let words = unsafe { &*zone.as_ptr().cast::<[AtomicU32; 3]>() };
        let [stop, writes, losses] = words;
        let (parent, address) = (std::process::id() as usize, setup.memory.start());
        // SAFETY: the child makes only system calls, on its own stack, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let mut all = rustix::thread::CpuSet::new();
            (0..rustix::thread::CpuSet::MAX_CPU).for_each(|cpu| all.set(cpu));
            let _ = rustix::thread::sched_setaffinity(None, &all);
            write_from_outside(parent, address, words);
            // SAFETY: the call ends the process.
            unsafe { libc::_exit(0) };
        }
        let (mut takes, mut page) = (0, 0);
        while takes < 40_000 || writes.load(SeqCst) < 40_000 {
            page = (page + 1) % PAGES;
            let address = address + page * PAGE_SIZE;
            let frame = setup.frame.as_ptr();
            // SAFETY: only the test uses the zones.
            unsafe {
                if take(&setup.uffd, Some(&setup.pagemap), address, frame, PAGE_SIZE) > 0 {
                    takes += 1;
                    while setup.uffd.copy(address, frame, PAGE_SIZE, true).is_err() {}
                }
            }
        }
        stop.store(1, SeqCst);
        // SAFETY: the process is a child of this test.
        unsafe { libc::waitpid(child, core::ptr::null_mut(), 0) };
        assert_eq!(losses.load(SeqCst), 0, "of {}", writes.load(SeqCst));
    }

    #[test]
    fn read_only_page_is_evicted_and_unreadable_page_stays() {
        let setup = Setup::new();
        let protect = |page: usize, access: i32| {
            let args =
                [setup.memory.start() + page * PAGE_SIZE, PAGE_SIZE, access as usize, 0, 0, 0];
            // SAFETY: the page is in the zone, and is touched only as its access permits.
            unsafe { system_call(libc::SYS_mprotect, args) }.unwrap()
        };
        protect(2, libc::PROT_READ);
        protect(9, libc::PROT_NONE);
        assert_eq!(setup.take(true), 9 * PAGE_SIZE);
        assert_eq!(setup.byte(&setup.frame, 2), 2);
        assert!(!setup.is_there(2) && (9..PAGES).all(|page| setup.is_there(page)));
        protect(9, libc::PROT_READ | libc::PROT_WRITE);
        assert!((9..PAGES).all(|page| setup.byte(&setup.memory, page) == page as u8));
    }
}
