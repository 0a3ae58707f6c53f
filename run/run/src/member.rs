//! This process's slot in the table that `memfold run` keeps for its user, the bounds of the run,
//! and the search for the table.
//!
//! A process that changes its user and cannot change back gives up its table. It then uses the
//! table of its new user, or none.
use crate::door::{self, DoorAddress, DoorAnswer};
use crate::fair_share::{ShareClaim, share};
use crate::mailbox::Mailbox;
use crate::request::TableAddress;
use crate::samples::{SampleRing, SampledProcess};
use crate::table::bounds::RunBounds;
use crate::table::lending::ProcessSign;
use crate::table::{LeastBytes, News, ProcessSlot, RunTable};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::sync::atomic::Ordering::{Relaxed, SeqCst};
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64};
use memfold_os::Errno;
use memfold_os::raw::renumber;
use memfold_os::sync::ForkCell;
use memfold_os::thread::identity::ThreadIdentity;
use memfold_os::thread::now_ns;
use memfold_stats::Stats;
use rustix::fd::IntoRawFd;
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::FdFlags;

/// The first table, set once it is mapped and never unmapped. A child of fork inherits the mapping.
static TABLE: ForkCell<Option<RunTable>> = ForkCell::new(None);
/// The table that [`table`] returns; null without one.
static FOUND: AtomicPtr<RunTable> = AtomicPtr::new(core::ptr::null_mut());
static ADDRESS: ForkCell<Option<TableAddress<'static>>> = ForkCell::new(None);
/// This process's slot: a leaked box, or null.
static OWN: AtomicPtr<ProcessSlot> = AtomicPtr::new(core::ptr::null_mut());
/// By this, other processes of the run know the memory of this one.
static SIGN: ProcessSign = ProcessSign::none();
/// The number of this process as `memfold run` sees it; 0 while it is unknown.
static NUMBER: AtomicU32 = AtomicU32::new(0);
/// The family of this process: the processes that forks have made from one, and that haven't
/// executed a program since. 0 if it has not forked.
static FAMILY: AtomicU32 = AtomicU32::new(0);
/// 1 if this is the first process of the run and its program has not begun. `BY_DOOR` is 1 if the
/// table came from the door.
static FIRST: AtomicU32 = AtomicU32::new(0);
static BY_DOOR: AtomicU32 = AtomicU32::new(0);
/// The number of the socket that is connected to the door; -1 if there is none. The descriptor may
/// be missing in the table of a thread.
static LINK: AtomicI32 = AtomicI32::new(-1);
/// The identity to which the table belongs, and the engine's threads: that of the thread that
/// started them. A leaked box, or [`FIRST_IDENTITY`]; null while it is unknown.
static IDENTITY: AtomicPtr<ThreadIdentity> = AtomicPtr::new(core::ptr::null_mut());
static FIRST_IDENTITY: ForkCell<Option<ThreadIdentity>> = ForkCell::new(None);
/// The ring for samples, the pointer that [`samples`] reads, and when this program opened the ring.
static SAMPLES: ForkCell<Option<SampleRing>> = ForkCell::new(None);
static SAMPLES_FOUND: AtomicPtr<SampleRing> = AtomicPtr::new(core::ptr::null_mut());
static IMAGE: AtomicU64 = AtomicU64::new(0);

fn table() -> Option<&'static RunTable> {
    // SAFETY: the pointer is null or points into `TABLE`, or to a leaked box. `TABLE` is set once,
    // before the pointer is. Neither is freed or changed afterwards.
    unsafe { FOUND.load(SeqCst).as_ref() }
}

/// Returns the bytes that all processes with a slot together may use now, as (limit, resident);
/// `None` without a table.
pub fn bounds() -> Option<(u64, u64)> {
    table().map(RunTable::bounds_left)
}

/// Returns the bounds that the run has now in bytes, as (limit, resident). `None` without a table.
pub fn given() -> Option<(u64, u64)> {
    table().map(|table| table.portion().bounds().given())
}

/// Returns the bounds that the run was given in bytes, as (limit, resident), and the bytes that the
/// run holds at least. `None` without a table.
pub fn whole(limit: bool) -> Option<((u64, u64), LeastBytes)> {
    table().map(|table| (table.portion().bounds().given(), table.least(limit)))
}

/// Returns whether the run shares its limit with other runs of a group.
pub fn is_in_a_group() -> bool {
    table().is_some_and(|table| table.portion().bounds().is_in_a_group())
}

/// Returns [`RunTable::sum_of`]; without a table, the figure of this process alone.
pub fn sum_of(own: &Stats, of: impl Fn(&Stats) -> u64) -> (u64, usize) {
    match table() {
        Some(table) => table.sum_of(of),
        None => (of(own), 1),
    }
}

/// Calls [`RunTable::note_least`] if there is a table.
pub fn note_least(bytes: u64) {
    if let Some(table) = table() {
        table.note_least(bytes);
    }
}

/// Calls [`RunTable::report_limit`]; returns `true` without a table.
pub fn report_limit() -> bool {
    table().is_none_or(RunTable::report_limit)
}

/// Returns the mailbox that `memfold run` reads; `None` without a table, or if `memfold run` is
/// gone.
pub fn mailbox() -> Option<&'static Mailbox> {
    table().filter(|table| !table.is_left_alone()).map(RunTable::mailbox)
}

/// Returns this process's number as `memfold run` sees it, or its own process ID while that is
/// unknown.
pub fn number() -> u32 {
    match NUMBER.load(Relaxed) {
        0 => rustix::process::getpid().as_raw_nonzero().get() as u32,
        number => number,
    }
}

/// Maps the table if it can be found. `link` is the number of a socket that the program before may
/// have left. Allocates nothing. The constructor calls it once.
pub fn open(address: TableAddress<'static>, link: Option<i32>) {
    // SAFETY: only the constructor's thread runs code of this library, and no reference to
    // `ADDRESS` exists yet.
    unsafe { *ADDRESS.change() = Some(address) };
    if let Some(link) = link
        && door::connected(link, address.door.as_bytes()).is_some()
    {
        LINK.store(link, Relaxed);
    }
    if let Ok(own) = ThreadIdentity::own() {
        // SAFETY: only the constructor's thread runs code of this library. No reference to `FIRST_IDENTITY` exists yet,
        // and it is never changed afterwards.
        IDENTITY.store(unsafe { FIRST_IDENTITY.change() }.insert(own), SeqCst);
    }
    let Ok(table) = at_path(&address).or_else(|_| at_door(&address)) else { return };
    FIRST.store(table.note_process() as u32, Relaxed);
    // SAFETY: only the constructor's thread runs code of this library. No reference to `TABLE` exists yet, and it is
    // never changed afterwards.
    let place = unsafe { TABLE.change() }.insert(table);
    FOUND.store(place, SeqCst);
}

/// Opens the ring for samples, if this process has the user of `memfold record`. Otherwise it leaves
/// none. The constructor calls it once.
pub fn open_samples(path: &str) {
    let flags = OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::RDWR;
    let ring = rustix::fs::open(path, flags, Mode::empty()).and_then(SampleRing::open);
    if let Ok(ring) = ring {
        // SAFETY: only the constructor's thread runs code of this library. No reference to `SAMPLES` exists yet, and it
        // is never changed afterwards.
        let place = unsafe { SAMPLES.change() }.insert(ring);
        SAMPLES_FOUND.store(place, SeqCst);
        // Two programs may begin in the same nanosecond, so the number of the process is part of it.
        let process = rustix::process::getpid().as_raw_nonzero().get() as u64;
        IMAGE.store(now_ns().rotate_left(16) ^ process | 1, Relaxed);
    }
}

/// Returns the ring for samples, if the run is recorded.
pub fn samples() -> Option<&'static SampleRing> {
    // SAFETY: the pointer is null or points into `SAMPLES`, which is set once, before the pointer
    // is, and never changed afterwards.
    unsafe { SAMPLES_FOUND.load(Relaxed).as_ref() }
}

/// Returns this process as samples name it.
pub fn sampled_process() -> SampledProcess {
    SampledProcess { number: number(), image: IMAGE.load(Relaxed) }
}

/// Opens the table of the user of `memfold run`, if this process has the same user.
fn at_path(address: &TableAddress<'_>) -> Result<RunTable, Errno> {
    // If `memfold run` is gone or invisible, the path may lead to any file.
    let flags = OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let open = |path, access| rustix::fs::open(path, flags | access, Mode::empty());
    let (file, bounds) =
        (open(address.paths[0], OFlags::RDWR)?, open(address.paths[1], OFlags::RDONLY)?);
    if rustix::fs::fstat(&file)?.st_uid != rustix::process::getuid().as_raw() {
        return Err(Errno::ACCESS);
    }
    RunTable::open(file, RunBounds::open(bounds, &address.key)?)
}

/// Returns the number of the socket that is connected to the door; -1 if there is none.
pub fn link() -> i32 {
    LINK.load(Relaxed)
}

/// Connects a socket to the door, because the caller is about to enter a network namespace in which
/// the door's name is unknown. The number of the socket is `least` or more. Programs that are
/// executed inherit it: a call that changes that later may be refused by a filter.
pub fn keep_link(least: i32) {
    let Some(address) = *ADDRESS else { return };
    let name = address.door.as_bytes();
    if door::connected(link(), name).is_some() {
        return;
    }
    let socket = door::connect(name).and_then(|socket| renumber(socket, least));
    if let Ok(socket) = socket
        && rustix::io::fcntl_setfd(&socket, FdFlags::empty()).is_ok()
    {
        LINK.store(socket.into_raw_fd(), Relaxed);
    }
}

/// Asks at the door, by the socket if there is one.
fn ask(address: &TableAddress<'_>) -> Result<DoorAnswer, Errno> {
    let name = address.door.as_bytes();
    let door_address =
        door::connected(link(), name).map_or(DoorAddress::Name(name), DoorAddress::Socket);
    door::ask(door_address, &address.key)
}

/// Gets the table of the calling thread's user from the door.
fn at_door(address: &TableAddress<'_>) -> Result<RunTable, Errno> {
    let answer = ask(address)?;
    let table = RunTable::open(answer.table, RunBounds::open(answer.bounds, &address.key)?)?;
    NUMBER.store(answer.number, Relaxed);
    BY_DOOR.store(1, Relaxed);
    Ok(table)
}

fn identity() -> Option<&'static ThreadIdentity> {
    // SAFETY: the pointer is null, a leaked box, or points into `FIRST_IDENTITY`. That is set once,
    // before the pointer is. Neither is freed or changed afterwards.
    unsafe { IDENTITY.load(SeqCst).as_ref() }
}

/// Returns `true` if the calling thread has given up an identity for good, and the engine's threads
/// can give it up too. That identity is the one that this process had when it found its table, or
/// that the engine's threads had when they started. If threads of the program have different
/// rights, the engine's threads may have those of another thread.
pub fn has_given_up() -> bool {
    let given_up = |before: &ThreadIdentity| {
        ThreadIdentity::own().is_ok_and(|own| !own.can_become(before) && before.can_become(&own))
    };
    identity().is_some_and(given_up)
}

/// Records the identity of the calling thread as that of the process. The calling thread must have
/// claimed the slot of the process if it has one.
///
/// If the user changed, gives up the table and searches for that of the new user. Returns whether
/// the user changed.
///
/// # Errors
/// The kernel has no memory to replace a mapping. This process could then still write to the other
/// user's table.
pub fn change_user() -> Result<bool, Errno> {
    let Some(address) = *ADDRESS else { return Ok(false) };
    let now = ThreadIdentity::own()?;
    let before = identity().map(ThreadIdentity::user);
    IDENTITY.store(Box::into_raw(Box::new(now)), SeqCst);
    if before == Some(now.user()) {
        return Ok(false);
    }
    own().map_or(Ok(()), ProcessSlot::leave)?;
    OWN.store(core::ptr::null_mut(), SeqCst);
    SIGN.clear();
    let old = table();
    let new = at_door(&address).map_or(core::ptr::null_mut(), |new| Box::into_raw(Box::new(new)));
    FOUND.store(new, SeqCst);
    old.map_or(Ok(()), RunTable::give_up)?;
    Ok(true)
}

/// Returns whether this is the program that `memfold run` was given and it has not begun. Returns
/// `false` without a table, which that program always has.
pub fn is_first() -> bool {
    FIRST.load(Relaxed) != 0
}

/// Records that processes of the run can have an engine for the gate.
pub fn note_gate() {
    if let Some(table) = table() {
        table.note_gate();
    }
}

/// Calls [`RunTable::note_filter`] if there is a table.
pub fn note_filter(has: bool) {
    if let Some(table) = table() {
        table.note_filter(has);
    }
}

/// Returns [`RunTable::has_filters`]; `None` without a table, or if the table came from the door. A
/// process of another user may have a filter from before it changed its user, which is in the table
/// of the other user.
pub fn has_filters() -> Option<bool> {
    table().filter(|_| BY_DOOR.load(Relaxed) == 0).and_then(RunTable::has_filters)
}

/// Returns whether a process recorded [`note_gate`].
pub fn has_gate() -> bool {
    table().is_some_and(RunTable::has_gate)
}

/// Records that this process is about to execute a program that cannot be managed. Returns whether
/// it is the first such program of the run; the table keeps the text `about` it.
pub fn note_unmanaged(about: &[u8]) -> bool {
    table().is_some_and(|table| table.note_unmanaged(about))
}

/// Takes back [`note_unmanaged`] because the program could not be executed.
pub fn forget_unmanaged(first: bool) {
    if let Some(table) = table() {
        table.forget_unmanaged(first);
    }
}

/// Records that the program has begun, so that it is no longer [`is_first`].
pub fn note_begun() {
    FIRST.store(0, Relaxed);
}

/// Claims a slot for this process and returns its figures. The first engine thread calls it.
///
/// Without a table or a free slot the figures are in private memory that no other process reads. So
/// a program never fails for lack of a slot.
pub fn claim() -> &'static Stats {
    NUMBER.store(find_number().unwrap_or(0), Relaxed);
    // SAFETY: the caller is an engine thread. libc does not know of it, so it has no robust list
    // that is needed.
    let own = table().and_then(|table| unsafe { table.claim(number()) });
    if let Some(own) = own {
        let family = FAMILY.load(Relaxed);
        own.set_family(family);
        own.set_shares_memory(family != 0);
    }
    let place = own.map_or(core::ptr::null_mut(), |own| Box::into_raw(Box::new(own)));
    OWN.store(place, SeqCst);
    if let (Some(own), Some(table)) = (own, table()) {
        own.put_sign(&SIGN, table.key());
    }
    match own {
        Some(own) => own.stats(),
        None => Box::leak(Box::new(Stats::new())),
    }
}

/// Forgets the number and the slot in a child of fork. They belong to the parent until the child
/// claims its own.
pub fn begin_as_child() {
    NUMBER.store(0, Relaxed);
    OWN.store(core::ptr::null_mut(), SeqCst);
    SIGN.clear();
}

/// Returns this process's slot, if it has one.
pub fn own() -> Option<&'static ProcessSlot> {
    // SAFETY: the pointer is null or a leaked box, which is never freed or changed.
    unsafe { OWN.load(SeqCst).as_ref() }
}

/// Calls [`RunTable::find`]; returns `None` without a table.
pub fn find(pid: u32, read: &dyn Fn(usize, &mut [u64; 3]) -> bool) -> Option<ProcessSlot> {
    table()?.find(pid, read)
}

/// Frees the requests to this process of processes that have ended.
pub fn free_requests() {
    if let (Some(table), Some(own)) = (table(), own()) {
        table.free_requests(own);
    }
}

/// Publishes how many bytes this process needs.
pub fn set_need(bytes: u64) {
    if let Some(own) = own() {
        own.set_need(bytes);
    }
}

/// Publishes how many uncompressed bytes this process cannot fold, and how many bytes its folded
/// memory takes.
pub fn set_least(bytes: u64, stored: u64) {
    if let Some(own) = own() {
        own.set_least(bytes, stored);
    }
}

/// Sends news to the other processes of this user.
pub fn send(news: News) {
    if let Some(table) = table() {
        table.send(own().copied(), news);
    }
}

/// Returns the news for this process since the last call.
pub fn take_news() -> News {
    own().map_or(News::default(), ProcessSlot::take_news)
}

/// Returns the futex in this process's slot. Other processes wake it when they send news.
pub fn bell() -> Option<&'static AtomicU32> {
    own().map(ProcessSlot::bell)
}

/// Calls [`ProcessSlot::begin_rest`]; returns `true` without a slot.
pub fn begin_rest() -> bool {
    own().is_none_or(ProcessSlot::begin_rest)
}

/// Ends a rest of this process.
pub fn end_rest() {
    if let Some(own) = own() {
        own.end_rest();
    }
}

/// Publishes whether this process shares memory with others because of a fork.
pub fn set_shares_memory(shares: bool) {
    if let Some(own) = own() {
        own.set_shares_memory(shares);
    }
}

/// Notes that this process is about to fork, so that it shares memory.
pub fn note_fork() {
    let Some(table) = table() else { return };
    if FAMILY.load(Relaxed) == 0 {
        FAMILY.store(table.new_family(), Relaxed);
    }
    table.note_fork(FAMILY.load(Relaxed));
    if let Some(own) = own() {
        own.set_family(FAMILY.load(Relaxed));
        own.set_shares_memory(true);
    }
}

/// Returns the number of processes that share memory with this one because of forks, itself
/// included, as far as they have a slot in the table of this user. A new child has none yet.
pub fn sharers() -> usize {
    match FAMILY.load(Relaxed) {
        0 => 1,
        family => table().map_or(1, |table| table.sharers(family)),
    }
}

/// Returns the number of forks of the processes that may share memory with this one. It may contain
/// others.
pub fn forks() -> u32 {
    match FAMILY.load(Relaxed) {
        0 => 0,
        family => table().map_or(0, |table| table.forks(family)),
    }
}

/// Raises the peaks of the run to what its processes hold now.
pub fn note_totals() {
    if let Some(table) = table() {
        table.note_totals();
    }
}

/// Returns this process's share of a bound in bytes if it needs `need` bytes, and how many other
/// processes need memory. `limit` says which bound it is: the limit, or that of resident memory.
pub fn share_of(bound: u64, need: u64, limit: bool) -> (u64, usize) {
    let own = ShareClaim { need, ..own().map(|own| own.claim(limit)).unwrap_or_default() };
    let others =
        table().map_or(Vec::new(), |table| table.claims_of_others(self::own().copied(), limit));
    (share(bound, own, &others), others.len())
}

/// Finds the number of this process in the PID namespace of `memfold run`. It comes from the door
/// if the table did, or if the process may be in another namespace; otherwise from /proc.
fn find_number() -> Option<u32> {
    if BY_DOOR.load(Relaxed) != 0 || link() >= 0 {
        let address = (*ADDRESS)?;
        let answer = ask(&address).ok();
        return answer.map(|answer| answer.number).filter(|n| *n != 0);
    }
    let mut text = [0u8; 16];
    let len = rustix::fs::readlinkat_raw(CWD, c"/proc/self", &mut text[..]).ok()?;
    core::str::from_utf8(&text[..len]).ok()?.parse().ok()
}
