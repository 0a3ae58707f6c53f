//! The two entrances for a call of the program: by a trap, and from a patched site.
use crate::call_state::CallOutcome;
use crate::frame::SignalContext;
use crate::keeper::Keeper;
use crate::record::GateThread;
use crate::syscalls::row::{CallingThread, ProgramCall, ServedBy};
use crate::syscalls::table::TABLE;

/// Serves a call that has trapped. The program continues as `context` says.
pub fn serve(
    keeper: &'static Keeper,
    record: &'static GateThread,
    context: &mut SignalContext,
    nr: usize,
    args: [usize; 6],
) -> CallOutcome {
    ProgramCall { keeper, record, context, nr, args, rows: &TABLE }.serve()
}

/// Returns whether a call can be made from a patched site, without a context.
pub fn needs_no_context(nr: usize, args: &[usize; 6]) -> bool {
    matches!(TABLE.look_up(nr).served(args), ServedBy::Plain | ServedBy::Direct(_))
}

/// Makes a call from a patched site. Returns `None` if the call must trap instead.
pub fn make_without_context(
    keeper: &Keeper,
    record: &GateThread,
    nr: usize,
    args: &[usize; 6],
) -> Option<isize> {
    let (row, caller) = (TABLE.look_up(nr), CallingThread { keeper, record, rows: &TABLE });
    match row.served(args) {
        ServedBy::Plain => Some(caller.plain(row, nr, args)),
        ServedBy::Direct(handler) => Some(handler.0(caller, nr, args)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequent_call_on_a_descriptor_passes_a_patched_site() {
        let of =
            |nr: i64, second: i32| needs_no_context(nr as usize, &[3, second as usize, 0, 0, 0, 0]);
        let calls = [
            libc::SYS_close,
            libc::SYS_dup,
            libc::SYS_dup2,
            libc::SYS_dup3,
            libc::SYS_openat,
            libc::SYS_fstat,
            libc::SYS_newfstatat,
            libc::SYS_getdents64,
        ];
        assert_eq!(calls.map(|nr| of(nr, 4)), [true; 8]);
        for command in [libc::F_DUPFD_CLOEXEC, libc::F_GETFD, libc::F_SETFD, libc::F_GETFL] {
            assert!(of(libc::SYS_fcntl, command), "{command}");
        }
        assert!(!of(libc::SYS_munmap, 4) && !of(libc::SYS_rt_sigreturn, 0));
    }
}
