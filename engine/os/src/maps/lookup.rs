//! `PROCMAP_QUERY` (Linux 6.11, `include/uapi/linux/fs.h`): the areas at some addresses, without
//! reading the whole map. Older kernels need the whole map.
use crate::Errno;
use crate::maps::own::OwnFile;
use crate::maps::{Vma, each_area_in};
use crate::raw::ioctl;
use crate::sync::Mutex;
use core::ops::ControlFlow;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags, SeekFrom};

const PROCMAP_QUERY: u64 = 0xc068_6611;
const COVERING_OR_NEXT: u64 = 0x10;
const READABLE: u64 = 0x01;
const WRITABLE: u64 = 0x02;
const EXECUTABLE: u64 = 0x04;
/// The bits are those of mprotect.
const _: () = assert!(libc::PROT_READ as u64 == READABLE && libc::PROT_WRITE as u64 == WRITABLE);
const _: () = assert!(libc::PROT_EXEC as u64 == EXECUTABLE);
const SHARED: u64 = 0x08;

#[repr(C)]
#[derive(Default)]
struct MapsQuery {
    size: u64,
    flags: u64,
    addr: u64,
    area_start: u64,
    area_end: u64,
    area_flags: u64,
    page_size: u64,
    offset: u64,
    inode: u64,
    device: [u32; 2],
    name_size: u32,
    build_id_size: u32,
    name_addr: u64,
    build_id_addr: u64,
}

/// `/proc/self/maps`, open for queries of single addresses.
pub struct Maps {
    file: OwnFile,
    /// Locked while the map is read as text, because the file has one position.
    reading: Mutex<()>,
}

/// An area, as [`Maps`] reports it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct FoundVma {
    /// First byte.
    pub start: usize,
    /// First byte past it.
    pub end: usize,
    /// Private memory without a file.
    pub anonymous: bool,
    /// Its access, as the flags of mprotect.
    pub access: i32,
}

impl Maps {
    /// Opens the map of the calling process.
    ///
    /// # Errors
    /// The errors of `open`: ENOENT without /proc.
    pub fn open() -> Result<Maps, Errno> {
        Ok(Maps { file: OwnFile::open(c"/proc/self/maps")?, reading: Mutex::new(()) })
    }

    /// Moves the descriptor to a number from `least` on.
    ///
    /// # Errors
    /// EMFILE: no number is free.
    pub fn at_least(self, least: i32) -> Result<Maps, Errno> {
        Ok(Maps { file: self.file.at_least(least)?, ..self })
    }

    /// Returns the descriptor.
    pub fn fd(&self) -> &OwnedFd {
        self.file.fd()
    }

    /// Opens its own map in a child of fork, in place of its parent's, under the same number.
    ///
    /// # Errors
    /// The errors of [`Maps::open`]. It answers no query from then on.
    ///
    /// # Safety
    /// - The caller is the only thread.
    pub unsafe fn reopen(&self) -> Result<(), Errno> {
        // SAFETY: by the caller's promise no thread of this process holds it.
        unsafe { self.reading.reset() };
        self.file.reopen()
    }

    /// Forgets that a thread reads, because all threads that could have ended.
    ///
    /// # Safety
    /// - No other living thread uses it.
    pub unsafe fn forget_readers(&self) {
        // SAFETY: by the caller's promise no living thread holds it.
        unsafe { self.reading.reset() };
    }

    /// Calls `each` with every area that overlaps `[start, end)`, in ascending order. `each` must
    /// not call this.
    ///
    /// # Errors
    /// The kernel's; NOENT in a child of fork that could not open its own map.
    pub fn each(
        &self,
        start: usize,
        end: usize,
        mut each: impl FnMut(FoundVma),
    ) -> Result<(), Errno> {
        let file = self.file.get().ok_or(Errno::NOENT)?;
        let mut at = start;
        while at < end {
            let area = match next(file, at) {
                Ok(area) if (area.area_start as usize) < end => area,
                Ok(_) | Err(Errno::NOENT) => return Ok(()),
                Err(Errno::NOTTY) => return self.each_as_text(file, at, end, each),
                Err(e) => return Err(e),
            };
            at = area.area_end as usize;
            let access = area.area_flags & (READABLE | WRITABLE | EXECUTABLE);
            each(FoundVma {
                start: area.area_start as usize,
                end: at,
                anonymous: area.area_flags & SHARED == 0 && area.inode == 0,
                // The bits are those of mprotect.
                access: access as i32,
            });
        }
        Ok(())
    }

    /// Calls `each` with these areas by reading the whole map.
    fn each_as_text(
        &self,
        file: &OwnedFd,
        start: usize,
        end: usize,
        mut each: impl FnMut(FoundVma),
    ) -> Result<(), Errno> {
        let _alone = self.reading.lock();
        rustix::fs::seek(file, SeekFrom::Start(0))?;
        each_area_in(file, |area| {
            if area.start >= end {
                return ControlFlow::Break(());
            }
            if area.end > start {
                each(found(area));
            }
            ControlFlow::Continue(())
        })
    }
}

fn found(area: &Vma) -> FoundVma {
    let access = area.access();
    FoundVma {
        start: area.start,
        end: area.end,
        anonymous: area.private && area.inode == 0,
        access,
    }
}

/// Returns whether the kernel supports these queries.
///
/// # Errors
/// The errors of opening /proc/self/maps; ENOTTY before Linux 6.11.
pub fn probe() -> Result<(), Errno> {
    let file =
        rustix::fs::open(c"/proc/self/maps", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    next(&file, 0).map(drop)
}

/// Returns the area at an address, or the next one.
fn next(file: &OwnedFd, at: usize) -> Result<MapsQuery, Errno> {
    let mut query = MapsQuery {
        size: size_of::<MapsQuery>() as u64,
        flags: COVERING_OR_NEXT,
        addr: at as u64,
        ..MapsQuery::default()
    };
    // SAFETY: `query` is local, outlives the call, and states its size; it names no buffers.
    unsafe { ioctl(file.as_raw_fd(), PROCMAP_QUERY, (&raw mut query).cast())? };
    Ok(query)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::zone::Zone;
    use crate::raw::system_call;
    use crate::units::PAGE_SIZE;

    #[test]
    fn a_map_that_is_read_as_text_tells_the_same() {
        // Mappings of other tests beside it can't join with the areas inside.
        let zone = Zone::reserve(4 * PAGE_SIZE, PAGE_SIZE).unwrap();
        let hole = zone.start() + PAGE_SIZE;
        let access = [hole, 2 * PAGE_SIZE, libc::PROT_READ as usize, 0, 0, 0];
        // SAFETY: the range is in the zone, which no thread touches.
        unsafe { system_call(libc::SYS_mprotect, access) }.unwrap();
        let maps = Maps::open().unwrap();
        let code = a_map_that_is_read_as_text_tells_the_same as *const () as usize;
        for at in [code, hole, hole + PAGE_SIZE] {
            let (mut by_ioctl, mut by_text) = (Vec::new(), Vec::new());
            maps.each(at, at + 1, |mapping| by_ioctl.push(mapping)).unwrap();
            let file = maps.file.get().unwrap();
            for _ in 0..2 {
                by_text.clear();
                maps.each_as_text(file, at, at + 1, |mapping| by_text.push(mapping)).unwrap();
                assert!(by_ioctl == by_text && by_ioctl.len() == 1, "{by_ioctl:?} {by_text:?}");
            }
        }
    }
}
