//! Runs that share the limit of a group.
use crate::common::{HANG, Holder, Program, Scratch, assert_refused, binaries, compile, memfold};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

const GROUP: &str = "some-runs";

/// A group, and the program of its runs.
struct TestGroup {
    bin: PathBuf,
    scratch: Scratch,
    program: Program,
}

impl TestGroup {
    fn make(limit: &str) -> Option<TestGroup> {
        let group =
            TestGroup { bin: binaries()?, scratch: Scratch::new(), program: compile("holder") };
        assert!(group.set(limit).contains(&format!("group {GROUP}: limit ")));
        Some(group)
    }

    fn ask(&self, arguments: &[&str]) -> Output {
        memfold(&self.bin, arguments).env("XDG_RUNTIME_DIR", &self.scratch.0).output().unwrap()
    }

    #[track_caller]
    fn said(&self, arguments: &[&str]) -> String {
        let output = self.ask(arguments);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    #[track_caller]
    fn set(&self, limit: &str) -> String {
        self.said(&["set", "--group", GROUP, "--limit", limit])
    }

    fn start(&self, flags: &[&str], mib: &str) -> Holder {
        let flags = [&["--group", GROUP], flags].concat();
        Holder::start(&self.bin, &self.scratch, &flags, &self.program.path, mib)
    }

    fn about(&self) -> Value {
        serde_json::from_str(&self.said(&["stat", "--group", GROUP, "--json"])).unwrap()
    }

    /// Returns a figure of each run, in the order of the PIDs.
    fn figures(&self, name: &str, runs: &[&Holder]) -> Vec<u64> {
        let about = self.about();
        let all = about["runs"].as_array().unwrap();
        let of = |run: &&Holder| {
            all.iter().find(|one| one["run"] == run.runner.id()).unwrap()[name].as_u64().unwrap()
        };
        runs.iter().map(of).collect()
    }

    /// Waits until a figure of each run is as wanted, in MiB.
    #[track_caller]
    fn wait_for(&self, name: &str, runs: &[&Holder], wanted: impl Fn(&[u64]) -> bool) {
        let begin = Instant::now();
        loop {
            let mib: Vec<u64> = self.figures(name, runs).iter().map(|n| n >> 20).collect();
            if wanted(&mib) {
                return;
            }
            assert!(begin.elapsed() < HANG, "{name}: {mib:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    #[track_caller]
    fn assert_within(&self, most_mib: u64) {
        let about = self.about();
        let sum = |name: &str| {
            let of = |run: &Value| run[name].as_u64().unwrap();
            about["runs"].as_array().unwrap().iter().map(of).sum::<u64>() >> 20
        };
        assert!(sum("share_bytes") <= most_mib, "{about:#}");
    }
}

#[test]
fn b7_runs_share_a_limit_and_what_one_leaves() {
    let Some(group) = TestGroup::make("120M") else { return };
    let mut one = group.start(&["--slowdown", "off"], "96");
    one.check();
    let mut two = group.start(&["--slowdown", "off"], "96");
    for _ in 0..3 {
        one.check();
        two.check();
        group.assert_within(120);
    }
    group.wait_for("used_bytes", &[&one, &two], |sizes| sizes.iter().sum::<u64>() <= 120);
    one.end();
    group.wait_for("share_bytes", &[&two], |share| share[0] >= 96);
    while two.resident_mib() < 96 {
        two.check();
    }
    // A limit that is set holds for the runs that live.
    group.set("64M");
    group.wait_for("used_bytes", &[&two], |sizes| sizes[0] <= 64);
    two.check();
    two.end();
    assert!(group.set("none").contains("removed"));
}

#[test]
fn b7_idle_runs_give_to_runs_that_work() {
    let Some(group) = TestGroup::make("160M") else { return };
    let mut idle = group.start(&["--idle", "1"], "128");
    idle.check();
    group.wait_for("need_bytes", &[&idle], |need| need[0] < 100);
    let mut works = group.start(&["--slowdown", "off"], "96");
    works.check();
    group.wait_for("share_bytes", &[&works], |share| share[0] >= 96);
    while works.resident_mib() < 96 {
        works.check();
    }
    group.assert_within(160);
    idle.check();
    works.check();
}

/// Both runs have less than a sixteenth of the limit when they begin to sleep.
#[test]
fn b7_idle_run_and_lowered_limit_fold_what_was_far_below_it() {
    let Some(group) = TestGroup::make("2G") else { return };
    let mut sleeps = group.start(&["--slowdown", "off"], "60");
    let mut idle = group.start(&["--idle", "1"], "60");
    idle.wait_for("an idle run", |mib| mib < 40);
    assert!(sleeps.resident_mib() >= 60);
    group.set("64M");
    sleeps.wait_for("a lowered limit", |mib| mib < 50);
    sleeps.check();
    idle.check();
    sleeps.end();
    idle.end();
}

#[test]
fn b7_weights_and_floors_say_who_has_more() {
    // Folded, each run takes about 40 MiB.
    let Some(group) = TestGroup::make("120M") else { return };
    let mut light = group.start(&["--slowdown", "off"], "120");
    let mut heavy = group.start(&["--slowdown", "off", "--weight", "300"], "120");
    group.wait_for("share_bytes", &[&light, &heavy], |share| share[0] < 50 && share[1] > 70);
    light.check();
    heavy.check();
    heavy.end();
    let mut holder = group.start(&["--slowdown", "off", "--floor", "70M", "--weight", "1"], "120");
    group.wait_for("share_bytes", &[&light, &holder], |share| share[0] <= 50 && share[1] >= 69);
    light.check();
    holder.check();
    group.assert_within(120);
}

#[test]
fn b7_a_killed_run_leaves_its_share() {
    let Some(group) = TestGroup::make("128M") else { return };
    let (mut one, mut two) = (group.start(&[], "96"), group.start(&[], "96"));
    let refusal = group.ask(&["set", "--group", GROUP, "--limit", "none"]);
    assert_refused(&refusal, 125, &[GROUP, "2 runs are in it"]);
    one.runner.kill().unwrap();
    one.runner.wait().unwrap();
    group.wait_for("share_bytes", &[&two], |share| share[0] >= 96);
    two.check();
    assert_eq!(group.about()["runs"].as_array().unwrap().len(), 1);
    two.runner.kill().unwrap();
    two.runner.wait().unwrap();
    group.set("none");
    let answer = group.ask(&["stat", "--group", GROUP]);
    assert_refused(&answer, 125, &["there is no group", "memfold set --group"]);
}

#[test]
fn b7_a_run_keeps_its_own_limit_too() {
    let Some(group) = TestGroup::make("256M") else { return };
    let mut run = group.start(&["--limit", "48M", "--slowdown", "off"], "96");
    run.check();
    run.wait_for("limit 48M", |mib| mib <= 48);
    let pid = run.pid.to_string();
    let answer = group.said(&["stat", &pid]);
    assert!(answer.contains("limit 48.0 MiB") && answer.contains("group some-runs: "), "{answer}");
    group.said(&["set", &pid, "--limit", "none"]);
    while run.resident_mib() < 96 {
        run.check();
    }
    assert!(group.said(&["run", "--list"]).contains("group some-runs: limit 256.0 MiB, 1 run,"));
    run.end();
}

#[test]
fn b7_a_group_that_is_full_takes_no_run() {
    let Some(group) = TestGroup::make("8M") else { return };
    // Folded, it takes more than the limit.
    let one = group.start(&[], "64");
    group.wait_for("least_bytes", &[&one], |least| least[0] >= 8);
    let refusal = group.ask(&["run", "--group", GROUP, "--", "true"]);
    assert_refused(&refusal, 125, &[GROUP, "its runs need all of its limit (8.0 MiB)"]);
    one.end();
    assert!(group.ask(&["run", "--group", GROUP, "--", "true"]).status.success());
}

#[test]
fn b7_a_stopped_run_is_named_where_it_keeps_its_share() {
    let Some(group) = TestGroup::make("64M") else { return };
    let mut one = group.start(&["--slowdown", "off"], "96");
    group.wait_for("share_bytes", &[&one], |share| share[0] == 64);
    let runner = one.runner.id();
    // SAFETY: kill has no pointers. The child was not waited for, so its number is its own.
    let kill = |signal| assert_eq!(unsafe { libc::kill(runner as i32, signal) }, 0);
    kill(libc::SIGSTOP);
    let refusal = group.ask(&["run", "--group", GROUP, "--", "true"]);
    kill(libc::SIGCONT);
    assert_refused(&refusal, 125, &[GROUP, "is stopped"]);
    assert!(group.ask(&["run", "--group", GROUP, "--", "true"]).status.success());
    one.check();
}

#[test]
fn b7_many_small_runs_start_at_once() {
    let Some(group) = TestGroup::make("64M") else { return };
    let start = |_| {
        let mut run = memfold(&group.bin, &["run", "--group", GROUP, "--", "cat"]);
        run.env("XDG_RUNTIME_DIR", &group.scratch.0).stdin(Stdio::piped()).spawn().unwrap()
    };
    let mut runs: Vec<_> = (0..12).map(start).collect();
    let begin = Instant::now();
    while group.about()["runs"].as_array().unwrap().len() < runs.len() {
        assert!(runs.iter_mut().all(|run| run.try_wait().unwrap().is_none()), "one was refused");
        assert!(begin.elapsed() < HANG, "{:#}", group.about());
    }
    for run in &mut runs {
        drop(run.stdin.take());
        assert_eq!(run.wait().unwrap().code(), Some(0));
    }
}

#[test]
fn groups_need_a_directory_of_their_own_and_room_for_a_file() {
    let Some(group) = TestGroup::make("64M") else { return };
    let directory = group.scratch.path("memfold");
    let open = |mode| {
        std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    open(0o755);
    assert_refused(&group.ask(&["set", "--group", GROUP, "--limit", "1G"]), 125, &["mode 700"]);
    open(0o700);
    let script = format!(
        "ulimit -f 1; exec {} set --group other --limit 1G",
        group.bin.join("memfold").display()
    );
    let mut command_below = std::process::Command::new("sh");
    command_below.args(["-c", &script]).env("XDG_RUNTIME_DIR", &group.scratch.0);
    assert_refused(&command_below.output().unwrap(), 125, &["ulimit -f"]);
}

#[test]
fn wrong_flags_of_groups_are_refused() {
    let Some(group) = TestGroup::make("64M") else { return };
    for (arguments, words) in [
        (&["run", "--group", "none-such", "--", "true"][..], "memfold set --group none-such"),
        (&["run", "--group", "../x", "--", "true"], "can't be a name"),
        (&["run", "--group", "", "--", "true"], "can't be a name"),
        (&["run", "--weight", "5", "--", "true"], "--weight: give --group NAME too"),
        (&["run", "--floor", "5M", "--", "true"], "--floor: give --group NAME too"),
        (&["run", "--group", GROUP, "--weight", "0", "--", "true"], "from 1 to 10000"),
        (&["run", "--group", GROUP, "--floor", "x", "--", "true"], "--floor"),
        (&["set", "--group", GROUP], "No limit given"),
        (&["set", "--group", GROUP, "--limit", "5"], "too small"),
        (&["set", "--group", GROUP, "--resident", "1G"], "--resident"),
        (&["set", "--group", GROUP, "1234", "--limit", "1G"], "cannot be used with"),
        (&["set", "--group", "none-such", "--limit", "none"], "there is no group"),
        (&["set", "--limit", "1G"], "required"),
        (&["wrap", "sh", "--", "--group", "a b"], "can't be a name"),
        (&["wrap", "sh", "--", "--weight", "5"], "give --group NAME too"),
    ] {
        assert_refused(&group.ask(arguments), 125, &[words]);
    }
    let outcome = group.ask(&["check", "--group", "none-such"]);
    assert_eq!(outcome.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&outcome.stdout).contains("there is no group none-such"));
    let file = group.scratch.path("memfold/some-runs.group");
    std::fs::write(file, b"something else").unwrap();
    for arguments in [&["stat", "--group", GROUP][..], &["run", "--group", GROUP, "--", "true"]] {
        assert_refused(
            &group.ask(arguments),
            125,
            &["no group of this version", "some-runs.group"],
        );
    }
}
