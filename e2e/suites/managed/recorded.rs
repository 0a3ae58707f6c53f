//! `memfold record`: which functions touch folded memory.
use crate::common::real::{installed, plainly};
use crate::common::{Scratch, assert_refused, binaries, compile, memfold};
use serde_json::Value;
use std::process::Command;

/// The files of a recording, and what memfold printed.
struct Recorded {
    /// The stacks, the outermost function first, with their loads.
    stacks: Vec<(Vec<String>, u64)>,
    profile: Value,
    picture: String,
    stats: Value,
    printed: String,
}

impl Recorded {
    /// Returns the loads of the stacks that have all these functions, in this order.
    fn loads(&self, functions: &[&str]) -> u64 {
        let has_all = |stack: &[String]| {
            let mut frames = stack.iter();
            functions.iter().all(|name| frames.any(|frame| frame.starts_with(name)))
        };
        self.stacks.iter().filter(|(stack, _)| has_all(stack)).map(|(_, loads)| loads).sum()
    }

    fn total(&self) -> u64 {
        self.loads(&[])
    }
}

/// Records a command. Its output must be what it prints without memfold.
fn record(flags: &[&str], command: &[&str]) -> Option<Recorded> {
    let (bin, scratch) = (binaries()?, Scratch::new());
    let [name, stats] = ["profile", "stats"].map(|name| scratch.path(name));
    let own = ["record", "--output", &name, "--stats-file", &stats];
    let output = memfold(&bin, &[&own, flags, &["--"], command].concat()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}");
    assert_eq!(output.stdout, plainly(command), "{text}");
    let read_file = |suffix: &str| std::fs::read_to_string(format!("{name}{suffix}")).unwrap();
    let line = |line: &str| {
        let (stack, loads) = line.rsplit_once(' ').unwrap();
        (stack.split(';').map(str::to_string).collect(), loads.parse().unwrap())
    };
    Some(Recorded {
        stacks: read_file(".collapsed").lines().map(line).collect(),
        profile: serde_json::from_str(&read_file(".json")).unwrap(),
        picture: read_file(".svg"),
        stats: serde_json::from_str(&std::fs::read_to_string(&stats).unwrap()).unwrap(),
        printed: text,
    })
}

#[test]
fn loads_are_of_the_functions_that_touch_the_memory() {
    let program = compile("recorded");
    // The ring has room for all samples, however late they are read.
    let flags = ["--limit", "16M", "--every", "64"];
    let Some(recording) = record(&flags, &[&program.path]) else { return };
    let about = format!("{}\n{:#?}", recording.printed, recording.stacks);
    // A third of the touched pages at least are folded then.
    let pages = (48 << 20) / 4096 / 3;
    for stack in [
        &["recorded", "main", "read_by_itself"][..],
        &["recorded", "main", "write_to_pipe"],
        &["recorded", "read_in_thread", "read_by_itself"],
        &["recorded", "main", "read_in_copy", "read_by_itself"],
        &["executed", "main", "read_by_itself"],
    ] {
        let loads = recording.loads(stack);
        assert!(loads >= pages / 3, "{stack:?}: {loads}, {about}");
    }
    let loads_named = recording.loads(&["recorded", "main"])
        + recording.loads(&["recorded", "read_in_thread"])
        + recording.loads(&["executed", "main"]);
    assert_eq!(loads_named, recording.total(), "{about}");
    assert!(recording.printed.contains("map_memory < main"), "{about}");
    let first = recording.printed.lines().find(|line| line.starts_with("memfold: 1. ")).unwrap();
    assert!(first.contains("% of its loads were of memory mapped by map_memory"), "{about}");
    assert!(recording.printed.contains("memfold: what to do: "), "{about}");
    let total = format!("{} loads of folded memory, by", recording.total());
    assert!(recording.picture.contains(&total), "{}", recording.picture);
    assert!(recording.picture.contains("read_by_itself: "), "{}", recording.picture);
    assert!(!recording.printed.contains("samples were lost"), "{about}");
    assert_eq!(weights(&recording.profile), recording.total(), "{about}");
}

#[test]
fn files_of_an_earlier_record_are_kept() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    scratch.file("profile.json", "precious", 0o644);
    let name = scratch.path("profile");
    let flags = ["record", "--output", &name, "--limit", "64M", "--", "true"];
    let output = memfold(&bin, &flags).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    let line = format!("the files of an earlier record are now {name}.json.old\n");
    assert!(output.status.success() && text.contains(&line), "{text}");
    let of = |suffix: &str| std::fs::read_to_string(format!("{name}{suffix}")).unwrap();
    assert!(of(".json.old") == "precious" && of(".json") != "precious", "{text}");
}

#[test]
fn each_load_is_sampled_or_counted_as_lost() {
    let program = compile("recorded");
    let flags = ["--limit", "16M", "--every", "1"];
    let Some(recording) = record(&flags, &[&program.path, "again"]) else { return };
    let loss = recording.printed.split_once(" samples were lost");
    let loss_count = loss
        .and_then(|(before, _)| before.rsplit_once(' '))
        .map_or(0, |(_, count)| count.parse::<u64>().unwrap());
    let of = |name: &str| recording.stats[name].as_u64().unwrap();
    let [loads, rescues, faults] = ["pgmajfault", "rescues", "faults"].map(of);
    let sample_count = recording.total() + loss_count;
    assert!(sample_count >= loads - loads / 50, "{sample_count} of {loads}, {}", recording.printed);
    assert!(
        sample_count <= (loads + rescues).max(faults),
        "{sample_count} of {loads}, {rescues}, {faults}"
    );
}

/// Containers have a seccomp filter. The program is started by one that makes a filter.
#[test]
fn process_under_a_filter_is_recorded() {
    let (program, starter) = (compile("recorded"), compile("filtered"));
    let flags = ["--limit", "16M"];
    let Some(recording) = record(&flags, &[&starter.path, &program.path, "again"]) else { return };
    let (loads, total) = (recording.loads(&["recorded", "main"]), recording.total());
    assert!(
        loads > 0 && loads >= total - total / 10,
        "{}\n{:#?}",
        recording.printed,
        recording.stacks
    );
}

/// Returns the loads of a profile of the Firefox Profiler, and checks that its tables fit together.
fn weights(profile: &Value) -> u64 {
    let of_thread = |thread: &Value| {
        let (samples, stacks) = (&thread["samples"], &thread["stackTable"]);
        let len = samples["length"].as_u64().unwrap() as usize;
        let list = |name: &str| samples[name].as_array().unwrap().clone();
        let (stack_list, weights) = (list("stack"), list("weight"));
        assert_eq!(
            (stack_list.len(), weights.len(), &samples["weightType"]),
            (len, len, &"samples".into())
        );
        let stack_count = stacks["length"].as_u64().unwrap();
        assert!(stack_list.iter().all(|stack| stack.as_u64().unwrap() < stack_count));
        weights.iter().map(|weight| weight.as_u64().unwrap()).sum::<u64>()
    };
    profile["threads"].as_array().unwrap().iter().map(of_thread).sum()
}

#[test]
fn python_functions_have_their_names() {
    let Some(python) = installed("python3") else { return };
    let mut question = Command::new(&python);
    question.args(["-c", "import sys; print(sys.version_info[1])"]);
    let version = String::from_utf8(question.output().unwrap().stdout).unwrap();
    if !(9..=13).contains(&version.trim().parse::<u32>().unwrap()) {
        return eprintln!(
            "SKIPPED: Python 3.{} is not one that memfold record knows",
            version.trim()
        );
    }
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/programs/recorded.py");
    let flags = ["--limit", "24M", "--every", "4"];
    let Some(recording) = record(&flags, &[&python, source, "200000"]) else { return };
    let about = format!("{}\n{:#?}", recording.printed, recording.stacks);
    let in_method = recording.stacks.iter().filter(|(stack, _)| {
        let at = |part: &str| stack.iter().position(|frame| frame.contains(part));
        let positions =
            [at("main (recorded.py:"), at("look_up (recorded.py:"), at("length_of (recorded.py:")];
        positions.is_sorted() && positions[0].is_some()
    });
    let in_method: u64 = in_method.map(|(_, loads)| loads).sum();
    assert!(in_method >= recording.total() / 2, "{in_method}, {about}");
    assert!(recording.printed.contains("length_of (recorded.py:"), "{about}");
    assert!(recording.printed.contains("build_table (recorded.py:"), "{about}");
}

#[test]
fn generated_code_of_node_has_its_names() {
    let Some(node) = installed("node") else { return };
    let script = "const map = new Map(); for (let n = 0; n < 300000; n++) map.set(n, {name: 'item ' + n, list: [n, n + 1]});
        function lookUp(count) { let sum = 0, at = 1; for (let n = 0; n < count; n++) { at = (at * 1103515245 + 12345) & 0x7fffffff; sum += map.get(at % 300000).list[1]; } return sum; }
        let sum = 0; for (let round = 0; round < 4; round++) sum += lookUp(20000); console.log(sum);";
    let flags = ["--limit", "60M", "--every", "8"];
    // V8 leaves a log in the current directory.
    let scratch = Scratch::new();
    let shell_script = "cd \"$0\" && exec \"$@\"";
    let command =
        ["sh", "-c", shell_script, &scratch.path(""), &node, "--perf-basic-prof", "-e", script];
    let Some(recording) = record(&flags, &command) else { return };
    let is_named = |(stack, _): &&(Vec<String>, u64)| stack.iter().any(|f| f.contains("lookUp"));
    let loads_named: u64 = recording.stacks.iter().filter(is_named).map(|(_, loads)| loads).sum();
    assert!(loads_named >= recording.total() / 2, "{}\n{:#?}", recording.printed, recording.stacks);
}

#[test]
fn bad_flags_are_refused_before_the_program_starts() {
    let (Some(bin), scratch) = (binaries(), Scratch::new()) else { return };
    let mark = scratch.path("begun");
    let refusal = |flags: &[&str], words: &[&str]| {
        let command = ["--", "touch", &mark];
        let mut record = memfold(&bin, &[&["record"], flags, &command].concat());
        assert_refused(&record.current_dir(&scratch.0).output().unwrap(), 125, words);
        assert_eq!(std::fs::read_dir(&scratch.0).unwrap().count(), 0, "no file is left: {flags:?}");
        assert!(!std::path::Path::new(&mark).exists(), "{flags:?}");
    };
    refusal(&["--every", "0"], &["--every"]);
    refusal(&["--output", "/nowhere/profile"], &["--output: /nowhere/profile.json", "No such"]);
    refusal(&["--list"], &["--list", "memfold run"]);
    refusal(&["--output", "x", "--limit", "1"], &["--limit"]);
    let nothing = memfold(&bin, &["record", "--every", "8"]).output().unwrap();
    assert_refused(&nothing, 125, &["memfold record [--limit SIZE] -- CMD"]);
}

#[test]
fn run_without_loads_says_so() {
    let Some(recording) = record(&["--limit", "1G"], &["true"]) else { return };
    assert!(recording.stacks.is_empty());
    assert!(
        recording.printed.contains("no load of folded memory was sampled"),
        "{}",
        recording.printed
    );
}
