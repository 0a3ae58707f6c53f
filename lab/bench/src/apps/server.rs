//! Servers with more data than their memory limit, and their clients: MariaDB, memcached, redis.

use crate::apps::pipe::{ask, connect, pipeline};
use crate::apps::run::{AppPeer, ClientLoad, Done, ServerProgram, Work, client, run_with};
use crate::corpus::parts::json_text;
use crate::host::program::find;
use anyhow::{Context, bail};
use memfold_testkit::random::mix;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn text(path: &Path) -> anyhow::Result<String> {
    path.to_str().map(String::from).context("a path that is not text")
}

/// A text whose parts are the values of keys. So values compress as real data does, and can be
/// verified.
struct Values(Vec<u8>);

/// Size of a value.
const VALUE_BYTES: usize = 1000;

impl Values {
    fn new() -> Values {
        Values(json_text(16 << 20, 7))
    }

    /// Appends the value for `seed` to `out`.
    fn append(&self, seed: u64, out: &mut Vec<u8>) {
        let at = mix(seed) as usize % (self.0.len() - VALUE_BYTES);
        let _ = write!(out, "{at:08}");
        out.extend_from_slice(&self.0[at..at + VALUE_BYTES - 8]);
    }

    fn is_right(&self, value: &[u8]) -> bool {
        let at = value
            .get(..8)
            .and_then(|digits| std::str::from_utf8(digits).ok()?.parse::<usize>().ok());
        let part = at.and_then(|at| self.0.get(at..at + VALUE_BYTES - 8));
        value.len() == VALUE_BYTES && part == Some(&value[8..])
    }
}

/// Returns the keys that are read back: every `step`th.
fn samples(keys: u64) -> impl Iterator<Item = u64> {
    (0..keys).step_by((keys / 1000).max(1) as usize)
}

/// memcached: writes every key once, then as many keys at random. Values are read only at the end,
/// to verify them.
pub fn memcached(directory: &Path, keys: u64) -> anyhow::Result<Work> {
    let socket = directory.join("memcached.socket");
    // As root, memcached must be given a user.
    let command =
        [&find("memcached", "memcached")?, "-u", "root", "-m", "65536", "-s", &text(&socket)?];
    let values = Arc::new(Values::new());
    let load = move |socket: &Path| {
        let set = |key: u64, seed: u64, out: &mut Vec<u8>| {
            let _ = write!(out, "set key:{key:012} 0 0 {VALUE_BYTES}\r\n");
            values.append(seed, out);
            out.extend_from_slice(b"\r\n");
        };
        let fill = pipeline(socket, keys, b"STORED\r\n", |i, out| set(i, i, out))?;
        let over = pipeline(socket, keys, b"STORED\r\n", |i, out| {
            set(mix(i + keys) % keys, i + keys, out)
        })?;
        let mut stream = connect(socket)?;
        for key in samples(keys) {
            let answer =
                ask(&mut stream, format!("get key:{key:012}\r\n").as_bytes(), 5, b"END\r\n")?;
            let head =
                answer.iter().position(|&byte| byte == b'\n').context("memcached lost a value")?;
            let value = answer.get(head + 1..head + 1 + VALUE_BYTES).unwrap_or(&[]);
            if !values.is_right(value) {
                bail!("memcached has another value for key {key}");
            }
        }
        Ok(ClientLoad { figures: vec![fill, over], answers: String::new() })
    };
    Ok(Work::Server(ServerProgram {
        command: command.map(String::from).into(),
        socket,
        load: Box::new(load),
    }))
}

/// redis: fills the database, runs SET and GET of random keys with redis-benchmark, and writes a
/// snapshot to disk.
pub fn redis(directory: &Path, keys: u64) -> anyhow::Result<Work> {
    let socket = directory.join("redis.socket");
    let bench = find("redis-benchmark", "redis-tools")?;
    let flags =
        ["--port", "0", "--save", "", "--unixsocket", &text(&socket)?, "--dir", &text(directory)?]
            .map(String::from);
    let command = [&[find("redis-server", "redis-server")?], &flags[..]].concat();
    let values = Arc::new(Values::new());
    // The next run would load it.
    let file = directory.join("dump.rdb");
    let load = move |socket: &Path| {
        let set = |name: &str, key: u64, out: &mut Vec<u8>| {
            let name = format!("{name}:{key:012}");
            let _ =
                write!(out, "*3\r\n$3\r\nSET\r\n${}\r\n{name}\r\n${VALUE_BYTES}\r\n", name.len());
            values.append(key, out);
            out.extend_from_slice(b"\r\n");
        };
        let (range, path) = (keys.to_string(), text(socket)?);
        pipeline(socket, keys, b"+OK\r\n", |i, out| set("key", i, out))?;
        pipeline(socket, 1000, b"+OK\r\n", |i, out| set("check", i, out))?;
        let bench = |test: &str| -> anyhow::Result<f64> {
            let answer = client(&[
                &bench, "-s", &path, "-t", test, "-r", &range, "-n", &range, "-d", "1000", "--csv",
            ])?;
            csv_figure(&answer, test).with_context(|| format!("redis-benchmark said {answer:?}"))
        };
        let (set, get) = (bench("set")?, bench("get")?);
        let mut stream = connect(socket)?;
        let seconds = snapshot(&mut stream)?;
        std::fs::remove_file(&file).context("the snapshot")?;
        for key in 0..1000 {
            let answer = ask(
                &mut stream,
                format!("GET check:{key:012}\r\n").as_bytes(),
                VALUE_BYTES,
                b"\r\n",
            )?;
            let value =
                answer.strip_prefix(b"$1000\r\n").and_then(|value| value.strip_suffix(b"\r\n"));
            if !values.is_right(value.unwrap_or(&[])) {
                bail!("redis has another value for check:{key}");
            }
        }
        let size = ask(&mut stream, b"DBSIZE\r\n", 2, b"\r\n")?;
        let answers = String::from_utf8_lossy(&size).into_owned();
        Ok(ClientLoad { figures: vec![set, get, seconds], answers })
    };
    Ok(Work::Server(ServerProgram { command, socket, load: Box::new(load) }))
}

/// Makes redis write a snapshot in a forked child, and returns the time in seconds.
fn snapshot(stream: &mut std::os::unix::net::UnixStream) -> anyhow::Result<f64> {
    let start = Instant::now();
    let answer = ask(stream, b"BGSAVE\r\n", 2, b"\r\n")?;
    if !answer.starts_with(b"+Background saving started") {
        bail!("redis does not save: {}", String::from_utf8_lossy(&answer));
    }
    loop {
        let about = ask(stream, b"INFO persistence\r\n", 4, b"\r\n\r\n")?;
        let about = String::from_utf8_lossy(&about).into_owned();
        if about.contains("rdb_bgsave_in_progress:0") {
            if !about.contains("rdb_last_bgsave_status:ok") {
                bail!("redis failed to save");
            }
            return Ok(start.elapsed().as_secs_f64());
        }
        if start.elapsed() > Duration::from_secs(120) {
            bail!("redis has not saved after 120 s");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Requests per second of a test, from `redis-benchmark --csv`.
fn csv_figure(text: &str, test: &str) -> Option<f64> {
    let head = format!("\"{}\",\"", test.to_uppercase());
    text.lines().find_map(|line| line.strip_prefix(&head))?.split('"').next()?.parse().ok()
}

/// MariaDB: reads a table whole, to fill the buffer pool, then runs sysbench's read-only
/// transactions at random. The database is created here, once.
pub fn mariadb(directory: &Path, rows: u64, seconds: u32) -> anyhow::Result<Work> {
    let (data, socket) = (text(&directory.join("mariadb"))?, directory.join("mariadb.socket"));
    let package = "mariadb-server-core mariadb-client-core sysbench";
    let (install, shell) = (find("mariadb-install-db", package)?, find("mariadb", package)?);
    let (server, sysbench) = (find("mariadbd", package)?, find("sysbench", package)?);
    let (at, pool) = (text(&socket)?, rows * 320 + (32 << 20));
    client(&[
        &install,
        "--no-defaults",
        "--user=root",
        &format!("--datadir={data}"),
        "--auth-root-authentication-method=normal",
    ])?;
    let flags = [
        "--no-defaults",
        "--user=root",
        "--skip-networking",
        "--skip-log-bin",
        "--innodb-buffer-pool-load-at-startup=0",
        "--innodb-buffer-pool-dump-at-shutdown=0",
        &format!("--innodb-buffer-pool-size={pool}"),
        &format!("--datadir={data}"),
        &format!("--pid-file={data}/pid"),
        &format!("--socket={at}"),
    ];
    let command: Vec<String> =
        [server.as_str()].iter().chain(&flags).map(|word| word.to_string()).collect();
    let table = [
        "--db-driver=mysql",
        "--mysql-user=root",
        &format!("--mysql-socket={at}"),
        &format!("--table-size={rows}"),
    ];
    let table: Vec<String> = [sysbench.as_str(), "oltp_read_only"]
        .iter()
        .chain(&table)
        .map(|word| word.to_string())
        .collect();
    let sysbench = move |more: &[&str]| {
        let words: Vec<&str> =
            table.iter().map(String::as_str).chain(more.iter().copied()).collect();
        client(&words)
    };
    let query =
        move |text: &str| client(&[&shell, "--no-defaults", "-uroot", "-S", &at, "-N", "-e", text]);
    let (sysbench, query) = (Arc::new(sysbench), Arc::new(query));
    let (fill, create) = (sysbench.clone(), query.clone());
    let prepare = move |_: &Path| {
        create("create database sbtest")?;
        fill(&["prepare"])?;
        Ok(ClientLoad { figures: Vec::new(), answers: String::new() })
    };
    let server =
        ServerProgram { command: command.clone(), socket: socket.clone(), load: Box::new(prepare) };
    let _: Done =
        run_with(AppPeer::Plain, &Work::Server(server), 0, 0).context("making the database")?;
    let load = move |_: &Path| {
        let check = "checksum table sbtest.sbtest1; select count(*), sum(k) from sbtest.sbtest1 force index(k_1)";
        let before = query(check)?;
        let answer =
            sysbench(&["--threads=4", "--percentile=99", &format!("--time={seconds}"), "run"])?;
        let figures =
            sysbench_figures(&answer).with_context(|| format!("sysbench said {answer:?}"))?;
        if query(check)? != before {
            bail!("the table is not what it was");
        }
        Ok(ClientLoad { figures, answers: before })
    };
    Ok(Work::Server(ServerProgram { command, socket, load: Box::new(load) }))
}

/// Transactions per second, and the 99th percentile in milliseconds.
fn sysbench_figures(text: &str) -> Option<Vec<f64>> {
    let after = |name: &str| text.lines().find_map(|line| line.trim().strip_prefix(name));
    let rate = after("transactions:")?.split('(').nth(1)?.split(' ').next()?.parse().ok()?;
    let p99 = after("99th percentile:")?.trim().parse().ok()?;
    Some(vec![rate, p99])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_output_parses() {
        let csv = "\"test\",\"rps\",\"avg_latency_ms\"\n\"SET\",\"81234.50\",\"0.3\"\n";
        assert_eq!(csv_figure(csv, "set"), Some(81234.5));
        assert_eq!(csv_figure(csv, "get"), None);
        let text = "    transactions:                        16692  (3337.30 per sec.)\n         99th percentile:                        1.50\n";
        assert_eq!(sysbench_figures(text), Some(vec![3337.3, 1.5]));
        assert_eq!(sysbench_figures("FATAL: no server"), None);
    }

    #[test]
    fn value_verifies_as_right_or_wrong() {
        let values = Values::new();
        let mut value = Vec::new();
        values.append(5, &mut value);
        assert!(values.is_right(&value));
        value[500] ^= 1;
        assert!(
            !values.is_right(&value) && !values.is_right(&value[..999]) && !values.is_right(b"")
        );
    }
}
