//! The table, by field. To find a call: `grep '"name"'` in this folder.

mod files;
mod paths;
mod sockets;
mod memory;
mod process;
mod signals;
mod time;
mod ipc;
mod system;

use crate::syscalls::row::{Class, Entry};

/// One past the last call of Linux 6.18.
const COUNT: usize = 470;

/// What has no entry.
pub static UNKNOWN: Entry = Entry::new(Class::Unknown, u16::MAX, "unknown", &[]);

/// All calls by number.
pub static TABLE: [Entry; COUNT] = by_number(&[
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

const fn by_number(fields: &[&[Entry]]) -> [Entry; COUNT] {
    let mut all = [UNKNOWN; COUNT];
    let mut field = 0;
    while field < fields.len() {
        let mut i = 0;
        while i < fields[field].len() {
            let entry = fields[field][i];
            let place = entry.number as usize;
            assert!(matches!(all[place].class, Class::Unknown), "a number has two entries");
            all[place] = entry;
            i += 1;
        }
        field += 1;
    }
    all
}
