//! Why a program ended: the lines that `memfold run` prints where a signal ended it.
use crate::common::cgroup::MemoryCgroup;
use crate::common::{binaries, memfold, real, run};
use std::process::{Command, Output};

/// Fills shared memory, which memfold's limit does not count.
const FILLS: &str = r#"
import os
file, block = os.memfd_create("filled"), bytes(1 << 20)
for _ in range(1000): os.write(file, block)
"#;

fn said(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    text.lines()
        .filter(|line| line.starts_with("memfold: "))
        .map(|line| format!("{line}\n"))
        .collect()
}

/// Runs a shell script that ends by a signal, without a core dump.
fn ended_by(signal: &str) -> Option<Output> {
    let bin = binaries()?;
    Some(run(&bin, &[], &["sh", "-c", &format!("ulimit -c 0; kill -{signal} $$")]))
}

#[test]
fn end_by_a_signal_is_explained_in_three_lines() {
    for (signal, words) in [
        (
            "KILL",
            "does not know who sent it: the program itself, another process, or a limit that the program set",
        ),
        ("ABRT", "it called abort"),
        ("SEGV", "MEMFOLD_DISABLE=1 shows"),
        ("BUS", "its file system (/dev/shm too) is full"),
        ("SYS", "a seccomp filter refused a system call"),
    ] {
        let Some(output) = ended_by(signal) else { return };
        let text = said(&output);
        assert!(text.starts_with(&format!("memfold: SIG{signal} ended the program")), "{text}");
        assert!(text.lines().count() == 3 && text.contains(words), "{text}");
        assert!(text.contains("(limit 64.0 MiB)"), "{text}");
    }
}

#[test]
fn end_by_a_cpu_limit_of_the_program_names_it() {
    let Some(bin) = binaries() else { return };
    let explanation_of = |script: &str| said(&run(&bin, &[], &["sh", "-c", script]));
    // Both kinds of CPU time count. The scheduler may have counted less than a second.
    for script in ["while :; do :; done", "while :; do read x < /proc/self/stat; done"] {
        let explanation = explanation_of(&format!("ulimit -t 1; {script}"));
        assert!(
            explanation.contains("It used the 1 s of CPU time that `ulimit -t` allows it."),
            "{explanation}"
        );
    }
    let explanation = explanation_of("ulimit -t 1; kill -9 $$");
    assert!(explanation.contains("memfold does not know who sent it"), "{explanation}");
}

#[test]
fn limits_of_address_space_are_named_if_they_can_be_reached() {
    let Some(bin) = binaries() else { return };
    let memfold = memfold(&bin, &["run", "--limit", "64M", "--", "sh", "-c", "kill -SEGV $$"]);
    let huge = (i64::MAX as u64) >> 10;
    let script = format!("ulimit -c 0; ulimit -v {huge}; ulimit -d {}; exec \"$@\"", 64u64 << 30);
    let mut shell = Command::new("sh");
    shell.args(["-c", &script, "sh"]).arg(memfold.get_program()).args(memfold.get_args());
    let text = said(&shell.output().unwrap());
    assert!(
        text.contains("`ulimit -d` is 65536.00 GiB") && !text.contains("`ulimit -v`"),
        "{text}"
    );
}

#[test]
fn end_by_the_user_or_with_a_status_is_not_explained() {
    for signal in ["TERM", "INT", "HUP", "PIPE"] {
        let Some(output) = ended_by(signal) else { return };
        assert!(output.stderr.is_empty() && !output.status.success(), "{signal}: {output:?}");
    }
    let Some(bin) = binaries() else { return };
    for status in ["0", "1", "3", "125", "134", "137"] {
        let output = run(&bin, &[], &["sh", "-c", &format!("exit {status}")]);
        assert!(output.stderr.is_empty(), "{output:?}");
    }
}

#[test]
fn heap_limit_of_node_is_named_with_its_flag() {
    let Some(bin) = binaries() else { return };
    let Some(node) = real::installed("node") else { return };
    let script = "const all = []; for (;;) all.push(new Array(1000).fill(1.5))";
    let command = [&node, "--max-old-space-size=30", "-e", script];
    let arguments = [&["run", "--limit", "512M", "--"], &command[..]].concat();
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -c 0; exec \"$@\"", "sh"]);
    let command = memfold(&bin, &arguments);
    let output = shell.arg(command.get_program()).args(command.get_args()).output().unwrap();
    let text = said(&output);
    assert_eq!(output.status.code(), Some(134), "{text}");
    assert!(
        text.contains("If node reported that it reached its heap limit: --max-old-space-size=MIB")
            && text.contains("now 30"),
        "{text}"
    );
}

/// Runs a command in the cgroup to its end, with the default limit.
fn run_in(group: &MemoryCgroup, flags: &[&str], command: &[&str]) -> Option<Output> {
    let bin = binaries()?;
    let inner = memfold(&bin, &[&["run"], flags, &["--"], command].concat());
    let mut outer = Command::new("sh");
    outer.args(["-c", &group.script(), "sh"]).arg(inner.get_program()).args(inner.get_args());
    Some(outer.env_remove("MEMFOLD_RUN").env_remove("MEMFOLD_DISABLE").output().unwrap())
}

#[test]
fn kill_by_the_kernel_names_its_cgroup() {
    let Some(group) = MemoryCgroup::new(64 << 20) else { return };
    let Some(output) = run_in(&group, &[], &["python3", "-c", FILLS]) else { return };
    let text = said(&output);
    assert_eq!(output.status.code(), Some(137), "{text}");
    for words in [
        "SIGKILL ended the program. The kernel's OOM killer ended 1 process of its cgroup during the run, because",
        &format!("{} reached its memory.", group.folder.display()),
        "of 64.0 MiB.\n",
        "(limit 56.0 MiB)",
        "The cgroup also counts page cache",
        "A lower --limit would not help",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert_eq!(text.lines().count(), 3, "{text}");
}

/// A lower limit can't be kept either.
#[test]
fn kill_for_data_that_does_not_compress_advises_a_swap_file() {
    let Some(group) = MemoryCgroup::new(128 << 20) else { return };
    let fills = "import os\nall = [os.urandom(1 << 20) for _ in range(300)]";
    for flags in [&[][..], &["--limit", "80M"]] {
        let Some(output) = run_in(&group, flags, &["python3", "-c", fills]) else { return };
        let text = said(&output);
        assert_eq!(output.status.code(), Some(137), "{text}");
        let cure =
            "of data do not compress, so only a file can take them. Give --swap DIR, or raise";
        assert!(text.contains(cure) && !text.contains("M or less"), "{text}");
    }
}

#[test]
fn kill_of_a_child_is_counted_in_the_summary() {
    let Some(group) = MemoryCgroup::new(64 << 20) else { return };
    let script = r#"python3 -c "$1"; exit 0"#;
    let output = run_in(&group, &["--summary"], &["sh", "-c", script, "sh", FILLS]);
    let Some(output) = output else { return };
    let text = said(&output);
    assert!(output.status.success() && !text.contains("ended the program"), "{text}");
    assert!(text.contains("the kernel's OOM killer ended 1 process of this cgroup"), "{text}");
}
