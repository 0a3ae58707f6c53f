//! The Python functions of the calling thread, by the offsets that `memfold record` has found.
//!
//! The thread's own frames don't change while it is in the gate. The lists of interpreters and
//! threads may: a thread that isn't found has no frames in the sample.
use super::word_at;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;
use memfold_gate::read_bytes;
use memfold_os::thread::now_ns;
use memfold_run::samples::{Interpreter, SampleRing, SampledProcess};

/// Interpreters, threads and frames that are looked at, at most. A list that changes meanwhile may
/// have a circle.
const INTERPRETERS_MAX: usize = 16;
const THREADS_MAX: usize = 512;
const FRAMES_MAX: usize = 256;
/// Bytes of a name, and of a file's name, that are kept at most.
const TEXT_BYTES_MAX: usize = 248;
/// Functions whose names have been left already. One takes the place of another.
const KNOWN: usize = 4096;
/// The low bits of a pointer to a code object, in which 3.14 keeps a tag.
const TAG: u64 = 7;

/// For each function whose names `memfold record` has: the code object with its names.
static NAMED: [AtomicU64; KNOWN] = [const { AtomicU64::new(0) }; KNOWN];

/// A frame of the interpreter.
struct PythonFrame {
    code: u64,
    /// Whether it only stands for a call by compiled code.
    is_boundary: bool,
    /// Whether compiled code has called it.
    is_entry: bool,
}

/// Calls `add` with the functions of the calling thread, the innermost first. It is called with 0
/// for a change to compiled code. It ends when `add` returns `false`.
pub fn walk(layout: &Interpreter, mut add: impl FnMut(u64) -> bool) {
    each_frame(layout, |frame| {
        (frame.is_boundary || add(frame.code)) && (!(frame.is_boundary || frame.is_entry) || add(0))
    });
}

/// Leaves the names of those functions of the calling thread that have none yet.
pub fn note_names(ring: &SampleRing, layout: &Interpreter, process: SampledProcess, thread: u32) {
    each_frame(layout, |frame| {
        if !frame.is_boundary {
            note_name(ring, layout, (process, thread), frame.code);
        }
        true
    });
}

fn each_frame(layout: &Interpreter, mut each: impl FnMut(PythonFrame) -> bool) -> Option<()> {
    let mut at = innermost(layout)?;
    for _ in 0..FRAMES_MAX {
        if at == 0 {
            break;
        }
        let code = member(at, layout.code)? & !TAG;
        let is_boundary = layout.owner != Interpreter::NONE
            && u64::from(byte_at(at, layout.owner)?) >= layout.entry_owner;
        let is_entry = match layout.is_entry {
            Interpreter::NONE => false,
            Interpreter::ALWAYS => true,
            offset => byte_at(at, offset)? != 0,
        };
        if !each(PythonFrame { code, is_boundary, is_entry }) {
            break;
        }
        at = member(at, layout.previous)?;
    }
    Some(())
}

/// Returns the innermost frame of the calling thread.
fn innermost(layout: &Interpreter) -> Option<u64> {
    let mut interpreter = member(layout.runtime, layout.first_interpreter)?;
    let own = pthread_self();
    for _ in 0..INTERPRETERS_MAX {
        if interpreter == 0 {
            return None;
        }
        let mut thread = member(interpreter, layout.first_thread)?;
        for _ in 0..THREADS_MAX {
            if thread == 0 {
                break;
            }
            if member(thread, layout.thread_id)? == own {
                let holder = match layout.c_frame {
                    Interpreter::NONE => thread,
                    c_frame => member(thread, c_frame)?,
                };
                return member(holder, layout.frame);
            }
            thread = member(thread, layout.next_thread)?;
        }
        interpreter = member(interpreter, layout.next_interpreter)?;
    }
    None
}

/// Returns what `pthread_self` returns in the calling thread: with glibc and musl, the address of
/// the thread's control block, whose first or third word has the address itself.
fn pthread_self() -> u64 {
    let own: u64;
    // SAFETY: the x86-64 ABI of thread-local storage puts the address of the control block into its
    // own first word, at %fs:0. The instruction only reads it.
    unsafe {
        core::arch::asm!("mov {}, fs:[0]", out(reg) own, options(nostack, readonly, preserves_flags))
    };
    own
}

/// Leaves the names of a function, unless `memfold record` has them.
fn note_name(
    ring: &SampleRing,
    layout: &Interpreter,
    (process, thread): (SampledProcess, u32),
    code: u64,
) -> Option<()> {
    let names = layout.names;
    let (name, file) = (member(code, names.name)?, member(code, names.file)?);
    let line = member(code, names.line)? & u64::from(u32::MAX);
    let known = &NAMED[(code >> 4) as usize % KNOWN];
    // Another function at the same address has other names.
    let mark = mark([code, name, file, line]);
    if known.load(Relaxed) == mark {
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
    known.store(mark, Relaxed);
    Some(())
}

/// Returns a hash of words that isn't 0 (FNV-1a, by words).
fn mark(words: [u64; 4]) -> u64 {
    let hash = |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3);
    words.into_iter().fold(0xcbf2_9ce4_8422_2325, hash) | 1
}

/// Reads an ASCII string object. Other characters become `?`. Returns the length of the text, which
/// is cut off after `to.len()` bytes.
fn read_text(layout: &Interpreter, object: u64, to: &mut [u8]) -> Option<usize> {
    let len = (member(object, layout.unicode.len)? as usize).min(to.len());
    read_bytes(object.wrapping_add(layout.unicode.ascii) as usize, &mut to[..len]).ok()?;
    to[..len].iter_mut().filter(|byte| !(b' '..0x7f).contains(*byte)).for_each(|byte| *byte = b'?');
    Some(len)
}

/// Reads the word at an offset of an object.
fn member(object: u64, offset: u64) -> Option<u64> {
    word_at(object.wrapping_add(offset))
}

fn byte_at(object: u64, offset: u64) -> Option<u8> {
    let mut byte = [0];
    read_bytes(object.wrapping_add(offset) as usize, &mut byte).ok().map(|()| byte[0])
}
