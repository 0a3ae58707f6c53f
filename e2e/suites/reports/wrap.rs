//! `memfold wrap` and `unwrap`: commands that run under memfold from now on.
use crate::common::{Scratch, assert_refused, binaries, memfold};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};

/// Prints its arguments, and whether memfold's library is in the shell that executes it.
const TOOL: &str =
    "#!/bin/sh\nprintf '<%s>' \"$0\" \"$@\"\ngrep -c libmemfold_preload /proc/$$/maps || exit 5\n";

/// A directory with a command `tool`, and an empty one for scripts before it in PATH.
struct Wrapped {
    bin: PathBuf,
    scratch: Scratch,
}

impl Wrapped {
    fn new() -> Option<Wrapped> {
        let (bin, scratch) = (binaries()?, Scratch::new());
        std::fs::create_dir(scratch.path("bin")).unwrap();
        scratch.file("bin/tool", TOOL, 0o755);
        Some(Wrapped { bin, scratch })
    }

    fn path(&self) -> String {
        format!(
            "{}:{}:/usr/bin:/bin",
            self.scratch.path("data/memfold/bin"),
            self.scratch.path("bin")
        )
    }

    fn memfold(&self, arguments: &[&str]) -> Output {
        let mut command = memfold(&self.bin, arguments);
        command.env("PATH", self.path()).env("XDG_DATA_HOME", self.scratch.path("data"));
        command.env("XDG_CONFIG_HOME", self.scratch.path("config")).output().unwrap()
    }

    fn done(&self, arguments: &[&str]) -> String {
        let output = self.memfold(arguments);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{arguments:?}: {errors}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// What the shell finds as `tool` prints, and its status.
    fn tool(&self) -> (String, i32) {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "tool a 'b c'"]).env("PATH", self.path());
        command.env_remove("MEMFOLD_RUN").env_remove("MEMFOLD_DISABLE");
        let output = command.output().unwrap();
        (String::from_utf8(output.stdout).unwrap(), output.status.code().unwrap())
    }
}

#[test]
fn b6_wrapped_commands_run_under_memfold_until_they_are_unwrapped() {
    let Some(wrapper) = Wrapped::new() else { return };
    let tool = wrapper.scratch.path("bin/tool");
    let expectation = (format!("<{tool}><a><b c>0\n"), 5);
    assert_eq!(wrapper.tool(), expectation);
    let script = wrapper.scratch.path("data/memfold/bin/tool");
    let flags = ["--limit", "64M"];
    assert_eq!(wrapper.done(&["wrap", "tool", "--", flags[0], flags[1]]), format!("{script}\n"));
    let (out, status) = wrapper.tool();
    assert!(out.starts_with(&format!("<{tool}><a><b c>")) && status == 0, "{out}");
    let list = wrapper.done(&["wrap"]);
    assert!(list.starts_with("tool: ") && list.contains("--limit 64M -- tool"), "{list}");
    assert!(list.contains(" run --wrapped --if-possible --limit"), "{list}");
    // Once more, with other flags; and in a run, whose limit counts then.
    wrapper.done(&["wrap", "tool"]);
    let out = wrapper.done(&["run", "--limit", "64M", "--", "tool", "a", "b c"]);
    assert!(out.starts_with(&format!("<{tool}><a><b c>")), "{out}");
    wrapper.done(&["unwrap", "--all"]);
    assert_eq!((wrapper.tool(), wrapper.done(&["wrap"])), (expectation, String::new()));
}

#[test]
fn wrap_refuses_other_names_and_overwrites_nothing() {
    let Some(wrapper) = Wrapped::new() else { return };
    let own = wrapper.scratch.path("own");
    std::fs::create_dir(&own).unwrap();
    let mine = wrapper.scratch.file("own/tool", "mine", 0o755);
    let cases: &[(&[&str], i32, &[&str])] = &[
        (&["wrap", "./tool"], 125, &["./tool", "is a path"]),
        (&["wrap", "no-such-tool"], 127, &["no-such-tool", "not found"]),
        (&["wrap", "tool", "--", "--bogus"], 125, &["--bogus"]),
        (&["wrap", "tool", "--", "--limit", "1M"], 125, &["too small"]),
        (&["wrap", "--", "--limit", "64M"], 125, &["No command given"]),
        (&["wrap", "tool", "--dir", &own], 125, &["own/tool", "stays", "--dir"]),
        (&["unwrap", "tool"], 125, &["tool", "is not wrapped"]),
        (&["unwrap", "tool", "--dir", &own], 125, &["tool", "is not wrapped"]),
        (&["unwrap"], 125, &["COMMAND or --all"]),
        (&["unwrap", "--all", "tool"], 125, &["--all"]),
        (&["wrap", "--service", "a/b"], 125, &["--service"]),
        (&["wrap", "--service", "nothing"], 125, &["nothing.service", "no such unit"]),
        (&["wrap", "--service", "a.socket"], 125, &["--service", "name of a service"]),
        (&["unwrap", "--service", "nothing"], 125, &["nothing.service", "is not wrapped"]),
        (&["wrap", "tool", "--", "--check"], 125, &["--check"]),
        (&["wrap", "tool", "--", "--wrapped"], 125, &["--wrapped"]),
        (&["wrap", "tool", "--", "--limit", "64M", "foo"], 125, &["foo", "no flag"]),
        (&["wrap", "tool", "--", "--log", "a.log"], 125, &["--log", "absolute"]),
    ];
    for (arguments, status, words) in cases {
        assert_refused(&wrapper.memfold(arguments), *status, words);
    }
    assert_eq!(std::fs::read(&mine).unwrap(), b"mine");
    assert_eq!(std::fs::metadata(&mine).unwrap().permissions().mode() & 0o777, 0o755);
    assert_eq!(wrapper.done(&["wrap"]), "");
}

#[test]
fn services_get_a_drop_in_and_lose_it() {
    let Some(wrapper) = Wrapped::new() else { return };
    std::fs::create_dir_all(wrapper.scratch.path("config/systemd/user")).unwrap();
    let unit = "[Service]\nExecStart=/usr/bin/env tool\n";
    wrapper.scratch.file("config/systemd/user/a.service", unit, 0o644);
    let path = wrapper.scratch.path("config/systemd/user/a.service.d/memfold.conf");
    let output = wrapper.done(&["wrap", "--service", "a", "--", "--slowdown", "5%"]);
    assert_eq!(output, format!("{path}\n"));
    let memfold = wrapper.bin.join("memfold");
    let line = format!(
        "ExecStart=\nExecStart={} run --if-possible --slowdown 5%% -- /usr/bin/env tool\n",
        memfold.display()
    );
    assert!(std::fs::read_to_string(&path).unwrap().contains(&line));
    assert!(wrapper.done(&["wrap"]).starts_with("a.service: "));
    wrapper.done(&["unwrap", "--all"]);
    assert!(!std::path::Path::new(&path).parent().unwrap().exists());
}

#[test]
fn drop_ins_of_others_stay_and_count() {
    let Some(wrapper) = Wrapped::new() else { return };
    let folder = wrapper.scratch.path("config/systemd/user/a.service.d");
    std::fs::create_dir_all(&folder).unwrap();
    let unit = "[Service]\nExecStart=/usr/bin/env tool\n";
    wrapper.scratch.file("config/systemd/user/a.service", unit, 0o644);
    let mine = "config/systemd/user/a.service.d/memfold.conf";
    wrapper.scratch.file(mine, "[Service]\n", 0o644);
    let assert_refusal = |arguments: &[&str], words: &[&str]| {
        assert_refused(&wrapper.memfold(arguments), 125, words);
    };
    assert_refusal(&["wrap", "--service", "a"], &["memfold.conf", "stays"]);
    assert_refusal(&["unwrap", "--service", "a"], &["memfold.conf", "stays"]);
    std::fs::rename(wrapper.scratch.path(mine), format!("{folder}/override.conf")).unwrap();
    wrapper.done(&["wrap", "--service", "a"]);
    std::fs::write(format!("{folder}/override.conf"), unit).unwrap();
    assert_refusal(&["wrap", "--service", "a"], &["override.conf", "ExecStart"]);
}

/// A shell ends at Ctrl-C only if the command that it waits for is ended by the signal.
#[test]
fn the_signal_that_ends_a_wrapped_command_is_seen() {
    use std::os::unix::process::ExitStatusExt;
    let Some(wrapper) = Wrapped::new() else { return };
    wrapper.scratch.file("bin/killed", "#!/bin/sh\nkill -$1 $$\n", 0o755);
    wrapper.done(&["wrap", "killed", "--", "--limit", "64M"]);
    for signal in [2, 6, 11, 15] {
        // A test in the background inherits that SIGINT is ignored.
        let mut command = Command::new("env");
        command.args(["--default-signal=INT", "killed", &signal.to_string()]);
        command.env("PATH", wrapper.path());
        command.env_remove("MEMFOLD_RUN").env_remove("MEMFOLD_DISABLE");
        assert_eq!(command.status().unwrap().signal(), Some(signal));
    }
}
