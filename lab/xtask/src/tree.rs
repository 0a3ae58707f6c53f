//! The workspace as the checks see it: crates, their manifests and their sources.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::source::Source;

/// One crate of the workspace.
pub struct Crate {
    /// The package's name.
    pub name: String,
    /// Path of its Cargo.toml from the root.
    pub manifest_path: String,
    /// Text of its Cargo.toml.
    pub manifest: String,
    /// Its Rust files.
    pub sources: Vec<Source>,
}

impl Crate {
    /// Returns the directory of the crate from the root, with a slash at its end.
    pub fn directory(&self) -> &str {
        self.manifest_path.trim_end_matches("Cargo.toml")
    }
}

/// Everything that the checks read.
pub struct Tree {
    /// The crates of the workspace.
    pub crates: Vec<Crate>,
    /// Scripts, manifests and other text that is not Rust: path and contents.
    pub others: Vec<(String, String)>,
    /// Text of docs/locks.md.
    pub locks: String,
    /// All Markdown documents: path and contents.
    pub documents: Vec<(String, String)>,
    /// Paths of all files.
    pub paths: Vec<String>,
}

impl Tree {
    /// Reads the workspace at `root`.
    pub fn read(root: &Path) -> Result<Self> {
        let mut crates = Vec::new();
        for manifest in manifests(root)? {
            crates.push(read_crate(root, &manifest)?);
        }
        let mut others = Vec::new();
        for place in ["Makefile", ".ci", "scripts", "demo"] {
            for path in files(&root.join(place))? {
                if let Ok(text) = fs::read_to_string(&path) {
                    others.push((relative(root, &path), text));
                }
            }
        }
        let locks = fs::read_to_string(root.join("docs/locks.md")).context("no docs/locks.md")?;
        let (mut documents, mut paths) = (Vec::new(), Vec::new());
        for path in files(root)? {
            let name = relative(root, &path);
            if path.extension().is_some_and(|extension| extension == "md") {
                let text =
                    fs::read_to_string(&path).with_context(|| format!("can't read {name}"))?;
                documents.push((name.clone(), text));
            }
            paths.push(name);
        }
        Ok(Tree { crates, others, locks, documents, paths })
    }

    /// Returns the text of a document.
    pub fn document(&self, path: &str) -> Option<&str> {
        let document = self.documents.iter().find(|(name, _)| name == path)?;
        Some(&document.1)
    }

    /// Makes a tree of documents only.
    #[cfg(test)]
    pub fn of_documents(documents: Vec<(String, String)>) -> Self {
        let (crates, others, locks, paths) = Default::default();
        Tree { crates, others, locks, documents, paths }
    }
}

/// Returns the root of this workspace: the directory above `lab/xtask`.
pub fn root() -> Result<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR"));
    Ok(directory.ancestors().nth(2).context("xtask is not in a room")?.to_owned())
}

/// Returns whether a file of a crate is entirely a test, a bench or a fuzz target, by its path in
/// the crate.
pub fn is_test_path(path: &str) -> bool {
    let directories = ["tests/", "benches/", "examples/", "fuzz_targets/", "suites/"];
    directories.iter().any(|directory| path.starts_with(directory))
        || path.ends_with("/tests.rs")
        || path.contains("/tests/")
}

/// The rooms of the tree: each is a crate, or has crates in it.
const ROOMS: &[&str] = &["engine", "run", "bindings", "block", "remote", "lab", "e2e"];

fn manifests(root: &Path) -> Result<Vec<PathBuf>> {
    let mut manifests = Vec::new();
    for room in ROOMS {
        let room = root.join(room);
        for entry in fs::read_dir(&room).with_context(|| format!("no {}", room.display()))? {
            manifests.push(entry?.path().join("Cargo.toml"));
        }
        manifests.push(room.join("Cargo.toml"));
    }
    manifests.retain(|manifest| manifest.is_file());
    manifests.sort();
    Ok(manifests)
}

/// Returns the name of a package by its manifest.
fn package_name(manifest: &str) -> Option<&str> {
    let value = manifest.lines().find_map(|line| line.strip_prefix("name = \""))?;
    value.strip_suffix('"')
}

fn read_crate(root: &Path, manifest: &Path) -> Result<Crate> {
    let directory = manifest.parent().context("a manifest has no directory")?;
    let mut sources = Vec::new();
    for path in files(directory)? {
        if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path)
                .with_context(|| format!("can't read {}", path.display()))?;
            sources.push(Source::new(
                &relative(root, &path),
                &text,
                is_test_path(&relative(directory, &path)),
            ));
        }
    }
    mark_tests(&mut sources);
    let text = fs::read_to_string(manifest)
        .with_context(|| format!("can't read {}", manifest.display()))?;
    let name = package_name(&text).context("a crate has no name")?.to_owned();
    Ok(Crate { name, manifest_path: relative(root, manifest), manifest: text, sources })
}

/// Marks the files of modules that another file declares only for tests, and all files below those.
fn mark_tests(sources: &mut [Source]) {
    let modules: Vec<String> = sources.iter().flat_map(Source::test_modules).collect();
    for source in sources {
        let below = |module: &String| {
            source
                .path
                .strip_prefix(module.as_str())
                .is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
        };
        if modules.iter().any(below) {
            source.mark_test();
        }
    }
}

/// Returns all files at and below `path`, in order, without build output.
fn files(path: &Path) -> Result<Vec<PathBuf>> {
    if path.is_file() {
        return Ok(vec![path.to_owned()]);
    }
    let mut paths = Vec::new();
    if path.is_dir() {
        for entry in fs::read_dir(path).with_context(|| format!("can't list {}", path.display()))? {
            let path = entry?.path();
            let is_made = ["target", "__pycache__", "fuzz/corpus", ".git"]
                .iter()
                .any(|name| path.ends_with(name));
            if !is_made {
                paths.extend(files(&path)?);
            }
        }
    }
    paths.sort();
    Ok(paths)
}

fn relative(root: &Path, path: &Path) -> String {
    path.strip_prefix(root).unwrap_or(path).to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_holds_this_very_file_and_the_makefile() {
        let tree = Tree::read(&root().expect("xtask is in a workspace"))
            .expect("the workspace can be read");
        let xtask =
            tree.crates.iter().find(|krate| krate.name == "xtask").expect("xtask is a crate");
        assert!(xtask.sources.iter().any(|source| source.path == "lab/xtask/src/tree.rs"));
        assert!(tree.others.iter().any(|(path, _)| path == "Makefile"));
        assert!(tree.crates.iter().any(|krate| krate.name == "memfold-os"));
    }

    #[test]
    fn files_of_test_modules_are_tests() {
        let text = "#[cfg(test)]\nmod fake;\nmod real;";
        let new = |path: &str, text| Source::new(path, text, false);
        let mut sources = [
            new("x/src/lib.rs", text),
            new("x/src/fake/disk.rs", "std"),
            new("x/src/real.rs", "std"),
        ];
        mark_tests(&mut sources);
        assert_eq!(sources.each_ref().map(|source| source.in_test(0)), [true, true, false]);
    }

    #[test]
    fn tests_are_known_by_their_path() {
        assert!(is_test_path("tests/models.rs"));
        assert!(is_test_path("src/pool/tests.rs"));
        assert!(!is_test_path("src/pool/testing.rs"));
    }
}
