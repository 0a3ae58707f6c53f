//! A disk for virtual machines: vhost-user-blk, for QEMU and Cloud Hypervisor.
//!
//! The VMM connects to a Unix socket and shares the guest's memory. The guest's driver puts
//! requests into queues in that memory, and the threads here serve them. The VMM takes no part in
//! that.
//!
//! ```text
//! Server::serve   a connection -> Session, and threads of the crate vhost-user-backend
//! Session         a queue tells of requests -> one after the other, in their order: Worker::serve
//! Worker          a chain of descriptors -> Request -> Device -> status
//! ```
//! `spans.rs`: parts of a guest's memory as one run of bytes; `request.rs`: a request from a chain
//! of descriptors; `config.rs`: features and configuration space; `ring.rs`: a queue whose thread
//! no VMM can block.
//!
//! Nothing that a guest writes is trusted. The VMM is trusted to keep the memory that it shares:
//! taking pages away ends the process.

mod spans;
mod request;
mod config;
mod ring;
mod worker;
mod session;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
#[cfg(test)]
mod tests;

use crate::export::Export;
use ring::SharedGuestMap;
use session::{VhostDisk, VhostSession};
use spans::GuestMap;
use std::fmt;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;
use vhost::vhost_user::{Error as Protocol, Listener};
use vhost_user_backend::{Error, ShutdownHandle, VhostUserDaemon};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Time that a thread serves one queue before it looks at its others.
const TURN: Duration = Duration::from_millis(10);
/// Pause after a connection failed.
const PAUSE: Duration = Duration::from_millis(500);

/// Serves one device on a Unix socket, to one VMM after the other. Other VMMs wait while one is
/// connected.
pub struct VhostServer {
    listener: Mutex<Listener>,
    disk: Arc<VhostDisk>,
    /// The listener and `stop`.
    waited: Epoll,
    stop: EventFd,
    stopping: AtomicBool,
    connection: Mutex<Option<ShutdownHandle>>,
}

/// Why a connection broke. Its text is one line.
#[derive(Debug)]
pub enum VhostError {
    /// The VMM broke the protocol.
    Protocol(String),
    /// The VMM could not be served, for lack of threads or files.
    Refused(String),
}

impl fmt::Display for VhostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VhostError::Protocol(why) => {
                write!(f, "A VMM was disconnected, because it broke the vhost-user protocol: {why}")
            }
            VhostError::Refused(why) => write!(f, "A VMM can't be served: {why}"),
        }
    }
}

impl VhostServer {
    /// Makes a server and allocates all memory that requests will need: the buffers of each thread.
    /// As many queues as threads are served at the same time.
    ///
    /// # Errors
    /// No more files can be open.
    pub fn new(
        listener: UnixListener,
        export: Arc<Export>,
        threads: usize,
    ) -> io::Result<VhostServer> {
        VhostServer::with_turn(listener, export, threads, TURN)
    }

    /// Makes a server whose threads serve a queue for `turn` before they look at others, and at
    /// least one request.
    ///
    /// # Errors
    /// No more files can be open.
    pub fn with_turn(
        listener: UnixListener,
        export: Arc<Export>,
        threads: usize,
        turn: Duration,
    ) -> io::Result<VhostServer> {
        let (epoll, stop) = (Epoll::new()?, EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
        for fd in [listener.as_raw_fd(), stop.as_raw_fd()] {
            epoll.ctl(ControlOperation::Add, fd, EpollEvent::new(EventSet::IN, 0))?;
        }
        let disk = Arc::new(VhostDisk::new(export, threads, turn));
        let (is_stopping, connection) = (AtomicBool::new(false), Mutex::new(None));
        // It is polled only when a connection waits, but a connection that vanished must not block
        // it.
        listener.set_nonblocking(true)?;
        let listener = Mutex::new(Listener::from(listener));
        Ok(VhostServer { listener, disk, waited: epoll, stop, stopping: is_stopping, connection })
    }

    /// Serves until [`VhostServer::stop`]. Calls `report` for every connection that breaks or fails.
    /// Neither ends the server, because the device's data would be lost.
    pub fn serve(&self, mut report: impl FnMut(&VhostError)) {
        loop {
            let outcome = self
                .wait_for_connection()
                .and_then(|more| if more { self.serve_one() } else { Ok(false) });
            match outcome {
                Ok(false) => return,
                Ok(true) => {}
                Err(broken) => report(&broken),
            }
        }
    }

    /// Ends [`VhostServer::serve`], and its connection after the request in progress. The server can't
    /// be started again.
    pub fn stop(&self) {
        self.stopping.store(true, SeqCst);
        // A full pipe wakes the waiting thread too.
        let _ = self.stop.write(1);
        if let Some(connection) = &*self.connection() {
            connection.shutdown();
        }
    }

    /// Returns `false` if it was stopped.
    fn wait_for_connection(&self) -> Result<bool, VhostError> {
        loop {
            match self.waited.wait(-1, &mut [EpollEvent::default()]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(VhostError::Refused(error.to_string())),
                Ok(_) => return Ok(!self.stopping.load(SeqCst)),
            }
        }
    }

    /// Serves the waiting connection to its end. Always returns `true`.
    fn serve_one(&self) -> Result<bool, VhostError> {
        let mut listener = self.listener.lock().expect("nobody panics with the lock");
        let outcome =
            self.daemon().and_then(|mut daemon| daemon.start(&mut listener).map(|()| daemon));
        let mut daemon = outcome.map_err(|error| {
            // The remaining threads would wait forever. If even that can't be changed, a later try
            // may succeed.
            if listener.accept().is_err() {
                thread::sleep(PAUSE);
            }
            VhostError::Refused(error.to_string())
        })?;
        *self.connection() = daemon.shutdown_handle();
        if self.stopping.load(SeqCst) {
            daemon.request_shutdown();
        }
        let outcome = daemon.wait();
        *self.connection() = None;
        match outcome {
            // The crate returns this error when a VMM disconnects, also if it is killed.
            Err(Error::HandleRequest(Protocol::Disconnected | Protocol::PartialMessage))
            | Ok(()) => Ok(true),
            Err(error) => Err(VhostError::Protocol(error.to_string())),
        }
    }

    fn daemon(&self) -> Result<VhostUserDaemon<Arc<VhostSession>>, Error> {
        let memory = SharedGuestMap::new(GuestMap::new());
        let session = Arc::new(
            VhostSession::new(self.disk.clone(), memory.clone()).map_err(Error::StartDaemon)?,
        );
        let daemon = VhostUserDaemon::new("memfold-vhost".to_string(), session.clone(), memory);
        let daemon = daemon.inspect_err(|_| session.end_threads())?;
        session.attend(&daemon.get_epoll_handlers()).map_err(Error::StartDaemon)?;
        Ok(daemon)
    }

    fn connection(&self) -> MutexGuard<'_, Option<ShutdownHandle>> {
        self.connection.lock().expect("nobody panics with the lock")
    }
}
