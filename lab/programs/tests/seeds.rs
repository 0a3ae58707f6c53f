//! A fixed set of generated programs, each in one world. `make programs` draws new ones.
use std::path::Path;
use std::process::Command;

/// Programs of the fixed set: each world has several.
const PROGRAMS: u64 = 22;

#[test]
fn c1_generated_programs_find_every_byte_in_every_world() {
    let bin = std::env::var("MEMFOLD_BIN_DIR").unwrap_or_default();
    if !Path::new(&bin).join("memfold").is_file() {
        let text = "no memfold in MEMFOLD_BIN_DIR: run scripts/check build";
        assert!(std::env::var("CI").as_deref() != Ok("true"), "{text}");
        eprintln!("SKIPPED, NOTHING WAS TESTED: {text}");
        return;
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_memfold-programs"));
    command.args(["hunt", "--from=1", &format!("--seeds={PROGRAMS}"), "--by-turns", "--shrink=0"]);
    let output = command.args(["--bin", &bin]).output().expect("the hunt runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    println!("{text}");
}
