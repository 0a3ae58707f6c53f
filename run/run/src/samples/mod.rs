//! The ring through which the processes of a run leave samples of their loads for `memfold record`:
//! the registers and the top of the stack of a thread that has touched folded memory, and where
//! larger mappings were made.
//!
//! The ring is shared memory without locks. A process takes a free place, writes a sample there, and
//! marks it as whole. `memfold record` copies it and frees the place. A process that is killed
//! meanwhile leaves a place that is lost for the others.
mod interpreter;

pub use self::interpreter::{CodeNames, Interpreter, UnicodeLayout};

use self::interpreter::InterpreterPlace;
use alloc::string::String;
use alloc::vec::Vec;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU32, AtomicU64};
use memfold_os::memory::shared;
use memfold_os::{Errno, units::PAGE_SIZE};
use rustix::fd::{AsFd, OwnedFd};

/// Words of a stack in a sample, at most: 16 KiB. `perf record --call-graph=dwarf` has 8 KiB by
/// default. Interpreters and numerical libraries have larger frames.
pub const STACK_WORDS_MAX: usize = 2048;
/// Frames of an interpreter in a sample, at most. Further frames are left out.
pub const FRAMES_MAX: usize = 128;
/// Samples in the ring.
const PLACES: usize = 512;
/// Programs with an interpreter, at most. The functions of further ones have no names.
const INTERPRETERS: usize = 64;

const LAYOUT_VERSION: u64 = 1;

/// States of a place.
const FREE: u32 = 0;
const TAKEN: u32 = 1;
const WHOLE: u32 = 2;

/// Kinds of samples.
const LOAD: u32 = 0;
const MAPPING: u32 = 1;
const NAME: u32 = 2;

#[repr(C, align(4096))]
struct RingHeader {
    version: AtomicU64,
    /// One load in so many is sampled.
    every: AtomicU64,
    /// Faults of all processes.
    faults: AtomicU64,
    /// Place at which the next search for a free one begins.
    next: AtomicU64,
    /// Samples that found no free place.
    lost: AtomicU64,
    interpreters: [InterpreterPlace; INTERPRETERS],
}

#[repr(C)]
struct SamplePlace {
    state: AtomicU32,
    kind: AtomicU32,
    process: AtomicU32,
    thread: AtomicU32,
    image: AtomicU64,
    time_ns: AtomicU64,
    spent_ns: AtomicU64,
    start: AtomicU64,
    len: AtomicU64,
    registers: [AtomicU64; 3],
    frame_count: AtomicU32,
    word_count: AtomicU32,
    frames: [AtomicU64; FRAMES_MAX],
    /// The stack, or a text.
    words: [AtomicU64; STACK_WORDS_MAX],
}

/// The ring, mapped as long as this process lives.
#[derive(Copy, Clone)]
pub struct SampleRing {
    head: &'static RingHeader,
    places: &'static [SamplePlace; PLACES],
}

/// The process that leaves a sample.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SampledProcess {
    /// Its number as `memfold run` sees it.
    pub number: u32,
    /// Distinguishes the programs that it executes one after the other. A copy by fork has the same
    /// image as its parent. It is never 0.
    pub image: u64,
}

/// What a sample is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SampleKind {
    /// The thread has touched folded memory.
    Load {
        /// The address that it touched.
        address: u64,
        /// How long the load took, nanoseconds.
        spent_ns: u64,
    },
    /// The thread has mapped memory.
    Mapping {
        /// The first address.
        start: u64,
        /// The length in bytes.
        len: u64,
    },
    /// The name of a function of an interpreter.
    Name {
        /// Identifies the function in the frames of samples.
        code: u64,
        /// The name of the function.
        name: String,
        /// The file that defines it.
        file: String,
        /// The line where it begins.
        line: u64,
    },
}

/// A sample that was taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// The process.
    pub process: SampledProcess,
    /// The thread's number in its own PID namespace.
    pub thread: u32,
    /// When it was taken, nanoseconds of CLOCK_MONOTONIC.
    pub time_ns: u64,
    /// What it is about.
    pub kind: SampleKind,
    /// The instruction pointer, stack pointer and frame pointer of the program.
    pub registers: [u64; 3],
    /// Functions of an interpreter, the innermost first: 0 stands for a change to compiled code.
    pub frames: Vec<u64>,
    /// The stack from the stack pointer on.
    pub stack: Vec<u64>,
}

/// A place of the ring that the caller has taken, and fills.
pub struct OpenSample<'a> {
    place: &'a SamplePlace,
}

fn len_of_ring() -> usize {
    size_of::<RingHeader>() + size_of::<SamplePlace>() * PLACES
}

impl SampleRing {
    /// Creates a ring for samples of one load in `every`. Returns it with its file.
    ///
    /// # Errors
    /// The errors of creating and mapping the file.
    pub fn create(every: u64) -> Result<(SampleRing, OwnedFd), Errno> {
        let file = shared::create(c"memfold-samples", len_of_ring() as u64)?;
        let ring = SampleRing::map(&file)?;
        ring.head.every.store(every.max(1), Relaxed);
        ring.head.version.store(LAYOUT_VERSION, Relaxed);
        Ok((ring, file))
    }

    /// Maps a ring from its file.
    ///
    /// # Errors
    /// - EINVAL: the file is no ring, or has another version.
    /// - The errors of mapping the file.
    pub fn open(file: impl AsFd) -> Result<SampleRing, Errno> {
        let ring = SampleRing::map(file)?;
        let is_right = ring.head.version.load(Relaxed) == LAYOUT_VERSION;
        if is_right { Ok(ring) } else { Err(Errno::INVAL) }
    }

    fn map(file: impl AsFd) -> Result<SampleRing, Errno> {
        const {
            assert!(size_of::<RingHeader>().is_multiple_of(PAGE_SIZE));
            assert!(align_of::<SamplePlace>() <= PAGE_SIZE);
        }
        let (at, _) = shared::map(file, len_of_ring())?;
        // SAFETY: the mapping starts at a page, is long enough for the header and all places, and is
        // never unmapped. Both hold only atomics, for which every bit pattern is valid and which
        // other processes may change at any time.
        unsafe {
            let places = at.byte_add(size_of::<RingHeader>());
            Ok(SampleRing { head: &*at.cast(), places: &*places.cast() })
        }
    }

    /// Returns one load in how many is sampled.
    pub fn every(&self) -> u64 {
        self.head.every.load(Relaxed).max(1)
    }

    /// Counts one fault. Returns whether it must be sampled.
    pub fn is_due(&self) -> bool {
        let number = self.head.faults.fetch_add(1, Relaxed);
        // A multiplicative hash (Knuth, TAOCP 6.4), so that no pattern of the program's loads falls
        // in with the samples.
        let hash = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        hash.is_multiple_of(self.every())
    }

    /// Returns how many samples were lost, because the ring had no free place.
    pub fn lost(&self) -> u64 {
        self.head.lost.load(Relaxed)
    }

    /// Takes a free place. Returns `None`, and counts a lost sample, if there is none.
    pub fn begin(&self) -> Option<OpenSample<'_>> {
        let first = self.head.next.fetch_add(1, Relaxed) as usize;
        let place = (0..PLACES).map(|n| &self.places[(first + n) % PLACES]).find(|place| {
            place.state.load(Relaxed) == FREE
                && place.state.compare_exchange(FREE, TAKEN, AcqRel, Relaxed).is_ok()
        });
        if place.is_none() {
            self.head.lost.fetch_add(1, Relaxed);
        }
        place.map(|place| OpenSample { place })
    }

    /// Takes all whole samples, ordered by time.
    pub fn take(&self) -> Vec<Sample> {
        let whole = self.places.iter().filter(|place| place.state.load(Acquire) == WHOLE);
        let mut samples: Vec<Sample> = whole
            .filter_map(|place| {
                let sample = place.sample();
                place.state.store(FREE, Release);
                sample
            })
            .collect();
        samples.sort_by_key(|sample| sample.time_ns);
        samples
    }

    /// Publishes where the processes of an image have their interpreter. Returns `false` if there
    /// are too many.
    pub fn set_interpreter(&self, image: u64, interpreter: &Interpreter) -> bool {
        let free = self.head.interpreters.iter().find(|place| place.is_free());
        free.is_some_and(|place| {
            place.set(image, interpreter);
            true
        })
    }

    /// Returns where the processes of an image have their interpreter.
    pub fn interpreter(&self, image: u64) -> Option<Interpreter> {
        let mut places = self.head.interpreters.iter().take_while(|place| !place.is_free());
        places.find_map(|place| place.of(image))
    }
}

impl SamplePlace {
    /// Copies the sample. Returns `None` if a process has left something else there.
    fn sample(&self) -> Option<Sample> {
        let count = |of: &AtomicU32, most: usize| (of.load(Relaxed) as usize).min(most);
        let words = &self.words[..count(&self.word_count, STACK_WORDS_MAX)];
        let words: Vec<u64> = words.iter().map(|word| word.load(Relaxed)).collect();
        let frames = &self.frames[..count(&self.frame_count, FRAMES_MAX)];
        let (start, len) = (self.start.load(Relaxed), self.len.load(Relaxed));
        let (kind, stack) = match self.kind.load(Relaxed) {
            LOAD => {
                let spent_ns = self.spent_ns.load(Relaxed);
                (SampleKind::Load { address: start, spent_ns }, words)
            }
            MAPPING => (SampleKind::Mapping { start, len }, words),
            NAME => {
                let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
                let mut texts = bytes.split(|byte| *byte == 0);
                let mut text =
                    || texts.next().map(|text| String::from_utf8_lossy(text).into_owned());
                let (name, file) = (text()?, text()?);
                (SampleKind::Name { code: start, name, file, line: len }, Vec::new())
            }
            _ => return None,
        };
        Some(Sample {
            process: SampledProcess {
                number: self.process.load(Relaxed),
                image: self.image.load(Relaxed),
            },
            thread: self.thread.load(Relaxed),
            time_ns: self.time_ns.load(Relaxed),
            kind,
            registers: [0, 1, 2].map(|n| self.registers[n].load(Relaxed)),
            frames: frames.iter().map(|frame| frame.load(Relaxed)).collect(),
            stack,
        })
    }
}

impl OpenSample<'_> {
    /// Sets the process, the thread, and the time in nanoseconds of CLOCK_MONOTONIC.
    pub fn set_thread(&self, process: SampledProcess, thread: u32, time_ns: u64) {
        self.place.process.store(process.number, Relaxed);
        self.place.image.store(process.image, Relaxed);
        self.place.thread.store(thread, Relaxed);
        self.place.time_ns.store(time_ns, Relaxed);
        self.place.frame_count.store(0, Relaxed);
        self.place.word_count.store(0, Relaxed);
    }

    /// Makes it the sample of a load.
    pub fn set_load(&self, address: u64, spent_ns: u64) {
        self.place.kind.store(LOAD, Relaxed);
        self.place.start.store(address, Relaxed);
        self.place.spent_ns.store(spent_ns, Relaxed);
    }

    /// Makes it the sample of a mapping.
    pub fn set_mapping(&self, start: u64, len: u64) {
        self.place.kind.store(MAPPING, Relaxed);
        self.place.start.store(start, Relaxed);
        self.place.len.store(len, Relaxed);
    }

    /// Makes it the name of a function. Its words must be the bytes of the name, a zero, the file,
    /// and a zero.
    pub fn set_name(&self, code: u64, line: u64) {
        self.place.kind.store(NAME, Relaxed);
        self.place.start.store(code, Relaxed);
        self.place.len.store(line, Relaxed);
    }

    /// Sets the instruction pointer, the stack pointer and the frame pointer.
    pub fn set_registers(&self, registers: [u64; 3]) {
        self.place.registers.iter().zip(registers).for_each(|(to, from)| to.store(from, Relaxed));
    }

    /// Sets the functions of an interpreter, as many as there is room for.
    pub fn set_frames(&self, frames: &[u64]) {
        let count = frames.len().min(FRAMES_MAX);
        self.place.frames.iter().zip(frames).for_each(|(to, from)| to.store(*from, Relaxed));
        self.place.frame_count.store(count as u32, Relaxed);
    }

    /// Adds words of the stack, or of a text, as far as there is room. Returns `false` if there
    /// isn't.
    pub fn add_words(&self, words: &[u64]) -> bool {
        let at = (self.place.word_count.load(Relaxed) as usize).min(STACK_WORDS_MAX);
        let room = &self.place.words[at..];
        let count = room.len().min(words.len());
        room.iter().zip(words).for_each(|(to, from)| to.store(*from, Relaxed));
        self.place.word_count.store((at + count) as u32, Relaxed);
        count == words.len()
    }

    /// Leaves the sample for `memfold record`.
    pub fn finish(self) {
        self.place.state.store(WHOLE, Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: SampledProcess = SampledProcess { number: 7, image: 9 };

    fn leave_load(ring: &SampleRing, address: u64, time_ns: u64) -> bool {
        let Some(sample) = ring.begin() else { return false };
        sample.set_thread(OWN, 8, time_ns);
        sample.set_load(address, 5);
        sample.set_registers([1, 2, 3]);
        sample.set_frames(&[11, 0]);
        assert!(sample.add_words(&[21, 22]) && sample.add_words(&[23]));
        sample.finish();
        true
    }

    #[test]
    fn samples_are_taken_whole_and_by_time() {
        let (ring, file) = SampleRing::create(3).unwrap();
        let other = SampleRing::open(&file).unwrap();
        assert_eq!(other.every(), 3);
        assert!(leave_load(&other, 100, 60) && leave_load(&other, 101, 50));
        let open = other.begin().unwrap();
        let samples = ring.take();
        let kind = |address| SampleKind::Load { address, spent_ns: 5 };
        assert_eq!(
            samples.iter().map(|sample| sample.kind.clone()).collect::<Vec<_>>(),
            [kind(101), kind(100)]
        );
        let Sample { process, thread, time_ns, registers, frames, stack, .. } = &samples[0];
        assert_eq!((*process, *thread, *time_ns, *registers), (OWN, 8, 50, [1, 2, 3]));
        assert_eq!((&frames[..], &stack[..]), (&[11, 0][..], &[21, 22, 23][..]));
        assert!(ring.take().is_empty(), "an open sample isn't whole");
        open.finish();
        assert_eq!(ring.take().len(), 1);
    }

    #[test]
    fn full_ring_counts_lost_samples_and_recovers() {
        let (ring, _file) = SampleRing::create(1).unwrap();
        let rest = (0..PLACES as u64 + 3).filter(|n| leave_load(&ring, *n, *n)).count();
        assert_eq!((rest, ring.lost()), (PLACES, 3));
        assert_eq!(ring.take().len(), PLACES);
        assert!(leave_load(&ring, 1, 1));
        assert_eq!(ring.take().len(), 1);
    }

    #[test]
    fn sample_is_cut_off_where_its_place_ends() {
        let (ring, _file) = SampleRing::create(1).unwrap();
        let sample = ring.begin().unwrap();
        sample.set_thread(OWN, 8, 1);
        sample.set_mapping(4096, 8192);
        assert!(sample.add_words(&[1; STACK_WORDS_MAX - 1]) && !sample.add_words(&[2, 3]));
        sample.set_frames(&[4; FRAMES_MAX + 1]);
        sample.finish();
        let sample = ring.take().remove(0);
        assert_eq!(sample.frames, [4; FRAMES_MAX]);
        assert_eq!((sample.stack.len(), sample.stack[STACK_WORDS_MAX - 1]), (STACK_WORDS_MAX, 2));
        assert_eq!(sample.kind, SampleKind::Mapping { start: 4096, len: 8192 });
    }

    #[test]
    fn name_of_a_function_has_two_texts() {
        let (ring, _file) = SampleRing::create(1).unwrap();
        let sample = ring.begin().unwrap();
        sample.set_thread(OWN, 8, 1);
        sample.set_name(77, 12);
        sample.add_words(&[
            u64::from_ne_bytes(*b"name\0fil"),
            u64::from_ne_bytes(*b"e\0\0\0\0\0\0\0"),
        ]);
        sample.finish();
        let (name, file) = ("name".into(), "file".into());
        assert_eq!(ring.take()[0].kind, SampleKind::Name { code: 77, name, file, line: 12 });
    }

    /// A process may leave anything in the ring, or nothing that is a ring.
    #[test]
    fn foreign_contents_are_no_samples() {
        let (ring, file) = SampleRing::create(1).unwrap();
        let sample = ring.begin().unwrap();
        sample.place.kind.store(99, Relaxed);
        sample.place.word_count.store(u32::MAX, Relaxed);
        sample.place.frame_count.store(u32::MAX, Relaxed);
        sample.finish();
        assert!(ring.take().is_empty());
        ring.head.version.store(LAYOUT_VERSION + 1, Relaxed);
        assert!(SampleRing::open(&file).is_err());
        let short = shared::create(c"memfold-short", 4096).unwrap();
        assert!(SampleRing::open(&short).is_err());
    }

    #[test]
    fn one_fault_in_so_many_is_due_whatever_the_pattern() {
        for every in [1, 7, 64] {
            let (ring, _file) = SampleRing::create(every).unwrap();
            let due_flags: Vec<bool> = (0..64_000).map(|_| ring.is_due()).collect();
            // The loads of a loop over several functions.
            for period in [1, 2, 3, 8, 64] {
                let count =
                    due_flags.iter().step_by(period).filter(|is_due| **is_due).count() as u64;
                let expected = 64_000 / period as u64 / every;
                assert!(count.abs_diff(expected) <= expected / 5 + 5, "{every}, {period}: {count}");
            }
        }
    }

    #[test]
    fn interpreter_is_found_by_the_image() {
        let (ring, file) = SampleRing::create(1).unwrap();
        let other = SampleRing::open(&file).unwrap();
        let words = core::array::from_fn(|n| n as u64);
        let interpreter = Interpreter::of_words(words);
        assert_eq!(other.interpreter(9), None);
        assert!(ring.set_interpreter(9, &interpreter));
        assert_eq!((other.interpreter(9), other.interpreter(8)), (Some(interpreter), None));
        assert_eq!(
            (1..INTERPRETERS as u64 + 5)
                .filter(|n| ring.set_interpreter(100 + n, &interpreter))
                .count(),
            INTERPRETERS - 1
        );
    }
}
