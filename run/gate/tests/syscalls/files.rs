//! Open files.
use crate::run::{Case, case, halves, words};
use crate::world::{World, sys};
use libc::*;

pub const HERE: usize = AT_FDCWD as usize;

pub fn file(bytes: &[u8]) -> usize {
    std::fs::write("file", bytes).unwrap();
    sys(SYS_open, [c"file".as_ptr() as usize, O_RDWR as usize])
}

pub fn pipe_with(bytes: &[u8]) -> [usize; 2] {
    let mut ends = [0u32; 2];
    sys(SYS_pipe, [&raw mut ends as usize]);
    let [r, w] = ends.map(|e| e as usize);
    sys(SYS_write, [w, bytes.as_ptr() as usize, bytes.len()]);
    [r, w]
}

/// Two parts with their vector.
pub fn vector(w: &mut World, parts: &[&[u8]], fill: bool) -> usize {
    let mut pairs = Vec::new();
    for part in parts {
        let at = if fill { w.both(part) } else { w.put(part) };
        pairs.extend([at, part.len()]);
    }
    w.put(&words(&pairs))
}

fn many() -> Vec<u8> {
    (0..100_000u32).map(|i| ((i * 7) >> 3) as u8).collect()
}

fn epoll(ready: usize) -> usize {
    let epoll = sys(SYS_epoll_create1, [0]);
    let mut event = epoll_event { events: EPOLLIN as u32, u64: 7 };
    sys(SYS_epoll_ctl, [epoll, EPOLL_CTL_ADD as usize, ready, &raw mut event as usize]);
    epoll
}

fn aio() -> usize {
    let mut context = 0usize;
    sys(SYS_io_setup, [8, &raw mut context as usize]);
    context
}

fn iocb(opcode: usize, fd: usize, at: usize, len: usize) -> Vec<u8> {
    words(&[77, 0, opcode | fd << 32, at, len, 0, 0, 0])
}

fn submitted() -> usize {
    let (context, f) = (aio(), file(b"some"));
    let into = Box::leak(Box::new([0u8; 4]));
    let request = Box::leak(iocb(0, f, into.as_ptr() as usize, 4).into_boxed_slice());
    let at = request.as_ptr() as usize;
    sys(SYS_io_submit, [context, 1, &raw const at as usize]);
    context
}

fn xattr() -> usize {
    let f = file(b"x");
    sys(SYS_fsetxattr, [f, c"user.a".as_ptr() as usize, c"value".as_ptr() as usize, 5, 0]);
    f
}

const LOCK: [usize; 4] = [F_WRLCK as usize, 0, 4, 0];

pub const CASES: &[Case] = &[
    case("read", |w| vec![file(b"hello"), w.room(5), 5]),
    case("read:large", |w| vec![file(&many()), w.room(100_000), 100_000]),
    case("read:pipe", |w| vec![pipe_with(b"hello")[0], w.room(9), 9]),
    case("write", |w| {
        let f = file(b"");
        w.watch(f);
        vec![f, w.put(b"hello"), 5]
    }),
    case("write:large", |w| {
        let f = file(b"");
        w.watch(f);
        vec![f, w.put(&many()), 100_000]
    }),
    case("write:pipe", |w| {
        let [r, p] = pipe_with(b"");
        w.watch(r);
        vec![p, w.put(&many()[..9000]), 9000]
    }),
    case("fstat", |w| vec![file(b"x"), w.room(144)]).volatile(),
    case("poll", |w| {
        let [r, _] = pipe_with(b"x");
        vec![w.both(&words(&[r | 1 << 32, r | 4 << 32])), 2, 0]
    }),
    case("ppoll", |w| {
        let [r, _] = pipe_with(b"x");
        vec![w.both(&words(&[r | 1 << 32])), 1, w.both(&words(&[1, 0])), w.put(&words(&[0])), 8]
    })
    .volatile(),
    case("select", |w| {
        let [r, _] = pipe_with(b"x");
        let s = words(&[1 << r]);
        vec![r + 1, w.both(&s), w.both(&s), w.both(&s), w.both(&words(&[1, 0]))]
    })
    .volatile(),
    case("pselect6", |w| {
        let [r, _] = pipe_with(b"x");
        let s = words(&[1 << r]);
        let m = w.put(&words(&[0]));
        vec![
            r + 1,
            w.both(&s),
            w.both(&s),
            w.both(&s),
            w.both(&words(&[1, 0])),
            w.put(&words(&[m, 8])),
        ]
    })
    .volatile(),
    case("pread64", |w| vec![file(b"hello"), w.room(3), 3, 1]),
    case("pwrite64", |w| {
        let f = file(b"hello");
        w.watch(f);
        vec![f, w.put(b"abc"), 3, 1]
    }),
    case("readv", |w| {
        let f = file(&many());
        vec![f, vector(w, &[b"aaa", &[9; 5000], b"b"], true), 3]
    }),
    case("readv:ten", |w| {
        let f = file(&many());
        let p: &[u8] = b"abc";
        vec![f, vector(w, &[p; 10], true), 10]
    }),
    case("writev", |w| {
        let f = file(b"");
        w.watch(f);
        vec![f, vector(w, &[b"aaa", &[9; 5000], b"b"], false), 3]
    }),
    case("writev:forty", |w| {
        let f = file(b"");
        w.watch(f);
        let part: &[u8] = b"abc";
        vec![f, vector(w, &[part; 40], false), 40]
    })
    .loose(),
    case("writev:pipe", |w| {
        let [r, p] = pipe_with(b"");
        w.watch(r);
        vec![p, vector(w, &[b"aaa", &[9; 5000], b"b"], false), 3]
    }),
    case("preadv", |w| {
        let f = file(&many());
        vec![f, vector(w, &[b"aaa", b"b"], true), 2, 50]
    }),
    case("pwritev", |w| {
        let f = file(b"");
        w.watch(f);
        vec![f, vector(w, &[b"aaa", b"b"], false), 2, 50]
    }),
    case("preadv2", |w| {
        let f = file(&many());
        vec![f, vector(w, &[b"aaa", b"b"], true), 2, 50, 0, 0]
    }),
    case("pwritev2", |w| {
        let f = file(b"");
        w.watch(f);
        vec![f, vector(w, &[b"aaa", b"b"], false), 2, 50, 0, 0]
    }),
    case("pipe", |w| vec![w.room(8)]),
    case("pipe2", |w| vec![w.room(8), O_CLOEXEC as usize]),
    case("sendfile", |w| {
        let f = file(b"hello");
        let [r, p] = pipe_with(b"");
        w.watch(r);
        vec![p, f, w.both(&words(&[1])), 4]
    }),
    case("splice", |w| {
        let f = file(b"hello");
        let [r, p] = pipe_with(b"");
        w.watch(r);
        vec![f, w.both(&words(&[1])), p, 0, 4, 0]
    }),
    case("splice:out", |w| {
        let f = file(b"hello");
        let [r, _] = pipe_with(b"abcd");
        w.watch(f);
        vec![r, 0, f, w.both(&words(&[1])), 4, 0]
    }),
    case("vmsplice", |w| {
        let [r, p] = pipe_with(b"");
        w.watch(r);
        vec![p, vector(w, &[b"aaa", &[9; 5000]], false), 2, 0]
    }),
    case("vmsplice:in", |w| {
        let [r, _] = pipe_with(b"hello");
        vec![r, vector(w, &[b"aaa", b"bbbb"], true), 2, 0]
    }),
    case("copy_file_range", |w| {
        let f = file(b"hello");
        w.watch(f);
        vec![f, w.both(&words(&[1])), f, w.both(&words(&[9])), 4, 0]
    }),
    case("fcntl:getlk", |w| vec![file(b"x"), F_GETLK as usize, w.both(&words(&LOCK))]),
    case("fcntl:setlk", |w| vec![file(b"x"), F_SETLK as usize, w.put(&words(&LOCK))]),
    case("fcntl:ofd_setlk", |w| vec![file(b"x"), F_OFD_SETLK as usize, w.put(&words(&LOCK))]),
    case("fcntl:ofd_getlk", |w| vec![file(b"x"), F_OFD_GETLK as usize, w.both(&words(&LOCK))]),
    case("fcntl:setown_ex", |w| vec![pipe_with(b"")[0], 15, w.put(&halves(&[0, 0]))]),
    case("fcntl:getown_ex", |w| vec![pipe_with(b"")[0], 16, w.room(8)]),
    case("fcntl:getowner_uids", |w| vec![pipe_with(b"")[0], 17, w.room(8)]),
    case("fcntl:get_rw_hint", |w| vec![file(b"x"), 1035, w.room(8)]),
    case("fcntl:set_rw_hint", |w| vec![file(b"x"), 1036, w.put(&words(&[2]))]),
    case("getdents", |w| {
        std::fs::create_dir("d").unwrap();
        vec![sys(SYS_open, [c"d".as_ptr() as usize, 0]), w.room(3000), 3000]
    })
    .volatile(),
    case("getdents64", |w| {
        std::fs::create_dir("d").unwrap();
        vec![sys(SYS_open, [c"d".as_ptr() as usize, 0]), w.room(3000), 3000]
    })
    .volatile(),
    case("fstatfs", |w| vec![file(b"x"), w.room(120)]).volatile(),
    case("fsetxattr", |w| vec![file(b"x"), w.text("user.memfold"), w.put(b"value"), 5, 0]),
    case("fgetxattr", |w| vec![xattr(), w.text("user.a"), w.room(5), 5]),
    case("flistxattr", |w| vec![xattr(), w.room(100), 100]),
    case("fremovexattr", |w| vec![xattr(), w.text("user.a")]),
    case("io_setup", |w| vec![8, w.both(&words(&[0]))]).volatile(),
    case("io_submit:read", |w| {
        let f = file(b"hello");
        let b = w.room(5);
        let i = w.both(&iocb(0, f, b, 5));
        vec![aio(), 1, w.put(&words(&[i]))]
    }),
    case("io_submit:writev", |w| {
        let f = file(b"");
        w.watch(f);
        let v = vector(w, &[b"abc", b"de"], false);
        let i = w.both(&iocb(8, f, v, 2));
        vec![aio(), 1, w.put(&words(&[i]))]
    }),
    case("io_submit:readv", |w| {
        let f = file(b"hello");
        let v = vector(w, &[b"abc", b"de"], true);
        let i = w.both(&iocb(7, f, v, 2));
        vec![aio(), 1, w.put(&words(&[i]))]
    }),
    case("io_submit:two", |w| {
        let f = file(b"");
        w.watch(f);
        let b = w.put(b"hello");
        let i = w.both(&iocb(1, f, b, 5));
        let j = w.both(&iocb(1, f, b, 5));
        vec![aio(), 2, w.put(&words(&[i, j]))]
    }),
    case("io_getevents", |w| vec![submitted(), 1, 4, w.room(128), w.put(&words(&[5, 0]))])
        .volatile(),
    case("io_pgetevents", |w| {
        let m = w.put(&words(&[0]));
        vec![submitted(), 1, 4, w.room(128), w.put(&words(&[5, 0])), w.put(&words(&[m, 8]))]
    })
    .volatile(),
    case("io_cancel", |w| vec![aio(), w.both(&iocb(0, 0, 0, 0)), w.room(32)]).refused(),
    case("epoll_ctl", |w| {
        let [r, _] = pipe_with(b"");
        vec![sys(SYS_epoll_create1, [0]), 1, r, w.put(&halves(&[1, 2, 3]))]
    }),
    case("epoll_wait", |w| vec![epoll(pipe_with(b"x")[0]), w.room(48), 4, 0]),
    case("epoll_pwait", |w| {
        vec![epoll(pipe_with(b"x")[0]), w.room(48), 4, 0, w.put(&words(&[0])), 8]
    }),
    case("epoll_pwait2", |w| {
        vec![
            epoll(pipe_with(b"x")[0]),
            w.room(48),
            4,
            w.put(&words(&[0, 0])),
            w.put(&words(&[0])),
            8,
        ]
    }),
    case("inotify_add_watch", |w| {
        vec![sys(SYS_inotify_init, [0]), w.text("."), IN_CREATE as usize]
    }),
    case("fanotify_mark", |w| vec![sys(SYS_fanotify_init, [0, 0]), 1, 0x20, HERE, w.text(".")]),
    case("memfd_create", |w| vec![w.text("a name"), 0]),
    case("cachestat", |w| vec![file(b"x"), w.put(&words(&[0, 1])), w.room(40), 0]).volatile(),
    case("ioctl:FIONREAD", |w| vec![pipe_with(b"abc")[0], FIONREAD as usize, w.room(4)]),
    case("ioctl:FIONBIO", |w| vec![pipe_with(b"abc")[0], FIONBIO as usize, w.put(&halves(&[1]))]),
    case("ioctl:FS_IOC_GETFLAGS", |w| vec![file(b"x"), 0x8008_6601, w.room(8)]),
    case("ioctl:FIGETBSZ", |w| vec![file(b"x"), 2, w.room(4)]),
    case("ioctl:FIEMAP", |w| {
        let f = file(&many());
        sys(SYS_fsync, [f]);
        vec![f, 0xc020_660b, w.both(&[words(&[0, 1 << 40, 0, 3]), vec![0; 168]].concat())]
    })
    .volatile(),
    case("ioctl:PAGEMAP_SCAN", |w| {
        let v = w.room(72);
        let f = sys(SYS_open, [c"/proc/self/pagemap".as_ptr() as usize, 0]);
        vec![
            f,
            0xc060_6610,
            w.both(&words(&[96, 0, w.base - 4096, w.base - 4096, 0, v, 3, 0, 0, 0, 0, 0])),
        ]
    })
    .volatile(),
    case("ioctl:TCGETS", |w| {
        vec![sys(SYS_open, [c"/dev/ptmx".as_ptr() as usize, 2]), TCGETS as usize, w.room(36)]
    }),
    case("ioctl:TCSETS", |w| {
        let t = sys(SYS_open, [c"/dev/ptmx".as_ptr() as usize, 2]);
        let mut now = [0u8; 36];
        sys(SYS_ioctl, [t, TCGETS as usize, now.as_mut_ptr() as usize]);
        vec![t, TCSETS as usize, w.put(&now)]
    }),
    case("ioctl:TIOCGWINSZ", |w| {
        vec![sys(SYS_open, [c"/dev/ptmx".as_ptr() as usize, 2]), TIOCGWINSZ as usize, w.room(8)]
    }),
    case("ioctl:TIOCGPTN", |w| {
        vec![sys(SYS_open, [c"/dev/ptmx".as_ptr() as usize, 2]), TIOCGPTN as usize, w.room(4)]
    })
    .volatile(),
];
