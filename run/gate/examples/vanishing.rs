//! A library for LD_PRELOAD whose keeper takes pages of the program's larger mappings away at
//! random, all the time, and brings them back where the program or the gate touches them.
//!
//! Its userfaultfd serves faults of user code only, so a system call that meets a page that isn't
//! there fails: a program that runs as ever shows that none does. It needs Linux 6.8 (UFFDIO_MOVE);
//! without it nothing is taken away, and the process says so when it ends.
use core::ffi::{c_char, c_int};
use core::sync::atomic::{AtomicI32, AtomicUsize, Ordering::Relaxed};
use memfold_gate::{
    AnyRights, BadAddress, HoldKeeper, Keeper, KeeperFault, KeeperHold, LifeKeeper, NamedSpan,
    Names, NoHoldRoom, NoServer, NoThreads, OtherProcess, PageKeeper,
};
use memfold_os::raw::system_call;
use memfold_os::sync::StaticMutex;

const PAGE: usize = 4096;
const AREAS: usize = 512;
const HOLDS: usize = 256;
/// Ranges of one hold.
const SPANS: usize = 1200;
const AREA_MIN: usize = 64 << 10;
const AREA_MAX: usize = 256 << 20;
/// Taken away at a time.
const BATCH: usize = 6;

const UFFD_USER_MODE_ONLY: usize = 1;
const FEATURE_SIGBUS: u64 = 1 << 7;
const FEATURE_MOVE: u64 = 1 << 16;
const UFFDIO_API: usize = 0xc018_aa3f;
const UFFDIO_REGISTER: usize = 0xc020_aa00;
const UFFDIO_UNREGISTER: usize = 0x8010_aa01;
const UFFDIO_ZEROPAGE: usize = 0xc020_aa04;
const UFFDIO_MOVE: usize = 0xc028_aa05;

#[derive(Copy, Clone)]
struct HiddenArea {
    start: usize,
    len: usize,
    shadow: usize,
}

/// What a call holds; with more ranges than there is room for, everything.
#[derive(Copy, Clone)]
struct Held {
    spans: [NamedSpan; SPANS],
    count: usize,
}

impl Held {
    const NONE: Held =
        Held { spans: [NamedSpan { start: 0, len: 0, write: false }; SPANS], count: 0 };

    fn push(&mut self, span: NamedSpan) {
        if let Some(place) = self.spans.get_mut(self.count) {
            *place = span;
        }
        self.count += 1;
    }

    fn as_slice(&self) -> &[NamedSpan] {
        &self.spans[..self.count.min(SPANS)]
    }
}

struct State {
    areas: [HiddenArea; AREAS],
    is_taken: [bool; HOLDS],
    holds: [Held; HOLDS],
    random: u64,
}

static STATE: StaticMutex<State> = StaticMutex::new(State {
    areas: [HiddenArea { start: 0, len: 0, shadow: 0 }; AREAS],
    is_taken: [false; HOLDS],
    holds: [Held::NONE; HOLDS],
    random: 0x9e37_79b9_7f4a_7c15,
});
static UFFD: AtomicI32 = AtomicI32::new(-1);
static TO: AtomicI32 = AtomicI32::new(-1);
static TAKEN: AtomicUsize = AtomicUsize::new(0);
static BROUGHT: AtomicUsize = AtomicUsize::new(0);

fn call(nr: i64, args: [usize; 6]) -> isize {
    // SAFETY: each is of the keeper's own memory, or of areas that it manages.
    match unsafe { system_call(nr, args) } {
        Ok(value) => value as isize,
        Err(e) => -(e.raw_os_error() as isize),
    }
}

fn uffd(request: usize, words: &mut [u64]) -> bool {
    let fd = UFFD.load(Relaxed) as usize;
    call(libc::SYS_ioctl, [fd, request, words.as_mut_ptr() as usize, 0, 0, 0]) >= 0
}

fn is_mapped(page: usize) -> bool {
    let mut resident = 0u8;
    call(libc::SYS_mincore, [page, PAGE, &raw mut resident as usize, 0, 0, 0]) == 0
}

fn move_page(to: usize, from: usize) -> bool {
    uffd(UFFDIO_MOVE, &mut [to as u64, from as u64, PAGE as u64, 0, 0])
}

fn map(len: usize) -> usize {
    let (access, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let flags = flags | libc::MAP_NORESERVE;
    call(libc::SYS_mmap, [0, len, access as usize, flags as usize, usize::MAX, 0]) as usize
}

impl State {
    fn add(&mut self, start: usize, len: usize) {
        let Some(free) = self.areas.iter_mut().find(|area| area.len == 0) else { return };
        let shadow = map(len);
        for at in [start, shadow] {
            call(libc::SYS_madvise, [at, len, libc::MADV_NOHUGEPAGE as usize, 0, 0, 0]);
            if !uffd(UFFDIO_REGISTER, &mut [at as u64, len as u64, 1, 0]) {
                call(libc::SYS_munmap, [shadow, len, 0, 0, 0, 0]);
                uffd(UFFDIO_UNREGISTER, &mut [start as u64, len as u64]);
                return;
            }
        }
        *free = HiddenArea { start, len, shadow };
    }

    /// Brings an area back for good.
    fn drop_area(&mut self, at: usize) {
        let area =
            core::mem::replace(&mut self.areas[at], HiddenArea { start: 0, len: 0, shadow: 0 });
        for offset in (0..area.len).step_by(PAGE) {
            move_page(area.start + offset, area.shadow + offset);
        }
        uffd(UFFDIO_UNREGISTER, &mut [area.start as u64, area.len as u64]);
        call(libc::SYS_munmap, [area.shadow, area.len, 0, 0, 0, 0]);
    }

    fn drop_overlapping(&mut self, start: usize, len: usize) {
        for at in 0..AREAS {
            let area = self.areas[at];
            if area.len > 0
                && area.start < start.saturating_add(len)
                && start < area.start + area.len
            {
                self.drop_area(at);
            }
        }
    }

    fn is_held(&self, page: usize) -> bool {
        let is_here = |span: &NamedSpan| span.start < page + PAGE && page < span.start + span.len;
        let holds = self.holds.iter().zip(&self.is_taken).filter(|(_, is_taken)| **is_taken);
        holds.into_iter().any(|(hold, _)| hold.count > SPANS || hold.as_slice().iter().any(is_here))
    }

    /// Takes some pages away.
    fn take(&mut self) {
        let count = self.areas.iter().rposition(|area| area.len > 0).map_or(0, |last| last + 1);
        for _ in 0..if count > 0 { BATCH } else { 0 } {
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            let area = self.areas[self.random as usize % count];
            if area.len == 0 {
                continue;
            }
            let offset = (self.random >> 20) as usize % (area.len / PAGE) * PAGE;
            if !self.is_held(area.start + offset)
                && move_page(area.shadow + offset, area.start + offset)
            {
                TAKEN.fetch_add(1, Relaxed);
            }
        }
    }

    fn bring(&mut self, page: usize) -> bool {
        let contains = |area: &&HiddenArea| page.wrapping_sub(area.start) < area.len;
        let Some(area) = self.areas.iter().find(contains) else {
            // All of it was brought back before this fault's turn came, and a page that was never
            // there is the kernel's to make.
            return is_mapped(page);
        };
        if move_page(page, area.shadow + page - area.start) {
            BROUGHT.fetch_add(1, Relaxed);
        } else {
            // It was never there, or another thread was first.
            uffd(UFFDIO_ZEROPAGE, &mut [page as u64, PAGE as u64, 0, 0]);
        }
        true
    }
}

struct Vanishing;
static KEEPER: Keeper = Keeper {
    holds: &Vanishing,
    pages: &Vanishing,
    life: &Vanishing,
    children: &NoServer,
    rights: &AnyRights,
    threads: &NoThreads,
};

impl HoldKeeper for Vanishing {
    fn concerns(&self, _start: usize, _len: usize) -> bool {
        true
    }

    fn hold(
        &self,
        names: Names,
        _thread: usize,
        touch: fn(usize, bool) -> Result<(), BadAddress>,
    ) -> Result<Option<KeeperHold>, NoHoldRoom> {
        let mut spans = Held::NONE;
        // What it reads may be away.
        names(&mut |span| spans.push(span));
        let place = {
            let mut state = STATE.lock();
            state.take();
            let place = state.is_taken.iter().position(|is_taken| !is_taken).expect("a place");
            state.is_taken[place] = true;
            state.holds[place].count = spans.count;
            let count = spans.as_slice().len();
            state.holds[place].spans[..count].copy_from_slice(spans.as_slice());
            place
        };
        for span in spans.as_slice() {
            let mut at = span.start;
            while at < span.start + span.len {
                if touch(at, span.write).is_err() {
                    break;
                }
                at = (at | (PAGE - 1)) + 1;
            }
        }
        Ok(Some(KeeperHold(place as u32)))
    }

    fn release(&self, hold: KeeperHold) {
        STATE.lock().is_taken[hold.0 as usize] = false;
    }

    fn lent(
        &self,
        _process: OtherProcess,
        _parts: &[[usize; 2]],
        _write: bool,
        make: &mut dyn FnMut(usize) -> isize,
    ) -> isize {
        make(0)
    }

    fn piece_bytes(&self) -> usize {
        usize::MAX
    }

    fn refused(&self, _nr: usize, _name: &str, _words: &[usize]) {}
}

impl PageKeeper for Vanishing {
    fn hides(&self) -> bool {
        false
    }

    fn fault(&self, fault: KeeperFault) -> bool {
        let addr = fault.address;
        let mut state = STATE.lock();
        state.take();
        state.bring(addr & !(PAGE - 1))
    }

    fn change(
        &self,
        nr: usize,
        args: &[usize; 6],
        make: &mut dyn FnMut(&[usize; 6]) -> isize,
    ) -> isize {
        let mut state = STATE.lock();
        match nr as i64 {
            libc::SYS_mmap if args[3] as i32 & libc::MAP_FIXED == 0 => {}
            libc::SYS_brk => {}
            libc::SYS_mlockall => state.drop_overlapping(0, usize::MAX),
            libc::SYS_mremap => {
                state.drop_overlapping(args[0], args[1].max(args[2]));
                state.drop_overlapping(args[4], args[2]);
            }
            _ => state.drop_overlapping(args[0], args[1]),
        }
        let result = make(args);
        let plain_flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let refused_flags = libc::MAP_GROWSDOWN
            | libc::MAP_HUGETLB
            | libc::MAP_STACK
            | libc::MAP_LOCKED
            | libc::MAP_SHARED;
        if nr as i64 == libc::SYS_mmap
            && result > 0
            && args[3] as i32 & (plain_flags | refused_flags) == plain_flags
            && args[2] as i32 == libc::PROT_READ | libc::PROT_WRITE
            && (AREA_MIN..=AREA_MAX).contains(&args[1])
            && UFFD.load(Relaxed) >= 0
        {
            state.add(result as usize, args[1].next_multiple_of(PAGE));
        }
        state.take();
        result
    }

    fn never_fold(&self, start: usize, len: usize) {
        STATE.lock().drop_overlapping(start, len);
    }

    fn keep_all(&self, _keep: bool) {}

    fn keep_home(&self, _keep: bool) -> bool {
        true
    }
}

impl LifeKeeper for Vanishing {
    fn expect_copy(&self) {}

    fn begin_copy(&self) {
        let mut state = STATE.lock();
        state.drop_overlapping(0, usize::MAX);
        core::mem::forget(state);
    }

    fn end_copy(&self, made: isize) {
        if made == 0 {
            // SAFETY: this is the only thread, and it has the lock.
            unsafe { STATE.peek_mut() }.is_taken = [false; HOLDS];
            let fd = UFFD.swap(-1, Relaxed);
            if fd >= 0 {
                call(libc::SYS_close, [fd as usize, 0, 0, 0, 0, 0]);
                open();
            }
        }
        // SAFETY: the guard was forgotten by `begin_copy`.
        unsafe { STATE.unlock() };
    }

    fn execute(
        &self,
        _nr: usize,
        args: &[usize; 6],
        make: &mut dyn FnMut(&[usize; 6]) -> isize,
    ) -> isize {
        make(args)
    }

    fn owns_descriptor(&self, fd: i32) -> bool {
        fd >= 0 && fd == UFFD.load(Relaxed)
    }

    fn ends(&self) {
        if TO.load(Relaxed) >= 0 {
            let text = said();
            call(
                libc::SYS_write,
                [TO.load(Relaxed) as usize, text.as_ptr() as usize, text.len(), 0, 0, 0],
            );
        }
    }
}

/// Opens the descriptor, at a number that programs don't use.
fn open() {
    let flags = libc::O_CLOEXEC as usize | UFFD_USER_MODE_ONLY;
    let fd = call(libc::SYS_userfaultfd, [flags, 0, 0, 0, 0, 0]);
    if fd < 0 {
        return;
    }
    let high = call(libc::SYS_fcntl, [fd as usize, libc::F_DUPFD_CLOEXEC as usize, 900, 0, 0, 0]);
    call(libc::SYS_close, [fd as usize, 0, 0, 0, 0, 0]);
    UFFD.store(high as i32, Relaxed);
    if high >= 0 && !uffd(UFFDIO_API, &mut [0xaa, FEATURE_SIGBUS | FEATURE_MOVE, 0]) {
        call(libc::SYS_close, [high as usize, 0, 0, 0, 0, 0]);
        UFFD.store(-1, Relaxed);
    }
}

extern "C" fn construct(_count: c_int, _args: *const *const c_char, _env: *const *const c_char) {
    if let Ok(number) = std::env::var("MEMFOLD_GATE_COUNT") {
        TO.store(number.parse().unwrap_or(-1), Relaxed);
    }
    open();
    // SAFETY: the loader calls this before there are threads, and the keeper makes its calls here.
    match unsafe { memfold_gate::start(&KEEPER) } {
        Ok(process) => process.keep(),
        Err(why) => panic!("{why:?}"),
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCT: extern "C" fn(c_int, *const *const c_char, *const *const c_char) = construct;

/// `taken N brought N`, without the program's heap.
fn said() -> [u8; 40] {
    let mut text = *b"taken            brought               \n";
    for (count, end) in [(&TAKEN, 15), (&BROUGHT, 36)] {
        let (mut rest, mut at) = (count.load(Relaxed), end);
        loop {
            text[at] = b'0' + (rest % 10) as u8;
            (rest, at) = (rest / 10, at - 1);
            if rest == 0 {
                break;
            }
        }
    }
    text
}
