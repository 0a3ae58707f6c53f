//! Threads, processes, memory policy and the machine.
use crate::files::{file, vector};
use crate::run::{Case, case, halves, words};
use crate::world::sys;
use libc::*;

/// A child that has ended, but was not waited for.
fn ended() -> usize {
    let child = sys(SYS_fork, []);
    if child == 0 {
        sys(SYS_exit_group, [3]);
    }
    let mut info = [0u8; 128];
    sys(SYS_waitid, [1, child, info.as_mut_ptr() as usize, (WEXITED | WNOWAIT) as usize, 0]);
    child
}

/// A child that stands still under our eyes.
fn traced() -> usize {
    let child = sys(SYS_fork, []);
    if child == 0 {
        sys(SYS_ptrace, [0, 0, 0, 0]);
        sys(SYS_kill, [sys(SYS_getpid, []), SIGSTOP as usize]);
        sys(SYS_exit_group, [0]);
    }
    let mut status = 0u32;
    sys(SYS_wait4, [child, &raw mut status as usize, 0, 0]);
    child
}

fn me() -> usize {
    sys(SYS_getpid, [])
}

fn capabilities() -> Vec<u8> {
    let (head, mut data) = (halves(&[0x2008_0522, 0]), vec![0u8; 24]);
    sys(SYS_capget, [head.as_ptr() as usize, data.as_mut_ptr() as usize]);
    data
}

pub const CASES: &[Case] = &[
    case("wait4", |w| vec![ended(), w.room(4), 0, w.room(144)]).any().volatile(),
    case("waitid", |w| vec![1, ended(), w.room(128), WEXITED as usize, w.room(144)]).volatile(),
    case("getrlimit", |w| vec![7, w.room(16)]),
    case("setrlimit", |w| vec![4, w.put(&words(&[0, 0]))]),
    case("prlimit64", |w| vec![0, 4, w.put(&words(&[0, 0])), w.room(16)]),
    case("getrusage", |w| vec![0, w.room(144)]).volatile(),
    case("getgroups", |w| {
        let g = halves(&[1, 2]);
        sys(SYS_setgroups, [2, g.as_ptr() as usize]);
        vec![2, w.room(8)]
    }),
    case("setgroups", |w| vec![3, w.put(&halves(&[1, 2, 3]))]),
    case("getresuid", |w| vec![w.room(4), w.room(4), w.room(4)]),
    case("getresgid", |w| vec![w.room(4), w.room(4), w.room(4)]),
    case("capget", |w| vec![w.both(&halves(&[0x2008_0522, 0])), w.room(24)]),
    case("capget:first", |w| vec![w.both(&halves(&[0x1998_0330, 0])), w.room(12)]),
    case("capget:unknown", |w| vec![w.both(&halves(&[5, 0])), w.room(24)]).refused(),
    case("capset", |w| vec![w.put(&halves(&[0x2008_0522, 0])), w.put(&capabilities())]),
    case("sched_setparam", |w| vec![0, w.put(&halves(&[0]))]),
    case("sched_getparam", |w| vec![0, w.room(4)]),
    case("sched_setscheduler", |w| vec![0, 3, w.put(&halves(&[0]))]),
    case("sched_rr_get_interval", |w| vec![0, w.room(16)]).volatile(),
    case("sched_setaffinity", |w| vec![0, 8, w.put(&words(&[3]))]),
    case("sched_getaffinity", |w| vec![0, 128, w.room(128)]),
    case("sched_setattr", |w| vec![0, w.put(&[halves(&[48]), vec![0; 44]].concat()), 0]),
    case("sched_setattr:larger", |w| vec![0, w.both(&[halves(&[64]), vec![1; 60]].concat()), 0])
        .refused(),
    case("sched_getattr", |w| vec![0, w.room(56), 56, 0]),
    case("modify_ldt", |w| vec![0, w.room(64), 64]),
    case("modify_ldt:write", |w| vec![1, w.put(&halves(&[0, 0, 0, 0x28])), 16]),
    case("prctl:set_name", |w| vec![15, w.text("a thread")]),
    case("prctl:long_name", |w| vec![15, w.put(&[b'x'; 15])]),
    case("prctl:get_name", |w| vec![16, w.room(16)]),
    case("prctl:get_pdeathsig", |w| vec![2, w.room(4)]),
    case("prctl:get_tid_address", |w| vec![40, w.room(8)]),
    case("prctl:get_subreaper", |w| vec![37, w.room(4)]),
    case("prctl:get_tsc", |w| vec![25, w.room(4)]),
    case("prctl:get_auxv", |w| vec![0x4155_5856, w.room(300), 300, 0, 0]).volatile(),
    case("prctl:seccomp", |w| {
        sys(SYS_prctl, [38, 1, 0, 0, 0]);
        let f = w.put(&words(&[6 | 0x7fff_0000 << 32]));
        vec![22, 2, w.put(&words(&[1, f]))]
    }),
    case("arch_prctl:get_fs", |w| vec![0x1003, w.room(8)]).volatile(),
    case("seccomp", |w| {
        sys(SYS_prctl, [38, 1, 0, 0, 0]);
        let f = w.put(&words(&[6 | 0x7fff_0000 << 32]));
        vec![1, 0, w.put(&words(&[1, f]))]
    }),
    case("seccomp:action", |w| vec![2, 0, w.put(&halves(&[0x7fff_0000]))]),
    case("seccomp:sizes", |w| vec![3, 0, w.room(6)]),
    case("get_robust_list", |w| vec![0, w.room(8), w.room(8)]).volatile(),
    case("getcpu", |w| vec![w.room(4), w.room(4), 0]).volatile(),
    case("ptrace:peek", |w| vec![2, traced(), w.base, w.room(8)]).any().volatile(),
    case("ptrace:getregs", |w| vec![12, traced(), 0, w.room(216)]).volatile(),
    case("ptrace:getfpregs", |w| vec![14, traced(), 0, w.room(512)]).volatile(),
    case("ptrace:getregset", |w| {
        let r = w.room(216);
        vec![0x4204, traced(), 1, w.both(&words(&[r, 216]))]
    })
    .volatile(),
    case("ptrace:getsiginfo", |w| vec![0x4202, traced(), 0, w.room(128)]).volatile(),
    case("ptrace:getsigmask", |w| vec![0x420a, traced(), 8, w.room(8)]),
    case("ptrace:setsigmask", |w| vec![0x420b, traced(), 8, w.put(&words(&[0]))]),
    case("ptrace:peeksiginfo", |w| {
        vec![0x4209, traced(), w.put(&words(&[0, 1 << 32])), w.room(128)]
    })
    .volatile(),
    case("process_vm_readv", |w| {
        let l = vector(w, &[b"aaa", &[9; 5000]], true);
        let r = vector(w, &[b"bcd", &[7; 5000]], false);
        vec![me(), l, 2, r, 2, 0]
    }),
    case("process_vm_writev", |w| {
        let l = vector(w, &[b"aaa", &[9; 5000]], false);
        let r = vector(w, &[b"bcd", &[7; 5000]], true);
        vec![me(), l, 2, r, 2, 0]
    }),
    case("process_vm_readv:other", |w| {
        let key = *b"here";
        let l = vector(w, &[b"aaaa"], true);
        let r = w.put(&words(&[key.as_ptr() as usize, 4]));
        vec![traced(), l, 1, r, 1, 0]
    })
    .volatile(),
    case("mincore", |w| vec![w.base + (60 << 20), 3 * 4096, w.room(3)]),
    case("set_mempolicy", |w| vec![2, w.put(&words(&[1])), 64]),
    case("get_mempolicy", |w| vec![w.room(4), w.room(128), 1024, 0, 0]),
    case("get_mempolicy:node", |w| vec![w.room(4), 0, 0, w.put(b"x"), 3]).any(),
    case("mbind", |w| vec![w.base + (60 << 20), 4096, 2, w.put(&words(&[1])), 64, 0]),
    case("migrate_pages", |w| vec![0, 64, w.put(&words(&[1])), w.put(&words(&[1]))]),
    case("move_pages", |w| {
        vec![0, 1, w.put(&words(&[w.base + (60 << 20)])), w.put(&halves(&[0])), w.room(4), 0]
    })
    .volatile(),
    case("uname", |w| vec![w.room(390)]),
    case("sysinfo", |w| vec![w.room(112)]).volatile(),
    case("syslog", |w| vec![3, w.room(500), 500]).volatile().any(),
    case("sysfs", |w| vec![1, w.text("proc")]),
    case("sysfs:name", |w| vec![2, 0, w.room(32)]),
    case("sethostname", |w| {
        sys(SYS_unshare, [CLONE_NEWUTS as usize]);
        vec![w.put(b"name"), 4]
    }),
    case("setdomainname", |w| {
        sys(SYS_unshare, [CLONE_NEWUTS as usize]);
        vec![w.put(b"name"), 4]
    }),
    case("delete_module", |w| vec![w.text("no_such_module"), 0]).refused(),
    case("init_module", |w| vec![w.put(b"nothing"), 7, w.text("a=b")]).refused(),
    case("acct", |w| vec![w.text("no such file")]).refused(),
    case("swapon", |w| {
        file(b"x");
        vec![w.text("file"), 0]
    })
    .refused(),
    case("swapoff", |w| {
        file(b"x");
        vec![w.text("file")]
    })
    .refused(),
    case("quotactl", |w| vec![0x8000_0700, w.text("/dev/null"), 0, w.room(72)]).refused(),
    case("add_key", |w| {
        vec![w.text("user"), w.text("memfold"), w.put(b"secret"), 6, usize::MAX - 1]
    })
    .any(),
    case("request_key", |w| vec![w.text("user"), w.text("memfold none"), 0, 0]).refused(),
    case("keyctl:describe", |w| {
        let k = sys(
            SYS_add_key,
            [
                c"user".as_ptr() as usize,
                c"m".as_ptr() as usize,
                c"secret".as_ptr() as usize,
                6,
                usize::MAX - 1,
            ],
        );
        vec![6, k, w.room(200), 200]
    })
    .any()
    .volatile(),
    case("keyctl:read", |w| {
        let k = sys(
            SYS_add_key,
            [
                c"user".as_ptr() as usize,
                c"m".as_ptr() as usize,
                c"secret".as_ptr() as usize,
                6,
                usize::MAX - 1,
            ],
        );
        vec![11, k, w.room(6), 6]
    }),
    case("keyctl:update", |w| {
        let k = sys(
            SYS_add_key,
            [
                c"user".as_ptr() as usize,
                c"m".as_ptr() as usize,
                c"secret".as_ptr() as usize,
                6,
                usize::MAX - 1,
            ],
        );
        vec![2, k, w.put(b"other"), 5]
    }),
    case("perf_event_open", |w| {
        vec![
            w.both(&[halves(&[1, 128]), words(&[1]), vec![0; 112]].concat()),
            0,
            usize::MAX,
            usize::MAX,
            0,
        ]
    })
    .any(),
    case("perf_event_open:larger", |w| {
        vec![
            w.both(&[halves(&[1, 400]), words(&[1]), vec![1; 384]].concat()),
            0,
            usize::MAX,
            usize::MAX,
            0,
        ]
    })
    .refused(),
    case("getrandom", |w| vec![w.room(5000), 5000, 0]).volatile(),
    case("bpf:map_create", |w| {
        vec![0, w.both(&halves(&[1, 4, 8, 10, 0, 0, 0, 0, 0, 0, 0, 0])), 48]
    }),
    case("bpf:update", |w| {
        let m = map();
        let (k, v) = (w.put(&halves(&[1])), w.put(&words(&[5])));
        vec![2, w.both(&words(&[m, k, v, 0])), 32]
    }),
    case("bpf:lookup", |w| {
        let m = map();
        let (k, v) = (w.put(&halves(&[7])), w.room(8));
        vec![1, w.both(&words(&[m, k, v, 0])), 32]
    }),
    case("bpf:next", |w| {
        let m = map();
        let (k, v) = (w.put(&halves(&[9])), w.room(4));
        vec![4, w.both(&words(&[m, k, v, 0])), 32]
    }),
    case("bpf:info", |w| {
        let m = map();
        let i = w.room(80);
        vec![15, w.both(&words(&[m | 80 << 32, i])), 16]
    })
    .volatile(),
    case("bpf:program", |w| {
        let p = w.put(&words(&[0xb7, 0x95]));
        let l = w.text("GPL");
        let log = w.room(200);
        vec![5, w.both(&words(&[1 | 2 << 32, p, l, 1 | 200 << 32, log, 0])), 48]
    })
    .any()
    .volatile(),
    case("landlock_create_ruleset", |w| vec![w.put(&words(&[1])), 8, 0]).any(),
    case("lsm_list_modules", |w| vec![w.room(256), w.both(&halves(&[256])), 0]).any(),
    case("lsm_get_self_attr", |w| vec![100, w.room(256), w.both(&halves(&[256])), 0]).refused(),
    case("execve", |w| {
        let a = w.text("/no such");
        let v = w.put(&words(&[a, 0]));
        vec![w.text("/no such"), v, w.put(&words(&[a, 0]))]
    })
    .refused(),
    case("execveat", |w| {
        let a = w.text("/no such");
        let v = w.put(&words(&[a, 0]));
        vec![0, w.text("/no such"), v, w.put(&words(&[a, 0])), 0]
    })
    .refused(),
    case("execve:true", |w| {
        let a = w.text("/bin/no");
        let f = w.text("./file");
        file(b"not a program");
        let v = w.put(&words(&[a, f, 0]));
        vec![f, v, w.put(&words(&[0]))]
    })
    .refused(),
];

fn map() -> usize {
    let attr = halves(&[1, 4, 8, 10, 0, 0, 0, 0, 0, 0, 0, 0]);
    let m = sys(SYS_bpf, [0, attr.as_ptr() as usize, 48]);
    let (k, v) = (halves(&[7]), words(&[70]));
    let attr = words(&[m, k.as_ptr() as usize, v.as_ptr() as usize, 0]);
    sys(SYS_bpf, [2, attr.as_ptr() as usize, 32]);
    m
}
