//! Signals, times, queues, futexes.
use crate::run::{Case, case, halves, words};
use crate::world::{World, sys};
use libc::*;

const SOON: [usize; 2] = [0, 1000];
const MASK: usize = 1 << (SIGUSR1 - 1);

fn block() {
    let mask = MASK;
    sys(SYS_rt_sigprocmask, [0, &raw const mask as usize, 0, 8]);
}

fn raise() {
    block();
    sys(SYS_kill, [sys(SYS_getpid, []), SIGUSR1 as usize]);
}

fn info() -> Vec<u8> {
    let mut info = halves(&[SIGUSR1 as u32, 0, -1i32 as u32, 0]);
    info.resize(128, 0);
    info
}

fn timer() -> usize {
    let (mut id, event) =
        (0u32, [words(&[0]), halves(&[0, SIGEV_NONE as u32]), vec![0; 48]].concat());
    sys(SYS_timer_create, [1, event.as_ptr() as usize, &raw mut id as usize]);
    id as usize
}

/// A queue of this run's own name space.
fn own() {
    sys(SYS_unshare, [CLONE_NEWIPC as usize]);
}

fn queue() -> usize {
    own();
    let attr = words(&[0, 4, 100, 0, 0, 0, 0, 0]);
    sys(
        SYS_mq_open,
        [c"q".as_ptr() as usize, (O_CREAT | O_RDWR) as usize, 0o600, attr.as_ptr() as usize],
    )
}

fn filled() -> usize {
    let q = queue();
    sys(SYS_mq_timedsend, [q, c"hello".as_ptr() as usize, 5, 3, 0]);
    q
}

fn messages(send: bool) -> usize {
    own();
    let q = sys(SYS_msgget, [0, 0o600]);
    let message = [words(&[1]), b"hello".to_vec()].concat();
    if send {
        sys(SYS_msgsnd, [q, message.as_ptr() as usize, 5, 0]);
    }
    q
}

fn semaphores() -> usize {
    own();
    sys(SYS_semget, [0, 5, 0o600])
}

fn shared() -> usize {
    own();
    sys(SYS_shmget, [0, 4096, 0o600])
}

const PRIVATE: usize = FUTEX_PRIVATE_FLAG as usize;

fn waiter(w: &mut World, flags: u32) -> Vec<u8> {
    let at = w.word(&halves(&[5, 0]));
    words(&[4, at, flags as usize])
}

fn event(how: i32) -> Vec<u8> {
    [words(&[0]), halves(&[SIGUSR1 as u32, how as u32]), vec![0; 48]].concat()
}

extern "C" fn nothing(_: i32) {}

/// A signal that waits to be handled.
fn handled() {
    // SAFETY: the handler does nothing.
    unsafe { signal(SIGUSR1, nothing as *const () as sighandler_t) };
    raise();
}

pub const CASES: &[Case] = &[
    case("rt_sigsuspend", |w| {
        handled();
        vec![w.put(&words(&[0])), 8]
    })
    .refused(),
    case("rt_sigaction", |w| vec![10, w.put(&words(&[1, 0, 0, 0])), w.room(32), 8]),
    case("rt_sigprocmask", |w| vec![0, w.put(&words(&[MASK])), w.room(8), 8]),
    case("rt_sigpending", |w| {
        raise();
        vec![w.room(8), 8]
    }),
    case("rt_sigtimedwait", |w| {
        raise();
        vec![w.put(&words(&[MASK])), w.room(128), w.put(&words(&[1, 0])), 8]
    })
    .volatile(),
    case("rt_sigtimedwait:none", |w| {
        block();
        vec![w.put(&words(&[MASK])), w.room(128), w.put(&words(&SOON)), 8]
    })
    .refused(),
    case("rt_sigqueueinfo", |w| {
        block();
        vec![sys(SYS_getpid, []), SIGUSR1 as usize, w.put(&info())]
    }),
    case("rt_tgsigqueueinfo", |w| {
        block();
        let p = sys(SYS_getpid, []);
        vec![p, p, SIGUSR1 as usize, w.put(&info())]
    }),
    case("pidfd_send_signal", |w| {
        block();
        vec![sys(SYS_pidfd_open, [sys(SYS_getpid, []), 0]), SIGUSR1 as usize, w.put(&info()), 0]
    }),
    case("sigaltstack", |w| vec![w.put(&words(&[w.base + (60 << 20), 0, 65536])), w.room(24)])
        .volatile(),
    case("signalfd", |w| vec![usize::MAX, w.put(&words(&[MASK])), 8]),
    case("signalfd4", |w| vec![usize::MAX, w.put(&words(&[MASK])), 8, 0]),
    case("nanosleep", |w| vec![w.put(&words(&SOON)), w.room(16)]),
    case("clock_nanosleep", |w| vec![1, 0, w.put(&words(&SOON)), w.room(16)]),
    case("getitimer", |w| vec![0, w.room(32)]),
    case("setitimer", |w| vec![0, w.put(&words(&[0, 0, 1000, 0])), w.room(32)]),
    case("gettimeofday", |w| vec![w.room(16), w.room(8)]).volatile(),
    case("settimeofday", |w| vec![w.put(&words(&[1, 2_000_000])), w.put(&halves(&[0, 0]))])
        .refused(),
    case("times", |w| vec![w.room(32)]).any().volatile(),
    case("adjtimex", |w| vec![w.both(&[0; 208])]).any().volatile(),
    case("clock_adjtime", |w| vec![0, w.both(&[0; 208])]).any().volatile(),
    case("time", |w| vec![w.room(8)]).any().volatile(),
    case("timer_create", |w| vec![1, w.put(&event(SIGEV_SIGNAL)), w.room(4)]),
    case("timer_settime", |w| vec![timer(), 0, w.put(&words(&[0, 0, 1000, 0])), w.room(32)]),
    case("timer_gettime", |w| vec![timer(), w.room(32)]),
    case("clock_settime", |w| vec![0, w.put(&words(&[1, 2_000_000_000]))]).refused(),
    case("clock_gettime", |w| vec![1, w.room(16)]).volatile(),
    case("clock_getres", |w| vec![1, w.room(16)]),
    case("timerfd_settime", |w| {
        vec![sys(SYS_timerfd_create, [1, 0]), 0, w.put(&words(&[0, 0, 1000, 0])), w.room(32)]
    }),
    case("timerfd_gettime", |w| vec![sys(SYS_timerfd_create, [1, 0]), w.room(32)]),
    case("shmctl:stat", |w| vec![shared(), 2, w.room(112)]).volatile(),
    case("shmctl:set", |w| vec![shared(), 1, w.put(&[0; 112])]),
    case("shmctl:info", |w| {
        shared();
        vec![0, 3, w.room(72)]
    }),
    case("shmctl:shm_info", |w| {
        shared();
        vec![0, 14, w.room(48)]
    })
    .volatile(),
    case("shmctl:shm_stat", |w| {
        shared();
        vec![0, 13, w.room(112)]
    })
    .any()
    .volatile(),
    case("msgctl:stat", |w| vec![messages(false), 2, w.room(120)]).volatile(),
    case("msgctl:set", |w| vec![messages(false), 1, w.put(&[0; 120])]),
    case("msgctl:info", |w| {
        messages(false);
        vec![0, 3, w.room(32)]
    }),
    case("msgctl:msg_info", |w| {
        messages(false);
        vec![0, 12, w.room(32)]
    }),
    case("msgsnd", |w| {
        vec![messages(false), w.put(&[words(&[1]), b"hello".to_vec()].concat()), 5, 0]
    }),
    case("msgrcv", |w| vec![messages(true), w.room(108), 100, 0, 0]),
    case("msgrcv:exact", |w| vec![messages(true), w.room(13), 5, 0, 0]),
    case("semctl:stat", |w| vec![semaphores(), 0, 2, w.room(104)]).volatile(),
    case("semctl:set", |w| vec![semaphores(), 0, 1, w.put(&[0; 104])]),
    case("semctl:getall", |w| vec![semaphores(), 0, 13, w.room(10)]),
    case("semctl:setall", |w| vec![semaphores(), 0, 17, w.put(&[1; 10])]),
    case("semctl:info", |w| {
        semaphores();
        vec![0, 0, 3, w.room(40)]
    }),
    case("semop", |w| vec![semaphores(), w.put(&[0, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0]), 2]),
    case("semtimedop", |w| {
        vec![semaphores(), w.put(&[0, 0, 255, 255, 0, 0]), 1, w.put(&words(&SOON))]
    })
    .refused(),
    case("mq_open", |w| {
        own();
        vec![
            w.text("q"),
            (O_CREAT | O_RDWR) as usize,
            0o600,
            w.put(&words(&[0, 4, 100, 0, 0, 0, 0, 0])),
        ]
    }),
    case("mq_unlink", |w| {
        queue();
        vec![w.text("q")]
    }),
    case("mq_timedsend", |w| vec![queue(), w.put(b"hello"), 5, 2, w.put(&words(&[1, 0]))]),
    case("mq_timedreceive", |w| {
        vec![filled(), w.room(100), 100, w.room(4), w.put(&words(&[1, 0]))]
    }),
    case("mq_notify", |w| vec![queue(), w.put(&event(SIGEV_SIGNAL))]),
    case("mq_getsetattr", |w| {
        vec![queue(), w.put(&words(&[O_NONBLOCK as usize, 0, 0, 0, 0, 0, 0, 0])), w.room(64)]
    }),
    case("futex:wait", |w| vec![w.word(&halves(&[5])), PRIVATE, 5, w.put(&words(&SOON))]).refused(),
    case("futex:differs", |w| vec![w.word(&halves(&[5])), PRIVATE, 6, w.put(&words(&SOON))])
        .refused(),
    case("futex:shared", |w| vec![w.word(&halves(&[5])), 0, 5, w.put(&words(&SOON))]).refused(),
    case("futex:wake", |w| vec![w.word(&halves(&[5])), 1 | PRIVATE, 1]),
    case("futex:wake_shared", |w| vec![w.word(&halves(&[5])), 1, 1]),
    case("futex:bitset", |w| {
        vec![w.word(&halves(&[5])), 9 | PRIVATE, 5, w.put(&words(&[1, 0])), 0, 1]
    })
    .refused(),
    case("futex:wake_bitset", |w| vec![w.word(&halves(&[5])), 10, 1, 0, 0, 1]),
    case("futex:requeue", |w| vec![w.word(&halves(&[5])), 3, 1, 1, w.word(&halves(&[5]))]),
    case("futex:cmp_requeue", |w| {
        vec![w.word(&halves(&[5])), 4 | PRIVATE, 1, 1, w.word(&halves(&[5])), 5]
    }),
    case("futex:cmp_requeue_shared", |w| {
        vec![w.word(&halves(&[5])), 4, 1, 1, w.word(&halves(&[5])), 5]
    }),
    case("futex:wake_op", |w| {
        vec![w.word(&halves(&[5])), 5 | PRIVATE, 1, 1, w.word(&halves(&[5])), 1 << 28 | 1 << 12]
    }),
    case("futex:wake_op_shared", |w| {
        vec![w.word(&halves(&[5])), 5, 1, 1, w.word(&halves(&[5])), 1 << 28 | 1 << 12]
    }),
    case("futex:lock_pi", |w| vec![w.word(&halves(&[0])), 6 | PRIVATE, 0, w.put(&words(&[1, 0]))])
        .volatile(),
    case("futex:trylock_pi", |w| vec![w.word(&halves(&[0])), 8, 0, 0]).volatile(),
    case("futex:unlock_pi", |w| {
        let tid = sys(SYS_gettid, []) as u32;
        vec![w.word(&halves(&[tid])), 7 | PRIVATE, 0, 0]
    })
    .volatile(),
    case("futex_waitv", |w| {
        let a = waiter(w, 2 | 128);
        let b = waiter(w, 2);
        vec![w.put(&[a, b].concat()), 2, 0, w.put(&words(&[1, 0])), 1]
    })
    .refused(),
    case("futex_wake", |w| vec![w.word(&halves(&[5])), 0xffff_ffff, 1, 2]),
    case("futex_wake:private", |w| vec![w.word(&halves(&[5])), 0xffff_ffff, 1, 2 | 128]),
    case("futex_wait", |w| {
        vec![w.word(&halves(&[5])), 5, 0xffff_ffff, 2 | 128, w.put(&words(&[1, 0])), 1]
    })
    .refused(),
    case("futex_wait:numa", |w| {
        vec![
            w.word(&halves(&[5, u32::MAX])),
            5,
            0xffff_ffff,
            2 | 4 | 128,
            w.put(&words(&[1, 0])),
            1,
        ]
    })
    .refused(),
    case("futex_requeue", |w| {
        let a = words(&[5, w.word(&halves(&[5])), 2]);
        let b = words(&[0, w.word(&halves(&[5])), 2]);
        vec![w.put(&[a, b].concat()), 0, 1, 1]
    }),
];
