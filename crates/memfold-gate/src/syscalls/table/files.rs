//! Open files: reading, writing, descriptors, waiting for them, asynchronous I/O.
use crate::syscalls::decode::{control, events, vectors};
use crate::syscalls::row::Arg::{In, Out, Own, Text};
use crate::syscalls::row::Size::{Bytes, Fds, IntItems, Items, Len, Uint, UintItems};
use crate::syscalls::row::plain;
use crate::syscalls::row::{Class, Entry};
use crate::syscalls::sizes::*;

const OFFSET: usize = 8;

pub(super) const CALLS: &[Entry] = &[
    plain(0, "read", &[Out(1, Len(2))]),
    plain(1, "write", &[In(1, Len(2))]),
    Entry::new(Class::Descriptor, 3, "close", &[]),
    plain(5, "fstat", &[Out(1, Bytes(STAT))]),
    plain(7, "poll", &[Out(0, UintItems(1, POLLFD))]),
    plain(8, "lseek", &[]),
    plain(16, "ioctl", &[Own(control::ioctl)]),
    plain(17, "pread64", &[Out(1, Len(2))]),
    plain(18, "pwrite64", &[In(1, Len(2))]),
    plain(19, "readv", &[Own(vectors::filled)]),
    plain(20, "writev", &[Own(vectors::taken)]),
    plain(22, "pipe", &[Out(0, Bytes(8))]),
    plain(23, "select", &[Out(1, Fds(0)), Out(2, Fds(0)), Out(3, Fds(0)), Out(4, Bytes(TIMEVAL))]),
    Entry::new(Class::Descriptor, 32, "dup", &[]),
    Entry::new(Class::Descriptor, 33, "dup2", &[]),
    plain(40, "sendfile", &[Out(2, Bytes(OFFSET))]),
    plain(72, "fcntl", &[Own(control::fcntl)]),
    plain(73, "flock", &[]),
    plain(74, "fsync", &[]),
    plain(75, "fdatasync", &[]),
    plain(77, "ftruncate", &[]),
    plain(78, "getdents", &[Out(1, Uint(2))]),
    plain(91, "fchmod", &[]),
    plain(93, "fchown", &[]),
    plain(138, "fstatfs", &[Out(1, Bytes(STATFS))]),
    plain(187, "readahead", &[]),
    plain(190, "fsetxattr", &[Text(1), In(2, Len(3))]),
    plain(193, "fgetxattr", &[Text(1), Out(2, Len(3))]),
    plain(196, "flistxattr", &[Out(1, Len(2))]),
    plain(199, "fremovexattr", &[Text(1)]),
    // Maps a ring, and what is submitted to it is used at any time.
    Entry::new(Class::Mapping, 206, "io_setup", &[Out(1, Bytes(8))]),
    Entry::new(Class::Asynchronous, 207, "io_destroy", &[]),
    Entry::new(
        Class::Asynchronous,
        208,
        "io_getevents",
        &[Out(3, Items(2, IO_EVENT)), In(4, Bytes(TIMESPEC))],
    ),
    Entry::new(Class::Asynchronous, 209, "io_submit", &[Own(events::io_submit)]),
    Entry::new(
        Class::Asynchronous,
        210,
        "io_cancel",
        &[In(1, Bytes(IOCB)), Out(2, Bytes(IO_EVENT))],
    ),
    plain(213, "epoll_create", &[]),
    plain(217, "getdents64", &[Out(1, Uint(2))]),
    plain(221, "fadvise64", &[]),
    plain(232, "epoll_wait", &[Out(1, IntItems(2, EPOLL_EVENT))]),
    plain(233, "epoll_ctl", &[In(3, Bytes(EPOLL_EVENT))]),
    plain(253, "inotify_init", &[]),
    plain(254, "inotify_add_watch", &[Text(1)]),
    plain(255, "inotify_rm_watch", &[]),
    Entry::new(
        Class::Masked,
        270,
        "pselect6",
        &[
            Out(1, Fds(0)),
            Out(2, Fds(0)),
            Out(3, Fds(0)),
            Out(4, Bytes(TIMESPEC)),
            Own(events::mask_and_size),
        ],
    )
    .masked_by(5),
    Entry::new(
        Class::Masked,
        271,
        "ppoll",
        &[Out(0, UintItems(1, POLLFD)), Out(2, Bytes(TIMESPEC)), In(3, Bytes(8))],
    )
    .masked_by(3),
    plain(275, "splice", &[Out(1, Bytes(OFFSET)), Out(3, Bytes(OFFSET))]),
    plain(276, "tee", &[]),
    plain(277, "sync_file_range", &[]),
    plain(278, "vmsplice", &[Own(vectors::vmsplice)]).lending(),
    Entry::new(
        Class::Masked,
        281,
        "epoll_pwait",
        &[Out(1, IntItems(2, EPOLL_EVENT)), In(4, Bytes(8))],
    )
    .masked_by(4),
    plain(284, "eventfd", &[]),
    plain(285, "fallocate", &[]),
    plain(290, "eventfd2", &[]),
    plain(291, "epoll_create1", &[]),
    Entry::new(Class::Descriptor, 292, "dup3", &[]),
    plain(293, "pipe2", &[Out(0, Bytes(8))]),
    plain(294, "inotify_init1", &[]),
    plain(295, "preadv", &[Own(vectors::filled)]),
    plain(296, "pwritev", &[Own(vectors::taken)]),
    plain(300, "fanotify_init", &[]),
    plain(301, "fanotify_mark", &[Text(4)]),
    plain(306, "syncfs", &[]),
    plain(319, "memfd_create", &[Text(0)]),
    plain(326, "copy_file_range", &[Out(1, Bytes(OFFSET)), Out(3, Bytes(OFFSET))]),
    plain(327, "preadv2", &[Own(vectors::filled)]),
    plain(328, "pwritev2", &[Own(vectors::taken)]),
    Entry::new(
        Class::Asynchronous,
        333,
        "io_pgetevents",
        &[Out(3, Items(2, IO_EVENT)), In(4, Bytes(TIMESPEC)), Own(events::mask_and_size)],
    )
    .masked_by(5),
    Entry::new(Class::Asynchronous, 426, "io_uring_enter", &[Own(events::io_uring_enter)]),
    Entry::new(Class::Asynchronous, 427, "io_uring_register", &[Own(events::io_uring_register)]),
    Entry::new(Class::Descriptor, 436, "close_range", &[]),
    Entry::new(
        Class::Masked,
        441,
        "epoll_pwait2",
        &[Out(1, IntItems(2, EPOLL_EVENT)), In(3, Bytes(TIMESPEC)), In(4, Bytes(8))],
    )
    .masked_by(4),
    plain(451, "cachestat", &[In(1, Bytes(CACHESTAT_RANGE)), Out(2, Bytes(CACHESTAT))]),
];
