//! The service of `memfold run --remote`: its flags, its socket, and its process.
//!
//! The service has its own process in its own session. So it refreshes the keys in the store even
//! while `memfold run`, or its terminal's whole job, is stopped. Its resource limits are
//! independent of those that CMD inherits.
use crate::failure::CommandFailure;
use crate::log::Log;
use crate::program::plain;
use crate::sockets;
use memfold_engine::config::Config;
use memfold_os::raw::set_warner;
use memfold_remote::{Service, StoreSettings};
use rustix::fd::{AsFd, OwnedFd};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid,
};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// The suffix of the socket's name.
const SUFFIX: &str = ".remote";
/// The text that the service sends when it is ready, and again when all keys have been deleted.
const DONE: &str = "done\n";
/// Longest wait for the end of the service. Its deletion of keys gives up earlier.
const END: Duration = Duration::from_secs(20);
/// Signals that the service ignores. Signals to all processes of a unit, or of this name, are meant
/// for the program, which needs its data to end well. The service ends when `memfold run` does.
const IGNORED: [i32; 9] = [
    libc::SIGINT,
    libc::SIGTERM,
    libc::SIGHUP,
    libc::SIGQUIT,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGTSTP,
    libc::SIGTTIN,
    libc::SIGTTOU,
];

/// A service in its own process. It deletes its keys in the store and ends when this is dropped,
/// and when this process ends in any other way.
pub struct RemoteService {
    /// The process. `None` once it was ended. It may have been reaped: [`crate::child`] reaps every
    /// child that has ended.
    process: Option<OwnedFd>,
    /// The connection to the service. Closing it ends the service, which then reports the result.
    line: UnixStream,
    expiry_s: u32,
}

/// The log of the service, in its own process.
static LOG: OnceLock<Arc<Log>> = OnceLock::new();

/// Starts a service that has reached its store, if the settings have one, and puts its socket into
/// the settings. The service reports into the log. This process must have one thread.
///
/// # Errors
/// 125: the flags are invalid, the store can't be used, or there is no place for the socket.
pub fn start(config: &mut Config, log: &Arc<Log>) -> Result<Option<RemoteService>, CommandFailure> {
    let Some(url) = &config.remote else {
        for (flag, value) in
            [("remote-auth", &config.remote_auth), ("remote-ca", &config.remote_ca)]
        {
            if value.is_some() {
                return Err(CommandFailure::own(format!(
                    "--{flag}: this flag needs a remote store. Give --remote URL too."
                )));
            }
        }
        return Ok(None);
    };
    let of = |flag: &str, why: String| CommandFailure::own(format!("--{flag}: {why}"));
    let timeout = Duration::from_secs(config.remote_timeout_s as u64);
    let mut settings = StoreSettings::parse(url, timeout).map_err(|why| of("remote", why))?;
    settings.set_expiry(Duration::from_secs(config.remote_expiry_s as u64));
    if let Some(path) = &config.remote_auth {
        settings.set_auth(Path::new(path)).map_err(|why| of("remote-auth", why))?;
    }
    if let Some(path) = &config.remote_ca {
        settings.set_ca(Path::new(path)).map_err(|why| of("remote-ca", why))?;
    }
    let path = sockets::path(SUFFIX).map_err(|e| {
        of(
            "remote",
            format!("its service needs a socket, and no directory can hold one: {}", plain(&e)),
        )
    })?;
    let text = path.to_str().ok_or_else(|| {
        of(
            "remote",
            format!(
                "{}: the path of its socket is not valid UTF-8. Set XDG_RUNTIME_DIR.",
                path.display()
            ),
        )
    })?;
    config.remote_socket = Some(text.to_string());
    let remote = RemoteService::start(settings, path, config.remote_expiry_s, log)
        .map_err(|why| of("remote", why))?;
    // The program must not see these paths in its environment.
    (config.remote_auth, config.remote_ca) = (None, None);
    Ok(Some(remote))
}

impl RemoteService {
    fn start(
        settings: StoreSettings,
        path: PathBuf,
        expiry_s: u32,
        log: &Arc<Log>,
    ) -> Result<RemoteService, String> {
        let failure = |e: io::Error| format!("starting its service failed: {}", plain(&e));
        let (line, its) = UnixStream::pair().map_err(failure)?;
        // SAFETY: this process has one thread, so no lock is held in the child, which may call
        // anything.
        let pid = match unsafe { libc::fork() } {
            -1 => return Err(failure(io::Error::last_os_error())),
            0 => {
                drop(line);
                let _ = LOG.set(log.clone());
                set_warner(|text| {
                    if let Some(log) = LOG.get() {
                        log.say(&String::from_utf8_lossy(text));
                    }
                });
                serve(settings, &path, its)
            }
            pid => Pid::from_raw(pid).expect("a child has a number above 0"),
        };
        drop(its);
        // The child was not reaped yet, so the number is its own.
        let process = pidfd_open(pid, PidfdFlags::empty())
            .map_err(|e| failure(io::Error::from_raw_os_error(e.raw_os_error())))?;
        let mut remote = RemoteService { process: Some(process), line, expiry_s };
        let mut answer = String::new();
        BufReader::new(&mut remote.line).read_line(&mut answer).map_err(failure)?;
        match answer.as_str() {
            DONE => Ok(remote),
            "" => Err("its service ended as soon as it was started".to_string()),
            why => Err(why.trim_end().to_string()),
        }
    }

    /// Makes the service delete its keys in the store, and ends it.
    ///
    /// # Errors
    /// One line: objects may be left in the store.
    pub fn end(&mut self) -> Result<(), String> {
        let failure = |why: &str| {
            format!(
                "the service {why}. Objects that are left in the store expire {} s after their last refresh.",
                self.expiry_s
            )
        };
        let Some(process) = self.process.take() else { return Ok(()) };
        let _ = self.line.shutdown(Shutdown::Write);
        let _ = self.line.set_read_timeout(Some(END));
        // It may be stopped.
        let _ = pidfd_send_signal(&process, Signal::CONT);
        let mut answer = String::new();
        let result = match self.line.read_to_string(&mut answer).map(|_| answer.as_str()) {
            Ok(DONE) => Ok(()),
            Ok("") => Err(failure("was killed")),
            Ok(why) => Err(why.trim_end().to_string()),
            Err(_) => {
                let _ = pidfd_send_signal(&process, Signal::KILL);
                Err(failure("did not end in time"))
            }
        };
        let _ = waitid(WaitId::PidFd(process.as_fd()), WaitIdOptions::EXITED);
        result
    }
}

impl Drop for RemoteService {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// Runs in the child: reports whether the service was started, serves until the other end of `line`
/// is closed, and reports the result of the end.
fn serve(settings: StoreSettings, path: &Path, mut line: UnixStream) -> ! {
    set_apart();
    let answer = match Service::start(settings, path) {
        Ok(service) => {
            if line.write_all(DONE.as_bytes()).is_ok() {
                let _ = line.read(&mut [0]);
            }
            service.delete_keys()
        }
        Err(why) => Err(why),
    };
    let _ = line.write_all(answer.map_or_else(|why| why + "\n", |()| DONE.to_string()).as_bytes());
    std::process::exit(0)
}

/// Separates the process from its parent's signals, and raises its limit of descriptors to the hard
/// limit.
fn set_apart() {
    // SAFETY: these calls change only this process. The dispositions run no handler, and the name
    // is a C string. `limit` is local and was filled by getrlimit before it is used.
    unsafe {
        libc::setsid();
        libc::prctl(libc::PR_SET_NAME, c"memfold-remote".as_ptr());
        // A stopped service would not see the end of its parent.
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGCONT);
        for signal in IGNORED {
            libc::signal(signal, libc::SIG_IGN);
        }
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        }
    }
}
