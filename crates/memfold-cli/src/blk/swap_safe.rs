//! What makes a server of swap safe: its own memory is never swapped out, and its own I/O never
//! waits for itself.
use crate::failure::Failure;
use crate::program::plain;
use std::fs;
use std::io;

/// Of linux/prctl.h; libc doesn't have it.
const PR_SET_IO_FLUSHER: libc::c_int = 57;

/// Keeps this process, with what it takes later, in memory; lets its memory be found without I/O;
/// and lets the kernel end others first when memory is short. Threads that are started later have
/// it too. What is wanting of the second is said on stderr: swap of another machine, or a virtual
/// one, does without.
///
/// # Errors
/// 125: memory may not be locked.
pub fn enter() -> Result<(), Failure> {
    // On fault: what is reserved and never touched takes no memory.
    // SAFETY: changes how the kernel treats this process; no memory is passed.
    if unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) } != 0 {
        let why = plain(&io::Error::last_os_error());
        return Err(Failure::own(format!(
            "--swap-safe: locking memory (mlockall) failed: {why}. Run it as root, or with CAP_IPC_LOCK."
        )));
    }
    // SAFETY: as above.
    if unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) } != 0 {
        let why = plain(&io::Error::last_os_error());
        eprintln!(
            "memfold: warning: --swap-safe: PR_SET_IO_FLUSHER failed: {why}. It needs CAP_SYS_RESOURCE. Without \
             it, don't use the device as swap of this machine; another machine can."
        );
    }
    // Not fatal where it is refused: then a limit of memory must be chosen so that it is not
    // needed.
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    Ok(())
}
