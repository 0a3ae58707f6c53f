//! Paging by protection, where no userfaultfd is available. Folded memory lies under PROT_NONE, or
//! consists of guard pages, so a touch is a SIGSEGV in the touching thread (A. Appel and K. Li,
//! "Virtual memory primitives for user programs", ASPLOS 1991).
//!
//! **Guard pages** (MADV_GUARD_INSTALL, Linux 6.13, `mm/madvise.c`) are marks in the page table of
//! accessible memory, and take no mapping. They survive fork, mremap and MADV_DONTNEED. To remove one
//! makes it a missing page, which another thread could touch before it has its bytes. So while a page
//! is loaded or evicted, it also lies under PROT_NONE: the guard is removed or put there meanwhile.
//! Memory that was never touched is hidden by PROT_NONE only. Where the page map doesn't tell guard
//! pages from swapped ones (before Linux 6.16), none are used.
//!
//! Bytes are written to hidden memory through `/proc/self/mem`, whose accesses are forced
//! (`mm/gup.c` FOLL_FORCE). One mprotect then shows all of them at once. An eviction hides the
//! pages, copies them, and has the kernel's own reclaim free them, as in `uffd/copy_out.rs`. A page
//! that a device or another process holds stays.
//!
//! Some kernels force no access (CONFIG_PROC_MEM_NO_FORCE or _FORCE_PTRACE, Linux 6.12). Then bytes
//! are put into pages elsewhere, which move there under PROT_NONE. They are read while the program
//! may read them too. A moved block is an area of its own for good. The kernel allows fewer areas
//! than a large memory has blocks.
//!
//! Each border between shown and hidden memory is a border between two of the kernel's areas, of
//! which a process has at most `vm.max_map_count`. So ranges should be large, and no more memory is
//! hidden when few areas remain (`Protection::may_hide`). If the program uses up the rest, hidden
//! memory must still be shown. For that there are spare areas (`SpareMappings`). When they are
//! used up too, a hidden area is shown from its start on ([`Protection::is_tight`]).
use crate::Errno;
use crate::maps::each_area;
use crate::maps::own::OwnFile;
use crate::maps::pagemap::Pagemap;
use crate::memory::zone::Zone;
use crate::raw::{end, populates, system_call};
use crate::text::TextBuffer;
use crate::uffd::Partial;
use crate::uffd::copy_out::drop_unused;
use crate::uffd::drop::AddressSpan;
use crate::uffd::space::Space;
use crate::units::PAGE_SIZE;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::iter::once;
use core::ops::ControlFlow::Continue;
use core::ops::Range;
use core::sync::atomic::{AtomicI64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use rustix::fd::OwnedFd;
use rustix::mm::{Advice, madvise};

/// Mappings that remain for the program, and for memory that must be shown.
const MAPPINGS_KEPT: i64 = 8192;
/// When there are too many mappings, they are counted again after so many requests.
const PATIENCE: i64 = 256;

/// `include/uapi/asm-generic/mman-common.h`, Linux 6.13.
const MADV_GUARD_INSTALL: usize = 102;
const MADV_GUARD_REMOVE: usize = 103;

/// Spare areas: each gives room for two more.
const SPARES: usize = 64;

/// Pages of alternating access. Each inaccessible page that becomes accessible joins its
/// neighbours, so the process has two mappings less.
struct SpareMappings {
    zone: Zone,
    left: AtomicUsize,
}

impl SpareMappings {
    /// # Errors
    /// The errors of reserving the zone and of `mprotect`.
    fn new() -> Result<SpareMappings, Errno> {
        let zone = Zone::reserve((2 * SPARES + 1) * PAGE_SIZE, PAGE_SIZE)?;
        let spares = SpareMappings { zone, left: AtomicUsize::new(SPARES) };
        (0..SPARES).try_for_each(|at| set_access(&spares.page(at), libc::PROT_NONE))?;
        Ok(spares)
    }

    fn page(&self, at: usize) -> Range<usize> {
        let start = self.zone.start() + (2 * at + 1) * PAGE_SIZE;
        start..start + PAGE_SIZE
    }

    /// Gives up one spare area. Returns `false` if there is none.
    fn give_up(&self) -> bool {
        let outcome = self.left.fetch_update(SeqCst, SeqCst, |count| count.checked_sub(1));
        // Access that joins areas needs no new one.
        outcome.is_ok_and(|count| {
            set_access(&self.page(count - 1), libc::PROT_READ | libc::PROT_WRITE).is_ok()
        })
    }
}

/// Access to memory of this process, with any protection.
pub struct Protection {
    file: OwnFile,
    /// Whether accesses through the file ignore the protection.
    forces: bool,
    /// `vm.max_map_count`.
    mappings_max: i64,
    /// Ranges that may be hidden until mappings are counted again. Below 0, requests that are
    /// refused.
    may_hide: AtomicI64,
    spares: SpareMappings,
    /// Whether evicted pages become guard pages in accessible memory.
    guards: bool,
}

impl Protection {
    /// Opens `/proc/self/mem`.
    ///
    /// # Errors
    /// The errors of `open`: ENOENT without /proc, EACCES in a process that may not be dumped.
    pub fn open() -> Result<Protection, Errno> {
        let text = crate::file::read("/proc/sys/vm/max_map_count", 32).unwrap_or_default();
        let number = core::str::from_utf8(&text).ok().and_then(|text| text.trim().parse().ok());
        let file = OwnFile::open_to_write(c"/proc/self/mem")?;
        let forces = forces(file.fd())?;
        Ok(Protection {
            file,
            forces,
            mappings_max: number.unwrap_or(65_530),
            may_hide: AtomicI64::new(0),
            spares: SpareMappings::new()?,
            guards: false,
        })
    }

    /// Lets evicted pages become guard pages.
    ///
    /// # Errors
    /// The kernel's: EINVAL before Linux 6.13. EOPNOTSUPP if the page map does not tell guard pages
    /// from others (before Linux 6.16), or if the kernel forces no access to hidden memory.
    pub fn with_guards(self) -> Result<Protection, Errno> {
        let (zone, map) = (Zone::reserve(PAGE_SIZE, PAGE_SIZE)?, Pagemap::open()?);
        install_guards(&(zone.start()..zone.start() + PAGE_SIZE))?;
        if map.is_populated(zone.start()) || !self.forces {
            return Err(Errno::OPNOTSUPP);
        }
        Ok(Protection { guards: true, ..self })
    }

    /// Moves the descriptor to a number from `least` on.
    ///
    /// # Errors
    /// EMFILE: no number is free.
    pub fn at_least(self, least: i32) -> Result<Protection, Errno> {
        Ok(Protection { file: self.file.at_least(least)?, ..self })
    }

    /// Returns whether the kernel forces access to hidden memory.
    pub fn forces(&self) -> bool {
        self.forces
    }

    /// Returns whether evicted pages become guard pages.
    pub fn guards(&self) -> bool {
        self.guards
    }

    /// Returns the descriptor.
    pub fn fd(&self) -> &OwnedFd {
        self.file.fd()
    }

    /// Opens its own file in a child of fork, in place of its parent's, under the same number.
    ///
    /// # Errors
    /// The errors of [`Protection::open`].
    pub fn reopen(&self) -> Result<(), Errno> {
        self.file.reopen()
    }

    /// Hides a range from the program. Its pages stay.
    ///
    /// # Errors
    /// The errors of `mprotect`, ENOMEM where there are too many mappings; a part may be hidden.
    pub fn hide(&self, range: &Range<usize>) -> Result<(), Errno> {
        set_access(range, libc::PROT_NONE)
    }

    /// Shows a range to the program, for reading and writing. Guard pages in it become missing pages.
    ///
    /// Ends the process if the kernel refuses, because the program cannot continue then.
    pub fn show(&self, range: &Range<usize>) {
        if self.guards {
            let _ = remove_guards(range);
        }
        self.set_access_for_sure(range, libc::PROT_READ | libc::PROT_WRITE);
    }

    /// Sets the access to a range, at the cost of spare areas if need be.
    fn set_access_for_sure(&self, range: &Range<usize>, access: i32) {
        let mut outcome = set_access(range, access);
        while outcome == Err(Errno::NOMEM) && self.spares.give_up() {
            outcome = set_access(range, access);
        }
        if let Err(e) = outcome {
            let text: TextBuffer<256> = TextBuffer::of(format_args!(
                "The kernel refuses to load folded memory of the program ({e}). The process has too many \
                 mappings. Raise vm.max_map_count, which is {}",
                self.mappings_max
            ));
            end(core::str::from_utf8(text.as_bytes()).unwrap_or("vm.max_map_count is too small"));
        }
    }

    /// Makes a hidden range without pages accessible, with guard pages instead, so that it takes no
    /// mapping of its own. Where the kernel refuses, the range stays hidden.
    fn guard(&self, range: &Range<usize>) {
        if self.guards && install_guards(range).is_ok() {
            let _ = set_access(range, libc::PROT_READ | libc::PROT_WRITE);
        }
    }

    /// Hides the parts of a range of the program that have no page. Around each page, `block` (a
    /// power of two) bytes are not hidden. Other threads may write to the range meanwhile, but not
    /// discard pages. `is_held` is whether a system call in progress names a part of it.
    ///
    /// # Errors
    /// The errors of `mprotect` or of the page map. No part is hidden then.
    pub fn cover(
        &self,
        range: &Range<usize>,
        block: usize,
        map: &Pagemap,
        is_held: bool,
    ) -> Result<(), Errno> {
        let is_empty = !is_held && !map.is_populated(range.start);
        // Parts of an area that had no page when it was split never join again.
        let is_made = populates(range.start, true) && is_empty;
        let first = range.start..((range.start & !(block - 1)) + block).min(range.end);
        let outcome = self
            .cover_gaps(range, block, map)
            .and_then(|()| if is_made { self.cover_zeros(&first, map) } else { Ok(()) });
        if outcome.is_err() {
            self.show(range);
        }
        outcome
    }

    /// Hides a range without its first page, which this engine has made, unless a thread has
    /// written to the range since.
    fn cover_zeros(&self, range: &Range<usize>, map: &Pagemap) -> Result<(), Errno> {
        let page = range.start..range.start + PAGE_SIZE;
        self.hide(range)?;
        // From now on no thread writes there.
        let mut bytes = [0; PAGE_SIZE];
        let is_alone = blocks(range, PAGE_SIZE, map)? == [page.clone()];
        // SAFETY: the array has room for a page, and only this thread uses it.
        let outcome = unsafe { self.read(page.start, bytes.as_mut_ptr(), PAGE_SIZE) };
        if !is_alone || outcome < PAGE_SIZE || bytes.iter().any(|byte| *byte != 0) {
            self.show(range);
            return Ok(());
        }
        // SAFETY: the page holds zeros, and reads as zeros without it.
        unsafe { madvise(page.start as *mut _, PAGE_SIZE, Advice::LinuxDontNeed) }
    }

    fn cover_gaps(&self, range: &Range<usize>, block: usize, map: &Pagemap) -> Result<(), Errno> {
        let mut at = range.start;
        for block_range in blocks(range, block, map)?.into_iter().chain(once(range.end..range.end))
        {
            let gap = at..block_range.start;
            at = block_range.end;
            if gap.is_empty() {
                continue;
            }
            self.hide(&gap)?;
            // Pages may have been made meanwhile; from now on none is.
            blocks(&gap, block, map)?.iter().for_each(|block_range| self.show(block_range));
        }
        Ok(())
    }

    /// Returns whether memory in the middle of a hidden area can't be shown, because the process has
    /// too many mappings. Memory at the start of one still can, where it continues shown memory.
    pub fn is_tight(&self) -> bool {
        self.spares.left.load(SeqCst) == 0
    }

    /// Returns whether one more range may be hidden without running out of mappings.
    fn may_hide(&self) -> bool {
        let budget = self.may_hide.load(Relaxed);
        if budget != 0 {
            // Several threads may be here, so this is an estimate.
            self.may_hide.fetch_sub(budget.signum(), Relaxed);
            return budget > 0;
        }
        let mut count = 0;
        let outcome = each_area(|_| {
            count += 1;
            Continue(())
        });
        if self.is_tight() {
            return false;
        }
        let reserve = MAPPINGS_KEPT.min(self.mappings_max / 4);
        // Hiding a range makes at most two more, and so does showing it again.
        let room =
            if outcome.is_ok() { (self.mappings_max - reserve - count) / 4 } else { PATIENCE };
        self.may_hide.store(if room > 0 { room } else { -PATIENCE }, Relaxed);
        room > 0
    }

    /// Copies bytes to a range, with any protection, and returns their number.
    ///
    /// # Safety
    /// - `from` is readable for `len` bytes, and the caller may define the bytes at `to`.
    unsafe fn write(&self, to: usize, from: *const u8, len: usize) -> usize {
        if !self.forces {
            // SAFETY: by the caller's promise `from` is readable, and the bytes at `to` may be
            // defined.
            return unsafe { move_copy(to, from, len) }.map_or(0, |()| len);
        }
        // SAFETY: by the caller's promise `from` is readable for `len` bytes.
        let bytes = unsafe { core::slice::from_raw_parts(from, len) };
        self.transfer(len, |fd, offset| {
            rustix::io::pwrite(fd, &bytes[offset..], (to + offset) as u64)
        })
    }

    /// Copies bytes of a range, with any protection, and returns their number.
    ///
    /// # Safety
    /// - `to` is writable for `len` bytes, and no other thread uses it.
    unsafe fn read(&self, from: usize, to: *mut u8, len: usize) -> usize {
        if !self.forces {
            // SAFETY: by the caller's promise `to` is writable, and no other thread uses it.
            return unsafe { read_shown(from, to, len) }.map_or(0, |()| len);
        }
        // SAFETY: by the caller's promise `to` is writable for `len` bytes, and has no other user.
        let bytes = unsafe { core::slice::from_raw_parts_mut(to, len) };
        self.transfer(len, |fd, offset| {
            rustix::io::pread(fd, &mut bytes[offset..], (from + offset) as u64)
        })
    }

    fn transfer(
        &self,
        len: usize,
        mut some: impl FnMut(&OwnedFd, usize) -> Result<usize, Errno>,
    ) -> usize {
        let Some(fd) = self.file.get() else { return 0 };
        let mut done_bytes = 0;
        while done_bytes < len {
            match some(fd, done_bytes) {
                Ok(0) => break,
                Ok(more) => done_bytes += more,
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(_) => break,
            }
        }
        done_bytes
    }
}

/// Returns whether hidden memory can be written through `/proc/self/mem`.
fn forces(file: &OwnedFd) -> Result<bool, Errno> {
    let zone = Zone::reserve(PAGE_SIZE, PAGE_SIZE)?;
    let range = zone.start()..zone.start() + PAGE_SIZE;
    set_access(&range, libc::PROT_NONE)?;
    Ok(rustix::io::pwrite(file, &[1], range.start as u64) == Ok(1))
}

/// Copies bytes into pages of their own, and moves those, hidden, into a range.
///
/// # Errors
/// The errors of making or moving them: ENOMEM where there are too many mappings.
///
/// # Safety
/// - `from` is readable for `len` bytes, and the caller may define the bytes at `to`, whole pages.
unsafe fn move_copy(to: usize, from: *const u8, len: usize) -> Result<(), Errno> {
    const FLAGS: i32 = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
    let pages = Zone::reserve(len, PAGE_SIZE)?;
    // Memory of the program is in dumps.
    pages.show_in_dumps();
    // SAFETY: the zone has this length, and no other thread knows it.
    unsafe { core::ptr::copy_nonoverlapping(from, pages.as_ptr(), len) };
    set_access(&(pages.start()..pages.start() + len), libc::PROT_NONE)?;
    let args = [pages.start(), len, len, FLAGS as usize, to, 0];
    // SAFETY: the pages leave the zone, which stays mapped; the caller may define the bytes at
    // `to`.
    unsafe { system_call(libc::SYS_mremap, args) }.map(drop)
}

/// Copies bytes of a hidden range, which is readable meanwhile.
///
/// # Errors
/// The errors of `mprotect`.
///
/// # Safety
/// - `to` is writable for `len` bytes, and no other thread uses it.
unsafe fn read_shown(from: usize, to: *mut u8, len: usize) -> Result<(), Errno> {
    let range = from & !(PAGE_SIZE - 1)..(from + len).next_multiple_of(PAGE_SIZE);
    set_access(&range, libc::PROT_READ)?;
    // SAFETY: the range is readable now, and by the caller's promise `to` is writable.
    unsafe { core::ptr::copy(from as *const u8, to, len) };
    set_access(&range, libc::PROT_NONE)
}

/// Makes all pages of a range guard pages. A touch of one is a SIGSEGV, and its bytes are gone.
fn install_guards(range: &Range<usize>) -> Result<(), Errno> {
    advise(range, MADV_GUARD_INSTALL)
}

/// Makes the guard pages of a range missing pages. Others stay.
fn remove_guards(range: &Range<usize>) -> Result<(), Errno> {
    advise(range, MADV_GUARD_REMOVE)
}

fn advise(range: &Range<usize>, advice: usize) -> Result<(), Errno> {
    loop {
        // SAFETY: callers install guards only where the page table has nothing that the program needs,
        // and to remove them changes no byte.
        match unsafe { system_call(libc::SYS_madvise, [range.start, range.len(), advice, 0, 0, 0]) }
        {
            Err(Errno::INTR | Errno::AGAIN) => {}
            outcome => return outcome.map(drop),
        }
    }
}

fn set_access(range: &Range<usize>, access: i32) -> Result<(), Errno> {
    if range.is_empty() {
        return Ok(());
    }
    let args = [range.start, range.len(), access as usize, 0, 0, 0];
    // SAFETY: mprotect changes no byte; faults on hidden memory are served.
    unsafe { system_call(libc::SYS_mprotect, args) }.map(drop)
}

/// Returns the blocks of a range that have a page, in order, with neighbours joined.
fn blocks(range: &Range<usize>, block: usize, map: &Pagemap) -> Result<Vec<Range<usize>>, Errno> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    map.for_each_populated(range.start, range.end, |start, end| {
        let start = (start & !(block - 1)).max(range.start);
        let end = end.next_multiple_of(block).min(range.end);
        match runs.last_mut() {
            Some(last) if last.end >= start => last.end = last.end.max(end),
            _ => runs.push(start..end),
        }
    })?;
    Ok(runs)
}

/// The address space of this process, paged by protection. Pages are copied, never moved.
pub struct ProtectionSpace {
    protection: Arc<Protection>,
    pagemap: Arc<Pagemap>,
}

impl ProtectionSpace {
    /// Makes the process's address space; both arguments are of this process.
    pub fn new(protection: Arc<Protection>, pagemap: Arc<Pagemap>) -> ProtectionSpace {
        ProtectionSpace { protection, pagemap }
    }

    /// Copies the present pages of a hidden range, and zeros for the others. Returns the number of
    /// copied bytes, from the first on.
    ///
    /// # Safety
    /// - The conditions of [`Protection::read`].
    unsafe fn read(&self, address: usize, to: *mut u8, len: usize) -> usize {
        let mut at = 0;
        let mut has_stopped = false;
        let outcome = self.pagemap.for_each_populated(address, address + len, |start, end| {
            if has_stopped {
                return;
            }
            let (start, end) = (start - address, end - address);
            // SAFETY: the bytes are inside `to`, by the caller's promise.
            unsafe { to.add(at).write_bytes(0, start - at) };
            // SAFETY: the bytes are inside `to`, by the caller's promise.
            let read_end =
                unsafe { self.protection.read(address + start, to.add(start), end - start) };
            at = start + read_end;
            has_stopped = at < end;
        });
        if outcome.is_err() || has_stopped {
            return if outcome.is_err() { 0 } else { at & !(PAGE_SIZE - 1) };
        }
        // SAFETY: the bytes are inside `to`, by the caller's promise.
        unsafe { to.add(at).write_bytes(0, len - at) };
        len
    }

    /// Reads the present pages of a hidden range once more: see [`crate::uffd::copy_out`].
    ///
    /// # Safety
    /// - The conditions of [`Protection::read`], and `to` has the bytes of the first reading.
    unsafe fn read_again(&self, address: usize, to: *mut u8, len: usize) {
        let mut bytes = [0; PAGE_SIZE];
        let mut read_page = |page: usize| {
            // SAFETY: the page is inside `to`, by the caller's promise.
            let before =
                unsafe { core::slice::from_raw_parts_mut(to.add(page - address), PAGE_SIZE) };
            // SAFETY: there is room for a page.
            let outcome = unsafe { self.protection.read(page, bytes.as_mut_ptr(), PAGE_SIZE) };
            if outcome < PAGE_SIZE || bytes == *before {
                return;
            }
            if self.pagemap.is_private(page) {
                before.copy_from_slice(&bytes);
            } else {
                // The kernel has reclaimed it meanwhile, and this reading has made a page of zeros.
                // SAFETY: no thread can have written to it.
                let _ = unsafe { self.discard(page, PAGE_SIZE) };
            }
        };
        let _ = self.pagemap.for_each_populated(address, address + len, |start, end| {
            (start..end).step_by(PAGE_SIZE).for_each(&mut read_page);
        });
    }

    /// Ends [`drop_unused`] on a hidden range, whose bytes are at `bytes`. Pages that are present
    /// stay, with any bytes that were written to them. The others are put back.
    ///
    /// # Safety
    /// - They are readable, and the program expects these bytes there.
    unsafe fn keep_rest(&self, start: usize, bytes: *const u8, len: usize) {
        for at in (0..len).step_by(PAGE_SIZE) {
            let page = start + at;
            // A present page may be marked with MADV_FREE, and would be freed later. While it is
            // locked the kernel doesn't free it. Where the process may lock no page, this page
            // could be freed just now, which is very unlikely.
            let lock = [page, PAGE_SIZE, libc::MLOCK_ONFAULT as usize, 0, 0, 0];
            // SAFETY: mlock2 changes no byte.
            let is_locked = unsafe { system_call(libc::SYS_mlock2, lock) }.is_ok();
            if !self.pagemap.is_populated(page) {
                // SAFETY: no thread can have written there, so the page's bytes are those at
                // `bytes`.
                let outcome = unsafe { self.protection.write(page, bytes.add(at), PAGE_SIZE) };
                assert_eq!(outcome, PAGE_SIZE, "memfold: A page cannot be put back");
            }
            self.protection.show(&(page..page + PAGE_SIZE));
            // A write ends the effect of MADV_FREE.
            populates(page, true);
            if is_locked {
                // SAFETY: munlock changes no byte. Memory that the program has locked isn't the
                // engine's.
                let _ = unsafe { system_call(libc::SYS_munlock, [page, PAGE_SIZE, 0, 0, 0, 0]) };
            }
        }
    }
}

impl Space for ProtectionSpace {
    unsafe fn move_pages(
        &self,
        _dst: usize,
        _src: usize,
        _len: usize,
        _wake: bool,
    ) -> Result<(), Partial> {
        Err(Partial { done: 0, errno: Errno::OPNOTSUPP })
    }

    unsafe fn copy(
        &self,
        dst: usize,
        src: *const u8,
        len: usize,
        _wake: bool,
    ) -> Result<(), Partial> {
        let range = dst..dst + len;
        if self.protection.guards {
            // No other thread sees the pages before they have their bytes.
            self.protection.set_access_for_sure(&range, libc::PROT_NONE);
            remove_guards(&range).map_err(|errno| Partial { done: 0, errno })?;
        }
        // SAFETY: by the caller's promise `src` is readable, and the bytes at `dst` may be defined.
        let outcome = unsafe { self.protection.write(dst, src, len) };
        if outcome < len {
            // The range stays hidden.
            // SAFETY: this call has made these pages.
            let _ = unsafe { madvise(dst as *mut _, len, Advice::LinuxDontNeed) };
            return Err(Partial { done: 0, errno: Errno::FAULT });
        }
        self.protection.set_access_for_sure(&range, libc::PROT_READ | libc::PROT_WRITE);
        Ok(())
    }

    unsafe fn copy_protected(&self, _: usize, _: *const u8, _: usize) -> Result<(), Partial> {
        Err(Partial { done: 0, errno: Errno::OPNOTSUPP })
    }

    unsafe fn map_zeros(&self, _: usize, _: usize) -> Result<(), Partial> {
        Err(Partial { done: 0, errno: Errno::OPNOTSUPP })
    }

    fn protect(&self, start: usize, len: usize, on: bool) -> Result<(), Errno> {
        let range = start..start + len;
        if on {
            return self.protection.hide(&range);
        }
        self.protection.show(&range);
        Ok(())
    }

    unsafe fn take_by_copy(&self, address: usize, to: *mut u8, len: usize) -> usize {
        // The kernel would not free a page that a fork shares.
        let len = self.pagemap.unshared_bytes(address, len);
        if len == 0 || !self.protection.may_hide() {
            return 0;
        }
        if self.protection.hide(&(address..address + len)).is_err() {
            self.protection.show(&(address..address + len));
            return 0;
        }
        // SAFETY: `to` has room, by the caller's promise.
        let read_bytes = unsafe { self.read(address, to, len) };
        // SAFETY: the bytes are at `to`, so the pages are not needed unless they are written to.
        let dropped_bytes = unsafe {
            drop_unused(&self.pagemap, address, read_bytes, || {
                self.read_again(address, to, read_bytes)
            })
        };
        if dropped_bytes < read_bytes {
            // SAFETY: the bytes of the range are at `to`.
            unsafe {
                self.keep_rest(
                    address + dropped_bytes,
                    to.add(dropped_bytes),
                    read_bytes - dropped_bytes,
                )
            };
        }
        self.protection.show(&(address + read_bytes..address + len));
        if dropped_bytes > 0 {
            self.protection.guard(&(address..address + dropped_bytes));
        }
        dropped_bytes
    }

    unsafe fn discard(&self, start: usize, len: usize) -> Result<(), Errno> {
        // SAFETY: the caller gives up the bytes.
        unsafe { madvise(start as *mut _, len, Advice::LinuxDontNeed) }
    }

    fn can_drop(&self) -> bool {
        false
    }

    fn hides(&self) -> bool {
        true
    }

    fn takes_mappings(&self) -> bool {
        !self.protection.guards
    }

    unsafe fn drop_spans(&self, _spans: &[AddressSpan]) -> Result<(), Partial> {
        Err(Partial { done: 0, errno: Errno::OPNOTSUPP })
    }

    fn unshare(&self, start: usize, len: usize) -> Result<(), Errno> {
        // SAFETY: MADV_POPULATE_WRITE changes no byte.
        unsafe { madvise(start as *mut _, len, Advice::LinuxPopulateWrite) }
    }

    fn unshared_bytes(&self, range: Range<usize>, from_end: bool) -> usize {
        match from_end {
            true => self.pagemap.unshared_bytes_before(range.end, range.len()),
            false => self.pagemap.unshared_bytes(range.start, range.len()),
        }
    }

    fn shared_bytes(&self, range: Range<usize>) -> usize {
        self.pagemap.shared_bytes(range.start, range.len())
    }

    fn is_populated(&self, addr: usize) -> bool {
        self.pagemap.is_populated(addr)
    }

    unsafe fn keep(&self, _start: usize, _len: usize) {}

    fn wake(&self, _start: usize, _len: usize) {}
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests;
