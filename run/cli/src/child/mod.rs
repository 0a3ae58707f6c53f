//! The program as memfold's child: its start, its signals, and its end.
mod inherited;
pub mod signals;

use crate::child::signals::{CaughtSignal, PassedSignals};
use crate::failure::CommandFailure;
use crate::machine::limits::reached_cpu_limit;
use crate::program::{SHELL, plain};
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
use std::ffi::{CString, OsStr, OsString, c_char};
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// A started program.
pub struct ChildProgram {
    pid: libc::pid_t,
    signals: PassedSignals,
}

/// How a program ended.
pub struct ProgramEnd {
    pub pid: libc::pid_t,
    /// The exit status: the program's own, or 128 + n if signal n ended it.
    pub status: u8,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Whether the kernel made a core dump.
    pub dumped: bool,
    /// The limit of CPU time that it reached, seconds.
    pub cpu_limit: Option<u64>,
}

impl ChildProgram {
    /// Executes `path` with `arguments`, of which the first is the program's own name, in
    /// `environment`. A file that the kernel can't execute is given to sh, as execvp does.
    ///
    /// The program inherits what memfold inherited. It is killed when memfold is killed: memfold
    /// passes on every other signal, but it can't pass on SIGKILL, which must not leave the program
    /// running.
    ///
    /// # Errors
    /// 126 or 127, depending on why the kernel refuses to execute it.
    pub fn start(
        path: &Path,
        arguments: &[OsString],
        environment: Vec<CString>,
    ) -> Result<ChildProgram, CommandFailure> {
        let image = ExecImage::new(path, arguments, environment)
            .map_err(|e| CommandFailure::own(plain(&e)))?;
        let signals = PassedSignals::block();
        let parent = std::process::id() as libc::pid_t;
        let prepare = {
            let signals = signals.clone();
            move || {
                // SAFETY: both are system calls without pointers.
                let is_orphan = unsafe {
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                    libc::getppid() != parent
                };
                inherited::restore();
                signals.restore();
                // If the parent differs, memfold was killed before the request took effect.
                Err(if is_orphan {
                    io::Error::from_raw_os_error(libc::ESRCH)
                } else {
                    image.execute()
                })
            }
        };
        // `Command` is used only for its fork and its error reports. It would sort the environment.
        let mut command = Command::new(path);
        // SAFETY: the closure makes only async-signal-safe system calls and allocates nothing.
        unsafe { command.pre_exec(prepare) };
        match command.spawn() {
            Ok(child) => Ok(ChildProgram { pid: child.id() as libc::pid_t, signals }),
            Err(e) => {
                signals.restore();
                let text = format!("{}: {}", path.display(), plain(&e));
                Err(if e.kind() == ErrorKind::NotFound {
                    CommandFailure::not_found(text)
                } else if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::ENOMEM)) {
                    CommandFailure::own(text)
                } else {
                    CommandFailure::not_executable(text)
                })
            }
        }
    }

    /// Returns the program's process ID.
    pub fn number(&self) -> u32 {
        self.pid as u32
    }

    /// Waits for the end of the program and passes signals on to it.
    ///
    /// # Errors
    /// 125: waiting for the program failed.
    pub fn wait(self) -> Result<ProgramEnd, CommandFailure> {
        loop {
            if let Some(end) = self.collect()? {
                self.signals.restore();
                return Ok(end);
            }
            if let Some(signal) = self.signals.next(None) {
                self.pass_on(signal);
            }
        }
    }

    /// Reaps the other children that have ended, up to the program. As PID 1 of a container, this
    /// process is the parent of every orphan.
    fn reap_orphans(&self) {
        let flags = libc::WEXITED | libc::WNOHANG;
        let next = || {
            // SAFETY: the struct has only integers, for which zeros are valid. The kernel fills
            // `info`, which is local, or leaves the process ID zero.
            unsafe {
                let mut info: libc::siginfo_t = std::mem::zeroed();
                let status = libc::waitid(libc::P_ALL, 0, &raw mut info, flags | libc::WNOWAIT);
                (status == 0).then(|| info.si_pid()).filter(|pid| *pid != 0)
            }
        };
        while let Some(orphan) = next().filter(|pid| *pid != self.pid) {
            // SAFETY: the kernel needs no place for the result. The process is a child that has
            // ended, so the call makes the kernel forget it.
            unsafe { libc::waitid(libc::P_PID, orphan as u32, std::ptr::null_mut(), flags) };
        }
    }

    /// Returns how the program ended, or `None` while it runs.
    fn collect(&self) -> Result<Option<ProgramEnd>, CommandFailure> {
        self.reap_orphans();
        let change = WaitIdOptions::EXITED | WaitIdOptions::STOPPED;
        let look = change | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        loop {
            let pid = Pid::from_raw(self.pid).expect("it was started");
            if let Ok(None) = waitid(WaitId::Pid(pid), look) {
                return Ok(None);
            }
            // The next call makes the kernel forget it.
            let cpu_limit = reached_cpu_limit(self.pid);
            let mut status = 0;
            // SAFETY: the kernel writes one int to `status`, which is local. The process is a child
            // of this one, and nothing else waits for it.
            match unsafe { libc::waitpid(self.pid, &mut status, libc::WNOHANG | libc::WUNTRACED) } {
                0 => return Ok(None),
                -1 => {
                    let error = io::Error::last_os_error();
                    if error.kind() != ErrorKind::Interrupted {
                        return Err(CommandFailure::own(format!(
                            "Waiting for the program failed: {}",
                            plain(&error)
                        )));
                    }
                }
                _ if libc::WIFEXITED(status) => {
                    return Ok(Some(ProgramEnd {
                        pid: self.pid,
                        status: libc::WEXITSTATUS(status) as u8,
                        signal: None,
                        dumped: false,
                        cpu_limit,
                    }));
                }
                _ if libc::WIFSIGNALED(status) => {
                    let has_core = libc::WCOREDUMP(status);
                    return Ok(Some(ProgramEnd {
                        pid: self.pid,
                        status: 128 + libc::WTERMSIG(status) as u8,
                        signal: Some(libc::WTERMSIG(status)),
                        dumped: has_core,
                        cpu_limit,
                    }));
                }
                _ if libc::WIFSTOPPED(status) => stop_like_the_program(libc::WSTOPSIG(status)),
                _ => {}
            }
        }
    }

    /// Passes a signal on to the program, unless the program has got it already. Ctrl-C reaches the
    /// whole process group, and the program's own `kill 0` reaches its group.
    fn pass_on(&self, caught: CaughtSignal) {
        if caught.number == libc::SIGCHLD || caught.from_kernel || caught.sender == Some(self.pid) {
            return;
        }
        // SAFETY: the process is a child that has not been collected, so the number is still its
        // own.
        unsafe { libc::kill(self.pid, caught.number) };
    }
}

/// A program to execute, prepared for a process that may not allocate.
struct ExecImage {
    path: CString,
    arguments: ExecStrings,
    environment: ExecStrings,
    /// Arguments for the shell: its name, the path as a script, and the arguments after the first.
    by_shell: ExecStrings,
}

impl ExecImage {
    /// Prepares the strings.
    ///
    /// # Errors
    /// A path or an argument has a zero byte in it.
    fn new(
        path: &Path,
        arguments: &[OsString],
        environment: Vec<CString>,
    ) -> io::Result<ExecImage> {
        let text = |s: &OsStr| CString::new(s.as_bytes());
        let path = text(path.as_os_str())?;
        let arguments = arguments.iter().map(|a| text(a)).collect::<Result<Vec<_>, _>>()?;
        let mut by_shell = vec![SHELL.to_owned(), path.clone()];
        by_shell.extend_from_slice(&arguments[1..]);
        Ok(ExecImage {
            path,
            arguments: ExecStrings::new(arguments),
            environment: ExecStrings::new(environment),
            by_shell: ExecStrings::new(by_shell),
        })
    }

    /// Executes the program. Returns only if that fails, with the reason. Allocates nothing.
    fn execute(&self) -> io::Error {
        // SAFETY: the path is a C string, and the arrays are null-terminated arrays of C strings.
        // `self` keeps all of them alive.
        unsafe {
            libc::execve(self.path.as_ptr(), self.arguments.as_ptr(), self.environment.as_ptr());
            if io::Error::last_os_error().raw_os_error() == Some(libc::ENOEXEC) {
                libc::execve(SHELL.as_ptr(), self.by_shell.as_ptr(), self.environment.as_ptr());
            }
        }
        io::Error::last_os_error()
    }
}

/// Strings, and the array of them that execve takes.
struct ExecStrings {
    /// The strings to which `array` points.
    _strings: Vec<CString>,
    array: Vec<*const c_char>,
}

// SAFETY: the pointers lead to strings that the struct owns, and neither is ever changed.
unsafe impl Send for ExecStrings {}
// SAFETY: the pointers lead to strings that the struct owns, and neither is ever changed.
unsafe impl Sync for ExecStrings {}

impl ExecStrings {
    fn new(strings: Vec<CString>) -> ExecStrings {
        let array = strings.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect();
        ExecStrings { _strings: strings, array }
    }

    fn as_ptr(&self) -> *const *const c_char {
        self.array.as_ptr()
    }
}

/// Executes a program in place of this one, as it is. Returns only if that fails.
pub fn execute(path: &Path, arguments: &[OsString]) -> CommandFailure {
    let mut command = Command::new(path);
    command.arg0(&arguments[0]).args(&arguments[1..]);
    // SAFETY: the closure makes only async-signal-safe system calls. No other thread runs, and if the
    // program can't be executed, this process ends.
    unsafe {
        command.pre_exec(|| {
            inherited::restore();
            Ok(())
        })
    };
    let e = command.exec();
    CommandFailure::not_executable(format!("{}: {}", path.display(), plain(&e)))
}

/// Ends memfold by the signal that has ended its program, so that whoever waits for memfold sees
/// that. Returns if the signal can't end it.
pub fn end_like_the_program(signal: i32) {
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the calls read `none`, which is local, and zeros are a valid empty `sigset_t`, to
    // which the signal is added. The default action touches no memory of this process. The limit
    // keeps a second core file from being written.
    unsafe {
        libc::setrlimit(libc::RLIMIT_CORE, &raw const none);
        libc::signal(signal, libc::SIG_DFL);
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&raw mut set, signal);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut());
        libc::raise(signal);
    }
}

/// Stops memfold when job control stops the program, because the shell waits for memfold and must
/// see it. A plain SIGSTOP is not mirrored, because its sender will also send SIGCONT only to the
/// program.
fn stop_like_the_program(signal: i32) {
    if matches!(signal, libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU) {
        // SAFETY: raise stops this process and touches no memory. SIGCONT continues it; it is
        // blocked, so it is then taken and passed on.
        unsafe { libc::raise(libc::SIGSTOP) };
    }
}
