//! The service: its socket, its threads, and the end of a run.
use crate::keys::Keys;
use crate::link::Link;
use crate::settings::Settings;
use memfold_sys::remote::{
    Answer, BYTES_MAX, DELETE, DONE, ENTRIES_MAX, Entry, FAILED, GET, HELLO, LOST, PUT, Request,
};
use redis::{Cmd, RedisError, Value};
use std::fs::{self, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// How often is looked for processes that have ended, and whether keys are to be refreshed.
const LOOK: Duration = Duration::from_secs(1);
/// Keys that are refreshed or deleted at once.
const BATCH: usize = 512;
/// Pauses between tries of a read.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// An answer of the store may take this long, if the time of a whole read is no shorter.
const PATIENCE: Duration = Duration::from_secs(3);
/// What the end of a run may take for deleting keys while the store does not answer.
const END: Duration = Duration::from_secs(5);

/// Characters of what is passed on of an error.
const TEXT_CHARS: usize = 160;

struct Shared {
    settings: Settings,
    keys: Keys,
    ended: AtomicBool,
}

/// A service for the engines of one run.
pub struct Service {
    shared: Arc<Shared>,
    listener: Mutex<Option<UnixListener>>,
    path: PathBuf,
}

impl Service {
    /// Connects to the store, tries it, and makes the socket at `path`, where no file may be. No thread is started yet:
    /// [`Service::serve`] does.
    ///
    /// # Errors
    /// The store can't be reached, lets nobody in, or may drop keys by itself; the socket can't be made. One line.
    pub fn open(settings: Settings, path: &Path) -> Result<Service, String> {
        // Twice is no harm: somebody has installed one before.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut run = [0; 16];
        memfold_sys::swapfile::random(&mut run).map_err(|e| format!("no random bytes: {e}"))?;
        let run: String = run.iter().map(|byte| format!("{byte:02x}")).collect();
        let shared = Shared { settings, keys: Keys::new(run), ended: AtomicBool::new(false) };
        // Twice: a call that a signal has interrupted says nothing about the store.
        shared.try_store().or_else(|_| shared.try_store()).map_err(|why| format!("{}: {why}", shared.settings.name))?;
        let socket = |e: io::Error| format!("{}: {e}", path.display());
        let listener = UnixListener::bind(path).map_err(socket)?;
        fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(socket)?;
        Ok(Service { shared: Arc::new(shared), listener: Mutex::new(Some(listener)), path: path.to_path_buf() })
    }

    /// Starts the threads, which get no signal that the caller has blocked.
    ///
    /// # Errors
    /// No more threads.
    pub fn serve(&self) -> io::Result<()> {
        let Some(listener) = self.listener.lock().expect("nobody panics with the lock").take() else { return Ok(()) };
        let shared = self.shared.clone();
        named("memfold-remote", move || {
            for stream in listener.incoming() {
                let shared = shared.clone();
                // One that breaks off harms only itself.
                let _ = stream.and_then(|stream| named("memfold-line", move || drop(serve(&shared, stream))));
            }
        })?;
        let shared = self.shared.clone();
        named("memfold-keys", move || shared.keep_keys())
    }

    /// [`Service::open`] and [`Service::serve`].
    ///
    /// # Errors
    /// As both.
    pub fn start(settings: Settings, path: &Path) -> Result<Service, String> {
        let service = Service::open(settings, path)?;
        service.serve().map_err(|e| format!("starting a thread: {e}"))?;
        Ok(service)
    }

    /// Deletes the keys of the run, as its end does.
    ///
    /// # Errors
    /// Some are left: one line. They expire within a day.
    pub fn delete_keys(&self) -> Result<(), String> {
        self.shared.ended.store(true, SeqCst);
        let mut line = Line::new(0);
        let deadline = Instant::now() + END;
        loop {
            let some = self.shared.keys.after(None, BATCH);
            if some.is_empty() {
                return Ok(());
            }
            self.shared.delete(&mut line, &some, deadline).map_err(|why| {
                format!("{}: some keys are left, and expire within a day: {why}", self.shared.settings.name)
            })?;
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
        if !self.shared.ended.load(SeqCst) {
            let _ = self.delete_keys();
        }
    }
}

fn named(name: &str, main: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name(name.to_string()).spawn(main).map(drop)
}

/// What one connection of an engine has of its own.
struct Line {
    engine: u64,
    link: Option<Link>,
    /// What the answer carries.
    bytes: Vec<u8>,
}

impl Line {
    fn new(engine: u64) -> Line {
        Line { engine, link: None, bytes: Vec::new() }
    }
}

/// Why a request was not done.
enum Trouble {
    Lost(String),
    Failed(String),
}

impl Shared {
    /// One try at some commands. After an error the connection is given up.
    fn attempt(&self, line: &mut Line, commands: &[Cmd], patience: Duration) -> Result<Vec<Value>, RedisError> {
        let link = match line.link.take() {
            Some(link) => Ok(link),
            None => Link::open(&self.settings, patience),
        };
        let mut link = link?;
        let values = link.all(commands.iter().cloned())?;
        line.link = Some(link);
        Ok(values)
    }

    /// Tries commands until they succeed or the time is up, but twice at least: the first try may only find that the
    /// connection is gone.
    fn insist(&self, line: &mut Line, commands: &[Cmd], deadline: Instant) -> Result<Vec<Value>, Trouble> {
        let patience = PATIENCE.min(self.settings.timeout);
        let mut pause = PAUSE_MIN;
        for tries in 1.. {
            match self.attempt(line, commands, patience) {
                Ok(values) => return Ok(values),
                Err(e) if tries >= 2 && Instant::now() + pause >= deadline => {
                    return Err(Trouble::Failed(format!("{} (tried {tries} times)", short(&e))));
                }
                Err(_) if tries == 1 => {}
                Err(_) => {
                    thread::sleep(pause);
                    pause = (pause * 2).min(PAUSE_MAX);
                }
            }
        }
        unreachable!("it returns after some tries")
    }

    /// Whether the store does what it is needed for, and keeps what it is given.
    fn try_store(&self) -> Result<(), String> {
        let mut line = Line::new(0);
        let key = self.keys.name(0, 0);
        let commands = [self.set(&key, b"memfold"), get(&key, 3, 4), delete(&key)];
        let patience = PATIENCE.min(self.settings.timeout);
        let values = self.attempt(&mut line, &commands, patience).map_err(|e| {
            let text = short(&e);
            if text.to_lowercase().contains("moved") {
                return "it is one of a cluster: write redis-cluster://".to_string();
            }
            text
        })?;
        if values.get(1) != Some(&Value::BulkString(b"fold".to_vec())) {
            return Err(format!("it does not give back what it was given, but {:?}", values.get(1)));
        }
        let link = line.link.as_mut().expect("it has just been used");
        let about = match link.info("default") {
            Ok(about) => about,
            // Not allowed to ask: taken on trust, a key that is missed ends the program.
            Err(e) if e.to_string().to_lowercase().contains("permission") => String::new(),
            Err(e) => return Err(short(&e)),
        };
        if !self.settings.is_cluster && about.contains("cluster_enabled:1") {
            return Err("it is one of a cluster: write redis-cluster://".to_string());
        }
        match dropping_policy(&about) {
            Some(policy) => {
                Err(format!("its maxmemory-policy is {policy}: it may drop data that is needed; set it to noeviction"))
            }
            None => Ok(()),
        }
    }

    fn put(&self, line: &mut Line, entries: &[Entry], bytes: &[u8]) -> Result<(), Trouble> {
        let mut rest = bytes;
        let mut commands = Vec::with_capacity(entries.len());
        for entry in entries {
            let (object, after) = rest.split_at(entry.len as usize);
            commands.push(self.set(&self.keys.name(line.engine, entry.number), object));
            rest = after;
        }
        // Before they are sent: whatever becomes of them, they are deleted in the end.
        self.keys.add(line.engine, entries.iter().map(|e| e.number));
        let values = self.insist(line, &commands, Instant::now())?;
        match values.iter().find(|value| **value != Value::Okay) {
            Some(other) => {
                line.link = None;
                Err(Trouble::Failed(format!("an object was not acknowledged: {other:?}")))
            }
            None => Ok(()),
        }
    }

    fn get(&self, line: &mut Line, entries: &[Entry]) -> Result<(), Trouble> {
        let key = |entry: &Entry| self.keys.name(line.engine, entry.number);
        let commands: Vec<Cmd> = entries.iter().map(|e| get(&key(e), e.offset, e.len)).collect();
        let values = self.insist(line, &commands, Instant::now() + self.settings.timeout)?;
        line.bytes.clear();
        for (entry, value) in entries.iter().zip(&values) {
            let Value::BulkString(bytes) = value else {
                line.link = None;
                return Err(Trouble::Failed(format!("key {}: {value:?}", self.keys.name(line.engine, entry.number))));
            };
            if bytes.len() != entry.len as usize {
                let why = format!(
                    "key {} is not there, or shorter than it was: the store has lost data",
                    self.keys.name(line.engine, entry.number)
                );
                return Err(Trouble::Lost(why));
            }
            line.bytes.extend_from_slice(bytes);
        }
        Ok(())
    }

    fn delete(&self, line: &mut Line, which: &[(u64, u64)], deadline: Instant) -> Result<(), String> {
        let commands: Vec<Cmd> =
            which.iter().map(|(engine, number)| delete(&self.keys.name(*engine, *number))).collect();
        match self.insist(line, &commands, deadline) {
            Ok(_) => {
                which.iter().for_each(|(engine, number)| self.keys.remove(*engine, std::iter::once(*number)));
                Ok(())
            }
            Err(Trouble::Lost(why) | Trouble::Failed(why)) => Err(why),
        }
    }

    /// Deletes what processes that have ended have left, and keeps the rest from expiring.
    fn keep_keys(&self) {
        let mut line = Line::new(0);
        let mut refreshed = Instant::now();
        while !self.ended.load(SeqCst) {
            thread::sleep(LOOK.min(self.settings.expiry / 8));
            let orphans = self.keys.orphans(BATCH, has_ended);
            if !orphans.is_empty() {
                let _ = self.delete(&mut line, &orphans, Instant::now());
            }
            if refreshed.elapsed() > self.settings.expiry / 4 && self.refresh(&mut line) {
                refreshed = Instant::now();
            }
        }
    }

    fn set(&self, key: &str, bytes: &[u8]) -> Cmd {
        let mut command = command("SET", key);
        command.arg(bytes).arg("EX").arg(self.settings.expiry.as_secs());
        command
    }

    fn expire(&self, engine: u64, number: u64) -> Cmd {
        let mut command = command("EXPIRE", &self.keys.name(engine, number));
        command.arg(self.settings.expiry.as_secs());
        command
    }

    /// `false`: not all was done.
    fn refresh(&self, line: &mut Line) -> bool {
        let mut last = None;
        loop {
            let some = self.keys.after(last, BATCH);
            let Some(end) = some.last() else { return true };
            last = Some(*end);
            let commands: Vec<Cmd> = some.iter().map(|(engine, n)| self.expire(*engine, *n)).collect();
            if self.ended.load(SeqCst) || self.insist(line, &commands, Instant::now()).is_err() {
                return false;
            }
        }
    }
}

/// What went wrong, in one line that isn't long: a pipeline tells of each of its commands.
fn short(e: &RedisError) -> String {
    let text = e.to_string().replace('\n', " ");
    match text.char_indices().nth(TEXT_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// Whether a process is no more.
fn has_ended(pid: i32) -> bool {
    // SAFETY: signal 0 only asks.
    let asked = unsafe { libc::kill(pid, 0) };
    asked != 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH)
}

/// The policy of a server that may drop keys when its memory is full.
fn dropping_policy(about: &str) -> Option<&str> {
    let mut limited = false;
    for line in about.lines() {
        match line.trim().split_once(':') {
            Some(("maxmemory", bytes)) => limited = bytes != "0",
            Some(("maxmemory_policy", policy)) if limited && policy != "noeviction" => return Some(policy),
            _ => {}
        }
    }
    None
}

fn command(name: &str, key: &str) -> Cmd {
    let mut command = redis::cmd(name);
    command.arg(key);
    command
}

fn get(key: &str, offset: u32, len: u32) -> Cmd {
    let mut command = command("GETRANGE", key);
    command.arg(offset).arg(offset + len - 1);
    command
}

fn delete(key: &str) -> Cmd {
    command("UNLINK", key)
}

/// Serves one connection of an engine, until it ends or says something that makes no sense.
fn serve(shared: &Shared, mut stream: UnixStream) -> io::Result<()> {
    let peer = peer(&stream)?;
    // SAFETY: only asks.
    if peer.uid != unsafe { libc::geteuid() } {
        return Err(ErrorKind::PermissionDenied.into());
    }
    let (request, entries) = receive(&mut stream)?.ok_or(ErrorKind::UnexpectedEof)?;
    let engine = entries.first().filter(|_| request.what == HELLO).ok_or(ErrorKind::InvalidData)?.number;
    answer(&mut stream, DONE, &[])?;
    shared.keys.enter(engine, peer.pid);
    let result = serve_engine(shared, &mut stream, &mut Line::new(engine));
    shared.keys.leave(engine);
    result
}

/// Who is at the other end; process 0 is one that can't be seen from here.
fn peer(stream: &UnixStream) -> io::Result<libc::ucred> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let to = (&raw mut peer).cast();
    // SAFETY: `to` leads to a local of the length that is given.
    let done = unsafe { libc::getsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, to, &raw mut len) };
    if done == 0 { Ok(peer) } else { Err(io::Error::last_os_error()) }
}

fn serve_engine(shared: &Shared, stream: &mut UnixStream, line: &mut Line) -> io::Result<()> {
    let mut bytes = Vec::new();
    while let Some((request, entries)) = receive(stream)? {
        let total: usize = entries.iter().map(|e| e.len as usize).sum();
        if total > BYTES_MAX || (request.what == GET && entries.iter().any(|e| e.len == 0)) {
            return Err(ErrorKind::InvalidData.into());
        }
        let result = match request.what {
            PUT => {
                bytes.resize(total, 0);
                stream.read_exact(&mut bytes)?;
                shared.put(line, &entries, &bytes)
            }
            GET => shared.get(line, &entries),
            DELETE => {
                let which: Vec<(u64, u64)> = entries.iter().map(|e| (line.engine, e.number)).collect();
                shared.delete(line, &which, Instant::now()).map_err(Trouble::Failed)
            }
            _ => return Err(ErrorKind::InvalidData.into()),
        };
        match result {
            Ok(()) if request.what == GET => answer(stream, DONE, &line.bytes)?,
            Ok(()) => answer(stream, DONE, &[])?,
            Err(Trouble::Lost(why)) => answer(stream, LOST, why.as_bytes())?,
            Err(Trouble::Failed(why)) => answer(stream, FAILED, why.as_bytes())?,
        }
    }
    Ok(())
}

/// One message without its bytes; `None` at the end of the connection.
fn receive(stream: &mut UnixStream) -> io::Result<Option<(Request, Vec<Entry>)>> {
    let mut head = [0; 8];
    match stream.read_exact(&mut head) {
        Err(e) if e.kind() == ErrorKind::UnexpectedEof => return Ok(None),
        other => other?,
    }
    let request = Request::of_bytes(head);
    if request.entries as usize > ENTRIES_MAX {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; request.entries as usize * Entry::BYTES];
    stream.read_exact(&mut bytes)?;
    let entries = bytes.chunks_exact(Entry::BYTES).map(|b| Entry::of_bytes(b.try_into().expect("16 bytes")));
    Ok(Some((request, entries.collect())))
}

fn answer(stream: &mut UnixStream, status: u32, bytes: &[u8]) -> io::Result<()> {
    stream.write_all(&Answer { status, len: bytes.len() as u32 }.to_bytes())?;
    stream.write_all(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_drops_keys_is_recognised() {
        let about =
            |max: &str, policy: &str| format!("used_memory:5\r\nmaxmemory:{max}\r\nmaxmemory_policy:{policy}\r\n");
        assert_eq!(dropping_policy(&about("0", "allkeys-lru")), None, "it never is full");
        assert_eq!(dropping_policy(&about("100", "noeviction")), None);
        assert_eq!(dropping_policy(&about("100", "volatile-lru")), Some("volatile-lru"));
        assert_eq!(dropping_policy(""), None);
    }
}
