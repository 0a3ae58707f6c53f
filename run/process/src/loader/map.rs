//! Maps the segments of a program, as the kernel does (`fs/binfmt_elf.c`, `elf_load`).
use crate::loader::image::{ProgramImage, Segment};
use core::ffi::c_void;
use core::ptr::write_bytes;
use memfold_os::Errno;
use memfold_os::units::PAGE_SIZE;
use rustix::fd::{AsFd, BorrowedFd};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

/// Maps an image, and returns the distance of its addresses from those in the file.
///
/// # Errors
/// EEXIST: its addresses are taken. Other errors of mmap.
pub fn map(image: &ProgramImage, file: impl AsFd) -> Result<usize, Errno> {
    let start = reserve(image)?;
    let bias = start.wrapping_sub(image.pages().start);
    let mut free = start;
    for segment in image.segments() {
        let pages = segment.pages();
        let [first, end] = [pages.start, pages.end].map(|at| at.wrapping_add(bias));
        // SAFETY: the gap before the segment is part of the reservation, which nothing uses.
        unsafe { unmap(free, first)? };
        // SAFETY: the pages of the segment are part of the reservation, which nothing uses.
        unsafe { place(segment, bias, file.as_fd())? };
        free = end;
    }
    Ok(bias)
}

/// Reserves the addresses of an image. Returns the first one.
fn reserve(image: &ProgramImage) -> Result<usize, Errno> {
    let pages = image.pages();
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    let take = |at: usize, len: usize, flags| {
        // SAFETY: without MAP_FIXED the kernel replaces no mapping.
        unsafe { mmap_anonymous(at as *mut c_void, len, ProtFlags::empty(), flags) }
    };
    if image.is_fixed {
        let at = take(pages.start, pages.len(), flags | MapFlags::FIXED_NOREPLACE)?;
        return Ok(at as usize);
    }
    let more = image.align - PAGE_SIZE;
    let len = pages.len().checked_add(more).ok_or(Errno::NOMEM)?;
    let at = take(0, len, flags)? as usize;
    // Addresses in the file may begin in the middle of an aligned block.
    let bias = at.wrapping_sub(pages.start).next_multiple_of(image.align);
    let start = bias.wrapping_add(pages.start);
    // SAFETY: both ends are part of the reservation, which nothing uses.
    unsafe {
        unmap(at, start)?;
        unmap(start + pages.len(), at + len)?;
    }
    Ok(start)
}

/// # Safety
/// - Nothing uses the addresses.
unsafe fn unmap(start: usize, end: usize) -> Result<(), Errno> {
    match end.saturating_sub(start) {
        0 => Ok(()),
        // SAFETY: the caller promises that nothing uses them.
        len => unsafe { munmap(start as *mut c_void, len) },
    }
}

/// Maps a segment: the file's part, and zeros behind it.
///
/// # Safety
/// - Nothing uses the addresses of the segment's pages.
unsafe fn place(segment: &Segment, bias: usize, file: BorrowedFd<'_>) -> Result<(), Errno> {
    let pages = segment.pages();
    let skew = segment.at - pages.start;
    let (start, end) = (pages.start.wrapping_add(bias), pages.end.wrapping_add(bias));
    let file_end = start + skew + segment.file_bytes;
    let zeros = match segment.file_bytes {
        0 => start,
        _ => file_end.next_multiple_of(PAGE_SIZE),
    };
    let flags = MapFlags::PRIVATE | MapFlags::FIXED;
    if segment.file_bytes > 0 {
        let offset = segment.offset - skew as u64;
        let len = skew + segment.file_bytes;
        // SAFETY: the caller promises that nothing uses these addresses.
        unsafe { mmap(start as *mut c_void, len, segment.access, flags, file, offset) }?;
        if segment.access.contains(ProtFlags::WRITE) && segment.memory_bytes > segment.file_bytes {
            // SAFETY: the rest of the last page of the file's part is mapped and writable.
            unsafe { write_bytes(file_end as *mut u8, 0, zeros - file_end) };
        }
    }
    if zeros < end {
        // SAFETY: the caller promises that nothing uses these addresses.
        unsafe { mmap_anonymous(zeros as *mut c_void, end - zeros, segment.access, flags) }?;
    }
    Ok(())
}

/// Makes the relocated part of this library read-only, as a dynamic linker does.
pub fn protect_own_relocations() {
    let Some(segments) = memfold_gate::image::segments() else { return };
    let relro = segments.iter().find(|each| each.p_type == elf::abi::PT_GNU_RELRO);
    let Some(relro) = relro else { return };
    let start = memfold_gate::image::start() + relro.p_vaddr as usize;
    let end = (start + relro.p_memsz as usize) & !(PAGE_SIZE - 1);
    let (start, access) = (start & !(PAGE_SIZE - 1), rustix::mm::MprotectFlags::READ);
    // SAFETY: the linker keeps apart from it what is written to after relocation. A failure leaves
    // it writable, which is harmless.
    let _ = unsafe { rustix::mm::mprotect((start as *mut u8).cast(), end - start, access) };
}
