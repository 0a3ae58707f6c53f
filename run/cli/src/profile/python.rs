//! Where versions of CPython keep the functions of a thread.
//!
//! The offsets of 3.9 to 3.12 come from the headers of these versions
//! (`Include/cpython/pystate.h`, `Include/internal/pycore_frame.h`, `pycore_interp.h`,
//! `pycore_runtime.h`). Since 3.13 the runtime begins with a table of them (`_Py_DebugOffsets`).
use crate::profile::elf_file::ElfFile;
use memfold_run::samples::{CodeNames, Interpreter, UnicodeLayout};

const RUNTIME: &str = "_PyRuntime";
/// A number with the version in its two highest bytes (3.11 on).
const VERSION: &str = "Py_Version";
/// The start of `_Py_DebugOffsets`.
const COOKIE: &[u8; 8] = b"xdebugpy";
/// Bytes of `_Py_DebugOffsets` that are read.
const TABLE_BYTES: u64 = 568;
const NONE: u64 = Interpreter::NONE;
/// `FRAME_OWNED_BY_CSTACK` of 3.12 and 3.13.
const ENTRY_OWNER: u64 = 3;

/// Returns the interpreter in a file, with the runtime's address in the file's own terms. `name` is
/// the name of the file. Returns `None` if it has no interpreter, or one of another version.
pub fn find(file: &ElfFile, name: &str) -> Option<Interpreter> {
    let runtime = file.address_of(RUNTIME)?;
    let layout = match version(file, name)? {
        (3, 9 | 10) => BEFORE_3_11,
        (3, 11) => OF_3_11,
        (3, 12) => OF_3_12,
        (3, 13) => of_3_13(&file.bytes_at_address(runtime, TABLE_BYTES)?)?,
        _ => return None,
    };
    Some(Interpreter { runtime, ..layout })
}

/// Returns the version by the symbol for it, or by a name such as `libpython3.10.so.1.0`.
fn version(file: &ElfFile, name: &str) -> Option<(u8, u8)> {
    let of_symbol = file.address_of(VERSION).and_then(|at| file.bytes_at_address(at, 4));
    if let Some(bytes) = of_symbol {
        return Some((bytes[3], bytes[2]));
    }
    let (_, rest) = name.rsplit_once("python")?;
    let mut numbers = rest.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

const BEFORE_3_11: Interpreter = Interpreter {
    runtime: 0,
    first_interpreter: 32,
    next_interpreter: 0,
    first_thread: 8,
    next_thread: 8,
    thread_id: 176,
    c_frame: NONE,
    frame: 24,
    previous: 24,
    code: 32,
    is_entry: Interpreter::ALWAYS,
    owner: NONE,
    entry_owner: 0,
    names: CodeNames { name: 112, file: 104, line: 40 },
    unicode: UnicodeLayout { len: 16, ascii: 48 },
};
const OF_3_11: Interpreter = Interpreter {
    first_interpreter: 40,
    first_thread: 16,
    thread_id: 152,
    c_frame: 56,
    frame: 8,
    previous: 48,
    code: 32,
    is_entry: 68,
    names: CodeNames { name: 128, file: 112, line: 72 },
    ..BEFORE_3_11
};
const OF_3_12: Interpreter = Interpreter {
    first_thread: 72,
    thread_id: 136,
    frame: 0,
    previous: 8,
    code: 0,
    is_entry: NONE,
    owner: 70,
    entry_owner: ENTRY_OWNER,
    names: CodeNames { name: 128, file: 112, line: 68 },
    unicode: UnicodeLayout { len: 16, ascii: 40 },
    ..OF_3_11
};

/// Returns the layout that `_Py_DebugOffsets` of 3.13 says.
fn of_3_13(table: &[u8]) -> Option<Interpreter> {
    if !table.starts_with(COOKIE) {
        return None;
    }
    let word = |at: usize| table.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
    Some(Interpreter {
        runtime: 0,
        first_interpreter: word(40)?,
        next_interpreter: word(64)?,
        first_thread: word(72)?,
        next_thread: word(168)?,
        thread_id: word(192)?,
        c_frame: NONE,
        frame: word(184)?,
        previous: word(232)?,
        code: word(240)?,
        is_entry: NONE,
        owner: word(264)?,
        entry_owner: ENTRY_OWNER,
        names: CodeNames { name: word(296)?, file: word(280)?, line: word(312)? },
        unicode: UnicodeLayout { len: word(552)?, ascii: word(560)? },
    })
}
