//! Files by path.
use crate::files::{HERE, file};
use crate::run::{Case, case, halves, words};
use crate::world::sys;
use libc::*;

fn with_xattr() {
    let f = file(b"x");
    sys(SYS_fsetxattr, [f, c"user.a".as_ptr() as usize, c"value".as_ptr() as usize, 5, 0]);
}

pub const CASES: &[Case] = &[
    case("open", |w| {
        file(b"x");
        vec![w.text("file"), 0]
    }),
    case("open:long", |w| vec![w.text(&"./".repeat(2040)), 0]),
    case("open:too_long", |w| vec![w.text(&"./".repeat(2048)[..4095]), 0]),
    case("open:no_end", |w| vec![w.put(&[b'/'; 5000]), 0]).refused(),
    case("stat", |w| {
        file(b"x");
        vec![w.text("file"), w.room(144)]
    })
    .volatile(),
    case("lstat", |w| {
        file(b"x");
        vec![w.text("file"), w.room(144)]
    })
    .volatile(),
    case("access", |w| vec![w.text("."), 0]),
    case("truncate", |w| {
        file(b"x");
        vec![w.text("file"), 0]
    }),
    case("getcwd", |w| vec![w.room(4096), 4096]).volatile().any(),
    case("chdir", |w| vec![w.text(".")]),
    case("rename", |w| {
        file(b"x");
        vec![w.text("file"), w.text("other")]
    }),
    case("mkdir", |w| vec![w.text("d"), 0o700]),
    case("rmdir", |w| {
        std::fs::create_dir("d").unwrap();
        vec![w.text("d")]
    }),
    case("creat", |w| vec![w.text("f"), 0o600]),
    case("link", |w| {
        file(b"x");
        vec![w.text("file"), w.text("other")]
    }),
    case("unlink", |w| {
        file(b"x");
        vec![w.text("file")]
    }),
    case("symlink", |w| vec![w.text("file"), w.text("other")]),
    case("readlink", |w| {
        std::os::unix::fs::symlink("to", "l").unwrap();
        vec![w.text("l"), w.room(50), 50]
    }),
    case("chmod", |w| {
        file(b"x");
        vec![w.text("file"), 0o600]
    }),
    case("chown", |w| {
        file(b"x");
        vec![w.text("file"), 0, 0]
    }),
    case("lchown", |w| {
        file(b"x");
        vec![w.text("file"), 0, 0]
    }),
    case("utime", |w| {
        file(b"x");
        vec![w.text("file"), w.put(&words(&[1, 2]))]
    }),
    case("utimes", |w| {
        file(b"x");
        vec![w.text("file"), w.put(&words(&[1, 2, 3, 4]))]
    }),
    case("mknod", |w| vec![w.text("fifo"), S_IFIFO as usize | 0o600]),
    case("ustat", |w| {
        vec![
            std::os::unix::fs::MetadataExt::dev(&std::fs::metadata(".").unwrap()) as usize,
            w.room(32),
        ]
    })
    .volatile(),
    case("statfs", |w| vec![w.text("."), w.room(120)]).volatile(),
    case("chroot", |w| vec![w.text(".")]),
    case("mount", |w| {
        std::fs::create_dir("d").unwrap();
        sys(SYS_unshare, [CLONE_NEWNS as usize]);
        sys(SYS_mount, [0, c"/".as_ptr() as usize, 0, (MS_REC | MS_PRIVATE) as usize, 0]);
        vec![w.text("none"), w.text("d"), w.text("tmpfs"), 0, w.text("size=64k")]
    })
    .loose(),
    case("umount2", |w| vec![w.text("."), 0]).refused(),
    case("setxattr", |w| {
        file(b"x");
        vec![w.text("file"), w.text("user.b"), w.put(b"value"), 5, 0]
    }),
    case("lsetxattr", |w| {
        file(b"x");
        vec![w.text("file"), w.text("user.b"), w.put(b"value"), 5, 0]
    }),
    case("getxattr", |w| {
        with_xattr();
        vec![w.text("file"), w.text("user.a"), w.room(5), 5]
    }),
    case("lgetxattr", |w| {
        with_xattr();
        vec![w.text("file"), w.text("user.a"), w.room(5), 5]
    }),
    case("listxattr", |w| {
        with_xattr();
        vec![w.text("file"), w.room(50), 50]
    }),
    case("llistxattr", |w| {
        with_xattr();
        vec![w.text("file"), w.room(50), 50]
    }),
    case("removexattr", |w| {
        with_xattr();
        vec![w.text("file"), w.text("user.a")]
    }),
    case("lremovexattr", |w| {
        with_xattr();
        vec![w.text("file"), w.text("user.a")]
    }),
    case("openat", |w| {
        file(b"x");
        vec![HERE, w.text("file"), 0]
    }),
    case("mkdirat", |w| vec![HERE, w.text("d"), 0o700]),
    case("mknodat", |w| vec![HERE, w.text("fifo"), S_IFIFO as usize | 0o600]),
    case("fchownat", |w| {
        file(b"x");
        vec![HERE, w.text("file"), 0, 0, 0]
    }),
    case("futimesat", |w| {
        file(b"x");
        vec![HERE, w.text("file"), w.put(&words(&[1, 2, 3, 4]))]
    }),
    case("newfstatat", |w| {
        file(b"x");
        vec![HERE, w.text("file"), w.room(144), 0]
    })
    .volatile(),
    case("unlinkat", |w| {
        file(b"x");
        vec![HERE, w.text("file"), 0]
    }),
    case("renameat", |w| {
        file(b"x");
        vec![HERE, w.text("file"), HERE, w.text("o")]
    }),
    case("renameat2", |w| {
        file(b"x");
        vec![HERE, w.text("file"), HERE, w.text("o"), 1]
    }),
    case("linkat", |w| {
        file(b"x");
        vec![HERE, w.text("file"), HERE, w.text("o"), 0]
    }),
    case("symlinkat", |w| vec![w.text("file"), HERE, w.text("o")]),
    case("readlinkat", |w| {
        std::os::unix::fs::symlink("to", "l").unwrap();
        vec![HERE, w.text("l"), w.room(50), 50]
    }),
    case("fchmodat", |w| {
        file(b"x");
        vec![HERE, w.text("file"), 0o600]
    }),
    case("fchmodat2", |w| {
        file(b"x");
        vec![HERE, w.text("file"), 0o600, 0]
    }),
    case("faccessat", |w| vec![HERE, w.text("."), 0]),
    case("faccessat2", |w| vec![HERE, w.text("."), 0, 0]),
    case("utimensat", |w| {
        file(b"x");
        vec![HERE, w.text("file"), w.put(&words(&[1, 2, 3, 4])), 0]
    }),
    case("name_to_handle_at", |w| {
        file(b"x");
        vec![HERE, w.text("file"), w.both(&[halves(&[64, 0]), vec![0; 64]].concat()), w.room(4), 0]
    })
    .volatile(),
    case("open_by_handle_at", |w| {
        file(b"x");
        let mut handle = halves(&[64, 0]);
        handle.resize(72, 0);
        let mut mount = 0u32;
        sys(
            SYS_name_to_handle_at,
            [
                HERE,
                c"file".as_ptr() as usize,
                handle.as_mut_ptr() as usize,
                &raw mut mount as usize,
                0,
            ],
        );
        let bytes = 8 + handle[0] as usize;
        vec![sys(SYS_open, [c".".as_ptr() as usize, 0]), w.put(&handle[..bytes]), 0]
    })
    .volatile(),
    case("statx", |w| {
        file(b"x");
        vec![HERE, w.text("file"), 0, 0x7ff, w.room(256)]
    })
    .volatile(),
    case("openat2", |w| {
        file(b"x");
        vec![HERE, w.text("file"), w.put(&words(&[0, 0, 0])), 24]
    }),
    case("openat2:new", |w| {
        file(b"x");
        vec![HERE, w.text("file"), w.put(&words(&[0, 0, 0, 0, 0])), 40]
    }),
    case("open_tree", |w| vec![HERE, w.text("."), 0]),
    case("fsopen", |w| vec![w.text("tmpfs"), 0]),
    case("fspick", |w| vec![HERE, w.text("/proc"), 0]).any(),
    case("fsconfig", |w| {
        vec![sys(SYS_fsopen, [c"tmpfs".as_ptr() as usize, 0]), 1, w.text("size"), w.text("64k"), 0]
    }),
    case("mount_setattr", |w| vec![HERE, w.text("."), 0, w.put(&words(&[1, 0, 0, 0])), 32])
        .refused(),
    case("open_tree_attr", |w| vec![HERE, w.text("."), 0, w.put(&words(&[0, 0, 0, 0])), 32]).any(),
    case("move_mount", |w| vec![HERE, w.text("."), HERE, w.text("."), 0]).refused(),
    case("statmount", |w| {
        let mut x = [0u64; 32];
        sys(SYS_statx, [HERE, c"/".as_ptr() as usize, 0, 0x4000, x.as_mut_ptr() as usize]);
        vec![w.put(&words(&[24, x[18] as usize, 3])), w.room(600), 600, 0]
    })
    .volatile(),
    case("listmount", |w| vec![w.put(&words(&[24, usize::MAX, 0])), w.room(160), 20, 0])
        .volatile()
        .any(),
    case("setxattrat", |w| {
        file(b"x");
        let v = w.put(b"value");
        vec![HERE, w.text("file"), 0, w.text("user.b"), w.put(&words(&[v, 5])), 16]
    }),
    case("getxattrat", |w| {
        with_xattr();
        let v = w.room(5);
        vec![HERE, w.text("file"), 0, w.text("user.a"), w.put(&words(&[v, 5])), 16]
    }),
    case("listxattrat", |w| {
        with_xattr();
        vec![HERE, w.text("file"), 0, w.room(50), 50]
    }),
    case("removexattrat", |w| {
        with_xattr();
        vec![HERE, w.text("file"), 0, w.text("user.a")]
    }),
    case("file_getattr", |w| {
        file(b"x");
        vec![HERE, w.text("file"), w.room(24), 24, 0]
    }),
    case("file_setattr", |w| {
        file(b"x");
        vec![HERE, w.text("file"), w.put(&words(&[0, 0, 0])), 24, 0]
    }),
];
