//! Memory that processes of a run lend one another for system calls: `process_vm_readv` and
//! `process_vm_writev` on another process, as between the ranks of an MPI program. The kernel can't
//! load what that process has folded, so its own engine does (`residency/lender.rs`), and holds it
//! until the call is over. run/run/src/table/lending.rs describes the requests.
//!
//! Here is the borrower: the thread that makes the call asks and waits.
use crate::deferred;
use crate::program::get;
use memfold_gate::{OtherProcess, child};
use memfold_os::text::TextBuffer;
use memfold_os::thread::sleep_ns;
use memfold_run::member;
use memfold_run::table::ProcessSlot;
use memfold_run::table::lending::Lease;
use rustix::fs::{Mode, OFlags, open};

/// The time between two looks at whether the lender can still answer, nanoseconds. Mostly it has
/// answered before. A look takes some 10 us.
const LOOK_NS: u64 = 2_000_000;
/// The time between two tries to get a request, nanoseconds.
const TRY_NS: u64 = 200_000;

/// Has `process` hold `parts` of its memory, and calls `make` with the number of bytes that are
/// held. They are the first of the parts. Calls it with 0 if nothing is held: the process isn't of
/// this run, has no engine, or can't answer. Then the call is made as it is.
pub fn borrow(
    process: OtherProcess,
    parts: &[[usize; 2]],
    write: bool,
    make: &mut dyn FnMut(usize) -> isize,
) -> isize {
    let loan = ask(&process, parts, write);
    let len = loan.as_ref().map_or(0, |(_, len)| *len);
    // The lease ends when it is dropped, after the call.
    make(len)
}

fn ask(process: &OtherProcess, parts: &[[usize; 2]], write: bool) -> Option<(Lease, usize)> {
    // A child of vfork may be killed while it borrows, and nothing would end that. `is_stopped` opens
    // files, for which a filter of the program may kill this thread.
    if child().is_some() || get().is_some_and(|own| own.threads().has_own_filter()) {
        return None;
    }
    let lender = find(process)?;
    if deferred::is_waiting() {
        // Only a process with a slot can borrow.
        deferred::begin();
    }
    let own = member::own()?;
    let id = lender.id();
    let lease = loop {
        if let Some(lease) = lender.ask(own, parts, write) {
            break lease;
        }
        sleep_ns(TRY_NS);
        if !lender.is_still(id) || is_stopped(&lender, process) {
            return None;
        }
    };
    loop {
        if let Some(len) = lease.wait(LOOK_NS) {
            return Some((lease, len as usize));
        }
        if !lease.has_lender() || is_stopped(&lender, process) {
            return None;
        }
    }
}

/// Returns the process of the run whose memory this is.
fn find(process: &OtherProcess) -> Option<ProcessSlot> {
    let read_words = |at: usize, to: &mut [u64; 3]| (process.read)(at, to);
    let find = || member::find(process.number, &read_words);
    match get() {
        // A fork of another thread must not copy the lock of the table while it is taken.
        Some(program) => {
            let _state = program.memory().state().lock();
            find()
        }
        // A process before its engine has one thread.
        None if deferred::is_waiting() => find(),
        None => None,
    }
}

/// Returns whether the lender's first engine thread is stopped, by a signal or a tracer. The process
/// can still be accessed then.
fn is_stopped(lender: &ProcessSlot, process: &OtherProcess) -> bool {
    let (number, thread) = (process.number, lender.server());
    let path: TextBuffer<48> = TextBuffer::of(format_args!("/proc/{number}/task/{thread}/stat"));
    // In another PID namespace the thread has another number.
    let whole: TextBuffer<48> = TextBuffer::of(format_args!("/proc/{number}/stat"));
    let state = |path: &TextBuffer<48>| {
        let file = open(path.as_c_str().ok()?, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        let mut text = [0u8; 64];
        let len = rustix::io::read(file.ok()?, &mut text).ok()?;
        let name_end = text[..len].iter().rposition(|byte| *byte == b')')?;
        text[..len].get(name_end + 2).copied()
    };
    state(&path).or_else(|| state(&whole)).is_some_and(|state| matches!(state, b'T' | b't'))
}
