//! Z9: batches hide the latency of a device, and its failures cost only time.
use super::*;
use std::time::{Duration, Instant};

/// An accelerator that takes `latency` for a batch of any size, and misbehaves as configured.
struct FakeDevice {
    codec: BareCodec,
    spec: CodecSpec,
    latency: Duration,
    trouble: Trouble,
    under_way: Vec<(Instant, BatchJob)>,
    jobs: u64,
}

#[derive(Copy, Clone, Debug, PartialEq)]
enum Trouble {
    None,
    /// Every nth job fails.
    FailsEvery(u64),
    /// It returns no result after this many jobs.
    HangsAfter(u64),
    /// It takes this many jobs at a time and refuses the rest.
    TakesFew(usize),
    /// Results carry tags that were never given.
    WrongTags,
    /// It claims more bytes than there is room.
    WrongSizes,
    /// One bit of its output is wrong.
    WrongBytes,
}

impl FakeDevice {
    fn new(spec: &str, latency: Duration, trouble: Trouble) -> Box<FakeDevice> {
        let spec = CodecSpec::parse(spec).unwrap();
        let codec = BareCodec::new(spec, 2 << 20);
        Box::new(FakeDevice { codec, spec, latency, trouble, under_way: Vec::new(), jobs: 0 })
    }
}

impl Compressor for FakeDevice {
    fn codec(&self) -> CodecSpec {
        self.spec
    }

    unsafe fn submit(&mut self, jobs: &[BatchJob]) -> usize {
        let count =
            if let Trouble::TakesFew(n) = self.trouble { jobs.len().min(n) } else { jobs.len() };
        let ready = Instant::now() + self.latency;
        self.under_way.extend(jobs[..count].iter().map(|job| (ready, *job)));
        count
    }

    fn complete(&mut self, done: &mut [BatchResult], wait_ns: u64) -> usize {
        let hangs = matches!(self.trouble, Trouble::HangsAfter(n) if self.jobs >= n);
        let Some((ready, job)) = self.under_way.first().copied().filter(|_| !hangs) else {
            std::thread::sleep(Duration::from_nanos(wait_ns));
            return 0;
        };
        let wait = ready.saturating_duration_since(Instant::now());
        std::thread::sleep(wait.min(Duration::from_nanos(wait_ns)));
        if wait > Duration::from_nanos(wait_ns) {
            return 0;
        }
        self.under_way.remove(0);
        self.jobs += 1;
        // SAFETY: the caller of `submit` vouched for the job's memory until now.
        let result = unsafe { self.codec.compress(job.src, job.len, job.dst, job.room) };
        done[0] = BatchResult { tag: job.tag, result };
        match self.trouble {
            Trouble::FailsEvery(n) if self.jobs.is_multiple_of(n) => {
                done[0].result = Err(CodecError(-7))
            }
            Trouble::WrongTags => done[0].tag += 1000,
            Trouble::WrongSizes => done[0].result = Ok(Some(job.room + 1)),
            // SAFETY: the buffer has at least a byte, and belongs to the device until the result is
            // returned.
            Trouble::WrongBytes => unsafe { *job.dst.add(3) ^= 0x40 },
            _ => {}
        }
        1
    }

    fn cancel(&mut self) {
        self.under_way.clear();
    }
}

fn real_folio(o: Order, at: usize) -> Pages {
    let mut folio = Pages::new(o.pages());
    (0..o.pages()).for_each(|p| Fill::Real(at + p * PAGE_SIZE).write(folio.page_mut(p)));
    folio
}

fn save_through(
    store: &Store,
    w: &mut CodecWorker,
    offload: &mut Offload,
    folio: &Pages,
    o: Order,
) -> Result<Vec<Handle>, SaveError> {
    let count = store.blocks(o);
    let mut out = vec![Handle::NONE; count];
    let (which, at) = (BlockSet::first(count), folio.bytes().as_ptr());
    // SAFETY: the folio has `o` bytes, page-aligned, and is borrowed.
    unsafe { store.save_through(w, offload, at, o, 1, &which, || false, &mut out) }.map(|_| out)
}

const TIMEOUT_NS: u64 = 20_000_000;

#[test]
fn z9_batching_hides_the_latency_of_a_slow_device() {
    let store = store_with(|c| c.block_order = order(0));
    let mut w = store.worker();
    let folio = real_folio(order(6), 0);
    let mut times = Vec::new();
    for batch in [1, 8, 64] {
        let device = FakeDevice::new("lz4", Duration::from_millis(3), Trouble::None);
        let mut offload = Offload::new(device, batch, order(0), 1_000_000_000);
        let start = Instant::now();
        let handles = save_through(&store, &mut w, &mut offload, &folio, order(6)).unwrap();
        times.push(start.elapsed());
        let blocks: usize = (0..64).filter(|p| !is_filled(&folio, *p)).count();
        let batches = if batch == 64 { 1 } else { blocks.div_ceil(batch) as u64 };
        let stats = offload.stats();
        assert_eq!((stats.blocks, stats.fallbacks), (blocks as u64, 0));
        assert!(stats.batches >= batches && stats.batches <= 64 / batch as u64, "{stats:?}");
        assert_same(&store, &mut w, &handles, &folio, order(6));
    }
    println!("64 blocks at 3 ms a batch: {times:?} with batches of 1, 8, 64");
    assert!(times[0] > times[1] * 3 && times[0] > times[2] * 10);
}

fn is_filled(folio: &Pages, page: usize) -> bool {
    let bytes = &folio.bytes()[page * PAGE_SIZE..][..PAGE_SIZE];
    bytes.chunks(8).all(|word| word == &bytes[..8])
}

#[test]
fn z9_failing_or_hanging_device_falls_back_without_loss() {
    let troubles = [
        Trouble::FailsEvery(1),
        Trouble::FailsEvery(3),
        Trouble::HangsAfter(0),
        Trouble::HangsAfter(5),
        Trouble::TakesFew(3),
        Trouble::TakesFew(0),
        Trouble::WrongTags,
        Trouble::WrongSizes,
    ];
    for trouble in troubles {
        let store = store_with(|_| ());
        let mut w = store.worker();
        let device = FakeDevice::new("zstd", Duration::ZERO, trouble);
        let mut offload = Offload::new(device, 16, order(2), TIMEOUT_NS);
        let mut random = Random::new(11);
        for round in 0..6 {
            let mut folio = real_folio(order(6), round * 300_000);
            (0..64).step_by(5).for_each(|page| Fill::any(&mut random).write(folio.page_mut(page)));
            let handles = save_through(&store, &mut w, &mut offload, &folio, order(6)).unwrap();
            assert_same(&store, &mut w, &handles, &folio, order(6));
            store.check().unwrap();
            store.free_many(&handles);
        }
        let stats = offload.stats();
        println!("{trouble:?}: {stats:?}, trusted: {}", offload.is_trusted());
        assert!(stats.fallbacks > 0);
        assert_eq!(store.stats().objects, 0);
        let loud = !matches!(trouble, Trouble::TakesFew(_));
        assert_eq!(stats.failures + stats.timeouts > 0, loud);
        if trouble == Trouble::FailsEvery(1) {
            assert!(!offload.is_trusted(), "a device that always fails is left alone");
        }
    }
}

#[test]
fn z9_wrong_bytes_of_a_device_are_found_by_verify_mode() {
    let store = store_with(|c| c.verify = true);
    let mut w = store.worker();
    let device = FakeDevice::new("lz4", Duration::ZERO, Trouble::WrongBytes);
    let mut offload = Offload::new(device, 8, order(2), TIMEOUT_NS);
    let folio = real_folio(order(5), 0);
    assert_eq!(
        save_through(&store, &mut w, &mut offload, &folio, order(5)),
        Err(SaveError::Verify)
    );
    assert_eq!((store.stats().objects, store.stats().events.verify_mismatches), (0, 1));
    store.check().unwrap();
}

#[test]
fn z9_saves_through_a_queue_are_all_or_nothing() {
    let store = store_with(|_| ());
    let mut w = store.worker();
    let pool = SoftwarePool::start(CodecSpec::parse("lz4").unwrap(), 16384, 1).unwrap();
    let mut offload = Offload::new(Box::new(pool.queue()), 8, order(2), TIMEOUT_NS);
    let folio = real_folio(order(7), 0);
    for nth in 1..=32 {
        store.faults().strike_at(InjectedFault::PoolFull, nth);
        assert_eq!(
            save_through(&store, &mut w, &mut offload, &folio, order(7)),
            Err(SaveError::PoolFull)
        );
        store.check().unwrap();
        assert_eq!(store.stats().objects, 0);
    }
    let handles = save_through(&store, &mut w, &mut offload, &folio, order(7)).unwrap();
    assert_same(&store, &mut w, &handles, &folio, order(7));
}

#[test]
fn z9_threads_share_a_software_pool() {
    let store = store_with(|c| c.pools = 2);
    let pool = SoftwarePool::start(CodecSpec::parse("lz4").unwrap(), 16384, 2).unwrap();
    std::thread::scope(|scope| {
        for me in 0..5 {
            let (store, pool) = (&store, &pool);
            scope.spawn(move || {
                let mut w = store.worker();
                let mut offload = Offload::new(Box::new(pool.queue()), 64, order(2), TIMEOUT_NS);
                let mut random = Random::new(me);
                for _ in 0..30 {
                    let mut folio = Pages::new(128);
                    (0..128).for_each(|p| Fill::any(&mut random).write(folio.page_mut(p)));
                    let handles =
                        save_through(store, &mut w, &mut offload, &folio, order(7)).unwrap();
                    assert_same(store, &mut w, &handles, &folio, order(7));
                    store.free_many(&handles);
                }
                assert_eq!(offload.stats().failures, 0);
            });
        }
    });
    drop(pool);
    store.check().unwrap();
    assert_eq!(store.stats().objects, 0);
}

#[test]
fn z9_a_queue_works_without_threads_and_after_its_pool() {
    let spec = CodecSpec::parse("lz4").unwrap();
    for threads in [0, 2] {
        let store = store_with(|_| ());
        let mut w = store.worker();
        let pool = SoftwarePool::start(spec, 16384, threads).unwrap();
        let mut offload = Offload::new(Box::new(pool.queue()), 16, order(2), TIMEOUT_NS);
        drop(pool);
        for round in 0..20 {
            let folio = real_folio(order(7), round * 100_000);
            let handles = save_through(&store, &mut w, &mut offload, &folio, order(7)).unwrap();
            assert_same(&store, &mut w, &handles, &folio, order(7));
        }
        assert_eq!(offload.stats().timeouts, 0);
    }
}
