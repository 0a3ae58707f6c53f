//! Rows of calls on the whole machine (names, modules, keys, quotas, tracing), and of calls that
//! Linux has no longer.
use crate::syscalls::decode::{bpf, keys, system};
use crate::syscalls::row::Arg::{Decoded, In, Out, Text};
use crate::syscalls::row::CallRow;
use crate::syscalls::row::OperandSize::{At, Bytes, Int, Len, Uint};
use crate::syscalls::row::plain;
use crate::syscalls::sizes::*;

pub(super) const CALLS: &[CallRow] = &[
    plain(63, "uname", &[Out(0, Bytes(UTSNAME))]),
    plain(99, "sysinfo", &[Out(0, Bytes(SYSINFO))]),
    plain(103, "syslog", &[Decoded(system::syslog)]),
    // "uselib" has no code behind it, and neither do the others without arguments at the end.
    plain(134, "uselib", &[]),
    plain(139, "sysfs", &[Decoded(system::sysfs)]),
    plain(153, "vhangup", &[]),
    plain(156, "_sysctl", &[]),
    plain(163, "acct", &[Text(0)]),
    plain(167, "swapon", &[Text(0)]),
    plain(168, "swapoff", &[Text(0)]),
    plain(169, "reboot", &[Decoded(system::reboot)]),
    plain(170, "sethostname", &[In(0, Int(1))]),
    plain(171, "setdomainname", &[In(0, Int(1))]),
    plain(172, "iopl", &[]),
    plain(173, "ioperm", &[]),
    plain(174, "create_module", &[]),
    plain(175, "init_module", &[In(0, Len(1)), Decoded(system::module_arguments)]),
    plain(176, "delete_module", &[Text(0)]),
    plain(177, "get_kernel_syms", &[]),
    plain(178, "query_module", &[]),
    plain(179, "quotactl", &[Decoded(system::quotactl)]),
    plain(180, "nfsservctl", &[]),
    plain(181, "getpmsg", &[]),
    plain(182, "putpmsg", &[]),
    plain(183, "afs_syscall", &[]),
    plain(184, "tuxcall", &[]),
    plain(185, "security", &[]),
    plain(205, "set_thread_area", &[]),
    plain(211, "get_thread_area", &[]),
    plain(212, "lookup_dcookie", &[]),
    plain(214, "epoll_ctl_old", &[]),
    plain(215, "epoll_wait_old", &[]),
    plain(236, "vserver", &[]),
    plain(246, "kexec_load", &[Decoded(system::kexec_load)]),
    plain(248, "add_key", &[Text(0), Text(1), In(2, Len(3))]),
    plain(249, "request_key", &[Text(0), Text(1), Text(2)]),
    plain(250, "keyctl", &[Decoded(keys::keyctl)]),
    plain(298, "perf_event_open", &[Decoded(system::perf_event_open)]),
    plain(313, "finit_module", &[Decoded(system::finit_arguments)]),
    plain(318, "getrandom", &[Out(0, Len(1))]),
    plain(320, "kexec_file_load", &[In(3, Len(2))]),
    plain(321, "bpf", &[Decoded(bpf::bpf)]),
    plain(443, "quotactl_fd", &[Decoded(system::quotactl_fd)]),
    plain(459, "lsm_get_self_attr", &[Out(1, At(2)), Out(2, Bytes(4))]),
    plain(460, "lsm_set_self_attr", &[In(1, Uint(2))]),
    plain(461, "lsm_list_modules", &[Out(0, At(1)), Out(1, Bytes(4))]),
];
