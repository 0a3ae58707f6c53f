//! memfold's commit charge where the system limits it (`vm.overcommit_memory=2`). This is a setting
//! of the whole machine. The test sets a limit above all needs.
use crate::common::{Scratch, assert_figures, binaries, json, run};
use std::process::{Child, Command, Stdio};

/// Restores the settings when dropped, and also when the test is killed: a shell waits for its end.
struct Counted(Child);

impl Counted {
    /// Returns `None` if this process may not change the settings.
    fn begin() -> Option<Counted> {
        let script = r#"
            trap '' INT TERM HUP QUIT
            cd /proc/sys/vm && memory=$(cat overcommit_memory) kbytes=$(cat overcommit_kbytes) ratio=$(cat overcommit_ratio) || exit 1
            back() {
                echo $memory >overcommit_memory
                if [ $kbytes != 0 ]; then echo $kbytes >overcommit_kbytes; else echo $ratio >overcommit_ratio; fi
            }
            { echo 1000000000000 >overcommit_kbytes && echo 2 >overcommit_memory; } 2>/dev/null || { back 2>/dev/null; exit 1; }
            echo counted; read -r end; back"#;
        let mut child = Command::new("sh")
            .args(["-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        std::io::BufRead::read_line(
            &mut std::io::BufReader::new(child.stdout.take().unwrap()),
            &mut line,
        )
        .unwrap();
        let child_counted = Counted(child);
        (line == "counted\n").then_some(child_counted)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        self.0.wait().unwrap();
    }
}

/// Prints this process's commit charge in MiB: at its start, and after it has filled and read
/// folded memory.
const PROGRAM: &str = r#"
import hashlib
def counted():
    kib = size = 0
    for line in open("/proc/self/smaps"):
        if line.startswith("Size:"): size = int(line.split()[1])
        if line.startswith("VmFlags:") and " ac" in line: kib += size
    return kib >> 10
first = counted()
data = [hashlib.sha256(b"%d" % n).digest() * 128 for n in range(50000)]
good = all(one == hashlib.sha256(b"%d" % n).digest() * 128 for n, one in enumerate(data))
print(good, first, counted())
"#;

#[test]
fn where_reservations_count_memfold_asks_for_what_it_fills() {
    let Some(bin) = binaries() else { return };
    let baseline = Command::new("python3").args(["-c", PROGRAM]).output().unwrap();
    let Some(child_counted) = Counted::begin() else {
        eprintln!("SKIPPED, NOTHING WAS TESTED: vm.overcommit_memory can't be changed here");
        return;
    };
    let scratch = Scratch::new();
    let figures = scratch.path("figures");
    let output = run(&bin, &["--stats-file", &figures], &["python3", "-c", PROGRAM]);
    drop(child_counted);
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    let numbers = |bytes: &[u8]| -> Vec<u64> {
        let text = String::from_utf8_lossy(bytes);
        let good = text.strip_prefix("True ").unwrap_or_else(|| panic!("{text:?} {words}"));
        good.split_whitespace().map(|n| n.parse().unwrap()).collect()
    };
    let (baseline, managed) = (numbers(&baseline.stdout), numbers(&output.stdout));
    println!("plainly {baseline:?} MiB, under memfold {managed:?}");
    assert_figures(&json(&figures), &words, 32);
    // The charge was terabytes once. An engine has frames for twice the limit and 64 MiB, pools for
    // the limit, and tables.
    assert!(managed[0] < baseline[0] + 16, "an idle process: {managed:?}, {baseline:?} plainly");
    assert!(
        managed[1] < baseline[1] + 3 * 64 + 128,
        "a process that folds: {managed:?}, {baseline:?} plainly"
    );
}
