//! The two entrances for a call of the program: by a trap, and from a patched site.
use crate::call_state::CallOutcome;
use crate::frame::SignalContext;
use crate::keeper::Keeper;
use crate::record::GateThread;
use crate::syscalls::plain::CallingThread;
use crate::syscalls::row::{ProgramCall, ServedBy};
use crate::syscalls::table::TABLE;

/// Serves a call that has trapped. The program continues as `context` says.
pub fn serve(
    keeper: &'static dyn Keeper,
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
    keeper: &dyn Keeper,
    record: &GateThread,
    nr: usize,
    args: &[usize; 6],
) -> Option<isize> {
    let row = TABLE.look_up(nr);
    match row.served(args) {
        ServedBy::Plain => {
            Some(CallingThread { keeper, record, rows: &TABLE }.plain(row, nr, args))
        }
        ServedBy::Direct(handler) => Some(handler.0(record, args)),
        _ => None,
    }
}
