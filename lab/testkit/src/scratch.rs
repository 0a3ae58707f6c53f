//! A directory for a test.
use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// A directory in the system's temporary one, removed when dropped.
pub struct Scratch(pub PathBuf);

impl Scratch {
    /// Makes an empty one.
    #[allow(clippy::new_without_default)] // Each makes a directory.
    pub fn new() -> Scratch {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("memfold-test-{}-{}", std::process::id(), COUNT.fetch_add(1, Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).expect("a directory in the temporary one");
        Scratch(path)
    }

    /// Returns the path of a file in it, as text.
    pub fn path(&self, name: &str) -> String {
        self.0
            .join(name)
            .into_os_string()
            .into_string()
            .expect("temporary directories are in UTF-8")
    }

    /// Makes a file with these bytes and permissions. Returns its path. An executable can be
    /// executed at once, whatever other threads start meanwhile.
    pub fn file(&self, name: &str, bytes: impl AsRef<[u8]>, mode: u32) -> String {
        let path = self.path(name);
        if mode & 0o111 == 0 {
            fs::write(&path, bytes).expect("a file in it");
        } else {
            write_in_a_child(&path, bytes.as_ref());
        }
        fs::set_permissions(&path, Permissions::from_mode(mode)).expect("a file of ours");
        path
    }

    /// Compiles a program from C. Returns its path.
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

/// A child of fork has this process's descriptors until it executes a program. A descriptor that is
/// open for writing would make the file "busy" for execution.
fn write_in_a_child(path: &str, bytes: &[u8]) {
    let mut tee = Command::new("tee")
        .arg(path)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("tee");
    tee.stdin.take().expect("a pipe").write_all(bytes).expect("it is read");
    assert!(tee.wait().expect("a child").success(), "{path} can't be written");
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn fresh_program_runs_while_others_start_programs() {
        let (scratch, is_done) = (Scratch::new(), AtomicBool::new(false));
        let start = |program: &str| Command::new(program).status().map(|status| status.success());
        std::thread::scope(|threads| {
            for _ in 0..2 {
                threads.spawn(|| {
                    while !is_done.load(Relaxed) {
                        assert!(start("true").expect("true"));
                    }
                });
            }
            let all = (0..200)
                .map(|n| scratch.file(&format!("program{n}"), "#!/bin/sh\n", 0o755))
                .try_for_each(|path| start(&path).map(|right| assert!(right)));
            is_done.store(true, Relaxed);
            all.expect("it isn't busy");
        });
    }
}
