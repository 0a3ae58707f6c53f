//! One connection of an engine: requests and answers, several at a time.
use crate::process::EngineProcess;
use crate::store::{RunStore, StoreTrouble};
use memfold_os::memory::descendant_watch::DescendantWatch;
use memfold_swap::remote::socket::receive_with_watch;
use memfold_swap::remote::{
    AnswerHead, BYTES_MAX, DELETE, DONE, ENTRIES_MAX, FAILED, GET, HELLO, KEEP, LEND, LOST, PUT,
    RequestEntry, RequestHead,
};
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

/// Requests of one engine that are processed at a time: those of its reading threads, and one that
/// moves data out.
const THREADS_MAX: usize = 4;

/// A connection of an engine. Its threads take turns to read a request, and each answers its own.
/// So an engine that does not read its answers blocks no other engine.
pub struct EngineLine {
    store: Arc<RunStore>,
    stream: UnixStream,
    engine: u64,
    /// Held while a request is read; whether no more will come.
    reading: Mutex<bool>,
    /// Held while an answer is written.
    writing: Mutex<()>,
    threads: AtomicUsize,
    /// Threads without a request.
    idle: AtomicUsize,
    /// Order of lines by their last request.
    used: AtomicU64,
}

/// A request with its data.
struct LineJob {
    request: RequestHead,
    entries: Vec<RequestEntry>,
    bytes: Vec<u8>,
    copies: Option<DescendantWatch>,
}

/// Starts a thread with a name.
///
/// # Errors
/// No more threads.
pub fn named(name: &str, main: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name(name.to_string()).spawn(main).map(drop)
}

impl EngineLine {
    /// Identifies the peer: an engine of this user.
    ///
    /// # Errors
    /// It isn't, or the connection has broken off.
    pub fn open(store: Arc<RunStore>, stream: UnixStream) -> io::Result<Arc<EngineLine>> {
        let peer = peer(&stream)?;
        // SAFETY: this call only asks.
        if peer.uid != unsafe { libc::geteuid() } {
            return Err(ErrorKind::PermissionDenied.into());
        }
        let job = receive(&stream)?.ok_or(ErrorKind::UnexpectedEof)?;
        let engine = job
            .entries
            .first()
            .filter(|_| job.request.what == HELLO)
            .ok_or(ErrorKind::InvalidData)?
            .engine;
        store.keys.enter(engine, EngineProcess::of(peer.pid));
        Ok(Arc::new(EngineLine {
            store,
            stream,
            engine,
            reading: Mutex::new(false),
            writing: Mutex::new(()),
            threads: AtomicUsize::new(1),
            idle: AtomicUsize::new(1),
            used: AtomicU64::new(0),
        }))
    }

    /// Serves it in the calling thread, and in more threads as needed, until it ends or sends an
    /// invalid request.
    pub fn serve(self: &Arc<EngineLine>) {
        while let Some(job) = self.next() {
            if self.idle.fetch_sub(1, SeqCst) == 1 {
                self.add_thread();
            }
            let outcome = self.answer(job);
            self.idle.fetch_add(1, SeqCst);
            if outcome.is_err() {
                break;
            }
        }
        // Wakes the others, and tells the engine.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Returns the number of its last request among those of all lines; `None` while one is in
    /// progress.
    pub fn last_use(&self) -> Option<u64> {
        (self.idle.load(SeqCst) == self.threads.load(SeqCst)).then(|| self.used.load(SeqCst))
    }

    /// Ends it. An engine that needs it connects again.
    pub fn close(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    fn add_thread(self: &Arc<EngineLine>) {
        if self.threads.fetch_add(1, SeqCst) < THREADS_MAX {
            self.idle.fetch_add(1, SeqCst);
            let line = self.clone();
            if named("memfold-line", move || line.serve()).is_ok() {
                return;
            }
            self.idle.fetch_sub(1, SeqCst);
        }
        // There are enough threads, or no more can be started; the existing ones go on.
        self.threads.fetch_sub(1, SeqCst);
    }

    fn next(&self) -> Option<LineJob> {
        let mut is_over = self.reading.lock().expect("nobody panics with the lock");
        if *is_over {
            return None;
        }
        let job = receive(&self.stream).ok().flatten();
        *is_over = job.is_none();
        self.used.store(self.store.tick(), SeqCst);
        job
    }

    fn answer(&self, LineJob { request, entries, bytes, copies }: LineJob) -> io::Result<()> {
        let (store, engine) = (&self.store, self.engine);
        if request.what != GET && entries.iter().any(|e| e.engine != engine) {
            return Err(ErrorKind::InvalidData.into());
        }
        let result = match request.what {
            PUT => store.put(engine, &entries, &bytes).map(|()| Vec::new()),
            GET => store.get(&entries),
            LEND => {
                store.keys.lend(engine, copies.ok_or(ErrorKind::InvalidData)?);
                Ok(Vec::new())
            }
            DELETE => {
                let which: Vec<(u64, u64)> = entries.iter().map(|e| (engine, e.number)).collect();
                store.delete(&which, Instant::now()).map(|()| Vec::new())
            }
            KEEP => store.is_kept().map(|()| Vec::new()),
            _ => return Err(ErrorKind::InvalidData.into()),
        };
        let (status, parts) = match result {
            Ok(parts) => (DONE, parts),
            Err(StoreTrouble::Lost(why)) => (LOST, vec![why.into_bytes()]),
            Err(StoreTrouble::Failed(why)) => (FAILED, vec![why.into_bytes()]),
        };
        let len = parts.iter().map(Vec::len).sum::<usize>() as u32;
        let _writing = self.writing.lock().expect("nobody panics with the lock");
        let mut stream = &self.stream;
        stream.write_all(&AnswerHead { status, id: request.id, len }.to_bytes())?;
        parts.iter().try_for_each(|part| stream.write_all(part))
    }
}

impl Drop for EngineLine {
    fn drop(&mut self) {
        self.store.keys.leave(self.engine);
    }
}

/// Returns the peer; process 0 is one that is invisible from here.
fn peer(stream: &UnixStream) -> io::Result<libc::ucred> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let to = (&raw mut peer).cast();
    // SAFETY: `to` leads to a local of the length that is given.
    let code = unsafe {
        libc::getsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, to, &raw mut len)
    };
    if code == 0 { Ok(peer) } else { Err(io::Error::last_os_error()) }
}

/// Reads one message; `None` at the end of the connection.
fn receive(mut stream: &UnixStream) -> io::Result<Option<LineJob>> {
    let mut head = [0; RequestHead::BYTES];
    // SAFETY: the stream is borrowed, so its descriptor stays open.
    let count = unsafe { receive_with_watch(stream.as_raw_fd(), &mut head) };
    let (goes_on, copies) = count.map_err(|e| io::Error::from_raw_os_error(e.raw_os_error()))?;
    if !goes_on {
        return Ok(None);
    }
    let request = RequestHead::of_bytes(head);
    if request.entries as usize > ENTRIES_MAX {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; request.entries as usize * RequestEntry::BYTES];
    stream.read_exact(&mut bytes)?;
    let entries = bytes
        .chunks_exact(RequestEntry::BYTES)
        .map(|b| RequestEntry::of_bytes(b.try_into().expect("24 bytes")));
    let entries: Vec<RequestEntry> = entries.collect();
    let total: usize = entries.iter().map(|e| e.len as usize).sum();
    if total > BYTES_MAX || (request.what == GET && entries.iter().any(|e| e.len == 0)) {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; if request.what == PUT { total } else { 0 }];
    stream.read_exact(&mut bytes)?;
    Ok(Some(LineJob { request, entries, bytes, copies }))
}
