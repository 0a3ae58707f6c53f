//! The data that `memfold run` publishes to all processes of a run: its bounds, and the part of
//! them that each user may use. This page is in a file of its own, which only `memfold run` can
//! write.
//!
//! Each user of a run has a table ([`super::RunTable`]) for its processes. They trust one another
//! as far as the kernel lets them trace one another. The tables of other users are not trusted.
//! `memfold run` sums each table and caps the sum at what the kernel says of that user. Then it
//! shares the bounds of the run between the users, as users share their parts between their
//! processes.
use crate::door::{DoorKey, HALF};
use crate::fair_share::{ShareClaim, shares};
use alloc::vec::Vec;
use core::ffi::c_void;
use core::mem::size_of;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use memfold_os::Errno;
use memfold_os::memory::shared;
use memfold_os::thread::owner::{OwnerState, RobustList, RobustOwner};
use rustix::fd::{AsFd, OwnedFd};

/// Version of the layout of bounds and tables. Files of another version are refused.
pub const LAYOUT_VERSION: u64 = 22;
/// Users of a run, at most. Processes of further users have no table.
pub const USERS: usize = 64;

/// One user's part of the bounds, and the figures of other users that its processes need. Each
/// field is a pair in bytes: counted as for the limit, and counted as for the bound of resident
/// memory.
#[repr(C, align(64))]
struct UserPart {
    bytes: [AtomicU64; 2],
    /// The sum of what the processes of all other users hold at least.
    others_least: [AtomicU64; 2],
    /// 0 if a process of another user holds more at least than every process of this user;
    /// otherwise 1.
    has_largest: [AtomicU64; 2],
}

/// The page of the bounds. The Python package reads its first four words (`_run.py`).
#[repr(C, align(4096))]
struct BoundsPage {
    version: AtomicU64,
    /// Identifies the run.
    key: [AtomicU64; 2],
    /// `--limit` and `--resident` in bytes; `u64::MAX` for no bound.
    given: [AtomicU64; 2],
    /// The part of the limit that the run may use now, in bytes, because a group of runs shares it;
    /// `u64::MAX` without a group.
    share: AtomicU64,
    /// Number of processes of the run that have no slot in any table. The next two are their memory
    /// in bytes, and its peak.
    slotless: AtomicU64,
    slotless_bytes: AtomicU64,
    peak_slotless_bytes: AtomicU64,
    /// Held while `memfold run` lives.
    runner: RobustOwner,
    will: RobustList,
    parts: [UserPart; USERS],
}

/// The bounds of a run.
#[derive(Copy, Clone)]
pub struct RunBounds {
    page: &'static BoundsPage,
}

/// The claim of a user's processes on one bound.
#[derive(Copy, Clone, Default)]
pub struct AskedShare {
    /// The sum of the claims of all processes.
    pub claim: ShareClaim,
    /// The largest amount that one of the processes holds at least, in bytes.
    pub largest: u64,
}

fn words(half: &[u8; HALF]) -> [u64; 2] {
    let half = u128::from_ne_bytes(*half);
    [half as u64, (half >> 64) as u64]
}

/// Returns the index of a bound in a pair.
fn place(limit: bool) -> usize {
    usize::from(!limit)
}

impl RunBounds {
    /// Creates the bounds of a new run, without any limit, in a file of at most `bytes_max` bytes.
    /// Returns them with the file.
    ///
    /// # Errors
    /// - The errors of [`shared::create_to_show`].
    /// - EFBIG: the file would be longer than `bytes_max`.
    pub fn create(bytes_max: u64, key: &DoorKey) -> Result<(RunBounds, OwnedFd), Errno> {
        if bytes_max < size_of::<BoundsPage>() as u64 {
            return Err(Errno::FBIG);
        }
        let (file, at) = shared::create_to_show(c"memfold-bounds", size_of::<BoundsPage>())?;
        // SAFETY: `create_to_show` mapped the file at `at`, as long as a page of bounds, and
        // nothing unmaps it.
        let bounds = unsafe { RunBounds::at(at) };
        for (to, from) in bounds.page.key.iter().zip(words(&key.answer)) {
            to.store(from, Relaxed);
        }
        bounds.page.version.store(LAYOUT_VERSION, Relaxed);
        bounds.set_given(u64::MAX, u64::MAX);
        bounds.set_share(u64::MAX);
        bounds.deal(&[[AskedShare::default(); 2]]);
        Ok((bounds, file))
    }

    /// Maps the bounds of the run with this key from its file, read-only.
    ///
    /// # Errors
    /// - EINVAL: the file is no file of bounds, belongs to another run, or has another version.
    /// - The errors of [`shared::map_to_read`].
    pub fn open(file: impl AsFd, key: &DoorKey) -> Result<RunBounds, Errno> {
        let at = shared::map_to_read(file, size_of::<BoundsPage>())?;
        // SAFETY: `map_to_read` mapped the file at `at`, as long as a page of bounds, and nothing
        // unmaps it.
        let bounds = unsafe { RunBounds::at(at) };
        let is_right = bounds.page.version.load(Relaxed) == LAYOUT_VERSION
            && bounds.key() == words(&key.answer);
        if is_right { Ok(bounds) } else { Err(Errno::INVAL) }
    }

    /// Returns the bounds that are mapped at `at`.
    ///
    /// # Safety
    /// - A `BoundsPage` is mapped at `at` and is never unmapped.
    unsafe fn at(at: *mut c_void) -> RunBounds {
        // SAFETY: the caller promises that the page is mapped and stays so. It holds only atomics,
        // for which every bit pattern is valid and which another process may change at any time.
        RunBounds { page: unsafe { &*at.cast::<BoundsPage>() } }
    }

    /// Returns the key that identifies the run.
    pub(super) fn key(&self) -> [u64; 2] {
        [0, 1].map(|n| self.page.key[n].load(Relaxed))
    }

    /// Sets the bytes that the run may use from now on; `u64::MAX` for no bound. Only `memfold run`
    /// calls it, and calls [`RunBounds::deal`] afterwards.
    pub fn set_given(&self, limit: u64, resident: u64) {
        self.page.given[place(true)].store(limit, Relaxed);
        self.page.given[place(false)].store(resident, Relaxed);
    }

    /// Sets the part of the limit that the run may use from now on, in bytes. Only `memfold run` calls
    /// it, and calls [`RunBounds::deal`] afterwards.
    pub fn set_share(&self, bytes: u64) {
        self.page.share.store(bytes, Relaxed);
    }

    /// Returns whether the run shares its limit with other runs of a group.
    pub fn is_in_a_group(&self) -> bool {
        self.page.share.load(Relaxed) != u64::MAX
    }

    /// Returns the bytes that the run may use, as (limit, resident); `u64::MAX` for no bound. The run
    /// of a group may have to wait for others before it can use all of the limit.
    pub fn given(&self) -> (u64, u64) {
        let [limit, resident] =
            [true, false].map(|limit| self.page.given[place(limit)].load(Relaxed));
        (limit, resident)
    }

    /// Records how many processes of the run have no slot, and the bytes of their anonymous memory.
    /// Only `memfold run` calls it.
    pub fn set_slotless(&self, count: u64, bytes: u64) {
        self.page.slotless.store(count, Relaxed);
        self.page.slotless_bytes.store(bytes, Relaxed);
        memfold_stats::raise(&self.page.peak_slotless_bytes, bytes);
    }

    /// Returns the number of processes of the run without a slot, and the bytes of their anonymous
    /// memory.
    pub fn slotless(&self) -> (u64, u64) {
        (self.page.slotless.load(Relaxed), self.page.slotless_bytes.load(Relaxed))
    }

    /// Returns the most bytes that the processes without a slot had at once.
    pub fn peak_slotless_bytes(&self) -> u64 {
        self.page.peak_slotless_bytes.load(Relaxed)
    }

    /// Marks the calling thread as that of `memfold run`, which reads lines as long as it lives.
    ///
    /// # Errors
    /// The errors of [`RobustOwner::claim`].
    ///
    /// # Safety
    /// - The calling thread uses no robust mutex.
    pub unsafe fn run_here(&self) -> Result<(), Errno> {
        // SAFETY: the caller promises that its thread uses no robust mutex. The page is never
        // unmapped.
        unsafe { self.page.runner.claim(&self.page.will).map(drop) }
    }

    /// Returns whether `memfold run` is gone, so that no process reads lines.
    pub fn is_left_alone(&self) -> bool {
        self.page.runner.state() == OwnerState::Ended
    }

    /// Shares the bounds between the users. What processes without a slot have is taken off first.
    /// `users` holds what each user asks, as counted for the limit and for the bound of resident
    /// memory. Only `memfold run` calls it.
    pub fn deal(&self, users: &[[AskedShare; 2]]) {
        let slotless = self.slotless().1;
        for n in [true, false].map(place) {
            let share = if n == place(true) { self.page.share.load(Relaxed) } else { u64::MAX };
            let share_given = self.page.given[n].load(Relaxed).min(share);
            let bound = if share_given == u64::MAX {
                share_given
            } else {
                share_given.saturating_sub(slotless).max(1)
            };
            let claim = |user: usize| users[user][n];
            let largest = (0..users.len()).max_by_key(|user| (claim(*user).largest, *user));
            let claims: Vec<ShareClaim> = (0..users.len()).map(|user| claim(user).claim).collect();
            let shares = shares(bound, &claims);
            for (user, part) in self.page.parts.iter().enumerate().take(users.len()) {
                let others = claims.iter().enumerate().filter(|(other, _)| *other != user);
                let least = others.fold(0, |sum, (_, claim)| u64::saturating_add(sum, claim.least));
                let own = if bound == u64::MAX { bound } else { shares[user].max(1) };
                part.bytes[n].store(own, Relaxed);
                part.others_least[n].store(least, Relaxed);
                part.has_largest[n].store((largest == Some(user)).into(), Relaxed);
            }
        }
    }

    /// Returns the part of one user.
    ///
    /// # Panics
    /// If `user` is not less than [`USERS`].
    pub fn portion(&self, user: usize) -> UserPortion {
        UserPortion { page: self.page, part: &self.page.parts[user] }
    }
}

/// One user's part of the bounds of a run.
#[derive(Copy, Clone)]
pub struct UserPortion {
    page: &'static BoundsPage,
    part: &'static UserPart,
}

impl UserPortion {
    /// Returns the bounds of the whole run.
    pub fn bounds(&self) -> RunBounds {
        RunBounds { page: self.page }
    }

    /// Returns the bytes that this user's processes with a slot may use now, as (limit, resident);
    /// `u64::MAX` for no bound.
    pub fn left(&self) -> (u64, u64) {
        let rest = |limit: bool| self.part.bytes[place(limit)].load(Relaxed);
        (rest(true), rest(false))
    }

    /// Returns the bytes that processes of other users hold at least, as far as is known, and
    /// whether a process of this user holds the most of all.
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
        [AskedShare { claim: ShareClaim { need, least, ..ShareClaim::default() }, largest }; 2]
    }

    #[test]
    fn bounds_are_read_with_the_key_only() {
        let (bounds, file) = RunBounds::create(u64::MAX, &KEY).unwrap();
        let other = RunBounds::open(&file, &KEY).unwrap();
        assert_eq!(
            (other.given(), other.portion(0).left()),
            ((u64::MAX, u64::MAX), (u64::MAX, u64::MAX))
        );
        bounds.set_given(70, u64::MAX);
        bounds.set_slotless(2, 20);
        bounds.deal(&[asked(0, 0, 0)]);
        bounds.set_slotless(1, 10);
        bounds.set_share(71);
        assert_eq!((other.slotless(), other.peak_slotless_bytes()), ((1, 10), 20));
        assert_eq!(other.portion(0).left(), (50, u64::MAX));
        bounds.set_share(40);
        bounds.deal(&[asked(0, 0, 0)]);
        assert_eq!((other.given(), other.portion(0).left()), ((70, u64::MAX), (30, u64::MAX)));
        assert!(RunBounds::open(&file, &DoorKey { answer: [3; HALF], ..KEY }).is_err());
    }

    #[test]
    fn users_share_as_processes_do() {
        let (bounds, _file) = RunBounds::create(u64::MAX, &KEY).unwrap();
        bounds.set_given(100, 90);
        let deal = |users: &[[AskedShare; 2]]| {
            bounds.deal(users);
            (0..users.len()).map(|user| bounds.portion(user).left()).collect::<std::vec::Vec<_>>()
        };
        assert_eq!(deal(&[asked(500, 200, 7)]), [(100, 90)]);
        assert_eq!(deal(&[asked(500, 0, 0), asked(20, 0, 0)]), [(80, 70), (20, 20)]);
        // Each user gets half of what neither needs.
        assert_eq!(deal(&[asked(40, 0, 0), asked(20, 0, 0)]), [(60, 55), (40, 35)]);
        // A user that claims without end gets no more than an equal share.
        assert_eq!(deal(&[asked(80, 0, 5), asked(u64::MAX, 0, 9)]), [(50, 45), (50, 45)]);
        assert_eq!(bounds.portion(0).others(true), (0, false));
        assert_eq!(bounds.portion(1).others(false), (0, true));
        assert_eq!(deal(&[asked(80, 70, 70), asked(80, 10, 10)]), [(70, 70), (30, 20)]);
        assert_eq!(
            (bounds.portion(0).others(true), bounds.portion(1).others(true)),
            ((10, true), (70, false))
        );
    }
}
