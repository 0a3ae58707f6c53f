//! Well-known programs under `memfold run`, in less memory than they need and without any
//! privilege. They must print the same as without it.
use crate::common::real::{
    all_installed, assert_prints, assert_same, copied, installed, plainly, python, python_package,
    seen, source_of,
};
use crate::common::{Scratch, compile_go, open_scratch, printed_in, unprivileged};
use memfold_testkit::random::Random;
use std::process::Command;

#[test]
#[ignore = "a variant: make test-all"]
fn numpy_computes() {
    let (Some(python), scratch) = (python("numpy"), Scratch::new()) else { return };
    assert_same("96M", 32, &[&python, &copied(&scratch, "numpy_arrays.py")]);
}

#[test]
#[ignore = "a variant: make test-all"]
fn pandas_groups_and_joins() {
    let (Some(python), scratch) = (python("numpy, pandas"), Scratch::new()) else { return };
    assert_same("128M", 32, &[&python, &copied(&scratch, "pandas_tables.py")]);
}

/// Tasks, threads and processes at once, which share and pass on folded memory.
#[test]
fn python_runs_tasks_and_pools() {
    let (Some(python), scratch) = (python("asyncio"), Scratch::new()) else { return };
    assert_same("128M", 24, &[&python, &copied(&scratch, "pools.py")]);
}

#[test]
#[ignore = "a variant: make test-all"]
fn duckdb_groups_and_sorts() {
    let (Some(python), scratch) = (python("sqlite3"), Scratch::new()) else { return };
    let Some(package) = python_package("duckdb") else { return };
    let (script, (world, path_shown)) = (copied(&scratch, "duckdb_tables.py"), seen(&package));
    let output = plainly(&[&python, &script, &package]);
    assert_prints(&world, &["--limit", "96M"], 32, &[&python, &script, &path_shown], &output);
}

#[test]
fn java_keeps_a_heap() {
    let (Some(java), scratch) = (installed("java"), Scratch::new()) else { return };
    if installed("javac").is_none() {
        return;
    }
    let program = copied(&scratch, "Heap.java");
    assert_same("64M", 24, &[&java, "-Xmx300m", "-XX:+UseSerialGC", &program]);
}

#[test]
#[ignore = "a variant: make test-all"]
fn java_keeps_a_heap_of_regions() {
    let (Some([java, _]), scratch) = (all_installed(["java", "javac"]), Scratch::new()) else {
        return;
    };
    let program = copied(&scratch, "Heap.java");
    assert_same("80M", 8, &[&java, "-Xmx300m", "-XX:+UseG1GC", &program]);
}

#[test]
fn go_keeps_a_heap() {
    let Some(program) = compile_go("heap") else { return };
    assert_same("48M", 24, &[&program.path]);
}

#[test]
#[ignore = "a variant: make test-all"]
fn perl_sorts_hash_keys() {
    let Some(perl) = installed("perl") else { return };
    let script = r#"my %h; $h{"key " . $_ * 7919 % 1000003} = "value $_" for 1..100000;
        my $sum = 0; my $turn = 0;
        for my $key (sort keys %h) { $sum = ($sum * 31 + ord(substr $h{$key}, -1) + length $key) % 1000007; $turn++ }
        delete $h{"key $_"} for 1..200000;
        print "$turn $sum ", scalar(%h), "\n";"#;
    assert_same("24M", 5, &[&perl, "-e", script]);
}

#[test]
#[ignore = "a variant: make test-all"]
fn bash_keeps_large_arrays() {
    let Some(bash) = installed("bash") else { return };
    let script = r#"declare -a a; declare -A h
        for ((i = 0; i < 120000; i++)); do a[i]="item number $i"; h[key$((i % 30011))]+=$i; done
        for ((i = 0; i < 120000; i += 7)); do unset "a[i]"; done
        sum=0; for x in "${a[@]}"; do ((sum = (sum * 3 + ${#x}) % 1000003)); done
        for k in "${!h[@]}"; do ((sum = (sum + ${#h[$k]}) % 1000003)); done
        printf '%s\n' "${a[@]}" | sort | tail -1; (echo "in a child: ${#a[@]}"); echo "$sum ${#h[@]}""#;
    assert_same("48M", 8, &[&bash, "-c", script]);
}

#[test]
#[ignore = "a variant: make test-all"]
fn ruby_keeps_objects_and_fibers() {
    let (Some(ruby), scratch) = (installed("ruby"), Scratch::new()) else { return };
    assert_same("36M", 6, &[&ruby, "--disable-gems", &copied(&scratch, "objects.rb")]);
}

#[test]
#[ignore = "a variant: make test-all"]
fn xz_compresses_to_the_same_bytes() {
    let Some(xz) = installed("xz") else { return };
    let (scratch, mut random) = (Scratch::new(), Random::new(1));
    let text: String = (0..160_000)
        .map(|i| {
            let word = random.word();
            format!("{{\"id\":{},\"number\":{i},\"name\":\"item {}\"}}\n", word >> 40, word >> 52)
        })
        .collect();
    let file = scratch.file("text", text, 0o644);
    assert_same("32M", 3, &[&xz, "--lzma2=preset=0,dict=16MiB", "-T1", "-k", "-c", &file]);
}

#[test]
#[ignore = "a variant: make test-all"]
fn sort_sorts() {
    let Some(sort) = installed("sort") else { return };
    let (scratch, mut random) = (Scratch::new(), Random::new(1));
    let lines: String =
        (0..400_000).map(|i| format!("{:016x} line {i}\n", random.word())).collect();
    let file = scratch.file("lines", lines, 0o644);
    assert_same("32M", 4, &[&sort, "-S", "200M", "--parallel=2", &file]);
}

/// tar keeps a record of 32 MiB in memory.
#[test]
#[ignore = "a variant: make test-all"]
fn tar_packs_and_unpacks() {
    let (Some(tar), scratch) = (installed("tar"), Scratch::new()) else { return };
    let pack = [tar.as_str(), "-b", "65536", "-cf", "-", "-C", "/usr/include", "."];
    let pack_output = plainly(&pack);
    assert_prints(unprivileged(), &["--limit", "24M"], 8, &pack, &pack_output);
    let file = scratch.file("all.tar", &pack_output, 0o644);
    assert_same("24M", 8, &[&tar, "-b", "65536", "-xOf", &file]);
}

#[test]
#[ignore = "a variant: make test-all"]
fn sqlite3_keeps_a_database_in_memory() {
    let Some(sqlite3) = installed("sqlite3") else { return };
    let script = "create table t(a integer primary key, b text);
        with recursive n(i) as (select 1 union all select i+1 from n where i<300000)
        insert into t select i, 'text '||i||' '||hex(i*7919) from n;
        create index x on t(b); select count(*), max(b) from t where b like '%7%'; select b from t order by b limit 3;";
    assert_same("24M", 5, &[&sqlite3, ":memory:", script]);
}

#[test]
fn node_keeps_a_map() {
    let Some(node) = installed("node") else { return };
    let script = "const m = new Map(); for (let i = 0; i < 300000; i++) m.set(i, {a: 'v' + i, b: [i, i + 1]});
        let s = 0; for (const [k, v] of m) s += v.b[1] + v.a.length; console.log(s);";
    assert_same("64M", 24, &[&node, "-e", script]);
}

/// Compiles a part of zstd.
#[test]
fn gcc_compiles_zstd_to_the_same_code() {
    let Some(gcc) = installed("gcc") else { return };
    let (scratch, source) = (Scratch::new(), source_of("zstd-sys"));
    let copy_arguments = ["-r", &format!("{source}/zstd/lib"), &scratch.path("lib")];
    assert!(Command::new("cp").args(copy_arguments).status().unwrap().success());
    let file = scratch.path("lib/compress/zstd_compress.c");
    assert_same("32M", 12, &[&gcc, "-O2", "-S", "-o", "-", &file]);
}

#[test]
#[ignore = "a variant: make test-all"]
fn rustc_compiles_memchr_to_the_same_code() {
    let (scratch, source) = (open_scratch(), source_of("memchr"));
    let copy_arguments = ["-r", &format!("{source}/src"), &scratch.path("src")];
    assert!(Command::new("cp").args(copy_arguments).status().unwrap().success());
    let sysroot_output = plainly(&["rustc", "--print", "sysroot"]);
    let sysroot = String::from_utf8(sysroot_output).unwrap().trim().to_string();
    // The compiler writes files into its working directory.
    let script = |sysroot: &str| {
        format!(
            "cd {} && exec {sysroot}/bin/rustc src/lib.rs --crate-name memchr --edition 2021 --crate-type rlib \
             --cap-lints allow --cfg 'feature=\"std\"' --cfg 'feature=\"alloc\"' -O --emit=asm -o -",
            scratch.0.display()
        )
    };
    let output = plainly(&["sh", "-c", &script(&sysroot)]);
    let (world, path_shown) = seen(&sysroot);
    let command = ["sh", "-c", &script(&path_shown)];
    assert_prints(&world, &["--limit", "48M"], 12, &command, &output);
}

#[test]
#[ignore = "a variant: make test-all"]
fn stress_ng_verifies_its_memory() {
    let (Some(stress), scratch) = (installed("stress-ng"), open_scratch()) else { return };
    let flags = ["--vm", "1", "--vm-bytes", "96M", "--vm-method", "all", "--verify", "-t", "5"];
    let directory = ["--temp-path", scratch.0.to_str().unwrap()];
    let command = [&[stress.as_str()], &flags[..], &directory].concat();
    printed_in(unprivileged(), &["--limit", "64M"], 24, &command);
}
