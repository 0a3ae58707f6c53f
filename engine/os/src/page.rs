//! Whole pages as a type. A device that bypasses the page cache (O_DIRECT) reads and writes them,
//! and blocks are decoded to them.
use crate::units::{Order, PAGE_SIZE};
use alloc::boxed::Box;

/// One page. A `*mut Page` is page-aligned; [`Page::at`] makes one of an address.
#[repr(C, align(4096))]
pub struct Page([u8; PAGE_SIZE]);

const _: () = assert!(align_of::<Page>() == PAGE_SIZE && size_of::<Page>() == PAGE_SIZE);

impl Page {
    /// Returns the page that begins at `byte`.
    ///
    /// # Panics
    /// If `byte` is not the start of a page.
    pub fn at(byte: *mut u8) -> *mut Page {
        assert!(Page::begins_at(byte), "{byte:p} is not where a page begins");
        byte.cast()
    }

    /// Returns whether a page begins at `byte`.
    pub fn begins_at(byte: *const u8) -> bool {
        byte.addr().is_multiple_of(PAGE_SIZE)
    }
}

/// Whole pages on the heap, zeros at first.
pub struct PageBuffer(Box<[Page]>);

impl PageBuffer {
    /// Makes room for a block of `order`.
    pub fn new(order: Order) -> PageBuffer {
        PageBuffer::of_pages(order.pages())
    }

    /// Makes room for so many pages.
    pub fn of_pages(count: usize) -> PageBuffer {
        // SAFETY: zeros are a valid value of every byte of a page.
        PageBuffer(unsafe { Box::new_zeroed_slice(count).assume_init() })
    }

    /// Returns its bytes.
    #[allow(clippy::len_without_is_empty)] // It never is.
    pub fn len(&self) -> usize {
        self.0.len() * PAGE_SIZE
    }

    /// Returns the first page.
    pub fn pages_mut(&mut self) -> *mut Page {
        self.0.as_mut_ptr()
    }

    /// Returns the first byte.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }

    /// Returns the first byte.
    pub fn as_ptr(&self) -> *const u8 {
        self.0.as_ptr().cast()
    }

    /// Returns all bytes, for reading.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the buffer has so many bytes, initialised, borrowed as long as it is.
        unsafe { core::slice::from_raw_parts(self.as_ptr(), self.len()) }
    }

    /// Returns all bytes, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the buffer has so many bytes, initialised, mutably borrowed as long as it is.
        unsafe { core::slice::from_raw_parts_mut(self.as_mut_ptr(), self.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_begins_where_a_page_begins() {
        let orders: std::vec::Vec<PageBuffer> =
            (0..=9).map(|order| PageBuffer::new(Order::new(order).unwrap())).collect();
        for (mut buffer, order) in orders.into_iter().zip(0..) {
            let first = buffer.pages_mut();
            assert_eq!((Page::at(first.cast()), buffer.len()), (first, PAGE_SIZE << order));
            assert!(buffer.bytes().iter().all(|byte| *byte == 0));
        }
    }

    #[test]
    #[should_panic(expected = "is not where a page begins")]
    fn unaligned_addresses_are_no_pages() {
        let mut buffer = PageBuffer::new(Order::PAGE);
        Page::at(buffer.bytes_mut()[16..].as_mut_ptr());
    }
}
