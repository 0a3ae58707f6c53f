//! The sockets for clients: made here, or given by systemd.
use super::flags::BlkSettings;
use crate::failure::CommandFailure;
use crate::program::plain;
use crate::sockets;
use memfold_block::nbd::SocketListener;
use std::env;
use std::fs;
use std::io::{self, ErrorKind};
use std::net::{TcpListener, ToSocketAddrs};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// The first descriptor of systemd's sockets.
const GIVEN_FIRST: RawFd = 3;

/// A listener, and its URI for clients.
pub struct NamedListener {
    pub listener: SocketListener,
    pub uri: String,
}

/// A Unix socket that was made here; the drop removes its name.
pub struct SocketName {
    path: PathBuf,
    /// Device and inode. They are compared before the name is removed, because it may belong to
    /// another socket by then.
    identity: (u64, u64),
}

impl SocketName {
    /// Records the name of a socket that this process has just made.
    ///
    /// # Errors
    /// The file is gone.
    pub fn of(path: &Path) -> io::Result<SocketName> {
        let meta = fs::symlink_metadata(path)?;
        Ok(SocketName { path: path.to_path_buf(), identity: (meta.dev(), meta.ino()) })
    }
}

impl Drop for SocketName {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|m| (m.dev(), m.ino()) == self.identity) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Returns all listeners of the settings and the environment, and the names to remove at the end.
///
/// # Errors
/// 125: there is no listener, or one can't be made.
pub fn open(
    settings: &BlkSettings,
) -> Result<(Vec<NamedListener>, Vec<SocketName>), CommandFailure> {
    let (mut all, mut paths) = (given()?, Vec::new());
    if let Some(path) = &settings.unix {
        let (listener, own) = unix(path)
            .map_err(|why| CommandFailure::own(format!("--unix: {}: {why}", path.display())))?;
        all.push(NamedListener { listener: SocketListener::Unix(listener), uri: unix_uri(path) });
        paths.push(own);
    }
    if let Some(address) = &settings.tcp {
        let listener =
            tcp(address).map_err(|why| CommandFailure::own(format!("--tcp: {address}: {why}")))?;
        all.push(named_tcp(listener, settings.tls.is_some()));
    }
    Ok((all, paths))
}

fn named_tcp(listener: TcpListener, tls: bool) -> NamedListener {
    let at = listener.local_addr().map_or_else(|_| "?".to_string(), |at| at.to_string());
    NamedListener {
        listener: SocketListener::Tcp(listener),
        uri: format!("{}://{at}/", if tls { "nbds" } else { "nbd" }),
    }
}

fn unix_uri(path: &Path) -> String {
    format!("nbd+unix:///?socket={}", path.display())
}

/// Makes a Unix socket. It replaces a socket whose server has ended without removing it; anything
/// else at its place stays.
pub fn unix(path: &Path) -> Result<(UnixListener, SocketName), String> {
    let bound = match UnixListener::bind(path) {
        Err(e) if e.kind() == ErrorKind::AddrInUse => {
            let meta = fs::symlink_metadata(path).map_err(|e| plain(&e))?;
            if !meta.file_type().is_socket() {
                return Err("the file exists and is not a socket. Give another path.".to_string());
            }
            if !matches!(sockets::connect(path), Ok(None)) {
                return Err(
                    "another server uses this socket. Give another path, or stop that server first.".to_string()
                );
            }
            UnixListener::bind(path)
        }
        other => other,
    };
    let listener = bound.map_err(|e| plain(&e))?;
    Ok((listener, SocketName::of(path).map_err(|e| plain(&e))?))
}

fn tcp(address: &str) -> Result<TcpListener, String> {
    let all: Vec<_> = address
        .to_socket_addrs()
        .map_err(|e| format!("{}. Write ADDRESS:PORT.", plain(&e)))?
        .collect();
    TcpListener::bind(&all[..]).map_err(|e| match e.kind() {
        ErrorKind::AddrInUse => "the port is in use. Give another one.".to_string(),
        _ => plain(&e),
    })
}

/// Returns the sockets of systemd's socket activation (LISTEN_PID, LISTEN_FDS).
fn given() -> Result<Vec<NamedListener>, CommandFailure> {
    let number = |name: &str| env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    if number("LISTEN_PID") != Some(std::process::id()) {
        return Ok(Vec::new());
    }
    let count = number("LISTEN_FDS").unwrap_or(0).min(64) as RawFd;
    (GIVEN_FIRST..GIVEN_FIRST + count)
        .map(|fd| {
            listener_of(fd).map_err(|e| {
                CommandFailure::own(format!(
                    "LISTEN_FDS: descriptor {fd} is not a listening stream socket: {}",
                    plain(&e)
                ))
            })
        })
        .collect()
}

fn listener_of(fd: RawFd) -> io::Result<NamedListener> {
    let option = |name| {
        let (mut value, mut len) = (0, size_of::<libc::c_int>() as libc::socklen_t);
        // SAFETY: the kernel writes at most `len` bytes to `value`, which is that long, and the new
        // length to `len`.
        let code = unsafe {
            libc::getsockopt(fd, libc::SOL_SOCKET, name, (&raw mut value).cast(), &raw mut len)
        };
        if code == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
    };
    let (domain, kind, listens) =
        (option(libc::SO_DOMAIN)?, option(libc::SO_TYPE)?, option(libc::SO_ACCEPTCONN)?);
    if kind != libc::SOCK_STREAM || listens == 0 {
        return Err(ErrorKind::InvalidInput.into());
    }
    // SAFETY: systemd gave this process the descriptor. It is open, as the calls above show, and
    // nothing else owns or uses it. The fcntl calls have no pointers.
    let owned_fd = unsafe {
        libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC);
        let flags = libc::fcntl(fd, libc::F_GETFL);
        libc::fcntl(fd, libc::F_SETFL, flags & !libc::O_NONBLOCK);
        OwnedFd::from_raw_fd(fd)
    };
    match domain {
        libc::AF_UNIX => {
            let listener = UnixListener::from(owned_fd);
            let at = listener.local_addr().ok();
            let uri = at
                .as_ref()
                .and_then(|at| at.as_pathname())
                .map_or("nbd+unix:".to_string(), unix_uri);
            Ok(NamedListener { listener: SocketListener::Unix(listener), uri })
        }
        libc::AF_INET | libc::AF_INET6 => Ok(named_tcp(TcpListener::from(owned_fd), false)),
        _ => Err(ErrorKind::InvalidInput.into()),
    }
}
