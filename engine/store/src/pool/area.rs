//! Areas: parts of a shared zone, and tables of plain records in them.
use alloc::sync::Arc;
use core::marker::PhantomData;
use memfold_os::memory::zone::{Zone, ZoneEdge};
use memfold_os::units::PAGE_SIZE;

/// A part of a zone, which stays mapped while one of its areas lives.
pub(crate) struct ZoneArea {
    zone: Arc<Zone>,
    offset: usize,
    len: usize,
    edge: ZoneEdge,
}

impl ZoneArea {
    /// # Panics
    /// If the range is not page-aligned or reaches past the zone.
    pub fn new(zone: &Arc<Zone>, offset: usize, len: usize) -> ZoneArea {
        assert!(offset.is_multiple_of(PAGE_SIZE) && len.is_multiple_of(PAGE_SIZE));
        assert!(offset.checked_add(len).is_some_and(|end| end <= zone.len()));
        ZoneArea { zone: zone.clone(), offset, len, edge: ZoneEdge::new() }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the byte at `offset`.
    ///
    /// # Panics
    /// If `offset` lies past the area.
    #[inline]
    pub fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset < self.len);
        // SAFETY: the area lies in the zone's mapping, and `offset` in the area.
        unsafe { self.zone.as_ptr().add(self.offset + offset) }
    }

    /// Prepares the first `end` bytes to be written. Returns `false` if the system promises no more
    /// memory.
    #[inline]
    pub fn need(&self, end: usize) -> bool {
        self.zone.need(&self.edge, self.offset, self.len, end).is_ok()
    }

    /// Populates the memory of a part at once.
    pub fn populate(&self, offset: usize, len: usize) {
        assert!(offset + len <= self.len);
        self.zone.populate(self.offset + offset, len);
    }

    /// Returns the pages of a part to the kernel.
    ///
    /// # Safety
    /// - The bytes there are no longer needed, and no thread accesses them meanwhile.
    pub unsafe fn release(&self, offset: usize, len: usize) {
        assert!(offset + len <= self.len);
        // SAFETY: the range lies in this area of the zone, and the caller gives up its bytes.
        unsafe { self.zone.release(self.offset + offset, len) }
    }
}

/// Records that may be made of zero bytes and change only through atomics.
///
/// # Safety
/// - All bytes zero is a valid value, the type has no destructor, and it is at most page-aligned.
pub(crate) unsafe trait ZoneRecord: Sync {}

// SAFETY: two atomics, valid as zeros, without destructor, 16-aligned.
unsafe impl ZoneRecord for crate::pool::entry::ObjectEntry {}

/// An array of records that fills an area and takes memory only where it is touched.
pub(crate) struct AreaTable<T: ZoneRecord> {
    area: ZoneArea,
    records: PhantomData<T>,
}

impl<T: ZoneRecord> AreaTable<T> {
    pub fn new(area: ZoneArea) -> AreaTable<T> {
        AreaTable { area, records: PhantomData }
    }

    /// Returns how many records fit.
    pub fn capacity(&self) -> usize {
        self.area.len() / size_of::<T>()
    }

    /// Returns record `index`, or `None` past the end.
    #[inline]
    pub fn get(&self, index: u32) -> Option<&T> {
        if index as usize >= self.capacity() {
            return None;
        }
        let record = self.area.at(index as usize * size_of::<T>()).cast::<T>();
        // SAFETY: the record lies in the area, is aligned (the area starts on a page, and the
        // type's alignment divides its size), is valid as `ZoneRecord` promises (the zone starts as
        // zeros and only `&T` are ever handed out), and the zone outlives `self`.
        Some(unsafe { &*record })
    }

    /// Prepares the first `count` records to be changed. Returns `false` if the system promises no
    /// more memory.
    pub fn need(&self, count: u32) -> bool {
        self.area.need((count as usize * size_of::<T>()).min(self.area.len()))
    }

    /// Returns the bytes of the pages of the first `count` records.
    pub fn bytes(count: u32) -> u64 {
        (count as usize * size_of::<T>()).next_multiple_of(PAGE_SIZE) as u64
    }
}
