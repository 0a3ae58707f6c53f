//! The two ways by which a call of the program's comes in: by a trap, or from a patched site.
use crate::call_state::Outcome;
use crate::frame::Context;
use crate::keeper::Keeper;
use crate::record::Record;
use crate::syscalls::plain::Caller;
use crate::syscalls::row::{Call, Served};
use crate::syscalls::table::TABLE;

/// Serves a call that has trapped: the caller goes on as `context` says.
pub fn serve(
    keeper: &'static dyn Keeper,
    record: &'static Record,
    context: &mut Context,
    nr: usize,
    args: [usize; 6],
) -> Outcome {
    Call { keeper, record, context, nr, args, rows: &TABLE }.serve()
}

/// Whether a call can be made without a context, from a patched site.
pub fn is_plain(nr: usize, args: &[usize; 6]) -> bool {
    matches!(TABLE.look_up(nr).served(args), Served::Plain)
}

/// Makes a call of a patched site; `None`: it must come as SIGSYS.
pub fn make_plain(
    keeper: &dyn Keeper,
    record: &Record,
    nr: usize,
    args: &[usize; 6],
) -> Option<isize> {
    let row = TABLE.look_up(nr);
    let is_plain = matches!(row.served(args), Served::Plain);
    is_plain.then(|| Caller { keeper, record, rows: &TABLE }.plain(row, nr, args))
}
