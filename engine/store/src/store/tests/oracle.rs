//! Compares the store with a map from handles to bytes, step by step, with a check of everything
//! after each step.
use super::*;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    /// Saves a folio of this order whose pages the seed chooses; `which` as in a sparse folio.
    Save {
        order: u8,
        seed: u64,
        sparse: bool,
    },
    Free {
        nth: usize,
    },
    Load {
        nth: usize,
    },
    Pages {
        nth: usize,
        first: usize,
    },
    Compact {
        bytes: u64,
    },
    Codec {
        nth: usize,
    },
    /// Another dictionary for lz4, or none.
    Dictionary {
        at: usize,
        none: bool,
    },
    /// Does one bounded step of compaction.
    Tidy,
    /// Asks for cold objects. Each one named is alive and has the block's key.
    Coldest {
        scan: usize,
    },
    Recompress {
        nth: usize,
    },
    /// Saves through a queue of threads.
    Through {
        order: u8,
        seed: u64,
    },
    FailCodec {
        nth: u64,
    },
    FailPool {
        nth: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    // Large folios are rare, because they cost time in proportion.
    let orders = prop_oneof![8 => 0u8..=3, 4 => 4u8..=6, 1 => 7u8..=9];
    prop_oneof![
        8 => (orders, any::<u64>(), any::<bool>()).prop_map(|(order, seed, sparse)| Step::Save { order, seed, sparse }),
        6 => any::<usize>().prop_map(|nth| Step::Free { nth }),
        4 => any::<usize>().prop_map(|nth| Step::Load { nth }),
        3 => (any::<usize>(), 0usize..512).prop_map(|(nth, first)| Step::Pages { nth, first }),
        2 => (0u64..1 << 20).prop_map(|bytes| Step::Compact { bytes }),
        1 => (0usize..7).prop_map(|nth| Step::Codec { nth }),
        2 => (any::<usize>(), any::<bool>()).prop_map(|(at, none)| Step::Dictionary { at, none }),
        2 => Just(Step::Tidy),
        1 => (1usize..200).prop_map(|scan| Step::Coldest { scan }),
        2 => any::<usize>().prop_map(|nth| Step::Recompress { nth }),
        3 => (0u8..=6, any::<u64>()).prop_map(|(order, seed)| Step::Through { order, seed }),
        1 => (1u64..20).prop_map(|nth| Step::FailCodec { nth }),
        1 => (1u64..20).prop_map(|nth| Step::FailPool { nth }),
    ]
}

struct Model {
    store: Store,
    worker: CodecWorker,
    strong: CodecWorker,
    offload: Offload,
    blocks: Vec<(Handle, Order, Vec<u8>)>,
}

impl Model {
    fn run(&mut self, step: &Step) {
        match *step {
            Step::Save { order, seed, sparse } => self.save(super::order(order), seed, sparse),
            Step::Free { nth } => {
                if !self.blocks.is_empty() {
                    let (handle, ..) = self.blocks.swap_remove(nth % self.blocks.len());
                    self.store.free(handle);
                }
            }
            Step::Load { nth } => {
                if let Some((handle, o, bytes)) = self.pick(nth) {
                    assert!(load(&self.store, &mut self.worker, handle, o).unwrap() == bytes);
                }
            }
            Step::Pages { nth, first } => self.load_pages(nth, first),
            Step::Compact { bytes } => {
                let before = self.store.pool_bytes();
                let bytes = self.store.compact(bytes);
                assert_eq!(before - bytes, self.store.pool_bytes());
            }
            Step::Codec { nth } => {
                let spec = ["lz4", "zstd:-1", "delta", "lz4:30", "lz4hc:3", "deflate", "none"][nth];
                self.worker = self.store.worker_for(CodecSpec::parse(spec).unwrap());
            }
            Step::Dictionary { at, none } => {
                self.store.reap_dictionaries();
                let at = at % (corpus().len() - 5000);
                let content = corpus()[at..at + 5000].to_vec();
                let dictionary = Dictionary::new(DictionaryKind::Raw, content).unwrap();
                if none {
                    self.store.retire_dictionary();
                } else if let Err(error) = self.store.install_dictionary(&dictionary) {
                    assert_eq!((error, self.store.dictionaries().0), (CannedError::Slots, 8));
                }
            }
            Step::Tidy => {
                self.store.tidy();
            }
            Step::Coldest { scan } => {
                let mut out = [ColdObject::NONE; 8];
                let count = self.store.coldest(scan, &mut out);
                for cold in &out[..count] {
                    let known = self
                        .blocks
                        .iter()
                        .find(|(handle, ..)| *handle == cold.handle)
                        .expect("it is alive");
                    assert_eq!(cold.order, known.1);
                }
            }
            Step::Recompress { nth } => self.recompress(nth),
            Step::Through { order, seed } => self.save_through(super::order(order), seed),
            Step::FailCodec { nth } => self.store.faults().strike_at(InjectedFault::Codec, nth),
            Step::FailPool { nth } => self.store.faults().strike_at(InjectedFault::PoolFull, nth),
        }
    }

    fn save(&mut self, o: Order, seed: u64, sparse: bool) {
        let mut random = Random::new(seed);
        let mut folio = Pages::new(o.pages());
        (0..o.pages()).for_each(|p| Fill::any(&mut random).write(folio.page_mut(p)));
        let count = self.store.blocks(o);
        let which: BlockSet = (0..count).filter(|_| !sparse || random.below(2) == 0).collect();
        let mut out = vec![Handle::NONE; count];
        let strikes = |s: &Store| {
            s.faults().struck(InjectedFault::Codec) + s.faults().struck(InjectedFault::PoolFull)
        };
        let before = strikes(&self.store);
        let outcome = save_some(&self.store, &mut self.worker, &folio, o, seed, &which, &mut out);
        assert_eq!(outcome.is_err(), strikes(&self.store) > before, "{outcome:?}");
        let block = self.store.block_order(o);
        for (i, handle) in out.into_iter().enumerate() {
            assert_eq!(handle.is_none(), outcome.is_err() || !which.contains(i));
            if !handle.is_none() {
                let bytes = folio.bytes()[i * block.bytes()..][..block.bytes()].to_vec();
                self.blocks.push((handle, block, bytes));
            }
        }
    }

    fn recompress(&mut self, nth: usize) {
        if self.blocks.is_empty() {
            return;
        }
        let at = nth % self.blocks.len();
        let (handle, o, _) = &self.blocks[at];
        // SAFETY: only the model frees handles.
        let new = unsafe { self.store.recompress(&mut self.strong, *handle, *o) }.unwrap();
        if let Some(new) = new {
            self.store.free(*handle);
            self.blocks[at].0 = new;
        }
    }

    fn save_through(&mut self, o: Order, seed: u64) {
        let mut random = Random::new(seed);
        let mut folio = Pages::new(o.pages());
        (0..o.pages()).for_each(|p| Fill::any(&mut random).write(folio.page_mut(p)));
        let count = self.store.blocks(o);
        let mut out = vec![Handle::NONE; count];
        let (which, at) = (BlockSet::first(count), folio.bytes().as_ptr());
        // SAFETY: the folio has `o` bytes, page-aligned, and is borrowed.
        let outcome = unsafe {
            self.store.save_through(
                &mut self.worker,
                &mut self.offload,
                at,
                o,
                seed,
                &which,
                || false,
                &mut out,
            )
        };
        let block = self.store.block_order(o);
        for (i, handle) in out.into_iter().enumerate() {
            assert_eq!(handle.is_none(), outcome.is_err());
            if !handle.is_none() {
                self.blocks.push((
                    handle,
                    block,
                    folio.bytes()[i * block.bytes()..][..block.bytes()].to_vec(),
                ));
            }
        }
    }

    fn load_pages(&mut self, nth: usize, first: usize) {
        let Some((handle, o, bytes)) = self.pick(nth) else { return };
        let first = first % o.pages();
        let pages = 1 + nth % (o.pages() - first);
        let mut to = Pages::new(pages);
        let dst = to.bytes_mut().as_mut_ptr();
        // SAFETY: the buffer has room for the pages, and is ours.
        unsafe { self.store.load_pages(&mut self.worker, handle, o, first, pages, dst).unwrap() };
        assert!(to.bytes() == &bytes[first * PAGE_SIZE..(first + pages) * PAGE_SIZE]);
        let (mut block, end) = (Pages::new(o.pages()), first + pages);
        for pages in [first..end, 0..end] {
            let dst = block.bytes_mut().as_mut_ptr();
            let range = pages.start * PAGE_SIZE..end * PAGE_SIZE;
            // SAFETY: the buffer has room for the block, and is ours.
            unsafe {
                self.store.load_in_place(&mut self.worker, handle, o, pages, dst).unwrap();
            }
            assert!(block.bytes()[range.clone()] == bytes[range]);
        }
    }

    fn pick(&self, nth: usize) -> Option<(Handle, Order, Vec<u8>)> {
        if self.blocks.is_empty() {
            None
        } else {
            Some(self.blocks[nth % self.blocks.len()].clone())
        }
    }

    fn check(&self) {
        self.store.check().unwrap();
        let stats = self.store.stats();
        let objects = self.blocks.iter().filter(|(h, ..)| h.object().is_some());
        let (count, bytes) =
            objects.fold((0, 0), |(n, b), (_, o, _)| (n + 1, b + o.bytes() as u64));
        assert_eq!((stats.objects, stats.original_bytes, stats.bad_frees), (count, bytes, 0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, max_shrink_iters: 200, failure_persistence: None, ..Default::default() })]
    #[test]
    fn the_store_does_what_a_map_does(
        block in 0u8..=9,
        pools in 1usize..=3,
        verify in any::<bool>(),
        cached_blocks in prop_oneof![Just(0), Just(1), Just(4)],
        steps in proptest::collection::vec(step(), 1..60),
    ) {
        let store = store_with(|c| {
            c.block_order = order(block);
            c.pools = pools;
            c.verify = verify;
            c.cached_blocks = cached_blocks;
        });
        let worker = store.worker();
        let strong = store.worker_for(CodecSpec::parse("zstd:6").unwrap());
        let threads = SoftwarePool::start(CodecSpec::parse("lz4").unwrap(), order(block).bytes(), 1).unwrap();
        let offload = Offload::new(Box::new(threads.queue()), 8, order(block), 1_000_000_000);
        let mut model = Model { store, worker, strong, offload, blocks: Vec::new() };
        for step in &steps {
            model.run(step);
            model.check();
        }
        let blocks = std::mem::take(&mut model.blocks);
        for (handle, o, bytes) in &blocks {
            prop_assert!(load(&model.store, &mut model.worker, *handle, *o).unwrap() == *bytes);
            model.store.free(*handle);
        }
        model.check();
    }
}
