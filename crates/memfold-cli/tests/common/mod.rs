//! What the end-to-end tests share: the built command, and a directory that goes away.
#![allow(dead_code)] // Each test file uses a part of this.
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// Where the built `memfold` and the preload library are: MEMFOLD_BIN_DIR, or where cargo puts this test's own build.
///
/// The preload library is built on its own (`cargo build -p memfold-preload`). Without it the test can't run: that
/// fails under CI=true; elsewhere the test says so and passes.
pub fn binaries() -> Option<PathBuf> {
    let directory = match std::env::var_os("MEMFOLD_BIN_DIR") {
        Some(directory) => PathBuf::from(directory),
        None => Path::new(env!("CARGO_BIN_EXE_memfold")).parent().unwrap().to_path_buf(),
    };
    assert!(directory.join("memfold").is_file(), "no memfold in {}", directory.display());
    if directory.join("libmemfold_preload.so").is_file() {
        return Some(directory);
    }
    let text = format!("no libmemfold_preload.so in {}: run cargo build -p memfold-preload", directory.display());
    assert!(std::env::var("CI").as_deref() != Ok("true"), "{text}");
    eprintln!("SKIPPED, NOTHING WAS TESTED: {text}");
    None
}

/// `memfold` with `arguments`, in an environment without memfold's variables.
pub fn memfold(directory: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(directory.join("memfold"));
    command.args(arguments).env_remove("MEMFOLD_RUN").env_remove("MEMFOLD_DISABLE").stdin(Stdio::null());
    command
}

/// `memfold run --limit 64M FLAGS -- COMMAND` to its end.
pub fn run(directory: &Path, flags: &[&str], command: &[&str]) -> Output {
    let arguments = [&["run", "--limit", "64M"], flags, &["--"], command].concat();
    memfold(directory, &arguments).output().unwrap()
}

/// Asserts that memfold itself refused with `status`, nothing on stdout and one line on stderr that holds every word.
#[track_caller]
pub fn assert_refused(output: &Output, status: i32, words: &[&str]) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{text}");
    assert!(output.stdout.is_empty(), "{:?}", output.stdout);
    assert!(text.starts_with("memfold: ") && text.ends_with('\n') && text.lines().count() == 1, "{text:?}");
    assert!(words.iter().all(|word| text.contains(word)), "{text:?} lacks one of {words:?}");
}

/// A directory of its own, removed when dropped.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new() -> Scratch {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("memfold-test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }

    /// The path of a file in it, as text.
    pub fn path(&self, name: &str) -> String {
        self.0.join(name).into_os_string().into_string().unwrap()
    }

    /// A file with these bytes and permissions.
    pub fn file(&self, name: &str, bytes: impl AsRef<[u8]>, mode: u32) -> String {
        use std::os::unix::fs::PermissionsExt;
        let path = self.path(name);
        std::fs::write(&path, bytes).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    /// A program compiled from C.
    pub fn compile(&self, name: &str, source: &str, flags: &[&str]) -> String {
        let (code, path) = (self.file(&format!("{name}.c"), source, 0o644), self.path(name));
        let status = Command::new("gcc").args(["-O1", "-o", &path, &code]).args(flags).status().unwrap();
        assert!(status.success(), "gcc {flags:?}");
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
