//! `memfold bench costs`: the time of each event that a replay counts, on this machine.

use crate::common::refusal::Refusal;
use crate::common::table::layout;
use crate::corpus::Given;
use crate::corpus::file::{CorpusFile, PAGE};
use crate::harness::plain::PlainArea;
use crate::store::pool;
use memfold_os::uffd::drop::{AddressSpan, drop_spans};
use memfold_os::uffd::{Uffd, feature};
use memfold_store::CodecWorker;
use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering::SeqCst};
use std::time::Instant;

const PAGES: usize = 4096;
const LEN: usize = PAGES * PAGE;
const BATCH: usize = 64;
const ROUNDS: usize = 7;
/// The kernel's PIDFD_SELF_THREAD_GROUP: the calling process, in calls that take a pidfd.
const SELF: c_int = -10001;

/// Arguments of `memfold bench costs`.
#[derive(clap::Args, Debug, Clone)]
pub struct CostsArgs {
    /// The data
    #[command(flatten)]
    pub corpus: Given,
}

/// Measures and prints the time of each event, alone and while another thread is busy.
pub fn costs(args: &CostsArgs) -> anyhow::Result<i32> {
    let corpus = CorpusFile::open(&args.corpus.find()?)?;
    let bench = Costs::new(&corpus)?;
    let quiet_costs = bench.all()?;
    let is_over = AtomicBool::new(false);
    let busy = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(SeqCst) {
                std::hint::spin_loop();
            }
        });
        let busy = bench.all();
        is_over.store(true, SeqCst);
        busy
    })?;
    let mut rows = vec![["us a page", "alone", "beside a busy thread"].map(String::from).to_vec()];
    for ((name, quiet_cost), (_, busy)) in quiet_costs.iter().zip(busy) {
        rows.push(vec![name.to_string(), format!("{quiet_cost:.2}"), format!("{busy:.2}")]);
    }
    print!("{}", layout(&rows));
    Ok(0)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// What the signal handler needs: the faulting page is copied from `SOURCE`.
static UFFD: AtomicPtr<Uffd> = AtomicPtr::new(null_mut());
static SOURCE: AtomicUsize = AtomicUsize::new(0);

extern "C" fn copy_faulting_page(_: c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes the information of a SIGBUS, which has an address. `UFFD` is that
    // of the `Costs` that touches the page in this thread, and `SOURCE` a page of its corpus.
    let outcome = unsafe {
        let page = (*info).si_addr() as usize & !(PAGE - 1);
        (*UFFD.load(SeqCst)).copy(page, SOURCE.load(SeqCst) as *const u8, PAGE, false)
    };
    if outcome.is_err() {
        std::process::abort();
    }
}

/// Two areas of [`PAGES`] pages, one as a program's memory, one as frames, and the bytes for them.
struct Costs<'c> {
    uffd: Box<Uffd>,
    area: PlainArea,
    corpus: &'c CorpusFile,
}

impl<'c> Costs<'c> {
    fn new(corpus: &'c CorpusFile) -> anyhow::Result<Costs<'c>> {
        let refusal = |error| Refusal::Machine(format!("userfaultfd with moves: {error}"));
        let features = feature::SIGBUS | feature::WP | feature::MOVE;
        let uffd = Box::new(Uffd::open(features, true).map_err(refusal)?);
        let area = PlainArea::new(2 * LEN, false)?;
        // SAFETY: the area is new, and its pages are touched only here.
        unsafe { uffd.register(area.as_ptr() as usize, 2 * LEN, true) }
            .map_err(|errno| anyhow::anyhow!("registering memory: {errno:?}"))?;
        Ok(Costs { uffd, area, corpus })
    }

    /// Returns the address of page `n` in an order that is not that of addresses.
    fn address_of(&self, n: usize) -> usize {
        self.area.as_ptr() as usize + n * 1667 % PAGES * PAGE
    }

    fn frame(&self, n: usize) -> usize {
        self.address_of(n) + LEN
    }

    /// Empties both areas.
    fn clear(&self) {
        // SAFETY: the range is this area's, whose bytes are not needed any more.
        let result =
            unsafe { libc::madvise(self.area.as_ptr().cast(), 2 * LEN, libc::MADV_DONTNEED) };
        assert_eq!(result, 0, "a range of anonymous memory is dropped");
    }

    fn fill(&self, protected: bool) -> anyhow::Result<()> {
        for n in 0..PAGES {
            self.copy(n, protected)?;
        }
        Ok(())
    }

    fn copy(&self, n: usize, protected: bool) -> anyhow::Result<()> {
        let (target, source) = (self.address_of(n), self.corpus.page(n as u64));
        // SAFETY: the page is this area's, and a page of the corpus is readable.
        let outcome = unsafe {
            match protected {
                true => self.uffd.copy_protected(target, source, PAGE),
                false => self.uffd.copy(target, source, PAGE, false),
            }
        };
        outcome.map_err(|partial| anyhow::anyhow!("UFFDIO_COPY: {:?}", partial.errno))
    }

    /// Returns the median time a page of `step`, which is called for each page after `prepare`.
    fn median(
        &self,
        prepare: impl Fn() -> anyhow::Result<()>,
        mut step: impl FnMut(usize) -> anyhow::Result<()>,
    ) -> anyhow::Result<f64> {
        let mut times = Vec::new();
        for _ in 0..ROUNDS {
            self.clear();
            prepare()?;
            let begin = Instant::now();
            for n in 0..PAGES {
                step(n)?;
            }
            times.push(begin.elapsed().as_secs_f64() * 1e6 / PAGES as f64);
        }
        Ok(median(times))
    }

    fn all(&self) -> anyhow::Result<Vec<(&'static str, f64)>> {
        let failure = |what: &str, errno| anyhow::anyhow!("{what}: {errno:?}");
        let copy = self.median(|| Ok(()), |n| self.copy(n, false))?;
        let fault = self.fault()?;
        let unprotect = self.median(
            || self.fill(true),
            |n| {
                let outcome = self.uffd.protect(self.address_of(n), PAGE, false);
                outcome.map_err(|errno| failure("UFFDIO_WRITEPROTECT", errno))
            },
        )?;
        let move_cost = self.median(
            || self.fill(false),
            |n| {
                // SAFETY: both pages are this area's.
                let outcome =
                    unsafe { self.uffd.move_pages(self.frame(n), self.address_of(n), PAGE, false) };
                outcome.map_err(|partial| failure("UFFDIO_MOVE", partial.errno))
            },
        )?;
        let drop_cost = self.median(
            || self.fill(true),
            |n| {
                if n.is_multiple_of(BATCH) {
                    // SAFETY: the pages are this area's, and not needed any more.
                    unsafe { drop_spans(&self.batch(n)) }
                        .map_err(|partial| failure("process_madvise", partial.errno))?;
                }
                Ok(())
            },
        )?;
        let free_cost = self.median(|| self.fill(false), |n| self.free(n))?;
        let (save, load) = self.codec()?;
        Ok(vec![
            ("fault: SIGBUS and return", fault - copy),
            ("UFFDIO_COPY", copy),
            ("UFFDIO_WRITEPROTECT", unprotect),
            ("UFFDIO_MOVE", move_cost),
            ("drop, batches of 64", drop_cost),
            ("MADV_FREE, batches of 64", free_cost),
            ("compress and store, lz4", save),
            ("decompress, lz4", load),
        ])
    }

    fn batch(&self, n: usize) -> Vec<AddressSpan> {
        (n..n + BATCH).map(|n| AddressSpan { start: self.address_of(n), len: PAGE }).collect()
    }

    /// Clears the write bits of a batch of pages that begins with page `n`.
    fn free(&self, n: usize) -> anyhow::Result<()> {
        if !n.is_multiple_of(BATCH) {
            return Ok(());
        }
        let spans = self.batch(n);
        // SAFETY: a span is laid out as an `iovec`. The pages are this area's, and not needed any
        // more.
        let outcome = unsafe {
            let advice = libc::MADV_FREE;
            libc::syscall(libc::SYS_process_madvise, SELF, spans.as_ptr(), BATCH, advice, 0)
        };
        anyhow::ensure!(outcome >= 0, "MADV_FREE: {}", std::io::Error::last_os_error());
        Ok(())
    }

    /// Returns the time of a touch that a signal handler serves by a copy.
    fn fault(&self) -> anyhow::Result<f64> {
        UFFD.store((&raw const *self.uffd).cast_mut(), SeqCst);
        SOURCE.store(self.corpus.page(0) as usize, SeqCst);
        // SAFETY: zeros are a valid `sigaction`, which is filled in below. The handler makes only
        // a system call.
        let before = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            let mut before: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = copy_faulting_page as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            libc::sigfillset(&mut action.sa_mask);
            libc::sigaction(libc::SIGBUS, &action, &mut before);
            before
        };
        let time = self.median(
            || Ok(()),
            |n| {
                // SAFETY: the page is this area's. It is missing, and the handler fills it.
                unsafe { (self.address_of(n) as *const u8).read_volatile() };
                Ok(())
            },
        );
        // SAFETY: `before` is the action that the kernel returned.
        unsafe { libc::sigaction(libc::SIGBUS, &before, null_mut()) };
        time
    }

    /// Returns the times of saves and loads of single pages.
    fn codec(&self) -> anyhow::Result<(f64, f64)> {
        let order = pool::order(0);
        let store = pool::store("lz4", 0, 1)?;
        let mut worker: CodecWorker = store.worker();
        let mut buffer = pool::Buffer::new(PAGE);
        let pages = PAGES.min(self.corpus.pages());
        let (mut saves, mut loads) = (Vec::new(), Vec::new());
        let us = |begin: Instant| begin.elapsed().as_secs_f64() * 1e6 / pages as f64;
        for _ in 0..ROUNDS {
            let begin = Instant::now();
            let handles: Vec<_> = (0..pages as u64)
                .map(|n| pool::save(&store, &mut worker, self.corpus, n, order)[0])
                .collect();
            saves.push(us(begin));
            let begin = Instant::now();
            for n in 0..pages {
                let handle = handles[n * 1667 % pages];
                pool::load(&store, &mut worker, &[handle], order, buffer.bytes());
            }
            loads.push(us(begin));
            handles.into_iter().for_each(|handle| store.free(handle));
        }
        let (save, load) = (median(saves), median(loads));
        Ok((save, load))
    }
}
