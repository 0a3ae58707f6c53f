//! Makes a server of swap safe: its memory is never swapped out, and its I/O never waits for
//! itself.
use crate::failure::CommandFailure;
use crate::program::plain;
use std::fs;
use std::io;

/// From linux/prctl.h; libc lacks it.
const PR_SET_IO_FLUSHER: libc::c_int = 57;

/// Locks this process in memory, with later allocations. Makes its allocations avoid I/O, and makes
/// the kernel end other processes first when memory is short. All this applies to later threads
/// too.
///
/// If the kernel refuses the second, warns on stderr: swap of another machine, or of a virtual one,
/// does not need it.
///
/// # Errors
/// 125: memory may not be locked.
pub fn enter() -> Result<(), CommandFailure> {
    // MCL_ONFAULT: reserved memory that is never touched takes no memory. SAFETY: the call has no
    // pointers and only changes how the kernel treats this process.
    if unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) } != 0 {
        let why = plain(&io::Error::last_os_error());
        return Err(CommandFailure::own(format!(
            "--swap-safe: locking memory (mlockall) failed: {why}. Run it as root, or with CAP_IPC_LOCK."
        )));
    }
    // SAFETY: the call has no pointers and only changes how the kernel treats this process.
    if unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) } != 0 {
        let why = plain(&io::Error::last_os_error());
        eprintln!(
            "memfold: warning: --swap-safe: PR_SET_IO_FLUSHER failed: {why}. It needs CAP_SYS_RESOURCE. Without \
             it, don't use the device as swap of this machine; another machine can."
        );
    }
    // A refusal is not fatal. The limit must then be small enough that this is not needed.
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    Ok(())
}
