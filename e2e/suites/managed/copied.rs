//! Forks with a swap file: a child reads its parent's file and writes to its own, and both find
//! every byte. Rows B3, Z4.
#![cfg(target_arch = "x86_64")]
use crate::common::{
    Mounted, Scratch, assert_all_right, can_make_worlds, compile, folded_in, managed_in,
};
use memfold_testkit::redis::{self, Server};

/// For 20 MiB of incompressible data, of which two fifths may be in memory.
const SMALL: [&str; 4] = ["--resident", "8M", "--swap-keep-free", "64M"];

#[track_caller]
fn assert_right(more: &[&str], promises: &[&str]) {
    let swap = Scratch::new();
    let flags = [&SMALL[..], &["--swap", swap.0.to_str().unwrap()], more].concat();
    assert_all_right("", &flags, "copied", 20, promises);
}

#[test]
fn parent_and_children_read_own_and_inherited_data() {
    assert_right(&[], &["both", "parts", "many", "busy"]);
    assert_right(&["--swap-encrypt", "off"], &["both"]);
}

#[test]
#[ignore = "more of the kind: make torture"]
fn parent_and_busy_children_find_what_is_not_encrypted() {
    assert_right(&["--swap-encrypt", "off"], &["busy", "generations"]);
}

#[test]
fn generations_deeper_than_files_are_stacked_find_every_byte() {
    assert_right(&[], &["generations"]);
}

#[test]
fn a_child_outlives_its_parent() {
    assert_right(&[], &["orphan"]);
}

#[test]
fn swap_file_survives_closed_descriptors_and_lost_directory() {
    assert_right(&[], &["closed"]);
    if can_make_worlds() {
        assert_right(&[], &["barred"]);
    }
}

#[test]
fn child_that_leaves_its_user_namespace_keeps_both_files() {
    if can_make_worlds() {
        assert_right(&[], &["unshared"]);
    }
}

#[test]
fn a_child_without_userfaultfd_has_all_of_the_files_back() {
    assert_right(&[], &["filter"]);
}

/// The file holds at most 52 MiB. More than that is written in total, so slots must be reused.
#[test]
fn pages_an_ended_child_has_read_are_written_again() {
    let (swap, program) = (Scratch::new(), compile("copied"));
    let more = ["--swap", swap.0.to_str().unwrap(), "--swap-size", "52M"];
    let flags = [&SMALL[..], &more].concat();
    for promise in ["again", "execs"] {
        let Some((output, figures)) = folded_in("", &flags, 10, &[&program.path, promise]) else {
            return;
        };
        assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"right\n"[..]));
        assert!(figures["pswpout"].as_u64() > Some(130 << 8), "{promise}: {figures}");
    }
}

/// The pool's overflow is packed into the file.
#[test]
fn packed_blocks_are_read_across_forks() {
    let swap = Scratch::new();
    let flags = ["--limit", "12M", "--swap-keep-free", "64M", "--swap", swap.0.to_str().unwrap()];
    assert_all_right("", &flags, "children", 48, &["generations"]);
    if can_make_worlds() {
        assert_all_right("", &flags, "shut", 32, &["filter"]);
    }
}

#[test]
#[ignore = "a variant: make test-all"]
fn packed_blocks_are_read_by_children_of_threads_and_with_parts_left_out() {
    let swap = Scratch::new();
    let flags = ["--limit", "12M", "--swap-keep-free", "64M", "--swap", swap.0.to_str().unwrap()];
    assert_all_right("", &flags, "children", 48, &["threads"]);
    assert_all_right("", &flags, "apart", 300, &["parts"]);
}

#[test]
#[ignore = "more of the kind: make torture"]
fn packed_blocks_are_read_across_forks_of_all_kinds() {
    let swap = Scratch::new();
    let flags = ["--limit", "12M", "--swap-keep-free", "64M", "--swap", swap.0.to_str().unwrap()];
    assert_all_right("", &flags, "children", 48, &["daemon"]);
    assert_all_right("", &flags, "forks", 48, &["libc"]);
    assert_all_right("", &flags, "apart", 300, &["marked"]);
    if can_make_worlds() {
        assert_all_right("", &flags, "shut", 32, &["proc", "filter_small"]);
    }
}

#[test]
fn full_file_system_loses_no_data_in_parent_or_child() {
    let scratch = Scratch::new();
    let dir = scratch.path("small");
    let Some(_mounted) = Mounted::tmpfs(&dir, "25M") else { return };
    let flags = ["--resident", "8M", "--swap-keep-free", "1M", "--swap", &dir];
    assert_all_right("", &flags, "copied", 20, &["both", "generations", "execs"]);
}

/// Asserts the same as [`assert_right`], with a part of the data in a remote store.
#[track_caller]
fn assert_right_with_remote(promises: &[&str]) {
    if !redis::is_there() {
        return;
    }
    let server = Server::start(&[]);
    let url = server.url();
    let flags = ["--swap-size", "10M", "--remote-at", "50", "--remote", &url];
    assert_right(&flags, promises);
    assert_eq!(server.keys(), [""; 0], "no key is left");
}

#[test]
fn children_read_inherited_data_from_the_remote_store() {
    assert_right_with_remote(&["both"]);
}

#[test]
#[ignore = "a variant: make test-all"]
fn generations_and_orphans_read_inherited_data_from_the_remote_store() {
    assert_right_with_remote(&["generations", "orphan"]);
}

#[test]
#[ignore = "more of the kind: make torture"]
fn with_a_remote_store_children_of_all_kinds_read_there() {
    assert_right_with_remote(&["parts", "busy", "closed", "execs", "filter"]);
    if can_make_worlds() {
        assert_right_with_remote(&["barred"]);
    }
}

#[test]
fn a_fork_reads_nothing_of_a_remote_store() {
    if !redis::is_there() {
        return;
    }
    let (server, swap, program) = (Server::start(&[]), Scratch::new(), compile("copied"));
    let (swap, url) = (swap.0.to_str().unwrap(), server.url());
    let more = ["--swap", swap, "--swap-size", "10M", "--remote-at", "50", "--remote", &url];
    let flags = [&SMALL[..], &more].concat();
    let command = [&*program.path, "idle"];
    let Some((output, figures)) = folded_in("", &flags, 10, &command) else { return };
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"right\n"[..]));
    // All data was written and read once before the 12 forks.
    let (out, back) = (figures["remote_out"].as_u64(), figures["remote_in"].as_u64());
    assert!(out > Some(6 << 8) && back < Some(40 << 8), "{figures}");
}

#[test]
fn a_fork_that_lacks_the_memory_to_bring_all_home_is_refused() {
    if !can_make_worlds() || !redis::is_there() {
        return;
    }
    let (server, program, scratch) = (Server::start(&[]), compile("copied"), Scratch::new());
    let meminfo = scratch.file("meminfo", "MemTotal: 8388608 kB\nMemAvailable: 1024 kB\n", 0o644);
    let world = format!("mount --bind {meminfo} /proc/meminfo && exec \"$@\"");
    let (swap, url) = (scratch.0.to_str().unwrap(), server.url());
    let flags = [&SMALL[..], &["--swap", swap, "--remote", &url]].concat();
    // More generations than the limit of stacked files.
    let Some(output) = managed_in(&world, &flags, &[&program.path, "generations"]) else { return };
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{text}");
    assert!(
        output.stdout.is_empty() && text.contains("from the swap file and the remote store"),
        "{text}"
    );
    assert!(text.contains("only 1.0 MiB of memory are free"), "{text}");
}
