//! The sockets of a user's runs. They are in a directory that only this user can enter, one socket
//! for each run.
use crate::program::plain;
use rustix::fd::IntoRawFd;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use serde_json::Value;
use std::env;
use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The suffix of a run's socket. The process ID of `memfold run` is in front of it.
pub const RUN: &str = ".sock";
/// The suffix of the socket of a server of block devices.
pub const BLK: &str = ".blk";
/// Why a directory is not used.
pub const NOT_OWN: &str =
    "this directory must belong to this user, with mode 700. Move it away, or set XDG_RUNTIME_DIR.";
/// Longest wait for the request of a client.
const PATIENCE: Duration = Duration::from_secs(2);
/// Bytes of a request, at most. Longer requests are refused.
const REQUEST_LEN_MAX: u64 = 4096;

/// Returns the user that this process acts as.
pub fn own_user() -> u32 {
    // SAFETY: geteuid has no conditions.
    unsafe { libc::geteuid() }
}

/// Returns the directories where a run may have its socket, in order of preference:
/// `$XDG_RUNTIME_DIR/memfold`, `/tmp/memfold-UID`.
pub fn directories() -> Vec<PathBuf> {
    let runtime =
        env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute());
    let directory = PathBuf::from(format!("/tmp/memfold-{}", own_user()));
    runtime.map(|path| path.join("memfold")).into_iter().chain([directory]).collect()
}

/// Returns whether a directory belongs to this user and is closed to all other users, so that only
/// this user can put files there.
pub fn is_own(directory: &Path) -> bool {
    fs::symlink_metadata(directory)
        .is_ok_and(|m| m.is_dir() && m.uid() == own_user() && m.mode() & 0o077 == 0)
}

/// Returns the user at the other end of a connection.
pub fn peer_user(stream: &UnixStream) -> io::Result<u32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let to = (&raw mut peer).cast();
    // SAFETY: the kernel writes at most `len` bytes to `peer`, which is that long, and the new
    // length to `len`.
    let code = unsafe {
        libc::getsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, to, &raw mut len)
    };
    if code == 0 { Ok(peer.uid) } else { Err(io::Error::last_os_error()) }
}

/// Makes a socket of this process, in the first usable directory. It gets its name only once it
/// accepts connections. A socket that does not accept them would look like that of a killed
/// process.
pub fn listen(suffix: &str) -> io::Result<(UnixListener, PathBuf)> {
    let mut failure = io::Error::from(ErrorKind::NotFound);
    for directory in directories() {
        match listen_in(&directory, suffix) {
            Ok(done) => return Ok(done),
            Err(e) => failure = named(&directory, &e),
        }
    }
    Err(failure)
}

fn make(directory: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(e) if e.kind() != ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    if !is_own(directory) {
        return Err(io::Error::new(ErrorKind::PermissionDenied, NOT_OWN));
    }
    Ok(())
}

/// Returns an error with its path.
fn named(directory: &Path, e: &io::Error) -> io::Error {
    io::Error::new(e.kind(), format!("{}: {}", directory.display(), plain(e)))
}

fn listen_in(directory: &Path, suffix: &str) -> io::Result<(UnixListener, PathBuf)> {
    make(directory)?;
    let own = std::process::id();
    let (hidden_path, path) =
        (directory.join(format!(".{own}")), directory.join(format!("{own}{suffix}")));
    let _ = fs::remove_file(&hidden_path);
    let listener = UnixListener::bind(&hidden_path)?;
    fs::rename(&hidden_path, &path)?;
    Ok((listener, path))
}

/// Returns a free path for another socket of this process, in the first usable directory.
pub fn path(suffix: &str) -> io::Result<PathBuf> {
    let path = path_of(&format!("{}{suffix}", std::process::id()))?;
    let _ = fs::remove_file(&path);
    Ok(path)
}

/// Returns the path of a file in the first usable directory.
pub fn path_of(name: &str) -> io::Result<PathBuf> {
    let mut failure = io::Error::from(ErrorKind::NotFound);
    for directory in directories() {
        match make(&directory) {
            Ok(()) => return Ok(directory.join(name)),
            Err(e) => failure = named(&directory, &e),
        }
    }
    Err(failure)
}

/// Returns the sockets of this user with this suffix, each as the ID of the process that serves it
/// and its path.
pub fn all(suffix: &str) -> Vec<(u32, PathBuf)> {
    let mut sockets = Vec::new();
    for directory in directories().into_iter().filter(|directory| is_own(directory)) {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let number = name
                .to_str()
                .and_then(|name| name.strip_suffix(suffix))
                .and_then(|pid| pid.parse().ok());
            sockets.extend(number.map(|pid| (pid, entry.path())));
        }
    }
    sockets.sort();
    sockets.dedup_by_key(|run| run.0);
    sockets
}

/// Connects to a run. Returns `None` if it has ended without removing its socket, and removes it.
///
/// # Errors
/// WouldBlock: so many connections wait already that the run must be stopped. Other errors of
/// `connect`.
pub fn connect(path: &Path) -> io::Result<Option<UnixStream>> {
    match connect_at_once(path) {
        Ok(stream) => Ok(Some(stream)),
        Err(e) if matches!(e.kind(), ErrorKind::ConnectionRefused) => {
            let _ = fs::remove_file(path);
            Ok(None)
        }
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

fn connect_at_once(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connect = || {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        let address = SocketAddrUnix::new(path.as_os_str().as_bytes())?;
        rustix::net::connect(&socket, &address).map(|()| socket)
    };
    let socket = connect().map_err(|e| match e {
        Errno::AGAIN => {
            let why = "too many requests wait for it. Is the process stopped?";
            io::Error::new(ErrorKind::WouldBlock, why)
        }
        e => io::Error::from_raw_os_error(e.raw_os_error()),
    })?;
    // SAFETY: the descriptor is that of a socket, and nothing else owns it.
    let stream = unsafe { UnixStream::from_raw_fd(socket.into_raw_fd()) };
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Serves one request of a connection: a process of this user sends a text and gets one.
pub fn answer(mut stream: UnixStream, answer: impl FnOnce(&str) -> String) -> io::Result<()> {
    // The directory keeps other users out. This check holds even if the directory was opened to
    // others.
    if peer_user(&stream)? != own_user() {
        return Err(ErrorKind::PermissionDenied.into());
    }
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut request = String::new();
    Read::by_ref(&mut stream).take(REQUEST_LEN_MAX).read_to_string(&mut request)?;
    stream.write_all(answer(&request).as_bytes())
}

/// Sends a request to the server of a socket. Waits `patience` for each part of the answer, or
/// without a limit if it is `None`. Returns `None` if the server has ended.
pub fn ask(path: &Path, request: &Value, patience: Option<Duration>) -> io::Result<Option<Value>> {
    let Some(mut stream) = connect(path)? else { return Ok(None) };
    if peer_user(&stream)? != own_user() {
        return Err(io::Error::new(
            ErrorKind::PermissionDenied,
            "its socket belongs to another user",
        ));
    }
    stream.set_read_timeout(patience)?;
    stream.set_write_timeout(patience)?;
    let mut answer = String::new();
    let mut talk = || {
        stream.write_all(request.to_string().as_bytes())?;
        stream.shutdown(Shutdown::Write)?;
        stream.read_to_string(&mut answer)
    };
    match talk() {
        Ok(0) => Ok(None),
        Ok(_) => serde_json::from_str(&answer).map(Some).map_err(io::Error::other),
        Err(e) if e.kind() == ErrorKind::WouldBlock => {
            let seconds = patience.unwrap_or_default().as_secs();
            Err(io::Error::other(format!("no answer for {seconds} s. Is the process stopped?")))
        }
        // The server ended while it was asked.
        Err(e) if matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => {
            Ok(None)
        }
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn directory_open_to_others_or_linked_is_not_used() {
        let base = env::temp_dir().join(format!("memfold-sockets-{}", std::process::id()));
        let (own, open, link) = (base.join("own"), base.join("open"), base.join("link"));
        fs::create_dir_all(&open).unwrap();
        fs::set_permissions(&open, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(listen_in(&open, RUN).unwrap_err().kind(), ErrorKind::PermissionDenied);
        let (_listener, path) = listen_in(&own, RUN).unwrap();
        assert!(path.ends_with(format!("{}.sock", std::process::id())));
        std::os::unix::fs::symlink(&own, &link).unwrap();
        assert_eq!(listen_in(&link, RUN).unwrap_err().kind(), ErrorKind::PermissionDenied);
        let stream = connect(&path).unwrap().unwrap();
        assert_eq!(peer_user(&stream).unwrap(), own_user());
        fs::remove_dir_all(&base).unwrap();
    }

    #[test]
    fn run_that_accepts_no_connection_is_not_waited_for() {
        let base = env::temp_dir().join(format!("memfold-full-{}", std::process::id()));
        let (listener, path) = listen_in(&base, RUN).unwrap();
        // SAFETY: the call takes no memory. The descriptor is that of a listening socket.
        assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 1) }, 0);
        let mut streams = Vec::new();
        let full = loop {
            match connect(&path) {
                Ok(stream) => streams.push(stream.unwrap()),
                Err(e) => break e,
            }
        };
        assert_eq!(full.kind(), ErrorKind::WouldBlock);
        let answer = ask(&path, &Value::Null, None);
        assert!(answer.is_err_and(|e| e.kind() == ErrorKind::WouldBlock) && path.exists());
        fs::remove_dir_all(&base).unwrap();
    }

    #[test]
    fn a_socket_whose_process_has_ended_is_taken_away() {
        let base = env::temp_dir().join(format!("memfold-dead-{}", std::process::id()));
        let (listener, path) = listen_in(&base, RUN).unwrap();
        drop(listener);
        assert!(connect(&path).unwrap().is_none() && !path.exists());
        fs::remove_dir_all(&base).unwrap();
    }
}
