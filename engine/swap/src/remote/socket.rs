//! [`SocketRemote`]: the remote store through the service, over a Unix socket.
//!
//! One connection carries the requests of all threads, so that a process takes one descriptor in
//! the service. There is no receiving thread. One of the threads that wait for answers reads the
//! next answer's head. The thread of that request reads the rest.
use crate::remote::{
    AnswerHead, DELETE, DONE, ENTRIES_MAX, GET, HELLO, KEEP, LEND, LOST, ObjectFetch, PUT, Remote,
    RemoteError, RequestEntry, RequestHead, StoredObject,
};
use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem::MaybeUninit;
use core::time::Duration;
use memfold_os::Errno;
use memfold_os::memory::descendant_watch::DescendantWatch;
use memfold_os::random;
use memfold_os::raw::receive_with_file;
use memfold_os::sync::{Condvar, ForkCell, Mutex};
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::io::IoSlice;
use rustix::net::{
    self, AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType, sockopt,
};

/// The service answers within the caller's timeout. After this much more time the request fails.
const GRACE: Duration = Duration::from_secs(10);
/// Bytes of an error line that are read, at most.
const WHY_BYTES_MAX: u32 = 1 << 16;
/// Ancestors whose objects are read, at most.
const ANCESTORS_MAX: usize = 15;

/// A client of the service.
pub struct SocketRemote {
    path: String,
    name: String,
    /// Numbers of the ancestors' engines, with the own one last.
    engines: ForkCell<Vec<u64>>,
    patience: Duration,
    line: Mutex<Option<Arc<Connection>>>,
}

impl SocketRemote {
    /// Makes a client of the service at the socket `path`. It connects when it is needed. `name` is
    /// for messages; the service tries a read again for `timeout`.
    ///
    /// # Errors
    /// The kernel gives no random bytes.
    pub fn new(path: &str, name: &str, timeout: Duration) -> Result<SocketRemote, Errno> {
        Ok(SocketRemote {
            path: path.to_string(),
            name: name.to_string(),
            engines: ForkCell::new(alloc::vec![random::word()?]),
            patience: timeout + GRACE,
            line: Mutex::new(None),
        })
    }

    /// Begins in a child of fork, which is another engine to the service, with a connection of its
    /// own. It may read the objects of its last 15 ancestors.
    ///
    /// # Errors
    /// The kernel gives no random bytes.
    ///
    /// # Safety
    /// - The caller is the only thread of the process.
    pub unsafe fn begin_in_child(&self) -> Result<(), Errno> {
        // SAFETY: the caller promises that it is the only thread, so no other thread uses the line
        // or the engines. The parent's connection stays in use in the parent, and its descriptor
        // isn't in this process, so it is only forgotten.
        unsafe {
            self.line.reset();
            core::mem::forget(self.line.peek_mut().take());
            let engines = self.engines.change();
            engines.push(random::word()?);
            engines.drain(..engines.len().saturating_sub(ANCESTORS_MAX + 1));
        }
        Ok(())
    }

    /// Closes the connection. The next request makes another one.
    pub fn close(&self) {
        self.line.lock().take();
    }

    /// Returns the engine of the ancestor `forks` forks ago; 0 is this process's own.
    fn engine(&self, forks: usize) -> u64 {
        self.engines[self.engines.len() - 1 - forks]
    }

    /// Makes an entry of this process's own engine.
    fn own(&self, number: u64, len: usize) -> RequestEntry {
        RequestEntry { engine: self.engine(0), number, offset: 0, len: len as u32 }
    }

    /// Makes a connection. Each wait on it is at most `patience`.
    fn connect(&self, patience: Duration) -> Result<Connection, Errno> {
        let socket =
            net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(patience))?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(patience))?;
        net::connect(&socket, &SocketAddrUnix::new(self.path.as_str())?)?;
        let line = Connection {
            socket,
            sending: Mutex::new(()),
            turn: Mutex::new(ReceiveTurn::default()),
            changed: Condvar::new(),
        };
        line.send(0, &OutgoingRequest { entries: &[self.own(0, 0)], ..message(HELLO) })?;
        Ok(line)
    }

    /// Returns the shared connection. Makes a new one if there is none, or it has broken off.
    fn line(&self) -> Result<Arc<Connection>, Errno> {
        let mut line = self.line.lock();
        match &*line {
            Some(line) if !line.turn.lock().cut => Ok(line.clone()),
            _ => {
                let new = Arc::new(self.connect(self.patience)?);
                *line = Some(new.clone());
                Ok(new)
            }
        }
    }

    /// Sends a request over the shared connection. If that has broken off with an error that
    /// `again` accepts, sends it once more over a new one. The servers may be well then, and the
    /// request may be made twice.
    fn ask(
        &self,
        message: &OutgoingRequest<'_>,
        again: fn(Errno) -> bool,
        receive: &mut dyn FnMut(&OwnedFd) -> Result<(), Errno>,
    ) -> Result<(), RemoteError> {
        let mut exchange = || self.line()?.exchange(message, receive);
        let result = match exchange() {
            Err(e) if again(e) => exchange(),
            other => other,
        };
        self.failure(result)
    }

    /// Distinguishes the two kinds of failure: an error of the service, and no answer.
    fn failure(&self, result: Result<AnswerResult, Errno>) -> Result<(), RemoteError> {
        match result {
            Ok(said) => said,
            Err(e) => {
                let why =
                    format!("the service of memfold run at {} does not answer: {e}", self.path);
                Err(RemoteError { is_lost: false, is_cut: true, why })
            }
        }
    }
}

/// Returns whether the other end has closed the connection.
fn is_closed(e: Errno) -> bool {
    matches!(e, Errno::PIPE | Errno::CONNRESET)
}

impl Remote for SocketRemote {
    fn put(&self, objects: &[StoredObject<'_>]) -> Result<(), RemoteError> {
        let entries: Vec<RequestEntry> =
            objects.iter().map(|o| self.own(o.number, o.bytes.len())).collect();
        let bytes: Vec<&[u8]> = objects.iter().map(|o| o.bytes).collect();
        let request = OutgoingRequest { entries: &entries, bytes: &bytes, ..message(PUT) };
        self.ask(&request, is_closed, &mut |_| Ok(()))
    }

    fn get(&self, fetches: &mut [ObjectFetch<'_>]) -> Result<(), RemoteError> {
        let entry = |f: &ObjectFetch<'_>| RequestEntry {
            engine: self.engine(f.forks),
            number: f.number,
            offset: f.offset as u32,
            len: f.to.len() as u32,
        };
        let entries: Vec<RequestEntry> = fetches.iter().map(entry).collect();
        let mut receive =
            |socket: &OwnedFd| fetches.iter_mut().try_for_each(|f| read(socket, f.to));
        self.ask(&OutgoingRequest { entries: &entries, ..message(GET) }, |_| true, &mut receive)
    }

    fn delete(&self, numbers: &[u64]) -> Result<(), RemoteError> {
        let entries: Vec<RequestEntry> =
            numbers.iter().map(|&number| self.own(number, 0)).collect();
        let delete = OutgoingRequest { entries: &entries, ..message(DELETE) };
        self.ask(&delete, is_closed, &mut |_| Ok(()))
    }

    fn keep(&self, patience: Duration) -> Result<(), RemoteError> {
        // Uses a connection of its own, because the timeout of the shared one is longer than
        // `patience`.
        let outcome =
            self.connect(patience).and_then(|line| line.exchange(&message(KEEP), &mut |_| Ok(())));
        self.failure(outcome)
    }

    fn lend(&self, copies: &DescendantWatch) -> Result<(), RemoteError> {
        let lend = OutgoingRequest { file: Some(copies.file()), ..message(LEND) };
        self.ask(&lend, |_| true, &mut |_| Ok(()))
    }

    fn name(&self) -> &str {
        &self.name
    }
}

/// A request, and the data that is sent with it.
struct OutgoingRequest<'a> {
    what: u32,
    entries: &'a [RequestEntry],
    bytes: &'a [&'a [u8]],
    file: Option<BorrowedFd<'a>>,
}

/// Makes a request without data.
fn message<'a>(what: u32) -> OutgoingRequest<'a> {
    OutgoingRequest { what, entries: &[], bytes: &[], file: None }
}

/// The result in an answer.
type AnswerResult = Result<(), RemoteError>;

/// One connection to the service.
struct Connection {
    socket: OwnedFd,
    /// Locked while a request is sent.
    sending: Mutex<()>,
    turn: Mutex<ReceiveTurn>,
    changed: Condvar,
}

/// The state of receiving.
#[derive(Default)]
struct ReceiveTurn {
    /// The number of the last request.
    last: u32,
    /// Numbers of requests that have no answer yet.
    asked: Vec<u32>,
    /// Whether a thread is receiving.
    is_taken: bool,
    /// The head of an answer that its thread has not taken yet.
    head: Option<AnswerHead>,
    /// The connection has broken off. Later bytes on it would be taken for another answer.
    cut: bool,
}

impl Connection {
    /// Sends one request and receives its answer. `receive` receives the requested bytes.
    ///
    /// # Errors
    /// The connection has broken off, for all threads.
    fn exchange(
        &self,
        message: &OutgoingRequest<'_>,
        receive: &mut dyn FnMut(&OwnedFd) -> Result<(), Errno>,
    ) -> Result<AnswerResult, Errno> {
        let id = {
            let mut turn = self.turn.lock();
            turn.last = turn.last.wrapping_add(1);
            let id = turn.last;
            turn.asked.push(id);
            id
        };
        let lens = message.entries.iter().map(|e| e.len as usize);
        let len = if message.what == GET { lens.sum() } else { 0 };
        let result = self
            .send(id, message)
            .and_then(|()| self.await_head(id))
            .and_then(|head| self.receive(head, len, receive));
        if result.is_err() {
            self.cut();
        }
        result
    }

    fn send(&self, id: u32, message: &OutgoingRequest<'_>) -> Result<(), Errno> {
        let OutgoingRequest { what, entries, bytes, file } = *message;
        debug_assert!(entries.len() <= ENTRIES_MAX);
        let mut head = Vec::with_capacity(RequestHead::BYTES + entries.len() * RequestEntry::BYTES);
        head.extend_from_slice(&RequestHead { what, id, entries: entries.len() as u32 }.to_bytes());
        entries.iter().for_each(|e| head.extend_from_slice(&e.to_bytes()));
        let _sending = self.sending.lock();
        let sent_bytes = file.map_or(Ok(0), |file| send_with_file(&self.socket, &head, file))?;
        write(&self.socket, &head[sent_bytes..])?;
        bytes.iter().try_for_each(|b| write(&self.socket, b))
    }

    /// Waits for the answer of request `id`, and reads heads of answers while no other thread does.
    /// Then the turn is the caller's, so the caller receives the rest.
    fn await_head(&self, id: u32) -> Result<AnswerHead, Errno> {
        let mut turn = self.turn.lock();
        loop {
            if turn.cut {
                return Err(Errno::CONNRESET);
            }
            match turn.head {
                Some(head) if head.id == id => {
                    turn.head = None;
                    return Ok(head);
                }
                None if !turn.is_taken => {
                    turn.is_taken = true;
                    drop(turn);
                    let mut bytes = [0; AnswerHead::BYTES];
                    let outcome = read(&self.socket, &mut bytes);
                    turn = self.turn.lock();
                    let head = AnswerHead::of_bytes(bytes);
                    let place = turn.asked.iter().position(|id| *id == head.id);
                    turn.asked.swap_remove(outcome.and(place.ok_or(Errno::PROTO))?);
                    turn.head = Some(head);
                    if head.id != id {
                        self.changed.notify_all();
                    }
                }
                _ => turn = self.changed.wait(turn),
            }
        }
    }

    /// Receives the rest of an answer, and ends the turn.
    fn receive(
        &self,
        head: AnswerHead,
        wanted: usize,
        receive: &mut dyn FnMut(&OwnedFd) -> Result<(), Errno>,
    ) -> Result<AnswerResult, Errno> {
        let failure = if head.status != DONE {
            let mut why = alloc::vec![0; head.len.min(WHY_BYTES_MAX) as usize];
            read(&self.socket, &mut why)?;
            let why = String::from_utf8_lossy(&why).to_string();
            Err(RemoteError { is_lost: head.status == LOST, is_cut: false, why })
        } else if head.len as usize == wanted {
            receive(&self.socket)?;
            Ok(())
        } else {
            return Err(Errno::PROTO);
        };
        self.turn.lock().is_taken = false;
        self.changed.notify_all();
        Ok(failure)
    }

    /// Marks the connection as broken off, and wakes all its threads, also the receiving one.
    fn cut(&self) {
        self.turn.lock().cut = true;
        let _ = net::shutdown(&self.socket, net::Shutdown::Both);
        self.changed.notify_all();
    }
}

/// Sends bytes, as many as go at once, and a descriptor with the first one. Returns the number of
/// bytes sent.
fn send_with_file(socket: &OwnedFd, bytes: &[u8], file: BorrowedFd<'_>) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = [file];
    assert!(control.push(SendAncillaryMessage::ScmRights(&files)), "there is space for one");
    loop {
        match net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

/// Receives all of `bytes` from a stream's socket, and the descendant watch whose descriptor was
/// sent with them, if one was. Returns `false` if the stream has ended before the first byte.
///
/// # Errors
/// The error of recvmsg. ECONNRESET: the stream has ended.
///
/// # Safety
/// - The descriptor stays open during the call.
pub unsafe fn receive_with_watch(
    socket: i32,
    bytes: &mut [u8],
) -> Result<(bool, Option<DescendantWatch>), Errno> {
    // SAFETY: the caller promises that the descriptor stays open during the call.
    let socket = unsafe { BorrowedFd::borrow_raw(socket) };
    let (mut done_bytes, mut file) = (0, None);
    while done_bytes < bytes.len() {
        match receive_with_file(socket, &mut bytes[done_bytes..]) {
            Ok((0, _)) if done_bytes == 0 => return Ok((false, None)),
            Ok((0, _)) => return Err(Errno::CONNRESET),
            Ok((len, sent)) => (done_bytes, file) = (done_bytes + len, sent.or(file)),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
    Ok((true, file.map(DescendantWatch::of)))
}

fn write(socket: &OwnedFd, mut bytes: &[u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match net::send(socket, bytes, SendFlags::NOSIGNAL) {
            Ok(n) => bytes = &bytes[n..],
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn read(socket: &OwnedFd, mut bytes: &mut [u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match net::recv(socket, &mut *bytes, RecvFlags::empty()) {
            Ok((0, _)) => return Err(Errno::CONNRESET),
            Ok((n, _)) => bytes = &mut bytes[n..],
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn without_a_service_the_message_names_the_socket() {
        let remote =
            SocketRemote::new("/nowhere/at.all", "redis://x", Duration::from_secs(1)).unwrap();
        let failure = remote
            .get(&mut [ObjectFetch { forks: 0, number: 1, offset: 0, to: &mut [0; 16] }])
            .unwrap_err();
        assert!(
            !failure.is_lost && failure.is_cut && failure.why.contains("/nowhere/at.all"),
            "{failure}"
        );
    }

    /// A socket at which a test acts as the service.
    struct FakeService {
        path: std::path::PathBuf,
        listener: UnixListener,
    }

    impl FakeService {
        fn new(name: &str) -> FakeService {
            let path = std::env::temp_dir().join(format!("memfold-{name}-{}", std::process::id()));
            let _ = std::fs::remove_file(&path);
            FakeService { listener: UnixListener::bind(&path).unwrap(), path }
        }

        fn remote(&self) -> SocketRemote {
            SocketRemote::new(self.path.to_str().unwrap(), "redis://x", Duration::from_secs(60))
                .unwrap()
        }

        fn accept(&self) -> UnixStream {
            let mut stream = self.listener.accept().unwrap().0;
            assert_eq!(request(&mut stream).0.what, HELLO);
            stream
        }
    }

    impl Drop for FakeService {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.path);
        }
    }

    fn request(stream: &mut UnixStream) -> (RequestHead, RequestEntry) {
        let (mut head, mut entry) = ([0; RequestHead::BYTES], [0; RequestEntry::BYTES]);
        stream.read_exact(&mut head).unwrap();
        stream.read_exact(&mut entry).unwrap();
        (RequestHead::of_bytes(head), RequestEntry::of_bytes(entry))
    }

    /// Returns the contents of object `number`.
    fn content(number: u64) -> [u8; 8] {
        (number * 1001).to_ne_bytes()
    }

    fn gets(remote: &SocketRemote, number: u64) -> Result<bool, RemoteError> {
        let mut to = [0; 8];
        remote.get(&mut [ObjectFetch { forks: 0, number, offset: 0, to: &mut to }])?;
        Ok(to == content(number))
    }

    fn answer(stream: &mut UnixStream, (request, entry): (RequestHead, RequestEntry)) {
        stream
            .write_all(&AnswerHead { status: DONE, id: request.id, len: entry.len }.to_bytes())
            .unwrap();
        stream.write_all(&content(entry.number)).unwrap();
    }

    #[test]
    fn one_connection_carries_requests_answered_in_any_order() {
        const THREADS: usize = 8;
        let stage = FakeService::new("many");
        let remote = &stage.remote();
        std::thread::scope(|scope| {
            let ask = |n: usize| move || (0..50).all(|i| gets(remote, n as u64 * 100 + i).unwrap());
            let threads: Vec<_> = (0..THREADS).map(|n| scope.spawn(ask(n))).collect();
            let mut stream = stage.accept();
            for _ in 0..50 {
                // All requests wait before one is answered, and the last is answered first.
                let mut all: Vec<_> = (0..THREADS).map(|_| request(&mut stream)).collect();
                all.reverse();
                all.into_iter().for_each(|one| answer(&mut stream, one));
            }
            assert!(
                threads.into_iter().all(|thread| thread.join().unwrap()),
                "each got what it asked for"
            );
        });
    }

    #[test]
    fn a_connection_that_breaks_off_is_made_anew_for_all_who_wait() {
        let stage = FakeService::new("cut");
        let remote = &stage.remote();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|n| scope.spawn(move || gets(remote, n))).collect();
            let mut stream = stage.accept();
            let first = request(&mut stream);
            answer(&mut stream, first);
            for _ in 0..3 {
                request(&mut stream);
            }
            drop(stream);
            let mut stream = stage.accept();
            for _ in 0..3 {
                let next = request(&mut stream);
                answer(&mut stream, next);
            }
            assert!(threads.into_iter().all(|thread| thread.join().unwrap().unwrap()));
        });
    }

    #[test]
    fn an_answer_that_nobody_has_asked_for_is_not_taken_for_another() {
        let stage = FakeService::new("stray");
        let remote = &stage.remote();
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || gets(remote, 1));
            for _ in 0..2 {
                let mut stream = stage.accept();
                let (request, entry) = request(&mut stream);
                let stray = AnswerHead { status: DONE, id: request.id + 1, len: entry.len };
                stream.write_all(&stray.to_bytes()).unwrap();
            }
            assert!(thread.join().unwrap().unwrap_err().is_cut);
        });
    }
}
