//! Real servers of the Redis protocol on loopback, which tests kill and restart.
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

/// Flags with which every write is in the file before it is acknowledged, so that a killed server
/// returns with its data. The default, `everysec`, acknowledges first while the disk is busy, for
/// up to 2 s (`flushAppendOnlyFile` in redis's `aof.c`).
pub const DURABLE: &[&str] = &["--appendonly", "yes", "--appendfsync", "no"];

/// Returns whether servers are available. Prints a message if not; in CI they must be.
pub fn is_there() -> bool {
    for tool in ["redis-server", "redis-cli"] {
        if Command::new(tool).arg("--version").stdout(Stdio::null()).status().is_err() {
            assert!(std::env::var("CI").as_deref() != Ok("true"), "no {tool}: run scripts/setup");
            eprintln!("SKIPPED, NOTHING WAS TESTED: no {tool}: run scripts/setup");
            return false;
        }
    }
    true
}

/// Returns a free port such that the one 10000 above is free too, which servers of a cluster use
/// among themselves.
pub fn port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let step = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 20_000 + (std::process::id() as u16 % 2000) * 10 + step % 1000;
        let is_free = |port| std::net::TcpListener::bind(("127.0.0.1", port)).is_ok();
        if is_free(port) && is_free(port + 10_000) {
            return port;
        }
    }
}

/// A server on loopback. It ends when this is dropped.
pub struct Server {
    /// Its port.
    pub port: u16,
    dir: PathBuf,
    flags: Vec<String>,
    /// The command that starts the server, if there is one.
    wrapper: Vec<String>,
    child: Option<Child>,
    /// What redis-cli needs to log in.
    login: Vec<String>,
}

impl Server {
    /// Starts one with these flags, in which `PORT` stands for its port.
    pub fn start(flags: &[&str]) -> Server {
        Server::start_with(flags, &[])
    }

    /// Starts one by a command that becomes the server, such as `env`.
    pub fn start_by(wrapper: &[&str], flags: &[&str]) -> Server {
        Server::new(wrapper, flags, &[])
    }

    /// Starts one for which redis-cli needs flags too.
    pub fn start_with(flags: &[&str], login: &[&str]) -> Server {
        Server::new(&[], flags, login)
    }

    fn new(wrapper: &[&str], flags: &[&str], login: &[&str]) -> Server {
        let own = |all: &[&str]| all.iter().map(|s| s.to_string()).collect();
        let port = port();
        let dir = std::env::temp_dir().join(format!("memfold-redis-{}-{port}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a directory");
        let (wrapper, flags, login) = (own(wrapper), own(flags), own(login));
        let mut server = Server { port, dir, flags, wrapper, child: None, login };
        server.restart();
        server
    }

    /// Starts it again, with the data in its directory.
    ///
    /// # Panics
    /// If it doesn't answer after a minute.
    pub fn restart(&mut self) {
        let port = self.port.to_string();
        let is_tls = self.flags.iter().any(|flag| flag == "--tls-port");
        let words = [&self.wrapper[..], &["redis-server".to_string()]].concat();
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).args([
            "--port",
            if is_tls { "0" } else { &port },
            "--bind",
            "127.0.0.1",
            "--save",
            "",
        ]);
        command
            .arg("--dir")
            .arg(&self.dir)
            .args(self.flags.iter().map(|f| f.replace("PORT", &port)));
        self.child = Some(
            command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("redis-server"),
        );
        let begin = Instant::now();
        while !self.cli(&["ping"]).contains("PONG") {
            assert!(
                begin.elapsed() < Duration::from_secs(600),
                "the server does not start: {}",
                self.cli(&["ping"])
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Kills it.
    ///
    /// # Panics
    /// If that fails.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("it is this process's child");
            child.wait().expect("likewise");
        }
    }

    /// Stops it (its sockets stay), or continues it.
    ///
    /// # Panics
    /// If that fails.
    pub fn pause(&self, stands: bool) {
        let pid = self.child.as_ref().expect("it runs").id().to_string();
        let signal = if stands { "-STOP" } else { "-CONT" };
        assert!(
            Command::new("kill").args([signal, &pid]).status().is_ok_and(|status| status.success())
        );
    }

    /// Returns the output of redis-cli.
    ///
    /// # Panics
    /// If there is no redis-cli.
    pub fn cli(&self, arguments: &[&str]) -> String {
        let mut command = Command::new("redis-cli");
        command
            .args(["-h", "127.0.0.1", "-p", &self.port.to_string()])
            .args(&self.login)
            .args(arguments);
        let output = command.stderr(Stdio::null()).output().expect("redis-cli");
        String::from_utf8_lossy(&output.stdout).trim().to_string()
    }

    /// Returns all keys.
    pub fn keys(&self) -> Vec<String> {
        self.cli(&["keys", "*"])
            .lines()
            .filter(|line| !line.is_empty())
            .map(str::to_string)
            .collect()
    }

    /// Returns its URL, without TLS.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
