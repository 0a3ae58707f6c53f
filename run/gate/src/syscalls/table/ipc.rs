//! Rows of System V IPC, POSIX queues and futexes.
use crate::syscalls::decode::{events, ipc};
use crate::syscalls::row::Arg::{Decoded, In, Out, Text};
use crate::syscalls::row::CallRow;
use crate::syscalls::row::OperandSize::{Bytes, Len, UintItems};
use crate::syscalls::row::plain;
use crate::syscalls::sizes::*;

pub(super) const CALLS: &[CallRow] = &[
    plain(29, "shmget", &[]),
    plain(31, "shmctl", &[Decoded(ipc::shmctl)]),
    plain(64, "semget", &[]),
    plain(65, "semop", &[In(1, UintItems(2, SEMBUF))]),
    plain(66, "semctl", &[Decoded(ipc::semctl)]),
    plain(68, "msgget", &[]),
    plain(69, "msgsnd", &[Decoded(ipc::msgsnd)]),
    plain(70, "msgrcv", &[Decoded(ipc::msgrcv)]),
    plain(71, "msgctl", &[Decoded(ipc::msgctl)]),
    plain(202, "futex", &[Decoded(events::futex)]),
    plain(220, "semtimedop", &[In(1, UintItems(2, SEMBUF)), In(3, Bytes(TIMESPEC))]),
    plain(240, "mq_open", &[Text(0), In(3, Bytes(MQ_ATTR))]),
    plain(241, "mq_unlink", &[Text(0)]),
    plain(242, "mq_timedsend", &[In(1, Len(2)), In(4, Bytes(TIMESPEC))]),
    plain(243, "mq_timedreceive", &[Out(1, Len(2)), Out(3, Bytes(4)), In(4, Bytes(TIMESPEC))]),
    plain(244, "mq_notify", &[Decoded(ipc::mq_notify)]),
    plain(245, "mq_getsetattr", &[In(1, Bytes(MQ_ATTR)), Out(2, Bytes(MQ_ATTR))]),
    plain(449, "futex_waitv", &[Decoded(events::futex_waitv), In(3, Bytes(TIMESPEC))]),
    plain(454, "futex_wake", &[Decoded(events::futex_wake)]),
    plain(455, "futex_wait", &[Decoded(events::futex_wait), In(4, Bytes(TIMESPEC))]),
    plain(456, "futex_requeue", &[Decoded(events::futex_requeue)]),
];
