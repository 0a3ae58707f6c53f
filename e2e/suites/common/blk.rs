//! A block-device server, and the client programs that use it.
use super::{Scratch, build_directory, memfold};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Output, Stdio};

/// A running server. Dropping it kills the server.
pub struct Blk {
    pub child: Child,
    pub out: BufReader<ChildStdout>,
    pub uri: String,
    pub scratch: Scratch,
}

/// The built command. The block tests don't need the preload library.
pub fn binary() -> PathBuf {
    match std::env::var_os("MEMFOLD_BIN_DIR") {
        Some(directory) => PathBuf::from(directory),
        None => build_directory(),
    }
}

impl Blk {
    /// Starts `memfold blk --unix SOCKET FLAGS` in a new scratch directory.
    pub fn start(flags: &[&str]) -> Blk {
        Blk::start_in(Scratch::new(), flags)
    }

    pub fn start_in(scratch: Scratch, flags: &[&str]) -> Blk {
        let socket = scratch.path("sock");
        let command = memfold(&binary(), &[&["blk", "--unix", &socket], flags].concat());
        Blk::spawn(scratch, command)
    }

    /// Starts a command that becomes a server, and waits for its first line.
    pub fn spawn(scratch: Scratch, mut command: Command) -> Blk {
        command.env("XDG_RUNTIME_DIR", &scratch.0).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut uri = String::new();
        out.read_line(&mut uri).unwrap();
        assert!(uri.starts_with("nbd"), "{uri:?}");
        Blk { child, out, uri: uri.trim().to_string(), scratch }
    }

    /// Ends the server with SIGTERM, as systemd does, asserts success, and returns the directory.
    pub fn stop(mut self) -> Scratch {
        self.signal(libc::SIGTERM);
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
        std::mem::replace(&mut self.scratch, Scratch::new())
    }

    /// Kills the server and returns the directory.
    pub fn kill(mut self) -> Scratch {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        std::mem::replace(&mut self.scratch, Scratch::new())
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: the process is a child that was not waited for, so its PID is not reused.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// Returns the URI of another export.
    pub fn export(&self, name: &str) -> String {
        self.uri.replace("///", &format!("///{name}"))
    }

    /// Runs `memfold blk ARGUMENTS` with this server's PID, unless the arguments name a server. The
    /// user may run other servers.
    pub fn ask(&self, arguments: &[&str]) -> Output {
        let is_named = arguments.contains(&"--control")
            || arguments[1..].iter().any(|word| word.parse::<u32>().is_ok());
        let pid = self.child.id().to_string();
        let own = if is_named { None } else { Some(pid.as_str()) };
        let mut command = memfold(&binary(), &[&["blk"], arguments, own.as_slice()].concat());
        command.env("XDG_RUNTIME_DIR", &self.scratch.0).output().unwrap()
    }

    /// Runs [`Blk::ask`], asserts success, and returns its stdout.
    #[track_caller]
    pub fn asked(&self, arguments: &[&str]) -> String {
        text(&self.ask(arguments))
    }

    /// Returns the server's counters.
    #[track_caller]
    pub fn stat(&self) -> serde_json::Value {
        serde_json::from_str(&self.asked(&["stat", "--json"])).unwrap()
    }
}

impl Drop for Blk {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[track_caller]
pub fn text(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Returns whether all these programs are installed. If not, prints a line, or fails under CI=true.
pub fn have(programs: &[&str]) -> bool {
    let path = path();
    let missing_programs: Vec<_> = programs
        .iter()
        .filter(|p| !std::env::split_paths(&path).any(|d| d.join(p).is_file()))
        .collect();
    if !missing_programs.is_empty() {
        let text = format!("not installed: {missing_programs:?} (scripts/setup programs)");
        assert!(std::env::var("CI").as_deref() != Ok("true"), "{text}");
        eprintln!("SKIPPED, NOTHING WAS TESTED: {text}");
    }
    missing_programs.is_empty()
}

/// Runs a program to its end. It is killed when this test ends.
pub fn run(program: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).env("PATH", path());
    // SAFETY: `prctl` is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        })
    };
    command.output().unwrap_or_else(|e| panic!("{program}: {e}"))
}

pub fn path() -> String {
    std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin"
}

/// Runs [`run`], asserts success, and returns its stdout.
#[track_caller]
pub fn works(program: &str, arguments: &[&str]) -> String {
    let output = run(program, arguments);
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} {arguments:?}: {out}{err}");
    out.into_owned()
}

/// Returns `len` bytes of real data, from the largest shared libraries on this machine.
pub fn real_bytes(len: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    let own = std::env::current_exe().unwrap();
    let libraries = std::fs::read_dir("/usr/lib/x86_64-linux-gnu").into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> =
        libraries.map(|entry| entry.path()).filter(|path| path.is_file()).collect();
    files.sort();
    files.insert(0, own);
    for file in files {
        if bytes.len() >= len {
            break;
        }
        let _ = std::fs::File::open(file)
            .and_then(|file| file.take((len - bytes.len()) as u64).read_to_end(&mut bytes));
    }
    assert_eq!(bytes.len(), len, "not enough files");
    bytes
}
