//! Deliberate faults between the engine and an address space.
//!
//! Faults that the system must survive, without losing a byte, leaving a thread asleep, or leaking
//! a page:
//! - [`Trouble::Again`]: EAGAIN, nothing done (an event waits to be read), on any move, copy or
//!   protection;
//! - [`Trouble::NoMemory`]: ENOMEM, nothing done, on any move or copy (a page table could not be
//!   had);
//! - [`Trouble::Busy`]: EBUSY, nothing done, on any move (a page is shared by fork or pinned);
//! - [`Trouble::Partial`]: any first part of a move or copy is done, then EAGAIN with the count;
//! - [`Trouble::Short`]: as partial, but of a move more pages are done than the count says (Linux
//!   6.18 does that); where the count is none, the kernel has tried these pages again, and says
//!   EEXIST;
//! - [`Trouble::Replaced`]: as short with none, and by then something else was mapped at the
//!   source, and touched;
//! - [`Trouble::Exists`]: EEXIST on what goes into the area: another thread has put the same page
//!   there just before;
//! - [`Trouble::Gone`]: ENOENT on what goes into the area, once: its mapping is being changed;
//! - [`Trouble::Refused`]: a discard fails, nothing done;
//! - any of `Again`, `Partial` (whole ranges) and `Refused` when many ranges are dropped, and
//!   [`Trouble::Torn`]: of the first range that isn't dropped whole, the first page is gone.
//!
//! Where memory is hidden, only moves by copy and discards of frames fail.
//!
//! It need not survive these, because the kernel never does them: any other wrong result, EEXIST in
//! an empty frame, ENOENT for a present page.
use crate::fake::FakeSpace;
use crate::random::Random;
use memfold_os::Errno;
use memfold_os::sync::Mutex;
use memfold_os::uffd::Partial;
use memfold_os::uffd::drop::AddressSpan;
use memfold_os::uffd::space::Space;
use memfold_os::units::PAGE_SIZE;
use std::ops::Range;
use std::sync::Arc;

/// A fault.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// EAGAIN, nothing done.
    Again,
    /// ENOMEM, nothing done.
    NoMemory,
    /// EBUSY, nothing done.
    Busy,
    /// This many pages are done (fewer than requested), then EAGAIN.
    Partial(usize),
    /// As many pages as the first number are reported, and as many more as the second are done, then
    /// EAGAIN; EEXIST after none.
    Short(usize, usize),
    /// One page is done and not counted, then EAGAIN. Its source has another page by then.
    Replaced,
    /// EEXIST: another thread has put the page there.
    Exists,
    /// ENOENT: nothing is mapped there.
    Gone,
    /// ENOMEM from a discard.
    Refused,
    /// EINVAL, and the first page is gone.
    Torn,
}

/// A kind of call, by what it does to a page.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// A move from a frame into the area.
    MoveIn,
    /// A move from the area into a frame.
    MoveOut,
    /// A move between frames.
    MoveFrames,
    /// A copy into the area.
    CopyIn,
    /// A copy into a frame.
    Populate,
    /// A move from the area into a frame by copy.
    CopyOut,
    /// A change of protection.
    Protect,
    /// A discard in the area.
    DiscardHome,
    /// A discard of a frame.
    DiscardFrame,
    /// A drop of many ranges in the area; a part of it is ranges.
    DropHome,
}

impl Call {
    /// Returns whether it moves pages by page table.
    fn is_move(self) -> bool {
        matches!(self, Call::MoveIn | Call::MoveOut | Call::MoveFrames)
    }

    /// Returns the random faults of such a call. A discard of the program's own pages fails only
    /// when scripted: the kernel refuses it only for missing areas.
    fn troubles(self) -> &'static [Trouble] {
        use Trouble::*;
        match self {
            Call::MoveIn => &[Again, NoMemory, Busy, Partial(0), Partial(0), Exists, Gone],
            Call::MoveOut | Call::MoveFrames => &[Again, NoMemory, Busy, Partial(0), Partial(0)],
            Call::CopyIn => &[Again, NoMemory, Partial(0), Exists, Gone],
            Call::Populate => &[Again, NoMemory, Partial(0)],
            Call::CopyOut => &[Partial(0)],
            Call::Protect => &[Again],
            Call::DiscardFrame => &[Refused],
            Call::DiscardHome => &[],
            Call::DropHome => &[Again, Partial(0), Partial(0), Refused, Torn],
        }
    }
}

/// An address space with faults. Clones share them.
#[derive(Clone)]
pub struct Troubled {
    space: FakeSpace,
    plan: Arc<Mutex<TroublePlan>>,
}

struct TroublePlan {
    script: Vec<(Call, u64, Trouble)>,
    per_mille: u32,
    random: Random,
    struck: Vec<Trouble>,
}

impl Troubled {
    /// Wraps `space`, without faults so far.
    pub fn new(space: &FakeSpace) -> Troubled {
        let plan = TroublePlan {
            script: Vec::new(),
            per_mille: 0,
            random: Random::new(0),
            struck: Vec::new(),
        };
        Troubled { space: space.clone(), plan: Arc::new(Mutex::new(plan)) }
    }

    /// Gives the `nth` call of a kind from now (1: the next) a fault. A partial fault does not
    /// strike a call with no more pages than the part.
    pub fn strike(&self, call: Call, nth: u64, trouble: Trouble) {
        self.plan.lock().script.push((call, nth, trouble));
    }

    /// Gives `per_mille` of 1000 calls a fault that fits them.
    pub fn strike_at_random(&self, per_mille: u32, seed: u64) {
        let mut plan = self.plan.lock();
        plan.per_mille = per_mille;
        plan.random = Random::new(seed);
    }

    /// Ends all faults.
    pub fn clear(&self) {
        let mut plan = self.plan.lock();
        plan.per_mille = 0;
        plan.script.clear();
    }

    /// Returns how many faults that `is` selects have struck.
    pub fn struck(&self, is: impl Fn(&Trouble) -> bool) -> usize {
        self.plan.lock().struck.iter().filter(|t| is(t)).count()
    }

    fn is_home(&self, addr: usize) -> bool {
        self.space.area().contains(&addr)
    }

    /// Returns the fault of this call of `pages` pages, if any.
    fn due(&self, call: Call, pages: usize) -> Option<Trouble> {
        if self.space.hides() && !matches!(call, Call::CopyOut | Call::DiscardFrame) {
            return None;
        }
        let mut plan = self.plan.lock();
        let mut strike = None;
        for (of, nth, trouble) in plan.script.iter_mut().filter(|s| s.0 == call && s.1 > 0) {
            debug_assert_eq!(*of, call);
            *nth -= 1;
            let fits = match *trouble {
                Trouble::Partial(part) => part < pages,
                Trouble::Short(part, more) => part + more <= pages,
                _ => true,
            };
            strike = if *nth == 0 && fits { Some(*trouble) } else { strike };
        }
        let odds = plan.per_mille;
        if strike.is_none() && !call.troubles().is_empty() && plan.random.per_mille(odds) {
            strike = Some(plan.random.pick(call.troubles()));
            if let Some(Trouble::Partial(_)) = strike {
                let part = 1 + plan.random.below(pages.max(2) - 1);
                let is_short = call.is_move() && plan.random.per_mille(300);
                let pages_moved = if plan.random.per_mille(300) { 0 } else { part.min(pages - 1) };
                let short = Trouble::Short(pages_moved, 1 + plan.random.below(pages - pages_moved));
                strike = if is_short {
                    Some(short)
                } else {
                    (pages > 1).then_some(Trouble::Partial(part))
                };
            }
        }
        plan.struck.extend(strike);
        strike
    }

    /// Applies a fault to a move or copy of `len` bytes to `dst`. `part` does the first bytes of
    /// it. `other` puts the first page there as another thread would, or another page at the source
    /// if that is the fault.
    fn play(
        trouble: Trouble,
        len: usize,
        part: impl FnOnce(usize) -> Result<(), Partial>,
        other: impl FnOnce(),
    ) -> Result<(), Partial> {
        let errno = match trouble {
            Trouble::Again => Errno::AGAIN,
            Trouble::NoMemory | Trouble::Refused | Trouble::Torn => Errno::NOMEM,
            Trouble::Busy => Errno::BUSY,
            Trouble::Gone => Errno::NOENT,
            Trouble::Exists => {
                other();
                Errno::EXIST
            }
            Trouble::Replaced => {
                part(PAGE_SIZE)?;
                other();
                Errno::AGAIN
            }
            Trouble::Short(pages, more) => {
                part((pages + more) * PAGE_SIZE)?;
                let errno = if pages == 0 { Errno::EXIST } else { Errno::AGAIN };
                return Err(Partial { done: pages * PAGE_SIZE, errno });
            }
            Trouble::Partial(pages) => {
                let first = pages * PAGE_SIZE;
                assert!(first > 0 && first < len, "a part is neither nothing nor all");
                part(first)?;
                return Err(Partial { done: first, errno: Errno::AGAIN });
            }
        };
        Err(Partial { done: 0, errno })
    }
}

impl Space for Troubled {
    unsafe fn move_pages(
        &self,
        dst: usize,
        src: usize,
        len: usize,
        wake: bool,
    ) -> Result<(), Partial> {
        let call = match (self.is_home(dst), self.is_home(src)) {
            (true, _) => Call::MoveIn,
            (false, true) => Call::MoveOut,
            (false, false) => Call::MoveFrames,
        };
        // SAFETY: this is a part of the range that the caller vouches for.
        let move_part = |first| unsafe { self.space.move_pages(dst, src, first, wake) };
        let Some(trouble) = self.due(call, len / PAGE_SIZE) else { return move_part(len) };
        // The other page is a page of the thread that replaces it: the one just moved.
        let (to, from) = if trouble == Trouble::Replaced { (src, dst) } else { (dst, src) };
        // SAFETY: the copied page is present and readable for the caller, who may define the bytes
        // of the other place.
        Self::play(trouble, len, move_part, || unsafe {
            let _ = self.space.copy(to, from as *const u8, PAGE_SIZE, true);
        })
    }

    unsafe fn copy(
        &self,
        dst: usize,
        src: *const u8,
        len: usize,
        wake: bool,
    ) -> Result<(), Partial> {
        let call = if self.is_home(dst) { Call::CopyIn } else { Call::Populate };
        // SAFETY: this is a part of the range that the caller vouches for.
        let copy_part = |first| unsafe { self.space.copy(dst, src, first, wake) };
        let Some(trouble) = self.due(call, len / PAGE_SIZE) else { return copy_part(len) };
        Self::play(trouble, len, copy_part, || {
            let _ = copy_part(PAGE_SIZE);
        })
    }

    unsafe fn copy_protected(&self, dst: usize, src: *const u8, len: usize) -> Result<(), Partial> {
        // SAFETY: this is a part of the range that the caller vouches for.
        let copy_part = |first| unsafe { self.space.copy_protected(dst, src, first) };
        let Some(trouble) = self.due(Call::CopyIn, len / PAGE_SIZE) else { return copy_part(len) };
        Self::play(trouble, len, copy_part, || {
            let _ = copy_part(PAGE_SIZE);
        })
    }

    unsafe fn map_zeros(&self, dst: usize, len: usize) -> Result<(), Partial> {
        match self.due(Call::Protect, len / PAGE_SIZE) {
            // SAFETY: by the caller's promise.
            None => unsafe { self.space.map_zeros(dst, len) },
            Some(_) => {
                // SAFETY: by the caller's promise.
                unsafe { self.space.map_zeros(dst, len)? };
                self.space
                    .protect(dst, len, false)
                    .map_err(|errno| Partial { done: len, errno })?;
                Err(Partial { done: len, errno: Errno::AGAIN })
            }
        }
    }

    fn protect(&self, start: usize, len: usize, on: bool) -> Result<(), Errno> {
        match self.due(Call::Protect, len / PAGE_SIZE) {
            None => self.space.protect(start, len, on),
            Some(_) => Err(Errno::AGAIN),
        }
    }

    unsafe fn take_by_copy(&self, address: usize, to: *mut u8, len: usize) -> usize {
        let len = match self.due(Call::CopyOut, len / PAGE_SIZE) {
            None => len,
            Some(Trouble::Partial(pages)) => pages * PAGE_SIZE,
            Some(_) => 0,
        };
        // SAFETY: this is a part of the range that the caller vouches for.
        unsafe { self.space.take_by_copy(address, to, len) }
    }

    unsafe fn discard(&self, start: usize, len: usize) -> Result<(), Errno> {
        let call = if self.is_home(start) { Call::DiscardHome } else { Call::DiscardFrame };
        match self.due(call, len / PAGE_SIZE) {
            // SAFETY: the caller gives up the bytes.
            None => unsafe { self.space.discard(start, len) },
            Some(_) => Err(Errno::NOMEM),
        }
    }

    fn can_drop(&self) -> bool {
        self.space.can_drop()
    }

    fn hides(&self) -> bool {
        self.space.hides()
    }

    unsafe fn drop_spans(&self, spans: &[AddressSpan]) -> Result<(), Partial> {
        let pages = |span: &AddressSpan| (span.start..span.start + span.len).step_by(PAGE_SIZE);
        for page in spans.iter().filter(|span| self.is_home(span.start)).flat_map(pages) {
            let is_safe = !self.space.is_present(page) || self.space.is_protected(page);
            assert!(is_safe, "page {page:#x} is dropped while it may be written to");
        }
        // SAFETY: this is a part of the range that the caller gives up.
        let drop_first = |count: usize| unsafe { self.space.drop_spans(&spans[..count]) };
        let Some(trouble) = self.due(Call::DropHome, spans.len()) else {
            return drop_first(spans.len());
        };
        let errno = match trouble {
            Trouble::Partial(count) => {
                drop_first(count)?;
                let bytes = spans[..count].iter().map(|span| span.len).sum();
                return Err(Partial { done: bytes, errno: Errno::AGAIN });
            }
            Trouble::Torn => {
                // SAFETY: this is a part of the range that the caller gives up.
                unsafe { self.space.drop_spans(&[AddressSpan { len: PAGE_SIZE, ..spans[0] }])? };
                Errno::INVAL
            }
            Trouble::Refused => Errno::NOMEM,
            _ => Errno::AGAIN,
        };
        Err(Partial { done: 0, errno })
    }

    fn unshare(&self, start: usize, len: usize) -> Result<(), Errno> {
        self.space.unshare(start, len)
    }

    fn unshared_bytes(&self, range: Range<usize>, from_end: bool) -> usize {
        self.space.unshared_bytes(range, from_end)
    }

    fn shared_bytes(&self, range: Range<usize>) -> usize {
        self.space.shared_bytes(range)
    }

    fn is_populated(&self, addr: usize) -> bool {
        self.space.is_populated(addr)
    }

    unsafe fn keep(&self, start: usize, len: usize) {
        // SAFETY: by the caller's promise.
        unsafe { self.space.keep(start, len) };
    }

    fn wake(&self, start: usize, len: usize) {
        self.space.wake(start, len);
    }
}
