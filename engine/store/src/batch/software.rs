//! Compression on several cores: threads that serve the queues of a pool.
use crate::batch::{BATCH_MAX, BatchJob, BatchResult, Compressor, CompressorPool};
use crate::codec::CodecSpec;
use crate::codec::bare::BareCodec;
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use memfold_os::Errno;
use memfold_os::sync::{Condvar, Mutex};
use memfold_os::thread::Thread;

/// Most jobs that wait in a pool, over all queues.
const WAITING_MAX: usize = 4 * BATCH_MAX;
/// Turns that an idle thread polls before it sleeps: a few microseconds, because the next batch is
/// often near.
const TURNS: usize = 2000;

/// Threads that compress for the [`SoftwareQueue`]s made from it. They block all signals.
pub struct SoftwarePool {
    shared: Arc<SoftwareState>,
    threads: Vec<Thread>,
    spec: CodecSpec,
    block_bytes_max: usize,
}

struct SoftwareState {
    jobs: Mutex<JobQueue>,
    /// Signalled when jobs come, or the pool ends.
    changed: Condvar,
}

/// A job and the queue for its result.
type Ticket = (BatchJob, Arc<ResultQueue>);

struct JobQueue {
    waiting: Box<[Option<Ticket>]>,
    head: usize,
    count: usize,
    stop: bool,
}

/// The results of one queue.
struct ResultQueue {
    state: Mutex<ResultState>,
    changed: Condvar,
}

struct ResultState {
    done: [BatchResult; BATCH_MAX],
    count: usize,
    /// Jobs that a thread is running.
    running: usize,
}

/// One user's queue of a [`SoftwarePool`]. Its user works too: while it waits in `complete` it runs
/// jobs itself.
pub struct SoftwareQueue {
    shared: Arc<SoftwareState>,
    results: Arc<ResultQueue>,
    codec: BareCodec,
    spec: CodecSpec,
    under_way: usize,
}

impl SoftwarePool {
    /// Starts `threads` threads, each with a codec for blocks of up to `block_bytes_max` bytes. The
    /// users of queues work too, so the best number is one less than the cores.
    ///
    /// # Errors
    /// EAGAIN: no more threads.
    pub fn start(
        spec: CodecSpec,
        block_bytes_max: usize,
        threads: usize,
    ) -> Result<SoftwarePool, Errno> {
        let slots = (0..WAITING_MAX).map(|_| None).collect();
        let jobs = Mutex::new(JobQueue { waiting: slots, head: 0, count: 0, stop: false });
        let state = Arc::new(SoftwareState { jobs, changed: Condvar::new() });
        let mut pool = SoftwarePool { shared: state, threads: Vec::new(), spec, block_bytes_max };
        for _ in 0..threads {
            let own = Box::new((pool.shared.clone(), BareCodec::new(spec, block_bytes_max)));
            let arg = Box::into_raw(own);
            match Thread::start(c"memfold-codec", run, arg as usize) {
                Ok(thread) => pool.threads.push(thread),
                Err(error) => {
                    // SAFETY: no thread was started, so this function still owns the box.
                    drop(unsafe { Box::from_raw(arg) });
                    return Err(error);
                }
            }
        }
        Ok(pool)
    }

    /// Makes a queue. It allocates everything that it will ever need.
    pub fn queue(&self) -> SoftwareQueue {
        let state = ResultState { done: [BatchResult::NONE; BATCH_MAX], count: 0, running: 0 };
        SoftwareQueue {
            shared: self.shared.clone(),
            results: Arc::new(ResultQueue { state: Mutex::new(state), changed: Condvar::new() }),
            codec: BareCodec::new(self.spec, self.block_bytes_max),
            spec: self.spec,
            under_way: 0,
        }
    }
}

impl CompressorPool for SoftwarePool {
    fn queue(&self) -> Box<dyn Compressor> {
        Box::new(SoftwarePool::queue(self))
    }
}

impl Drop for SoftwarePool {
    /// Ends the threads after their present jobs. Remaining queues run their jobs themselves.
    fn drop(&mut self) {
        self.shared.jobs.lock().stop = true;
        self.shared.changed.notify_all();
        self.threads.drain(..).for_each(Thread::join);
    }
}

fn run(arg: usize) {
    // SAFETY: `start` gave this thread the box.
    let (state, mut codec) = *unsafe { Box::from_raw(arg as *mut (Arc<SoftwareState>, BareCodec)) };
    while let Some((job, results)) = state.await_ticket() {
        // SAFETY: the caller of `submit` vouched for the job's memory until the result is there.
        let result = unsafe { codec.compress(job.src, job.len, job.dst, job.room) };
        results.finish(BatchResult { tag: job.tag, result });
    }
}

impl SoftwareState {
    /// Waits for a job; `None` at the end of the pool.
    fn await_ticket(&self) -> Option<Ticket> {
        let mut turns = 0;
        let mut jobs = self.jobs.lock();
        loop {
            if jobs.stop {
                return None;
            }
            if let Some(job) = jobs.pop() {
                return Some(job);
            }
            if turns < TURNS {
                turns += 1;
                drop(jobs);
                core::hint::spin_loop();
                jobs = self.jobs.lock();
            } else {
                jobs = self.changed.wait(jobs);
                turns = 0;
            }
        }
    }
}

impl JobQueue {
    fn push(&mut self, job: BatchJob, results: &Arc<ResultQueue>) -> bool {
        // Gaps of jobs that were taken out of the middle.
        while self.count > 0 && self.waiting[(self.head + self.count - 1) % WAITING_MAX].is_none() {
            self.count -= 1;
        }
        if self.count == WAITING_MAX {
            return false;
        }
        let at = (self.head + self.count) % WAITING_MAX;
        self.waiting[at] = Some((job, results.clone()));
        self.count += 1;
        true
    }

    /// Takes the oldest job, and marks it as running.
    fn pop(&mut self) -> Option<Ticket> {
        while self.count > 0 {
            let place = self.waiting[self.head].take();
            self.head = (self.head + 1) % WAITING_MAX;
            self.count -= 1;
            if let Some((job, results)) = place {
                results.state.lock().running += 1;
                return Some((job, results));
            }
        }
        None
    }

    /// Removes the jobs of one queue.
    fn withdraw(&mut self, results: &Arc<ResultQueue>) {
        for slot in &mut self.waiting {
            if slot.as_ref().is_some_and(|(_, r)| Arc::ptr_eq(r, results)) {
                *slot = None;
            }
        }
    }

    /// Takes the newest waiting job of one queue, so that the threads and the user work at
    /// different ends.
    fn pop_own(&mut self, results: &Arc<ResultQueue>) -> Option<BatchJob> {
        for back in (0..self.count).rev() {
            let slot = &mut self.waiting[(self.head + back) % WAITING_MAX];
            if slot.as_ref().is_some_and(|(_, r)| Arc::ptr_eq(r, results)) {
                return slot.take().map(|(job, _)| job);
            }
        }
        None
    }
}

impl ResultQueue {
    fn finish(&self, done: BatchResult) {
        let mut state = self.state.lock();
        let count = state.count;
        // There are never more results than jobs in progress, which `submit` bounds.
        state.done[count] = done;
        state.count += 1;
        state.running -= 1;
        drop(state);
        self.changed.notify_all();
    }

    fn drain_into(&self, done: &mut [BatchResult]) -> usize {
        let mut state = self.state.lock();
        let count = state.count.min(done.len());
        let rest = state.count - count;
        done[..count].copy_from_slice(&state.done[rest..rest + count]);
        state.count = rest;
        count
    }
}

impl Compressor for SoftwareQueue {
    fn codec(&self) -> CodecSpec {
        self.spec
    }

    unsafe fn submit(&mut self, jobs: &[BatchJob]) -> usize {
        let mut places = self.shared.jobs.lock();
        let room = BATCH_MAX - self.under_way;
        let count =
            jobs.iter().take(room).take_while(|job| places.push(**job, &self.results)).count();
        drop(places);
        self.under_way += count;
        self.shared.changed.notify_all();
        count
    }

    fn complete(&mut self, done: &mut [BatchResult], wait_ns: u64) -> usize {
        loop {
            let count = self.results.drain_into(done);
            if count > 0 || self.under_way == 0 || done.is_empty() {
                self.under_way -= count;
                return count;
            }
            if wait_ns == 0 {
                return 0;
            }
            let own = self.shared.jobs.lock().pop_own(&self.results);
            if let Some(job) = own {
                // SAFETY: the caller of `submit` vouched for the job's memory; no other thread has
                // the job any more.
                let result = unsafe { self.codec.compress(job.src, job.len, job.dst, job.room) };
                self.under_way -= 1;
                done[0] = BatchResult { tag: job.tag, result };
                return 1;
            }
            // All remaining jobs run on threads, which need no more than a codec's time.
            let mut state = self.results.state.lock();
            while state.count == 0 {
                state = self.results.changed.wait(state);
            }
        }
    }

    fn cancel(&mut self) {
        self.shared.jobs.lock().withdraw(&self.results);
        let mut state = self.results.state.lock();
        while state.running > 0 {
            state = self.results.changed.wait(state);
        }
        state.count = 0;
        self.under_way = 0;
    }
}

impl Drop for SoftwareQueue {
    fn drop(&mut self) {
        self.cancel();
    }
}
