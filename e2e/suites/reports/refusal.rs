//! Errors that `memfold run` reports before it starts a program: one line each, status 125.
use crate::common::{Scratch, assert_refused, binaries, memfold, run};
use memfold_engine::config::keys::{Audience, KEYS};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

#[test]
fn bad_flags_and_settings_are_one_line_each() {
    let Some(bin) = binaries() else { return };
    let cases: &[(&[&str], &[&str])] = &[
        (&["--bogus"], &["--bogus", "--help lists all"]),
        (&["--limti", "64M"], &["--limti", "A similar argument exists: '--limit'"]),
        (&["--limit"], &["--limit", "value"]),
        (&["--limit", "x"], &["--limit", "not a size"]),
        (&["--limit", "0"], &["--limit", "too small"]),
        (&["--limit", "1M"], &["too small", "8.0 MiB"]),
        (&["--limit", "0%"], &["percentage"]),
        (&["--limit", "200%"], &["percentage"]),
        (&["--limit", "1000T"], &["more than the memory"]),
        (&["--resident", "1000T"], &["--resident", "more than the memory"]),
        (&["--limit", "64M", "--limit", "65M"], &["--limit"]),
        (&["--limit", "64M", "--codec", "nope"], &["--codec", "nope", "lz4", "zstd"]),
        (&["--limit", "64M", "--codec", "zstd:999"], &["--codec", "zstd", "-7 to 19"]),
        (&["--limit", "64M", "--codec", "lz4hc:12"], &["--codec", "lz4hc", "2 to 9"]),
        (&["--limit", "64M", "--codec", "deflate:0"], &["--codec", "deflate", "1 to 12"]),
        (&["--limit", "64M", "--codec", "lz4:fast"], &["--codec", "lz4:fast", "1 to 65537"]),
        (&["--limit", "64M", "--codec", "lz4;limit=1"], &["--codec"]),
        (&["--limit", "64M", "--canned", "maybe"], &["--canned", "maybe", "on", "off"]),
        (
            &["--limit", "64M", "--canned", "./nothing.here"],
            &["--canned", "nothing.here", "No such file"],
        ),
        (
            &["--limit", "64M", "--canned", "/etc/passwd"],
            &["--canned", "/etc/passwd", "not a dictionary"],
        ),
        (
            &["--limit", "64M", "--canned", "on", "--codec", "deflate"],
            &["--canned", "deflate", "lz4 or zstd"],
        ),
        (&["--limit", "64M", "--folio", "3K"], &["--folio", "4K"]),
        (&["--limit", "64M", "--folio", "4K", "--block", "16K"], &["--block"]),
        (&["--limit", "64M", "--delivery", "thread"], &["--delivery", "Leave it out"]),
        (&["--limit", "64M", "--delivery=gate"], &["--delivery", "Leave it out"]),
        (&["--limit", "64M", "--pools", "65"], &["--pools", "64"]),
        (&["--slowdown", "off"], &["--limit"]),
        (&["--slowdown", "0"], &["--slowdown", "0.01 to 100"]),
        (&["--slowdown", "101%"], &["--slowdown", "0.01 to 100"]),
        (&["--slowdown", "1.125"], &["--slowdown", "off"]),
        (&["--idle", "soon"], &["--idle", "86400"]),
        (&["--limit", "64M", "--idle", "90000"], &["--idle", "86400"]),
        (&["--limit", "64M", "--idle", "5"], &["--idle", "--slowdown"]),
        (&["--slowdown", "5%%"], &["--slowdown", "0.01 to 100"]),
    ];
    for (flags, words) in cases {
        let arguments = [&["run"], *flags, &["--", "echo", "ran"]].concat();
        // A flag without its value does not take the `--` after it as value.
        assert_refused(&memfold(&bin, &arguments).output().unwrap(), 125, words);
    }
}

#[test]
fn a_missing_command_is_said_so() {
    let Some(bin) = binaries() else { return };
    for arguments in [&["run", "--limit", "64M"][..], &["run", "--limit", "64M", "--"]] {
        assert_refused(&memfold(&bin, arguments).output().unwrap(), 125, &["No command"]);
    }
    for (word, advice) in [
        ("qq", "--help lists all"),
        ("recrod", "exists: 'record'"),
        ("wra", "exist: 'unwrap', 'wrap'"),
    ] {
        assert_refused(&memfold(&bin, &[word]).output().unwrap(), 125, &[word, advice]);
    }
}

#[test]
fn help_and_version_are_no_failure() {
    let Some(bin) = binaries() else { return };
    for arguments in [&["--help"][..], &["run", "--help"], &["--version"], &["help", "run"]] {
        let output = memfold(&bin, arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{arguments:?}");
        assert!(output.stderr.is_empty() && !output.stdout.is_empty(), "{arguments:?}");
    }
    let help =
        String::from_utf8(memfold(&bin, &["run", "--help"]).output().unwrap().stdout).unwrap();
    let all =
        String::from_utf8(memfold(&bin, &["run", "--help-all"]).output().unwrap().stdout).unwrap();
    assert!(!all.contains("--delivery"), "{all}");
    for key in KEYS.iter().filter(|key| key.audience != Audience::Libraries) {
        let line = format!("--{} <{}>", key.name, key.value);
        assert!(all.contains(&line), "{}", key.name);
        assert_eq!(help.contains(&line), key.audience == Audience::Users, "{}", key.name);
    }
    let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
    for codec in memfold_store::CODECS {
        let (low, high) = (codec.levels.start(), codec.levels.end());
        let levels = if low == high {
            String::new()
        } else {
            format!("[:{low}..{high}], {} by default", codec.level_default)
        };
        let line = format!("{}{levels} {}", codec.name, codec.help);
        assert!(words.contains(&line), "{line}");
    }
    assert!(help.lines().all(|line| line.chars().count() <= 100), "{help}");
    let short = String::from_utf8(memfold(&bin, &["run", "-h"]).output().unwrap().stdout).unwrap();
    assert!(short.lines().count() <= 60, "{short}");
    for word in ["--limit <SIZE>", "--summary", "--swap <DIR>", "memfold run --help"] {
        assert!(short.contains(word), "{word}: {short}");
    }
    assert!(!short.contains("--swap-encrypt"), "{short}");
}

#[test]
fn if_possible_runs_the_program_where_the_machine_is_too_small_and_forgives_no_mistake() {
    let Some(bin) = binaries() else { return };
    let run = |limit: &str, command: &str| {
        let words = ["run", "--if-possible", "--limit", limit, "--", "sh", "-c", command];
        memfold(&bin, &words).output().unwrap()
    };
    let output = run("900T", "trap - PIPE; echo ran; exit 4");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(4), &b"ran\n"[..]), "{errors}");
    assert!(errors.lines().count() == 1 && errors.contains("is more than the memory"), "{errors}");
    let preloaded = "grep -q libmemfold_preload /proc/$$/maps";
    assert_eq!(run("900T", preloaded).status.code(), Some(1));
    assert_eq!(run("64M", preloaded).status.code(), Some(0));
    assert_refused(&run("lots", "echo ran"), 125, &["--limit", "lots"]);
    assert_refused(&run("1M", "echo ran"), 125, &["too small"]);
}

/// AppImages and other bundles do this.
#[test]
fn a_program_given_to_the_dynamic_linker_is_managed() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let source = r#"
        #include <stdio.h>
        #include <stdlib.h>
        int main(int count, char **words) {
            size_t len = 200u << 20, sum = 0;
            char *at = malloc(len);
            for (size_t i = 0; i < len; i += 64) at[i] = i / 4096 % 100;
            for (size_t i = 0; i < len; i += 4096) sum += at[i];
            printf("%s %zu\n", words[1], sum);
        }"#;
    let program = scratch.compile("program", source, &[]);
    let linker = "/lib64/ld-linux-x86-64.so.2";
    let real = std::fs::canonicalize(linker).unwrap();
    let stats = scratch.path("s.json");
    for linker in [linker, real.to_str().unwrap()] {
        let command = [linker, "--argv0", "other", "--inhibit-cache", &program, "word"];
        let output = run(&bin, &["--stats-file", &stats], &command);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), &*errors), (Some(0), ""));
        assert_eq!(output.stdout, Command::new(&program).arg("word").output().unwrap().stdout);
        let stats = crate::common::json(&stats);
        assert!(
            stats["zswpout"].as_u64() > Some(30_000)
                && stats["peak_bytes"].as_u64() < Some(80 << 20)
        );
    }
    let static_program = scratch.compile("fixed", source, &["-static"]);
    assert_refused(
        &run(&bin, &[], &[linker, &static_program]),
        125,
        &[&static_program, "without the linker"],
    );
    assert_eq!(run(&bin, &[], &[linker, "--version"]).status.code(), Some(0));
    assert_eq!(run(&bin, &[], &[linker, "/no/such/program"]).status.code(), Some(127));
}

#[test]
fn programs_that_gain_privileges_are_refused() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let program = scratch.compile("program", "int main(void) { return 0; }", &[]);
    for (mode, word) in [(0o4755, "set-user-ID"), (0o2755, "set-group-ID")] {
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(mode)).unwrap();
        assert_refused(&run(&bin, &[], &[&program]), 125, &[&program, word]);
    }
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(run(&bin, &[], &[&program]).status.code(), Some(0));
    // Only root can give a file capabilities.
    let output = Command::new("setcap").args(["cap_net_raw+ep", &program]).output();
    if output.is_ok_and(|output| output.status.success()) {
        assert_refused(&run(&bin, &[], &[&program]), 125, &[&program, "capabilities"]);
    }
}

#[test]
fn programs_for_other_machines_are_refused() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let program = scratch.compile("program", "int main(void) { return 0; }", &[]);
    let mut bytes = std::fs::read(&program).unwrap();
    bytes[4] = 1;
    bytes[18] = 3;
    let foreign = scratch.file("foreign", &bytes, 0o755);
    assert_refused(&run(&bin, &[], &[&foreign]), 125, &["another machine", "i386"]);
}

#[test]
fn a_run_inside_a_run_is_refused() {
    let Some(bin) = binaries() else { return };
    let memfold = bin.join("memfold").into_os_string().into_string().unwrap();
    let output = run(&bin, &[], &[&memfold, "run", "--limit", "32M", "--", "true"]);
    assert_refused(&output, 125, &["nested"]);
}

#[test]
fn a_stats_file_that_cant_be_written_stops_it_before_the_start() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let mark = scratch.path("mark");
    for bad in ["/no/such/directory/s.json", "/tmp", "/proc/version"] {
        let output = run(&bin, &["--stats-file", bad], &["touch", &mark]);
        assert_refused(&output, 125, &["--stats-file", bad]);
    }
    assert!(!std::path::Path::new(&mark).exists());
}

/// Shell limits on address space: the engine reserves addresses that it never uses.
#[test]
fn too_few_addresses_are_refused_with_the_limits_name() {
    let Some(bin) = binaries() else { return };
    let run = |limit: &str| {
        let script = format!("ulimit {limit} && exec \"$@\"");
        let mut command = Command::new("sh");
        let memfold = bin.join("memfold");
        command.args([
            "-c",
            &script,
            "sh",
            memfold.to_str().unwrap(),
            "run",
            "--limit",
            "64M",
            "--",
            "echo",
            "right",
        ]);
        command.env_remove("MEMFOLD_RUN").env_remove("MEMFOLD_DISABLE").output().unwrap()
    };
    for limit in ["-v 60000", "-v 2000000", "-d 60000", "-d 2000000"] {
        assert_refused(
            &run(limit),
            125,
            &["address space", &format!("ulimit {}", &limit[..2]), "MiB"],
        );
    }
    // Half a tebibyte, and the addresses of the frames, which are twice the machine's memory.
    let frames = memfold_os::thread::memory_bytes() / 512;
    let output = run(&format!("-v {}", frames + (512 << 20)));
    assert_eq!(output.stdout, b"right\n", "{}", String::from_utf8_lossy(&output.stderr));
}

/// Asserts that a shell script under `memfold run`, with flags and arguments, prints `ran` from an
/// unmanaged program, and that memfold prints one warning with all `words`.
#[track_caller]
fn assert_ran_unmanaged(
    bin: &std::path::Path,
    flags: &[&str],
    script: &str,
    arguments: &[&str],
    words: &[&str],
) {
    let output = run(bin, flags, &[&["sh", "-c", script, "sh"], arguments].concat());
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        (output.status.code(), &*output.stdout),
        (Some(0), &b"ran\n"[..]),
        "{script}: {text}"
    );
    assert!(text.lines().count() == 1 && text.contains("unmanaged"), "{script}: {text}");
    assert!(
        words.iter().all(|word| text.contains(word)),
        "{script}: {text:?} lacks one of {words:?}"
    );
}

/// The shell is managed, and starts programs that can't be managed, also by exec.
#[test]
fn unmanageable_children_run_unmanaged_with_one_warning() {
    let Some(bin) = binaries() else { return };
    for limit in ["-v 60000", "-v 2000000"] {
        let script = format!("ulimit {limit}; /bin/echo ran; exit $?");
        assert_ran_unmanaged(&bin, &[], &script, &[], &["address space", "ulimit -v"]);
        assert_ran_unmanaged(
            &bin,
            &[],
            &format!("ulimit {limit}; exec /bin/echo ran"),
            &[],
            &["address space"],
        );
    }
    let scratch = Scratch::new();
    let (parent, swap) = (scratch.path("parent"), scratch.path("parent/swap"));
    std::fs::create_dir_all(&swap).unwrap();
    let script = r#"mv "$1" "$1.gone"; /bin/echo ran; exit $?"#;
    assert_ran_unmanaged(
        &bin,
        &["--swap", &swap],
        script,
        &[&parent],
        &["--swap", "no swap file can be made"],
    );
}
