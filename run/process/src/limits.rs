//! Resource limits that the program sets itself.
//!
//! The kernel counts the engine's reservations of addresses in RLIMIT_AS and RLIMIT_DATA, though
//! they are not memory. So the kernel's limit is higher by as much, and the program is shown its
//! own. The hard limits of these and of RLIMIT_NOFILE are not lowered in the kernel. So the engine
//! can reserve more, and a child can open descriptors with high numbers. The program is answered as
//! if its hard limits were set. A program that it executes gets them in the kernel.
use crate::program::{ManagedProgram, get};
use core::mem::forget;
use core::sync::atomic::{AtomicBool, Ordering::SeqCst};
use memfold_gate::child;
use memfold_os::Errno;
use memfold_os::memory::zone::reserved_bytes;
use memfold_os::raw::system_call;
use memfold_os::sync::Mutex;
use rustix::thread::{CapabilitySet, capabilities};

/// A limit: soft, hard.
type Limit = [u64; 2];

/// The emulated limits, each with whether reservations count in it.
const EMULATED: [(u32, bool); 3] =
    [(libc::RLIMIT_AS, true), (libc::RLIMIT_DATA, true), (libc::RLIMIT_NOFILE, false)];
/// Descriptors that the engine may need: up to its highest number, and some for a moment.
const DESCRIPTORS: u64 = 2048;
/// Bytes for mappings beside reservations, such as the library and the run's table.
const MORE_BYTES: u64 = 16 << 20;

/// The kernel as the keeper of this process's limits. Tests replace it.
trait LimitKeeper {
    /// Returns a limit. Sets it first if `new` is given, and returns the former one.
    ///
    /// # Errors
    /// The errors of `prlimit`.
    fn limit(&self, resource: u32, new: Option<&Limit>) -> Result<Limit, Errno>;

    /// Returns the bytes of addresses that the engine has reserved.
    fn reserved_bytes(&self) -> u64;

    /// Returns whether the caller may raise a hard limit.
    fn may_raise(&self) -> bool;
}

struct Kernel;

impl LimitKeeper for Kernel {
    fn limit(&self, resource: u32, new: Option<&Limit>) -> Result<Limit, Errno> {
        let mut before = [0u64; 2];
        let new = new.map_or(0, |new| &raw const *new as usize);
        let args = [0, resource as usize, new, &raw mut before as usize, 0, 0];
        // SAFETY: `new` is null or points to a limit that lives during the call. The kernel writes
        // one limit to `before`.
        unsafe { system_call(libc::SYS_prlimit64, args) }.map(|_| before)
    }

    fn reserved_bytes(&self) -> u64 {
        reserved_bytes() as u64
    }

    fn may_raise(&self) -> bool {
        capabilities(None).is_ok_and(|all| all.effective.contains(CapabilitySet::SYS_RESOURCE))
    }
}

/// A limit that the program has set, and the one that the kernel was given for it. If the kernel
/// has another one, another process has set it since.
#[derive(Copy, Clone)]
struct OwnLimit {
    own: Limit,
    kernel: Limit,
}

/// The limits that the program has set, in the order of [`EMULATED`].
#[derive(Copy, Clone)]
struct OwnLimits([Option<OwnLimit>; EMULATED.len()]);

/// Returns the kernel's soft limit for the program's soft limit `soft`.
fn raised(kernel: &impl LimitKeeper, soft: u64, counts: bool) -> u64 {
    let more = if counts { kernel.reserved_bytes().saturating_add(MORE_BYTES) } else { 0 };
    soft.saturating_add(more)
}

impl OwnLimits {
    const NONE: OwnLimits = OwnLimits([None; EMULATED.len()]);

    /// Returns the kernel's limit, and the one that the program is shown.
    fn shown(&self, kernel: &impl LimitKeeper, at: usize) -> Result<(Limit, Limit), Errno> {
        let before = kernel.limit(EMULATED[at].0, None)?;
        let own = self.0[at].filter(|set| set.kernel == before);
        Ok((before, own.map_or(before, |set| set.own)))
    }

    /// Sets a limit. Returns the former one.
    fn set(&mut self, kernel: &impl LimitKeeper, at: usize, new: Limit) -> Result<Limit, Errno> {
        let (resource, counts) = EMULATED[at];
        let (before, pair) = self.shown(kernel, at)?;
        if new[0] > new[1] {
            return Err(Errno::INVAL);
        }
        if new[1] > pair[1] && !kernel.may_raise() {
            return Err(Errno::PERM);
        }
        let hard = before[1].max(new[1]);
        let kernel_pair = [raised(kernel, new[0], counts).min(hard), hard];
        kernel.limit(resource, Some(&kernel_pair))?;
        self.0[at] = Some(OwnLimit { own: new, kernel: kernel_pair });
        Ok(pair)
    }

    /// Raises the kernel's limits by what the engine has reserved since.
    fn renew(&mut self, kernel: &impl LimitKeeper) {
        self.each(kernel, |resource, counts, set| {
            set.kernel[0] = raised(kernel, set.own[0], counts).min(set.kernel[1]);
            let _ = kernel.limit(resource, Some(&set.kernel));
        });
    }

    /// Gives the kernel the program's own limits.
    fn hand_on(&mut self, kernel: &impl LimitKeeper) {
        self.each(kernel, |resource, _, set| {
            if kernel.limit(resource, Some(&set.own)).is_ok() {
                set.kernel = set.own;
            }
        });
    }

    /// Gives the kernel the engine's limits again. A process that may not raise a hard limit keeps
    /// the program's own from now on.
    fn take_back(&mut self, kernel: &impl LimitKeeper) {
        self.take_back_where(kernel, |_| true);
    }

    /// Does as [`OwnLimits::take_back`] for limits that the kernel was given by
    /// [`OwnLimits::hand_on`].
    fn take_back_handed_on(&mut self, kernel: &impl LimitKeeper) {
        self.take_back_where(kernel, |set| set.kernel == set.own);
    }

    fn take_back_where(&mut self, kernel: &impl LimitKeeper, which: fn(&OwnLimit) -> bool) {
        self.each(kernel, |resource, counts, set| {
            if !which(set) {
                return;
            }
            let raised_limit = raised(kernel, set.own[0], counts);
            let candidates = [
                [raised_limit, raised_limit.max(set.own[1])],
                [raised_limit.min(set.own[1]), set.own[1]],
            ];
            let pair = candidates.into_iter().find(|new| kernel.limit(resource, Some(new)).is_ok());
            if let Some(pair) = pair {
                set.kernel = pair;
            }
        });
    }

    /// Calls `each` with the limits that the program has set and the kernel still has.
    fn each(&mut self, kernel: &impl LimitKeeper, mut each: impl FnMut(u32, bool, &mut OwnLimit)) {
        for ((resource, counts), set) in EMULATED.into_iter().zip(&mut self.0) {
            if let Some(set) = set
                && kernel.limit(resource, None).is_ok_and(|now| now == set.kernel)
            {
                each(resource, counts, set);
            }
        }
    }
}

static SET: Mutex<OwnLimits> = Mutex::new(OwnLimits::NONE);
/// Whether the program has set any limit.
static IS_ANY: AtomicBool = AtomicBool::new(false);

/// Returns the limits that are set, for a child of vfork, which takes no lock. Without an engine it
/// gets none, and keeps the limits of the kernel.
fn all_set() -> OwnLimits {
    let ask = |program: &ManagedProgram| program.threads().try_on_behalf(|| *SET.lock());
    get().and_then(ask).unwrap_or(OwnLimits::NONE)
}

/// Returns a limit of this process as the program sees it. Sets it if `new` is given, and returns
/// the former one.
///
/// # Errors
/// The errors of `prlimit`.
pub fn limit(resource: u32, new: Option<Limit>) -> Result<Limit, Errno> {
    let emulated = EMULATED.iter().position(|each| each.0 == resource);
    let (Some(at), Some(_)) = (emulated, get()) else {
        return Kernel.limit(resource, new.as_ref());
    };
    if child().is_some() {
        // A child of vfork gets the kernel's limits, because it is about to execute a program.
        let (_, pair) = all_set().shown(&Kernel, at)?;
        return new.map_or(Ok(pair), |new| Kernel.limit(resource, Some(&new)).map(|_| pair));
    }
    let mut all = SET.lock();
    let Some(new) = new else { return all.shown(&Kernel, at).map(|(_, pair)| pair) };
    let before = all.set(&Kernel, at, new)?;
    IS_ANY.store(true, SeqCst);
    Ok(before)
}

/// Keeps the limits unchanged until [`resume`], for a copy of the process.
pub fn stop() {
    forget(SET.lock());
}

/// Returns whether a thread uses the limits, or has ended while it did.
pub fn are_held() -> bool {
    SET.is_held()
}

/// Ends [`stop`]. `is_child` is whether this is the copy. A thread that was about to execute a
/// program is not in the copy, so the copy takes back what that thread has handed on.
///
/// # Safety
/// - [`stop`] has returned, in this process or in the parent that it is a copy of, and this is
///   called once for it.
pub unsafe fn resume(is_child: bool) {
    // SAFETY: the caller promises that `stop` has forgotten the guard, and that this is the one
    // call for it.
    unsafe { SET.unlock() };
    if is_child && are_set() {
        SET.lock().take_back_handed_on(&Kernel);
    }
}

/// Returns whether the program has set any limit.
pub fn are_set() -> bool {
    IS_ANY.load(SeqCst)
}

/// Runs `work`, which opens more descriptors than the program may have. The process must have one
/// thread.
pub fn with_descriptors(work: impl FnOnce()) {
    with_more_descriptors(&Kernel, work);
}

fn with_more_descriptors(kernel: &impl LimitKeeper, work: impl FnOnce()) {
    let set = |new: &Limit| kernel.limit(libc::RLIMIT_NOFILE, Some(new));
    let before = kernel.limit(libc::RLIMIT_NOFILE, None);
    let more = |before: Limit| [before[0].saturating_add(DESCRIPTORS).min(before[1]), before[1]];
    let _ = before.and_then(|before| set(&more(before)));
    work();
    let _ = before.and_then(|before| set(&before));
}

/// Raises the kernel's limits by what the engine has reserved since. Called before mappings are
/// made.
pub fn renew() {
    if are_set() && child().is_none() {
        SET.lock().renew(&Kernel);
    }
}

/// Gives the kernel the program's own limits before another program is executed, which inherits
/// them.
pub fn hand_on() {
    of_caller(|all| all.hand_on(&Kernel));
}

/// Undoes [`hand_on`], because no other program was executed.
pub fn take_back() {
    of_caller(|all| all.take_back(&Kernel));
}

fn of_caller(change: impl FnOnce(&mut OwnLimits)) {
    match child() {
        // A child of vfork is another process with limits of its own.
        Some(_) => change(&mut all_set()),
        None => change(&mut SET.lock()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::cell::{Cell, RefCell};
    use std::collections::HashMap;

    const NONE: u64 = u64::MAX;
    const GIB: u64 = 1 << 30;
    const AS: usize = 0;
    const FILES: usize = 2;

    /// A kernel that refuses as Linux does. It returns EINVAL if the soft limit is above the hard
    /// one, and EPERM if the hard one is raised without the capability.
    struct Fake {
        limits: RefCell<HashMap<u32, Limit>>,
        reserved: Cell<u64>,
        is_privileged: Cell<bool>,
    }

    impl Fake {
        fn new(limit: Limit) -> Fake {
            let limits = EMULATED.map(|(resource, _)| (resource, limit));
            Fake {
                limits: RefCell::new(HashMap::from(limits)),
                reserved: Cell::new(5 * GIB),
                is_privileged: Cell::new(false),
            }
        }

        fn of(&self, at: usize) -> Limit {
            self.limits.borrow()[&EMULATED[at].0]
        }
    }

    impl LimitKeeper for Fake {
        fn limit(&self, resource: u32, new: Option<&Limit>) -> Result<Limit, Errno> {
            let before = self.limits.borrow()[&resource];
            match new {
                Some(new) if new[0] > new[1] => return Err(Errno::INVAL),
                Some(new) if new[1] > before[1] && !self.may_raise() => return Err(Errno::PERM),
                Some(new) => drop(self.limits.borrow_mut().insert(resource, *new)),
                None => {}
            }
            Ok(before)
        }

        fn reserved_bytes(&self) -> u64 {
            self.reserved.get()
        }

        fn may_raise(&self) -> bool {
            self.is_privileged.get()
        }
    }

    fn shown(all: &OwnLimits, kernel: &Fake, at: usize) -> Limit {
        all.shown(kernel, at).unwrap().1
    }

    #[test]
    fn program_sees_its_limit_and_reservations_have_room() {
        let (kernel, mut all) = (Fake::new([NONE, NONE]), OwnLimits::NONE);
        assert_eq!(shown(&all, &kernel, AS), [NONE, NONE]);
        assert_eq!(all.set(&kernel, AS, [GIB, 2 * GIB]), Ok([NONE, NONE]));
        assert_eq!(shown(&all, &kernel, AS), [GIB, 2 * GIB]);
        // The kernel's hard limit is unchanged, so that more can be reserved.
        assert_eq!(kernel.of(AS), [6 * GIB + MORE_BYTES, NONE]);
        assert_eq!(all.set(&kernel, AS, [2 * GIB, 2 * GIB]), Ok([GIB, 2 * GIB]));
        assert_eq!(kernel.of(AS)[0], 7 * GIB + MORE_BYTES);
    }

    #[test]
    fn descriptors_are_no_reservations() {
        let (kernel, mut all) = (Fake::new([1024, 4096]), OwnLimits::NONE);
        assert_eq!(all.set(&kernel, FILES, [64, 100]), Ok([1024, 4096]));
        assert_eq!((shown(&all, &kernel, FILES), kernel.of(FILES)), ([64, 100], [64, 4096]));
    }

    #[test]
    fn lowered_hard_limit_is_raised_with_privilege_only() {
        let (kernel, mut all) = (Fake::new([NONE, NONE]), OwnLimits::NONE);
        all.set(&kernel, AS, [GIB, 2 * GIB]).unwrap();
        assert_eq!(all.set(&kernel, AS, [GIB, 3 * GIB]), Err(Errno::PERM));
        assert_eq!(all.set(&kernel, AS, [3 * GIB, 2 * GIB]), Err(Errno::INVAL));
        assert_eq!(shown(&all, &kernel, AS), [GIB, 2 * GIB]);
        kernel.is_privileged.set(true);
        assert_eq!(all.set(&kernel, AS, [GIB, 3 * GIB]), Ok([GIB, 2 * GIB]));
    }

    #[test]
    fn soft_limit_stays_within_the_hard_one_of_the_kernel() {
        let (kernel, mut all) = (Fake::new([4 * GIB, 4 * GIB]), OwnLimits::NONE);
        all.set(&kernel, AS, [3 * GIB, 4 * GIB]).unwrap();
        assert_eq!(kernel.of(AS), [4 * GIB, 4 * GIB]);
        kernel.is_privileged.set(true);
        all.set(&kernel, AS, [NONE, NONE]).unwrap();
        assert_eq!((kernel.of(AS), shown(&all, &kernel, AS)), ([NONE, NONE], [NONE, NONE]));
    }

    #[test]
    fn limit_that_another_process_has_set_is_kept() {
        let (kernel, mut all) = (Fake::new([NONE, NONE]), OwnLimits::NONE);
        all.set(&kernel, AS, [GIB, NONE]).unwrap();
        let theirs = [9 * GIB, 9 * GIB];
        kernel.limit(libc::RLIMIT_AS, Some(&theirs)).unwrap();
        assert_eq!(shown(&all, &kernel, AS), theirs);
        all.renew(&kernel);
        all.hand_on(&kernel);
        all.take_back(&kernel);
        assert_eq!(kernel.of(AS), theirs);
        assert_eq!(all.set(&kernel, AS, [GIB, 10 * GIB]), Err(Errno::PERM));
    }

    #[test]
    fn reservations_that_came_since_are_not_the_programs() {
        let (kernel, mut all) = (Fake::new([NONE, NONE]), OwnLimits::NONE);
        all.set(&kernel, AS, [GIB, 2 * GIB]).unwrap();
        kernel.reserved.set(20 * GIB);
        all.renew(&kernel);
        assert_eq!(kernel.of(AS), [21 * GIB + MORE_BYTES, NONE]);
        assert_eq!(shown(&all, &kernel, AS), [GIB, 2 * GIB]);
        let (kernel, mut all) = (Fake::new([NONE, 8 * GIB]), OwnLimits::NONE);
        kernel.limits.borrow_mut().insert(libc::RLIMIT_AS, [8 * GIB, 8 * GIB]);
        all.set(&kernel, AS, [GIB, 2 * GIB]).unwrap();
        kernel.reserved.set(20 * GIB);
        all.renew(&kernel);
        assert_eq!((kernel.of(AS), shown(&all, &kernel, AS)), ([8 * GIB, 8 * GIB], [GIB, 2 * GIB]));
    }

    #[test]
    fn executed_program_has_the_programs_own_limits() {
        let (kernel, mut all) = (Fake::new([NONE, NONE]), OwnLimits::NONE);
        all.set(&kernel, AS, [GIB, 2 * GIB]).unwrap();
        all.set(&kernel, FILES, [64, 100]).unwrap();
        all.hand_on(&kernel);
        assert_eq!((kernel.of(AS), kernel.of(FILES)), ([GIB, 2 * GIB], [64, 100]));
        assert_eq!(kernel.of(1), [NONE, NONE], "it was never set");
    }

    #[test]
    fn copy_made_amid_an_execution_takes_its_limits_back() {
        let (kernel, mut all) = (Fake::new([NONE, NONE]), OwnLimits::NONE);
        kernel.is_privileged.set(true);
        all.set(&kernel, AS, [GIB, 2 * GIB]).unwrap();
        let before = kernel.of(AS);
        all.take_back_handed_on(&kernel);
        assert_eq!(kernel.of(AS), before, "nothing was handed on");
        all.hand_on(&kernel);
        all.take_back_handed_on(&kernel);
        assert_eq!(kernel.of(AS)[0], before[0]);
    }

    #[test]
    fn failed_execution_takes_back_as_far_as_it_may() {
        for is_privileged in [false, true] {
            let (kernel, mut all) = (Fake::new([NONE, NONE]), OwnLimits::NONE);
            kernel.is_privileged.set(is_privileged);
            all.set(&kernel, AS, [GIB, 2 * GIB]).unwrap();
            all.hand_on(&kernel);
            all.take_back(&kernel);
            let limit_raised = 6 * GIB + MORE_BYTES;
            let pair =
                if is_privileged { [limit_raised, limit_raised] } else { [2 * GIB, 2 * GIB] };
            assert_eq!((kernel.of(AS), shown(&all, &kernel, AS)), (pair, [GIB, 2 * GIB]));
        }
    }

    #[test]
    fn own_files_are_opened_within_the_hard_limit() {
        for (limit, meanwhile) in [
            ([64, 100], [100, 100]),
            ([64, NONE], [64 + DESCRIPTORS, NONE]),
            ([NONE, NONE], [NONE, NONE]),
        ] {
            let kernel = Fake::new(limit);
            with_more_descriptors(&kernel, || assert_eq!(kernel.of(FILES), meanwhile));
            assert_eq!(kernel.of(FILES), limit);
        }
    }
}
