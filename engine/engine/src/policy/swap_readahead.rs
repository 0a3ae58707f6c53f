//! Readahead for the slow tier (C6): how much to read beside a random touch of a block in the swap
//! file.
//!
//! Each region of 2 MiB has a window. It doubles if a block that was read ahead there was used
//! since the last touch, and halves otherwise. It lies in the direction in which the touches of the
//! region move. Streams have windows of their own ([`crate::policy::stream_readahead`]). Blocks in
//! the pool are never read ahead by this.
use memfold_os::sync::Mutex;
use memfold_os::units::{MAX_ORDER, Order};

const REGIONS: usize = 64;
/// The largest window: this many orders above a block.
const LARGEST: u8 = 4;
/// A region whose window has closed tries again after this many touches.
const RETRY: u8 = 8;

#[derive(Copy, Clone, Default)]
struct TouchedRegion {
    /// Number of the region + 1; 0 for none.
    name: u64,
    last: u64,
    /// The window has `2^(window - 1)` blocks; 0 for none.
    window: u8,
    hits: u8,
    missed: u8,
}

/// A window to read beside a touch.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct NeighbourWindow {
    /// A page of it.
    pub key: u64,
    /// Its size.
    pub order: Order,
}

/// The windows of recently touched regions.
pub struct SwapReadahead {
    regions: Mutex<[TouchedRegion; REGIONS]>,
    block: Order,
}

impl SwapReadahead {
    /// Makes an empty set.
    pub fn new(block: Order) -> SwapReadahead {
        SwapReadahead { regions: Mutex::new([TouchedRegion::default(); REGIONS]), block }
    }

    fn region(regions: &mut [TouchedRegion; REGIONS], key: u64) -> &mut TouchedRegion {
        let name = (key >> MAX_ORDER) + 1;
        let region = &mut regions[name as usize % REGIONS];
        if region.name != name {
            *region = TouchedRegion { name, last: key, window: 1, hits: 0, missed: 0 };
        }
        region
    }

    /// Records a touch of a block in the file at `key`. Returns a window to read beside it, if any.
    pub fn touched(&self, key: u64) -> Option<NeighbourWindow> {
        let mut regions = self.regions.lock();
        let region = Self::region(&mut regions, key);
        let is_backward = key < region.last;
        if region.hits > 0 {
            region.window = (region.window + 1).min(LARGEST + 1);
            region.missed = 0;
        } else {
            region.missed = region.missed.saturating_add(1);
            match region.window {
                0 if region.missed >= RETRY => (region.window, region.missed) = (1, 0),
                window if region.missed > 1 => region.window = window.saturating_sub(1),
                _ => {}
            }
        }
        (region.hits, region.last) = (0, key);
        let order =
            Order::new(self.block.get() + region.window.checked_sub(1)?).unwrap_or(Order::MAX);
        let start = key & !(self.block.pages() as u64 - 1);
        let key =
            if is_backward { start.checked_sub(1)? } else { start + self.block.pages() as u64 };
        Some(NeighbourWindow { key, order })
    }

    /// Records that a block that was read ahead is used.
    pub fn hit(&self, key: u64) {
        let mut regions = self.regions.lock();
        let region = Self::region(&mut regions, key);
        region.hits = region.hits.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(n: u8) -> Order {
        Order::new(n).unwrap()
    }

    #[test]
    fn the_window_grows_by_hits_and_closes_without() {
        let around = SwapReadahead::new(order(2));
        assert_eq!(around.touched(100), Some(NeighbourWindow { key: 104, order: order(2) }));
        for grown in 3..=6 {
            around.hit(100);
            assert_eq!(around.touched(200).unwrap().order, order(grown));
        }
        around.hit(100);
        assert_eq!(around.touched(200).unwrap().order, order(6), "no further");
        let orders: Vec<_> = (0..20).map(|_| around.touched(200).map(|b| b.order.get())).collect();
        assert!(orders.contains(&None), "it closes: {orders:?}");
        assert_eq!(orders.last().copied().flatten().unwrap_or(2), 2, "and tries again");
        assert!(orders.iter().rposition(Option::is_some) > orders.iter().position(Option::is_none));
    }

    #[test]
    fn the_window_lies_where_the_touches_go() {
        let around = SwapReadahead::new(order(2));
        around.touched(300);
        around.hit(300);
        assert_eq!(around.touched(201).unwrap().key, 199);
        around.hit(300);
        assert_eq!(around.touched(205).unwrap().key, 208);
    }

    #[test]
    fn regions_have_windows_of_their_own() {
        let around = SwapReadahead::new(order(2));
        around.touched(0);
        around.hit(0);
        assert_eq!(around.touched(0).unwrap().order, order(3));
        assert_eq!(around.touched(5000).unwrap().order, order(2));
    }
}
