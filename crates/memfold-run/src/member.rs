//! This process's slot in the table that `memfold run` keeps for its user, the run's bounds, and how
//! the table is found. A process that can't become again what it was gives up the table that it had:
//! it has that of another user then, or none.
use crate::door;
use crate::fair_share::{ShareClaim, share};
use crate::mailbox::Mailbox;
use crate::request::TableAddress;
use crate::table::bounds::RunBounds;
use crate::table::{LeastBytes, ProcessSlot, RunTable};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::sync::atomic::Ordering::{Relaxed, SeqCst};
use core::sync::atomic::{AtomicPtr, AtomicU32};
use memfold_os::Errno;
use memfold_os::sync::Mutex;
use memfold_os::thread::identity::ThreadIdentity;
use memfold_stats::Stats;
use rustix::fs::{CWD, Mode, OFlags};

/// The first table, once it is mapped; never unmapped. A child of fork inherits the mapping.
static TABLE: Mutex<Option<RunTable>> = Mutex::new(None);
/// The table, for those who only ask; null without one.
static FOUND: AtomicPtr<RunTable> = AtomicPtr::new(core::ptr::null_mut());
static ADDRESS: Mutex<Option<TableAddress<'static>>> = Mutex::new(None);
/// This process's slot: a leaked box, or null.
static OWN: AtomicPtr<ProcessSlot> = AtomicPtr::new(core::ptr::null_mut());
/// This process, as `memfold run` sees it; 0 while that isn't known.
static NUMBER: AtomicU32 = AtomicU32::new(0);
/// Whether this is the run's first process, and whether the table was got at the door.
static FIRST: AtomicU32 = AtomicU32::new(0);
static BY_DOOR: AtomicU32 = AtomicU32::new(0);
/// Whose the table is, and the engine's threads: of the thread that started them. A leaked box, or
/// the first, which is [`FIRST_IDENTITY`]; null while it isn't known.
static IDENTITY: AtomicPtr<ThreadIdentity> = AtomicPtr::new(core::ptr::null_mut());
static FIRST_IDENTITY: Mutex<Option<ThreadIdentity>> = Mutex::new(None);

fn table() -> Option<&'static RunTable> {
    // SAFETY: the pointer is null or leads into a static that is set once, before it.
    unsafe { FOUND.load(SeqCst).as_ref() }
}

/// What the processes with a slot may use now, all together, bytes (limit, resident); `None` without
/// a table.
pub fn bounds() -> Option<(u64, u64)> {
    table().map(RunTable::bounds_left)
}

/// What the run was given, bytes (limit, resident), and what it holds at least; `None` without a
/// table.
pub fn whole(limit: bool) -> Option<((u64, u64), LeastBytes)> {
    table().map(|table| (table.portion().bounds().given(), table.least(limit)))
}

/// As [`RunTable::sum_of`]; of this process alone without a table.
pub fn sum_of(own: &Stats, of: impl Fn(&Stats) -> u64) -> (u64, usize) {
    match table() {
        Some(table) => table.sum_of(of),
        None => (of(own), 1),
    }
}

/// As [`RunTable::note_least`].
pub fn note_least(bytes: u64) {
    if let Some(table) = table() {
        table.note_least(bytes);
    }
}

/// As [`RunTable::report_limit`].
pub fn report_limit() -> bool {
    table().is_none_or(RunTable::report_limit)
}

/// Where `memfold run` reads lines; `None` without a table, or if it is gone.
pub fn mailbox() -> Option<&'static Mailbox> {
    table().filter(|table| !table.is_left_alone()).map(RunTable::mailbox)
}

/// This process's number for `memfold run`.
pub fn number() -> u32 {
    match NUMBER.load(Relaxed) {
        0 => rustix::process::getpid().as_raw_nonzero().get() as u32,
        number => number,
    }
}

/// Maps the table, as far as that can be done, and allocates nothing. Called by the constructor,
/// once.
pub fn open(address: TableAddress<'static>) {
    *ADDRESS.lock() = Some(address);
    if let Ok(own) = ThreadIdentity::own() {
        // SAFETY: as below.
        IDENTITY.store(unsafe { FIRST_IDENTITY.peek_mut() }.insert(own), SeqCst);
    }
    let Ok(found) = at_path(&address).or_else(|_| at_door(&address)) else { return };
    FIRST.store(found.note_process() as u32, Relaxed);
    // SAFETY: the constructor is alone, and nothing has been lent out of it yet; from now on it
    // stays as it is.
    let place = unsafe { TABLE.peek_mut() }.insert(found);
    FOUND.store(place, SeqCst);
}

/// The table of the user of `memfold run`, if that is the user of this process.
fn at_path(address: &TableAddress<'_>) -> Result<RunTable, Errno> {
    // Where `memfold run` is gone or invisible the path may lead anywhere.
    let flags = OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let open = |path, access| rustix::fs::open(path, flags | access, Mode::empty());
    let (file, bounds) =
        (open(address.paths[0], OFlags::RDWR)?, open(address.paths[1], OFlags::RDONLY)?);
    if rustix::fs::fstat(&file)?.st_uid != rustix::process::getuid().as_raw() {
        return Err(Errno::ACCESS);
    }
    RunTable::open(file, RunBounds::open(bounds, &address.key)?)
}

/// The table of the user of the calling thread.
fn at_door(address: &TableAddress<'_>) -> Result<RunTable, Errno> {
    let answer = door::ask(address.door.as_bytes(), &address.key)?;
    let table = RunTable::open(answer.table, RunBounds::open(answer.bounds, &address.key)?)?;
    NUMBER.store(answer.number, Relaxed);
    BY_DOOR.store(1, Relaxed);
    Ok(table)
}

fn identity() -> Option<&'static ThreadIdentity> {
    // SAFETY: the pointer is null, or leads into a static that is set once, before it, or is a
    // leaked box.
    unsafe { IDENTITY.load(SeqCst).as_ref() }
}

/// Whether the calling thread has given something up for good that this process has had since it
/// found its table, or the engine's threads since they were started, and they can follow. Where threads
/// of the program have different rights, the engine's may have those of another one.
pub fn has_given_up() -> bool {
    let given_up = |before: &ThreadIdentity| {
        ThreadIdentity::own().is_ok_and(|own| !own.can_become(before) && before.can_become(&own))
    };
    identity().is_some_and(given_up)
}

/// The process has, and the calling thread, which has claimed its slot if it has one. If it is
/// another user's now, the table is given up, and that of its own user is found: whether that is so.
///
/// # Errors
/// The kernel has no room to note it: this process could go on to write to the other user's table.
pub fn change_user() -> Result<bool, Errno> {
    let Some(address) = *ADDRESS.lock() else { return Ok(false) };
    let now = ThreadIdentity::own()?;
    let before = identity().map(ThreadIdentity::user);
    IDENTITY.store(Box::into_raw(Box::new(now)), SeqCst);
    if before == Some(now.user()) {
        return Ok(false);
    }
    own().map_or(Ok(()), ProcessSlot::leave)?;
    OWN.store(core::ptr::null_mut(), SeqCst);
    let old = table();
    let new = at_door(&address).map_or(core::ptr::null_mut(), |new| Box::into_raw(Box::new(new)));
    FOUND.store(new, SeqCst);
    old.map_or(Ok(()), RunTable::give_up)?;
    Ok(true)
}

/// Whether this is the program that `memfold run` was given, and has begun nothing yet. `false`
/// without a table, which that program always has.
pub fn is_first() -> bool {
    FIRST.load(Relaxed) != 0
}

/// Processes of the run can have an engine for the gate.
pub fn note_gate() {
    if let Some(table) = table() {
        table.note_gate();
    }
}

/// Whether one has said so.
pub fn has_gate() -> bool {
    table().is_some_and(RunTable::has_gate)
}

/// A program that can't be managed is about to be executed. Returns whether it is the first of the
/// run, whose name is kept.
pub fn note_unmanaged(about: &[u8]) -> bool {
    table().is_some_and(|table| table.note_unmanaged(about))
}

/// It could not be executed.
pub fn forget_unmanaged(first: bool) {
    if let Some(table) = table() {
        table.forget_unmanaged(first);
    }
}

/// As [`RunTable::take_waiting`]; `false` without a table.
pub fn take_waiting(bytes: u64, most: u64) -> bool {
    table().is_some_and(|table| table.take_waiting(bytes, most))
}

/// As [`RunTable::give_back_waiting`].
pub fn give_back_waiting(bytes: u64) {
    if let Some(table) = table() {
        table.give_back_waiting(bytes);
    }
}

/// The program runs.
pub fn note_begun() {
    FIRST.store(0, Relaxed);
}

/// A slot for this process, called by its first engine thread; its figures. Without a table, or a
/// slot in it, they are kept in memory of our own that nobody reads: a program never fails for lack
/// of figures.
pub fn claim() -> &'static Stats {
    NUMBER.store(find_number().unwrap_or(0), Relaxed);
    // SAFETY: the caller is an engine thread, which libc doesn't know of: it has no robust list.
    let own = table().and_then(|table| unsafe { table.claim(number()) });
    let place = own.map_or(core::ptr::null_mut(), |own| Box::into_raw(Box::new(own)));
    OWN.store(place, SeqCst);
    match own {
        Some(own) => own.stats(),
        None => Box::leak(Box::new(Stats::new())),
    }
}

/// A child of fork begins: number and slot are its parent's, until it claims one.
pub fn begin_as_child() {
    NUMBER.store(0, Relaxed);
    OWN.store(core::ptr::null_mut(), SeqCst);
}

/// This process's slot.
pub fn own() -> Option<&'static ProcessSlot> {
    // SAFETY: the pointer is null or a leaked box.
    unsafe { OWN.load(SeqCst).as_ref() }
}

/// Tells the others what this process needs, bytes.
pub fn set_need(bytes: u64) {
    if let Some(own) = own() {
        own.set_need(bytes);
    }
}

/// Tells the others what this process can't fold, uncompressed, and what it has folded takes, bytes.
pub fn set_least(bytes: u64, stored: u64) {
    if let Some(own) = own() {
        own.set_least(bytes, stored);
    }
}

/// Has the run's peaks raised to what its processes hold now.
pub fn note_totals() {
    if let Some(table) = table() {
        table.note_totals();
    }
}

/// What this process may have of a bound, bytes, if it needs `need`; and how many other processes
/// need any. `limit`: it is that of the limit, else that of resident memory.
pub fn share_of(bound: u64, need: u64, limit: bool) -> (u64, usize) {
    let own = ShareClaim { need, ..own().map(|own| own.claim(limit)).unwrap_or_default() };
    let others =
        table().map_or(Vec::new(), |table| table.claims_of_others(self::own().copied(), limit));
    (share(bound, own, &others), others.len())
}

/// The number of this process where `memfold run` is. /proc tells it where that is seen there;
/// otherwise the door does.
fn find_number() -> Option<u32> {
    if BY_DOOR.load(Relaxed) != 0 {
        let address = (*ADDRESS.lock())?;
        let answer = door::ask(address.door.as_bytes(), &address.key).ok();
        return answer.map(|answer| answer.number).filter(|n| *n != 0);
    }
    let mut text = [0u8; 16];
    let len = rustix::fs::readlinkat_raw(CWD, c"/proc/self", &mut text[..]).ok()?;
    core::str::from_utf8(&text[..len]).ok()?.parse().ok()
}
