//! `memfold check` reports what works, also in sandboxes, and `memfold run` behaves accordingly.
//! `memfold jupyter` is tested here too.
use crate::common::{
    Program, Scratch, assert_refused, binaries, can_make_worlds, compile, json, memfold,
    open_scratch,
};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

/// Returns the entry of one item in the output of `check`: its mark, and the rest with the lines
/// below it.
#[track_caller]
fn line(screen: &str, name: &str) -> (String, String) {
    // The names fill a column as wide as the longest. The mark follows.
    let is_of_name = |line: &&str| line.get(..17).is_some_and(|column| column.trim_end() == name);
    let mut lines = screen.lines().skip_while(|line| !is_of_name(line));
    let first = lines.next().unwrap_or_else(|| panic!("no {name} in\n{screen}"));
    let (mark, rest) = first[17..].split_at(2);
    let below = lines.take_while(|line| line.starts_with("         "));
    (mark.to_string(), [rest.trim()].into_iter().chain(below).collect::<Vec<_>>().join("\n"))
}

/// Returns the output of `check`, which must end with this status.
#[track_caller]
fn screen(output: &Output, status: i32) -> String {
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.is_empty(), "{errors}");
    assert_eq!(output.status.code(), Some(status), "{text}");
    text
}

#[test]
fn where_run_works_it_says_so_and_each_thing_has_its_line() {
    let Some(bin) = binaries() else { return };
    let works = crate::common::run(&bin, &[], &["true"]).status.success();
    for arguments in [&["check"][..], &["run", "--check"]] {
        let output = memfold(&bin, arguments).output().unwrap();
        let text = screen(&output, !works as i32);
        for name in [
            "kernel",
            "userfaultfd",
            "UFFDIO_MOVE",
            "dispatch",
            "io_uring",
            "addresses",
            "a program",
        ] {
            line(&text, name);
        }
        assert_eq!(text.ends_with("memfold run works here\n"), works, "{text}");
        assert_eq!(text.contains("NO  "), !works, "{text}");
    }
}

/// The filter kills the caller. `memfold run` once ended by that without a message.
#[test]
fn killing_filter_is_named_and_its_child_runs_unmanaged() {
    let Some(bin) = binaries() else { return };
    let (killer, own) = (compile("killing"), bin.join("memfold"));
    let own = own.to_str().unwrap();
    let command_filtered = |call: i64, arguments: &[&str]| {
        let mut command = Command::new(&killer.path);
        command.arg(call.to_string()).arg(own).args(arguments);
        command.env_remove("MEMFOLD_RUN").env_remove("MEMFOLD_DISABLE").output().unwrap()
    };
    for (call, name) in [
        (libc::SYS_userfaultfd, "userfaultfd"),
        (libc::SYS_prctl, "prctl(PR_SET_SYSCALL_USER_DISPATCH)"),
        (libc::SYS_process_vm_readv, "process_vm_readv"),
    ] {
        let refusal = command_filtered(call, &["run", "--limit", "64M", "--", "true"]);
        assert_refused(&refusal, 125, &["A seccomp filter kills", name]);
        let words =
            ["run", "--if-possible", "--limit", "64M", "--", "sh", "-c", "echo ran; exit 3"];
        let output = command_filtered(call, &words);
        let errors = String::from_utf8_lossy(&output.stderr);
        let outcome = (output.status.code(), &output.stdout[..], errors.lines().count());
        assert_eq!(outcome, (Some(3), &b"ran\n"[..], 1), "{errors}");
        assert!(errors.contains("sh runs without memfold") && errors.contains(name), "{errors}");
        let text = screen(&command_filtered(call, &["check", "--limit", "64M"]), 1);
        let (mark, answer) = line(&text, "sandbox");
        assert!(mark == "NO" && answer.contains(name), "{text}");
        let number = call.to_string();
        let child = [killer.path.as_str(), &number, "/bin/echo", "ran"];
        let output = crate::common::run(&bin, &[], &child);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(
            (output.status.code(), &output.stdout[..]),
            (Some(0), &b"ran\n"[..]),
            "{errors}"
        );
        // The gate ends before a filter that refuses its own calls. Another filter kills a process
        // that begins.
        let is_named = errors.contains("runs unmanaged") && errors.contains(name);
        let is_ended = errors.contains("A seccomp filter of the program refuses");
        assert!(is_named != is_ended, "{errors}");
    }
    // Only a swap file needs io_uring.
    let ring = libc::SYS_io_uring_setup;
    let output = command_filtered(ring, &["run", "--limit", "64M", "--", "echo", "ran"]);
    assert_eq!(output.stdout, b"ran\n", "{output:?}");
    let swap_run =
        command_filtered(ring, &["run", "--limit", "64M", "--swap", "/tmp", "--", "true"]);
    assert_refused(&swap_run, 125, &["A seccomp filter kills", "io_uring_setup"]);
}

#[test]
fn code_that_cant_be_written_is_named_and_not_needed() {
    const SOURCE: &str = "#include <stdio.h>
        #include <sys/prctl.h>
        #include <unistd.h>
        int main(int n, char **arg) {
            if (prctl(65 /* PR_SET_MDWE */, 1, 0, 0, 0)) return perror(\"PR_SET_MDWE\"), 77;
            execv(arg[1], arg + 1);
            return 2;
        }";
    let (Some(bin), scratch) = (binaries(), Scratch::new()) else { return };
    let denies = scratch.compile("denies", SOURCE, &[]);
    let own = bin.join("memfold").into_os_string().into_string().unwrap();
    let command_denied = |arguments: &[&str]| {
        let mut command = Command::new(&denies);
        command.arg(&own).args(arguments).env_remove("MEMFOLD_RUN").output().unwrap()
    };
    let check = command_denied(&["check", "--limit", "64M"]);
    if check.status.code() == Some(77) {
        return eprintln!("SKIPPED, NOTHING WAS TESTED: {check:?}");
    }
    let text = screen(&check, 0);
    let (mark, answer) = line(&text, "patching");
    assert!(mark == "--" && answer.contains("MemoryDenyWriteExecute"), "{text}");
    // Calls that are made often enough to be patched, from libc and from the program itself.
    let calls = "#include <unistd.h>
        int main(void) { for (int i = 0; i < 1000; i++) getppid(); return 3; }";
    for flags in [&["-static"][..], &[]] {
        let program = scratch.compile("calls", calls, flags);
        let output = command_denied(&["run", "--limit", "64M", "--", &program]);
        assert_eq!(output.status.code(), Some(3), "{output:?}");
        assert!(output.stderr.is_empty(), "{output:?}");
    }
}

#[test]
fn an_absolute_limit_works_without_meminfo() {
    let Some(bin) = binaries().filter(|_| can_make_worlds()) else { return };
    let world = "mount --bind /dev/null /proc/meminfo && exec \"$@\"";
    for limit in ["64M", "50%"] {
        let arguments = ["run", "--limit", limit, "--", "echo", "ran"];
        let output = crate::common::memfold_in(world, &bin, &arguments).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!((&output.stdout[..], &*errors), (&b"ran\n"[..], ""), "{limit}");
    }
}

#[test]
fn an_absolute_limit_works_where_files_may_have_no_length() {
    let Some(bin) = binaries() else { return };
    let own = bin.join("memfold");
    let run = |limit: &str| {
        let script = format!("ulimit {limit} && exec \"$@\"");
        let mut command = Command::new("sh");
        command.args(["-c", &script, "sh", own.to_str().unwrap(), "run", "--limit", "64M", "--"]);
        command.args(["sh", "-c", "ulimit -f"]).env_remove("MEMFOLD_RUN").output().unwrap()
    };
    // The program gets the limit of the caller.
    let output = run("-S -f 0");
    assert_eq!(output.stdout, b"0\n", "{output:?}");
    let output = run("-f 0");
    match output.status.success() {
        true => assert_eq!(output.stdout, b"0\n", "root may lift it: {output:?}"),
        false => assert_refused(&output, 125, &["ulimit -f"]),
    }
}

/// `true` is static on some systems. `memfold check` must not report a failure because of that.
#[test]
fn a_static_true_is_no_reason_for_a_no() {
    let Some(bin) = binaries() else { return };
    let works = crate::common::run(&bin, &[], &["true"]).status.success();
    let scratch = Scratch::new();
    scratch.compile("true", "int main(void) { return 0; }", &["-static"]);
    let mut command = memfold(&bin, &["check"]);
    let output =
        command.env("PATH", format!("{}:/usr/bin:/bin", scratch.path(""))).output().unwrap();
    assert_eq!(line(&screen(&output, !works as i32), "a program").0 == "ok", works);
}

#[test]
fn settings_commands_and_limits_that_run_refuses_are_told() {
    let Some(bin) = binaries() else { return };
    let cases: &[(&[&str], &str, &str)] = &[
        (&["--limit", "1M"], "settings", "too small"),
        (&["--limit", "64M", "--swap", "/no/such/directory/file"], "swap file", "/no/such"),
        (&["--limit", "64M", "--swap", "/tmp/no-such-directory"], "swap file", "Make it"),
        (&["--limit", "64M", "--", "no-such-command"], "command", "not found"),
    ];
    for (arguments, name, word) in cases {
        let output = memfold(&bin, &[&["check"], *arguments].concat()).output().unwrap();
        let (mark, text) = line(&screen(&output, 1), name);
        assert!(mark == "NO" && text.contains(word), "{arguments:?}: {mark} {text}");
    }
    let own = bin.join("memfold");
    let script = "ulimit -v 2000000 && exec \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh", own.to_str().unwrap(), "check", "--limit", "64M"]);
    let output = command.env_remove("MEMFOLD_RUN").env_remove("MEMFOLD_DISABLE").output().unwrap();
    let text = screen(&output, 1);
    assert!(line(&text, "addresses").1.contains("ulimit -v"), "{text}");
    let (mark, answer) = line(&text, "a program");
    assert!(mark == "NO" && answer.contains("address space"), "{text}");
}

#[test]
fn a_swap_directory_is_tried_for_o_direct() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let swap = scratch.path("");
    let output = memfold(&bin, &["check", "--limit", "64M", "--swap", &swap]).output().unwrap();
    let (mark, text) = line(&String::from_utf8(output.stdout).unwrap(), "swap file");
    assert!(matches!(&*mark, "ok" | "--") && text.contains("O_DIRECT"), "{mark} {text}");
}

/// A directory that other users can enter, with memfold and the filter in it.
struct Sandbox {
    bin: Scratch,
    filter: Program,
}

fn sandbox() -> Option<Sandbox> {
    let (from, bin) = (binaries()?, Scratch::new());
    if !can_make_worlds() {
        return None;
    }
    std::fs::set_permissions(&bin.0, std::fs::Permissions::from_mode(0o755)).unwrap();
    for name in ["memfold", "libmemfold_preload.so"] {
        bin.file(name, std::fs::read(from.join(name)).unwrap(), 0o755);
    }
    let filter = compile("container");
    std::fs::set_permissions(&filter.scratch.0, std::fs::Permissions::from_mode(0o755)).unwrap();
    Some(Sandbox { bin, filter })
}

/// The shell words that run before the filter: they set the device's mode in a mount namespace, and
/// the user, without capabilities as in a container without any.
struct World {
    device: &'static str,
    user: &'static str,
    errno: &'static str,
}

impl Sandbox {
    fn run(&self, world: &World, arguments: &[&str]) -> Output {
        let device = match world.device {
            "" => "mount --bind /dev/null /dev/userfaultfd".to_string(),
            mode => format!(
                "node=$(mktemp -u) && mknod -m {mode} $node c $(tr : ' ' </sys/class/misc/userfaultfd/dev) && \
                 mount --bind $node /dev/userfaultfd && rm $node"
            ),
        };
        let script = format!(
            "mount -t proc proc /proc && {device} && cd / && exec setpriv --reuid {0} --regid {0} --clear-groups \
             --inh-caps=-all --bounding-set=-all -- \"$@\"",
            world.user
        );
        let own = self.bin.0.join("memfold");
        Command::new("unshare")
            .args(["-m", "-p", "-f", "sh", "-c", &script, "sh", &self.filter.path, world.errno])
            .arg(&own as &Path)
            .args(arguments)
            .env_remove("MEMFOLD_RUN")
            .env_remove("MEMFOLD_DISABLE")
            .output()
            .unwrap()
    }
}

const HELD: &[&str] = &["run", "--limit", "16M", "--summary", "--", "python3", "-c"];
/// Fills four times the limit with pages of different bytes, twice.
const FOLDS: &str = "
b = bytearray(64 << 20)
for turn in (1, 2):
    for at in range(0, len(b), 4096): b[at] = (b[at] + at // 4096) % 251
print(sum(b))";

fn folds_right() -> String {
    (0..16384u32).map(|page| (page % 251 + page) % 251).sum::<u32>().to_string()
}

#[test]
fn container_with_device_runs_and_check_lists_refused_calls() {
    let Some(sandbox) = sandbox() else { return };
    for (device, user) in [("600", "0"), ("666", "65534")] {
        for (errno, name) in [("1", "EPERM"), ("38", "ENOSYS")] {
            let world = World { device, user, errno };
            let text = screen(&sandbox.run(&world, &["check", "--limit", "64M"]), 0);
            let refusal = line(&text, "sandbox").1;
            for word in [
                "a seccomp filter",
                &format!("userfaultfd {name}"),
                "process_madvise EPERM",
                "pidfd_getfd EPERM",
                "docs/places.md",
            ] {
                assert!(refusal.contains(word), "{word}: {text}");
            }
            assert!(!refusal.contains("prctl") && !refusal.contains("membarrier"), "{text}");
            assert_eq!(line(&text, "  by system call").0, "--", "{text}");
            assert_eq!(line(&text, "  by device").0, "ok", "{text}");
            let (mark, answer) = line(&text, "process_madvise");
            assert!(mark == "--" && answer.contains("--cap-add SYS_PTRACE"), "{text}");
            let summary = folds_in(&sandbox, &world);
            assert!(summary.contains(" of them major"), "the summary isn't lost: {summary}");
        }
    }
}

/// Asserts that a program folds several times its limit in a world, and prints the right sum.
/// Returns what memfold printed.
fn folds_in(sandbox: &Sandbox, world: &World) -> String {
    let figures = open_scratch();
    let file = figures.path("stats");
    let command_held = [&["run", "--stats-file", &file], &HELD[1..], &[FOLDS]].concat();
    let output = sandbox.run(world, &command_held);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{errors}");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), folds_right());
    crate::common::assert_figures(&json(&file), &errors, 24);
    errors
}

#[test]
fn container_without_device_pages_by_guards_or_protection_and_check_helps() {
    let Some(sandbox) = sandbox() else { return };
    let has_guards = memfold_os::probe::guards().is_ok();
    let paging = if has_guards { "--paging guard" } else { "--paging protection" };
    for (device, user) in [("", "0"), ("600", "65534")] {
        for errno in ["1", "38"] {
            let world = World { device, user, errno };
            let text = screen(&sandbox.run(&world, &["check", "--limit", "64M"]), 0);
            let (mark, answer) = line(&text, "userfaultfd");
            assert!(mark == "--" && answer.contains("--device /dev/userfaultfd"), "{text}");
            assert_eq!(line(&text, "protection").0, "ok", "{text}");
            let (mark, answer) = line(&text, "faults");
            assert!(mark == "--" && answer.contains(paging), "{text}");
            let summary = folds_in(&sandbox, &world);
            let warnings: Vec<&str> =
                summary.lines().filter(|line| line.contains("warning")).collect();
            let words = [paging, "userfaultfd", "seccomp", "device"];
            assert!(
                matches!(warnings[..], [line] if words.iter().all(|word| line.contains(word))),
                "{summary}"
            );
        }
    }
}

#[test]
fn a_kernelspec_is_written_once_and_its_command_is_what_runs() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let write = |more: &[&str]| {
        let mut command = memfold(&bin, &[&["jupyter", "--limit", "64M"], more].concat());
        command.env("JUPYTER_DATA_DIR", scratch.path("data")).output().unwrap()
    };
    let output = write(&[]);
    let path = scratch.path("data/kernels/memfold-python3/kernel.json");
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{path}\n"));
    let spec = json(&path);
    let words: Vec<&str> =
        spec["argv"].as_array().unwrap().iter().map(|w| w.as_str().unwrap()).collect();
    assert_eq!(words[0], bin.join("memfold").to_str().unwrap());
    assert_eq!(words[1..4], ["run", "--limit=64M", "--"]);
    assert!(words[4].starts_with('/') && words[4].ends_with("python3"), "{words:?}");
    assert_eq!(words[5..], ["-m", "ipykernel_launcher", "-f", "{connection_file}"]);
    assert_eq!(spec["display_name"], "Python 3 in 64M (memfold)");
    assert_refused(&write(&[]), 125, &[&path, "--force"]);
    assert!(write(&["--force"]).status.success());
    // The specification of another kernel, with further fields, and a directory for the new one.
    let other =
        r#"{"argv":["/bin/echo","{connection_file}"],"display_name":"Echo","env":{"A":"b"}}"#;
    let (other, own) = (scratch.file("kernel.json", other, 0o644), scratch.path("own"));
    let output = write(&["--from", &other, "--dir", &own, "--", "--codec", "zstd:1"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let spec = json(&format!("{own}/kernel.json"));
    assert_eq!(
        (&spec["env"]["A"], &spec["display_name"]),
        (&"b".into(), &"Echo in 64M (memfold)".into())
    );
    let words: Vec<&str> =
        spec["argv"].as_array().unwrap().iter().map(|w| w.as_str().unwrap()).collect();
    assert_eq!(
        words[1..],
        ["run", "--limit=64M", "--codec", "zstd:1", "--", "/bin/echo", "{connection_file}"]
    );
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).env_remove("MEMFOLD_RUN").env_remove("MEMFOLD_DISABLE");
    let output = command.output().unwrap();
    assert_eq!(
        output.stdout,
        b"{connection_file}\n",
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn a_kernelspec_that_could_not_start_is_refused() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let (dir, bad) = (scratch.path("spec"), scratch.file("bad.json", "{}", 0o644));
    let cases: &[(&[&str], &[&str])] = &[
        (&["--limit", "1M"], &["too small"]),
        (&["--limit", "64M", "--", "--bogus"], &["--bogus"]),
        (&["--limit", "64M", "--from", &bad], &["--from", "argv"]),
        (&["--limit", "64M", "--from", "/no/such/file"], &["--from", "No such file"]),
    ];
    for (arguments, words) in cases {
        let output =
            memfold(&bin, &[&["jupyter", "--dir", &dir], *arguments].concat()).output().unwrap();
        assert_refused(&output, 125, words);
        assert!(!Path::new(&dir).exists(), "{arguments:?}");
    }
}
