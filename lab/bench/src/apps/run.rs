//! One run of a program or a server: without a limit, under `memfold run`, or on the kernel's zram.

use crate::corpus::hash;
use crate::host::cgroup::{Cgroup, Hierarchy};
use crate::host::folio::FolioKib;
use crate::host::guard;
use crate::host::machine::kib_field;
use crate::host::program::memfold;
use crate::host::zram::Zram;
use anyhow::{Context, bail};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// A run that takes longer than this is killed.
const PATIENCE: Duration = Duration::from_secs(600);
/// The time limit for the start and the end of a server.
const SERVER_PATIENCE: Duration = Duration::from_secs(60);

/// The program to run.
pub enum Work {
    /// A command that does its work and ends. Its only figure is its time in seconds.
    Job(Vec<String>),
    /// A server, and its clients.
    Server(ServerProgram),
}

/// A server on a socket in the file system.
pub struct ServerProgram {
    /// The command. It runs in the foreground, and ends with status 0 on SIGTERM.
    pub command: Vec<String>,
    /// The socket that it listens on.
    pub socket: PathBuf,
    /// Runs the clients.
    pub load: Clients,
}

/// Clients of a server. They get its socket, and return what they measured.
pub type Clients = Box<dyn Fn(&Path) -> anyhow::Result<ClientLoad>>;

/// The results of the clients.
pub struct ClientLoad {
    /// Figures, in the order of the program's list.
    pub figures: Vec<f64>,
    /// The data that they read, which must be the same in each run.
    pub answers: String,
}

/// What limits a program's memory, if anything.
#[derive(Copy, Clone, PartialEq)]
pub enum AppPeer<'a> {
    /// No limit.
    Plain,
    /// `memfold run` with these flags.
    Memfold(&'a [String]),
    /// A cgroup on zram, with folios of one size.
    Zram(FolioKib),
}

impl AppPeer<'_> {
    /// The name in reports.
    pub fn name(self) -> String {
        match self {
            AppPeer::Plain => "no limit".into(),
            AppPeer::Memfold(_) => "memfold-run".into(),
            AppPeer::Zram(folio) => format!("zram:lz4:{}", folio.name()),
        }
    }
}

/// The results of one run.
pub struct Done {
    /// Figures, in the order of the program's list.
    pub figures: Vec<f64>,
    /// The hash of its output or answers.
    pub output: u64,
    /// The peak of anonymous memory of its first process.
    pub peak_bytes: u64,
}

/// Runs the work to its end. `limit_bytes` and `data_bytes`, the amount to swap, are used only for
/// Zram.
pub fn run_with(
    peer: AppPeer,
    work: &Work,
    limit_bytes: u64,
    data_bytes: u64,
) -> anyhow::Result<Done> {
    let AppPeer::Zram(folio) = peer else { return run(peer, work, |_| Ok(())) };
    let outcome = run_on_zram(folio, work, limit_bytes, data_bytes);
    guard::restore();
    outcome
}

fn run_on_zram(
    folio: FolioKib,
    work: &Work,
    limit_bytes: u64,
    data_bytes: u64,
) -> anyhow::Result<Done> {
    guard::change(|journal| folio.select(journal))?;
    let _zram =
        guard::change(|journal| Zram::swap_on(journal, "lz4", data_bytes * 2 + (64 << 20)))?;
    // The cgroup is also charged for page tables, and for kernel memory of the shell and the
    // program.
    let charged_bytes = limit_bytes + data_bytes / 512 + (1 << 20);
    let cgroup =
        guard::change(|journal| Cgroup::create(journal, &Hierarchy::find()?, charged_bytes))?;
    let _current = cgroup.keep_current();
    let outcome = run(AppPeer::Zram(folio), work, |pid| guard::change(|_| cgroup.add(pid)));
    match outcome {
        Err(error) if cgroup.oom_kills() > 0 => {
            bail!("out of memory in its cgroup, killed by the kernel ({error:#})")
        }
        outcome => outcome,
    }
}

/// Returns a shell command that waits for a line and then executes the program.
fn waiting(peer: AppPeer, program: &[String]) -> anyhow::Result<Command> {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "read -r go && exec \"$@\" </dev/null", "sh"]);
    if let AppPeer::Memfold(flags) = peer {
        command.arg(memfold()?).arg("run").args(flags).arg("--");
    }
    command.args(program).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Ok(command)
}

/// Runs a command. `before` gets the process before it executes the program.
fn run(
    peer: AppPeer,
    work: &Work,
    before: impl FnOnce(i32) -> anyhow::Result<()>,
) -> anyhow::Result<Done> {
    let (Work::Job(program) | Work::Server(ServerProgram { command: program, .. })) = work;
    if let Work::Server(server) = work {
        let _ = fs::remove_file(&server.socket);
    }
    let mut child = guard::spawn(&mut waiting(peer, program)?).context("starting /bin/sh")?;
    let outcome = before(child.id() as i32).and_then(|()| {
        let pipes = Pipes::of(&mut child)?;
        match work {
            Work::Job(_) => follow(&mut child, pipes),
            Work::Server(server) => serve(&mut child, pipes, server),
        }
    });
    guard::end_child(child)?;
    outcome
}

/// Both outputs of a child, read by threads.
struct Pipes {
    start: Instant,
    output: std::sync::mpsc::Receiver<u64>,
    complaints: std::thread::JoinHandle<String>,
}

impl Pipes {
    /// Starts to read the outputs, and makes the child continue.
    fn of(child: &mut Child) -> anyhow::Result<Pipes> {
        let (mut input, mut errors) =
            (child.stdin.take().context("no pipe")?, child.stderr.take().context("no pipe")?);
        let mut output = child.stdout.take().context("no pipe")?;
        let (sender, receiver) = channel();
        std::thread::spawn(move || {
            let mut text = Vec::new();
            let _ = output.read_to_end(&mut text).map(|_| sender.send(hash(&text)));
        });
        let complaints = std::thread::spawn(move || {
            let mut text = Vec::new();
            let _ = errors.read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        });
        let start = Instant::now();
        input.write_all(b"\n")?;
        Ok(Pipes { start, output: receiver, complaints })
    }

    /// Returns an error with the last output if the child has failed.
    fn judge(self, status: ExitStatus) -> anyhow::Result<Pipes> {
        if status.success() {
            return Ok(self);
        }
        let text = self.complaints.join().unwrap_or_default();
        bail!("{status}: {}", text.lines().last().unwrap_or("it said nothing"))
    }
}

fn follow(child: &mut Child, pipes: Pipes) -> anyhow::Result<Done> {
    let mut peak_bytes = 0;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if pipes.start.elapsed() > PATIENCE {
            bail!("not done after {} s", PATIENCE.as_secs());
        }
        peak_bytes = anonymous_bytes(child.id()).max(peak_bytes);
        std::thread::sleep(Duration::from_millis(2));
    };
    let seconds = pipes.start.elapsed().as_secs_f64();
    let pipes = pipes.judge(status)?;
    let output =
        pipes.output.recv_timeout(Duration::from_secs(10)).context("its output did not end")?;
    Ok(Done { figures: vec![seconds], output, peak_bytes })
}

fn serve(child: &mut Child, pipes: Pipes, server: &ServerProgram) -> anyhow::Result<Done> {
    while UnixStream::connect(&server.socket).is_err() {
        if let Some(status) = child.try_wait()? {
            pipes.judge(status)?;
            bail!("the server ended before it listened");
        }
        if pipes.start.elapsed() > SERVER_PATIENCE {
            bail!("the server did not listen within {} s", SERVER_PATIENCE.as_secs());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let load = (server.load)(&server.socket)?;
    // The final value is the peak, because none of the servers returns memory.
    let peak_bytes = anonymous_bytes(child.id());
    // SAFETY: kill touches no memory; the child has not been waited for, so its PID is not reused.
    unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if start.elapsed() > SERVER_PATIENCE {
            bail!("the server did not end by SIGTERM");
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    pipes.judge(status)?;
    Ok(Done { figures: load.figures, output: hash(load.answers.as_bytes()), peak_bytes })
}

fn anonymous_bytes(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    kib_field(&text, "RssAnon:").unwrap_or(0)
}

/// Runs a client to its end, and returns its output. It is killed with this process.
pub fn client(program: &[&str]) -> anyhow::Result<String> {
    let mut command = Command::new(program[0]);
    command.args(&program[1..]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child =
        guard::spawn(&mut command).with_context(|| format!("starting {}", program[0]))?;
    let outcome = finish(&mut child).with_context(|| program[0].to_string());
    guard::end_child(child)?;
    outcome
}

fn finish(child: &mut Child) -> anyhow::Result<String> {
    let (mut output, mut errors) =
        (child.stdout.take().context("no pipe")?, child.stderr.take().context("no pipe")?);
    let read_pipe = |pipe: &mut dyn Read| {
        let mut bytes = Vec::new();
        let _ = pipe.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let complaints = std::thread::spawn(move || read_pipe(&mut errors));
    let text = std::thread::spawn(move || read_pipe(&mut output));
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if start.elapsed() > PATIENCE {
            bail!("not done after {} s", PATIENCE.as_secs());
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let (text, complaints) =
        (text.join().unwrap_or_default(), complaints.join().unwrap_or_default());
    if !status.success() {
        bail!(
            "{status}: {}",
            [text, complaints]
                .join("\n")
                .trim_end()
                .lines()
                .next_back()
                .unwrap_or("it said nothing")
        );
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(script: &str) -> Work {
        Work::Job(["/bin/sh", "-c", script].map(String::from).into())
    }

    #[test]
    fn run_reports_time_output_and_failure() {
        let result = run_with(AppPeer::Plain, &job("sleep 0.05; echo right"), 0, 0).unwrap();
        assert!(
            result.figures[0] >= 0.05 && result.output == hash(b"right\n") && result.peak_bytes > 0
        );
        let outcome = run_with(AppPeer::Plain, &job("echo why >&2; exit 3"), 0, 0);
        assert!(outcome.err().is_some_and(|error| error.to_string().contains("why")));
    }

    #[test]
    fn early_server_exit_and_client_failure_are_reported() {
        let server = |script: &str| {
            Work::Server(ServerProgram {
                command: ["/bin/sh", "-c", script].map(String::from).into(),
                socket: "/nonexistent/socket".into(),
                load: Box::new(|_| bail!("never reached")),
            })
        };
        let text = |script: &str| {
            run_with(AppPeer::Plain, &server(script), 0, 0).err().unwrap().to_string()
        };
        assert!(text("echo no such database >&2; exit 1").contains("no such database"));
        assert!(text("exit 0").contains("before it listened"));
        assert_eq!(client(&["/bin/echo", "text"]).unwrap(), "text\n");
        let error = client(&["/bin/sh", "-c", "echo no server >&2; exit 2"]).err().unwrap();
        assert!(format!("{error:#}").contains("no server"), "{error:#}");
    }
}
