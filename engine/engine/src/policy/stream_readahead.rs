//! Streams: decides from the last faults whether this one continues an earlier one, and how much to
//! load for it.
use crate::folio::TouchKind;
use core::ops::Range;
use memfold_os::sync::Mutex;
use memfold_os::units::Order;

/// How much to load for a fault.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct WindowAdvice {
    /// The largest order of the window to load now; the block's order for a random touch.
    pub order: Order,
    /// The stream moves downwards.
    pub backward: bool,
    /// Number of windows after this one to load ahead; 0 unless it is a stream.
    pub ahead: u8,
    /// The kind of access to record for the loaded folio.
    pub touch: TouchKind,
}

/// A stream loads this much at once if blocks were cut into pages.
const CUT_WINDOW: Order = match Order::new(4) {
    Some(order) => order,
    None => unreachable!(),
};

/// A process that works again after it was idle loads this much at once.
const WAKING_WINDOW: Order = match Order::new(6) {
    Some(order) => order,
    None => unreachable!(),
};

impl WindowAdvice {
    /// Returns the advice for a process that works again after all of it was folded. It needs more
    /// than single blocks, wherever it begins.
    pub fn for_waking(self) -> WindowAdvice {
        WindowAdvice {
            order: self.order.max(WAKING_WINDOW),
            ahead: self.ahead.max(1),
            touch: if self.touch == TouchKind::RANDOM { TouchKind::UNKNOWN } else { self.touch },
            ..self
        }
    }

    /// Returns the pages to load one by one after those before `end`, where blocks were cut into
    /// pages, so that a window is not one folio. It may reach past the area.
    pub fn pages_after(&self, end: u64) -> Range<u64> {
        if self.touch != TouchKind::STREAM || self.backward {
            return end..end;
        }
        let window = CUT_WINDOW.pages() as u64;
        end..end / window * window + window
    }
}

/// Returns whether pages that are loaded for an access are write-protected, so that the first write
/// to each is noticed.
pub fn is_protected(touch: TouchKind, write: bool) -> bool {
    !write && touch != TouchKind::STREAM
}

const STREAMS: usize = 16;
/// A stream's window grows by this many orders (x4) each time it is continued.
const GROWTH: u8 = 2;
/// Continuations before a window is loaded ahead, and again before two are. With two, another
/// thread can load one while the stream still waits for the first. With 2 and 6, objects that lie
/// side by side by chance were taken for streams: PHP took 1.25 to 1.6 times as long, Perl 1.3.
const SURE: u8 = 4;
const SURER: u8 = 8;

#[derive(Copy, Clone, Default)]
struct AccessStream {
    /// First key of the window that was loaded last, `[start, end)`.
    start: u64,
    end: u64,
    order: u8,
    hits: u8,
    used: u64,
}

/// The recent streams.
pub struct Streams {
    table: Mutex<StreamTable>,
    block: Order,
    largest: Order,
}

struct StreamTable {
    streams: [AccessStream; STREAMS],
    clock: u64,
}

impl Streams {
    /// Makes an empty set; windows are from one block to `largest`.
    pub fn new(block: Order, largest: Order) -> Streams {
        Streams {
            table: Mutex::new(StreamTable {
                streams: [AccessStream::default(); STREAMS],
                clock: 0,
            }),
            block,
            largest,
        }
    }

    /// Advises how much to load for a fault at page `key`. A stream may skip up to a block, so that
    /// a few mapped pages don't end it.
    pub fn advise(&self, key: u64) -> WindowAdvice {
        let block = 1u64 << self.block.get();
        let mut table = self.table.lock();
        table.clock += 1;
        let clock = table.clock;
        let hit = table.streams.iter_mut().find(|s| {
            s.used != 0
                && ((key >= s.end && key < s.end + block)
                    || (key < s.start && key + block >= s.start))
        });
        if let Some(s) = hit {
            let backward = key < s.start;
            s.order = (s.order + GROWTH).min(self.largest.get());
            s.hits = s.hits.saturating_add(1);
            s.used = clock;
            let order = Order::new(s.order).unwrap_or(self.block);
            // A few consecutive pages may be one object.
            let touch = if s.hits >= SURE { TouchKind::STREAM } else { TouchKind::UNKNOWN };
            return WindowAdvice {
                order,
                backward,
                ahead: (s.hits >= SURE) as u8 + (s.hits >= SURER) as u8,
                touch,
            };
        }
        let oldest =
            table.streams.iter_mut().min_by_key(|s| s.used).expect("the table is not empty");
        let start = key / block * block;
        *oldest = AccessStream {
            start,
            end: start + block,
            order: self.block.get(),
            hits: 0,
            used: clock,
        };
        WindowAdvice { order: self.block, backward: false, ahead: 0, touch: TouchKind::RANDOM }
    }

    /// Records the pages `[start, end)` that were loaded for the fault at `key`.
    pub fn loaded(&self, key: u64, start: u64, end: u64) {
        let mut table = self.table.lock();
        let block = 1u64 << self.block.get();
        let near =
            |s: &&mut AccessStream| s.used != 0 && key + block >= s.start && key < s.end + block;
        if let Some(s) = table.streams.iter_mut().filter(near).max_by_key(|s| s.used) {
            (s.start, s.end) = (start, end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(n: u8) -> Order {
        Order::new(n).unwrap()
    }

    #[test]
    fn a_stream_grows_and_a_random_touch_does_not() {
        let streams = Streams::new(order(2), Order::MAX);
        let random =
            WindowAdvice { order: order(2), backward: false, ahead: 0, touch: TouchKind::RANDOM };
        assert_eq!(streams.advise(1000), random);
        streams.loaded(1000, 1000, 1004);
        let advice = streams.advise(1004);
        assert_eq!((advice.order, advice.touch), (order(4), TouchKind::UNKNOWN));
        streams.loaded(1004, 1004, 1020);
        let mut at = 1020;
        for hits in 2..=SURER {
            let advice = streams.advise(at);
            let (ahead, touch) = match hits {
                ..SURE => (0, TouchKind::UNKNOWN),
                SURE..SURER => (1, TouchKind::STREAM),
                _ => (2, TouchKind::STREAM),
            };
            assert_eq!((advice.ahead, advice.touch), (ahead, touch), "{hits}");
            assert_eq!(advice.order.get(), (2 + GROWTH * hits).min(Order::MAX.get()));
            streams.loaded(at, at, at + 64);
            at += 64;
        }
        assert_eq!(streams.advise(900_000).order, order(2));
    }

    #[test]
    fn a_stream_over_single_pages_loads_up_to_the_end_of_a_window() {
        let advice =
            WindowAdvice { order: order(4), backward: false, ahead: 1, touch: TouchKind::STREAM };
        assert_eq!((advice.pages_after(35), advice.pages_after(48)), (35..48, 48..64));
        assert!(WindowAdvice { backward: true, ..advice }.pages_after(35).is_empty());
        assert!(WindowAdvice { touch: TouchKind::RANDOM, ..advice }.pages_after(35).is_empty());
    }

    #[test]
    fn a_stream_may_run_backward() {
        let streams = Streams::new(order(2), Order::MAX);
        streams.advise(4096);
        streams.loaded(4096, 4096, 4100);
        let advice = streams.advise(4095);
        assert!(advice.backward && advice.order > order(2));
    }

    #[test]
    fn a_touch_behind_a_skipped_block_is_no_stream() {
        let streams = Streams::new(order(2), Order::MAX);
        for at in [0, 4, 20, 84] {
            streams.advise(at);
            streams.loaded(at, at, if at == 84 { 340 } else { at * 4 + 4 });
        }
        assert_eq!(streams.advise(344).touch, TouchKind::RANDOM);
        assert_ne!(streams.advise(343).touch, TouchKind::RANDOM);
    }

    #[test]
    fn several_streams_are_told_apart() {
        let streams = Streams::new(order(2), Order::MAX);
        for step in 0..4u64 {
            for stream in 0..8u64 {
                let key = stream * 100_000 + step * 4;
                let advice = streams.advise(key);
                assert_eq!(advice.order > order(2), step > 0, "stream {stream} step {step}");
                streams.loaded(key, key, key + 4);
            }
        }
    }
}
