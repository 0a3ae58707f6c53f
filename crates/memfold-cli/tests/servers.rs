//! Real servers under `memfold run`, in a part of the memory that their data needs, with real
//! clients: every answer is right, their limit is kept, and they end as they are told to. One that
//! is not installed is passed over, with a line that says so.
mod common;
use common::{Scratch, binaries, memfold};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The paths of installed programs; `None`, and a line that says which is missing, if one is not
/// there.
fn find<const N: usize>(names: [&str; N]) -> Option<[String; N]> {
    let mut found = Vec::new();
    for name in names {
        let path = ["/usr/bin", "/usr/sbin", "/usr/local/bin"].map(|dir| format!("{dir}/{name}"));
        match path.into_iter().find(|path| Path::new(path).is_file()) {
            Some(path) => found.push(path),
            None => {
                eprintln!("SKIPPED: {name} is not installed (scripts/setup installs it)");
                return None;
            }
        }
    }
    found.try_into().ok()
}

/// A server on a socket, until it is told to end.
struct Service {
    runner: Option<Child>,
    errors: PathBuf,
    resident_mib: u64,
}

impl Service {
    /// Starts `memfold run --resident ... FLAGS -- COMMAND`, and waits until it listens on
    /// `socket`.
    fn start(
        bin: &Path,
        scratch: &Scratch,
        resident_mib: u64,
        flags: &[&str],
        command: &[&str],
        socket: &str,
    ) -> Service {
        let size = format!("{resident_mib}M");
        let arguments =
            [&["run", "--summary", "--resident", &size], flags, &["--"], command].concat();
        let errors = PathBuf::from(scratch.path("errors"));
        let mut runner = memfold(bin, &arguments);
        runner.stdout(Stdio::null()).stderr(std::fs::File::create(&errors).unwrap());
        let mut service = Service { runner: Some(runner.spawn().unwrap()), errors, resident_mib };
        let begin = Instant::now();
        while UnixStream::connect(socket).is_err() {
            let ended = service.runner.as_mut().unwrap().try_wait().unwrap();
            assert!(
                ended.is_none() && begin.elapsed() < Duration::from_secs(600),
                "{ended:?}: {}",
                service.complaints()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        service
    }

    fn complaints(&self) -> String {
        std::fs::read_to_string(&self.errors).unwrap_or_default()
    }

    /// SIGTERM: it must end with status 0, folded, and its limit kept.
    #[track_caller]
    fn end(mut self) {
        let mut runner = self.runner.take().unwrap();
        let told = Command::new("kill").arg(runner.id().to_string()).status().unwrap();
        assert!(told.success());
        let begin = Instant::now();
        let status = loop {
            match runner.try_wait().unwrap() {
                Some(status) => break status,
                None if begin.elapsed() > Duration::from_secs(600) => {
                    let _ = runner.kill();
                    panic!("it does not end: {}", self.complaints());
                }
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        let text = self.complaints();
        assert_eq!(status.code(), Some(0), "{text}");
        assert!(text.contains(" of them major") && !text.contains("warning"), "{text}");
        let summary = text.lines().find(|line| line.contains("resident limit")).unwrap();
        println!("{summary} ({} MiB)", self.resident_mib);
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if let Some(mut runner) = self.runner.take() {
            let _ = runner.kill();
            let _ = runner.wait();
        }
    }
}

/// Runs a client for at most a minute.
fn client(command: &[&str]) -> Output {
    let mut timed = Command::new("timeout");
    timed.args(["-s", "KILL", "240"]).args(command).stdin(Stdio::null());
    timed.output().unwrap()
}

/// What a client prints, if it succeeds.
#[track_caller]
fn told(command: &[&str]) -> String {
    let output = client(command);
    let (text, errors) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}: {text}{errors}", output.status);
    text.trim().to_string()
}

/// A scratch directory that any user may use.
fn open_scratch() -> Scratch {
    let scratch = Scratch::new();
    std::fs::set_permissions(&scratch.0, std::fs::Permissions::from_mode(0o777)).unwrap();
    scratch
}

#[test]
fn redis_answers_and_saves_under_load() {
    let Some([server, bench, shell, check]) =
        find(["redis-server", "redis-benchmark", "redis-cli", "redis-check-rdb"])
    else {
        return;
    };
    let (Some(bin), scratch) = (binaries(), Scratch::new()) else { return };
    let (socket, directory) = (scratch.path("socket"), scratch.0.to_str().unwrap());
    let command =
        [&server, "--port", "0", "--save", "", "--unixsocket", &socket, "--dir", directory];
    let service = Service::start(&bin, &scratch, 16, &[], &command, &socket);
    let ask = |words: &[&str]| told(&[&[shell.as_str(), "-s", &socket], words].concat());
    let load = |tests: &str, count: &str| -> Vec<String> {
        let words = [
            &bench, "-s", &socket, "-t", tests, "-r", "60000", "-n", count, "-d", "500", "-P",
            "16", "-q",
        ];
        words.map(String::from).into()
    };
    let fill = load("set", "120000");
    told(&fill.iter().map(String::as_str).collect::<Vec<_>>());
    let lua = "for i = 1, 5000 do redis.call('SET', 'check:' .. i, string.rep('value ' .. i .. ' ', 40)) end";
    ask(&["eval", lua, "0"]);
    let keys = ask(&["dbsize"]);

    let busy = load("get,set", "50000");
    let mut busy = Command::new("timeout")
        .args(["-s", "KILL", "240"])
        .args(busy)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    assert_eq!(ask(&["bgsave"]), "Background saving started");
    let begin = Instant::now();
    while !ask(&["info", "persistence"]).contains("rdb_bgsave_in_progress:0") {
        assert!(
            begin.elapsed() < Duration::from_secs(600),
            "the snapshot does not end: {}",
            service.complaints()
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    let info = ask(&["info", "persistence"]);
    assert!(info.contains("rdb_last_bgsave_status:ok"), "{info}{}", service.complaints());
    assert!(busy.wait().unwrap().success());

    let verify = "for i = 1, 5000 do if redis.call('GET', 'check:' .. i) ~= string.rep('value ' .. i .. ' ', 40) then return i end end return 'right'";
    assert_eq!(ask(&["eval", verify, "0"]), "right");
    let about = told(&[&check, &scratch.path("dump.rdb")]);
    assert!(about.contains("RDB looks OK"), "{about}");
    assert!(about.contains(&format!("{keys} keys read")) || about.contains("keys read"), "{about}");
    // What was saved is read again by a redis without memfold.
    let saved = scratch.path("saved");
    let plain = [&server, "--port", "0", "--save", "", "--unixsocket", &saved, "--dir", directory];
    let mut plain = Command::new(plain[0]).args(&plain[1..]).stdout(Stdio::null()).spawn().unwrap();
    let begin = Instant::now();
    while !client(&[&shell, "-s", &saved, "eval", verify, "0"]).stdout.starts_with(b"right") {
        assert!(begin.elapsed() < Duration::from_secs(600), "the snapshot has other values");
        std::thread::sleep(Duration::from_millis(50));
    }
    plain.kill().unwrap();
    plain.wait().unwrap();
    service.end();
}

#[test]
fn memcached_keeps_every_value_also_as_another_user() {
    let Some([server]) = find(["memcached"]) else { return };
    let (Some(bin), scratch) = (binaries(), open_scratch()) else { return };
    let socket = scratch.path("socket");
    let mut command = vec![server.as_str(), "-m", "1024", "-s", &socket, "-a", "0777"];
    // SAFETY: touches no memory and can't fail.
    if unsafe { libc::geteuid() } == 0 {
        command.extend(["-u", "nobody"]);
    }
    let service = Service::start(&bin, &scratch, 16, &[], &command, &socket);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/memcached_load.py");
    assert_eq!(told(&["python3", script, &socket]), "right", "{}", service.complaints());
    service.end();
}

#[test]
fn mariadb_answers_transactions() {
    let Some([install, server, shell, sysbench]) =
        find(["mariadb-install-db", "mariadbd", "mariadb", "sysbench"])
    else {
        return;
    };
    let (Some(bin), scratch) = (binaries(), Scratch::new()) else { return };
    let (socket, data) = (scratch.path("socket"), scratch.path("data"));
    told(&[
        &install,
        "--no-defaults",
        "--user=root",
        &format!("--datadir={data}"),
        "--auth-root-authentication-method=normal",
    ]);
    let flags = [
        "--no-defaults",
        "--user=root",
        "--skip-networking",
        "--skip-log-bin",
        "--innodb-buffer-pool-size=96M",
        "--innodb-flush-log-at-trx-commit=0",
        &format!("--datadir={data}"),
        &format!("--socket={socket}"),
        &format!("--pid-file={data}/pid"),
    ];
    let command = [&[server.as_str()], &flags[..]].concat();
    let start = || Service::start(&bin, &scratch, 48, &["--dont-dump", "fold"], &command, &socket);
    let query =
        |text: &str| told(&[&shell, "--no-defaults", "-uroot", "-S", &socket, "-N", "-e", text]);
    let bench = |more: &[&str]| {
        let at = format!("--mysql-socket={socket}");
        let words = [
            &sysbench,
            "oltp_read_only",
            "--db-driver=mysql",
            "--mysql-user=root",
            &at,
            "--table-size=150000",
        ];
        told(&[&words[..], more].concat())
    };
    let check = "checksum table sbtest.sbtest1; select count(*), sum(k), max(id) from sbtest.sbtest1 force index(k_1)";
    let service = start();
    query("create database sbtest");
    bench(&["prepare"]);
    let before = query(check);
    let text = bench(&["--threads=4", "--time=4", "--rand-type=uniform", "run"]);
    let errors = text.lines().find(|line| line.contains("ignored errors:")).unwrap_or_default();
    assert!(text.contains("transactions:") && errors.contains(" 0 "), "{text}");
    assert_eq!(query(check), before);
    service.end();
    // What is on disk is the same.
    let service = start();
    assert_eq!(query(check), before);
    bench(&["--threads=2", "--time=1", "run"]);
    service.end();
}
