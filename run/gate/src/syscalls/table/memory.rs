//! Rows of calls that change mappings, or query or advise about memory.
//!
//! Calls that move or mark areas are served by [`ServedBy::Change`], because the owner of the
//! memory must change its areas with them. Calls that only look at memory (`mincore`, `msync`,
//! `move_pages`) are plain.
use crate::syscalls::decode::{process, vectors};
use crate::syscalls::row::Arg::{Decoded, In, Out};
use crate::syscalls::row::OperandSize::{Bytes, Items, Nodes};
use crate::syscalls::row::plain;
use crate::syscalls::row::{Arg, CallRow, CutInto, ServedBy};
use crate::syscalls::sizes::*;

const fn change(number: u16, name: &'static str, args: &'static [Arg]) -> CallRow {
    CallRow::new(ServedBy::Change, number, name, args)
}

pub(super) const CALLS: &[CallRow] = &[
    change(9, "mmap", &[]),
    change(10, "mprotect", &[]),
    change(11, "munmap", &[]),
    change(12, "brk", &[]),
    change(25, "mremap", &[]),
    plain(26, "msync", &[]),
    plain(27, "mincore", &[Decoded(process::mincore)]),
    change(28, "madvise", &[]),
    change(30, "shmat", &[]),
    change(67, "shmdt", &[]),
    change(149, "mlock", &[]),
    change(150, "munlock", &[]),
    change(151, "mlockall", &[]),
    change(152, "munlockall", &[]),
    change(216, "remap_file_pages", &[]),
    change(237, "mbind", &[In(3, Nodes(4))]),
    plain(238, "set_mempolicy", &[In(1, Nodes(2))]),
    plain(239, "get_mempolicy", &[Out(0, Bytes(4)), Out(1, Nodes(2)), Decoded(process::policy_of)]),
    plain(256, "migrate_pages", &[In(2, Nodes(1)), In(3, Nodes(1))]),
    plain(279, "move_pages", &[In(2, Items(1, 8)), In(3, Items(1, 4)), Out(4, Items(1, 4))]),
    plain(310, "process_vm_readv", &[Decoded(vectors::process_vm_readv)]).cut(CutInto::Others),
    plain(311, "process_vm_writev", &[Decoded(vectors::process_vm_writev)]).cut(CutInto::Others),
    change(323, "userfaultfd", &[]),
    change(325, "mlock2", &[]),
    change(329, "pkey_mprotect", &[]),
    plain(330, "pkey_alloc", &[]),
    plain(331, "pkey_free", &[]),
    change(425, "io_uring_setup", &[Out(1, Bytes(120))]),
    change(440, "process_madvise", &[In(1, Items(2, IOVEC))]),
    plain(447, "memfd_secret", &[]),
    plain(448, "process_mrelease", &[]),
    change(450, "set_mempolicy_home_node", &[]),
    change(453, "map_shadow_stack", &[]),
    change(462, "mseal", &[]),
];
