//! The areas of this process's address space, from /proc/self/maps and smaps, without allocation.
//!
//! The kernel's text is not one snapshot. An area that exists the whole time is reported exactly
//! once. An area that is added, removed or changed meanwhile may be missed or reported in part.
pub mod own;
pub mod lookup;
pub mod pagemap;
pub mod copied;
pub mod program;

use crate::Errno;
use core::ops::{ControlFlow, Range};
use own::{OwnFile, open};
use rustix::fd::OwnedFd;
use rustix::fs::SeekFrom;

/// Bytes of text that are read at a time. A line is longer only if a path is longer than half of
/// PATH_MAX; such a path is cut off.
const BUFFER_BYTES: usize = 4096;

/// Properties of an area from smaps, by the kernel's two-letter names.
pub mod flag {
    /// `lo`: locked in memory.
    pub const LOCKED: u32 = 1 << 0;
    /// `dc`: not copied at fork (MADV_DONTFORK).
    pub const DONT_FORK: u32 = 1 << 1;
    /// `wf`: zeros in the child after fork (MADV_WIPEONFORK).
    pub const WIPE_ON_FORK: u32 = 1 << 2;
    /// `io`: memory of a device.
    pub const IO: u32 = 1 << 3;
    /// `pf`: page frames without page structs.
    pub const PFN: u32 = 1 << 4;
    /// `mm`: a mixture of both.
    pub const MIXED: u32 = 1 << 5;
    /// `ht`: hugetlb pages.
    pub const HUGETLB: u32 = 1 << 6;
    /// `um`: registered with a userfaultfd for missing pages.
    pub const UFFD_MISSING: u32 = 1 << 7;
    /// `uw`: registered with a userfaultfd for write protection.
    pub const UFFD_PROTECT: u32 = 1 << 8;
    /// `gd`: grows downwards (a stack).
    pub const GROWS_DOWN: u32 = 1 << 9;
    /// `mg`: open to merging with equal pages (KSM).
    pub const MERGEABLE: u32 = 1 << 10;
    /// `dp`: the kernel may drop its pages at any time (MAP_DROPPABLE).
    pub const DROPPABLE: u32 = 1 << 11;
    /// `ss`: a shadow stack.
    pub const SHADOW_STACK: u32 = 1 << 12;
    /// `sl`: sealed against changes (mseal).
    pub const SEALED: u32 = 1 << 13;
    /// `sd`: soft-dirty tracking.
    pub const SOFT_DIRTY: u32 = 1 << 14;
    /// `dd`: left out of core dumps (MADV_DONTDUMP).
    pub const DONT_DUMP: u32 = 1 << 15;
    /// `rr`: no read-ahead (MADV_RANDOM).
    pub const RANDOM: u32 = 1 << 16;

    pub(super) const NAMES: [(&[u8; 2], u32); 17] = [
        (b"lo", LOCKED),
        (b"dc", DONT_FORK),
        (b"wf", WIPE_ON_FORK),
        (b"io", IO),
        (b"pf", PFN),
        (b"mm", MIXED),
        (b"ht", HUGETLB),
        (b"um", UFFD_MISSING),
        (b"uw", UFFD_PROTECT),
        (b"gd", GROWS_DOWN),
        (b"mg", MERGEABLE),
        (b"dp", DROPPABLE),
        (b"ss", SHADOW_STACK),
        (b"sl", SEALED),
        (b"sd", SOFT_DIRTY),
        (b"dd", DONT_DUMP),
        (b"rr", RANDOM),
    ];
}

/// The lowest address that a process may map by default (`vm.mmap_min_addr`).
const LOWEST: usize = 64 << 10;
/// Most bytes of an area's name that are kept.
pub const NAME_LEN_MAX: usize = 64;

/// One area (VMA).
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Vma {
    /// First byte.
    pub start: usize,
    /// First byte past it.
    pub end: usize,
    /// It may be read.
    pub readable: bool,
    /// It may be written.
    pub writable: bool,
    /// It may be executed.
    pub executable: bool,
    /// Writes stay in this process (MAP_PRIVATE).
    pub private: bool,
    /// Inode of the mapped file; 0 for none.
    pub inode: u64,
    name: [u8; NAME_LEN_MAX],
    name_len: u8,
}

impl Vma {
    /// Returns the length in bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.end - self.start
    }

    /// Returns the kernel's name for it: a path, `[heap]`, `[stack]`, `[anon:...]` or nothing; at
    /// most [`NAME_LEN_MAX`] bytes.
    pub fn name(&self) -> &[u8] {
        &self.name[..self.name_len as usize]
    }

    /// Returns whether it is private memory with no file behind it, by any name (heap, stack, plain
    /// `mmap`). `[vdso]`, `[vvar]` and similar areas belong to the kernel, and are not.
    pub fn is_private_anonymous(&self) -> bool {
        let name = self.name();
        let is_plain =
            name.is_empty() || name == b"[heap]" || self.is_stack() || name.starts_with(b"[anon:");
        self.private && self.inode == 0 && is_plain
    }

    /// Returns its access, as the flags of mprotect.
    pub fn access(&self) -> i32 {
        let bit = |is: bool, bit: i32| if is { bit } else { 0 };
        bit(self.readable, libc::PROT_READ)
            | bit(self.writable, libc::PROT_WRITE)
            | bit(self.executable, libc::PROT_EXEC)
    }

    /// Returns whether it is the main thread's stack.
    pub fn is_stack(&self) -> bool {
        self.name() == b"[stack]"
    }

    /// Parses a line such as `7f0-7f8 rw-p 00000000 00:00 0    [heap]`; `None` if it isn't one.
    fn parse(line: &[u8]) -> Option<Vma> {
        let mut fields = SplitWords { rest: line };
        let range = fields.next()?;
        let dash = range.iter().position(|&b| b == b'-')?;
        let (start, end) = (hex(&range[..dash])?, hex(&range[dash + 1..])?);
        let &[r, w, x, p] = fields.next()? else { return None };
        let inode = decimal(fields.nth(2)?)?;
        let path = fields.rest.trim_ascii_start();
        let mut area = Vma {
            start: start as usize,
            end: end as usize,
            readable: r == b'r',
            writable: w == b'w',
            executable: x == b'x',
            private: p == b'p',
            inode,
            name: [0; NAME_LEN_MAX],
            name_len: path.len().min(NAME_LEN_MAX) as u8,
        };
        let len = area.name_len as usize;
        area.name[..len].copy_from_slice(&path[..len]);
        Some(area)
    }
}

/// Details of an area from smaps, beyond [`Vma`].
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct SmapsDetails {
    /// Memory that is mapped, bytes.
    pub resident_bytes: usize,
    /// Of it, pages that belong to no file: also written ones of private file mappings, bytes.
    pub anonymous_bytes: usize,
    /// Memory in the kernel's swap, bytes.
    pub swapped_bytes: usize,
    /// Properties, from [`flag`].
    pub flags: u32,
}

impl SmapsDetails {
    /// Returns whether any of `flags` is set.
    pub fn has(&self, flags: u32) -> bool {
        self.flags & flags != 0
    }

    fn add(&mut self, line: &[u8]) {
        let mut fields = SplitWords { rest: line };
        let kib = |value: Option<&[u8]>| value.and_then(decimal).map_or(0, |n| n as usize * 1024);
        match fields.next() {
            Some(b"Rss:") => self.resident_bytes = kib(fields.next()),
            Some(b"Anonymous:") => self.anonymous_bytes = kib(fields.next()),
            Some(b"Swap:") => self.swapped_bytes = kib(fields.next()),
            Some(b"VmFlags:") => {
                for name in fields {
                    let known = flag::NAMES.iter().find(|(known, _)| known.as_slice() == name);
                    self.flags |= known.map_or(0, |(_, flag)| *flag);
                }
            }
            _ => {}
        }
    }
}

/// Calls `each` with every area in ascending order, until it breaks. Costs about a microsecond an
/// area.
///
/// # Errors
/// The errors of opening or reading: ENOENT without /proc.
pub fn each_area(each: impl FnMut(&Vma) -> ControlFlow<()>) -> Result<(), Errno> {
    each_area_in(&open(c"/proc/self/maps")?, each)
}

/// Calls `each` with the areas of an open map, from its present position on.
fn each_area_in(
    file: &OwnedFd,
    mut each: impl FnMut(&Vma) -> ControlFlow<()>,
) -> Result<(), Errno> {
    each_line(file, |line| match Vma::parse(line) {
        Some(area) => each(&area),
        None => ControlFlow::Continue(()),
    })
}

/// Returns an address at which `len` bytes are free, within `reach` bytes of the mapped range
/// `code`: the highest below it, or else the lowest above it. Returns `None` if there is none, or if
/// the map can't be read. Another thread may take the place.
pub fn free_near(len: usize, code: &Range<usize>, reach: usize) -> Option<usize> {
    let lowest = code.start.saturating_sub(reach).max(LOWEST);
    let highest = code.end.saturating_add(reach);
    let (mut free_from, mut below, mut above) = (lowest, None, None);
    let mut note = |free: Range<usize>| match free.len() >= len {
        true if free.end <= code.start => below = Some(free.end - len),
        true if above.is_none() => above = Some(free.start),
        _ => {}
    };
    each_area(|area| {
        note(free_from..area.start.min(highest));
        free_from = free_from.max(area.end);
        if area.end < highest { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })
    .ok()?;
    note(free_from..highest);
    below.or(above)
}

/// Returns the bounds, in bytes, of the private anonymous mapping that holds `addr`; `None` if
/// there is none, or if the map can't be read.
pub fn private_anonymous_at(addr: usize) -> Option<(usize, usize)> {
    let mut area_at = None;
    let _ = each_area(|area| {
        if area.start <= addr && addr < area.end && area.is_private_anonymous() {
            area_at = Some((area.start, area.end));
        }
        ControlFlow::Continue(())
    });
    area_at
}

/// Calls `each` with every area and its details in ascending order, until it breaks. The kernel
/// walks all page tables for it: about a millisecond for a gigabyte of small pages.
///
/// # Errors
/// The errors of [`each_area`].
pub fn each_detailed(
    each: impl FnMut(&Vma, &SmapsDetails) -> ControlFlow<()>,
) -> Result<(), Errno> {
    each_detailed_of(&open(c"/proc/self/smaps")?, each)
}

/// `/proc/self/smaps`, open.
pub struct Smaps(OwnFile);

impl Smaps {
    /// Opens the smaps of the calling process.
    ///
    /// # Errors
    /// The errors of `open`: ENOENT without /proc.
    pub fn open() -> Result<Smaps, Errno> {
        OwnFile::open(c"/proc/self/smaps").map(Smaps)
    }

    /// Opens its own smaps in a child of fork, in place of its parent's, under the same number.
    ///
    /// # Errors
    /// The errors of [`Smaps::open`]. There is none from then on.
    pub fn reopen(&self) -> Result<(), Errno> {
        self.0.reopen()
    }

    /// Calls `each` with every area and its details, as [`each_detailed`] does.
    ///
    /// # Errors
    /// The errors of reading; ENOENT where there is no file.
    pub fn each(
        &self,
        each: impl FnMut(&Vma, &SmapsDetails) -> ControlFlow<()>,
    ) -> Result<(), Errno> {
        let file = self.0.get().ok_or(Errno::NOENT)?;
        rustix::fs::seek(file, SeekFrom::Start(0))?;
        each_detailed_of(file, each)
    }
}

fn each_detailed_of(
    file: &OwnedFd,
    mut each: impl FnMut(&Vma, &SmapsDetails) -> ControlFlow<()>,
) -> Result<(), Errno> {
    let mut current: Option<(Vma, SmapsDetails)> = None;
    each_line(file, |line| {
        let Some(area) = Vma::parse(line) else {
            if let Some((_, details)) = &mut current {
                details.add(line);
            }
            return ControlFlow::Continue(());
        };
        match current.replace((area, SmapsDetails::default())) {
            Some((area, details)) => {
                let flow = each(&area, &details);
                if flow.is_break() {
                    current = None;
                }
                flow
            }
            None => ControlFlow::Continue(()),
        }
    })?;
    if let Some((area, details)) = current {
        let _ = each(&area, &details);
    }
    Ok(())
}

/// Calls `each` with every line of a file, without its end; a line longer than the buffer is cut
/// off.
fn each_line(file: &OwnedFd, mut each: impl FnMut(&[u8]) -> ControlFlow<()>) -> Result<(), Errno> {
    let mut buffer = [0u8; BUFFER_BYTES];
    let (mut len, mut cut_off) = (0, false);
    loop {
        let count = match rustix::io::read(file, &mut buffer[len..]) {
            Err(Errno::INTR) => continue,
            result => result?,
        };
        len += count;
        let mut at = 0;
        while let Some(end) = buffer[at..len].iter().position(|&b| b == b'\n') {
            // The rest of a line that was cut off is no line.
            if !core::mem::take(&mut cut_off) && each(&buffer[at..at + end]).is_break() {
                return Ok(());
            }
            at += end + 1;
        }
        if count == 0 {
            return Ok(());
        }
        buffer.copy_within(at..len, 0);
        len -= at;
        if len == buffer.len() {
            if !core::mem::replace(&mut cut_off, true) && each(&buffer).is_break() {
                return Ok(());
            }
            len = 0;
        }
    }
}

/// Words separated by spaces.
struct SplitWords<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for SplitWords<'a> {
    type Item = &'a [u8];
    fn next(&mut self) -> Option<&'a [u8]> {
        let text = self.rest.trim_ascii_start();
        let end = text.iter().position(|&b| b == b' ').unwrap_or(text.len());
        let (word, rest) = text.split_at(end);
        self.rest = rest;
        (!word.is_empty()).then_some(word)
    }
}

fn hex(digits: &[u8]) -> Option<u64> {
    number(digits, 16)
}
fn decimal(digits: &[u8]) -> Option<u64> {
    number(digits, 10)
}
fn number(digits: &[u8], base: u32) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0u64, |sum, &digit| {
        let digit = (digit as char).to_digit(base)?;
        sum.checked_mul(base as u64)?.checked_add(digit as u64)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::PAGE_SIZE;
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

    #[test]
    fn lines_are_read_as_the_kernel_writes_them() {
        let heap = Vma::parse(
            b"55d0c1a2e000-55d0c1a4f000 rw-p 00000000 00:00 0                          [heap]",
        );
        let heap = heap.unwrap();
        assert_eq!(
            (heap.start, heap.len(), heap.name()),
            (0x55d0c1a2e000, 0x21000, b"[heap]".as_slice())
        );
        assert!(heap.readable && heap.writable && !heap.executable && heap.is_private_anonymous());
        let file = Vma::parse(b"7f1-7f2 r-xs 00001000 fe:01 1234    /tmp/a b (deleted)").unwrap();
        assert_eq!((file.name(), file.inode), (b"/tmp/a b (deleted)".as_slice(), 1234));
        assert!(file.executable && !file.private && !file.is_private_anonymous());
        let area_plain = Vma::parse(b"7f1-7f2 rw-p 00000000 00:00 0 ").unwrap();
        assert!(area_plain.name().is_empty() && area_plain.is_private_anonymous());
        let area_named =
            Vma::parse(b"7f1-7f2 rw-p 00000000 00:00 0    [anon:glibc: malloc]").unwrap();
        assert!(area_named.is_private_anonymous());
        let vvar = Vma::parse(b"7f1-7f2 r--p 00000000 00:00 0    [vvar]").unwrap();
        assert!(!vvar.is_private_anonymous());
        for bad in
            [b"Rss:  4 kB".as_slice(), b"", b"7f1-7f2", b"x-y rw-p 0 0 0", b"1-2 rw 0 00:00 0"]
        {
            assert_eq!(Vma::parse(bad), None);
        }
    }

    #[test]
    fn areas_come_in_order_and_hold_this_stack() {
        let mut ours = Vec::new();
        each_area(|area| {
            ours.push((area.start, area.end));
            ControlFlow::Continue(())
        })
        .unwrap();
        assert!(ours.len() > 10 && ours.windows(2).all(|pair| pair[0].1 <= pair[1].0));
        let address = &ours as *const _ as usize;
        assert!(ours.iter().any(|&(start, end)| (start..end).contains(&address)));
        let mut count = 0;
        each_area(|_| {
            count += 1;
            if count == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
        .unwrap();
        assert_eq!(count, 3);
    }

    #[test]
    fn details_tell_what_may_not_be_adopted() {
        let len = 4 * PAGE_SIZE;
        let marks =
            [(libc::MADV_DONTFORK, flag::DONT_FORK), (libc::MADV_WIPEONFORK, flag::WIPE_ON_FORK)];
        for (advice, expected) in marks {
            // SAFETY: this test's fresh mapping is written and advised within its length, then
            // unmapped.
            let (area, at) = unsafe {
                let access = ProtFlags::READ | ProtFlags::WRITE;
                let at =
                    mmap_anonymous(core::ptr::null_mut(), len, access, MapFlags::PRIVATE).unwrap();
                at.cast::<u8>().write_bytes(1, 2 * PAGE_SIZE);
                assert_eq!(libc::madvise(at, len, advice), 0);
                (find(at as usize), at)
            };
            let (area, details) = area.unwrap();
            assert!(details.has(expected) && area.is_private_anonymous(), "{details:?}");
            assert!(
                details.resident_bytes >= 2 * PAGE_SIZE && details.resident_bytes <= area.len()
            );
            // SAFETY: the mapping made above is not used any more.
            unsafe { rustix::mm::munmap(at, len).unwrap() };
            assert!(find(at as usize).is_none_or(|(_, details)| !details.has(expected)));
        }
        let byte = 0u8;
        assert!(!find(&raw const byte as usize).unwrap().1.has(flag::LOCKED | flag::IO));
    }

    fn find(address: usize) -> Option<(Vma, SmapsDetails)> {
        let mut entry = None;
        each_detailed(|area, details| {
            if (area.start..area.end).contains(&address) {
                entry = Some((*area, *details));
                return ControlFlow::Break(());
            }
            ControlFlow::Continue(())
        })
        .unwrap();
        entry
    }

    /// The kernel itself maps nothing at these addresses.
    #[test]
    fn free_place_is_the_nearest_below_code_or_above_it() {
        const START: usize = 0x2345_0000_0000;
        let place = |page: usize| START + page * PAGE_SIZE;
        let map = |page: usize| {
            let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
            let (at, access) = (place(page) as *mut _, ProtFlags::empty());
            // SAFETY: the kernel replaces no mapping with this flag.
            unsafe { mmap_anonymous(at, PAGE_SIZE, access, flags).unwrap() }
        };
        // Pages 4 and 5 hold the code.
        let pages = [1, 2, 4, 5, 7].map(map);
        let near = |pages: usize, reach: usize| {
            free_near(pages * PAGE_SIZE, &(place(4)..place(6)), reach * PAGE_SIZE)
        };
        assert_eq!(near(1, 2), Some(place(3)));
        assert_eq!(near(2, 4), Some(place(8)));
        assert_eq!(near(2, 3), None);
        for page in pages {
            // SAFETY: nothing uses the page.
            unsafe { rustix::mm::munmap(page, PAGE_SIZE).unwrap() };
        }
    }
}
