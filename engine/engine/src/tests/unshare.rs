//! Pages that a fork shares are made private, and no other page is touched for that.
use super::fault::Engine;
use crate::config::{Config, Delivery, WORKABLE_MIN_BYTES};
use crate::fault::PageFault;
use memfold_os::sync::atomic::Ordering::Relaxed;
use memfold_os::units::{Order, PAGE_SIZE};

/// Makes an engine under a limit, over so many pages.
fn limited(pages: usize) -> Engine {
    let mut config = Config::new(1 << 30);
    (config.limit_bytes, config.delivery) = (Some(WORKABLE_MIN_BYTES), Delivery::Signal);
    Engine::with(config, pages)
}

/// While mremap moves memory it isn't registered. A page of it was noted, and folded since. When it
/// was touched to be made private, the kernel mapped a page of zeros.
#[test]
fn what_is_folded_by_the_time_it_is_made_private_is_left_alone() {
    let engine = Engine::new(Order::new(2).unwrap());
    engine.fill(0..32, 2);
    let all = engine.page(0)..engine.page(64);
    engine.pager.0.to_unshare.note(engine.page(0)..engine.page(32), all.clone());
    engine.page_out(0..32);
    engine.space.seem_populated();
    engine.pager.background().reclaim_in_background();
    assert!(engine.pager.0.to_unshare.take().next().is_none(), "it was looked at");
    (0..32).for_each(|number| engine.assert_holds(number, 2));
}

/// A private page would have been refused, and each of the processes would have had a copy.
#[test]
fn what_no_store_would_take_stays_shared() {
    let engine = limited(64);
    engine.fill(0..32, 0);
    engine.fill(32..64, 2);
    engine.pager.0.to_unshare.note(engine.page(8)..engine.page(64), engine.space.area());
    engine.pager.gauges().publish();
    engine.pager.background().reclaim_in_background();
    engine.pager.gauges().publish();
    let noted_and_dense = 32 * PAGE_SIZE as u64;
    assert_eq!(engine.pager.stats().refused_bytes.load(Relaxed), noted_and_dense);
    engine.page_out(32..64);
    assert_eq!(engine.pager.gauges().away_bytes(), noted_and_dense, "the rest leaves");
    (0..32).for_each(|number| engine.assert_holds(number, 0));
    (32..64).for_each(|number| engine.assert_holds(number, 2));
    engine.pager.check().unwrap();
}

/// A page was noted while two processes shared it, and was made private when five did. Each of them
/// had a copy of its own then.
#[test]
fn noted_page_stays_shared_if_more_processes_share_it_since() {
    let engine = limited(64);
    engine.fill(0..64, 0);
    let refused_bytes = || {
        engine.pager.0.to_unshare.note(engine.page(0)..engine.page(32), engine.space.area());
        engine.pager.background().reclaim_in_background();
        engine.pager.gauges().publish();
        engine.pager.stats().refused_bytes.load(Relaxed)
    };
    engine.pager.gauges().publish();
    engine.pager.fork().note_uncounted();
    assert_eq!(refused_bytes(), 0, "no page was looked at");
    engine.pager.fork().note_shared(1 << 20, 1 << 19, 2);
    assert_eq!(refused_bytes(), 32 * PAGE_SIZE as u64);
    engine.pager.check().unwrap();
}

/// The other processes keep the copies anyway, and a loaded page would have to be stored once more.
#[test]
fn copies_shared_by_many_are_kept_after_a_load_and_a_fork() {
    const PAGES: usize = 1024;
    for own in [0, 1 << 20] {
        let engine = limited(PAGES);
        engine.fill(0..PAGES, 2);
        engine.page_out(0..PAGES);
        engine.pager.fork().note_shared(1 << 20, own, 2);
        (0..PAGES).for_each(|number| engine.assert_holds(number, 2));
        let dropped = engine.pager.stats().clean_dropped.load(Relaxed);
        assert_eq!(dropped == 0, own == 0, "{dropped} copies were dropped");
        engine.pager.check().unwrap();
    }
}

/// The engine drops clean pages without a look at their bytes. So a write to one must always be
/// noticed.
#[test]
fn page_that_is_clean_stays_protected_where_copies_are_charged() {
    let engine = limited(64);
    engine.fill(0..32, 2);
    engine.page_out(0..16);
    engine.pager.fork().charge_copies(true).unwrap();
    (0..16).for_each(|number| engine.assert_holds(number, 2));
    let all = engine.space.area();
    engine.pager.0.to_unshare.note(engine.page(0)..engine.page(32), all);
    engine.pager.background().reclaim_in_background();
    for number in 0..16 {
        engine.write(number, |page| page[0] ^= 0xff);
    }
    engine.page_out(0..16);
    for number in 0..16 {
        engine.write(number, |page| page[0] ^= 0xff);
        engine.assert_holds(number, 2);
    }
    engine.pager.check().unwrap();
}

/// A write-protected page is copied, with as many as are private beside it. The page map once was
/// read for each number of pages, before the copies were paid and again after that.
#[test]
fn page_map_is_read_once_for_a_charged_copy() {
    let engine = limited(64);
    engine.fill(0..64, 2);
    engine.pager.fork().charge_copies(true).unwrap();
    // The page, the pages that are copied with it, and whether the map has anything to say.
    let writes = [(16, 16..32, 1), (47, 32..48, 1), (1, 0..2, 1), (52, 52..56, 1), (63, 63..64, 0)];
    let mut private = [false; 64];
    for (number, copied, reads) in writes {
        let before = engine.space.map_reads();
        let addr = engine.page(number);
        engine.pager.faults().fault(PageFault { addr, write: true, protected: true });
        assert_eq!(engine.space.map_reads() - before, reads, "page {number}");
        private[copied].fill(true);
        let is_private = |number: usize| !engine.space.is_protected(engine.page(number));
        assert_eq!(std::array::from_fn(is_private), private, "page {number}");
    }
    engine.pager.check().unwrap();
}
