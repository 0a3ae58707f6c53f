//! What `memfold run` tells all processes of a run: its bounds, and what each of its users may use
//! of them. It lies in a file of its own that `memfold run` alone can write to.
//!
//! Each user of a run has a table ([`super::RunTable`]) for its processes, which trust one another as
//! far as the kernel lets them trace one another. What the tables of other users say is not
//! believed: `memfold run` adds up each of them, bounds what it says by what the kernel says, and
//! shares the run's bounds between the users as they share their parts between their processes.
use crate::door::{DoorKey, HALF};
use crate::fair_share::{ShareClaim, share};
use core::ffi::c_void;
use core::mem::size_of;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use memfold_os::Errno;
use memfold_os::memory::shared;
use memfold_os::thread::owner::{OwnerState, RobustList, RobustOwner};
use rustix::fd::{AsFd, OwnedFd};

/// Version of the layout of bounds and tables; another is refused.
pub const LAYOUT_VERSION: u64 = 13;
/// Users of a run at most; processes of further ones have no table.
pub const USERS: usize = 64;

/// What one user's processes may use, and what matters of the others. Each is a pair, as the limit
/// counts, and as the bound of resident memory does; bytes.
#[repr(C, align(64))]
struct UserPart {
    bytes: [AtomicU64; 2],
    /// What processes of all other users hold at least.
    others_least: [AtomicU64; 2],
    /// 0: a process of another user holds more, at least, than any of this one's.
    has_largest: [AtomicU64; 2],
}

/// The Python package reads the first four words (`_run.py`).
#[repr(C, align(4096))]
struct BoundsPage {
    version: AtomicU64,
    /// Tells this run from any other.
    key: [AtomicU64; 2],
    /// As `--limit` and `--resident`, bytes; `u64::MAX` for none.
    given: [AtomicU64; 2],
    /// Processes of the run that have no slot in any table, and their memory, bytes.
    slotless: AtomicU64,
    slotless_bytes: AtomicU64,
    peak_slotless_bytes: AtomicU64,
    /// `memfold run`.
    runner: RobustOwner,
    will: RobustList,
    parts: [UserPart; USERS],
}

/// The bounds of a run.
#[derive(Copy, Clone)]
pub struct RunBounds {
    page: &'static BoundsPage,
}

/// What a user's processes ask of one bound.
#[derive(Copy, Clone, Default)]
pub struct AskedShare {
    /// All of them.
    pub claim: ShareClaim,
    /// What the one with the most of it holds at least, bytes.
    pub largest: u64,
}

fn words(half: &[u8; HALF]) -> [u64; 2] {
    let half = u128::from_ne_bytes(*half);
    [half as u64, (half >> 64) as u64]
}

/// The place of a bound in a pair.
fn place(limit: bool) -> usize {
    usize::from(!limit)
}

impl RunBounds {
    /// Those of a new run, without any; and the file, of at most `bytes_max`.
    ///
    /// # Errors
    /// As [`shared::create_to_show`]; EFBIG: it may not even be so long.
    pub fn create(bytes_max: u64, key: &DoorKey) -> Result<(RunBounds, OwnedFd), Errno> {
        if bytes_max < size_of::<BoundsPage>() as u64 {
            return Err(Errno::FBIG);
        }
        let (file, at) = shared::create_to_show(c"memfold-bounds", size_of::<BoundsPage>())?;
        // SAFETY: just mapped, as long as that.
        let bounds = unsafe { RunBounds::at(at) };
        for (to, from) in bounds.page.key.iter().zip(words(&key.answer)) {
            to.store(from, Relaxed);
        }
        bounds.page.version.store(LAYOUT_VERSION, Relaxed);
        bounds.set_given(u64::MAX, u64::MAX);
        bounds.deal(&[[AskedShare::default(); 2]]);
        Ok((bounds, file))
    }

    /// Those of the run with this key, from its file, to read.
    ///
    /// # Errors
    /// EINVAL: it is another file, another run's, or of another version; what mapping it says.
    pub fn open(file: impl AsFd, key: &DoorKey) -> Result<RunBounds, Errno> {
        let at = shared::map_to_read(file, size_of::<BoundsPage>())?;
        // SAFETY: just mapped, as long as that.
        let bounds = unsafe { RunBounds::at(at) };
        let is_right = bounds.page.version.load(Relaxed) == LAYOUT_VERSION
            && bounds.key() == words(&key.answer);
        if is_right { Ok(bounds) } else { Err(Errno::INVAL) }
    }

    /// # Safety
    /// - A page is mapped there, and stays.
    unsafe fn at(at: *mut c_void) -> RunBounds {
        // SAFETY: by the caller's promise; what is in it is atomics only, for which every bit
        // pattern is valid and which another process may change at any time.
        RunBounds { page: unsafe { &*at.cast::<BoundsPage>() } }
    }

    /// What tells this run from any other.
    pub(super) fn key(&self) -> [u64; 2] {
        [0, 1].map(|n| self.page.key[n].load(Relaxed))
    }

    /// What the run may use from now on, bytes (limit, resident); `u64::MAX` for no bound. By
    /// `memfold run`, which deals it then.
    pub fn set_given(&self, limit: u64, resident: u64) {
        self.page.given[place(true)].store(limit, Relaxed);
        self.page.given[place(false)].store(resident, Relaxed);
    }

    /// What the run may use now, likewise.
    pub fn given(&self) -> (u64, u64) {
        let [limit, resident] =
            [true, false].map(|limit| self.page.given[place(limit)].load(Relaxed));
        (limit, resident)
    }

    /// Notes how many processes of the run have no slot, and their anonymous memory, bytes. By
    /// `memfold run`.
    pub fn set_slotless(&self, count: u64, bytes: u64) {
        self.page.slotless.store(count, Relaxed);
        self.page.slotless_bytes.store(bytes, Relaxed);
        memfold_stats::raise(&self.page.peak_slotless_bytes, bytes);
    }

    /// Processes of the run without a slot, and their anonymous memory, bytes.
    pub fn slotless(&self) -> (u64, u64) {
        (self.page.slotless.load(Relaxed), self.page.slotless_bytes.load(Relaxed))
    }

    /// The most memory that processes without a slot ever had at once, bytes.
    pub fn peak_slotless_bytes(&self) -> u64 {
        self.page.peak_slotless_bytes.load(Relaxed)
    }

    /// The calling thread is that of `memfold run`, which reads lines while it lives.
    ///
    /// # Errors
    /// As [`RobustOwner::claim`].
    ///
    /// # Safety
    /// - The calling thread uses no robust mutex.
    pub unsafe fn run_here(&self) -> Result<(), Errno> {
        // SAFETY: the caller's promise; the page is never unmapped.
        unsafe { self.page.runner.claim(&self.page.will).map(drop) }
    }

    /// Whether `memfold run` is gone, so that nobody reads a line.
    pub fn is_left_alone(&self) -> bool {
        self.page.runner.state() == OwnerState::Ended
    }

    /// Shares the bounds, without what processes without a slot have, between users who ask for so
    /// much: as the limit counts, and as the bound of resident memory does. By `memfold run`.
    pub fn deal(&self, users: &[[AskedShare; 2]]) {
        let slotless = self.slotless().1;
        for n in [true, false].map(place) {
            let given = self.page.given[n].load(Relaxed);
            let bound =
                if given == u64::MAX { given } else { given.saturating_sub(slotless).max(1) };
            let asked = |user: usize| users[user][n];
            let largest = (0..users.len()).max_by_key(|user| (asked(*user).largest, *user));
            for (user, part) in self.page.parts.iter().enumerate().take(users.len()) {
                let others: alloc::vec::Vec<ShareClaim> =
                    (0..users.len()).filter(|n| *n != user).map(|user| asked(user).claim).collect();
                let least =
                    others.iter().fold(0, |sum, claim| u64::saturating_add(sum, claim.least));
                let own = if bound == u64::MAX {
                    bound
                } else {
                    share(bound, asked(user).claim, &others).max(1)
                };
                part.bytes[n].store(own, Relaxed);
                part.others_least[n].store(least, Relaxed);
                part.has_largest[n].store((largest == Some(user)).into(), Relaxed);
            }
        }
    }

    /// The part of one user.
    ///
    /// # Panics
    /// If there are not so many users.
    pub fn portion(&self, user: usize) -> UserPortion {
        UserPortion { page: self.page, part: &self.page.parts[user] }
    }
}

/// What one user may use of the bounds of a run.
#[derive(Copy, Clone)]
pub struct UserPortion {
    page: &'static BoundsPage,
    part: &'static UserPart,
}

impl UserPortion {
    /// All bounds of the run.
    pub fn bounds(&self) -> RunBounds {
        RunBounds { page: self.page }
    }

    /// What processes with a slot may use now, bytes (limit, resident); `u64::MAX` for no bound.
    /// `waiting`: what processes without a slot have taken, and may use before anybody looks.
    pub fn left(&self, waiting: u64) -> (u64, u64) {
        let unseen = waiting.saturating_sub(self.bounds().slotless().1);
        let left = |limit: bool| match self.part.bytes[place(limit)].load(Relaxed) {
            u64::MAX => u64::MAX,
            bytes => bytes.saturating_sub(unseen).max(1),
        };
        (left(true), left(false))
    }

    /// What processes of other users hold at least, bytes, as far as is known; and whether one of
    /// this user's holds most of all.
    pub fn others(&self, limit: bool) -> (u64, bool) {
        let n = place(limit);
        (self.part.others_least[n].load(Relaxed), self.part.has_largest[n].load(Relaxed) != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: DoorKey = DoorKey { ask: [1; HALF], answer: [2; HALF] };

    fn asked(need: u64, least: u64, largest: u64) -> [AskedShare; 2] {
        [AskedShare { claim: ShareClaim { need, least }, largest }; 2]
    }

    #[test]
    fn bounds_are_read_with_the_key_only() {
        let (bounds, file) = RunBounds::create(u64::MAX, &KEY).unwrap();
        let other = RunBounds::open(&file, &KEY).unwrap();
        assert_eq!(
            (other.given(), other.portion(0).left(5)),
            ((u64::MAX, u64::MAX), (u64::MAX, u64::MAX))
        );
        bounds.set_given(70, u64::MAX);
        bounds.set_slotless(2, 20);
        bounds.deal(&[asked(0, 0, 0)]);
        bounds.set_slotless(1, 10);
        assert_eq!((other.slotless(), other.peak_slotless_bytes()), ((1, 10), 20));
        // Of what waits, 10 bytes were seen.
        assert_eq!(
            (other.portion(0).left(15), other.portion(0).left(10)),
            ((45, u64::MAX), (50, u64::MAX))
        );
        assert!(RunBounds::open(&file, &DoorKey { answer: [3; HALF], ..KEY }).is_err());
    }

    #[test]
    fn users_share_as_processes_do() {
        let (bounds, _file) = RunBounds::create(u64::MAX, &KEY).unwrap();
        bounds.set_given(100, 90);
        let dealt = |users: &[[AskedShare; 2]]| {
            bounds.deal(users);
            (0..users.len()).map(|user| bounds.portion(user).left(0)).collect::<std::vec::Vec<_>>()
        };
        assert_eq!(dealt(&[asked(500, 200, 7)]), [(100, 90)]);
        assert_eq!(dealt(&[asked(500, 0, 0), asked(20, 0, 0)]), [(80, 70), (20, 20)]);
        // One that claims without end gets no more than an equal share.
        assert_eq!(dealt(&[asked(80, 0, 5), asked(u64::MAX, 0, 9)]), [(50, 45), (50, 45)]);
        assert_eq!(bounds.portion(0).others(true), (0, false));
        assert_eq!(bounds.portion(1).others(false), (0, true));
        assert_eq!(dealt(&[asked(80, 70, 70), asked(80, 10, 10)]), [(70, 70), (30, 20)]);
        assert_eq!(
            (bounds.portion(0).others(true), bounds.portion(1).others(true)),
            ((10, true), (70, false))
        );
    }
}
