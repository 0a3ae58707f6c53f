//! A fixed set of generated programs, each in one world, and programs that memfold once ran wrongly.
//! `make programs` draws new ones.
use memfold_testkit::scratch::Scratch;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// Programs of the fixed set: each world has several.
const PROGRAMS: u64 = 22;

/// Returns the directory of the built `memfold`, or `None` without one, and says so.
fn built() -> Option<PathBuf> {
    let directory = PathBuf::from(std::env::var_os("MEMFOLD_BIN_DIR").unwrap_or_default());
    if directory.join("memfold").is_file() {
        return Some(directory);
    }
    let text = "no memfold in MEMFOLD_BIN_DIR: run scripts/check build";
    assert!(std::env::var("CI").as_deref() != Ok("true"), "{text}");
    eprintln!("SKIPPED, NOTHING WAS TESTED: {text}");
    None
}

#[test]
fn c1_generated_programs_find_every_byte_in_every_world() {
    let Some(bin) = built() else { return };
    let mut command = Command::new(env!("CARGO_BIN_EXE_memfold-programs"));
    command.args(["hunt", "--from=1", &format!("--seeds={PROGRAMS}"), "--by-turns", "--shrink=0"]);
    let output = command.arg("--bin").arg(bin).output().expect("the hunt runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    println!("{text}");
}

/// Under a limit of 8 MiB.
#[test]
fn c1_programs_that_went_wrong_once_print_what_they_print_plainly() {
    let Some(bin) = built() else { return };
    const RUNTIME: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/runtime");
    const COMMON: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../e2e/programs");
    let scratch = Scratch::new();
    for file in fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/found")).unwrap() {
        let file = file.unwrap().path();
        let (name, source) = (file.file_stem().unwrap(), fs::read_to_string(&file).unwrap());
        let flags = ["-pthread", "-I", RUNTIME, "-I", COMMON];
        let program = scratch.compile(name.to_str().unwrap(), &source, &flags);
        let plain = Command::new(&program).output().unwrap();
        let mut run = Command::new(bin.join("memfold"));
        let managed = run.args(["run", "--limit", "8M", "--", &program]).output().unwrap();
        assert_eq!(managed.status, plain.status, "{file:?}: {managed:?}");
        assert_eq!(managed.stdout, plain.stdout, "{file:?}: {managed:?}");
    }
}
