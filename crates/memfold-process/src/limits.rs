//! Limits that the program sets itself. The kernel counts the engine's reservations of addresses in
//! RLIMIT_AS and RLIMIT_DATA, though they are no memory: its limit is higher by as much, and the
//! program is told its own. The hard limit of these, and of RLIMIT_NOFILE, stays in the kernel as it
//! was, so that more can be reserved, and descriptors with high numbers be opened in a child; the
//! program gets the answers of its own. What it executes has its own.
use crate::program::{ManagedProgram, get};
use core::sync::atomic::{AtomicBool, Ordering::SeqCst};
use memfold_gate::child;
use memfold_sys::Errno;
use memfold_sys::memory::zone::reserved_bytes;
use memfold_sys::raw::system_call;
use memfold_sys::sync::Mutex;
use rustix::thread::{CapabilitySet, capabilities};

/// A limit: soft, hard.
type Limit = [u64; 2];

/// What is emulated, and whether reservations count in it.
const EMULATED: [(u32, bool); 3] =
    [(libc::RLIMIT_AS, true), (libc::RLIMIT_DATA, true), (libc::RLIMIT_NOFILE, false)];
/// Up to the engine's highest, and some for a moment.
const DESCRIPTORS: u64 = 2048;
/// For what is mapped beside reservations: the library, the run's table.
const MORE_BYTES: u64 = 16 << 20;

/// What the program has set, and what the kernel was given for it. Where the kernel has something else,
/// another process has set it since.
#[derive(Copy, Clone)]
struct Set {
    own: Limit,
    kernel: Limit,
}

static SET: Mutex<[Option<Set>; EMULATED.len()]> = Mutex::new([None; EMULATED.len()]);
/// Any is.
static IS_ANY: AtomicBool = AtomicBool::new(false);

/// The kernel's limit, and sets it.
fn kernel(resource: u32, new: Option<&Limit>) -> Result<Limit, Errno> {
    let mut before = [0u64; 2];
    let new = new.map_or(0, |new| &raw const *new as usize);
    let args = [0, resource as usize, new, &raw mut before as usize, 0, 0];
    // SAFETY: both are ours.
    unsafe { system_call(libc::SYS_prlimit64, args) }.map(|_| before)
}

/// The soft limit for the kernel.
fn raised(soft: u64, counts: bool) -> u64 {
    if counts { soft.saturating_add(reserved_bytes() as u64 + MORE_BYTES) } else { soft }
}

/// What is set, for a child of vfork, which takes no lock.
fn all_set(program: &ManagedProgram) -> [Option<Set>; EMULATED.len()] {
    program.on_behalf(|| *SET.lock())
}

/// Asks for a limit of this process, as the program sees it, and sets it. Returns what it was.
///
/// # Errors
/// As `prlimit`.
pub fn limit(resource: u32, new: Option<Limit>) -> Result<Limit, Errno> {
    let emulated = EMULATED.iter().position(|each| each.0 == resource);
    let (Some(at), Some(program)) = (emulated, get()) else {
        return kernel(resource, new.as_ref());
    };
    let shown = |set: Option<Set>| {
        let before = kernel(resource, None)?;
        Ok((before, set.filter(|set| set.kernel == before).map_or(before, |set| set.own)))
    };
    if child().is_some() {
        // A child of vfork, which executes something.
        let (_, shown) = shown(all_set(program)[at])?;
        return new.map_or(Ok(shown), |new| kernel(resource, Some(&new)).map(|_| shown));
    }
    let mut all = SET.lock();
    let (before, shown) = shown(all[at])?;
    let Some(new) = new else { return Ok(shown) };
    if new[0] > new[1] {
        return Err(Errno::INVAL);
    }
    if new[1] > shown[1] && !may_raise() {
        return Err(Errno::PERM);
    }
    let hard = before[1].max(new[1]);
    let given = [raised(new[0], EMULATED[at].1).min(hard), hard];
    kernel(resource, Some(&given))?;
    all[at] = Some(Set { own: new, kernel: given });
    IS_ANY.store(true, SeqCst);
    Ok(shown)
}

fn may_raise() -> bool {
    capabilities(None).is_ok_and(|all| all.effective.contains(CapabilitySet::SYS_RESOURCE))
}

/// Whether the program has set any of them.
pub fn are_set() -> bool {
    IS_ANY.load(SeqCst)
}

/// Does something for which a process, with one thread, needs more descriptors than the program may
/// have: it opens its own.
pub fn with_descriptors(work: impl FnOnce()) {
    let before = kernel(libc::RLIMIT_NOFILE, None);
    let more = |before: Limit| [before[0].saturating_add(DESCRIPTORS).min(before[1]), before[1]];
    let _ = before.and_then(|before| kernel(libc::RLIMIT_NOFILE, Some(&more(before))));
    work();
    let _ = before.and_then(|before| kernel(libc::RLIMIT_NOFILE, Some(&before)));
}

/// Mappings are about to be made: what the engine has reserved since isn't the program's.
pub fn renew() {
    if are_set() && child().is_none() {
        each_set(|resource, counts, set| {
            set.kernel[0] = raised(set.own[0], counts).min(set.kernel[1]);
            let _ = kernel(resource, Some(&set.kernel));
        });
    }
}

/// The program is about to execute another one, which has the program's limits.
pub fn hand_on() {
    each_set(|resource, _, set| {
        if kernel(resource, Some(&set.own)).is_ok() {
            set.kernel = set.own;
        }
    });
}

/// It does not after all. Who may raise no hard limit has the program's own from now on.
pub fn take_back() {
    each_set(|resource, counts, set| {
        let wanted = raised(set.own[0], counts);
        let given = [[wanted, wanted.max(set.own[1])], [wanted.min(set.own[1]), set.own[1]]];
        if let Some(given) = given.into_iter().find(|new| kernel(resource, Some(new)).is_ok()) {
            set.kernel = given;
        }
    });
}

/// Calls `each` with what is set and is still so in the kernel.
fn each_set(mut each: impl FnMut(u32, bool, &mut Set)) {
    let mut each_of = |all: &mut [Option<Set>]| {
        for ((resource, counts), set) in EMULATED.into_iter().zip(all) {
            if let Some(set) = set
                && kernel(resource, None).is_ok_and(|now| now == set.kernel)
            {
                each(resource, counts, set);
            }
        }
    };
    match get().filter(|_| child().is_some()) {
        // It is another process, which has its own.
        Some(program) => each_of(&mut all_set(program)),
        None => each_of(&mut *SET.lock()),
    }
}
