//! First touches: decides how much is filled with zeros where the program touches memory that it
//! never touched before.
//!
//! A touch fills its page. More is filled only where a stream has touched each page before it: a
//! window is never longer than the run of touched pages that it continues. So memory that is
//! touched sparsely, at random or with a stride takes what it would take without memfold.
//!
//! Whether all of a window was touched is sampled. One page of it, chosen at random, is
//! write-protected: the **probe**. A stream that comes to the end of a window without having
//! touched the probe begins anew. The chance that the probe is not touched is the part of the window
//! that is not. So the windows whose probe is still untouched, taken whole, are an unbiased
//! estimate of the memory that was filled in vain. They are bounded ([`unproven_max`]), whatever
//! the order of touches is. A constant stride above a page never makes a stream.
use memfold_os::sync::Mutex;
use memfold_os::sync::atomic::{AtomicBool, Ordering::Relaxed};
use memfold_os::units::Order;

const STREAMS: usize = 16;
/// Pages that windows may fill without proof, in all.
const UNPROVEN_PAGES: u64 = 160;
/// Or one part in this many of the program's pages, if that is more.
const UNPROVEN_SHARE: u64 = 100;

/// Returns how many pages may be filled without proof that they are touched, where the program has
/// touched `pages` pages.
pub fn unproven_max(pages: u64) -> u64 {
    UNPROVEN_PAGES.max(pages / UNPROVEN_SHARE)
}

#[derive(Copy, Clone, Default)]
struct FillStream {
    /// The pages that were filled last, `[start, end)`.
    start: u64,
    end: u64,
    /// Pages in a row that the stream has touched, up to these.
    run: u64,
    /// The window's probe was not touched yet.
    pending: bool,
    used: u64,
}

/// The recent streams of first touches.
pub struct FirstTouches {
    table: Mutex<FillTable>,
    /// Whether a touch fills its page alone.
    is_exact: AtomicBool,
    block: Order,
    largest: Order,
}

struct FillTable {
    streams: [FillStream; STREAMS],
    clock: u64,
    random: u64,
}

impl FirstTouches {
    /// Makes an empty set; windows are from one block to `largest`.
    pub fn new(block: Order, largest: Order) -> FirstTouches {
        let streams = [FillStream::default(); STREAMS];
        let table = FillTable { streams, clock: 0, random: 0x9e37_79b9_7f4a_7c15 };
        FirstTouches { table: Mutex::new(table), is_exact: AtomicBool::new(false), block, largest }
    }

    /// Fills the touched page alone from now on. A program that handles faults itself expects one
    /// for each page that it has not touched.
    pub fn be_exact(&self) {
        self.is_exact.store(true, Relaxed);
    }

    /// Returns whether a touch fills its page alone.
    pub fn is_exact(&self) -> bool {
        self.is_exact.load(Relaxed)
    }

    /// Returns the order of the window to fill for a first touch of page `key`, if at most `most`
    /// pages may be filled without proof.
    pub fn advise(&self, key: u64, most: u64) -> Order {
        let mut table = self.table.lock();
        let Some(stream) = table.continued_by(key) else { return Order::PAGE };
        if stream.pending {
            // Some of the last window was skipped.
            stream.used = 0;
            return Order::PAGE;
        }
        let order = Order::new(stream.run.min(most).max(1).ilog2() as u8);
        let order = order.unwrap_or(Order::MAX).min(self.largest);
        if order < self.block { Order::PAGE } else { order }
    }

    /// Notes that the pages `[start, end)` were filled for a touch of page `key`. With `is_probed`,
    /// one of them is the probe.
    pub fn filled(&self, key: u64, start: u64, end: u64, is_probed: bool) {
        let mut table = self.table.lock();
        table.clock += 1;
        let clock = table.clock;
        let before = table.continued_by(key).copied();
        let run = before.map_or(0, |stream| stream.run) + (end - start);
        let place = match before {
            Some(_) => table.continued_by(key).expect("it was just found"),
            None => {
                let oldest = table.streams.iter_mut().min_by_key(|stream| stream.used);
                oldest.expect("the table is not empty")
            }
        };
        *place = FillStream { start, end, run, pending: is_probed, used: clock };
    }

    /// Chooses the probe of a window of `pages` pages from `start` that is filled for a touch of
    /// page `key`.
    pub fn choose_probe(&self, key: u64, start: u64, pages: u64) -> u64 {
        let mut table = self.table.lock();
        let mut word = table.random;
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        table.random = word;
        let other = start + (word >> 16) % (pages - 1);
        if other < key { other } else { other + 1 }
    }

    /// Notes that the probe of the window that `key` lies in was touched.
    pub fn proven(&self, key: u64) {
        let mut table = self.table.lock();
        let own = |stream: &&mut FillStream| stream.start <= key && key < stream.end;
        if let Some(stream) = table.streams.iter_mut().find(own) {
            stream.pending = false;
        }
    }
}

impl FillTable {
    fn continued_by(&mut self, key: u64) -> Option<&mut FillStream> {
        let streams = self.streams.iter_mut().filter(|stream| stream.used != 0);
        streams
            .filter(|stream| key == stream.end || key + 1 == stream.start)
            .max_by_key(|stream| stream.used)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_os::units::MAX_PAGES;
    use memfold_testkit::random::{Random, seed};

    const AREA: u64 = 1 << 14;

    /// Touches pages of an empty area in this order. Returns the pages that were filled in vain, and
    /// the faults.
    fn fill(order: impl Iterator<Item = u64>) -> (u64, u64) {
        let touches = FirstTouches::new(Order::new(2).unwrap(), Order::MAX);
        let mut filled = vec![false; AREA as usize];
        let mut probes = std::collections::HashMap::new();
        let (mut touched, mut unproven, mut faults) = (std::collections::HashSet::new(), 0, 0);
        for key in order {
            touched.insert(key);
            if let Some(pages) = probes.remove(&key) {
                touches.proven(key);
                (unproven, faults) = (unproven - pages, faults + 1);
            }
            if filled[key as usize] {
                continue;
            }
            faults += 1;
            let mut order = touches.advise(key, unproven_max(touched.len() as u64) - unproven);
            let window = |order: Order| {
                let start = key & !(order.pages() as u64 - 1);
                start as usize..start as usize + order.pages()
            };
            while filled[window(order)].contains(&true) {
                order = order.smaller().unwrap();
            }
            let (pages, range) = (order.pages() as u64, window(order));
            filled[range.clone()].fill(true);
            let is_probed = order > Order::PAGE;
            if is_probed {
                probes.insert(touches.choose_probe(key, range.start as u64, pages), pages);
                unproven += pages;
            }
            touches.filled(key, range.start as u64, range.end as u64, is_probed);
        }
        let count = filled.iter().filter(|filled| **filled).count() as u64;
        (count - touched.len() as u64, faults)
    }

    #[test]
    fn dense_streams_fill_large_windows_in_both_directions() {
        let (vain, faults) = fill(0..AREA);
        assert!(vain == 0 && faults < AREA / 48, "{vain} in vain, {faults} faults");
        let (vain, faults) = fill((0..AREA).rev());
        assert!(vain == 0 && faults < AREA / 48, "{vain} in vain, {faults} faults");
    }

    #[test]
    fn strides_fill_nothing_in_vain() {
        for stride in [2, 3, 4, 16, MAX_PAGES] {
            assert_eq!(fill((0..AREA).step_by(stride)).0, 0, "{stride}");
            assert_eq!(fill((0..AREA).rev().step_by(stride)).0, 0, "{stride}");
        }
    }

    #[test]
    fn what_is_filled_in_vain_is_bounded_in_the_mean() {
        let (mut vain, mut most) = (0, 0);
        for round in 0..40 {
            let mut random = Random::new(seed(round));
            // A part of each chunk, in order; and nearly all pages.
            let chunk = 1 + random.below(600) as u64;
            let part = 1 + random.below(chunk as usize) as u64;
            vain += fill((0..AREA).filter(|key| key % chunk < part)).0;
            most += unproven_max(AREA * part / chunk);
            let share = 500 + random.below(500) as u32;
            vain += fill((0..AREA).filter(|_| random.per_mille(share))).0;
            most += unproven_max(AREA * share as u64 / 1000);
        }
        assert!(vain <= most, "{vain} pages in vain, {most} allowed");
    }
}
