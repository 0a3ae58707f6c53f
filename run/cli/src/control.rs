//! The control socket of a run: answers `memfold stat`, `memfold set` and `memfold run --list`.
//!
//! A connection has one request, a line of JSON, and one answer. `{"do": "stat"}` is answered by an
//! object about the run; `{"do": "set", "limit": "512M"}` by the present bounds; a failed request
//! by `{"error": "why"}`.
use crate::failure::CommandFailure;
use crate::group::member::{GroupMember, GroupRequest};
use crate::report::figures::RunFigures;
use crate::report::json::{figures, of_process};
use crate::report::recent::RecentWork;
use crate::report::recommended::LimitCurve;
use crate::sockets;
use crate::table::hand_over::HandOver;
use memfold_engine::config::Config;
use memfold_run::table::ProcessSlot;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Instant;

/// A run, as its control socket sees it.
pub struct RunControl {
    /// The tables of its processes, and its bounds.
    pub shared: HandOver,
    /// Its settings, with the present bounds.
    pub config: Mutex<Config>,
    /// The program and its arguments.
    pub arguments: Vec<OsString>,
    /// Its start.
    pub start: Instant,
    /// Its name, if it has one.
    pub name: Option<String>,
    /// Its membership in a group.
    pub group: Option<GroupMember>,
    /// What folding has cost it in the last minutes.
    pub recent: Mutex<RecentWork>,
}

impl RunControl {
    /// Begins a run: makes its tables, joins the group, and sets its bounds.
    ///
    /// # Errors
    /// The errors of [`HandOver::new`] and [`GroupMember::join`].
    pub fn begin(
        config: Config,
        arguments: Vec<OsString>,
        name: Option<String>,
        group: Option<GroupRequest>,
    ) -> Result<RunControl, CommandFailure> {
        let hand_over = HandOver::new()?;
        // SAFETY: no thread of memfold uses a robust mutex. A failure is ignored. Processes of the
        // run then don't learn that this process has ended, and may write messages that are not
        // read.
        let _ = unsafe { hand_over.tables.bounds().run_here() };
        let group = group.map(GroupMember::join).transpose()?;
        let (config, start) = (Mutex::new(config), Instant::now());
        let recent = Mutex::default();
        let run = RunControl { shared: hand_over, config, arguments, start, name, group, recent };
        run.set_bounds(&run.config());
        Ok(run)
    }

    /// Sets the bounds of the processes: those of the run, and its share of its group.
    fn set_bounds(&self, config: &Config) {
        let most = self.group.as_ref().map(GroupMember::most_bytes);
        let limit = config.limit_bytes.into_iter().chain(most).min();
        self.shared.tables.set_bounds(limit, config.resident_bytes);
        if let Some(group) = &self.group {
            self.shared.tables.set_share(group.share_bytes());
        }
    }

    /// Renews the run's claim in its group for as long as this process lives.
    pub fn tend_group(&self) {
        let own_limit = || self.config_locked().limit_bytes.unwrap_or(u64::MAX);
        if let Some(group) = &self.group {
            group.tend(&self.shared.tables, own_limit, || self.set_bounds(&self.config_locked()));
        }
    }

    /// Returns the present settings.
    pub fn config(&self) -> Config {
        self.config_locked().clone()
    }

    /// Locks the settings. No thread of `memfold run` panics while it has the lock.
    fn config_locked(&self) -> MutexGuard<'_, Config> {
        self.config.lock().expect("no thread panics with the lock")
    }

    fn answer(&self, request: &str) -> Value {
        let Ok(request) = serde_json::from_str::<Value>(request) else {
            return json!({"error": "The request is not JSON."});
        };
        match request["do"].as_str() {
            Some("stat") => self.stat(),
            Some("set") => self.set(&request).unwrap_or_else(|why| json!({ "error": why })),
            _ => {
                json!({"error": "This run was started by another version of memfold, which does not know the request."})
            }
        }
    }

    fn stat(&self) -> Value {
        let config = self.config();
        let command: Vec<_> = self.arguments.iter().map(|a| a.to_string_lossy()).collect();
        let processes =
            self.shared.tables.processes().filter(ProcessSlot::is_alive).map(|process| {
                let mut one = of_process(process);
                for (name, bytes) in uncounted(process.pid()) {
                    one[name] = bytes.into();
                }
                one
            });
        let (slotless_processes, unmanaged_bytes) = self.shared.tables.bounds().slotless();
        let sum = RunFigures::sum(&self.shared.tables);
        let curve = LimitCurve::of(&self.shared.tables, &sum);
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "run": std::process::id(),
            "name": self.name,
            "command": command,
            "seconds": self.start.elapsed().as_secs_f64(),
            "limit_bytes": config.limit_bytes,
            "resident_limit_bytes": config.resident_bytes,
            "group": self.about_group(),
            "codec": config.codec,
            "slowdown": config.slowdown,
            "slowdown_percent": sum.slowdown(),
            "unmanaged_processes": slotless_processes,
            "unmanaged_processes_bytes": unmanaged_bytes,
            "processes": processes.collect::<Vec<_>>(),
            "sum": Value::Object(figures(&sum)),
            "recommended_limits": curve.as_ref().map(LimitCurve::json),
            "slowdown_by_limit": curve.map(|curve| curve.points().json()),
            "recent": self.recent(&sum),
        })
    }

    /// Returns what folding has cost in the last minutes, or null in the first ones.
    fn recent(&self, sum: &RunFigures) -> Value {
        let recent = self.recent.lock().expect("no thread panics with the lock");
        let Some(begin) = recent.begin() else { return Value::Null };
        let curve = LimitCurve::since(&self.shared.tables, sum, Some(begin));
        json!({
            "seconds": begin.seconds_until(memfold_os::thread::now_ns()),
            "slowdown_percent": begin.slowdown(sum),
            "slowdown_by_limit": curve.map_or(json!([]), |curve| curve.points().json()),
        })
    }

    /// Notes what the run has done, for the last minutes.
    pub fn note_work(&self, now_ns: u64) {
        let mut recent = self.recent.lock().expect("no thread panics with the lock");
        recent.note(&self.shared.tables, now_ns);
    }

    fn about_group(&self) -> Option<Value> {
        let group = self.group.as_ref()?;
        let GroupRequest { name, weight, floor_bytes } = group.request();
        Some(json!({
            "name": name,
            "limit_bytes": group.limit_bytes(),
            "share_bytes": group.share_bytes(),
            "weight": weight,
            "floor_bytes": floor_bytes,
        }))
    }

    /// Sets the bounds. Invalid bounds change none of them.
    fn set(&self, request: &Value) -> Result<Value, String> {
        let mut config = self.config_locked();
        let mut new = config.clone();
        for name in ["limit", "resident"] {
            match request[name].as_str() {
                None => {}
                Some("none") if name == "limit" => new.limit_bytes = None,
                Some("none") => new.resident_bytes = None,
                Some(size) => new.set(name, size).map_err(|e| e.to_string())?,
            }
        }
        // A group has a limit.
        let limit_bytes = new.limit_bytes.or(self.group.as_ref().map(|_| new.memory_bytes));
        Config { limit_bytes, ..new.clone() }.check().map_err(|e| e.to_string())?;
        self.set_bounds(&new);
        *config = new;
        Ok(json!({
            "run": std::process::id(),
            "limit_bytes": config.limit_bytes,
            "resident_limit_bytes": config.resident_bytes,
            "group": self.about_group(),
        }))
    }
}

/// Returns the resident memory of a process that the limit does not count: pages of files, and
/// shared memory. Each has its name and its bytes.
fn uncounted(pid: u32) -> impl Iterator<Item = (&'static str, u64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    [("file_bytes", "RssFile:"), ("shmem_bytes", "RssShmem:")].into_iter().map(
        move |(name, field)| {
            let line = text.lines().find_map(|line| line.strip_prefix(field));
            let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
            (name, kib.unwrap_or(0) << 10)
        },
    )
}

/// The path of the socket; the drop removes it.
pub struct ControlSocket {
    path: PathBuf,
}

impl ControlSocket {
    /// Makes the socket. Clients that connect from now on wait until it is served.
    ///
    /// # Errors
    /// No socket can be made. The error names the place. A program runs without the socket.
    pub fn listen() -> io::Result<(ControlSocket, UnixListener)> {
        let (listener, path) = sockets::listen(sockets::RUN)?;
        Ok((ControlSocket { path }, listener))
    }

    /// Serves a run from its own thread, which gets no signal that the caller has blocked.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn serve(self, listener: UnixListener, run: Arc<RunControl>) -> io::Result<ControlSocket> {
        let serve = move || {
            // A broken connection affects no other.
            let accept = || listener.accept().map(|(stream, _)| stream);
            memfold_remote::each_connection(accept, |stream| {
                let _ = sockets::answer(stream, |request| run.answer(request).to_string());
            });
        };
        thread::Builder::new().name("memfold-control".to_string()).spawn(serve)?;
        Ok(self)
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_that_make_no_sense_change_nothing() {
        let mut config = Config::new(1 << 30);
        config.set("limit", "64M").unwrap();
        let run = RunControl::begin(config, vec![], None, None).unwrap();
        for (request, words) in [
            (r#"{"do":"set","limit":"1"}"#, "too small"),
            (r#"{"do":"set","limit":"2G"}"#, "more than the memory"),
            (r#"{"do":"set","limit":"32M","resident":"x"}"#, "--resident"),
            (r#"{"do":"set","limit":"none"}"#, "Give --limit"),
            (r#"{"do":"stop"}"#, "another version"),
            ("nonsense", "not JSON"),
        ] {
            let answer = run.answer(request);
            assert!(
                answer["error"].as_str().is_some_and(|why| why.contains(words)),
                "{request}: {answer}"
            );
            assert_eq!(
                (run.config().limit_bytes, run.config().resident_bytes),
                (Some(64 << 20), None)
            );
        }
        let answer = run.answer(r#"{"do":"set","limit":"none","resident":"50%"}"#);
        assert_eq!(
            (answer["limit_bytes"].as_u64(), answer["resident_limit_bytes"].as_u64()),
            (None, Some(512 << 20))
        );
        assert_eq!(run.answer(r#"{"do":"stat"}"#)["resident_limit_bytes"], 512 << 20);
    }
}
