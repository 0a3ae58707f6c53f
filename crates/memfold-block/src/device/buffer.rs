//! Page-aligned memory, as the store wants it.
use memfold_sys::units::{Order, PAGE_SIZE};

#[repr(C, align(4096))]
#[derive(Copy, Clone)]
struct Page([u8; PAGE_SIZE]);

/// Bytes of whole pages, page-aligned.
pub(crate) struct Pages(Box<[Page]>);

impl Pages {
    pub fn new(order: Order) -> Pages {
        Pages(vec![Page([0; PAGE_SIZE]); order.pages()].into_boxed_slice())
    }

    pub fn bytes(&mut self) -> &mut [u8] {
        self.0.as_flattened_mut_bytes()
    }
}

/// A slice of pages as bytes.
trait Flatten {
    fn as_flattened_mut_bytes(&mut self) -> &mut [u8];
}

impl Flatten for [Page] {
    fn as_flattened_mut_bytes(&mut self) -> &mut [u8] {
        let (start, len) = (self.as_mut_ptr().cast::<u8>(), size_of_val(self));
        // SAFETY: a page is an array of bytes without padding (its size is its alignment), so the slice is `len`
        // initialised bytes, borrowed mutably as long as the result is.
        unsafe { core::slice::from_raw_parts_mut(start, len) }
    }
}

const _: () = assert!(size_of::<Page>() == PAGE_SIZE);

/// Whether bytes begin at a page boundary.
pub(crate) fn is_aligned(bytes: &[u8]) -> bool {
    bytes.as_ptr().addr().is_multiple_of(PAGE_SIZE)
}
