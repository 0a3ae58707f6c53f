//! Children with an environment of their own are managed and don't see memfold's variables. Where
//! the variables can't be added, they run unmanaged.
#![cfg(target_arch = "x86_64")]
use crate::common::real::{installed, missing};
use crate::common::{Scratch, binaries, compile, folded_in, json, memfold, printed_in, run};
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

const FLAGS: &[&str] = &["--resident", "16M"];
const LEAST_MIB: u64 = 96;

/// Asserts that a program started by the words of `launcher` is folded.
#[track_caller]
fn assert_folded(launcher: &[&str]) {
    let heap = compile("heap");
    let command = [launcher, &[heap.path.as_str(), "fast"]].concat();
    let Some((output, _)) = folded_in("", FLAGS, LEAST_MIB, &command) else { return };
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"right\n"[..]), "{errors}");
    assert!(!errors.contains("warning"), "{launcher:?}: {errors}");
}

/// gperftools' full allocator is left out: it recurses in libc functions that the library replaces,
/// with or without this.
const ALLOCATORS: [&str; 3] = ["libjemalloc.so.2", "libmimalloc.so.2", "libtcmalloc_minimal.so.4"];

#[test]
fn child_with_a_preloaded_allocator_is_folded() {
    for name in ALLOCATORS {
        if !Path::new("/usr/lib/x86_64-linux-gnu").join(name).exists() {
            missing(&format!("{name} is not installed"));
            continue;
        }
        let script = format!(
            "b = bytearray(128 << 20)\nfor i in range(0, len(b), 4096): b[i] = i // 4096 % 251\n\
             assert all(b[i] == i // 4096 % 251 for i in range(0, len(b), 4096))\n\
             assert any('{name}' in line for line in open('/proc/self/maps'))\n\
             import os; print(os.environ['LD_PRELOAD'])"
        );
        let load = format!("LD_PRELOAD={name}");
        let python = ["/usr/bin/python3", "-c", &script];
        let words_inside = [&["env", &load], &python[..]].concat();
        let Some(output_inside) = printed_in("", FLAGS, LEAST_MIB, &words_inside) else { return };
        assert_eq!(output_inside, format!("{name}\n").as_bytes());
        let (Some(bin), scratch) = (binaries(), Scratch::new()) else { return };
        let figures = scratch.path("figures");
        let words = ["run", "--resident", "16M", "--stats-file", &figures, "--"];
        let mut command_outside = memfold(&bin, &[&words[..], &python].concat());
        let output = command_outside.env("LD_PRELOAD", name).output().unwrap();
        assert!(output.status.success() && output.stdout == output_inside, "{name}: {output:?}");
        assert!(json(&figures)["peak_folded_bytes"].as_u64() > Some(LEAST_MIB << 20), "{name}");
    }
}

#[test]
fn child_with_an_empty_environment_is_folded() {
    let environment_program = compile("passed");
    assert_folded(&["env", "-i"]);
    assert_folded(&["sh", "-c", "unset LD_PRELOAD MEMFOLD_RUN; exec env -i \"$@\"", "sh"]);
    for how in ["null", "empty", "at", "vfork", "spawn", "600", "15000"] {
        assert_folded(&[&environment_program.path, how]);
    }
}

#[test]
fn child_of_a_sandbox_that_clears_the_environment_is_folded() {
    let Some(bwrap) = installed("bwrap") else { return };
    let sandbox = [&bwrap, "--bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--clearenv"];
    if !Command::new(sandbox[0]).args(&sandbox[1..]).arg("/bin/true").status().unwrap().success() {
        return missing("bwrap can't make namespaces here");
    }
    assert_folded(&sandbox);
}

/// Returns what `program` prints of its environment under memfold, started by `launcher`.
fn shown(bin: &Path, launcher: &[&str], program: &str) -> String {
    let output = run(bin, &[], &[launcher, &[program, "show"]].concat());
    assert!(output.status.success() && output.stderr.is_empty(), "{launcher:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn program_and_its_children_see_only_their_own_environment() {
    let (Some(bin), environment_program) = (binaries(), compile("passed")) else { return };
    let path = environment_program.path.as_str();
    let baseline = Command::new(path).arg("show").output().unwrap();
    let baseline = String::from_utf8(baseline.stdout).unwrap();
    assert!(baseline.contains("PATH=") && !baseline.contains("MEMFOLD_RUN="), "{baseline}");
    assert_eq!(shown(&bin, &[], path), baseline);
    assert_eq!(shown(&bin, &["env"], path), baseline);
    assert_eq!(
        shown(&bin, &["env", "-i", "A=1", "LD_PRELOAD=", "B=2"], path),
        "A=1\nLD_PRELOAD=\nB=2\n"
    );
    let other =
        environment_program.scratch.compile("other.so", "int other;", &["-shared", "-fPIC"]);
    let load = format!("LD_PRELOAD={other} {other}");
    assert_eq!(
        shown(&bin, &["env", "-i", &load, "Z=9", path, "vfork", "/usr/bin/env", &load], path),
        format!("{load}\n")
    );
    assert_eq!(shown(&bin, &[path, "null"], path), "");
    let many: String = (0..15000).map(|n| format!("V{n}={n}\n")).collect();
    assert_eq!(shown(&bin, &[path, "15000"], path), many);
}

#[test]
fn exec_that_fails_is_not_reported() {
    let Some(bin) = binaries() else { return };
    let script =
        "PATH=/no:/nor:/usr/bin:/bin exec env -i PATH=/no:/nor/that:/bin sh -c 'exec echo ran'";
    let output = run(&bin, &["--summary"], &["sh", "-c", script]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && output.stdout == b"ran\n", "{errors}");
    assert!(!errors.contains("warning") && !errors.contains("memfold can't manage"), "{errors}");
}

/// Asserts that a run had no unmanaged program and no warning.
#[track_caller]
fn assert_managed(output: &Output) {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{output:?}");
    assert!(!errors.contains("warning") && !errors.contains("memfold can't manage"), "{errors}");
}

/// The library itself loads a program of musl. It needs nothing of a new glibc.
#[test]
fn child_of_another_c_library_is_managed_with_its_own_environment() {
    let (Some(bin), environment_program) = (binaries(), compile("passed")) else { return };
    let sources = concat!(env!("CARGO_MANIFEST_DIR"), "/programs");
    let (source, scratch) = (format!("{sources}/passed.c"), &environment_program.scratch);
    let expected = "A=1\n";
    let script = |program: &str| format!("env -i A=1 {program} show; exit $?");
    if let Some(musl) = installed("musl-gcc") {
        let program = scratch.path("musl");
        assert!(Command::new(musl).args(["-o", &program, &source]).status().unwrap().success());
        let output = run(&bin, &["--summary"], &["sh", "-c", &script(&program)]);
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
        assert_managed(&output);
    }
    // A dynamic linker whose name suggests another glibc release.
    let linker = scratch.path("ld-linux-x86-64.so.2");
    let mut bytes = fs::read("/lib64/ld-linux-x86-64.so.2").unwrap();
    let text = b"release version 2.";
    let Some(at) = bytes.windows(text.len()).position(|part| part == text) else {
        return missing("this C library has no release in its dynamic linker");
    };
    let ours = fs::write(&linker, &bytes).map(|()| linker.clone()).unwrap();
    fs::set_permissions(&ours, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let program = scratch.path("old");
    let link = format!("-Wl,--dynamic-linker={linker}");
    let status = Command::new("gcc").args(["-o", &program, "-pthread", &source, &link]).status();
    assert!(status.unwrap().success());
    let maps = format!("env -i A=1 {program} at /bin/cat /proc/self/environ; exit $?");
    let output = run(&bin, &["--summary"], &["sh", "-c", &script(&program)]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
    assert_managed(&output);
    bytes[at + text.len()..][..2].copy_from_slice(b"17");
    fs::write(&linker, &bytes).unwrap();
    let output = run(&bin, &["--summary"], &["sh", "-c", &script(&program)]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
    assert_managed(&output);
    let output = run(&bin, &[], &["sh", "-c", &maps]);
    assert!(output.stdout.starts_with(b"LD_PRELOAD="), "it is managed: {output:?}");
}

/// A static program executes a dynamic one.
#[test]
fn child_of_a_static_program_is_folded() {
    let scratch = Scratch::new();
    let source = "#include <unistd.h>\nint main(int c, char **v) { return execv(v[1], v + 1); }";
    let program = scratch.compile("static", source, &["-static"]);
    assert_folded(&["env", "-i", &program]);
}
