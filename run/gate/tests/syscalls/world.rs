//! A place for the arguments of one call, on ordinary pages or on folded ones.
//!
//! Each object lies on pages of its own, before a page that can't be touched. Folded: all pages are
//! missing from a userfaultfd that serves user code only, so that the kernel says EFAULT wherever
//! it comes to a page that the table has not named; named ones are copied in, write-protected unless
//! they are to be written to. Objects of [`World::put`] may only be read, by anybody.
use memfold_gate::syscalls::{look_up, name};
use memfold_gate::{BadAddress, NamedSpan};
use memfold_os::raw::system_call;
use memfold_os::uffd::{Uffd, feature};
use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::OnceLock;

pub const PAGE: usize = 4096;
const ARENA: usize = 64 << 20;

/// Where in its pages an object lies.
#[derive(Copy, Clone, Debug, PartialEq)]
pub enum Place {
    Start,
    Cross,
    /// All but its last byte on the page before.
    Last,
    End,
}

/// What is wrong with one of the objects.
#[derive(Copy, Clone, Debug, PartialEq)]
pub enum Bad {
    /// Its second half is not there.
    Cut,
    /// None of it is.
    Missing,
    /// Its address is the kernel's.
    Kernel,
}

struct Object {
    start: usize,
    len: usize,
    pages: std::ops::Range<usize>,
    writable: bool,
}

pub struct World {
    next: usize,
    objects: Vec<Object>,
    place: Place,
    bad: Option<(usize, Bad)>,
    watched: Vec<i32>,
    pub base: usize,
}

/// What came of a call.
pub struct Outcome {
    pub ret: i64,
    pub bytes: Vec<u8>,
    /// Spans that reach over the object they begin in.
    pub strays: Vec<(usize, usize)>,
}

fn ok(ret: libc::c_long) -> usize {
    assert!(ret >= 0, "{}", std::io::Error::last_os_error());
    ret as usize
}

/// Where the arenas of all children are. Asked for before a fork: where the kernel puts a mapping
/// depends on what other threads have mapped by then, and addresses are among the bytes that are
/// compared.
pub fn base() -> usize {
    static BASE: OnceLock<usize> = OnceLock::new();
    *BASE.get_or_init(|| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping where nothing is.
        let base =
            unsafe { libc::mmap(std::ptr::null_mut(), ARENA, libc::PROT_NONE, flags, -1, 0) };
        assert!(base != libc::MAP_FAILED);
        base as usize
    })
}

impl World {
    pub fn new(place: Place, bad: Option<(usize, Bad)>) -> World {
        let base = base();
        // SAFETY: what is there is the child's copy of the reservation, which nobody uses.
        let result =
            unsafe { libc::mprotect(base as *mut _, ARENA, libc::PROT_READ | libc::PROT_WRITE) };
        assert_eq!(result, 0);
        World { next: base, objects: Vec::new(), place, bad, watched: Vec::new(), base }
    }

    fn lay(&mut self, bytes: &[u8], align: usize, writable: bool) -> usize {
        let len = bytes.len();
        let (first, size) = (self.next, (len.div_ceil(PAGE) + 1) * PAGE);
        let end = first + size;
        self.next = end + PAGE;
        assert!(self.next < self.base + ARENA);
        // SAFETY: the page after the object, in the arena.
        assert_eq!(unsafe { libc::mprotect(end as *mut _, PAGE, libc::PROT_NONE) }, 0);
        let aligned = |at: usize| at & !(align - 1);
        let bad = self.bad.filter(|(i, _)| *i == self.objects.len()).map(|(_, bad)| bad);
        let start = match (bad, self.place) {
            (Some(Bad::Cut), _) => end - aligned(len / 2),
            (Some(Bad::Missing), _) => end,
            (Some(Bad::Kernel), _) => 0xffff_8880_0000_0000,
            (None, Place::Start) => first,
            (None, Place::Cross) => aligned(first + PAGE - (len / 2).min(PAGE / 2)),
            (None, Place::Last) => {
                aligned(first + (PAGE - len.saturating_sub(align.min(len)) % PAGE) % PAGE)
            }
            (None, Place::End) => aligned(end - len),
        };
        let room = end.saturating_sub(start).min(len);
        // SAFETY: `room` bytes from `start` lie in the object's pages.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), start as *mut u8, room) };
        self.objects.push(Object { start, len, pages: first..end, writable });
        start
    }

    /// Bytes that nobody may write to.
    pub fn put(&mut self, bytes: &[u8]) -> usize {
        self.lay(bytes, 1, false)
    }

    /// A text that nobody may write to.
    pub fn text(&mut self, text: &str) -> usize {
        self.put(&[text.as_bytes(), b"\0"].concat())
    }

    /// Bytes that may be written to.
    pub fn both(&mut self, bytes: &[u8]) -> usize {
        self.lay(bytes, 1, true)
    }

    /// The same at an address that the kernel wants to be a multiple of 8.
    pub fn word(&mut self, bytes: &[u8]) -> usize {
        self.lay(bytes, 8, true)
    }

    /// Room to be filled.
    pub fn room(&mut self, len: usize) -> usize {
        self.both(&vec![0xa5; len])
    }

    /// What can be read from here afterwards counts as the call's result.
    pub fn watch(&mut self, fd: usize) {
        self.watched.push(fd as i32);
    }

    pub fn objects(&self) -> usize {
        self.objects.len()
    }

    /// Makes the call, on folded memory if `folded`.
    pub fn make(&mut self, nr: usize, args: [usize; 6], folded: bool) -> Outcome {
        for object in self.objects.iter().filter(|o| !o.writable) {
            let (at, len) = (object.pages.start as *mut _, object.pages.len());
            // SAFETY: the object's pages.
            assert_eq!(unsafe { libc::mprotect(at, len, libc::PROT_READ) }, 0);
        }
        let call = || {
            // SAFETY: the cases make calls whose effects stay within this process, or its files.
            unsafe { system_call(nr as i64, args) }.unwrap_or_else(|e| -(e.raw_os_error() as i64))
        };
        let mut strays = Vec::new();
        let (ret, mut bytes) = if folded {
            let memory = Folded::new(self);
            strays = memory.bring(nr, &args);
            (call(), memory.contents())
        } else {
            // It takes the number that the other kind of run needs too.
            let _same = open();
            let ret = call();
            (ret, self.contents())
        };
        for &fd in &self.watched {
            bytes.extend(drain(fd));
        }
        Outcome { ret, bytes, strays }
    }

    fn contents(&self) -> Vec<u8> {
        let parts = self.objects.iter().map(|o| {
            // SAFETY: the object's pages are there and may be read.
            unsafe { std::slice::from_raw_parts(o.pages.start as *const u8, o.pages.len()) }
        });
        parts.collect::<Vec<_>>().concat()
    }
}

fn open() -> Uffd {
    Uffd::open(feature::SIGBUS | feature::WP, true).expect("a userfaultfd")
}

fn drain(fd: i32) -> Vec<u8> {
    let mut bytes = vec![0u8; 1 << 20];
    // SAFETY: `bytes` has room for what is read.
    let n = unsafe {
        libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK);
        libc::lseek(fd, 0, libc::SEEK_SET);
        libc::read(fd, bytes.as_mut_ptr().cast(), bytes.len())
    };
    bytes.truncate(n.max(0) as usize);
    bytes
}

/// The world's memory, all of it folded at first.
struct Folded<'a> {
    world: &'a World,
    saved: Vec<u8>,
    uffd: Uffd,
    present: RefCell<HashSet<usize>>,
    written: RefCell<HashSet<usize>>,
}

impl Folded<'_> {
    fn new(world: &World) -> Folded<'_> {
        let contents = world.contents();
        let uffd = open();
        for object in &world.objects {
            let (at, len) = (object.pages.start, object.pages.len());
            // SAFETY: only `touch` reads these pages from now on, after it has brought them.
            unsafe {
                uffd.register(at, len, true).unwrap();
                assert_eq!(libc::madvise(at as *mut _, len, libc::MADV_DONTNEED), 0);
            }
        }
        Folded {
            world,
            saved: contents,
            uffd,
            present: Default::default(),
            written: Default::default(),
        }
    }

    /// The place in `saved` of a page.
    fn offset(&self, page: usize) -> Option<(usize, bool)> {
        let mut before = 0;
        for object in &self.world.objects {
            if object.pages.contains(&page) {
                return Some((before + page - object.pages.start, object.writable));
            }
            before += object.pages.len();
        }
        None
    }

    fn touch(&self, addr: usize, write: bool) -> Result<(), BadAddress> {
        let page = addr & !(PAGE - 1);
        let Some((offset, writable)) = self.offset(page) else { return Err(BadAddress) };
        if write && !writable {
            return Err(BadAddress);
        }
        if self.present.borrow_mut().insert(page) {
            // SAFETY: `saved` has the page's bytes; nobody else serves this memory.
            unsafe { self.uffd.copy(page, self.saved[offset..].as_ptr(), PAGE, false) }.unwrap();
            self.uffd.protect(page, PAGE, true).unwrap();
        }
        if write && self.written.borrow_mut().insert(page) {
            self.uffd.protect(page, PAGE, false).unwrap();
        }
        Ok(())
    }

    fn read(&self, addr: usize, into: &mut [u8]) -> Result<(), BadAddress> {
        let end = addr.checked_add(into.len()).ok_or(BadAddress)?;
        for page in (addr & !(PAGE - 1)..end).step_by(PAGE) {
            let _ = self.touch(page, false);
        }
        let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
        let remote = libc::iovec { iov_base: addr as *mut _, iov_len: into.len() };
        // SAFETY: `into` has room; the other side may be anywhere.
        let n = unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0) };
        if n == into.len() as isize { Ok(()) } else { Err(BadAddress) }
    }

    /// Brings what the table names, and nothing else.
    fn bring(&self, nr: usize, args: &[usize; 6]) -> Vec<(usize, usize)> {
        let mut spans: Vec<NamedSpan> = Vec::new();
        let read_own = |at: usize, into: &mut [u8]| self.read(at, into);
        let _ = name(look_up(nr), args, &read_own, &mut |span| spans.push(span));
        // Reading must not help: only spans are held.
        self.present.borrow_mut().clear();
        for object in &self.world.objects {
            let (at, len) = (object.pages.start as *mut _, object.pages.len());
            // SAFETY: as in `new`.
            assert_eq!(unsafe { libc::madvise(at, len, libc::MADV_DONTNEED) }, 0);
        }
        let mut strays = Vec::new();
        for span in &spans {
            let end = span.start + span.len;
            for page in (span.start & !(PAGE - 1)..end).step_by(PAGE).take(1 << 16) {
                let _ = self.touch(page, span.write);
            }
            let is_inside = |o: &Object| o.start <= span.start && end <= o.start + o.len;
            if self.world.base <= span.start
                && span.start < self.world.next
                && !self.world.objects.iter().any(is_inside)
            {
                strays.push((span.start, span.len));
            }
        }
        strays
    }

    fn contents(&self) -> Vec<u8> {
        let mut bytes = self.saved.clone();
        for &page in self.present.borrow().iter() {
            let (offset, _) = self.offset(page).unwrap();
            // SAFETY: the page is present.
            let now = unsafe { std::slice::from_raw_parts(page as *const u8, PAGE) };
            bytes[offset..offset + PAGE].copy_from_slice(now);
        }
        bytes
    }
}

/// A call by number, with memory that isn't the world's.
pub fn sys<const N: usize>(nr: i64, args: [usize; N]) -> usize {
    let mut all = [0; 6];
    all[..N].copy_from_slice(&args);
    let [a, b, c, d, e, f] = all;
    // SAFETY: made by cases on memory of their own.
    ok(unsafe { libc::syscall(nr, a, b, c, d, e, f) })
}
