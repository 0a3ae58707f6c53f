//! Mappings, and what the kernel is told of memory.
//!
//! Those that move or mark areas are of [`Class::Mapping`], as the owner of the memory must change
//! its areas with them. What looks at memory only (`mincore`, `msync`, `move_pages`) is plain.
use crate::syscalls::decode::{process, vectors};
use crate::syscalls::row::Arg::{In, Out, Own};
use crate::syscalls::row::Size::{Bytes, Items, Nodes};
use crate::syscalls::row::plain;
use crate::syscalls::row::{Arg, Class, Entry};
use crate::syscalls::sizes::*;

const fn mapping(number: u16, name: &'static str, args: &'static [Arg]) -> Entry {
    Entry::new(Class::Mapping, number, name, args)
}

pub(super) const CALLS: &[Entry] = &[
    mapping(9, "mmap", &[]),
    mapping(10, "mprotect", &[]),
    mapping(11, "munmap", &[]),
    mapping(12, "brk", &[]),
    mapping(25, "mremap", &[]),
    plain(26, "msync", &[]),
    plain(27, "mincore", &[Own(process::mincore)]),
    mapping(28, "madvise", &[]),
    mapping(30, "shmat", &[]),
    mapping(67, "shmdt", &[]),
    mapping(149, "mlock", &[]),
    mapping(150, "munlock", &[]),
    mapping(151, "mlockall", &[]),
    mapping(152, "munlockall", &[]),
    mapping(216, "remap_file_pages", &[]),
    mapping(237, "mbind", &[In(3, Nodes(4))]),
    plain(238, "set_mempolicy", &[In(1, Nodes(2))]),
    plain(239, "get_mempolicy", &[Out(0, Bytes(4)), Out(1, Nodes(2)), Own(process::policy_of)]),
    plain(256, "migrate_pages", &[In(2, Nodes(1)), In(3, Nodes(1))]),
    plain(279, "move_pages", &[In(2, Items(1, 8)), In(3, Items(1, 4)), Out(4, Items(1, 4))]),
    plain(310, "process_vm_readv", &[Own(vectors::process_vm_readv)]),
    plain(311, "process_vm_writev", &[Own(vectors::process_vm_writev)]),
    mapping(323, "userfaultfd", &[]),
    mapping(325, "mlock2", &[]),
    mapping(329, "pkey_mprotect", &[]),
    plain(330, "pkey_alloc", &[]),
    plain(331, "pkey_free", &[]),
    mapping(425, "io_uring_setup", &[Out(1, Bytes(120))]),
    mapping(440, "process_madvise", &[In(1, Items(2, IOVEC))]),
    plain(447, "memfd_secret", &[]),
    plain(448, "process_mrelease", &[]),
    mapping(450, "set_mempolicy_home_node", &[]),
    mapping(453, "map_shadow_stack", &[]),
    mapping(462, "mseal", &[]),
];
