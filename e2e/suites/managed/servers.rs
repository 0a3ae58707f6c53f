//! Real servers under `memfold run`, in a part of the memory that their data needs, with real
//! clients and without any privilege. Every answer is right, the limit is kept, and the servers end
//! on request.
use crate::common::real::all_installed;
use crate::common::{
    HANG, NOBODY, Scratch, assert_figures, json, memfold_in, open_scratch, printed_in,
};
use crate::common::{binaries, can_make_worlds, unprivileged};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A server on a socket, under memfold.
struct Service {
    runner: Option<Child>,
    errors: PathBuf,
    figures: String,
    least_mib: u64,
}

/// The resident limit of a server, and the least folded memory.
struct Bounds {
    resident_mib: u64,
    folded_mib: u64,
}

impl Service {
    /// Starts `memfold run --resident ... FLAGS -- COMMAND` in a world of [`managed_in`], and waits
    /// until it listens on `socket`.
    ///
    /// [`managed_in`]: crate::common::managed_in
    fn start(
        world: &str,
        scratch: &Scratch,
        bounds: &Bounds,
        flags: &[&str],
        command: &[&str],
        socket: &str,
    ) -> Option<Service> {
        let (size, figures) = (format!("{}M", bounds.resident_mib), scratch.path("figures"));
        let ours = ["run", "--summary", "--resident", &size, "--stats-file", &figures];
        let arguments = [&ours[..], flags, &["--"], command].concat();
        let errors = PathBuf::from(scratch.path("errors"));
        let mut runner = memfold_in(world, &binaries()?, &arguments);
        runner.stdout(Stdio::null()).stderr(std::fs::File::create(&errors).unwrap());
        let runner = Some(runner.spawn().unwrap());
        let mut service = Service { runner, errors, figures, least_mib: bounds.folded_mib };
        let begin = Instant::now();
        while UnixStream::connect(socket).is_err() {
            let end = service.runner.as_mut().unwrap().try_wait().unwrap();
            assert!(end.is_none() && begin.elapsed() < HANG, "{end:?}: {}", service.complaints());
            std::thread::sleep(Duration::from_millis(20));
        }
        Some(service)
    }

    fn complaints(&self) -> String {
        std::fs::read_to_string(&self.errors).unwrap_or_default()
    }

    /// Ends the server with SIGTERM. Asserts status 0, that it was folded, and that its limit was
    /// kept.
    #[track_caller]
    fn end(mut self) {
        let mut runner = self.runner.take().unwrap();
        let kill_status = Command::new("kill").arg(runner.id().to_string()).status().unwrap();
        assert!(kill_status.success());
        let begin = Instant::now();
        let status = loop {
            match runner.try_wait().unwrap() {
                Some(status) => break status,
                None if begin.elapsed() > HANG => {
                    let _ = runner.kill();
                    panic!("it does not end: {}", self.complaints());
                }
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        let text = self.complaints();
        assert_eq!(status.code(), Some(0), "{text}");
        // MariaDB asks for io_uring and AIO first. At a small limit much time goes to loads.
        let known = ["fails with ENOSYS", "went to loading folded memory"];
        let warns =
            |line: &&str| line.contains("warning") && !known.iter().any(|text| line.contains(text));
        assert_eq!(text.lines().find(warns), None, "{text}");
        let summary = text.lines().find(|line| line.contains("resident limit")).unwrap();
        println!("{summary}");
        assert_figures(&json(&self.figures), &text, self.least_mib);
    }
}

/// A test that panics ends its server with SIGTERM first, because some of the server's processes
/// would outlive a kill.
impl Drop for Service {
    fn drop(&mut self) {
        let Some(mut runner) = self.runner.take() else { return };
        let _ = Command::new("kill").arg(runner.id().to_string()).status();
        let begin = Instant::now();
        while matches!(runner.try_wait(), Ok(None)) && begin.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = runner.kill();
        let _ = runner.wait();
    }
}

/// A server without memfold. Dropping it sends SIGINT.
struct Plain(Child);

impl Plain {
    fn start(command: &[&str]) -> Plain {
        let mut server = Command::new(command[0]);
        server.args(&command[1..]).stdout(Stdio::null()).stderr(Stdio::null());
        Plain(server.spawn().unwrap())
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        let _ = Command::new("kill").args(["-INT", &self.0.id().to_string()]).status();
        let _ = self.0.wait();
    }
}

/// Runs a client for at most four minutes.
fn client(command: &[&str]) -> Output {
    let mut command_timed = Command::new("timeout");
    command_timed.args(["-s", "KILL", "240"]).args(command).stdin(Stdio::null());
    command_timed.output().unwrap()
}

/// Runs a client, asserts success, and returns its stdout.
#[track_caller]
fn told(command: &[&str]) -> String {
    let output = client(command);
    let (text, errors) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}: {text}{errors}", output.status);
    text.trim().to_string()
}

/// Changes the owner of a directory's files to the user of the server.
fn give(world: &str, directory: &str) {
    if !world.is_empty() {
        told(&["chown", "-R", "65534:65534", directory]);
    }
}

#[test]
fn redis_answers_and_saves_under_load() {
    let Some([server, bench, shell, check]) =
        all_installed(["redis-server", "redis-benchmark", "redis-cli", "redis-check-rdb"])
    else {
        return;
    };
    let scratch = open_scratch();
    let (socket, directory) = (scratch.path("socket"), scratch.0.to_str().unwrap());
    let command =
        [&server, "--port", "0", "--save", "", "--unixsocket", &socket, "--dir", directory];
    let bounds = Bounds { resident_mib: 16, folded_mib: 24 };
    let world = unprivileged();
    let Some(service) = Service::start(world, &scratch, &bounds, &[], &command, &socket) else {
        return;
    };
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
        assert!(begin.elapsed() < HANG, "the snapshot does not end: {}", service.complaints());
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
    // A redis without memfold loads the saved data.
    let socket = scratch.path("saved");
    let server_command =
        [&server, "--port", "0", "--save", "", "--unixsocket", &socket, "--dir", directory];
    let baseline = Plain::start(&server_command);
    let begin = Instant::now();
    while !client(&[&shell, "-s", &socket, "eval", verify, "0"]).stdout.starts_with(b"right") {
        assert!(begin.elapsed() < HANG, "the snapshot has other values");
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(baseline);
    service.end();
}

#[test]
#[ignore = "a variant: make test-all"]
fn memcached_keeps_every_value_also_as_another_user() {
    let Some([server]) = all_installed(["memcached"]) else { return };
    // SAFETY: the call touches no memory and can't fail.
    let is_root = unsafe { libc::geteuid() } == 0;
    // The server refuses to run as root, and only root can change its user.
    let mut ways = Vec::new();
    if !(is_root && unprivileged().is_empty()) {
        ways.push((unprivileged(), &[][..]));
    }
    if is_root {
        ways.push(("", &["-u", "nobody"]));
    }
    for (world, more) in ways {
        let scratch = open_scratch();
        let socket = scratch.path("socket");
        let command =
            [&[server.as_str(), "-m", "1024", "-s", &socket, "-a", "0777"], more].concat();
        let bounds = Bounds { resident_mib: 16, folded_mib: 24 };
        let Some(service) = Service::start(world, &scratch, &bounds, &[], &command, &socket) else {
            return;
        };
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/programs/memcached_load.py");
        assert_eq!(told(&["python3", script, &socket]), "right", "{}", service.complaints());
        service.end();
    }
}

#[test]
#[ignore = "a variant: make test-all"]
fn mariadb_answers_transactions() {
    let Some([install, server, shell, sysbench]) =
        all_installed(["mariadb-install-db", "mariadbd", "mariadb", "sysbench"])
    else {
        return;
    };
    let (world, scratch) = (unprivileged(), open_scratch());
    let (socket, data) = (scratch.path("socket"), scratch.path("data"));
    told(&[
        &install,
        "--no-defaults",
        "--user=root",
        &format!("--datadir={data}"),
        "--auth-root-authentication-method=normal",
    ]);
    give(world, &data);
    let flags = [
        "--no-defaults",
        if world.is_empty() { "--user=root" } else { "--user=nobody" },
        "--skip-networking",
        "--skip-log-bin",
        "--innodb-buffer-pool-size=96M",
        "--innodb-flush-log-at-trx-commit=0",
        &format!("--datadir={data}"),
        &format!("--socket={socket}"),
        &format!("--pid-file={data}/pid"),
    ];
    let command = [&[server.as_str()], &flags[..]].concat();
    let bounds = Bounds { resident_mib: 48, folded_mib: 24 };
    let flags = ["--dont-dump", "fold"];
    let start = || Service::start(world, &scratch, &bounds, &flags, &command, &socket);
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
    let Some(service) = start() else { return };
    query("create database sbtest");
    bench(&["prepare"]);
    let before = query(check);
    let text = bench(&["--threads=4", "--time=4", "--rand-type=uniform", "run"]);
    let errors = text.lines().find(|line| line.contains("ignored errors:")).unwrap_or_default();
    assert!(text.contains("transactions:") && errors.contains(" 0 "), "{text}");
    assert_eq!(query(check), before);
    service.end();
    // The restarted server reads the database from disk, and finds the same contents.
    let service = start().unwrap();
    assert_eq!(query(check), before);
    bench(&["--threads=2", "--time=1", "run"]);
    service.end();
}

/// Sorts, joins and aggregates in memory.
const QUERIES: &str =
    "set work_mem = '256MB'; set max_parallel_workers_per_gather = 0; set jit = off;
    select count(*), md5(string_agg(a, ',' order by a)) from t;
    select sum(x.i), count(distinct y.a) from t x join t y on x.k = y.k;
    select k % 10, count(*), max(a) from t group by 1 order by 1;";

/// The server refuses to run as root. The first run is plain, the second folded, and both give the
/// same answers.
#[test]
#[ignore = "a variant: make test-all"]
fn postgres_sorts_joins_and_answers_transactions() {
    let Some([initdb, server, shell, bench]) =
        all_installed(["initdb", "postgres", "psql", "pgbench"])
    else {
        return;
    };
    if !can_make_worlds() {
        return;
    }
    let world = if unprivileged().is_empty() { NOBODY } else { unprivileged() };
    let scratch = open_scratch();
    let (dir, data) = (scratch.0.to_str().unwrap(), scratch.path("data"));
    let nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"];
    let make = ["-D", &data, "-U", "nobody", "-A", "trust", "-N", "--locale", "C"];
    told(&[&nobody[..], &[&initdb], &make].concat());
    let settings = ["-D", &data, "-k", dir, "-c", "listen_addresses=", "-c", "fsync=off"];
    let command = [&[server.as_str(), "-c", "shared_buffers=16MB"], &settings[..]].concat();
    let socket = scratch.path(".s.PGSQL.5432");
    let at = ["-h", dir, "-U", "nobody"];
    let query = |text: &str| {
        told(&[&[shell.as_str()], &at[..], &["-d", "postgres", "-qAtc", text]].concat())
    };
    let bench = |more: &[&str]| told(&[&[bench.as_str()], &at[..], more, &["postgres"]].concat());

    let baseline = Plain::start(&[&nobody[..], &command].concat());
    wait_for_postgres(&shell, &at);
    query(
        "create table t as select i, md5(i::text) as a, i::bigint * 7919 % 100003 as k from generate_series(1, 300000) i",
    );
    bench(&["-i", "-q", "-s", "2"]);
    let expected = query(QUERIES);
    drop(baseline);

    let bounds = Bounds { resident_mib: 24, folded_mib: 32 };
    let Some(service) = Service::start(world, &scratch, &bounds, &[], &command, &socket) else {
        return;
    };
    wait_for_postgres(&shell, &at);
    let text = bench(&["-n", "-c", "4", "-j", "2", "-t", "200"]);
    assert!(text.contains("actually processed: 800/800"), "{text}");
    assert_eq!(query(QUERIES), expected, "{}", service.complaints());
    let sums = "select (select sum(abalance) from pgbench_accounts) = (select sum(delta) from pgbench_history),
        (select sum(bbalance) from pgbench_branches) = (select sum(delta) from pgbench_history)";
    assert_eq!(query(sums), "t|t");
    service.end();
}

/// The server listens before it answers.
fn wait_for_postgres(shell: &str, at: &[&str]) {
    let begin = Instant::now();
    let ask = [&[shell], at, &["-d", "postgres", "-qAtc", "select 1"]].concat();
    while client(&ask).stdout != b"1\n" {
        assert!(begin.elapsed() < HANG, "it does not answer");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Echoes one request for each connection, as long as the program runs.
fn echo(socket: &str) {
    let listener = UnixListener::bind(socket).unwrap();
    std::os::unix::fs::chown(socket, Some(65534), None).unwrap();
    let answer = |mut stream: UnixStream| -> std::io::Result<()> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            head.extend(byte);
        }
        let head = String::from_utf8_lossy(&head).to_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let mut body = vec![0; length.map_or(0, |text| text.parse().unwrap())];
        stream.read_exact(&mut body)?;
        write!(stream, "HTTP/1.0 200 OK\r\nContent-Length: {}\r\n\r\n", body.len())?;
        stream.write_all(&body)
    };
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || answer(stream));
        }
    });
}

/// Both proxies buffer in memory. The requests are larger than their limit, and arrive complete.
#[test]
#[ignore = "a variant: make test-all"]
fn nginx_and_curl_pass_on_large_requests() {
    let (Some([server, curl]), scratch) = (all_installed(["nginx", "curl"]), open_scratch()) else {
        return;
    };
    let (dir, socket) = (scratch.0.to_str().unwrap(), scratch.path("socket"));
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|kind| format!("{kind}_temp_path {dir}/{kind};"))
        .concat();
    let settings = format!(
        "daemon off; worker_processes 2; pid {dir}/pid; error_log stderr error; events {{}}
        http {{ access_log off; {temporary} client_max_body_size 64m; client_body_buffer_size 64m;
        proxy_buffers 64 1m; proxy_buffer_size 64k; proxy_busy_buffers_size 2m; proxy_max_temp_file_size 0;
        server {{ listen unix:{socket}; location / {{ proxy_pass http://unix:{dir}/echo; }} }} }}"
    );
    let settings = scratch.file("nginx.conf", settings, 0o644);
    echo(&scratch.path("echo"));
    let bounds = Bounds { resident_mib: 24, folded_mib: 48 };
    let command = [&server, "-c", &settings];
    let Some(service) = Service::start(unprivileged(), &scratch, &bounds, &[], &command, &socket)
    else {
        return;
    };
    let body: String =
        (0..2_000_000u64).map(|n| format!("line {:08}\n", n * 7919 % 2_000_003)).collect();
    let file = scratch.file("body", &body, 0o644);
    let data = format!("@{file}");
    let post = [&curl, "-sS", "--data-binary", &data, "--unix-socket", &socket, "http://local/"];
    let others: Vec<Child> = (0..3)
        .map(|_| Command::new(post[0]).args(&post[1..]).stdout(Stdio::piped()).spawn().unwrap())
        .collect();
    let output = printed_in(unprivileged(), &["--resident", "8M"], 8, &post).unwrap();
    assert!(output == body.as_bytes(), "curl: {}", service.complaints());
    for other in others {
        let output = other.wait_with_output().unwrap();
        assert!(output.stdout == body.as_bytes(), "{}", service.complaints());
    }
    service.end();
}
