//! Programs that no dynamic linker of glibc prepares: static ones, and those of musl. The library
//! loads them itself. They must do the same as without memfold.
use crate::common::real::{assert_same, installed, plainly};
use crate::common::{Scratch, assert_refused, binaries, folded_in, run};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/programs");

/// A compiler, and the flags that make it link without the dynamic linker of glibc.
type Kind = (&'static str, &'static [&'static str]);
/// One kind with each C library: at a fixed address, and by its own dynamic linker.
const KINDS: [Kind; 2] = [("gcc", &["-static"]), ("musl-gcc", &[])];
const OTHER_KINDS: [Kind; 2] = [("gcc", &["-static-pie"]), ("musl-gcc", &["-static"])];

/// Compiles a C file of `programs/` in each kind.
fn compile_all(scratch: &Scratch, kinds: &[Kind], name: &str) -> Vec<String> {
    let source = format!("{SOURCES}/{name}.c");
    let build = |(n, (compiler, flags)): (usize, &Kind)| {
        let compiler = installed(compiler)?;
        let path = scratch.path(&format!("{name}-{n}"));
        let mut build = Command::new(&compiler);
        build.args(["-O1", "-I", SOURCES, "-pthread", "-w", "-o", &path, &source]).args(*flags);
        let output = build.output().unwrap();
        // musl has fewer headers of the kernel, and fewer functions.
        let is_musl = compiler.ends_with("musl-gcc");
        assert!(output.status.success() || is_musl, "{name} {flags:?}: {output:?}");
        output.status.success().then_some(path)
    };
    kinds.iter().enumerate().filter_map(build).collect()
}

/// Asserts that a C program of each kind finds every byte right in each of `promises`, with at
/// least `least_mib` folded.
#[track_caller]
fn assert_right(kinds: &[Kind], name: &str, least_mib: u64, promises: &[&str]) {
    let scratch = Scratch::new();
    for program in compile_all(&scratch, kinds, name) {
        for promise in promises {
            let command = [program.as_str(), promise];
            let flags = ["--resident", "8M"];
            let Some((output, stats)) = folded_in("", &flags, least_mib, &command) else { return };
            let errors = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(0), "{command:?}: {errors}");
            assert_eq!(output.stdout, b"right\n", "{command:?}: {errors}");
            assert_eq!(stats["unmanaged_programs"].as_u64().unwrap_or(0), 0, "{errors}");
        }
    }
}

/// Compiles C text as a static program.
fn fixed(scratch: &Scratch, name: &str, source: &str) -> String {
    scratch.compile(name, source, &["-static", "-pthread"])
}

/// Packagers set the path where a library finds others. That moves its dynamic section.
#[test]
fn library_that_patchelf_has_changed_loads_every_program() {
    let Some((bin, patchelf)) = binaries().zip(installed("patchelf")) else { return };
    let scratch = Scratch::new();
    for name in ["memfold", "libmemfold_preload.so"] {
        std::fs::copy(bin.join(name), scratch.path(name)).unwrap();
    }
    let library = scratch.path("libmemfold_preload.so");
    let change =
        ["--set-rpath", "$ORIGIN:/a/path/that/is/longer/than/the/names/before/it", &library];
    assert!(Command::new(patchelf).args(change).status().unwrap().success());
    let dynamic = scratch.compile("dynamic", "int main(void) { return 0; }", &[]);
    let all = compile_all(&scratch, &KINDS, "heap");
    for command in all.iter().map(|path| vec![path.as_str(), "brk"]).chain([vec![dynamic.as_str()]])
    {
        let output = run(&scratch.0, &["--resident", "8M"], &command);
        assert!(output.status.success(), "{command:?}: {output:?}");
    }
}

#[test]
fn static_heap_stays_right() {
    assert_right(&KINDS, "heap", 16, &["brk", "realloc", "fast"]);
    assert_right(&OTHER_KINDS, "heap", 16, &["brk"]);
}

#[test]
#[ignore = "a variant: make test-all"]
fn heap_of_other_static_programs_stays_right() {
    assert_right(&OTHER_KINDS, "heap", 16, &["realloc", "fast"]);
}

#[test]
fn patched_sites_of_a_static_program_change_nothing_else() {
    assert_right(&KINDS, "sites", 8, &["reads", "opens"]);
    assert_right(&OTHER_KINDS, "sites", 8, &["reads", "opens"]);
}

#[test]
fn signal_at_each_instruction_of_a_static_programs_call_leaves_none_blocked() {
    assert_none_blocked(&KINDS);
}

#[test]
#[ignore = "a variant: make test-all"]
fn signal_at_each_instruction_of_other_static_programs_calls_leaves_none_blocked() {
    assert_none_blocked(&OTHER_KINDS);
}

#[track_caller]
fn assert_none_blocked(kinds: &[Kind]) {
    let scratch = Scratch::new();
    for program in compile_all(&scratch, kinds, "stepped") {
        let Some((output, _)) = folded_in("", &["--resident", "8M"], 16, &[&program, "32"]) else {
            return;
        };
        assert_eq!(output.stdout, b"right\n", "{program}: {output:?}");
    }
}

#[test]
fn static_mappings_stay_right() {
    assert_right(&KINDS, "mappings", 20, &MAPPINGS);
}

const MAPPINGS: [&str; 4] = ["map_fixed_over", "mremap_move", "dontneed", "sealed"];

#[test]
#[ignore = "a variant: make test-all"]
fn mappings_of_other_static_programs_stay_right() {
    assert_right(&OTHER_KINDS, "mappings", 20, &MAPPINGS);
}

#[test]
fn static_program_has_signals_threads_and_children() {
    assert_signals_threads_and_children(&KINDS[..1]);
    let musl = &KINDS[1..];
    assert_right(musl, "signals", 24, &["alarms", "jumps"]);
    assert_right(musl, "threads", 8, &["ends", "churn"]);
    assert_right(musl, "children", 24, &["fork", "exec"]);
    assert_right(musl, "forks", 24, &["spawn", "daemon"]);
}

#[test]
#[ignore = "a variant: make test-all"]
fn other_static_programs_have_signals_threads_and_children() {
    assert_signals_threads_and_children(&KINDS[1..]);
    assert_signals_threads_and_children(&OTHER_KINDS);
}

#[track_caller]
fn assert_signals_threads_and_children(kinds: &[Kind]) {
    assert_right(kinds, "signals", 24, &["alarms", "jumps", "forks"]);
    assert_right(kinds, "threads", 8, &["slots", "shared", "ends", "churn"]);
    let children = ["fork", "threads", "copies", "generations", "spawn", "exec"];
    assert_right(kinds, "children", 24, &children);
    assert_right(kinds, "forks", 24, &["few_raw", "spawn", "daemon"]);
}

#[test]
fn static_program_passes_the_kernel_folded_memory() {
    assert_right(&KINDS, "calls", 32, &["all"]);
}

#[test]
#[ignore = "a variant: make test-all"]
fn other_static_programs_pass_the_kernel_folded_memory() {
    assert_right(&OTHER_KINDS, "calls", 32, &["all"]);
}

#[test]
fn go_keeps_a_heap_without_cgo() {
    let (Some(go), scratch) = (installed("go"), Scratch::new()) else { return };
    for mode in ["exe", "pie"] {
        let program = scratch.path(mode);
        let mut build = Command::new(&go);
        build.args(["build", "-buildmode", mode, "-o", &program]);
        build.arg(format!("{SOURCES}/goroutines.go")).env("CGO_ENABLED", "0");
        assert!(build.status().unwrap().success());
        assert_same("32M", 24, &[&program]);
    }
}

#[test]
fn busybox_shell_runs_its_applets() {
    let Some(busybox) = installed("busybox") else { return };
    let script = r#"
        seq 1 500000 | sort -r | head -3; readlink /proc/self/exe
        dd if=/dev/zero bs=1M count=24 2>/dev/null | md5sum
        for n in 1 2 3; do echo $n | sed s/2/two/ & wait; done; tr '\0' ' ' </proc/self/cmdline"#;
    assert_same("8M", 1, &[&busybox, "sh", "-c", script]);
}

/// The text is printed by the program and by everything that it executes.
const TELLS: &str = r#"
    #include <fcntl.h>
    #include <stdio.h>
    #include <stdlib.h>
    #include <string.h>
    #include <sys/auxv.h>
    #include <sys/prctl.h>
    #include <sys/stat.h>
    #include <unistd.h>
    extern char **environ;
    int main(int count, char **words) {
        char text[4096], name[16];
        for (int i = 0; i < count; i++) printf("[%s]", words[i]);
        for (char **each = environ; *each; each++) if (!strncmp(*each, "MEM", 3) || !strncmp(*each, "LD_", 3)) puts(*each);
        prctl(PR_GET_NAME, name);
        struct stat own;
        printf(" %s %s", (char *)getauxval(AT_EXECFN), name);
        if (getauxval(AT_PHDR) == 0 || getauxval(AT_BASE) != 0) puts("bad vector");
        for (int room = 5; room <= 4000; room += 3995) printf(" %.*s", (int)readlink("/proc/self/exe", text, room), text);
        snprintf(text, sizeof text, "/proc/%d/exe", getpid());
        printf(" %d %ld", stat(text, &own), (long)own.st_size);
        printf(" %d\n", fstat(open("/proc/self/exe", O_RDONLY), &own) == 0 && own.st_size > 100000);
        size_t len = 48 << 20, sum = 0;
        char *data = malloc(len);
        for (size_t i = 0; i < len; i += 64) data[i] = i >> 12;
        for (size_t i = 0; i < len; i += 64) sum += data[i];
        printf("%zu\n", sum);
        fflush(stdout);
        if (count > 1 && !strcmp(words[1], "again")) execl("/proc/self/exe", "other name", "end", NULL);
        if (count > 1 && !strcmp(words[1], "by number")) {
            int file = open(words[2], O_RDONLY | O_CLOEXEC);
            fexecve(file, (char *[]){"", "end", NULL}, environ);
        }
        return 7;
    }"#;

/// Asserts that a command prints the same text and ends with the same status as without memfold.
/// The last program that it executes is compiled from [`TELLS`].
#[track_caller]
fn assert_told(command: &[&str]) {
    let baseline = Command::new(command[0]).args(&command[1..]).output().unwrap();
    let Some((output, stats)) = folded_in("", &["--limit", "16M"], 24, command) else { return };
    let errors = String::from_utf8_lossy(&output.stderr);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert_eq!(text(&output.stdout), text(&baseline.stdout), "{command:?}: {errors}");
    assert_eq!(output.status.code(), baseline.status.code(), "{command:?}: {errors}");
    assert!(!errors.contains("memfold can't manage"), "{command:?}: {errors}");
    drop(stats);
}

#[test]
fn static_program_sees_what_the_kernel_would_have_left() {
    let scratch = Scratch::new();
    for (name, flags) in [("fixed", "-static"), ("movable", "-static-pie")] {
        let program = scratch.compile(name, TELLS, &[flags]);
        assert_told(&[&program]);
        assert_told(&[&program, "again"]);
        assert_told(&[&program, "by number", &program]);
        let script = scratch.file("script", format!("#!{program}  an option \n"), 0o755);
        let outer = scratch.file("outer", format!("#! {script}\n"), 0o755);
        for script in [&script, &outer] {
            assert_told(&[script, "word"]);
            assert_told(&["sh", "-c", &format!("{script} 'a b' ''; exit 3")]);
        }
        assert_told(&["env", "-i", &program]);
        let directory = scratch.0.to_str().unwrap();
        let python = format!(
            "import os; os.chdir('{directory}'); os.environ['LD_BIND_NOW'] = '1'\n\
             pid = os.fork()\n\
             if pid: print(os.waitpid(pid, 0)[1])\n\
             else: os.execve(os.open('{name}', os.O_RDONLY), ['zero', ''], os.environ)\n\
             fd = os.memfd_create('made'); os.write(fd, open('{name}', 'rb').read())\n\
             pid = os.posix_spawn('./{name}', ['', 'x'], os.environ); print(os.waitpid(pid, 0)[1])"
        );
        assert_told(&["python3", "-c", &python]);
    }
}

/// A program with code on its stack, and one that must not have such a stack.
#[test]
fn static_program_has_the_stack_that_it_asks_for() {
    let source = r#"
        #include <signal.h>
        #include <stdio.h>
        #include <string.h>
        #include <unistd.h>
        static int (*kept)(int);
        static int call(int times) { return times ? call(times - 1) + 1 : kept(41); }
        static void no(int signal) { _exit(3); }
        int main(int count, char **words) {
            int more = count;
            int nested(int number) { return number + more; }
            signal(SIGSEGV, no);
            kept = nested;
            if (count > 1) return call(10000) != 10043;
            unsigned char code[64] = {0xb8, 42, 0, 0, 0, 0xc3};
            __asm__ volatile("" : : "r"(code) : "memory");
            return ((int (*)(void))code)() != 42;
        }"#;
    let (Some(bin), scratch) = (binaries(), Scratch::new()) else { return };
    for flags in [&["-static", "-w"][..], &["-static-pie", "-w"]] {
        for (stack, ends) in [("execstack", 0), ("noexecstack", 3)] {
            let program = scratch.compile(stack, source, &[flags, &["-z", stack]].concat());
            for command in [&[program.as_str()][..], &[&program, "deep"]] {
                let output = run(&bin, &["--summary"], command);
                let errors = String::from_utf8_lossy(&output.stderr);
                assert_eq!(output.status.code(), Some(ends), "{flags:?} {command:?}: {errors}");
                assert!(!errors.contains("unmanaged"), "{errors}");
            }
        }
    }
}

/// Another process of the run asks for the program of a loaded one, in each way.
#[test]
fn program_of_a_loaded_process_is_known_to_others_of_the_run() {
    let source = r#"
        #include <stdio.h>
        #include <unistd.h>
        int main(int count, char **words) {
            if (count > 2) return puts("executed") < 0;
            puts("ready");
            fflush(stdout);
            char end;
            return read(0, &end, 1) != 0;
        }"#;
    let script = r#"
import os, subprocess, sys
child = subprocess.Popen(sys.argv[1:2], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/")
child.stdout.readline()
link = f"/proc/{child.pid}/exe"
auxiliary = open(f"/proc/{child.pid}/auxv", "rb").read()
with open(f"/proc/{child.pid}/environ", "rb") as file: environment = file.read()
print(os.readlink(link), os.stat(link) == os.stat(sys.argv[1]), b"MEMFOLD_PROGRAM" in environment)
print(os.readlink(f"/proc/{os.getpid()}/exe") == os.readlink("/proc/self/exe"))
print(open(link, "rb").read() == open(sys.argv[1], "rb").read(), os.access(link, os.X_OK))
sys.stdout.flush()
subprocess.run([link, "a", "b"])
child.stdin.close()
print(child.wait(), os.path.islink(link))
"#;
    let (Some(bin), scratch) = (binaries(), Scratch::new()) else { return };
    let program = fixed(&scratch, "a name with spaces", source);
    let command = ["python3", "-c", script, &program];
    let output = run(&bin, &[], &command);
    let errors = String::from_utf8_lossy(&output.stderr);
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.stdout, plainly(&command), "{text}{errors}");
    assert!(text.contains("executed"), "{text}");
}

#[test]
fn damaged_static_program_ends_as_plainly_or_with_a_line() {
    let (Some(bin), scratch) = (binaries(), Scratch::new()) else { return };
    let program = fixed(&scratch, "whole", "int main(void) { return 0; }");
    let bytes = std::fs::read(&program).unwrap();
    for (name, at, value) in
        [("entry", 28, 0xff), ("headers", 33, 0xff), ("size", 54, 1), ("machine", 18, 183)]
    {
        let mut bytes = bytes.clone();
        bytes[at] = value;
        bytes[at + 1] = value;
        let damaged_file = scratch.file(name, &bytes, 0o755);
        let output = run(&bin, &[], &[&damaged_file]);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(matches!(output.status.code(), Some(125 | 126)), "{name}: {errors}");
        assert!(errors.starts_with("memfold: ") && errors.lines().count() == 1, "{name}: {errors}");
        // As a child it gets the kernel's answer.
        let script = format!("{damaged_file}; echo $?");
        let shell = ["sh", "-c", &script];
        assert_eq!(run(&bin, &[], &shell).stdout, plainly(&shell), "{name}");
    }
    let short_file = scratch.file("cut", &bytes[..bytes.len() / 2], 0o755);
    assert_refused(&run(&bin, &[], &[&short_file]), 125, &["cut", "segment"]);
    let flags_missing = ["-Wl,--dynamic-linker=/no/such/linker"];
    let program_missing =
        scratch.compile("missing", "int main(void) { return 0; }", &flags_missing);
    assert_refused(&run(&bin, &[], &[&program_missing]), 127, &["/no/such/linker", "No such file"]);
}

/// Without randomization, the stack is at known addresses.
#[test]
fn program_whose_addresses_are_taken_ends_with_a_line() {
    let (Some(bin), scratch) = (binaries(), Scratch::new()) else { return };
    let (stack, flags) = (0x7fff_ffff_d000u64, 5u32);
    let mut elf = [0u8; 4096];
    let mut copy = |at: usize, bytes: &[u8]| elf[at..at + bytes.len()].copy_from_slice(bytes);
    copy(0, b"\x7fELF\x02\x01\x01");
    copy(16, &[2, 0, 62, 0, 1]);
    copy(24, &stack.to_le_bytes());
    copy(32, &[64]);
    copy(52, &[64, 0, 56, 0, 1]);
    copy(64, &[1, 0, 0, 0]);
    copy(68, &flags.to_le_bytes());
    copy(80, &stack.to_le_bytes());
    for at in [96, 104] {
        copy(at, &4096u64.to_le_bytes());
    }
    let program = scratch.file("taken", elf, 0o755);
    let memfold = bin.join("memfold").into_os_string().into_string().unwrap();
    let words = ["-R", &memfold, "run", "--limit", "64M", "--", &program];
    let output = Command::new("setarch").args(words).env_remove("MEMFOLD_RUN").output().unwrap();
    assert_refused(&output, 125, &["taken", "mapping it at its addresses failed"]);
}

#[test]
fn library_says_what_it_is_when_executed_by_hand() {
    let Some(bin) = binaries() else { return };
    let library = bin.join("libmemfold_preload.so");
    assert!(std::fs::metadata(&library).unwrap().permissions().mode() & 0o111 != 0);
    let output = Command::new(&library).output().unwrap();
    assert_refused(&output, 125, &["This file is a library", "memfold run"]);
}

#[test]
fn children_of_all_kinds_count_against_one_limit() {
    let scratch = Scratch::new();
    let program = fixed(&scratch, "static", TELLS);
    let script = format!(
        "for n in 1 2 3; do {program} >/dev/null & done; wait
         exec python3 -c 'import subprocess; print(subprocess.run([\"{program}\"]).returncode)'"
    );
    let flags = ["--limit", "24M"];
    let Some((output, _)) = folded_in("", &flags, 16, &["sh", "-c", &script]) else { return };
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.stdout.ends_with(b"\n7\n"), "{output:?}");
    assert!(!errors.contains("memfold can't manage"), "{errors}");
}
