//! Floors and rooms: which crates a crate may depend on.
//!
//! Every ordinary and build dependency of a crate on another crate of this workspace must be on a
//! lower floor, and in a room that the crate's room may use. A dev-dependency must be on a lower floor
//! or beside the floors. Only crates beside the floors (of `lab` and `e2e`) have ordinary dependencies
//! on each other.

use crate::finding::Finding;
use crate::tree::{Crate, Tree};

/// Every crate and its floor; `BESIDE` stands for none.
const FLOORS: &[(&str, u8)] = &[
    ("memfold-os", 0),
    ("memfold-gate", 1),
    ("memfold-store", 1),
    ("memfold-stats", 1),
    ("memfold-swap", 2),
    ("memfold-run", 2),
    ("memfold-engine", 3),
    ("memfold", 4),
    ("memfold-remote", 5),
    ("memfold-block", 3),
    ("memfold-process", 4),
    ("memfold-ffi", 5),
    ("memfold-python", 5),
    ("memfold-preload", 5),
    ("memfold-cli", 6),
    ("memfold-testkit", BESIDE),
    ("memfold-bench", BESIDE),
    ("memfold-programs", BESIDE),
    ("memfold-simulate", BESIDE),
    ("xtask", BESIDE),
    ("memfold-fuzz", BESIDE),
    ("memfold-e2e", BESIDE),
];
const BESIDE: u8 = u8::MAX;
const ROOF: u8 = 6;

/// The rooms, folders at the top of the tree, and the other rooms that the crates of each may use. The
/// crates of `lab` and `e2e` may use all.
const ROOMS: &[(&str, &[&str])] = &[
    ("engine", &[]),
    ("run", &["engine"]),
    ("bindings", &["engine"]),
    ("block", &["engine", "bindings"]),
    ("remote", &["engine", "bindings"]),
];
/// Dependencies that no room allows: the command has the other rooms behind its subcommands, the gate
/// also delivers faults of the library's regions, and the Python package reads a run's request.
const DOORS: &[(&str, &str)] = &[
    ("memfold-cli", "memfold-block"),
    ("memfold-cli", "memfold-remote"),
    ("memfold-engine", "memfold-gate"),
    ("memfold-python", "memfold-run"),
];

/// Checks all manifests.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let rooms: Vec<(&str, &str)> =
        tree.crates.iter().map(|krate| (krate.name.as_str(), room(&krate.manifest_path))).collect();
    let of_rooms =
        |krate: &Crate| check_room(&krate.name, &krate.manifest_path, &krate.manifest, &rooms);
    tree.crates
        .iter()
        .flat_map(|krate| {
            let mut findings = check_manifest(&krate.name, &krate.manifest_path, &krate.manifest);
            findings.extend(of_rooms(krate));
            findings
        })
        .collect()
}

/// Returns the room of a file.
fn room(path: &str) -> &str {
    path.split('/').next().unwrap_or_default()
}

/// Checks the rooms of the dependencies of a manifest; `rooms` are those of all crates.
fn check_room(name: &str, path: &str, manifest: &str, rooms: &[(&str, &str)]) -> Vec<Finding> {
    let own = room(path);
    let Some((_, allowed_rooms)) = ROOMS.iter().find(|(known, _)| *known == own) else {
        return Vec::new();
    };
    let of = |dependency: &str| rooms.iter().find(|(known, _)| *known == dependency);
    dependencies(manifest)
        .into_iter()
        .filter(|dependency| !dependency.dev && !DOORS.contains(&(name, &dependency.name)))
        .filter_map(|dependency| {
            let theirs = of(&dependency.name)?.1;
            let message = format!("{own}/ may not use {theirs}/, where {} is", dependency.name);
            let is_right = theirs == own || allowed_rooms.contains(&theirs);
            (!is_right).then(|| Finding::error(path, dependency.line, message))
        })
        .collect()
}

fn check_manifest(name: &str, path: &str, manifest: &str) -> Vec<Finding> {
    let Some(floor) = floor(name) else {
        let message = format!("{name} has no floor: give it one in lab/xtask/src/floors.rs");
        return vec![Finding::error(path, 0, message)];
    };
    dependencies(manifest)
        .into_iter()
        .filter_map(|dependency| {
            let message = wrong(name, floor, &dependency)?;
            Some(Finding::error(path, dependency.line, message))
        })
        .collect()
}

/// Returns what is wrong with a dependency, if anything.
fn wrong(name: &str, own: u8, dependency: &Dependency) -> Option<String> {
    let other = &dependency.name;
    let Some(theirs) = floor(other) else {
        let ours = other.starts_with("memfold");
        return ours
            .then(|| format!("{other} has no floor: give it one in lab/xtask/src/floors.rs"));
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
    let mut edges = Vec::new();
    let mut table = Vec::new();
    for (number, line) in manifest.lines().enumerate() {
        let line = line.trim();
        if let Some(header) = line.strip_prefix('[') {
            table = keys(header.trim_end_matches(']'));
            if let Some(kind) = table.iter().position(|key| is_dependencies(key))
                && let Some(name) = table.get(kind + 1)
            {
                edges.push(Dependency {
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
            edges.push(Dependency { name, line: number + 1, dev: kind.starts_with("dev") });
        }
    }
    edges
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
        assert_eq!(found("memfold-ffi", "[dependencies]\nmemfold-preload.workspace = true"), [2]);
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
    fn room_uses_only_the_rooms_that_it_may() {
        let rooms = [
            ("memfold-os", "engine"),
            ("memfold-gate", "run"),
            ("memfold-block", "block"),
            ("memfold-testkit", "lab"),
        ];
        let findings_of = |name: &str, path: &str, dependency: &str, table: &str| {
            let manifest = format!("[{table}]\n{dependency}.workspace = true\nlibc = \"1\"");
            check_room(name, path, &manifest, &rooms).len()
        };
        let table = "dependencies";
        assert_eq!(findings_of("memfold-gate", "run/gate/Cargo.toml", "memfold-os", table), 0);
        assert_eq!(findings_of("memfold-gate", "run/gate/Cargo.toml", "memfold-block", table), 1);
        assert_eq!(findings_of("memfold-block", "block/Cargo.toml", "memfold-gate", table), 1);
        assert_eq!(
            findings_of("memfold-engine", "engine/engine/Cargo.toml", "memfold-gate", table),
            0
        );
        assert_eq!(
            findings_of("memfold-store", "engine/store/Cargo.toml", "memfold-gate", table),
            1
        );
        assert_eq!(findings_of("memfold-os", "engine/os/Cargo.toml", "memfold-testkit", table), 1);
        let table = "dev-dependencies";
        assert_eq!(findings_of("memfold-os", "engine/os/Cargo.toml", "memfold-testkit", table), 0);
        assert_eq!(findings_of("memfold-bench", "lab/bench/Cargo.toml", "memfold-block", table), 0);
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
