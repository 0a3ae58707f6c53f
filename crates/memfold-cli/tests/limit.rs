//! What `--limit` bounds under `memfold run`.
mod common;
use common::assert_right_with;

#[test]
fn a_program_that_allocates_fast_hardly_passes_its_limit() {
    // The program itself compares its peak with 256 MiB and 32 more.
    assert_right_with(&["--limit", "256M"], "overshoot", &["large", "malloc", "mmap", "brk"]);
}

#[test]
fn processes_of_a_run_share_its_limit() {
    // The program adds up what its processes hold.
    assert_right_with(&["--limit", "128M"], "family", &["exec", "fork"]);
}
