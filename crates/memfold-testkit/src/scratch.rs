//! A directory for a test.
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// A directory of its own in the system's temporary one, removed when dropped.
pub struct Scratch(pub PathBuf);

impl Scratch {
    /// A new one, empty.
    #[allow(clippy::new_without_default)] // Each makes a directory.
    pub fn new() -> Scratch {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("memfold-test-{}-{}", std::process::id(), COUNT.fetch_add(1, Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).expect("a directory in the temporary one");
        Scratch(path)
    }

    /// The path of a file in it, as text.
    pub fn path(&self, name: &str) -> String {
        self.0
            .join(name)
            .into_os_string()
            .into_string()
            .expect("temporary directories are in UTF-8")
    }

    /// A file with these bytes and permissions; its path.
    pub fn file(&self, name: &str, bytes: impl AsRef<[u8]>, mode: u32) -> String {
        let path = self.path(name);
        fs::write(&path, bytes).expect("a file in it");
        fs::set_permissions(&path, Permissions::from_mode(mode)).expect("a file of ours");
        path
    }

    /// A program compiled from C; its path.
    pub fn compile(&self, name: &str, source: &str, flags: &[&str]) -> String {
        let (code, path) = (self.file(&format!("{name}.c"), source, 0o644), self.path(name));
        let status = Command::new("gcc")
            .args(["-O1", "-o", &path, &code])
            .args(flags)
            .status()
            .expect("gcc");
        assert!(status.success(), "gcc {flags:?}");
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
