//! System V IPC, POSIX queues, futexes.
use crate::syscalls::decode::{events, ipc};
use crate::syscalls::row::Arg::{In, Out, Own, Text};
use crate::syscalls::row::Entry;
use crate::syscalls::row::Size::{Bytes, Len, UintItems};
use crate::syscalls::row::plain;
use crate::syscalls::sizes::*;

pub(super) const CALLS: &[Entry] = &[
    plain(29, "shmget", &[]),
    plain(31, "shmctl", &[Own(ipc::shmctl)]),
    plain(64, "semget", &[]),
    plain(65, "semop", &[In(1, UintItems(2, SEMBUF))]),
    plain(66, "semctl", &[Own(ipc::semctl)]),
    plain(68, "msgget", &[]),
    plain(69, "msgsnd", &[Own(ipc::msgsnd)]),
    plain(70, "msgrcv", &[Own(ipc::msgrcv)]),
    plain(71, "msgctl", &[Own(ipc::msgctl)]),
    plain(202, "futex", &[Own(events::futex)]),
    plain(220, "semtimedop", &[In(1, UintItems(2, SEMBUF)), In(3, Bytes(TIMESPEC))]),
    plain(240, "mq_open", &[Text(0), In(3, Bytes(MQ_ATTR))]),
    plain(241, "mq_unlink", &[Text(0)]),
    plain(242, "mq_timedsend", &[In(1, Len(2)), In(4, Bytes(TIMESPEC))]),
    plain(243, "mq_timedreceive", &[Out(1, Len(2)), Out(3, Bytes(4)), In(4, Bytes(TIMESPEC))]),
    plain(244, "mq_notify", &[Own(ipc::mq_notify)]),
    plain(245, "mq_getsetattr", &[In(1, Bytes(MQ_ATTR)), Out(2, Bytes(MQ_ATTR))]),
    plain(449, "futex_waitv", &[Own(events::futex_waitv), In(3, Bytes(TIMESPEC))]),
    plain(454, "futex_wake", &[Own(events::futex_wake)]),
    plain(455, "futex_wait", &[Own(events::futex_wait), In(4, Bytes(TIMESPEC))]),
    plain(456, "futex_requeue", &[Own(events::futex_requeue)]),
];
