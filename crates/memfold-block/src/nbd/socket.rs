//! Sockets of both kinds.
use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

/// What the kernel keeps of a reply while the client is busy, bytes; it may give less.
const SEND_BYTES: libc::c_int = 1 << 20;

/// A socket that clients connect to.
pub enum Listener {
    /// A Unix socket.
    Unix(UnixListener),
    /// A TCP port.
    Tcp(TcpListener),
}

/// A connection.
pub enum Socket {
    /// Over a Unix socket.
    Unix(UnixStream),
    /// Over TCP.
    Tcp(TcpStream),
}

impl Listener {
    /// Waits for a client.
    ///
    /// # Errors
    /// The system's, also that the socket was closed by [`Listener::close`].
    pub fn accept(&self) -> io::Result<Socket> {
        match self {
            Listener::Unix(listener) => listener.accept().map(|(stream, _)| Socket::Unix(stream)),
            Listener::Tcp(listener) => listener.accept().map(|(stream, _)| Socket::Tcp(stream)),
        }
    }

    /// Wakes [`Listener::accept`], which fails from now on.
    pub fn close(&self) {
        // SAFETY: a descriptor of ours, and no memory.
        unsafe { libc::shutdown(self.as_fd().as_raw_fd(), libc::SHUT_RDWR) };
    }

    /// Whether other machines can connect. Not so if in doubt about a family of addresses that is
    /// neither IPv4 nor IPv6.
    pub fn is_reachable_from_afar(&self) -> bool {
        match self {
            Listener::Unix(_) => false,
            Listener::Tcp(listener) => {
                listener.local_addr().map_or(true, |at| !at.ip().to_canonical().is_loopback())
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Unix(listener) => listener.as_fd(),
            Listener::Tcp(listener) => listener.as_fd(),
        }
    }
}

impl Socket {
    /// Sets it up for many short messages.
    pub fn prepare(&self) {
        if let Socket::Tcp(stream) = self {
            // Not fatal: only slower; and a peer that has gone is noticed later.
            let _ = stream.set_nodelay(true);
            set(stream.as_fd(), libc::SO_KEEPALIVE, 1);
        }
        if let Socket::Unix(stream) = self {
            // Above the system's bound only for who may; TCP finds its own size.
            if !set(stream.as_fd(), libc::SO_SNDBUFFORCE, SEND_BYTES) {
                set(stream.as_fd(), libc::SO_SNDBUF, SEND_BYTES);
            }
        }
    }

    /// How long reads and writes may take; `None` for any time.
    ///
    /// # Errors
    /// The system's.
    pub fn set_patience(&self, patience: Option<Duration>) -> io::Result<()> {
        match self {
            Socket::Unix(s) => {
                s.set_read_timeout(patience).and_then(|()| s.set_write_timeout(patience))
            }
            Socket::Tcp(s) => {
                s.set_read_timeout(patience).and_then(|()| s.set_write_timeout(patience))
            }
        }
    }

    /// Another descriptor of the same connection.
    ///
    /// # Errors
    /// The system's.
    pub fn again(&self) -> io::Result<Socket> {
        match self {
            Socket::Unix(stream) => stream.try_clone().map(Socket::Unix),
            Socket::Tcp(stream) => stream.try_clone().map(Socket::Tcp),
        }
    }

    /// Ends one way of the connection, or both.
    pub fn end(&self, how: Shutdown) {
        let _ = match self {
            Socket::Unix(stream) => stream.shutdown(how),
            Socket::Tcp(stream) => stream.shutdown(how),
        };
    }
}

fn set(socket: BorrowedFd, option: libc::c_int, value: libc::c_int) -> bool {
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the pointer leads to a local of the length that is given.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw const value).cast(),
            len,
        )
    };
    done == 0
}

impl Read for Socket {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Unix(stream) => stream.read(to),
            Socket::Tcp(stream) => stream.read(to),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(from)])
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Socket::Unix(stream) => stream.write_vectored(from),
            Socket::Tcp(stream) => stream.write_vectored(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
