//! The two ways by which a call of the program's comes in: by a trap, or from a patched site.
use crate::call_state::CallOutcome;
use crate::frame::SignalContext;
use crate::keeper::Keeper;
use crate::record::GateThread;
use crate::syscalls::plain::CallingThread;
use crate::syscalls::row::{ProgramCall, ServedBy};
use crate::syscalls::table::TABLE;

/// Serves a call that has trapped: the caller goes on as `context` says.
pub fn serve(
    keeper: &'static dyn Keeper,
    record: &'static GateThread,
    context: &mut SignalContext,
    nr: usize,
    args: [usize; 6],
) -> CallOutcome {
    ProgramCall { keeper, record, context, nr, args, rows: &TABLE }.serve()
}

/// Whether a call can be made without a context, from a patched site.
pub fn is_plain(nr: usize, args: &[usize; 6]) -> bool {
    matches!(TABLE.look_up(nr).served(args), ServedBy::Plain)
}

/// Makes a call of a patched site; `None`: it must come as SIGSYS.
pub fn make_plain(
    keeper: &dyn Keeper,
    record: &GateThread,
    nr: usize,
    args: &[usize; 6],
) -> Option<isize> {
    let row = TABLE.look_up(nr);
    let is_plain = matches!(row.served(args), ServedBy::Plain);
    is_plain.then(|| CallingThread { keeper, record, rows: &TABLE }.plain(row, nr, args))
}
