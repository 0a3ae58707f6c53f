//! A client that pipelines requests over several connections, like the load generators of memcached
//! and redis.

use anyhow::{Context, bail};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Connections, each with its own thread.
const CONNECTIONS: u64 = 4;
/// Requests sent before their answers are read.
const DEPTH: u64 = 16;
/// A server that doesn't answer within this time has failed.
const PATIENCE: Duration = Duration::from_secs(60);

/// Sends `requests` requests, which `make(number, buffer)` appends to a buffer. Each must be
/// answered by exactly `answer`. Returns requests per second.
pub fn pipeline(
    socket: &Path,
    requests: u64,
    answer: &[u8],
    make: impl Fn(u64, &mut Vec<u8>) + Sync,
) -> anyhow::Result<f64> {
    let start = Instant::now();
    std::thread::scope(|scope| {
        let make = &make;
        let threads: Vec<_> = (0..CONNECTIONS)
            .map(|i| {
                scope.spawn(move || {
                    one(
                        socket,
                        (requests * i / CONNECTIONS, requests * (i + 1) / CONNECTIONS),
                        answer,
                        make,
                    )
                })
            })
            .collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("a client panicked"))
    })?;
    Ok(requests as f64 / start.elapsed().as_secs_f64())
}

fn one(
    socket: &Path,
    range: (u64, u64),
    answer: &[u8],
    make: &impl Fn(u64, &mut Vec<u8>),
) -> anyhow::Result<()> {
    let mut stream = connect(socket)?;
    let (mut out, mut back) = (Vec::new(), vec![0; answer.len() * DEPTH as usize]);
    let expected = answer.repeat(DEPTH as usize);
    for first in (range.0..range.1).step_by(DEPTH as usize) {
        out.clear();
        let count = DEPTH.min(range.1 - first);
        (first..first + count).for_each(|number| make(number, &mut out));
        stream.write_all(&out)?;
        let back = &mut back[..answer.len() * count as usize];
        stream.read_exact(back).context("waiting for answers")?;
        if *back != expected[..back.len()] {
            let text = String::from_utf8_lossy(&back[..back.len().min(80)]).into_owned();
            bail!("the server answered {text:?} in place of {:?}", String::from_utf8_lossy(answer));
        }
    }
    Ok(())
}

/// Connects to a socket. Reads and writes on it time out.
pub fn connect(socket: &Path) -> anyhow::Result<UnixStream> {
    let stream = UnixStream::connect(socket)
        .with_context(|| format!("connecting to {}", socket.display()))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// Sends one request, and reads until the answer has at least `least` bytes and ends with `end`.
pub fn ask(
    stream: &mut UnixStream,
    request: &[u8],
    least: usize,
    end: &[u8],
) -> anyhow::Result<Vec<u8>> {
    stream.write_all(request)?;
    let (mut text, mut part) = (Vec::new(), [0; 4096]);
    while text.len() < least || !text.ends_with(end) {
        match stream.read(&mut part).context("waiting for an answer")? {
            0 => bail!("the server closed the connection"),
            len => text.extend_from_slice(&part[..len]),
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn every_request_is_sent_once_and_wrong_answer_is_reported() {
        let path = std::env::temp_dir().join(format!("memfold-pipe-{}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let serve = |mut stream: UnixStream| {
                let (mut values, mut byte) = (Vec::new(), [0]);
                while stream.read(&mut byte).is_ok_and(|len| len == 1) {
                    values.push(byte[0]);
                    if stream.write_all(if byte[0] == 200 { b"no" } else { b"ok" }).is_err() {
                        break;
                    }
                }
                values
            };
            let threads: Vec<_> = (0..8)
                .map(|_| listener.accept().unwrap().0)
                .map(|s| std::thread::spawn(move || serve(s)))
                .collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<u8>>()
        });
        assert!(pipeline(&path, 150, b"ok", |number, out| out.push(number as u8)).unwrap() > 0.0);
        let outcome = pipeline(&path, 4, b"ok", |number, out| out.push(197 + number as u8));
        std::fs::remove_file(&path).unwrap();
        let mut values = server.join().unwrap();
        values.sort_unstable();
        assert_eq!(values[..150], (0..150).collect::<Vec<u8>>());
        assert!(outcome.is_err_and(|error| error.to_string().contains("no")));
    }
}
