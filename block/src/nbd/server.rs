//! Listeners, and a thread for each of a bounded number of connections.
use super::negotiate::{self, AgreedOptions, NegotiationEnd, TlsPolicy};
use super::session::NbdSession;
use super::socket::{NbdSocket, SocketListener};
use super::tls::TlsIdentity;
use crate::export::Export;
use rustls::{ServerConnection, StreamOwned};
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A client that has not chosen an export by then, TLS included, is disconnected, because it keeps
/// others waiting.
const PATIENCE: Duration = Duration::from_secs(30);
/// Pause after a connection could not be accepted, for example for lack of descriptors.
const RETRY: Duration = Duration::from_millis(50);
/// Time that replies in progress have at the end of the server.
const FAREWELL: Duration = Duration::from_secs(5);

/// What NBD clients get.
pub struct NbdServer {
    shared: Arc<ServerState>,
    listeners: Vec<Arc<SocketListener>>,
    threads: Vec<JoinHandle<()>>,
}

struct ServerState {
    exports: Vec<Arc<Export>>,
    tls: Option<TlsIdentity>,
    connections_max: usize,
    /// [`PATIENCE`], which tests change.
    patience: Duration,
    clients: Mutex<ConnectionTable>,
    changed: Condvar,
    ends: AtomicBool,
    served: AtomicU64,
}

/// A place for each connection, with a second descriptor that ends it.
struct ConnectionTable {
    places: Vec<Option<NbdSocket>>,
    count: usize,
}

impl NbdServer {
    /// Makes a server of these exports for so many clients at a time.
    pub fn new(
        exports: &[Arc<Export>],
        tls: Option<TlsIdentity>,
        connections_max: usize,
    ) -> NbdServer {
        NbdServer::with_patience(exports, tls, connections_max, PATIENCE)
    }

    /// Makes a server whose clients must choose an export within `patience`.
    pub(super) fn with_patience(
        exports: &[Arc<Export>],
        tls: Option<TlsIdentity>,
        connections_max: usize,
        patience: Duration,
    ) -> NbdServer {
        let clients =
            ConnectionTable { places: (0..connections_max).map(|_| None).collect(), count: 0 };
        NbdServer {
            shared: Arc::new(ServerState {
                exports: exports.to_vec(),
                tls,
                connections_max,
                patience,
                clients: Mutex::new(clients),
                changed: Condvar::new(),
                ends: AtomicBool::new(false),
                served: AtomicU64::new(0),
            }),
            listeners: Vec::new(),
            threads: Vec::new(),
        }
    }

    /// Serves a listener from its own thread.
    ///
    /// # Errors
    /// Other machines can reach it, and there is no TLS; or no thread could be made.
    pub fn listen(&mut self, listener: SocketListener) -> io::Result<()> {
        let security = match (&self.shared.tls, listener.is_reachable_from_afar()) {
            (None, true) => {
                return Err(io::Error::new(
                    ErrorKind::PermissionDenied,
                    "other machines can reach this address, so TLS is required. Give --tls-cert and --tls-key.",
                ));
            }
            (None, false) => TlsPolicy::None,
            (Some(_), false) => TlsPolicy::Offered,
            (Some(_), true) => TlsPolicy::Demanded,
        };
        let listener = Arc::new(listener);
        let (server, own) = (self.shared.clone(), listener.clone());
        let run = move || server.accept_all(&own, security);
        self.threads.push(thread::Builder::new().name("memfold-accept".to_string()).spawn(run)?);
        self.listeners.push(listener);
        Ok(())
    }

    /// Returns the connections now, and all so far.
    pub fn connections(&self) -> (u64, u64) {
        (self.shared.lock().count as u64, self.shared.served.load(Relaxed))
    }

    /// Ends the server: it accepts no more requests, and answers those it has accepted, if the
    /// client reads.
    pub fn end(self) {
        self.shared.ends.store(true, Relaxed);
        self.listeners.iter().for_each(|listener| listener.close());
        self.shared.changed.notify_all();
        for thread in self.threads {
            let _ = thread.join();
        }
        self.shared.send_away(Shutdown::Read, Some(FAREWELL));
        self.shared.send_away(Shutdown::Both, None);
    }
}

impl ServerState {
    fn lock(&self) -> MutexGuard<'_, ConnectionTable> {
        self.clients.lock().expect("nobody panics with the lock")
    }

    fn accept_all(self: &Arc<ServerState>, listener: &SocketListener, security: TlsPolicy) {
        while self.wait_for_place() {
            match listener.accept() {
                Ok(socket) => self.start(socket, security),
                Err(_) if self.ends.load(Relaxed) => return,
                // The client left before the greeting, or too many files are open. The next try may
                // succeed.
                Err(_) => self.wait_a_little(),
            }
        }
    }

    /// Returns `false` at the end of the server.
    fn wait_for_place(&self) -> bool {
        let full = |clients: &mut ConnectionTable| {
            clients.count == self.connections_max && !self.ends.load(Relaxed)
        };
        let clients =
            self.changed.wait_while(self.lock(), full).expect("nobody panics with the lock");
        drop(clients);
        !self.ends.load(Relaxed)
    }

    /// Waits until a client leaves, or for a moment.
    fn wait_a_little(&self) {
        drop(self.changed.wait_timeout(self.lock(), RETRY).expect("nobody panics with the lock"));
    }

    /// Serves a connection from its own thread. If no thread can be started, the client loses its
    /// connection.
    fn start(self: &Arc<ServerState>, socket: NbdSocket, security: TlsPolicy) {
        let Ok(again) = socket.again() else { return };
        let place = {
            let mut clients = self.lock();
            // Several listeners may have found the same free place.
            let Some(place) = clients.places.iter().position(Option::is_none) else { return };
            clients.places[place] = Some(again);
            clients.count += 1;
            place
        };
        self.served.fetch_add(1, Relaxed);
        let client = ConnectionSeat { shared: self.clone(), place };
        let run = move || {
            // An error between one client and the server affects no other client.
            let _ = client.shared.serve(socket, security);
            drop(client);
        };
        let _ = thread::Builder::new().name("memfold-nbd".to_string()).spawn(run);
    }

    fn serve(&self, mut socket: NbdSocket, security: TlsPolicy) -> io::Result<()> {
        socket.prepare();
        socket.set_deadline(Some(Instant::now() + self.patience))?;
        let no_zeroes = negotiate::greet(&mut socket)?;
        match negotiate::negotiate(&mut socket, &self.exports, security, no_zeroes)? {
            NegotiationEnd::End => Ok(()),
            NegotiationEnd::Transmit(agreed) => {
                socket.set_deadline(None)?;
                transmit(&mut socket, &agreed)
            }
            NegotiationEnd::StartTls => self.serve_tls(socket, no_zeroes),
        }
    }

    fn serve_tls(&self, socket: NbdSocket, no_zeroes: bool) -> io::Result<()> {
        let Some(tls) = &self.tls else { return Err(ErrorKind::Unsupported.into()) };
        let connection = ServerConnection::new(tls.0.clone()).map_err(io::Error::other)?;
        let mut link = StreamOwned::new(connection, socket);
        let outcome = negotiate::negotiate(&mut link, &self.exports, TlsPolicy::Spoken, no_zeroes)?;
        if let NegotiationEnd::Transmit(options) = outcome {
            link.sock.set_deadline(None)?;
            transmit(&mut link, &options)?;
        }
        link.conn.send_close_notify();
        link.flush()
    }

    /// Ends all connections, and waits for their threads.
    fn send_away(&self, how: Shutdown, patience: Option<Duration>) {
        let begin = Instant::now();
        let mut clients = self.lock();
        clients.places.iter().flatten().for_each(|socket| socket.end(how));
        while clients.count > 0 {
            clients = match patience {
                None => self.changed.wait(clients).expect("nobody panics with the lock"),
                Some(patience) => {
                    let Some(time_left) = patience.checked_sub(begin.elapsed()) else { return };
                    self.changed
                        .wait_timeout(clients, time_left)
                        .expect("nobody panics with the lock")
                        .0
                }
            };
        }
    }
}

fn transmit<L: Read + Write>(link: &mut L, agreed: &AgreedOptions) -> io::Result<()> {
    NbdSession::new(link, agreed).run()
}

/// The place of a connection, which is free again after the drop.
struct ConnectionSeat {
    shared: Arc<ServerState>,
    place: usize,
}

impl Drop for ConnectionSeat {
    fn drop(&mut self) {
        let mut clients = self.shared.lock();
        clients.places[self.place] = None;
        clients.count -= 1;
        drop(clients);
        self.shared.changed.notify_all();
    }
}
