//! Installed programs must print the same plainly and under memfold in less memory than they need.
//! A program that is not installed fails the test under CI=true (scripts/setup installs it).
//! Elsewhere the test prints a line and skips it.
use super::{Scratch, UNPRIVILEGED, printed_in, unprivileged};
use std::process::Command;

pub fn missing(what: &str) {
    assert!(std::env::var("CI").as_deref() != Ok("true"), "{what}: scripts/setup installs it");
    eprintln!("SKIPPED: {what} (scripts/setup programs installs it)");
}

/// Returns the path of an installed program.
pub fn installed(name: &str) -> Option<String> {
    // Debian's PostgreSQL commands are scripts that choose a server's version, so its own directory
    // comes first.
    let places = "for at in /usr/lib/postgresql/*/bin; do PATH=$at:$PATH; done; PATH=$PATH:/usr/sbin:/usr/local/go/bin";
    let look = format!("{places}; command -v {name}");
    let output = Command::new("sh").args(["-c", &look]).output().unwrap();
    let path = String::from_utf8(output.stdout).unwrap().trim().to_string();
    if path.is_empty() {
        missing(&format!("{name} is not installed"));
        return None;
    }
    Some(path)
}

/// Returns the paths of several installed programs.
pub fn all_installed<const N: usize>(names: [&str; N]) -> Option<[String; N]> {
    names.map(installed).into_iter().collect::<Option<Vec<_>>>()?.try_into().ok()
}

/// Returns the interpreter itself that has these modules. `python3` may be a script that starts it.
/// The system's interpreter is executable by every user.
pub fn python(modules: &str) -> Option<String> {
    let script = format!("import sys, {modules}; print(sys.executable)");
    let mut names = vec!["/usr/bin/python3"];
    if unprivileged().is_empty() {
        names.push("python3");
    }
    for name in names {
        if let Ok(output) = Command::new(name).args(["-c", &script]).output()
            && output.status.success()
        {
            return Some(String::from_utf8(output.stdout).unwrap().trim().to_string());
        }
    }
    missing(&format!("no python3 has {modules}"));
    None
}

/// Copies a file of `programs/` to where every user may read it.
pub fn copied(scratch: &Scratch, name: &str) -> String {
    let from = format!("{}/programs/{name}", env!("CARGO_MANIFEST_DIR"));
    scratch.file(name, std::fs::read(from).unwrap(), 0o644)
}

/// Returns an [`unprivileged`] world in which every user may enter `directory`, and the directory's
/// path there.
pub fn seen(directory: &str) -> (String, String) {
    if unprivileged().is_empty() {
        return (String::new(), directory.to_string());
    }
    let (before, after) = UNPRIVILEGED.split_once("exec setpriv").unwrap();
    let bound = format!("mkdir /mnt/seen && mount --bind '{directory}' /mnt/seen && ");
    (format!("{before}{bound}exec setpriv{after}"), "/mnt/seen".to_string())
}

/// Returns the stdout of a command run without memfold.
#[track_caller]
pub fn plainly(command: &[&str]) -> Vec<u8> {
    let baseline = Command::new(command[0]).args(&command[1..]).output().unwrap();
    assert!(
        baseline.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&baseline.stderr)
    );
    baseline.stdout
}

/// Asserts that a command prints the same with `--limit`, without any privilege, as without
/// memfold, and that at least `least_mib` of it were folded.
#[track_caller]
pub fn assert_same(limit: &str, least_mib: u64, command: &[&str]) {
    assert_prints(unprivileged(), &["--limit", limit], least_mib, command, &plainly(command));
}

/// Asserts that a command prints `expected`.
#[track_caller]
pub fn assert_prints(
    world: &str,
    flags: &[&str],
    least_mib: u64,
    command: &[&str],
    expected: &[u8],
) {
    let Some(output) = printed_in(world, flags, least_mib, command) else { return };
    assert!(output == expected, "{command:?} prints something else");
}

/// Returns the directory with the source of a package that this workspace depends on.
pub fn source_of(package: &str) -> String {
    // Packages for other platforms were not downloaded.
    let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let metadata =
        ["metadata", "--format-version", "1", "--offline", "--filter-platform", &platform];
    let output = Command::new(env!("CARGO")).args(metadata).output().unwrap();
    let about: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let mut all = about["packages"].as_array().unwrap().iter();
    let entry = all.find(|one| one["name"] == package).expect("a package");
    let manifest = std::path::Path::new(entry["manifest_path"].as_str().unwrap());
    manifest.parent().unwrap().to_str().unwrap().to_string()
}

/// Returns the directory of a Python package that scripts/setup has put beside the build output.
pub fn python_package(name: &str) -> Option<String> {
    let directory = super::binaries()?.parent()?.join("tools/python");
    if !directory.join(name).is_dir() {
        missing(&format!("no {name} in {}", directory.display()));
        return None;
    }
    Some(directory.to_str().unwrap().to_string())
}
