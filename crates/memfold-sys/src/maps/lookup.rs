//! `PROCMAP_QUERY`: the areas at some addresses, without reading the whole map (Linux 6.11,
//! `include/uapi/linux/fs.h`).
use crate::Errno;
use crate::maps::each_area;
use crate::maps::own::OwnFile;
use crate::raw::ioctl;
use core::ops::ControlFlow;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags};

const PROCMAP_QUERY: u64 = 0xc068_6611;
const COVERING_OR_NEXT: u64 = 0x10;
const READABLE: u64 = 0x01;
const WRITABLE: u64 = 0x02;
const EXECUTABLE: u64 = 0x04;
/// Bits as mprotect's.
const _: () = assert!(libc::PROT_READ as u64 == READABLE && libc::PROT_WRITE as u64 == WRITABLE);
const _: () = assert!(libc::PROT_EXEC as u64 == EXECUTABLE);
const SHARED: u64 = 0x08;

#[repr(C)]
#[derive(Default)]
struct Query {
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

/// `/proc/self/maps`, open for questions about single addresses (Linux 6.11).
pub struct Maps {
    file: OwnFile,
}

/// An area, as far as [`Maps`] tells.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// First byte.
    pub start: usize,
    /// First byte past it.
    pub end: usize,
    /// Private, and without a file.
    pub anonymous: bool,
    /// It may be read and written, and not executed.
    pub plain: bool,
    /// What may be done there, as mprotect is told.
    pub access: i32,
}

impl Maps {
    /// Opens the calling process's.
    ///
    /// # Errors
    /// What `open` says; ENOTTY before Linux 6.11.
    pub fn open() -> Result<Maps, Errno> {
        let file = OwnFile::open(c"/proc/self/maps")?;
        next(file.fd(), 0)?;
        Ok(Maps { file })
    }

    /// The same under a number from `least` on.
    ///
    /// # Errors
    /// EMFILE: there is none free.
    pub fn at_least(self, least: i32) -> Result<Maps, Errno> {
        Ok(Maps { file: self.file.at_least(least)? })
    }

    /// The descriptor.
    pub fn fd(&self) -> &OwnedFd {
        self.file.fd()
    }

    /// In a child of fork: opens its own in place of its parent's, under the same number.
    ///
    /// # Errors
    /// As [`Maps::open`]. From then on it answers nothing.
    pub fn reopen(&self) -> Result<(), Errno> {
        self.file.reopen()
    }

    /// Calls `each` with every area of which something is in `[start, end)`, in ascending order.
    ///
    /// # Errors
    /// What the kernel says; NOENT in a child of fork that could not open its own.
    pub fn each(&self, start: usize, end: usize, mut each: impl FnMut(Found)) -> Result<(), Errno> {
        let file = self.file.get().ok_or(Errno::NOENT)?;
        let mut at = start;
        while at < end {
            let area = match next(file, at) {
                Ok(area) if (area.area_start as usize) < end => area,
                Ok(_) | Err(Errno::NOENT) => return Ok(()),
                Err(e) => return Err(e),
            };
            at = area.area_end as usize;
            let access = area.area_flags & (READABLE | WRITABLE | EXECUTABLE);
            each(Found {
                start: area.area_start as usize,
                end: at,
                anonymous: area.area_flags & SHARED == 0 && area.inode == 0,
                plain: access == READABLE | WRITABLE,
                // The bits are the same.
                access: access as i32,
            });
        }
        Ok(())
    }
}

/// Calls `each(start, end)` for every area of private memory without a file of which something is
/// in `ranges`, in ascending order; `ranges` (addresses) are in ascending order too, and none
/// overlap. Costs less than a microsecond each; before Linux 6.11 the whole map is read.
///
/// # Errors
/// What opening or reading /proc/self/maps says.
pub fn each_private_area(
    ranges: &[(usize, usize)],
    mut each: impl FnMut(usize, usize),
) -> Result<(), Errno> {
    let file =
        rustix::fs::open(c"/proc/self/maps", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut done = 0;
    for &(start, end) in ranges {
        let mut at = start.max(done);
        while at < end {
            let area = match next(&file, at) {
                Ok(area) if (area.area_start as usize) < end => area,
                Ok(_) | Err(Errno::NOENT) => break,
                Err(Errno::NOTTY) => return each_by_map(ranges, each),
                Err(e) => return Err(e),
            };
            (at, done) = (area.area_end as usize, area.area_end as usize);
            if area.area_flags & SHARED == 0 && area.inode == 0 {
                each(area.area_start as usize, area.area_end as usize);
            }
        }
    }
    Ok(())
}

/// Whether the kernel answers such questions.
///
/// # Errors
/// What opening /proc/self/maps says; ENOTTY before Linux 6.11.
pub fn probe() -> Result<(), Errno> {
    let file =
        rustix::fs::open(c"/proc/self/maps", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    next(&file, 0).map(drop)
}

/// The area at an address, or the next after it.
fn next(file: &OwnedFd, at: usize) -> Result<Query, Errno> {
    let mut query = Query {
        size: size_of::<Query>() as u64,
        flags: COVERING_OR_NEXT,
        addr: at as u64,
        ..Query::default()
    };
    // SAFETY: `query` is local, outlives the call, and states its size; it names no buffers.
    unsafe { ioctl(file.as_raw_fd(), PROCMAP_QUERY, (&raw mut query).cast())? };
    Ok(query)
}

fn each_by_map(ranges: &[(usize, usize)], mut each: impl FnMut(usize, usize)) -> Result<(), Errno> {
    each_area(|area| {
        let after = ranges.get(ranges.partition_point(|range| range.1 <= area.start));
        if after.is_some_and(|range| range.0 < area.end) && area.private && area.inode == 0 {
            each(area.start, area.end);
        }
        ControlFlow::Continue(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::zone::{SharedZone, Zone};
    use crate::units::PAGE_SIZE;

    #[test]
    fn both_ways_find_the_private_areas_of_ranges() {
        let zones: Vec<Zone> =
            (0..3).map(|_| Zone::reserve(4 * PAGE_SIZE, 1 << 20).unwrap()).collect();
        let shared = SharedZone::reserve(PAGE_SIZE).unwrap();
        let mut ranges: Vec<(usize, usize)> =
            zones.iter().map(|z| (z.start() + PAGE_SIZE, z.start() + z.len())).collect();
        ranges.push((shared.as_ptr() as usize, shared.as_ptr() as usize + PAGE_SIZE));
        let first = ranges[0].0;
        ranges.push((first - PAGE_SIZE, first));
        ranges.sort_unstable();
        let (mut asked, mut read) = (Vec::new(), Vec::new());
        each_private_area(&ranges, |start, end| asked.push((start, end))).unwrap();
        each_by_map(&ranges, |start, end| read.push((start, end))).unwrap();
        assert_eq!(asked, read);
        for zone in &zones {
            let holds =
                |&&(start, end): &&(usize, usize)| start <= zone.start() && zone.start() < end;
            assert_eq!(asked.iter().filter(holds).count(), 1, "once, though two ranges are in it");
        }
        assert!(
            !asked.iter().any(|&(start, end)| (start..end).contains(&(shared.as_ptr() as usize)))
        );
        each_private_area(&[], |_, _| panic!("nothing was asked for")).unwrap();
        each_private_area(&[(usize::MAX - (1 << 20), usize::MAX)], |_, _| {
            panic!("nothing is there")
        })
        .unwrap();
    }
}
