use super::row::COUNT;
use super::{look_up, sizes};
use std::process::Command;

/// Calls that the headers of this machine may not have yet, as linux-raw-sys 0.12.1 has them
/// (generated from the kernel's headers). `uretprobe` and `uprobe` exist only on x86
/// (arch/x86/entry/syscalls/syscall_64.tbl of Linux 6.18).
const NEWEST: &[(&str, usize)] = &[
    ("uretprobe", 335),
    ("uprobe", 336),
    ("cachestat", 451),
    ("fchmodat2", 452),
    ("map_shadow_stack", 453),
    ("futex_wake", 454),
    ("futex_wait", 455),
    ("futex_requeue", 456),
    ("statmount", 457),
    ("listmount", 458),
    ("lsm_get_self_attr", 459),
    ("lsm_set_self_attr", 460),
    ("lsm_list_modules", 461),
    ("mseal", 462),
    ("setxattrat", 463),
    ("getxattrat", 464),
    ("listxattrat", 465),
    ("removexattrat", 466),
    ("open_tree_attr", 467),
    ("file_getattr", 468),
    ("file_setattr", 469),
];

fn header() -> Vec<(String, usize)> {
    let path = "/usr/include/x86_64-linux-gnu/asm/unistd_64.h";
    let text = std::fs::read_to_string(path).expect("the kernel's headers (linux-libc-dev)");
    let of = |line: &str| {
        let (name, number) = line.strip_prefix("#define __NR_")?.split_once(' ')?;
        Some((name.to_owned(), number.trim().parse().ok()?))
    };
    text.lines().filter_map(of).collect()
}

#[test]
fn each_call_of_the_headers_has_its_row() {
    let header = header();
    assert!(header.len() > 350);
    let newest = NEWEST.iter().map(|&(name, number)| (name.to_owned(), number));
    let mut all: Vec<_> = header.into_iter().chain(newest).collect();
    for (name, number) in all.iter().filter(|(_, number)| *number < COUNT) {
        let entry = look_up(*number);
        assert_eq!((entry.name, entry.number as usize), (name.as_str(), *number));
    }
    all.sort();
    all.dedup();
    let in_table = (0..1000).filter(|&nr| look_up(nr).is_known()).count();
    // The table has no other calls than these lists.
    assert_eq!(in_table, all.iter().filter(|(_, number)| *number < COUNT).count());
}

#[test]
fn numbers_without_a_call_are_unknown() {
    for nr in [337, 400, 423, 470, 512, 547, 1000, usize::MAX] {
        assert!(!look_up(nr).is_known(), "{nr}");
    }
}

#[test]
fn sizes_match_the_kernel_headers() {
    let mut program = String::from(INCLUDES);
    for (name, bytes) in sizes::ALL {
        program += &format!("_Static_assert(sizeof({name}) == {bytes}, \"{name}\");\n");
    }
    let dir = std::env::temp_dir().join(format!("memfold-gate-sizes-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    let source = dir.join("sizes.c");
    std::fs::write(&source, program).unwrap();
    let gcc = Command::new("gcc").args(["-fsyntax-only"]).arg(&source).output();
    std::fs::remove_dir_all(&dir).unwrap();
    let gcc = gcc.expect("gcc");
    assert!(gcc.status.success(), "{}", String::from_utf8_lossy(&gcc.stderr));
}

/// The headers in which C declares the structs. Three structs that only the kernel's own sources
/// have are written out.
const INCLUDES: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/capability.h>
#include <linux/dqblk_xfs.h>
#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/kexec.h>
#include <mqueue.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/msg.h>
#include <sys/resource.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysinfo.h>
#include <sys/time.h>
#include <sys/times.h>
#include <sys/timex.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/utsname.h>
#include <time.h>
#include <utime.h>
struct kernel_sigaction { void *handler; unsigned long flags; void *restorer; unsigned long mask; };
struct old_ustat { int free; unsigned long inodes; char name[6], pack[6]; };
struct if_dqblk { __u64 space[3], inodes[3], times[2]; __u32 valid; };
struct if_nextdqblk { __u64 space[3], inodes[3], times[2]; __u32 valid, id; };
struct if_dqinfo { __u64 grace[2]; __u32 flags, valid; };
"#;
