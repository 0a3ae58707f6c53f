//! Page units: the page size and the order of a folio or block.

/// Bits of a byte offset within a page.
pub const PAGE_SHIFT: u32 = 12;
/// Bytes in a page.
pub const PAGE_SIZE: usize = 1 << PAGE_SHIFT;
/// The largest order of a folio: 2^9 pages, 2 MiB.
pub const MAX_ORDER: u8 = 9;
/// Pages in a folio of the largest order.
pub const MAX_PAGES: usize = 1 << MAX_ORDER;
/// Bytes in a folio of the largest order: 2 MiB.
pub const MAX_BYTES: usize = MAX_PAGES * PAGE_SIZE;

/// The order of a folio or block: it spans `2^order` pages. Always within `0..=MAX_ORDER`.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Order(u8);

impl Order {
    /// Order 0: one page.
    pub const PAGE: Order = Order(0);
    /// The largest order, 2 MiB.
    pub const MAX: Order = Order(MAX_ORDER);

    /// Makes the order `n`; returns `None` above [`MAX_ORDER`].
    pub const fn new(n: u8) -> Option<Order> {
        if n <= MAX_ORDER { Some(Order(n)) } else { None }
    }

    /// Returns the smallest order that holds `bytes` bytes, or `None` above 2 MiB.
    pub const fn covering(bytes: usize) -> Option<Order> {
        let pages = bytes.div_ceil(PAGE_SIZE);
        if pages == 0 || pages > MAX_PAGES {
            return None;
        }
        Some(Order(pages.next_power_of_two().trailing_zeros() as u8))
    }

    /// Returns the number itself, `0..=9`.
    pub const fn get(self) -> u8 {
        self.0
    }

    /// Returns the pages in a folio of this order.
    pub const fn pages(self) -> usize {
        1 << self.0
    }

    /// Returns the bytes in a folio of this order.
    pub const fn bytes(self) -> usize {
        PAGE_SIZE << self.0
    }

    /// Returns the order below, or `None` at order 0.
    pub const fn smaller(self) -> Option<Order> {
        if self.0 == 0 { None } else { Some(Order(self.0 - 1)) }
    }

    /// Returns the order above, or `None` at [`Order::MAX`].
    pub const fn larger(self) -> Option<Order> {
        Order::new(self.0 + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn covering_picks_the_smallest_order() {
        assert_eq!(Order::covering(1), Order::new(0));
        assert_eq!(Order::covering(4096), Order::new(0));
        assert_eq!(Order::covering(4097), Order::new(1));
        assert_eq!(Order::covering(65536), Order::new(4));
        assert_eq!(Order::covering(MAX_BYTES), Some(Order::MAX));
        assert_eq!(Order::covering(MAX_BYTES + 1), None);
        assert_eq!(Order::covering(0), None);
    }
}
