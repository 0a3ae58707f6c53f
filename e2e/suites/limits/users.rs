//! Processes of a run that become another user. They continue, and can't affect the others.
use crate::common::{
    Scratch, assert_right, assert_right_with, can_make_worlds, compile, managed_in,
};

/// A child that wrote a smaller limit into the shared table once ended its parent.
#[test]
fn process_without_its_old_rights_harms_no_other() {
    if !can_make_worlds() {
        return;
    }
    let program = compile("users");
    // Wrong figures that it writes for its own user are printed as they are.
    let flags = ["--limit", "64M", "--on-full", "stop"];
    let Some(output) = managed_in("", &flags, &[&program.path, "spoils"]) else { return };
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"right\n"[..]), "{errors}");
}

/// A process asks at the run's socket for the table of its new user. `memfold run` is stopped
/// meanwhile, and a process of a third user sends its own table as an answer to each socket.
#[test]
fn process_of_another_user_cannot_answer_for_the_run() {
    if !can_make_worlds() {
        return;
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/programs/forged_answers.py");
    let Some(output) = managed_in("", &["--limit", "64M"], &["python3", script]) else { return };
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"right\n"[..]), "{errors}");
}

#[test]
fn engine_gives_up_what_the_program_gives_up_for_good() {
    if can_make_worlds() {
        assert_right("users", 32, &["threads", "while", "vfork", "processes", "differ", "keeps"]);
    }
}

/// Worker threads wait for buffers that other threads return. They once hung when all ended at
/// once.
#[test]
fn engine_with_a_swap_file_gives_up_what_the_program_gives_up() {
    if can_make_worlds() {
        let scratch = Scratch::new();
        let flags = ["--limit", "8M", "--swap", scratch.0.to_str().unwrap()];
        assert_right_with(&flags, "users", 32, &["threads", "vfork"]);
    }
}
