//! A folio in the pool stays on writeback's list, whichever other thread works on it.
use super::fault::Engine;
use crate::parts::bytes;
use crate::reclaim::{Reclaim, ReclaimProgress};
use memfold_os::units::{Order, PAGE_SIZE};
use memfold_store::{CodecSpec, ColdObject};
use memfold_testkit::fill::partly_random;

/// Makes 64 pages in the pool, in blocks of four. Each compresses to about `share` of 4.
fn stored(share: usize) -> Engine {
    let engine = Engine::new(Order::new(2).unwrap());
    engine.fill(0..64, share);
    engine.page_out(0..64);
    assert_eq!(engine.pager.0.backing.store().stats().objects, 16);
    engine
}

/// Returns the contents of page `number`, which zstd compresses better than lz4.
pub fn hex(number: usize) -> Vec<u8> {
    partly_random(number as u64, 2)
        .iter()
        .map(|byte| if *byte == 0 { 0 } else { b'a' + byte % 16 })
        .collect()
}

#[test]
fn folio_recompressed_while_the_writer_scans_is_written_later() {
    let engine = stored(2);
    let (pager, swap) = (&engine.pager, engine.pager.0.backing.swap().unwrap());
    let mut cold = [ColdObject::NONE; 16];
    assert_eq!(pager.0.backing.store().to_recompress(0, 1 << 16, &mut cold), 16);
    let claims: Vec<_> = cold
        .iter()
        .map(|cold| pager.recompress().claim(cold).expect("no other thread claims it"))
        .collect();
    assert_eq!(pager.writeback().pack_round(swap), 0, "all are claimed");
    let areas = pager.0.areas.read();
    for (claim, cold) in claims.into_iter().zip(&cold) {
        pager.recompress().end_claim(areas.find_key(cold.key).unwrap(), claim, cold, None);
    }
    drop(areas);
    pager.check().unwrap();
    while pager.writeback().pack_round(swap) > 0 {}
    assert_eq!((pager.0.backing.store().stats().objects, swap.objects()), (0, 16));
    (0..64).for_each(|n| engine.assert_holds(n, 2));
    pager.check().unwrap();
}

#[test]
fn block_recompressed_during_its_write_is_written_later() {
    let engine = Engine::new(Order::new(2).unwrap());
    engine.fill(0..64, 2);
    (0..64).for_each(|n| {
        engine.space.write(engine.page(n), |bytes| bytes.copy_from_slice(&hex(n))).unwrap()
    });
    engine.page_out(0..64);
    let (pager, swap) = (&engine.pager, engine.pager.0.backing.swap().unwrap());
    let run = pager.writeback().pack_run(swap, &mut Vec::new()).unwrap();
    let mut writes = [swap.write_from(run.buffer, run.slot, bytes(run.pages))];
    // SAFETY: buffer and run belong to this thread.
    unsafe { swap.write(&mut writes) };
    let mut worker = pager.0.backing.store().worker_for(CodecSpec::parse("zstd:3").unwrap());
    assert!(
        pager.recompress().some(&mut worker, 0, u64::MAX / 2) > 0,
        "zstd makes some smaller than lz4"
    );
    pager.writeback().end_packed(swap, &run, writes[0].result);
    pager.check().unwrap();
    while pager.writeback().pack_round(swap) > 0 {}
    assert_eq!((pager.0.backing.store().stats().objects, swap.objects()), (0, 16));
    for n in 0..64 {
        engine.touch(n);
        engine.space.read(engine.page(n), |bytes| assert!(*bytes == *hex(n), "page {n}")).unwrap();
    }
    pager.check().unwrap();
}

#[test]
fn block_longer_than_any_free_run_is_written_later() {
    let engine = stored(1);
    let (pager, swap) = (&engine.pager, engine.pager.0.backing.swap().unwrap());
    let pair = Order::new(1).unwrap();
    // Every second pair of slots is free, and no longer run.
    let mut pairs: Vec<u64> = core::iter::from_fn(|| swap.allocate(pair)).collect();
    pairs.sort_unstable();
    pairs.iter().step_by(2).for_each(|slot| swap.release(*slot, pair.pages()));
    assert_eq!(pager.writeback().pack_round(swap), 0, "no block is that short");
    pager.check().unwrap();
    pairs.iter().skip(1).step_by(2).for_each(|slot| swap.release(*slot, pair.pages()));
    while pager.writeback().pack_round(swap) > 0 {}
    assert_eq!((pager.0.backing.store().stats().objects, swap.objects()), (0, 16));
    (0..64).for_each(|n| engine.assert_holds(n, 1));
    pager.check().unwrap();
}

/// The swap cache may be newer than the copies that it once had in the file.
#[test]
fn child_without_an_engine_gets_what_is_in_frames() {
    let engine = stored(2);
    let swap = engine.pager.0.backing.swap().unwrap();
    while engine.pager.writeback().pack_round(swap) > 0 {}
    assert_eq!(swap.objects(), 16);
    let changed = [0, 9, 21];
    changed.iter().for_each(|page| engine.write(*page, |bytes| bytes[100] = 7));
    let areas = engine.pager.0.areas.read();
    while Reclaim::new(&engine.pager.0).evict(&areas) == ReclaimProgress::Freed {}
    drop(areas);
    assert_eq!(engine.space.present_pages(), 0, "all are evicted, and none is saved");
    let mut seen = 0;
    let mut see = |addr: usize, bytes: *const u8| {
        let number = (addr - engine.page(0)) / PAGE_SIZE;
        let mut want = partly_random(number as u64, 2);
        want[100] = if changed.contains(&number) { 7 } else { want[100] };
        // SAFETY: there is a page.
        let bytes = unsafe { core::slice::from_raw_parts(bytes, PAGE_SIZE) };
        assert!(bytes == want, "page {number}");
        seen += 1;
    };
    // SAFETY: this is the only thread, and there is no remote store.
    unsafe { engine.pager.fork().each_away(&mut see) };
    assert_eq!(seen, 64);
}
