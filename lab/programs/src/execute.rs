//! Compiles a program, runs it to its end, and says how it ended. A hang is a failure, with the
//! stacks of all its processes.
use crate::program::Program;
use crate::world::{Place, World};
use memfold_testkit::scratch::Scratch;
use serde_json::Value;
use std::fmt::Write;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// The C files that a program includes.
pub const INCLUDED: [(&str, &str); 6] = [
    ("runtime.h", include_str!("../runtime/runtime.h")),
    ("calls.h", include_str!("../runtime/calls.h")),
    ("regions.h", include_str!("../runtime/regions.h")),
    ("model.h", include_str!("../runtime/model.h")),
    ("common.h", include_str!("../../../e2e/programs/common.h")),
    ("filtered.h", include_str!("../../../e2e/programs/filtered.h")),
];

/// How a run ended.
pub struct End {
    /// The status; none if it hung.
    pub status: Option<ExitStatus>,
    /// Its output.
    pub stdout: String,
    /// What it and memfold printed to stderr, and stacks if it hung.
    pub stderr: String,
}

impl End {
    /// Says in short how it ended.
    pub fn summary(&self) -> String {
        let Some(status) = self.status else { return "hangs".to_string() };
        let lines = self.stderr.lines();
        let first = lines.clone().find(|line| !line.contains("memfold: warning: ")).unwrap_or("");
        format!("{status}: {first}")
    }
}

/// A compiled program.
pub struct Compiled {
    scratch: Scratch,
    path: String,
}

/// How long a program may take, and whether the stacks of a hang are wanted.
#[derive(Clone, Copy)]
pub struct Hang {
    /// After this it hangs.
    pub after: Duration,
    /// Its stacks are printed, which takes long.
    pub shows_stacks: bool,
}

impl Compiled {
    /// Compiles a program.
    pub fn new(program: &Program) -> Compiled {
        let scratch = Scratch::new();
        fs::set_permissions(&scratch.0, PermissionsExt::from_mode(0o777)).expect("it's ours");
        for (name, text) in INCLUDED {
            scratch.file(name, text, 0o644);
        }
        let flags = ["-pthread", "-Wall", "-Werror", "-Wno-unused-function"];
        let path = scratch.compile("program", &program.source(), &flags);
        Compiled { scratch, path }
    }

    /// Runs it plainly.
    pub fn run_plainly(&self, place: &Place, hang: Hang) -> End {
        self.run(place.plainly(&self.path), hang)
    }

    /// Runs it in a world. Returns the run's figures too, if it wrote them.
    pub fn run_in(&self, at: (&Place, &World), more: &[&str], hang: Hang) -> (End, Value) {
        let own = Scratch::new();
        fs::set_permissions(&own.0, PermissionsExt::from_mode(0o777)).expect("it's ours");
        let file = own.path("figures");
        let end = self.run(at.0.run(at.1, more, &file, &self.path), hang);
        let text = fs::read_to_string(file).unwrap_or_default();
        (end, serde_json::from_str(&text).unwrap_or_default())
    }

    /// Returns the text of the command, as a user repeats it.
    pub fn command_text(&self, at: (&Place, &World), more: &[&str]) -> String {
        let command = at.0.run(at.1, more, "figures", "./program");
        let word = |word: &std::ffi::OsStr| word.to_string_lossy().into_owned();
        let mut words = vec![word(command.get_program())];
        words.extend(command.get_args().map(word));
        words.join(" ")
    }

    fn run(&self, mut command: Command, hang: Hang) -> End {
        let own = Scratch::new();
        let (out, err) = (own.path("out"), own.path("err"));
        command.stdout(File::create(&out).expect("a file")).process_group(0);
        command.stderr(File::create(&err).expect("a file"));
        let mut child = command.spawn().expect("the program starts");
        let start = Instant::now();
        let (status, stacks) = loop {
            match child.try_wait().expect("a child") {
                Some(status) => break (Some(status), String::new()),
                None if start.elapsed() > hang.after => {
                    let is_shown = hang.shows_stacks;
                    break (None, if is_shown { stacks_of(child.id()) } else { String::new() });
                }
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        // SAFETY: it ends the process group that was made for this command, if anything is left.
        unsafe { libc::kill(-(child.id() as i32), libc::SIGKILL) };
        let _ = child.wait();
        let text = |path| String::from_utf8_lossy(&fs::read(path).expect("a file")).into_owned();
        End { status, stdout: text(out), stderr: text(err) + &stacks }
    }

    /// Keeps the source and the compiled program in a directory.
    pub fn keep(&self, directory: &str) {
        fs::create_dir_all(directory).expect("a directory for what fails");
        for entry in fs::read_dir(&self.scratch.0).expect("a directory").flatten() {
            let to = format!("{directory}/{}", entry.file_name().to_string_lossy());
            fs::copy(entry.path(), to).expect("a copy");
        }
    }
}

/// Returns where all threads of a process group are.
fn stacks_of(group: u32) -> String {
    let mut text = String::new();
    let processes = fs::read_dir("/proc").expect("/proc").flatten();
    for process in processes {
        let name = process.file_name().to_string_lossy().into_owned();
        let stat = fs::read_to_string(process.path().join("stat")).unwrap_or_default();
        let group_of = |stat: &str| stat.rsplit(')').next()?.split(' ').nth(3)?.parse().ok();
        if name.parse::<u32>().is_err() || group_of(&stat) != Some(group) {
            continue;
        }
        writeln!(text, "== process {name}: {}", stat.trim()).expect("memory");
        let threads = fs::read_dir(process.path().join("task")).into_iter().flatten().flatten();
        for thread in threads {
            for file in ["comm", "status", "syscall", "stack"] {
                let content = fs::read_to_string(thread.path().join(file)).unwrap_or_default();
                let wanted = |line: &&str| file != "status" || line.starts_with("State");
                content
                    .lines()
                    .filter(wanted)
                    .for_each(|line| writeln!(text, "{line}").expect("memory"));
            }
        }
        let arguments =
            ["20", "gdb", "-p", &name, "-batch", "-nx", "-ex", "thread apply all bt 20"];
        let stacks = Command::new("timeout").args(arguments).stdin(Stdio::null()).output();
        let stacks = stacks.map(|output| output.stdout).unwrap_or_default();
        text.push_str(&String::from_utf8_lossy(&stacks));
    }
    text
}
