//! The two variables by which a program is managed. They are hidden from the program, and passed on
//! to each program that it executes.
//!
//! They are the last two entries of the environment that the kernel was given, `LD_PRELOAD` first.
//! The dynamic linker uses the last `LD_PRELOAD`, so an entry of the program's own stays as it is.
//!
//! # Hiding
//! The array that the kernel leaves on the stack ends in a null word, and the auxiliary vector
//! follows. The null word moves down by two, to the place of `LD_PRELOAD`. The two words before the
//! vector become an entry of it: AT_IGNORE, 0. So code that walks from the arguments to the vector
//! still finds it. The strings stay where they are, so `/proc/PID/environ` shows them as before.
//!
//! # Passing on
//! A child may be given any environment. The gate gives the kernel another array, on the gate's own
//! stack. It can't be allocated: a child of vfork shares its memory with its parent, and an
//! allocation would outlive the call, which doesn't return.
use crate::diagnostics::warn_once;
use crate::initial_stack::InitialStack;
use alloc::boxed::Box;
use alloc::ffi::CString;
use alloc::vec::Vec;
use core::ffi::{CStr, c_char};
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicPtr, Ordering::SeqCst};
use memfold_gate::image::FILE_NAME;
use memfold_gate::read_bytes;
use memfold_os::text::TextBuffer;
use memfold_run::member;
use memfold_run::request::LINK;

const REQUEST: &[u8] = b"MEMFOLD_RUN=";
const LOAD: &[u8] = b"LD_PRELOAD=";
const DISABLE: &[u8] = b"MEMFOLD_DISABLE=1";

/// Most environments have fewer entries than this.
const FEW: usize = 510;
/// An environment with more entries is passed on unchanged, with a warning.
const MANY: usize = 16_000;
/// Size of the buffer for a new `LD_PRELOAD`, in bytes. A longer value is left unchanged, with a
/// warning.
const TEXT_BYTES: usize = 8 << 10;

/// What a program that is executed is given.
#[derive(Copy, Clone, PartialEq, Eq)]
pub enum PassedOn<'a> {
    /// Nothing, because memfold can't be in it.
    Nothing,
    /// The two variables.
    Variables,
    /// The two variables, and an entry for the library, which is executed in place of the program.
    /// It ends in a zero.
    Program(&'a [u8]),
}

/// The variables that children are given. Never freed.
struct KeptVariables {
    /// The path of the library, and its final zero.
    library: Box<CStr>,
    /// The entry with memfold's request, without the socket that the program before has left, and
    /// without a final zero.
    request: Box<[u8]>,
}

/// Returns the entry with memfold's request without the last line, if that is about a socket.
fn without_link(entry: &[u8]) -> &[u8] {
    let entry = entry.strip_suffix(b"\0").unwrap_or(entry);
    let last = entry.iter().rposition(|byte| *byte == b';');
    match last.filter(|at| entry[at + 1..].starts_with(LINK.as_bytes())) {
        Some(at) => &entry[..at],
        None => entry,
    }
}

static KEPT: AtomicPtr<KeptVariables> = AtomicPtr::new(core::ptr::null_mut());

fn kept() -> Option<&'static KeptVariables> {
    // SAFETY: the pointer is null or a leaked box, which is never freed or changed.
    unsafe { KEPT.load(SeqCst).as_ref() }
}

/// Returns the path of the library, if children are given it.
pub fn library_path() -> Option<&'static CStr> {
    kept().map(|variables| &*variables.library)
}

/// Returns the paths in a value of `LD_PRELOAD`.
fn paths(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value.split(|byte| matches!(byte, b':' | b' ')).filter(|path| !path.is_empty())
}

/// Returns the library's own path in a value of `LD_PRELOAD`.
fn library_in(value: &[u8]) -> Option<&[u8]> {
    paths(value).find(|path| path.rsplit(|byte| *byte == b'/').next() == Some(FILE_NAME))
}

/// Returns the address of libc's `environ`; null if there is no libc in this process.
fn environment_of_libc() -> *mut *mut *mut c_char {
    weak_address!("environ") as *mut _
}

/// Stores what children are to be given, and hides it from the program if `may_hide`. Another thread
/// that reads the environment meanwhile could miss a variable. The constructor calls it, once the
/// gate passes on the hidden variables.
pub fn take(stack: &InitialStack, may_hide: bool) {
    let texts: Vec<&'static [u8]> = stack.entries().collect();
    let value_of = |text: &'static [u8]| text.strip_prefix(LOAD).map(|v| &v[..v.len() - 1]);
    let request = texts.iter().rposition(|text| text.starts_with(REQUEST));
    let load = texts.iter().rposition(|text| value_of(text).and_then(library_in).is_some());
    let (Some(request), Some(load)) = (request, load) else { return };
    let Some(value) = value_of(texts[load]) else { return };
    let Some(library) = library_in(value) else { return };
    let Ok(path) = CString::new(library) else { return };
    let request_kept = without_link(texts[request]).into();
    let variables = KeptVariables { library: path.into_boxed_c_str(), request: request_kept };
    KEPT.store(Box::into_raw(Box::new(variables)), SeqCst);
    // Everything that the program would see without memfold must also be there as an entry of its
    // own.
    let others = &value[value.len().min(library.len() + 1)..];
    let own = texts[..load].iter().rev().find_map(|text| value_of(text)).unwrap_or_default();
    if may_hide && value.starts_with(library) && paths(own).eq(paths(others)) {
        // SAFETY: `load` and `request` are entries of the kernel's array. There is no other thread
        // that uses it.
        unsafe { hide(stack.environment(), texts.len(), [load, request]) };
    }
}

/// Removes two entries from the kernel's array, and fills the gap before the auxiliary vector.
///
/// # Safety
/// - `all` is the kernel's array of `count` entries, with the auxiliary vector behind it.
/// - The caller is the only thread.
unsafe fn hide(all: *mut *mut c_char, count: usize, hidden: [usize; 2]) {
    /// Type of an ignored entry of the auxiliary vector (`include/uapi/linux/auxvec.h`).
    const AT_IGNORE: usize = 1;
    // SAFETY: the caller promises that `count + 1` words are the kernel's array, and that no other
    // thread uses them. If a constructor of another library has changed the environment, libc's
    // array is another one, which also ends in a null word.
    unsafe {
        let hidden_words = hidden.map(|n| *all.add(n));
        let shift = |all: *mut *mut c_char| {
            let mut to = 0;
            for from in 0.. {
                let word = *all.add(from);
                if word.is_null() {
                    return to;
                }
                if !hidden_words.contains(&word) {
                    *all.add(to) = word;
                    to += 1;
                }
            }
            to
        };
        let of_libc = environment_of_libc();
        let theirs = if of_libc.is_null() { all } else { *of_libc };
        let count_left = shift(all);
        if count_left + 2 == count {
            *all.add(count_left) = core::ptr::null_mut();
            *all.add(count_left + 1) = AT_IGNORE as *mut c_char;
            *all.add(count) = core::ptr::null_mut();
        }
        if theirs != all && !theirs.is_null() {
            let count_left = shift(theirs);
            *theirs.add(count_left) = core::ptr::null_mut();
        }
    }
}

fn word_at(at: usize) -> Option<usize> {
    let mut word = [0u8; 8];
    read_bytes(at, &mut word).ok()?;
    Some(usize::from_ne_bytes(word))
}

/// The kind of an entry of the environment.
#[derive(Copy, Clone, PartialEq, Eq)]
enum EntryKind {
    Request,
    Load,
    Disable,
    Other,
}

fn kind_of(at: usize) -> EntryKind {
    let mut begins = [0u8; 18];
    // Bytes that can't be read stay zeros.
    let _ = read_bytes(at, &mut begins);
    match begins {
        _ if begins.starts_with(REQUEST) => EntryKind::Request,
        _ if begins.starts_with(LOAD) => EntryKind::Load,
        _ if begins.starts_with(DISABLE) && begins[DISABLE.len()] == 0 => EntryKind::Disable,
        _ => EntryKind::Other,
    }
}

/// Makes a call of `execve` by `make`, which is given the environment to pass. That is the one at
/// `environment` with what is passed on.
pub fn with(environment: usize, passed: PassedOn, make: &mut dyn FnMut(usize) -> isize) -> isize {
    match kept() {
        Some(kept) => with_kept(kept, environment, passed, make),
        None => make(environment),
    }
}

/// Does the work of [`with`] for the variables in `kept`.
fn with_kept(
    kept: &KeptVariables,
    environment: usize,
    passed: PassedOn,
    make: &mut dyn FnMut(usize) -> isize,
) -> isize {
    let (mut count, mut has_own) = (0, false);
    if environment != 0 {
        loop {
            match word_at(environment + count * 8) {
                // The kernel will find the same error.
                None => return make(environment),
                Some(0) => break,
                Some(at) => match kind_of(at) {
                    EntryKind::Disable => return make(environment),
                    kind => has_own |= kind == EntryKind::Request,
                },
            }
            count += 1;
            if count > MANY {
                say_unmanaged();
                return make(environment);
            }
        }
    }
    if passed == PassedOn::Nothing && !has_own {
        return make(environment);
    }
    match count {
        0..=FEW => replaced::<{ FEW + 4 }>(kept, environment, count, passed, make),
        _ => replaced::<{ MANY + 4 }>(kept, environment, count, passed, make),
    }
}

fn say_unmanaged() {
    warn_once!(
        "warning: A program runs unmanaged: memfold can't be passed on in more than 16000 environment variables, or \
         in an LD_PRELOAD of nearly 8 KiB"
    );
}

/// A new entry of the environment, without its final zero until that is added. Only the pages that
/// are written to cost a fault, in each child.
struct PreloadText {
    bytes: [MaybeUninit<u8>; TEXT_BYTES],
    len: usize,
}

impl PreloadText {
    const fn new() -> PreloadText {
        PreloadText { bytes: [MaybeUninit::uninit(); TEXT_BYTES], len: 0 }
    }

    fn add(&mut self, bytes: &[u8]) {
        let places = &mut self.bytes[self.len..self.len + bytes.len()];
        for (place, byte) in places.iter_mut().zip(bytes) {
            place.write(*byte);
        }
        self.len += bytes.len();
    }
}

impl KeptVariables {
    /// Adds the entry with memfold's request to an empty text, with the number of the socket that is
    /// connected to the run, if there is one. Returns `false` if it is too long.
    fn add_request(&self, link: i32, text: &mut PreloadText) -> bool {
        let link: TextBuffer<24> = match link {
            0.. => TextBuffer::of(format_args!(";{LINK}{link}")),
            _ => TextBuffer::of(format_args!("")),
        };
        if self.request.len() + link.as_bytes().len() >= TEXT_BYTES {
            return false;
        }
        text.add(&self.request);
        text.add(link.as_bytes());
        text.add(b"\0");
        true
    }
}

/// Copies the value of the `LD_PRELOAD` at `at` to `buffer`, and returns it. Returns `None` if it
/// is too long.
fn value_at(at: usize, buffer: &mut [u8; TEXT_BYTES]) -> Option<&[u8]> {
    let _ = read_bytes(at + LOAD.len(), buffer);
    let end = buffer.iter().position(|byte| *byte == 0)?;
    Some(&buffer[..end])
}

#[inline(never)]
fn replaced<const N: usize>(
    kept: &KeptVariables,
    environment: usize,
    count: usize,
    passed: PassedOn,
    make: &mut dyn FnMut(usize) -> isize,
) -> isize {
    let (mut words, mut len) = ([0usize; N], 0);
    let (mut visible, mut load, mut request) =
        (PreloadText::new(), PreloadText::new(), PreloadText::new());
    let mut last_load = None;
    for n in 0..count {
        let Some(at) = word_at(environment + n * 8) else { return make(environment) };
        match kind_of(at) {
            EntryKind::Request => continue,
            EntryKind::Load => last_load = Some(len),
            _ => {}
        }
        words[len] = at;
        len += 1;
    }
    load.add(LOAD);
    let library = kept.library.to_bytes();
    load.add(library);
    if let Some(place) = last_load {
        let room = TEXT_BYTES.saturating_sub(load.len + LOAD.len() + 2);
        let mut buffer = [0u8; TEXT_BYTES];
        let value = value_at(words[place], &mut buffer).filter(|value| value.len() <= room);
        let Some(value) = value else {
            say_unmanaged();
            return make(environment);
        };
        visible.add(LOAD);
        for other in paths(value).filter(|path| *path != library) {
            load.add(b":");
            load.add(other);
            if visible.len > LOAD.len() {
                visible.add(b":");
            }
            visible.add(other);
        }
        // This value comes from a program that saw memfold's own entry, which is not the program's.
        if paths(value).any(|path| path == library) {
            if visible.len > LOAD.len() {
                visible.add(b"\0");
                words[place] = visible.bytes.as_ptr() as usize;
            } else {
                words.copy_within(place + 1..len, place);
                len -= 1;
            }
        }
    }
    load.add(b"\0");
    words[len] = 0;
    if !kept.add_request(member::link(), &mut request) {
        say_unmanaged();
        return make(environment);
    }
    if passed != PassedOn::Nothing {
        words[len] = load.bytes.as_ptr() as usize;
        words[len + 1] = request.bytes.as_ptr() as usize;
        words[len + 2] = match passed {
            PassedOn::Program(text) => text.as_ptr() as usize,
            _ => 0,
        };
        words[len + 3] = 0;
    }
    make(words.as_ptr() as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::format;
    use std::string::String;

    const PATH: &str = "/lib/libmemfold_preload.so";

    fn kept_here() -> KeptVariables {
        KeptVariables {
            library: CString::new(PATH).unwrap().into_boxed_c_str(),
            request: REQUEST.as_bytes().into(),
        }
    }

    /// An environment, as a program gives it to `execve`.
    struct Given {
        _texts: Vec<CString>,
        words: Vec<usize>,
    }

    impl Given {
        fn new(texts: &[&str]) -> Given {
            let texts: Vec<CString> =
                texts.iter().map(|text| CString::new(*text).unwrap()).collect();
            let words = texts.iter().map(|text| text.as_ptr() as usize).chain([0]).collect();
            Given { _texts: texts, words }
        }

        fn at(&self) -> usize {
            self.words.as_ptr() as usize
        }
    }

    /// Returns the entries of the environment at `at`.
    fn entries(at: usize) -> Vec<String> {
        // SAFETY: `at` is an array of strings that ends in a null word. It stays valid while the
        // call is made.
        let text = |n: usize| unsafe {
            let word = *(at as *const *const c_char).add(n);
            (!word.is_null()).then(|| CStr::from_ptr(word).to_str().unwrap().into())
        };
        (0..).map_while(text).collect()
    }

    fn passed(texts: &[&str], adds: bool) -> Vec<String> {
        let (environment, mut all) = (Given::new(texts), None);
        let variables = if adds { PassedOn::Variables } else { PassedOn::Nothing };
        let result = with_kept(&kept_here(), environment.at(), variables, &mut |at| {
            all = Some(entries(at));
            -7
        });
        assert_eq!(result, -7);
        all.expect("the call is made")
    }

    const REQUEST: &str = "MEMFOLD_RUN=limit=5";

    fn load(others: &str) -> String {
        format!("LD_PRELOAD={PATH}{others}")
    }

    #[test]
    fn executed_program_gets_both_variables_behind_its_own() {
        assert_eq!(passed(&["A=1", "B=2"], true), ["A=1", "B=2", &load(""), REQUEST]);
        assert_eq!(passed(&[], true), [&load(""), REQUEST]);
    }

    #[test]
    fn socket_of_the_program_before_is_replaced_by_the_own() {
        for before in ["", ";socket=5", ";socket="] {
            assert_eq!(without_link(format!("{REQUEST}{before}\0").as_bytes()), REQUEST.as_bytes());
        }
        let other = "MEMFOLD_RUN=a=1;door=x;y=socket=5";
        assert_eq!(without_link(other.as_bytes()), other.as_bytes());
        let text = |link| {
            let mut text = PreloadText::new();
            assert!(kept_here().add_request(link, &mut text));
            // SAFETY: the first `len` bytes were added.
            let bytes = text.bytes[..text.len].iter().map(|byte| unsafe { byte.assume_init() });
            String::from_utf8(bytes.collect()).unwrap()
        };
        assert_eq!(text(-1), format!("{REQUEST}\0"));
        assert_eq!(text(993), format!("{REQUEST};socket=993\0"));
    }

    #[test]
    fn executed_program_may_have_no_environment_at_all() {
        let mut all = Vec::new();
        with_kept(&kept_here(), 0, PassedOn::Variables, &mut |at| {
            all = entries(at);
            0
        });
        assert_eq!(all, [&load(""), REQUEST]);
    }

    #[test]
    fn library_loads_before_those_of_the_program() {
        let own = "LD_PRELOAD=/a.so:/b.so";
        assert_eq!(passed(&[own, "A=1"], true), [own, "A=1", &load(":/a.so:/b.so"), REQUEST]);
        // The linker uses the last entry.
        let (first, last) = ("LD_PRELOAD=/a.so", "LD_PRELOAD=/b.so");
        assert_eq!(passed(&[first, last], true), [first, last, &load(":/b.so"), REQUEST]);
        // Blanks separate paths too.
        assert_eq!(passed(&["LD_PRELOAD= /a.so  /b.so"], true)[1], load(":/a.so:/b.so"));
    }

    /// A program that reads `/proc/self/environ` may pass on what it found there.
    #[test]
    fn own_variables_are_passed_on_once() {
        let load_entry = load(":/a.so");
        let passed_on = passed(&["A=1", &load_entry, "MEMFOLD_RUN=limit=7"], true);
        assert_eq!(passed_on, ["A=1", "LD_PRELOAD=/a.so", &load(":/a.so"), REQUEST]);
        let load_entry = load("");
        assert_eq!(passed(&[&load_entry, "A=1", REQUEST], true), ["A=1", &load(""), REQUEST]);
    }

    #[test]
    fn program_without_memfold_gets_none_of_its_variables() {
        let load_entry = load(":/a.so");
        assert_eq!(passed(&["A=1", &load_entry, REQUEST], false), ["A=1", "LD_PRELOAD=/a.so"]);
        assert_eq!(passed(&["A=1", "LD_PRELOAD=/a.so"], false), ["A=1", "LD_PRELOAD=/a.so"]);
    }

    #[test]
    fn program_that_switches_memfold_off_keeps_its_environment() {
        let texts = ["MEMFOLD_DISABLE=1", "A=1"];
        assert_eq!(passed(&texts, true), texts);
        assert_eq!(passed(&["MEMFOLD_DISABLE=10"], true).len(), 3);
    }

    #[test]
    fn similar_names_are_the_programs() {
        let texts_given = ["MEMFOLD_RUNS=1", "XLD_PRELOAD=/a.so", "LD_PRELOADED=1", "MEMFOLD_RUN"];
        assert_eq!(passed(&texts_given, true)[..4], texts_given);
    }

    #[test]
    fn large_environment_is_passed_on_and_a_huge_one_stays_as_it_is() {
        for (count, is_passed_on) in [(FEW, true), (FEW + 1, true), (MANY, true), (MANY + 1, false)]
        {
            let texts: Vec<String> = (0..count).map(|n| format!("V{n}={n}")).collect();
            let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
            let texts_passed = passed(&texts, true);
            assert_eq!(texts_passed[..count], texts, "{count}");
            assert_eq!(texts_passed.len(), if is_passed_on { count + 2 } else { count });
        }
    }

    #[test]
    fn long_list_of_libraries_is_passed_on_as_far_as_there_is_room() {
        let room = TEXT_BYTES - load("").len() - LOAD.len() - 2;
        let fits = format!("LD_PRELOAD=/{}", "x".repeat(room - 1));
        assert_eq!(passed(&[&fits], true).len(), 3);
        let fits_not = fits + "x";
        assert_eq!(passed(&[&fits_not], true), [fits_not]);
    }

    /// The array is like the kernel's: entries, a null word, the auxiliary vector.
    #[test]
    fn hidden_entries_leave_a_whole_array_and_a_whole_vector() {
        let load_entry = load("");
        let environment = Given::new(&["A=1", &load_entry, "B=2", REQUEST]);
        let mut words: Vec<usize> = environment.words.clone();
        words.extend([6, 4096, 0, 0]);
        // SAFETY: the array belongs to the test, has four entries and a vector behind them, and
        // only this thread uses it. libc's array is another one.
        unsafe { hide(words.as_mut_ptr().cast(), 4, [1, 3]) };
        assert_eq!(entries(words.as_ptr() as usize), ["A=1", "B=2"]);
        assert_eq!(words[2..], [0, 1, 0, 6, 4096, 0, 0], "AT_IGNORE, then what was there");
    }

    #[test]
    fn library_is_known_by_its_name_among_others() {
        let find = |value: &'static str| library_in(value.as_bytes());
        assert_eq!(find("/x/libmemfold_preload.so"), Some(&b"/x/libmemfold_preload.so"[..]));
        assert_eq!(find("/a.so:libmemfold_preload.so /b"), Some(&b"libmemfold_preload.so"[..]));
        assert_eq!([find(""), find("/libmemfold_preload.so.1"), find("/a:/b")], [None; 3]);
    }
}
