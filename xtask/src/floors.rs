//! Floors: a crate depends only on crates of lower floors.
//!
//! Every ordinary and build dependency of a crate on another crate of this workspace must be on a
//! lower floor. A dev-dependency must be on a lower floor or beside the floors. Only crates beside
//! the floors (`testkit`, `bench`, `xtask`, `fuzz`) have ordinary dependencies on each other.

use crate::finding::Finding;
use crate::tree::Tree;

/// Every crate and its floor; `BESIDE` stands for none.
const FLOORS: &[(&str, u8)] = &[
    ("memfold-os", 0),
    ("memfold-gate", 1),
    ("memfold-store", 1),
    ("memfold-stats", 1),
    ("memfold-swap", 2),
    ("memfold-run", 2),
    ("memfold", 3),
    ("memfold-remote", 4),
    ("memfold-block", 3),
    ("memfold-process", 4),
    ("memfold-ffi", 4),
    ("memfold-python", 4),
    ("memfold-preload", 5),
    ("memfold-cli", 6),
    ("memfold-testkit", BESIDE),
    ("memfold-bench", BESIDE),
    ("xtask", BESIDE),
    ("fuzz", BESIDE),
];
const BESIDE: u8 = u8::MAX;
const ROOF: u8 = 6;

/// Checks all manifests.
pub fn check(tree: &Tree) -> Vec<Finding> {
    tree.crates
        .iter()
        .flat_map(|krate| check_manifest(&krate.name, &krate.manifest_path, &krate.manifest))
        .collect()
}

fn check_manifest(name: &str, path: &str, manifest: &str) -> Vec<Finding> {
    let Some(floor) = floor(name) else {
        let message = format!("{name} has no floor: give it one in xtask/src/floors.rs");
        return vec![Finding::error(path, 0, message)];
    };
    dependencies(manifest)
        .into_iter()
        .filter_map(|dependency| {
            let wrong = wrong(name, floor, &dependency)?;
            Some(Finding::error(path, dependency.line, wrong))
        })
        .collect()
}

/// Returns what is wrong with a dependency, if anything.
fn wrong(name: &str, own: u8, dependency: &Dependency) -> Option<String> {
    let other = &dependency.name;
    let Some(theirs) = floor(other) else {
        let ours = other.starts_with("memfold");
        return ours.then(|| format!("{other} has no floor: give it one in xtask/src/floors.rs"));
    };
    if theirs == BESIDE {
        let allowed = dependency.dev || own == BESIDE;
        let message = "stands beside the floors: only dev-dependencies may name it";
        return (!allowed).then(|| format!("{other} {message}"));
    }
    let allowed = theirs < if own == BESIDE { ROOF } else { own };
    (!allowed)
        .then(|| format!("{name} may depend only on lower floors, and {other} is on floor {theirs}: turn it round"))
}

fn floor(name: &str) -> Option<u8> {
    FLOORS.iter().find(|(known, _)| *known == name).map(|(_, floor)| *floor)
}

struct Dependency {
    name: String,
    line: usize,
    dev: bool,
}

/// Returns the dependencies in a manifest, under all their tables, with `[dependencies.x]` and
/// `package = "x"`.
fn dependencies(manifest: &str) -> Vec<Dependency> {
    let mut found = Vec::new();
    let mut table = Vec::new();
    for (number, line) in manifest.lines().enumerate() {
        let line = line.trim();
        if let Some(header) = line.strip_prefix('[') {
            table = keys(header.trim_end_matches(']'));
            if let Some(kind) = table.iter().position(|key| is_dependencies(key))
                && let Some(name) = table.get(kind + 1)
            {
                found.push(Dependency {
                    name: name.clone(),
                    line: number + 1,
                    dev: table[kind].starts_with("dev"),
                });
            }
            continue;
        }
        let Some(kind) = table.last().filter(|key| is_dependencies(key)) else { continue };
        if let Some((key, value)) = line.split_once('=').filter(|_| !line.starts_with('#')) {
            let name = renamed(value).or_else(|| keys(key).into_iter().next()).unwrap_or_default();
            found.push(Dependency { name, line: number + 1, dev: kind.starts_with("dev") });
        }
    }
    found
}

fn is_dependencies(key: &str) -> bool {
    matches!(key, "dependencies" | "dev-dependencies" | "build-dependencies")
}

/// Returns the real name in `{ package = "name" }`.
fn renamed(value: &str) -> Option<String> {
    let (_, rest) = value.split_once("package")?;
    let (_, rest) = rest.split_once('"')?;
    rest.split_once('"').map(|(name, _)| name.to_owned())
}

/// Splits a dotted key at the dots outside quotes, and unquotes its parts.
fn keys(dotted: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut quote = None;
    for character in dotted.trim().chars() {
        match (quote, character) {
            (Some(open), _) if open == character => quote = None,
            (None, '"' | '\'') => quote = Some(character),
            (None, '.') => parts.push(String::new()),
            (None, ' ') => {}
            _ => parts.last_mut().expect("there is always one part").push(character),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(name: &str, manifest: &str) -> Vec<usize> {
        check_manifest(name, "Cargo.toml", manifest)
            .into_iter()
            .map(|finding| finding.line)
            .collect()
    }

    #[test]
    fn lower_floors_and_strangers_are_allowed() {
        assert!(
            found(
                "memfold",
                "[dependencies]\nmemfold-os.workspace = true\nmemfold-store = { path = \"x\" }"
            )
            .is_empty()
        );
        assert!(
            found(
                "memfold-os",
                "[dependencies]\nlibc = \"1\"\n[target.\"cfg(a.b)\".dependencies]\nx.workspace = true"
            )
            .is_empty()
        );
        assert!(found("memfold-cli", "[dependencies]\nmemfold-preload = \"1\"").is_empty());
        assert!(found("memfold-testkit", "[dependencies]\nmemfold.workspace = true").is_empty());
    }

    #[test]
    fn the_same_or_a_higher_floor_is_refused() {
        assert_eq!(
            found("memfold-store", "[dependencies]\nlibc = \"1\"\nmemfold.workspace = true"),
            [3]
        );
        assert_eq!(found("memfold-ffi", "[dependencies]\nmemfold-process.workspace = true"), [2]);
        assert_eq!(found("memfold-store", "[dependencies.memfold]\nworkspace = true"), [1]);
        assert_eq!(
            found(
                "memfold-store",
                "[target.'cfg(unix)'.dependencies]\nx = { package = \"memfold\" }"
            ),
            [2]
        );
        assert_eq!(found("memfold-store", "[build-dependencies]\nmemfold = \"1\""), [2]);
        assert_eq!(found("memfold-store", "[dev-dependencies]\nmemfold = \"1\""), [2]);
        assert_eq!(found("memfold-bench", "[dependencies]\nmemfold-cli = \"1\""), [2]);
    }

    #[test]
    fn crates_beside_the_floors_are_for_tests() {
        assert!(
            found("memfold", "[dev-dependencies]\nmemfold-testkit.workspace = true").is_empty()
        );
        assert_eq!(found("memfold", "[dependencies]\nmemfold-testkit.workspace = true"), [2]);
        assert_eq!(found("memfold-cli", "[dependencies]\nmemfold-testkit.workspace = true"), [2]);
        assert_eq!(found("memfold-preload", "[dependencies]\nmemfold-bench.workspace = true"), [2]);
        assert_eq!(found("memfold-cli", "[dependencies]\nmemfold-bench.workspace = true"), [2]);
    }

    #[test]
    fn every_crate_has_a_floor() {
        assert_eq!(found("memfold-new", ""), [0]);
        assert_eq!(found("memfold", "[dependencies]\nmemfold-new.workspace = true"), [2]);
    }

    #[test]
    fn comments_and_other_tables_are_passed_over() {
        assert!(
            found("memfold-os", "[features]\nmemfold = []\n[dependencies]\n# memfold = \"1\"")
                .is_empty()
        );
    }
}
