//! The Python functions of the calling thread, by the offsets that `memfold record` has found.
//!
//! The thread's own frames don't change while it is in the gate. The lists of interpreters and
//! threads may: a thread that isn't found has no frames in the sample.
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;
use memfold_gate::read_bytes;
use memfold_os::thread::now_ns;
use memfold_run::samples::{FRAMES_MAX, Interpreter, SampleRing, SampledProcess};

/// Interpreters and threads that are looked at, at most. A list that changes meanwhile may have a
/// circle.
const INTERPRETERS_MAX: usize = 16;
const THREADS_MAX: usize = 512;
/// Bytes of a name, and of a file's name, that are kept at most.
const TEXT_BYTES_MAX: usize = 248;
/// Places for the functions whose names `memfold record` has. One takes the place of another.
const PLACES: usize = 4096;
/// The low bits of a pointer to a code object, in which 3.14 keeps a tag.
const TAG: u64 = 7;

/// For each function whose names `memfold record` has: the code object with its names.
static NAMED: [AtomicU64; PLACES] = [const { AtomicU64::new(0) }; PLACES];

/// The functions of a thread.
pub struct PythonFunctions {
    /// Their code objects, the innermost first. 0 stands for a change to compiled code.
    codes: [u64; FRAMES_MAX],
    count: usize,
}

impl PythonFunctions {
    /// Returns those of the calling thread, as far as they can be read.
    pub fn of_caller(layout: &Interpreter) -> PythonFunctions {
        let mut functions = PythonFunctions { codes: [0; FRAMES_MAX], count: 0 };
        functions.walk(layout);
        functions
    }

    /// Returns their code objects, the innermost first. 0 stands for a change to compiled code.
    pub fn codes(&self) -> &[u64] {
        &self.codes[..self.count]
    }

    /// Writes the names of those that `memfold record` doesn't have to the ring.
    pub fn note_names(
        &self,
        ring: &SampleRing,
        layout: &Interpreter,
        process: SampledProcess,
        thread: u32,
    ) {
        for code in self.codes().iter().filter(|code| **code != 0) {
            note_name(ring, layout, (process, thread), *code);
        }
    }

    fn walk(&mut self, layout: &Interpreter) -> Option<()> {
        let mut at = innermost(layout)?;
        while at != 0 && self.count < FRAMES_MAX {
            let code = word_at(at, layout.code)? & !TAG;
            // A frame that only stands for a call by compiled code.
            let is_boundary = layout.owner != Interpreter::NONE
                && u64::from(byte_at(at, layout.owner)?) >= layout.entry_owner;
            // A function that compiled code has called.
            let is_entry = match layout.is_entry {
                Interpreter::NONE => false,
                Interpreter::ALWAYS => true,
                offset => byte_at(at, offset)? != 0,
            };
            if !is_boundary {
                self.push(code);
            }
            if is_boundary || is_entry {
                self.push(0);
            }
            at = word_at(at, layout.previous)?;
        }
        Some(())
    }

    fn push(&mut self, code: u64) {
        if let Some(place) = self.codes.get_mut(self.count) {
            *place = code;
            self.count += 1;
        }
    }
}

/// Returns the innermost frame of the calling thread.
fn innermost(layout: &Interpreter) -> Option<u64> {
    let mut interpreter = word_at(layout.runtime, layout.first_interpreter)?;
    let own = pthread_self();
    for _ in 0..INTERPRETERS_MAX {
        if interpreter == 0 {
            return None;
        }
        let mut thread = word_at(interpreter, layout.first_thread)?;
        for _ in 0..THREADS_MAX {
            if thread == 0 {
                break;
            }
            if word_at(thread, layout.thread_id)? == own {
                let holder = match layout.c_frame {
                    Interpreter::NONE => thread,
                    c_frame => word_at(thread, c_frame)?,
                };
                return word_at(holder, layout.frame);
            }
            thread = word_at(thread, layout.next_thread)?;
        }
        interpreter = word_at(interpreter, layout.next_interpreter)?;
    }
    None
}

/// Returns what `pthread_self` returns in the calling thread. With glibc and musl that is the address
/// of the thread's control block.
fn pthread_self() -> u64 {
    let own: u64;
    // SAFETY: the x86-64 ABI of thread-local storage puts the address of the control block into its
    // own first word, at %fs:0. The instruction only reads it.
    unsafe {
        core::arch::asm!("mov {}, fs:[0]", out(reg) own, options(nostack, readonly, preserves_flags))
    };
    own
}

/// Writes the names of a function to the ring, unless `memfold record` has them.
fn note_name(
    ring: &SampleRing,
    layout: &Interpreter,
    (process, thread): (SampledProcess, u32),
    code: u64,
) -> Option<()> {
    let names = layout.names;
    let (name, file) = (word_at(code, names.name)?, word_at(code, names.file)?);
    let line = word_at(code, names.line)? & u64::from(u32::MAX);
    let place = &NAMED[(code >> 4) as usize % PLACES];
    // Another function at the same address has other names.
    let hash = hash_of([code, name, file, line]);
    if place.load(Relaxed) == hash {
        return None;
    }
    let mut text = [0; 2 * (TEXT_BYTES_MAX + 8)];
    let len = read_text(layout, name, &mut text[..TEXT_BYTES_MAX])?;
    read_text(layout, file, &mut text[len + 1..][..TEXT_BYTES_MAX])?;
    let sample = ring.begin()?;
    sample.set_thread(process, thread, now_ns());
    sample.set_name(code, line);
    let (words, _) = text.as_chunks();
    words.iter().for_each(|word| {
        sample.add_words(&[u64::from_ne_bytes(*word)]);
    });
    sample.finish();
    place.store(hash, Relaxed);
    Some(())
}

/// Returns a hash of words that isn't 0 (FNV-1a, by words).
fn hash_of(words: [u64; 4]) -> u64 {
    let hash = |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3);
    words.into_iter().fold(0xcbf2_9ce4_8422_2325, hash) | 1
}

/// Reads an ASCII string object. Other characters become `?`. Returns the length of the text, which
/// is cut off after `to.len()` bytes.
fn read_text(layout: &Interpreter, object: u64, to: &mut [u8]) -> Option<usize> {
    let len = (word_at(object, layout.unicode.len)? as usize).min(to.len());
    read_bytes(object.wrapping_add(layout.unicode.ascii) as usize, &mut to[..len]).ok()?;
    to[..len].iter_mut().filter(|byte| !(b' '..0x7f).contains(*byte)).for_each(|byte| *byte = b'?');
    Some(len)
}

/// Reads the word at an offset of an object. Returns `None` if it can't be read.
fn word_at(object: u64, offset: u64) -> Option<u64> {
    let mut bytes = [0; size_of::<u64>()];
    read_bytes(object.wrapping_add(offset) as usize, &mut bytes).ok()?;
    Some(u64::from_ne_bytes(bytes))
}

fn byte_at(object: u64, offset: u64) -> Option<u8> {
    let mut byte = [0];
    read_bytes(object.wrapping_add(offset) as usize, &mut byte).ok().map(|()| byte[0])
}
