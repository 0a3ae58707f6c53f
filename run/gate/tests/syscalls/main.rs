//! The proof of the table of system calls: calls made for real, with memory that only what the
//! table names makes present. See `world.rs`.
//!
//! `CASE=writev cargo test -p memfold-gate --test calls` runs the cases with that in their name.
mod world;
mod run;
mod files;
mod paths;
mod sockets;
mod process;
mod ipc;

#[test]
fn files_need_only_what_is_named() {
    run::all("files", files::CASES);
}

#[test]
fn paths_need_only_what_is_named() {
    run::all("paths", paths::CASES);
}

#[test]
fn sockets_need_only_what_is_named() {
    run::all("sockets", sockets::CASES);
}

#[test]
fn processes_need_only_what_is_named() {
    run::all("process", process::CASES);
}

#[test]
fn signals_times_and_queues_need_only_what_is_named() {
    run::all("ipc", ipc::CASES);
}

/// Calls that name memory and are in no case, and why.
const LEFT_OUT: &[(&str, &str)] = &[
    ("clone", "makes a task; the words it writes are seen in the tests of the gate's threads"),
    ("clone3", "as clone"),
    ("pivot_root", "changes the root of the whole mount name space"),
    ("reboot", "ends the machine"),
    ("kexec_load", "this kernel has none, and it would replace the kernel"),
    ("kexec_file_load", "as kexec_load"),
    ("finit_module", "this kernel takes no modules"),
    ("quotactl_fd", "no file system here has quotas; quotactl has the same code"),
    ("landlock_add_rule", "this kernel has no Landlock"),
    ("lsm_set_self_attr", "this kernel has no module that takes attributes"),
    ("process_madvise", "its first argument is a process; what it does is the keeper's"),
    ("io_uring_setup", "the gate refuses it"),
    ("io_uring_enter", "as io_uring_setup"),
    ("io_uring_register", "as io_uring_setup"),
];

#[test]
fn each_call_that_names_memory_has_a_case_or_a_reason() {
    use memfold_gate::syscalls::look_up;
    use std::collections::HashSet;
    let lists = [files::CASES, paths::CASES, sockets::CASES, process::CASES, ipc::CASES];
    let cases: HashSet<usize> = lists.into_iter().flatten().map(run::Case::number).collect();
    for entry in (0..1000).map(look_up).filter(|e| e.names) {
        let left_out = LEFT_OUT.iter().any(|(name, _)| *name == entry.name);
        let has = cases.contains(&(entry.number as usize));
        assert!(has != left_out, "{}: case {has}, left out {left_out}", entry.name);
    }
}
