//! A program that touches its memory sparsely takes what it takes without memfold.
use crate::common::{binaries, compile, memfold};
use std::process::{Command, Output};

fn kib(output: &Output) -> u64 {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().parse().unwrap()
}

#[test]
fn sparse_program_takes_no_more_than_without_memfold() {
    let Some(bin) = binaries() else { return };
    let program = compile("sparse");
    for how in ["forward", "backward", "random", "read"] {
        for pages in ["1", "2", "16", "512"] {
            let command = [program.path.as_str(), how, pages];
            let baseline = kib(&Command::new(command[0]).args(&command[1..]).output().unwrap());
            let arguments = [&["run", "--limit", "1G", "--"], &command[..]].concat();
            let folded_kib = kib(&memfold(&bin, &arguments).output().unwrap());
            let most = (baseline + 1024).max(baseline + baseline / 50);
            assert!(
                folded_kib <= most,
                "{how} {pages}: {folded_kib} KiB, {baseline} without memfold"
            );
        }
    }
    drop(program.scratch);
}
