//! The service: its socket, its threads, and the end of a run.
use crate::accept::each_connection;
use crate::line::{EngineLine, named};
use crate::settings::StoreSettings;
use crate::store::RunStore;
use memfold_os::raw::warn;
use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// Divisor of this process's descriptors: that part is for connections of engines. The rest is for
/// the store, and its own.
const LINES_SHARE: u64 = 2;
/// How long a new connection waits for others to be closed, and the time between two looks.
const ROOM_WAIT: Duration = Duration::from_secs(5);
const ROOM_STEP: Duration = Duration::from_millis(1);

/// A service for the engines of one run. It works only in the process that opened it. In a child of
/// fork it does nothing, and leaves the parent's keys alone.
pub struct Service {
    store: Arc<RunStore>,
    listener: Mutex<Option<UnixListener>>,
    path: PathBuf,
    process: u32,
}

impl Service {
    /// Connects to the store, tests it, and makes the socket at `path`, where no file may exist. It
    /// starts no thread; [`Service::serve`] does. Warns on standard error if a password crosses the
    /// network unencrypted.
    ///
    /// # Errors
    /// The store can't be reached, refuses the credentials, or may drop keys; the socket can't be
    /// made. One line.
    pub fn open(settings: StoreSettings, path: &Path) -> Result<Service, String> {
        // A failure means that a provider is installed already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut run = [0; 16];
        memfold_os::random::fill(&mut run)
            .map_err(|e| format!("reading random bytes failed: {e}"))?;
        let run: String = run.iter().map(|byte| format!("{byte:02x}")).collect();
        let store = RunStore::new(settings, run);
        let name = &store.settings.name;
        // The second try is for a call that a signal interrupted, which says nothing about the
        // store.
        store.try_store().or_else(|_| store.try_store()).map_err(|why| format!("{name}: {why}"))?;
        let socket = |e: io::Error| format!("{}: {e}", path.display());
        let listener = UnixListener::bind(path).map_err(socket)?;
        fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(socket)?;
        if store.settings.shows_password() {
            warn(&[
                "memfold: warning: ",
                name,
                ": The password crosses the network unencrypted. Where others may listen, use rediss://.\n",
            ]);
        }
        let (listener, process) = (Mutex::new(Some(listener)), std::process::id());
        Ok(Service { store: Arc::new(store), listener, path: path.to_path_buf(), process })
    }

    /// Starts the threads. They get no signal that the caller has blocked.
    ///
    /// # Errors
    /// No more threads, or another process than the one that has opened it.
    pub fn serve(&self) -> io::Result<()> {
        if !self.is_own() {
            return Err(ErrorKind::PermissionDenied.into());
        }
        let Some(listener) = self.listener.lock().expect("nobody panics with the lock").take()
        else {
            return Ok(());
        };
        let store = self.store.clone();
        named("memfold-remote", move || {
            let mut lines = EngineLines::default();
            let accept = || listener.accept().map(|(stream, _)| stream);
            each_connection(accept, |stream| lines.begin(&store, stream));
        })?;
        let store = self.store.clone();
        named("memfold-keys", move || store.keep_keys())
    }

    /// Calls [`Service::open`] and [`Service::serve`].
    ///
    /// # Errors
    /// As both.
    pub fn start(settings: StoreSettings, path: &Path) -> Result<Service, String> {
        let service = Service::open(settings, path)?;
        service.serve().map_err(|e| format!("starting a thread failed: {e}"))?;
        Ok(service)
    }

    /// Deletes the keys of the run, as the drop does. In a child of fork it leaves them to the
    /// parent.
    ///
    /// # Errors
    /// Some are left: one line. They expire.
    pub fn delete_keys(&self) -> Result<(), String> {
        if self.is_own() { self.store.delete_all() } else { Ok(()) }
    }

    fn is_own(&self) -> bool {
        self.process == std::process::id()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if !self.is_own() {
            return;
        }
        let _ = fs::remove_file(&self.path);
        if !self.store.has_ended() {
            let _ = self.delete_keys();
        }
    }
}

/// The connections of engines.
#[derive(Default)]
struct EngineLines {
    /// One reference for each connection that holds a descriptor.
    taken: Arc<()>,
    /// Those that the engine has opened.
    open: Arc<Mutex<Vec<Weak<EngineLine>>>>,
}

impl EngineLines {
    /// Serves one more in its own thread, once there is a descriptor for it.
    fn begin(&mut self, store: &Arc<RunStore>, stream: UnixStream) {
        self.make_room();
        let (store, open, places) = (store.clone(), self.open.clone(), self.taken.clone());
        // A connection that breaks affects no other.
        let _ = named("memfold-line", move || {
            let Ok(line) = EngineLine::open(store, stream) else { return };
            open.lock().expect("nobody panics with the lock").push(Arc::downgrade(&line));
            line.serve();
            drop((line, places));
        });
    }

    /// If there are as many connections as descriptors for them, closes the one that was unused for
    /// longest, and waits until its threads have let it go. Meanwhile new engines wait. Where all
    /// stay in use for [`ROOM_WAIT`], the new one takes a descriptor of the store.
    fn make_room(&self) {
        let end = Instant::now() + ROOM_WAIT;
        while Arc::strong_count(&self.taken) as u64 > descriptors() / LINES_SHARE
            && Instant::now() < end
        {
            self.close_unused();
            thread::sleep(ROOM_STEP);
        }
    }

    fn close_unused(&self) {
        let mut open = self.open.lock().expect("nobody panics with the lock");
        open.retain(|line| line.strong_count() > 0);
        let idle_lines =
            open.iter().filter_map(Weak::upgrade).filter_map(|line| Some((line.last_use()?, line)));
        if let Some((_, line)) = idle_lines.min_by_key(|(last_use, _)| *last_use) {
            line.close();
        }
    }
}

/// Returns the descriptors that this process may have.
fn descriptors() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is local.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    limit.rlim_cur
}
