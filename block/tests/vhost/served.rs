//! A device that is served on its own socket while the value lives.
use memfold_block::vhost::VhostServer;
use memfold_block::{Device, DeviceMemory, Export, MemorySettings};
use std::io;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

pub const SIZE: u64 = 16 << 20;

pub struct Served {
    pub device: Arc<Device>,
    pub server: Arc<VhostServer>,
    /// The reports of broken connections.
    pub reports: Arc<Mutex<Vec<String>>>,
    path: PathBuf,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    pub fn new() -> Served {
        Served::with(false, 4)
    }

    pub fn with(read_only: bool, threads: usize) -> Served {
        Served::started(read_only, |listener, export| VhostServer::new(listener, export, threads))
    }

    /// Serves with one thread, which serves one request of a queue, and then one of another.
    pub fn in_turns() -> Served {
        Served::started(false, |listener, export| {
            VhostServer::with_turn(listener, export, 1, Duration::ZERO)
        })
    }

    fn started(
        read_only: bool,
        server: impl FnOnce(UnixListener, Arc<Export>) -> io::Result<VhostServer>,
    ) -> Served {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let name = format!("memfold-vhost-{}-{}", std::process::id(), COUNT.fetch_add(1, Relaxed));
        let path = std::env::temp_dir().join(name);
        let backing =
            DeviceMemory::new(&MemorySettings { pools: 2, ..MemorySettings::default() }).unwrap();
        let device = Device::new(&backing, SIZE).unwrap();
        let export = Arc::new(Export::new("test", device.clone(), read_only, 512));
        let server = Arc::new(server(UnixListener::bind(&path).unwrap(), export).unwrap());
        let reports = Arc::new(Mutex::new(Vec::new()));
        let thread = thread::spawn({
            let (server, reports) = (server.clone(), reports.clone());
            move || server.serve(|error| reports.lock().unwrap().push(error.to_string()))
        });
        Served { device, server, reports, path, thread: Some(thread) }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.device.read(&mut self.device.io(), at, &mut bytes).unwrap();
        bytes
    }

    pub fn stop(&mut self) {
        self.server.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop();
        self.device.check().unwrap();
        std::fs::remove_file(&self.path).unwrap();
    }
}
