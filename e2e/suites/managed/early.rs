//! Threads that the constructor of a library starts before memfold's constructor runs. They are
//! managed like all others.
use crate::common::real::{all_installed, copied, installed, missing, plainly};
use crate::common::{Scratch, assert_refused, binaries, compile, memfold, printed_in};
use std::path::Path;
use std::process::Command;

/// Compiles `programs/NAME.c` as a shared library, and returns its path.
fn library(scratch: &Scratch, name: &str) -> String {
    let source = format!("{}/programs/{name}.c", env!("CARGO_MANIFEST_DIR"));
    let flags = ["-shared", "-fPIC", "-DLIBRARY", "-pthread", "-Wall"];
    scratch.compile(&format!("lib{name}.so"), &std::fs::read_to_string(source).unwrap(), &flags)
}

/// Asserts that a command prints the same as without memfold, and is folded, if it preloads a library
/// whose constructor starts a thread.
#[track_caller]
fn assert_same_beside(limit: &str, least_mib: u64, command: &[&str]) {
    let scratch = Scratch::new();
    let preload = format!("LD_PRELOAD={}", library(&scratch, "beside"));
    let command = [&["env", &preload], command].concat();
    let expected = plainly(&command);
    let Some(output) = printed_in("", &["--limit", limit], least_mib, &command) else { return };
    assert!(output == expected, "{command:?} prints something else");
}

/// Compiles the program whose library starts a thread.
fn program_with_a_thread(scratch: &Scratch) -> String {
    let library = library(scratch, "early");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/programs/early.c");
    let source = std::fs::read_to_string(source).unwrap();
    scratch.compile("early", &source, &[&library, "-Wl,-rpath,$ORIGIN", "-pthread", "-Wall"])
}

#[test]
fn thread_of_a_constructor_is_managed_like_others() {
    let scratch = Scratch::new();
    let program = program_with_a_thread(&scratch);
    for paging in ["userfaultfd", "protection"] {
        for way in ["discard", "read", "block", "touch"] {
            let flags = ["--limit", "24M", "--paging", paging];
            let Some(output) = printed_in("", &flags, 24, &[&program, way]) else { return };
            assert_eq!(output, b"right\n", "{paging} {way}");
        }
    }
}

/// A thread that can't be interrupted would pass no gate.
#[test]
fn process_with_a_thread_that_blocks_all_is_unmanaged() {
    let (Some(bin), scratch) = (binaries(), Scratch::new()) else { return };
    let program = program_with_a_thread(&scratch);
    let reason = "can't be interrupted";
    let words = ["run", "--limit", "24M", "--", &program, "touch"];
    let refusal = memfold(&bin, &words).env("DEAF", "1").output().unwrap();
    assert_refused(&refusal, 125, &["The gate is unavailable", reason]);
    let script = "DEAF=1 \"$0\" touch";
    let words = ["run", "--limit", "24M", "--", "sh", "-c", script, &program];
    let output = memfold(&bin, &words).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.stdout, b"right\n", "{errors}");
    let is_it = |line: &&str| line.contains("runs unmanaged") && line.contains(reason);
    assert_eq!(errors.lines().filter(is_it).count(), 1, "{errors}");
}

/// jemalloc's constructor starts the thread that gives memory back.
#[test]
fn jemalloc_gives_memory_back_in_its_own_thread() {
    let library = "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2";
    if !Path::new(library).exists() {
        return missing("libjemalloc.so.2 is not installed");
    }
    let program = compile("churn");
    let preload = format!("LD_PRELOAD={library}");
    let settings = "MALLOC_CONF=background_thread:true,dirty_decay_ms:30,muzzy_decay_ms:30";
    for paging in ["userfaultfd", "protection"] {
        let command = ["env", &preload, settings, &program.path];
        let flags = ["--limit", "32M", "--paging", paging];
        let Some(output) = printed_in("", &flags, 24, &command) else { return };
        assert_eq!(output, b"right\n", "{paging}");
    }
}

#[test]
fn python_runs_beside_a_thread_of_a_constructor() {
    let Some(python) = installed("python3") else { return };
    let script = "all = {n: str(n) * 9 for n in range(400000)}
for turn in range(3):
    for n in range(turn, 400000, 3): all[n] += 'x'
print(len(all), sum(map(len, all.values())), hash(tuple(all[n][:3] for n in range(0, 400000, 1000))) and 1)";
    assert_same_beside("32M", 16, &[&python, "-c", script]);
}

#[test]
#[ignore = "a variant: make test-all"]
fn node_runs_beside_a_thread_of_a_constructor() {
    let Some(node) = installed("node") else { return };
    let script = "const all = [];
        for (let i = 0; i < 400000; i++) all.push({ id: i, name: 'n' + i, list: [i, i + 1] });
        let sum = 0;
        for (const each of all) sum += each.id + each.list[1] + each.name.length;
        console.log(sum);";
    assert_same_beside("64M", 24, &[&node, "-e", script]);
}

#[test]
#[ignore = "a variant: make test-all"]
fn java_runs_beside_a_thread_of_a_constructor() {
    let Some([java, _]) = all_installed(["java", "javac"]) else { return };
    let scratch = Scratch::new();
    let program = copied(&scratch, "Heap.java");
    assert_same_beside("64M", 24, &[&java, "-Xmx300m", "-XX:+UseSerialGC", &program]);
}

#[test]
#[ignore = "a variant: make test-all"]
fn redis_runs_beside_a_thread_of_a_constructor() {
    let Some([server, shell]) = all_installed(["redis-server", "redis-cli"]) else { return };
    let scratch = Scratch::new();
    let value = "string.rep('value ' .. i .. ' ', 40)";
    let set = format!("for i = 1, 120000 do redis.call('SET', i, {value}) end");
    let check = format!(
        "for i = 1, 120000 do if redis.call('GET', i) ~= {value} then return i end end return 'right'"
    );
    let script = format!(
        "\"$1\" --port 0 --save '' --unixsocket {socket} --dir {directory} >{directory}/log &
        ask() {{ \"$2\" -s {socket} \"$@\"; }}
        until ask ping >{directory}/ping 2>&1 && grep -q PONG {directory}/ping; do kill -0 $! || exit; sleep 0.05; done
        ask eval \"{set}\" 0 >{directory}/ping && ask eval \"{check}\" 0
        ask shutdown nosave; wait",
        socket = scratch.path("socket"),
        directory = scratch.path(""),
    )
    .replace("\"$2\"", &shell);
    assert_same_beside("24M", 24, &["sh", "-c", &script, "sh", &server]);
}

/// Go's threads are interrupted on their alternate stacks, because those of goroutines are too small.
#[test]
fn program_with_a_go_library_is_managed() {
    let (Some(go), scratch) = (installed("go"), Scratch::new()) else { return };
    let library = scratch.path("libgolib.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/programs/golib.go");
    let build = ["build", "-buildmode=c-shared", "-o", &library, source];
    assert!(Command::new(go).args(build).env("CGO_ENABLED", "1").status().unwrap().success());
    let program = "#include <stdio.h>\n#include <stdlib.h>
        enum { LEN = 64 << 20 };
        long Turns(void), Wrong(void);
        int main(void) {
            char *memory = malloc(LEN);
            long wrong = 0, before;
            for (long at = 0; at < LEN; at += 64) memory[at] = at / 4096 % 100;
            for (before = Turns(); Turns() < before + 300;)
                for (long at = 0; at < LEN; at += 64) wrong += memory[at] != at / 4096 % 100;
            wrong += Wrong();
            return puts(wrong ? \"wrong\" : \"right\"), 0;
        }";
    let program = scratch.compile("program", program, &[&library, "-Wl,-rpath,$ORIGIN"]);
    let Some(output) = printed_in("", &["--limit", "32M"], 24, &[&program]) else { return };
    assert_eq!(output, b"right\n");
}
