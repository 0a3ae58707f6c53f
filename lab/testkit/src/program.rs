//! A program over a fake address space: it touches its memory, takes faults, and waits like a real
//! thread.
use crate::fake::FakeSpace;
use memfold_engine::fault::{FaultOutcome, PageFault};
use memfold_engine::pager::Pager;
use memfold_os::thread::yield_now;
use memfold_os::units::PAGE_SIZE;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Faults in a row after which a test counts as stuck.
const AGAIN_MAX: u32 = 1_000_000;

/// One program. Clones share its memory.
///
/// With thread delivery, a touch of a missing page queues the thread, a handler (played by the same
/// thread) handles the fault, and the thread sleeps until it is woken, whatever the handler
/// returned. Otherwise the thread handles its own fault and tries again.
#[derive(Clone)]
pub struct Program {
    pager: Arc<Pager>,
    space: FakeSpace,
    is_inline: bool,
}

impl Program {
    /// Makes a program whose memory is the area of `space`, paged by `pager`.
    pub fn new(pager: &Arc<Pager>, space: &FakeSpace) -> Program {
        let is_inline = pager.config().delivery != memfold_engine::Delivery::Thread;
        Program { pager: pager.clone(), space: space.clone(), is_inline }
    }

    /// Returns the address of a page of the area, counted from 0.
    pub fn page(&self, number: usize) -> usize {
        self.space.area().start + number * PAGE_SIZE
    }

    /// Reads a page.
    pub fn read<R>(&self, number: usize, read: impl FnOnce(&[u8]) -> R) -> R {
        let mut read_once = Some(read);
        let page = self.page(number);
        self.touch(page, false, || {
            self.space.read(page, |bytes| read_once.take().expect("read once")(bytes))
        })
    }

    /// Writes a page.
    pub fn write<R>(&self, number: usize, write: impl FnOnce(&mut [u8]) -> R) -> R {
        let mut write = Some(write);
        let page = self.page(number);
        self.touch(page, true, || {
            self.space.write(page, |bytes| write.take().expect("written once")(bytes))
        })
    }

    fn touch<R>(
        &self,
        page: usize,
        write: bool,
        mut access: impl FnMut() -> Result<R, crate::fake::TouchTicket>,
    ) -> R {
        loop {
            let ticket = match access() {
                Ok(result) => return result,
                Err(ticket) => ticket,
            };
            self.serve(PageFault {
                addr: page,
                protected: ticket.protected,
                // A handler does not learn that.
                write: write && self.is_inline,
            });
            if self.is_inline {
                self.space.leave(ticket);
            } else {
                self.space.sleep(ticket);
            }
        }
    }

    fn serve(&self, fault: PageFault) {
        for _ in 0..AGAIN_MAX {
            match self.pager.faults().fault(fault) {
                FaultOutcome::Yes => return,
                FaultOutcome::Again => yield_now(),
                FaultOutcome::NotManaged => panic!("{:#x} is not managed", fault.addr),
            }
        }
        panic!("a fault at {:#x} was not served in {AGAIN_MAX} tries", fault.addr);
    }
}

/// Returns settings: 16 KiB blocks, folios up to 64 KiB, codec lz4, 8 MiB for everything, and a
/// swap device that may be full.
pub fn small_config() -> memfold_engine::Config {
    let mut config = memfold_engine::Config::new(1 << 30);
    config.limit_bytes = Some(memfold_engine::config::WORKABLE_MIN_BYTES);
    config.delivery = memfold_engine::Delivery::Thread;
    config.folio_order = memfold_os::units::Order::new(4).expect("an order");
    config.swap_keep_free_bytes = 0;
    config.pools = 1;
    config
}

/// An engine over a fake address space, with its program: the base of most tests.
pub struct Setup {
    /// The fake.
    pub space: FakeSpace,
    /// Faults between the engine and the fake.
    pub troubles: crate::trouble::Troubled,
    /// The engine. It has no threads; [`Pager::work`] does their work.
    pub pager: Arc<Pager>,
    /// Its program.
    pub program: Program,
}

impl Setup {
    /// Makes an engine of `config` (with the least limit that is allowed, if it has none) over an
    /// area of `pages` pages.
    ///
    /// # Panics
    /// If the engine can't be made.
    pub fn new(config: memfold_engine::Config, pages: usize) -> Setup {
        Setup::with_disk(config, pages, None)
    }

    /// Makes one with a swap device.
    ///
    /// # Panics
    /// If the engine can't be made.
    pub fn with_disk(
        config: memfold_engine::Config,
        pages: usize,
        disk: Option<&crate::disk::MemoryDisk>,
    ) -> Setup {
        Setup::with_tiers(config, pages, disk, None)
    }

    /// Makes one with a swap device and a remote store behind it.
    ///
    /// # Panics
    /// If the engine can't be made.
    pub fn with_tiers(
        mut config: memfold_engine::Config,
        pages: usize,
        disk: Option<&crate::disk::MemoryDisk>,
        remote: Option<&crate::remote::MemoryRemote>,
    ) -> Setup {
        if disk.is_some() {
            config.swap = Some("memory".into());
        }
        if config.limit_bytes.is_none() && config.resident_bytes.is_none() {
            config.resident_bytes = Some(memfold_engine::config::WORKABLE_MIN_BYTES);
        }
        let space = FakeSpace::new(pages);
        let troubles = crate::trouble::Troubled::new(&space);
        let parts = memfold_engine::pager::PagerParts {
            space: Box::new(troubles.clone()),
            has_move: true,
            reports_limit: false,
            stats: memfold_engine::pager::StatsPlace::Own(Box::new(memfold_stats::Stats::new())),
            cpus: 1,
            disk: disk.map(|disk| Box::new(disk.clone()) as Box<dyn memfold_swap::disk::Disk>),
            delegate_queue: None,
            shared_limit: None,
            compressors: memfold_engine::pager::codec_threads(&config, 1).expect("threads"),
            remote: remote
                .map(|remote| Box::new(remote.clone()) as Box<dyn memfold_swap::remote::Remote>),
        };
        let pager = Arc::new(Pager::new(config, parts).expect("an engine"));
        let area = space.area();
        pager.mappings().manage_empty(area.start, area.end);
        let program = Program::new(&pager, &space);
        Setup { space, troubles, pager, program }
    }

    /// Returns the addresses of a range of pages, counted from 0.
    pub fn addrs(&self, pages: std::ops::Range<usize>) -> std::ops::Range<usize> {
        self.program.page(pages.start)..self.program.page(pages.end)
    }

    /// Verifies the engine while no thread works.
    ///
    /// # Panics
    /// If anything is wrong with its structures or sums.
    pub fn assert_sound(&self) {
        if let Err(why) = self.pager.check() {
            panic!("{why}");
        }
        assert_eq!(self.pager.stats().check_sums(), Ok(()));
    }
}

/// Returns the message with which `read` ends the program. A read whose bytes are lost must not
/// return.
///
/// # Panics
/// It returns.
#[track_caller]
pub fn fatal(read: impl FnOnce()) -> String {
    let payload =
        catch_unwind(AssertUnwindSafe(read)).expect_err("a wrong byte must never be read");
    let text = payload.downcast_ref::<&str>().map(|text| text.to_string());
    text.unwrap_or_else(|| payload.downcast_ref::<String>().cloned().expect("panics have text"))
}
