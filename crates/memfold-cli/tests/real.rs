//! Well-known programs under `memfold run` in less memory than they want: they must give what they
//! give without it. One that is not installed is passed over, with a line that says so.
mod common;
use common::{Scratch, compile_go, managed_in};
use memfold_testkit::random::Random;
use std::process::Command;

/// The path of an installed program that can be run under memfold.
fn find(name: &str) -> Option<String> {
    let found = Command::new("sh").args(["-c", &format!("command -v {name}")]).output().unwrap();
    let path = String::from_utf8(found.stdout).unwrap().trim().to_string();
    if path.is_empty() {
        eprintln!("SKIPPED: {name} is not installed");
        return None;
    }
    Some(std::fs::canonicalize(path).unwrap().into_os_string().into_string().unwrap())
}

/// Asserts that a command prints the same with `--limit` as without memfold, and that its memory
/// was folded.
#[track_caller]
fn assert_same(limit: &str, command: &[&str]) {
    let plain = Command::new(command[0]).args(&command[1..]).output().unwrap();
    assert!(plain.status.success(), "{command:?}: {}", String::from_utf8_lossy(&plain.stderr));
    let Some(output) = managed_in("", &["--limit", limit], command) else { return };
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {text}");
    assert!(output.stdout == plain.stdout, "{command:?} prints something else: {text}");
    assert!(text.contains("major"), "{command:?} was never folded: {text}");
    println!("{}: {}", command[0], text.trim());
}

/// An interpreter that has the modules, itself: `python3` may be a script that starts it.
fn python(modules: &str) -> Option<String> {
    for name in ["python3", "/usr/bin/python3"] {
        let script = format!("import sys, {modules}; print(sys.executable)");
        if let Ok(output) = Command::new(name).args(["-c", &script]).output()
            && output.status.success()
        {
            return Some(String::from_utf8(output.stdout).unwrap().trim().to_string());
        }
    }
    eprintln!("SKIPPED: no python3 has {modules} (scripts/setup installs it)");
    None
}

/// The path of a file of `programs/`.
fn program(name: &str) -> String {
    format!("{}/tests/programs/{name}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn numpy_computes() {
    let Some(python) = python("numpy") else { return };
    assert_same("96M", &[&python, &program("numpy_arrays.py")]);
}

#[test]
fn pandas_groups_and_joins() {
    let Some(python) = python("numpy, pandas") else { return };
    assert_same("128M", &[&python, &program("pandas_tables.py")]);
}

#[test]
fn java_keeps_a_heap() {
    let Some(java) = find("java") else { return };
    if find("javac").is_none() {
        return;
    }
    assert_same("64M", &[&java, "-Xmx300m", "-XX:+UseSerialGC", &program("Heap.java")]);
    assert_same("80M", &[&java, "-Xmx300m", "-XX:+UseG1GC", &program("Heap.java")]);
}

#[test]
fn go_keeps_a_heap() {
    let Some(program) = compile_go("heap") else { return };
    assert_same("48M", &[&program.path]);
}

#[test]
fn xz_compresses_to_the_same_bytes() {
    let Some(xz) = find("xz") else { return };
    let (scratch, mut random) = (Scratch::new(), Random::new(1));
    let text: String = (0..160_000)
        .map(|i| {
            let word = random.word();
            format!("{{\"id\":{},\"number\":{i},\"name\":\"item {}\"}}\n", word >> 40, word >> 52)
        })
        .collect();
    let file = scratch.file("text", text, 0o644);
    assert_same("32M", &[&xz, "--lzma2=preset=0,dict=16MiB", "-T1", "-k", "-c", &file]);
}

#[test]
fn sort_sorts() {
    let Some(sort) = find("sort") else { return };
    let (scratch, mut random) = (Scratch::new(), Random::new(1));
    let lines: String =
        (0..400_000).map(|i| format!("{:016x} line {i}\n", random.word())).collect();
    let file = scratch.file("lines", lines, 0o644);
    assert_same("32M", &[&sort, "-S", "200M", "--parallel=2", &file]);
}

#[test]
fn sqlite3_keeps_a_database_in_memory() {
    let Some(sqlite3) = find("sqlite3") else { return };
    let script = "create table t(a integer primary key, b text);
        with recursive n(i) as (select 1 union all select i+1 from n where i<300000)
        insert into t select i, 'text '||i||' '||hex(i*7919) from n;
        create index x on t(b); select count(*), max(b) from t where b like '%7%'; select b from t order by b limit 3;";
    assert_same("24M", &[&sqlite3, ":memory:", script]);
}

#[test]
fn node_keeps_a_map() {
    let Some(node) = find("node") else { return };
    let script = "const m = new Map(); for (let i = 0; i < 300000; i++) m.set(i, {a: 'v' + i, b: [i, i + 1]});
        let s = 0; for (const [k, v] of m) s += v.b[1] + v.a.length; console.log(s);";
    assert_same("64M", &[&node, "-e", script]);
}

#[test]
fn gcc_compiles_to_the_same_code() {
    let Some(gcc) = find("gcc") else { return };
    let functions: String = (0..1500)
        .map(|i| format!("int f{i}(int a, int b) {{ int s = 0; for (int k = a; k < b; k++) s += k * {i} ^ (s >> 3); return s; }}\n"))
        .collect();
    let scratch = Scratch::new();
    let file = scratch.file("many.c", functions, 0o644);
    assert_same("24M", &[&gcc, "-O2", "-S", "-o", "-", &file]);
}

#[test]
fn stress_ng_verifies_its_memory() {
    let Some(stress) = find("stress-ng") else { return };
    let flags = ["--vm", "1", "--vm-bytes", "96M", "--vm-method", "all", "--verify", "-t", "5"];
    let Some(output) =
        managed_in("", &["--limit", "64M"], &[&[stress.as_str()], &flags[..]].concat())
    else {
        return;
    };
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{text}");
    println!("{}", text.trim());
}
