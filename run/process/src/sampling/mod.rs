//! Samples of loads for `memfold record`: in which place of the program a thread has touched folded
//! memory, and where it made its larger mappings.
//!
//! The faulting thread itself leaves a sample once its fault is served, with no lock held. It reads
//! the stack as the gate reads all memory of the program: a folded page is loaded, and an address
//! where nothing is mapped ends the read. Faults of the sampling itself are not sampled. It makes no
//! system call but that for the time, which faults make too.
mod interpreter;

use crate::sampling::interpreter::PythonFunctions;
use memfold_engine::fault::FaultSource;
use memfold_gate::{ProgramPlace, child, read_bytes};
use memfold_os::thread::now_ns;
use memfold_os::units::PAGE_SIZE;
use memfold_run::member;
use memfold_run::samples::{OpenSample, STACK_WORDS_MAX, SampleRing};

/// Mappings of fewer bytes aren't noted.
const MAPPING_BYTES_MIN: usize = 1 << 20;
/// Words that are read from the stack at once.
const CHUNK_WORDS: usize = 64;
const WORD: usize = size_of::<u64>();

/// Returns the ring if the calling thread's fault must be sampled. A child of vfork leaves no samples:
/// it may be killed at any time, and the ring would lose a place.
pub fn due() -> Option<&'static SampleRing> {
    let ring = member::samples()?;
    (child().is_none() && ring.is_due()).then_some(ring)
}

/// Serves a fault by `serve`. Leaves a sample if that was a load. Returns whether it was served.
pub fn serve_sampled(
    ring: &SampleRing,
    address: usize,
    serve: impl FnOnce() -> (bool, FaultSource),
) -> bool {
    let begin_ns = now_ns();
    let (is_served, source) = serve();
    let is_load =
        matches!(source, FaultSource::SwapCache | FaultSource::Pool | FaultSource::Device);
    if !is_served || !is_load {
        return is_served;
    }
    let spent_ns = now_ns().saturating_sub(begin_ns);
    leave(ring, |sample| sample.set_load(address as u64, spent_ns));
    true
}

/// Leaves a sample of a call that has mapped much memory.
pub fn note_mapping(nr: usize, args: &[usize; 6], made: isize) {
    let Some(ring) = member::samples() else { return };
    let len = match nr as i64 {
        libc::SYS_mmap if args[3] as i32 & libc::MAP_ANONYMOUS != 0 => args[1],
        libc::SYS_mremap => args[2],
        _ => return,
    };
    // A result above this is the number of an error.
    let has_failed = (-(PAGE_SIZE as isize)..0).contains(&made);
    if len >= MAPPING_BYTES_MIN && !has_failed && child().is_none() {
        leave(ring, |sample| sample.set_mapping(made as u64, len as u64));
    }
}

/// Leaves a sample with the calling thread's place in the program. `about` adds what it is about.
fn leave(ring: &SampleRing, about: impl FnOnce(&OpenSample<'_>)) {
    let Some(place) = ProgramPlace::take() else { return };
    let ProgramPlace { ip, sp, bp } = place.place();
    let process = member::sampled_process();
    let interpreter = ring.interpreter(process.image);
    let Some(sample) = ring.begin() else { return };
    sample.set_thread(process, place.thread(), now_ns());
    about(&sample);
    sample.set_registers([ip, sp, bp].map(|register| register as u64));
    add_stack(&sample, sp);
    let Some(interpreter) = &interpreter else { return sample.finish() };
    let functions = PythonFunctions::of_caller(interpreter);
    sample.set_frames(functions.codes());
    sample.finish();
    functions.note_names(ring, interpreter, process, place.thread());
}

/// Adds the stack from `sp` on, as far as it can be read.
fn add_stack(sample: &OpenSample<'_>, sp: usize) {
    let mut at = sp & !(WORD - 1);
    for _ in 0..STACK_WORDS_MAX.div_ceil(CHUNK_WORDS) {
        let mut bytes = [0; CHUNK_WORDS * WORD];
        if read_bytes(at, &mut bytes).is_err() {
            return;
        }
        let (words, _) = bytes.as_chunks();
        let words: [u64; CHUNK_WORDS] = core::array::from_fn(|n| u64::from_ne_bytes(words[n]));
        sample.add_words(&words);
        at += bytes.len();
    }
}
