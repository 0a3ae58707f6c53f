//! A server in another language, under `memfold run` or without it.

use crate::host::program::{find, memfold};
use anyhow::{Context, bail, ensure};
use std::ffi::OsString;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Longest wait for a server to start, and for an answer.
const PATIENCE: Duration = Duration::from_secs(180);

/// A directory with the servers' programs, removed at the end.
pub struct ServerPrograms {
    directory: PathBuf,
}

/// A language of servers.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Language {
    Node,
    Python,
    Java,
}

impl Language {
    pub const ALL: [Language; 3] = [Language::Node, Language::Python, Language::Java];

    pub fn name(self) -> &'static str {
        match self {
            Language::Node => "node",
            Language::Python => "python3",
            Language::Java => "java",
        }
    }

    /// Returns how many objects take so many MiB.
    fn objects(self, mib: u64) -> u64 {
        mib * match self {
            Language::Node => 5700,
            Language::Python => 2500,
            Language::Java => 7400,
        }
    }
}

impl ServerPrograms {
    /// Writes the programs, and compiles that of Java if its compiler is there.
    pub fn write() -> anyhow::Result<ServerPrograms> {
        let directory = std::env::temp_dir().join(format!("memfold-idle-{}", std::process::id()));
        fs::create_dir(&directory).with_context(|| directory.display().to_string())?;
        let programs = ServerPrograms { directory };
        for (name, text) in [
            ("server.js", include_str!("server.js")),
            ("server.py", include_str!("server.py")),
            ("Server.java", include_str!("Server.java")),
        ] {
            fs::write(programs.directory.join(name), text)?;
        }
        if let Ok(javac) = find("javac", "default-jdk-headless") {
            let status = Command::new(javac)
                .args(["-d", "."])
                .arg("Server.java")
                .current_dir(&programs.directory)
                .status()?;
            ensure!(status.success(), "javac failed");
        }
        Ok(programs)
    }

    /// Returns the command of a server with so many MiB of objects.
    ///
    /// # Errors
    /// The language is not installed.
    pub fn command(
        &self,
        language: Language,
        mib: u64,
        port: u16,
    ) -> anyhow::Result<Vec<OsString>> {
        let file = |name: &str| self.directory.join(name).into_os_string();
        let mut command: Vec<OsString> = match language {
            Language::Node => vec![find("node", "nodejs")?.into(), file("server.js")],
            Language::Python => vec![find("python3", "python3")?.into(), file("server.py")],
            Language::Java => {
                find("javac", "default-jdk-headless")?;
                let java = find("java", "default-jdk-headless")?.into();
                vec![java, "-cp".into(), self.directory.clone().into(), "Server".into()]
            }
        };
        command.extend([port.to_string().into(), language.objects(mib).to_string().into()]);
        Ok(command)
    }
}

impl Drop for ServerPrograms {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// A running server.
pub struct RunningServer {
    child: Child,
    /// The server's own process.
    pid: u32,
    port: u16,
}

impl RunningServer {
    /// Starts a server, under `memfold run` with `flags` if there are any. Returns once it answers.
    pub fn start(
        programs: &ServerPrograms,
        language: Language,
        mib: u64,
        flags: &[&str],
    ) -> anyhow::Result<RunningServer> {
        // The port is free until something else takes it.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let mut arguments = programs.command(language, mib, port)?;
        if !flags.is_empty() {
            let run = [memfold()?.into(), "run".into()];
            let flags = flags.iter().map(OsString::from);
            arguments =
                run.into_iter().chain(flags).chain(["--".into()]).chain(arguments).collect();
        }
        let child =
            Command::new(&arguments[0]).args(&arguments[1..]).stdin(Stdio::null()).spawn()?;
        let mut server = RunningServer { pid: child.id(), child, port };
        let end = Instant::now() + PATIENCE;
        while server.request().is_err() {
            if let Some(status) = server.child.try_wait()? {
                bail!("{} ended: {status}", language.name());
            }
            ensure!(Instant::now() < end, "{} does not answer", language.name());
            sleep(Duration::from_millis(50));
        }
        if !flags.is_empty() {
            let children = format!("/proc/{0}/task/{0}/children", server.child.id());
            server.pid = fs::read_to_string(children)?.trim().parse()?;
        }
        Ok(server)
    }

    /// Makes a request. Returns the seconds that it took, and the answer.
    pub fn request(&self) -> anyhow::Result<(f64, String)> {
        let begin = Instant::now();
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let body = answer.rsplit("\r\n").next().unwrap_or_default();
        ensure!(!body.is_empty(), "an empty answer");
        Ok((begin.elapsed().as_secs_f64(), body.to_string()))
    }

    /// Returns the anonymous memory of the server, which includes all of memfold's, in bytes.
    pub fn anonymous_bytes(&self) -> anyhow::Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid))?;
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")).context("no RssAnon")?;
        Ok(kib.parse::<u64>()? << 10)
    }

    /// Returns the CPU time of memfold's threads in the server, and of `memfold run`, in seconds.
    pub fn own_cpu_seconds(&self) -> anyhow::Result<f64> {
        let mut sum = 0.0;
        for (pid, prefix) in [(self.pid, "memfold-"), (self.child.id(), "")] {
            for task in fs::read_dir(format!("/proc/{pid}/task"))? {
                sum += cpu_seconds(&task?.path(), prefix).unwrap_or(0.0);
            }
        }
        Ok(sum)
    }
}

/// Returns the CPU time of a thread whose name begins with `prefix`.
fn cpu_seconds(task: &Path, prefix: &str) -> Option<f64> {
    if !fs::read_to_string(task.join("comm")).ok()?.starts_with(prefix) {
        return None;
    }
    let text = fs::read_to_string(task.join("schedstat")).ok()?;
    Some(text.split_whitespace().next()?.parse::<f64>().ok()? / 1e9)
}

impl Drop for RunningServer {
    fn drop(&mut self) {
        // Where memfold runs it, the server ends with memfold.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
