//! What the tests share.
#![allow(dead_code)] // Each test file uses a part of this.
use memfold_sys::socket_remote::SocketRemote;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

/// A directory that goes away.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new() -> Scratch {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("memfold-library-test-{}-{}", std::process::id(), COUNT.fetch_add(1, Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// An engine's client of the service at `socket`.
pub fn remote(socket: &Path) -> SocketRemote {
    SocketRemote::new(socket.to_str().unwrap(), "the store", Duration::from_secs(60)).unwrap()
}
