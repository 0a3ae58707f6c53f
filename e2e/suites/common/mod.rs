//! Shared by the end-to-end tests: the built command, and a scratch directory that is removed when
//! dropped.
#![allow(dead_code)] // Each test file uses a part of this.
pub mod blk;
pub mod cgroup;
pub mod folded;
pub mod real;
pub use folded::*;
pub use memfold_testkit::scratch::Scratch;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// After this a program hangs. It is far above what any takes on a machine with a load of fifty, and
/// below what ends a test without a word (`.config/nextest.toml`).
pub const HANG: Duration = Duration::from_secs(300);

/// Returns the directory of the built `memfold` and preload library: MEMFOLD_BIN_DIR, or the
/// directory where cargo puts this test's build.
///
/// Both are built separately (`cargo build -p memfold-cli -p memfold-preload`). Without them the test
/// can't run. Then it fails under CI=true; elsewhere it prints a line and passes.
pub fn binaries() -> Option<PathBuf> {
    let directory = match std::env::var_os("MEMFOLD_BIN_DIR") {
        Some(directory) => PathBuf::from(directory),
        None => build_directory(),
    };
    with(directory, "memfold", "memfold-cli")
        .and_then(|directory| with(directory, "libmemfold_preload.so", "memfold-preload"))
}

/// Returns the directory where cargo puts what it builds with this test.
pub fn build_directory() -> PathBuf {
    std::env::current_exe().unwrap().ancestors().nth(2).unwrap().to_path_buf()
}

/// Returns [`binaries`] if memfold-bench is there too.
pub fn benchmarks() -> Option<PathBuf> {
    with(binaries()?, "memfold-bench", "memfold-bench")
}

fn with(directory: PathBuf, file: &str, package: &str) -> Option<PathBuf> {
    if directory.join(file).is_file() {
        return Some(directory);
    }
    let text = format!("no {file} in {}: run cargo build -p {package}", directory.display());
    assert!(std::env::var("CI").as_deref() != Ok("true"), "{text}");
    eprintln!("SKIPPED, NOTHING WAS TESTED: {text}");
    None
}

/// Returns the paging flag that MEMFOLD_TEST_PAGING asks for. It lets a developer run whole suites
/// with another paging. Runs that name a paging keep it.
fn asked_flags(arguments: &[&str]) -> Vec<String> {
    let is_run = matches!(arguments.first(), Some(&"run" | &"record")) && arguments.contains(&"--");
    let setting = std::env::var("MEMFOLD_TEST_PAGING");
    match setting {
        Ok(paging) if is_run && !arguments.contains(&"--paging") => {
            vec!["--paging".to_string(), paging]
        }
        _ => Vec::new(),
    }
}

/// Returns a command that runs `memfold` with `arguments`, in an environment without memfold's
/// variables.
pub fn memfold(directory: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(directory.join("memfold"));
    let extra_flags = asked_flags(arguments);
    let (first, rest) = arguments.split_at(!extra_flags.is_empty() as usize);
    command
        .args(first)
        .args(extra_flags)
        .args(rest)
        .env_remove("MEMFOLD_RUN")
        .env_remove("MEMFOLD_DISABLE")
        .stdin(Stdio::null());
    // Tests started in the background or by nohup inherit these signals as ignored, and a shell
    // can't trap a signal that was ignored at its start. SAFETY: `signal` is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT] {
                libc::signal(signal, libc::SIG_DFL);
            }
            Ok(())
        })
    };
    command
}

/// Returns the world that MEMFOLD_TEST_WORLD asks for, for tests without one: "unprivileged" or
/// "own".
fn asked_world(world: &str) -> &str {
    match std::env::var("MEMFOLD_TEST_WORLD").as_deref() {
        Ok("unprivileged") if world.is_empty() => UNPRIVILEGED,
        _ => world,
    }
}

/// Returns [`memfold`] in a `world` of [`managed_in`].
pub fn memfold_in(world: &str, directory: &Path, arguments: &[&str]) -> Command {
    let inner = memfold(directory, arguments);
    let world = asked_world(world);
    if world.is_empty() {
        return inner;
    }
    let mut outer = Command::new("unshare");
    outer.args(["-m", "sh", "-c", world, "sh"]).arg(inner.get_program()).args(inner.get_args());
    outer.env_remove("MEMFOLD_RUN").env_remove("MEMFOLD_DISABLE").stdin(Stdio::null());
    outer
}

/// Reads and parses a JSON file.
pub fn json(path: &str) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Runs `memfold run --limit 64M FLAGS -- COMMAND` to its end.
pub fn run(directory: &Path, flags: &[&str], command: &[&str]) -> Output {
    let arguments = [&["run", "--limit", "64M"], flags, &["--"], command].concat();
    memfold(directory, &arguments).output().unwrap()
}

/// Asserts that memfold itself refused: it ended with `status`, printed nothing to stdout, and one
/// line with every word to stderr.
#[track_caller]
pub fn assert_refused(output: &Output, status: i32, words: &[&str]) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{text}");
    assert!(output.stdout.is_empty(), "{:?}", output.stdout);
    assert!(
        text.starts_with("memfold: ") && text.ends_with('\n') && text.lines().count() == 1,
        "{text:?}"
    );
    assert!(words.iter().all(|word| text.contains(word)), "{text:?} lacks one of {words:?}");
}

/// A compiled program from `programs/`.
pub struct Program {
    pub scratch: Scratch,
    pub path: String,
}

pub fn compile(name: &str) -> Program {
    let sources = concat!(env!("CARGO_MANIFEST_DIR"), "/programs");
    let source = std::fs::read_to_string(format!("{sources}/{name}.c")).unwrap();
    let scratch = Scratch::new();
    let path = scratch.compile(
        name,
        &source,
        &["-I", sources, "-pthread", "-Wall", "-Wno-unused-function"],
    );
    Program { scratch, path }
}

/// Changes a static program so that the kernel executes it, but memfold's library can't load it: a
/// segment reaches past the end of the file.
pub fn make_unmanageable(scratch: &Scratch, program: &str) {
    const STACK: [u8; 4] = 0x6474_e551u32.to_le_bytes();
    let (mut elf, long) = (std::fs::read(program).unwrap(), (1u64 << 30).to_le_bytes());
    let at = (64..4096).step_by(8).find(|at| elf[*at..*at + 4] == STACK).unwrap();
    let mut copy = |offset: usize, bytes: &[u8]| {
        elf[at + offset..at + offset + bytes.len()].copy_from_slice(bytes);
    };
    copy(0, &[1, 0, 0, 0, 4, 0, 0, 0]);
    copy(16, &(1u64 << 30).to_le_bytes());
    copy(32, &long);
    copy(40, &long);
    let name = program.rsplit('/').next().unwrap();
    scratch.file(name, elf, 0o755);
}

/// A Go program from `programs/`, compiled with cgo. Without cgo it would be static.
pub fn compile_go(name: &str) -> Option<Program> {
    let (go, scratch) = (real::installed("go")?, Scratch::new());
    let path = scratch.path(name);
    let source = format!("{}/programs/{name}.go", env!("CARGO_MANIFEST_DIR"));
    let mut build = Command::new(go);
    build.args(["build", "-o", &path, &source]).env("CGO_ENABLED", "1");
    assert!(build.status().unwrap().success());
    Some(Program { scratch, path })
}

/// Runs a command to its end under memfold with `--resident SIZE`. Fails if it hangs.
pub fn managed(resident: &str, command: &[&str]) -> Option<Output> {
    managed_in("", &["--resident", resident], command)
}

/// Runs a command to its end under memfold with `flags` and a summary. Fails if it hangs. A `world` is a shell script that gets the command as `"$@"`, and runs
/// as root in a new mount namespace.
pub fn managed_in(world: &str, flags: &[&str], command: &[&str]) -> Option<Output> {
    let bin = binaries()?;
    let arguments = [&["run", "--summary"], flags, &["--"], command].concat();
    let mut runner = memfold_in(world, &bin, &arguments);
    let scratch = Scratch::new();
    let (out, err) = (scratch.path("out"), scratch.path("err"));
    runner
        .stdout(std::fs::File::create(&out).unwrap())
        .stderr(std::fs::File::create(&err).unwrap());
    let mut child = runner.spawn().unwrap();
    let begin = Instant::now();
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if begin.elapsed() > HANG => {
                child.kill().unwrap();
                child.wait().unwrap();
                panic!("{command:?} hangs: {}", std::fs::read_to_string(&err).unwrap());
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    Some(Output {
        status,
        stdout: std::fs::read(out).unwrap(),
        stderr: std::fs::read(err).unwrap(),
    })
}

/// A program under `memfold run` that keeps memory until it is told to end.
pub struct Holder {
    pub runner: Child,
    pub pid: u32,
    pub input: Option<ChildStdin>,
    pub output: BufReader<ChildStdout>,
}

impl Holder {
    pub fn start(
        bin: &Path,
        scratch: &Scratch,
        flags: &[&str],
        program: &str,
        mib: &str,
    ) -> Holder {
        let arguments = [&["run"], flags, &["--", program, mib]].concat();
        let mut command = memfold(bin, &arguments);
        command.env("XDG_RUNTIME_DIR", &scratch.0).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut runner = command.spawn().unwrap();
        let (input, output) = (runner.stdin.take(), BufReader::new(runner.stdout.take().unwrap()));
        let mut holder = Holder { runner, pid: 0, input, output };
        let ready = holder.line();
        holder.pid =
            ready.strip_prefix("ready ").unwrap_or_else(|| panic!("{ready:?}")).parse().unwrap();
        holder
    }

    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_string()
    }

    /// Makes the program verify every byte.
    pub fn check(&mut self) {
        self.input.as_mut().unwrap().write_all(b"check\n").unwrap();
        assert_eq!(self.line(), "right");
    }

    /// Returns the program's resident anonymous memory, in MiB.
    pub fn resident_mib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
    }

    /// Waits until the program's resident memory is as wanted.
    #[track_caller]
    pub fn wait_for(&self, what: &str, wanted: impl Fn(u64) -> bool) {
        let begin = Instant::now();
        while !wanted(self.resident_mib()) {
            assert!(begin.elapsed() < HANG, "{what}: {} MiB resident", self.resident_mib());
            std::thread::sleep(Duration::from_millis(20));
        }
        println!(
            "{what}: {} MiB resident after {:.2} s",
            self.resident_mib(),
            begin.elapsed().as_secs_f64()
        );
    }

    pub fn end(mut self) {
        drop(self.input.take());
        assert_eq!(self.runner.wait().unwrap().code(), Some(0));
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.runner.kill();
        let _ = self.runner.wait();
    }
}

/// A world that runs the command as the user nobody, with /dev/userfaultfd open to all.
pub const NOBODY: &str = r#"
    node=$(mktemp -u) && mknod $node c $(tr : ' ' </sys/class/misc/userfaultfd/dev) && chmod 666 $node &&
    mount --bind $node /dev/userfaultfd && rm $node &&
    exec setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all -- "$@""#;

/// A world that runs the command as the user nobody, without capabilities and without a userfaultfd
/// for faults in the kernel. The command and its library are copied to a directory that all users
/// can read.
pub const UNPRIVILEGED: &str = r#"
    test "$(cat /proc/sys/vm/unprivileged_userfaultfd)" = 0 || { echo "vm.unprivileged_userfaultfd is not 0" >&2; exit 99; }
    mount -t tmpfs none /mnt && chmod 755 /mnt && cp "$1" "$(dirname "$1")/libmemfold_preload.so" /mnt && shift && cd / &&
    exec setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs /mnt/memfold "$@""#;

/// Returns the world of suites that run without privileges, where it can be made.
/// MEMFOLD_TEST_WORLD=own runs them as the calling user. Tests that need a privilege are in other
/// suites, except memcached's `-u`, which is a run of its own.
pub fn unprivileged() -> &'static str {
    // SAFETY: the call has no preconditions.
    let is_root = unsafe { libc::geteuid() } == 0;
    let is_own = std::env::var("MEMFOLD_TEST_WORLD").as_deref() == Ok("own");
    if is_root && !is_own && can_make_worlds() { UNPRIVILEGED } else { "" }
}

/// Returns whether worlds can be made here. If not, prints a line, or fails under CI=true.
pub fn can_make_worlds() -> bool {
    let status = Command::new("unshare")
        .args(["-m", "sh", "-c", "mount --bind /dev/null /proc/meminfo"])
        .output();
    let can = status.is_ok_and(|output| output.status.success());
    if !can {
        let text = "mount namespaces need root (CAP_SYS_ADMIN) and unshare of util-linux";
        assert!(std::env::var("CI").as_deref() != Ok("true"), "{text}");
        eprintln!("SKIPPED, NOTHING WAS TESTED: {text}");
    }
    can
}

/// A mounted file system. Dropping it unmounts it.
pub struct Mounted(String);

impl Mounted {
    /// Mounts a new tmpfs of this size in a new directory.
    pub fn tmpfs(dir: &str, size: &str) -> Option<Mounted> {
        std::fs::create_dir(dir).unwrap();
        let options = format!("size={size}");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &options, "tmpfs", dir]).stderr(Stdio::null());
        if !mount.status().is_ok_and(|status| status.success()) {
            eprintln!("SKIPPED, NOTHING WAS TESTED: mounting a small tmpfs needs root");
            return None;
        }
        Some(Mounted(dir.to_string()))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}
