//! The programs that benchmarks run.

use crate::common::refusal::Refusal;
use std::path::PathBuf;

/// The path of this program, also if its file was replaced meanwhile. Not for programs run under
/// memfold, where it would be memfold.
pub const THIS: &str = "/proc/self/exe";

/// Returns the path of a program, or a refusal that names its package.
pub fn find(name: &str, package: &str) -> Result<String, Refusal> {
    let refusal =
        || Refusal::Machine(format!("{name} is not installed: apt-get install {package}"));
    in_path(name).and_then(|path| path.to_str().map(String::from)).ok_or_else(refusal)
}

/// Returns the `memfold` beside this program, or else the one in PATH.
///
/// # Errors
/// If there is none. The message tells how to build it.
pub fn memfold() -> Result<PathBuf, Refusal> {
    let sibling = std::env::current_exe().ok().map(|this| this.with_file_name("memfold"));
    sibling.filter(|path| path.is_file()).or_else(|| in_path("memfold")).ok_or_else(|| {
        let how = "cargo build --release -p memfold-cli -p memfold-preload";
        Refusal::Machine(format!("no memfold beside memfold-bench, nor in PATH: {how}"))
    })
}

fn in_path(name: &str) -> Option<PathBuf> {
    let mut directories: Vec<PathBuf> =
        std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).collect();
    directories.extend(["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from));
    directories.into_iter().map(|dir| dir.join(name)).find(|path| path.is_file())
}
