//! `memfold metrics`: the figures of all runs, groups and block devices of this user, in the
//! OpenMetrics text format.
mod totals;
mod gathered;

use crate::failure::CommandFailure;
use crate::program::plain;
use clap::{Arg, ArgAction, ArgMatches, Command};
use gathered::GatheredMetrics;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use totals::RunSeries;

/// Longest wait for a request, and its longest length in bytes.
const REQUEST_PATIENCE: Duration = Duration::from_secs(2);
const REQUEST_LEN_MAX: usize = 8192;
/// The path of the metrics.
const PATH: &str = "/metrics";
/// The flag that gives each run of a group its own figures.
const EACH: &str = "each";
const TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Returns the command line of `metrics`.
pub fn command() -> Command {
    Command::new("metrics")
        .about("Prints the figures of all runs, groups and block devices of this user for Prometheus, or serves them")
        .override_usage("memfold metrics [--each] [--listen ADDRESS:PORT]")
        .arg(
            Arg::new("listen")
                .long("listen")
                .value_name("ADDRESS:PORT")
                .help("Serve them at http://ADDRESS:PORT/metrics until it is ended, instead of printing them once"),
        )
        .arg(Arg::new(EACH).long(EACH).action(ArgAction::SetTrue).help(
            "Give each run of a group all figures of its own, about 160 series, in place of the group's sums",
        ))
        .after_help(
            "Every process that can connect to the address can read the figures, and the names of the commands.\n\
             \nExit status: 0; 125 if the address can't be used.",
        )
}

/// Prints the metrics, or serves them.
///
/// # Errors
/// 125: the address can't be used, or stdout can't be written.
pub fn main(matches: &ArgMatches) -> Result<u8, CommandFailure> {
    let metrics = Metrics { series: Mutex::default(), is_each: matches.get_flag(EACH) };
    let Some(address) = matches.get_one::<String>("listen") else {
        say!("{}", metrics.text().trim_end());
        return Ok(0);
    };
    let fail = |e: &io::Error| {
        CommandFailure::own(format!(
            "--listen: {address}: {}. Give ADDRESS:PORT, such as 127.0.0.1:9464.",
            plain(e)
        ))
    };
    let listener = TcpListener::bind(address.as_str()).map_err(|e| fail(&e))?;
    say!("http://{}{PATH}", listener.local_addr().map_err(|e| fail(&e))?);
    let metrics = Arc::new(metrics);
    memfold_remote::each_connection(
        || listener.accept().map(|(stream, _)| stream),
        |stream| {
            // A slow or broken connection affects no other. Without a thread it is closed.
            let metrics = metrics.clone();
            let serve = move || drop(answer(stream, &metrics));
            drop(thread::Builder::new().name("memfold-metrics".to_string()).spawn(serve));
        },
    );
    Ok(0)
}

/// Answers one request.
fn answer(mut stream: TcpStream, metrics: &Metrics) -> io::Result<()> {
    stream.set_read_timeout(Some(REQUEST_PATIENCE))?;
    stream.set_write_timeout(Some(REQUEST_PATIENCE))?;
    let (mut request, mut bytes) = (Vec::new(), [0; 1024]);
    let end = Instant::now() + REQUEST_PATIENCE;
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        match stream.read(&mut bytes)? {
            0 => break,
            _ if Instant::now() > end => return Err(io::ErrorKind::TimedOut.into()),
            len if request.len() + len > REQUEST_LEN_MAX => {
                return refuse(&mut stream, "431 Request Header Fields Too Large", end);
            }
            len => request.extend_from_slice(&bytes[..len]),
        }
    }
    let line = String::from_utf8_lossy(&request);
    let mut words = line.split_ascii_whitespace();
    match (words.next(), words.next().map(|path| path.split('?').next().unwrap_or_default())) {
        (Some("GET"), Some(PATH)) => reply(&mut stream, "200 OK", &metrics.text()),
        (Some("GET"), Some(_)) => refuse(&mut stream, "404 Not Found", end),
        _ => refuse(&mut stream, "405 Method Not Allowed", end),
    }
}

/// Refuses a request, and reads the rest of it. If the connection were closed before, the client would
/// see a reset in place of the answer.
fn refuse(stream: &mut TcpStream, status: &str, end: Instant) -> io::Result<()> {
    reply(stream, status, "")?;
    stream.shutdown(Shutdown::Write)?;
    let mut bytes = [0; 1024];
    while Instant::now() < end && stream.read(&mut bytes)? > 0 {}
    Ok(())
}

fn reply(stream: &mut TcpStream, status: &str, body: &str) -> io::Result<()> {
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {TYPE}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())
}

/// What is printed or served.
struct Metrics {
    series: Mutex<RunSeries>,
    is_each: bool,
}

impl Metrics {
    /// Returns the metrics as text. Two requests at the same time get them one after the other, so
    /// that answers of runs are noted in their order.
    fn text(&self) -> String {
        let mut series = self.series.lock().unwrap_or_else(PoisonError::into_inner);
        let gathered = GatheredMetrics::now(&mut series, self.is_each);
        drop(series);
        let mut registry = Registry::with_prefix("memfold");
        registry.register_collector(Box::new(gathered));
        let mut text = String::new();
        // Writing to a string can't fail.
        let _ = encode(&mut text, &registry);
        text
    }
}
