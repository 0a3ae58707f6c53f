//! Limits that fall while processes sleep. A process that was far below its share when it began must
//! have an engine by then, because no other thread can make one for it.
use super::anonymous_kib;
use crate::common::{HANG, Holder, Scratch, binaries, compile, memfold};
use memfold_testkit::random::Random;
use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

/// The limit at first. All processes of a test have less than a sixteenth of it.
const LIMIT: &str = "2G";

/// A run of `lowered`: its kind, the MiB that each process holds, and the number of processes.
type Case = (&'static str, u64, u64);

fn ask(bin: &Path, scratch: &Scratch, arguments: &[&str]) -> String {
    let mut command = memfold(bin, arguments);
    let Output { status, stdout, stderr } =
        command.env("XDG_RUNTIME_DIR", &scratch.0).output().unwrap();
    assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).unwrap()
}

fn start(bin: &Path, scratch: &Scratch, program: &str, (kind, mib, count): Case) -> Holder {
    Holder::start(bin, scratch, &["--limit", LIMIT], program, &format!("{kind}:{mib}:{count}"))
}

/// Lowers the limit of a run to what its processes have when they fold most of their data. Waits
/// until they have no more than that.
fn lower(bin: &Path, program: &str, case: Case) {
    let (scratch, (_, mib, count)) = (Scratch::new(), case);
    let mut run = start(bin, &scratch, program, case);
    let before = anonymous_kib(program);
    assert!(before >= (mib * count) << 10, "{case:?}: {before} KiB");
    // The data compresses to a tenth. An engine has half a MiB, and a sixteenth of the data stays.
    let limit = 4096 + count * (1536 + mib * 1024 / 6);
    ask(bin, &scratch, &["set", &run.pid.to_string(), "--limit", &format!("{limit}K")]);
    let begin = Instant::now();
    loop {
        let now = anonymous_kib(program);
        if now <= limit + 2048 {
            println!("{case:?}: {before} KiB, then {now} with a limit of {limit}");
            break;
        }
        assert!(begin.elapsed() < HANG, "{case:?}: {now} KiB with a limit of {limit}");
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(run.input.take());
    assert_eq!(run.line(), "right", "{case:?}");
    run.end();
}

#[test]
fn lowered_limit_reaches_processes_that_sleep() {
    let (Some(bin), program) = (binaries(), compile("lowered")) else { return };
    let mut random = Random::new(1);
    for _ in 0..3 {
        lower(&bin, &program.path, ("alone", 20 + random.below(100) as u64, 1));
        for kind in ["fork", "exec"] {
            let count = 2 + random.below(8) as u64;
            let mib = 6 + random.below(120 / count as usize - 6) as u64;
            lower(&bin, &program.path, (kind, mib, count));
        }
    }
}

/// A process without an engine has less than 4 MiB, or a sixteenth of the limit. A lower limit may
/// make it too large.
#[test]
fn lowered_limit_reaches_a_small_process_when_it_maps_memory() {
    let (Some(bin), program) = (binaries(), compile("lowered")) else { return };
    let scratch = Scratch::new();
    let mut run = start(&bin, &scratch, &program.path, ("alone", 3, 1));
    let pid = run.pid.to_string();
    let mut engines = |limit: &str| {
        ask(&bin, &scratch, &["set", &pid, "--limit", limit]);
        std::io::Write::write_all(run.input.as_mut().unwrap(), b"map\n").unwrap();
        assert_eq!(run.line(), "mapped");
        let about: serde_json::Value =
            serde_json::from_str(&ask(&bin, &scratch, &["stat", &pid, "--json"])).unwrap();
        about["processes"].as_array().unwrap().len()
    };
    assert_eq!([engines("1G"), engines("32M")], [0, 1]);
    drop(run.input.take());
    assert_eq!(run.line(), "right");
    run.end();
}
