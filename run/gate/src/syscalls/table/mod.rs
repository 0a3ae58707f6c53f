//! The table of system calls, in files by field. To find a call: `grep '"name"'` in this folder.

mod files;
mod paths;
mod sockets;
mod memory;
mod process;
mod signals;
mod time;
mod ipc;
mod system;

use crate::syscalls::row::{COUNT, CallRow, CallRows, UNKNOWN};

/// All calls by number.
pub static TABLE: CallRows = by_number(&[
    files::CALLS,
    paths::CALLS,
    sockets::CALLS,
    memory::CALLS,
    process::CALLS,
    signals::CALLS,
    time::CALLS,
    ipc::CALLS,
    system::CALLS,
]);

const fn by_number(fields: &[&[CallRow]]) -> CallRows {
    let mut all = [UNKNOWN; COUNT];
    let mut field = 0;
    while field < fields.len() {
        let mut i = 0;
        while i < fields[field].len() {
            let row = fields[field][i];
            let place = row.number as usize;
            assert!(!all[place].is_known(), "a number has two rows");
            all[place] = row;
            i += 1;
        }
        field += 1;
    }
    CallRows(all)
}
