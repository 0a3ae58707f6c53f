//! Sockets of both kinds.
use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

/// Bytes of a reply that the kernel keeps while the client is busy; it may grant less.
const SEND_BYTES: libc::c_int = 1 << 20;

/// A socket that clients connect to.
pub enum SocketListener {
    /// A Unix socket.
    Unix(UnixListener),
    /// A TCP port.
    Tcp(TcpListener),
}

/// A connection.
pub struct NbdSocket {
    stream: SocketStream,
    deadline: Option<Instant>,
}

enum SocketStream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl SocketListener {
    /// Waits for a client.
    ///
    /// # Errors
    /// The system's, also that the socket was closed by [`SocketListener::close`].
    pub fn accept(&self) -> io::Result<NbdSocket> {
        let stream = match self {
            SocketListener::Unix(listener) => {
                listener.accept().map(|(it, _)| SocketStream::Unix(it))?
            }
            SocketListener::Tcp(listener) => {
                listener.accept().map(|(it, _)| SocketStream::Tcp(it))?
            }
        };
        Ok(NbdSocket { stream, deadline: None })
    }

    /// Wakes [`SocketListener::accept`], which fails from then on.
    pub fn close(&self) {
        // SAFETY: the descriptor is open and belongs to this value; no memory is passed.
        unsafe { libc::shutdown(self.as_fd().as_raw_fd(), libc::SHUT_RDWR) };
    }

    /// Returns whether other machines can connect; `true` where the address is unknown.
    pub fn is_reachable_from_afar(&self) -> bool {
        match self {
            SocketListener::Unix(_) => false,
            SocketListener::Tcp(listener) => {
                listener.local_addr().map_or(true, |at| !at.ip().to_canonical().is_loopback())
            }
        }
    }
}

impl AsFd for SocketListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            SocketListener::Unix(listener) => listener.as_fd(),
            SocketListener::Tcp(listener) => listener.as_fd(),
        }
    }
}

impl NbdSocket {
    /// Configures it for many short messages.
    pub fn prepare(&self) {
        if let SocketStream::Tcp(stream) = &self.stream {
            // A failure is not fatal: the connection is slower, or notices a lost peer later.
            let _ = stream.set_nodelay(true);
            set(stream.as_fd(), libc::SO_KEEPALIVE, 1);
        }
        if let SocketStream::Unix(stream) = &self.stream {
            // Above the system's bound only for who may; TCP finds its own size.
            if !set(stream.as_fd(), libc::SO_SNDBUFFORCE, SEND_BYTES) {
                set(stream.as_fd(), libc::SO_SNDBUF, SEND_BYTES);
            }
        }
    }

    /// Sets when reads and writes end that have not by then; `None` for never. It bounds all of
    /// them together, however little each one brings.
    ///
    /// # Errors
    /// The system's.
    pub fn set_deadline(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        self.deadline = deadline;
        if deadline.is_none() { self.set_timeouts(None) } else { Ok(()) }
    }

    /// Returns another descriptor of the same connection, to end it.
    ///
    /// # Errors
    /// The system's.
    pub fn again(&self) -> io::Result<NbdSocket> {
        let stream = match &self.stream {
            SocketStream::Unix(stream) => stream.try_clone().map(SocketStream::Unix)?,
            SocketStream::Tcp(stream) => stream.try_clone().map(SocketStream::Tcp)?,
        };
        Ok(NbdSocket { stream, deadline: None })
    }

    /// Ends one way of the connection, or both.
    pub fn end(&self, how: Shutdown) {
        let _ = match &self.stream {
            SocketStream::Unix(stream) => stream.shutdown(how),
            SocketStream::Tcp(stream) => stream.shutdown(how),
        };
    }

    /// Gives the next read or write the time that is left.
    fn keep_deadline(&self) -> io::Result<()> {
        let Some(deadline) = self.deadline else { return Ok(()) };
        let time_left = deadline.saturating_duration_since(Instant::now());
        // A timeout of 0 is none.
        if time_left.as_micros() == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.set_timeouts(Some(time_left))
    }

    fn set_timeouts(&self, timeout: Option<Duration>) -> io::Result<()> {
        match &self.stream {
            SocketStream::Unix(s) => {
                s.set_read_timeout(timeout).and_then(|()| s.set_write_timeout(timeout))
            }
            SocketStream::Tcp(s) => {
                s.set_read_timeout(timeout).and_then(|()| s.set_write_timeout(timeout))
            }
        }
    }
}

fn set(socket: BorrowedFd, option: libc::c_int, value: libc::c_int) -> bool {
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the pointer leads to a local of the length that is given.
    let code = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw const value).cast(),
            len,
        )
    };
    code == 0
}

impl Read for NbdSocket {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.keep_deadline()?;
        match &mut self.stream {
            SocketStream::Unix(stream) => stream.read(to),
            SocketStream::Tcp(stream) => stream.read(to),
        }
    }
}

impl Write for NbdSocket {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(from)])
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        self.keep_deadline()?;
        match &mut self.stream {
            SocketStream::Unix(stream) => stream.write_vectored(from),
            SocketStream::Tcp(stream) => stream.write_vectored(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
