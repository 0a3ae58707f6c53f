//! Rows of calls on clocks and timers.
use crate::syscalls::row::Arg::{In, Out};
use crate::syscalls::row::CallRow;
use crate::syscalls::row::OperandSize::Bytes;
use crate::syscalls::row::plain;
use crate::syscalls::sizes::*;

pub(super) const CALLS: &[CallRow] = &[
    plain(35, "nanosleep", &[In(0, Bytes(TIMESPEC)), Out(1, Bytes(TIMESPEC))]),
    plain(36, "getitimer", &[Out(1, Bytes(ITIMERVAL))]),
    plain(37, "alarm", &[]),
    plain(38, "setitimer", &[In(1, Bytes(ITIMERVAL)), Out(2, Bytes(ITIMERVAL))]),
    plain(96, "gettimeofday", &[Out(0, Bytes(TIMEVAL)), Out(1, Bytes(TIMEZONE))]),
    plain(100, "times", &[Out(0, Bytes(TMS))]),
    plain(159, "adjtimex", &[Out(0, Bytes(TIMEX))]),
    plain(164, "settimeofday", &[In(0, Bytes(TIMEVAL)), In(1, Bytes(TIMEZONE))]),
    plain(201, "time", &[Out(0, Bytes(8))]),
    plain(222, "timer_create", &[In(1, Bytes(SIGEVENT)), Out(2, Bytes(4))]),
    plain(223, "timer_settime", &[In(2, Bytes(ITIMERSPEC)), Out(3, Bytes(ITIMERSPEC))]),
    plain(224, "timer_gettime", &[Out(1, Bytes(ITIMERSPEC))]),
    plain(225, "timer_getoverrun", &[]),
    plain(226, "timer_delete", &[]),
    plain(227, "clock_settime", &[In(1, Bytes(TIMESPEC))]),
    plain(228, "clock_gettime", &[Out(1, Bytes(TIMESPEC))]),
    plain(229, "clock_getres", &[Out(1, Bytes(TIMESPEC))]),
    plain(230, "clock_nanosleep", &[In(2, Bytes(TIMESPEC)), Out(3, Bytes(TIMESPEC))]),
    plain(283, "timerfd_create", &[]),
    plain(286, "timerfd_settime", &[In(2, Bytes(ITIMERSPEC)), Out(3, Bytes(ITIMERSPEC))]),
    plain(287, "timerfd_gettime", &[Out(1, Bytes(ITIMERSPEC))]),
    plain(305, "clock_adjtime", &[Out(1, Bytes(TIMEX))]),
];
