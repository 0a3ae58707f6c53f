//! Changes what some calls report about the process:
//! - The engine's threads don't appear in `/proc/self/task`, in the number of its links, or in the
//!   number of threads in `status` and `stat`. Some programs continue only while they have one
//!   thread, or stop each thread that they find.
//! - `limits` has the limits that the keeper reports.
//! - `/proc/self/mem` has folded memory too. Some compilers write their code by it, past its
//!   protection.
use crate::keeper::{NamedSpan, ThreadKeeper};
use crate::record::GateThread;
use crate::syscalls::own_files;
use crate::touch::{copy, read, read_bytes, write, write_bytes};
use core::ops::Range;
use memfold_os::raw::system_call;
use memfold_os::text::TextBuffer;
use memfold_os::thread::process_id;
use memfold_os::units::PAGE_SIZE;

/// The offsets of some fields of a struct, in bytes.
struct StatOffsets {
    number: usize,
    links: usize,
    mode: usize,
    bytes: usize,
}
/// The offsets in `struct stat`.
const STAT: StatOffsets = StatOffsets { number: 8, links: 16, mode: 24, bytes: 48 };
/// The offsets in `struct statx`.
const STATX: StatOffsets = StatOffsets { number: 32, links: 16, mode: 28, bytes: 40 };
/// The links of a directory without subdirectories: one for itself and one for its name.
const OWN_LINKS: usize = 2;

/// The offsets of a directory entry's length and, depending on the call, of its name.
const ENTRY_BYTES_AT: usize = 16;
const NAME_AT: usize = 18;
const NAME64_AT: usize = 19;
/// The length of the shortest directory entry in bytes.
const ENTRY_LEAST: usize = 24;
/// A length in bytes for which the longest number of a thread, with the null byte at its end, has
/// room.
const NAME_BYTES: usize = 12;

/// The most bytes of the program's memory that are held at a time.
const PIECE_BYTES: usize = 64 << 10;

/// The number of bytes of a text that are read. The number of threads lies in them.
const TEXT_BYTES: usize = 2048;
/// The number of bytes by which a text is recognized.
const BEGIN_BYTES: usize = 16;
/// The length in bytes below which a text doesn't have the number of threads.
const TEXT_LEAST: usize = 64;
/// The place of the number of threads among the fields of `stat` that follow the name in brackets.
const COUNT_FIELD: usize = 17;

/// Removes the keeper's threads from what a successful call has returned, and returns the call's
/// new result. Returns `None` if nothing is left, so that the call must be made again.
pub fn without_threads(
    others: &dyn ThreadKeeper,
    record: &GateThread,
    nr: usize,
    args: &[usize; 6],
    made: isize,
) -> Option<isize> {
    let len = made as usize;
    // Counts the program's threads. It is `None` if the kernel counts no more than those.
    let threads = || {
        let mut own = 0;
        (others.count() > 0).then(|| record.each_of_process(|_| own += 1))?;
        Some(own)
    };
    // If memory can't be read or written, another thread has changed its mapping meanwhile. Then
    // the result stays as it is.
    match nr as i64 {
        libc::SYS_read | libc::SYS_pread64 if len >= TEXT_LEAST => {
            tell_limits(others, args[0], args[1], len);
            let less = threads().and_then(|threads| shorten(args[0], args[1], len, threads));
            Some(made - less.unwrap_or(0) as isize)
        }
        libc::SYS_getdents | libc::SYS_getdents64 if len > 0 && threads().is_some() => {
            let name_at = if nr as i64 == libc::SYS_getdents { NAME_AT } else { NAME64_AT };
            let rest = remove(others, args[0], args[1]..args[1] + len, name_at);
            (rest > 0).then_some(rest as isize)
        }
        libc::SYS_stat | libc::SYS_lstat => {
            let whose = (own_files::HERE, args[0]);
            threads().and_then(|threads| unlink(args[1], &STAT, threads, whose));
            Some(made)
        }
        libc::SYS_fstat => {
            threads().and_then(|threads| unlink(args[1], &STAT, threads, (args[0], 0)));
            Some(made)
        }
        libc::SYS_newfstatat => {
            threads().and_then(|threads| unlink(args[2], &STAT, threads, (args[0], args[1])));
            Some(made)
        }
        libc::SYS_statx => {
            threads().and_then(|threads| unlink(args[4], &STATX, threads, (args[0], args[1])));
            Some(made)
        }
        _ => Some(made),
    }
}

/// Corrects the number of links in the struct at `at` if it describes the directory of this
/// process's threads, which should have `threads` entries. `directory` and `path` lead there.
fn unlink(
    at: usize,
    places: &StatOffsets,
    threads: usize,
    (directory, path): (usize, usize),
) -> Option<()> {
    // The field may be wider than 32 bits. Its lower half comes first.
    let links = read::<u32>(at.checked_add(places.links)?).ok()?;
    let mode = read::<u32>(at + places.mode).ok()?;
    if links as usize > threads + OWN_LINKS
        && mode & libc::S_IFMT == libc::S_IFDIR
        && read::<usize>(at + places.bytes).ok()? == 0
        && own_files::is_own_list(directory, path) == Some(read::<usize>(at + places.number).ok()?)
    {
        // SAFETY: the program passed this address for the struct.
        unsafe { write(at + places.links, &((threads + OWN_LINKS) as u32)) }.ok()?;
    }
    Some(())
}

/// Removes the keeper's threads from the entries of the directory `fd` if it is that of this
/// process's threads. Returns the number of bytes that are left. This also prevents a child that
/// shares the memory, such as a sanitizer's, from stopping the threads that serve it.
fn remove(others: &dyn ThreadKeeper, fd: usize, told: Range<usize>, name_at: usize) -> usize {
    let (mut at, mut end, mut list) = (told.start, told.end, None);
    while at + ENTRY_LEAST <= end {
        let mut entry = [0; ENTRY_LEAST];
        if read_bytes(at, &mut entry).is_err() {
            break;
        }
        let length = [entry[ENTRY_BYTES_AT], entry[ENTRY_BYTES_AT + 1]];
        let bytes = usize::from(u16::from_le_bytes(length));
        if bytes < ENTRY_LEAST || bytes > end - at {
            break;
        }
        let mut name = [0; NAME_BYTES];
        let has_name = read_bytes(at + name_at, &mut name[..(bytes - name_at).min(NAME_BYTES)]);
        let Some(number) = has_name.ok().and_then(|()| number_in(&name)) else {
            at += bytes;
            continue;
        };
        if list.is_none() {
            list = own_files::own_list(fd);
        }
        let Some(list) = &list else { break };
        if !others.owns_thread(list.number_here(number)) {
            at += bytes;
            continue;
        }
        // SAFETY: both ranges lie in the buffer that the program passed for the entries.
        if unsafe { copy(at, at + bytes, end - at - bytes) }.is_err() {
            break;
        }
        end -= bytes;
    }
    end - told.start
}

/// Returns the number that a name consists of, or `None` if it has other characters than digits.
fn number_in(name: &[u8]) -> Option<u32> {
    let digits = name.split(|byte| *byte == 0).next()?;
    core::str::from_utf8(digits).ok()?.parse().ok()
}

/// Corrects the number of threads in a text of `told` bytes at `at`, if it was read from this
/// process's `status` or `stat`. Returns the number of bytes by which the text becomes shorter, or
/// `None` if nothing was changed.
fn shorten(fd: usize, at: usize, told: usize, threads: usize) -> Option<usize> {
    let mut begin = [0; BEGIN_BYTES];
    read_bytes(at, &mut begin).ok()?;
    if !may_tell(&begin) || !own_files::is_in_proc(fd) {
        return None;
    }
    let mut text = [0; TEXT_BYTES];
    let text = &mut text[..told.min(TEXT_BYTES)];
    read_bytes(at, text).ok()?;
    let (count, own) = match begin.starts_with(NAME) {
        true => (in_status(text, b"\nThreads:\t")?, number_of_status(text)?),
        false => (in_stat(text)?, 0..text.iter().position(|byte| *byte == b' ')?),
    };
    let value = |place: Range<usize>| core::str::from_utf8(&text[place]).ok()?.parse::<u32>().ok();
    if value(own)? != process_id() {
        return None;
    }
    if value(count.clone())? as usize <= threads {
        return None;
    }
    let digits: TextBuffer<16> = TextBuffer::of(format_args!("{threads}"));
    let digits = digits.as_bytes();
    let end = count.start + digits.len();
    // SAFETY: the program passed this buffer for the text. The number isn't longer than before, so
    // all that is written lies within the `told` bytes.
    unsafe {
        write_bytes(at + count.start, digits).ok()?;
        copy(at + end, at + count.end, told - count.end).ok()?;
    }
    Some(count.end - end)
}

/// Puts the program's own limits into a text of `told` bytes at `at`, if it was read from this
/// process's `limits`. The text has a line for each limit, in columns.
fn tell_limits(others: &dyn ThreadKeeper, fd: usize, at: usize, told: usize) -> Option<()> {
    const BEGIN: &[u8] = b"Limit           ";
    const LINES: [(u32, &[u8]); 3] = [
        (libc::RLIMIT_AS, b"\nMax address space "),
        (libc::RLIMIT_DATA, b"\nMax data size "),
        (libc::RLIMIT_NOFILE, b"\nMax open files "),
    ];
    /// The columns where the soft and the hard limit begin in a line.
    const COLUMNS: [usize; 2] = [27, 48];
    const WIDTH: usize = 20;
    const WIDTH_AND_END: usize = WIDTH + 1;
    let mut begin = [0; BEGIN_BYTES];
    read_bytes(at, &mut begin).ok()?;
    if begin != *BEGIN || !own_files::is_in_proc(fd) || !own_files::is_of_this_process(fd) {
        return None;
    }
    let mut text = [0; TEXT_BYTES];
    let text = &mut text[..told.min(TEXT_BYTES)];
    read_bytes(at, text).ok()?;
    for (resource, begin) in LINES {
        let Some(line) = text.windows(begin.len()).position(|part| part == begin) else { continue };
        let limit = others.limit(resource, None).ok()?;
        for (column, value) in COLUMNS.into_iter().zip(limit) {
            let place = text.get_mut(line + column..line + column + WIDTH)?;
            let word: TextBuffer<WIDTH_AND_END> = match value {
                u64::MAX => TextBuffer::of(format_args!("unlimited")),
                value => TextBuffer::of(format_args!("{value}")),
            };
            place.fill(b' ');
            place[..word.as_bytes().len()].copy_from_slice(word.as_bytes());
        }
    }
    // SAFETY: the program passed this buffer for the text, which keeps its length.
    unsafe { write_bytes(at, text) }.ok()
}

const NAME: &[u8] = b"Name:\t";

/// Returns whether a text begins like `status`, or like `stat`: `17 (name`.
fn may_tell(begin: &[u8]) -> bool {
    let digits = begin.iter().take_while(|byte| byte.is_ascii_digit()).count();
    begin.starts_with(NAME) || digits > 0 && begin[digits..].starts_with(b" (")
}

/// Completes a call on the program's own memory by its file, if it has failed at folded memory or
/// ended before it. `again` makes a call for a part of the rest while that memory is held. Returns
/// the result of the whole call.
pub fn with_own_memory(
    nr: usize,
    args: &[usize; 6],
    made: isize,
    mut again: impl FnMut(usize, &[usize; 6], NamedSpan) -> isize,
) -> isize {
    let (call, place) = match nr as i64 {
        libc::SYS_pread64 | libc::SYS_pwrite64 => (nr, Some(args[3])),
        libc::SYS_read => (libc::SYS_pread64 as usize, None),
        libc::SYS_write => (libc::SYS_pwrite64 as usize, None),
        _ => return made,
    };
    let [fd, buffer, most, ..] = *args;
    let mut count = made.max(0) as usize;
    let seek = |to: usize, whence: i32| {
        // SAFETY: the call touches no memory.
        unsafe { system_call(libc::SYS_lseek, [fd, to, whence as usize, 0, 0, 0]) }
    };
    let has_failed = made == -(libc::EIO as isize);
    if !has_failed && (count == 0 || count >= most) {
        return made;
    }
    // Where the call has stopped.
    let position = match place {
        Some(at) => Some(at.wrapping_add(count)),
        None => seek(0, libc::SEEK_CUR).ok().map(|at| at as usize),
    };
    let Some(position) = position.filter(|at| has_failed || at.is_multiple_of(PAGE_SIZE)) else {
        return made;
    };
    if !own_files::is_own_memory(fd) {
        return made;
    }
    let start = position.wrapping_sub(count);
    while count < most {
        let at = start + count;
        let len = (most - count).min(PIECE_BYTES - at % PAGE_SIZE);
        let write = call as i64 == libc::SYS_pwrite64;
        let one =
            again(call, &[fd, buffer + count, len, at, 0, 0], NamedSpan { start: at, len, write });
        if one <= 0 {
            break;
        }
        count += one as usize;
    }
    if place.is_none() && count > 0 {
        let _ = seek(start + count, libc::SEEK_SET);
    }
    if count > 0 { count as isize } else { made }
}

/// Returns whether a call reads or writes the program's own memory by its file.
pub fn names_own_memory(nr: usize, args: &[usize; 6]) -> bool {
    const CALLS: [i64; 4] =
        [libc::SYS_read, libc::SYS_write, libc::SYS_pread64, libc::SYS_pwrite64];
    CALLS.contains(&(nr as i64)) && own_files::is_own_memory(args[0])
}

/// Returns the range of the rest of the line that begins with `begin`, or `None` if there is no
/// such line.
fn in_status(text: &[u8], begin: &[u8]) -> Option<Range<usize>> {
    let start = text.windows(begin.len()).position(|part| part == begin)? + begin.len();
    let end = start + text[start..].iter().position(|byte| *byte == b'\n')?;
    Some(start..end)
}

/// Returns the range of a process's number in a text of `status`, as its own namespace has it. The
/// file may be that of an outer namespace, and then has one number for each level.
fn number_of_status(text: &[u8]) -> Option<Range<usize>> {
    let all = in_status(text, b"\nNStgid:\t")?;
    let last = text[all.clone()].iter().rposition(|byte| *byte == b'\t');
    Some(last.map_or(all.start, |at| all.start + at + 1)..all.end)
}

/// Returns the range of the number of threads in a text of `stat`, or `None` if the text is too
/// short.
fn in_stat(text: &[u8]) -> Option<Range<usize>> {
    // A name may contain brackets and spaces, so its end is the last bracket.
    let mut start = text.iter().rposition(|byte| *byte == b')')? + 2;
    let length = |start: usize| text.get(start..)?.iter().position(|byte| *byte == b' ');
    for _ in 0..COUNT_FIELD {
        start += length(start)? + 1;
    }
    Some(start..start + length(start)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(place: Option<Range<usize>>, text: &str) -> Option<&str> {
        place.map(|place| &text[place])
    }

    #[test]
    fn number_of_threads_is_found_in_each_text() {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let threads = status.lines().find_map(|line| line.strip_prefix("Threads:\t")).unwrap();
        assert_eq!(told(in_status(status.as_bytes(), b"\nThreads:\t"), &status), Some(threads));
        let own = process_id().to_string();
        assert_eq!(told(number_of_status(status.as_bytes()), &status), Some(own.as_str()));
        let inner = "Name:\tx\nNStgid:\t71\t12\t5\nNSpid:\t72\t13\t6\n";
        assert_eq!(told(number_of_status(inner.as_bytes()), inner), Some("5"));
        let stat = "17 (a) (b c) S 1 17 17 0 -1 4194560 94 0 0 0 0 0 0 0 20 0 321 0 5";
        assert_eq!(told(in_stat(stat.as_bytes()), stat), Some("321"));
        assert_eq!(in_stat(&stat.as_bytes()[..50]), None);
        assert_eq!(in_status(b"Name:\tx\nThreads:\t1", b"\nThreads:\t"), None);
    }

    #[test]
    fn text_begins_as_status_or_stat_to_be_read() {
        assert!(may_tell(b"Name:\tsleep\nUmas") && may_tell(b"4194303 (sleep) "));
        assert!(!may_tell(b" (sleep) S 1 2 3") && !may_tell(b"12345678901234567"));
        assert!(!may_tell(b"17 sleep (1) 2 3"));
    }

    #[test]
    fn name_of_digits_is_read_as_a_number() {
        for value in [0, 9, 10, 4_194_303, u32::MAX] {
            let (digits, mut name) = (value.to_string(), [0; NAME_BYTES]);
            name[..digits.len()].copy_from_slice(digits.as_bytes());
            assert_eq!(number_in(&name), Some(value));
        }
        assert_eq!((number_in(b"12x\0"), number_in(b"..\0"), number_in(b"\0")), (None, None, None));
    }
}
