//! Arrows: which file of a crate uses which other, and whether they all lead down.
//!
//! `lib.rs`, and the `mod.rs` of a folder, list their modules bottom first. A module uses only what
//! is listed above it, a folder being one module to those beside it. Between a `mod.rs` and the
//! modules that it lists both ways are good: it may be made of them, or they of it. But no files
//! may reach each other in a circle, and no folders. Tests are free. Crates that are not layered
//! yet answer only for paths between the modules of their `lib.rs`.
//!
//! Seen are paths (`use` lines, types, expressions, patterns), each followed through re-exports to
//! the file that defines the item, and calls of methods, followed to the file with their `impl`
//! block. For these the receiver's type is worked out from what is written: `self`, parameters,
//! fields, `let`s, what functions of the crate return, and the common containers and guards of std.
//! A method of a receiver that stays unknown is followed if one type only of the crate has a method
//! of that name, and std has none.
//!
//! Not seen: fields, operators, conversions, `Drop` and other calls that nobody writes; calls
//! through a trait of the crate (they lead to the trait); inside macros that aren't given
//! expressions, all but paths and methods of `self`; receivers whose type comes from a type
//! parameter's argument, from a closure of several parameters, or from another crate's functions.

mod arrow;
mod modules;
mod names;
mod types;
mod methods;
mod scope;
mod bodies;
mod circles;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use crate::finding::Finding;
use crate::tree::{Crate, Tree};
use arrow::{Arrow, Found};
use methods::Tables;
use modules::Modules;

/// Checks all crates that have a `lib.rs` or `main.rs`.
pub fn check(tree: &Tree) -> Vec<Finding> {
    tree.crates.iter().flat_map(check_crate).collect()
}

fn check_crate(krate: &Crate) -> Vec<Finding> {
    let modules = match Modules::read(krate) {
        Ok(Some(modules)) => modules,
        Ok(None) => return Vec::new(),
        Err(finding) => return vec![finding],
    };
    let arrows = bodies::read(&Tables::new(&modules)).arrows;
    let told = arrows
        .iter()
        .filter(|arrow| krate.is_layered() || !arrow.call && is_outermost(&modules, arrow));
    let wrong = told.filter_map(|arrow| {
        let (own, other) = upward(&modules, arrow)?;
        let message = format!(
            "{own} uses {}, of {other}, which is listed below it: move the code down, or the `mod` line up",
            arrow.what
        );
        Some(Finding::error(&modules.source(arrow.from).path, arrow.line, message))
    });
    let mut findings: Vec<Finding> = wrong.collect();
    if krate.is_layered() {
        findings.extend(circles(&modules, &arrows).iter().map(|circle| {
            let message = format!(
                "{}: see `cargo xtask tidy --arrows {}`",
                circle.title(&modules),
                krate.name
            );
            Finding::error(&krate.sources[circle.files[0]].path, 0, message)
        }));
    }
    findings
}

/// Lists the arrows of the crate `name`, and what of them leads up or round in a circle.
///
/// # Errors
/// No such crate, or one that can't be read.
pub fn list(tree: &Tree, name: &str) -> anyhow::Result<String> {
    let krate = tree.crates.iter().find(|krate| krate.name == name);
    let krate = krate.ok_or_else(|| anyhow::anyhow!("no crate {name}"))?;
    let modules = Modules::read(krate).map_err(|finding| anyhow::anyhow!("{finding}"))?;
    let modules =
        modules.ok_or_else(|| anyhow::anyhow!("{name} has no src/lib.rs and no src/main.rs"))?;
    Ok(text(&modules, &bodies::read(&Tables::new(&modules))))
}

fn text(modules: &Modules, found: &Found) -> String {
    let arrows = &found.arrows;
    let mut text = String::new();
    let mut part = |title: &str, arrows: &[&Arrow]| {
        let _ = writeln!(text, "{title}");
        for ((from, to), names) in by_file(modules, arrows) {
            let (from, to) = (modules.file_name(from), modules.file_name(to));
            let _ = writeln!(
                text,
                "  {from} -> {to}: {}",
                names.into_iter().collect::<Vec<_>>().join(", ")
            );
        }
    };
    let all: Vec<&Arrow> = arrows.iter().collect();
    part("arrows (lines of each)", &all);
    let up: Vec<&Arrow> = arrows.iter().filter(|arrow| upward(modules, arrow).is_some()).collect();
    part("upward", &up);
    let circles = circles(modules, arrows);
    for circle in &circles {
        let arrows: Vec<&Arrow> =
            arrows.iter().filter(|arrow| circle.holds(modules, arrow)).collect();
        part(&circle.title(modules), &arrows);
    }
    let _ = writeln!(text, "calls that may go to another file and are not followed");
    let skipped: BTreeSet<_> = found
        .skipped
        .iter()
        .map(|(module, line, name)| (modules.all[*module].file, *line, name))
        .collect();
    for (file, line, name) in skipped {
        let _ = writeln!(text, "  {}:{line}: {name}()", modules.file_name(file));
    }
    let (between, upward) = (by_file(modules, &all).len(), by_file(modules, &up).len());
    let _ = writeln!(
        text,
        "{between} arrows between files, {upward} upward, {} circles",
        circles.len()
    );
    text
}

/// What each file uses of each other, with the lines.
fn by_file(modules: &Modules, arrows: &[&Arrow]) -> BTreeMap<(usize, usize), BTreeSet<String>> {
    let mut lines: BTreeMap<_, BTreeMap<String, BTreeSet<usize>>> = BTreeMap::new();
    for arrow in arrows {
        let name = if arrow.call { format!("{}()", arrow.what) } else { arrow.what.clone() };
        lines.entry(files(modules, arrow)).or_default().entry(name).or_default().insert(arrow.line);
    }
    let told = |(name, lines): (String, BTreeSet<usize>)| {
        format!("{name} {}", lines.iter().map(usize::to_string).collect::<Vec<_>>().join(" "))
    };
    lines.into_iter().map(|(files, names)| (files, names.into_iter().map(told).collect())).collect()
}

fn files(modules: &Modules, arrow: &Arrow) -> (usize, usize) {
    (modules.all[arrow.from].file, modules.all[arrow.to].file)
}

/// Files or folders that use each other.
struct Circle {
    /// A file of each.
    files: Vec<usize>,
    /// The folders' modules, if they are folders.
    folders: Vec<usize>,
}

impl Circle {
    fn title(&self, modules: &Modules) -> String {
        let names: Vec<&str> = self.files.iter().map(|&file| modules.file_name(file)).collect();
        let kind = if self.folders.is_empty() { "files" } else { "folders" };
        format!("a circle of {} {kind}: {}", names.len(), names.join(", "))
    }

    /// Whether an arrow is a part of it.
    fn holds(&self, modules: &Modules, arrow: &Arrow) -> bool {
        if self.folders.is_empty() {
            return [arrow.from, arrow.to]
                .iter()
                .all(|&module| self.files.contains(&modules.all[module].file));
        }
        // The outer one comes first, as modules are numbered before what lies in them.
        let parent = self.folders[0];
        units(modules, parent, arrow)
            .is_some_and(|(from, to)| self.folders.contains(&from) && self.folders.contains(&to))
    }
}

/// Circles of files, and those between a folder's `mod.rs` and what lies in it, each taken as one,
/// that are no circle of files. Among modules beside each other there are none without an arrow
/// that leads up.
fn circles(modules: &Modules, arrows: &[Arrow]) -> Vec<Circle> {
    let between = arrows.iter().map(|arrow| files(modules, arrow)).collect();
    let of_files = circles::find(modules.krate.sources.len(), &between);
    let mut found: Vec<Circle> =
        of_files.iter().map(|files| Circle { files: files.clone(), folders: Vec::new() }).collect();
    for parent in 0..modules.all.len() {
        let level = arrows.iter().filter(|arrow| upward(modules, arrow).is_none());
        let between = level.filter_map(|arrow| units(modules, parent, arrow)).collect();
        for folders in circles::find(modules.all.len(), &between) {
            let files: Vec<usize> =
                folders.iter().map(|&module| modules.all[module].file).collect();
            if !of_files.iter().any(|known| files.iter().all(|file| known.contains(file))) {
                found.push(Circle { files, folders });
            }
        }
    }
    found
}

/// The modules that an arrow joins as seen from `parent`: its children, each with all that lies in
/// it, and `parent` itself for the rest of its file. `None` if it lies within one of them, or
/// elsewhere.
fn units(modules: &Modules, parent: usize, arrow: &Arrow) -> Option<(usize, usize)> {
    let unit = |module: usize| {
        let line = modules.ancestry(module);
        let place = line.iter().position(|&inner| inner == parent)?;
        let child = line
            .get(place + 1)
            .copied()
            .filter(|&child| modules.all[child].file != modules.all[parent].file);
        Some(child.unwrap_or(parent))
    };
    let (from, to) = (unit(arrow.from)?, unit(arrow.to)?);
    (from != to).then_some((from, to))
}

/// Whether an arrow leads from one module of the crate's root to another.
fn is_outermost(modules: &Modules, arrow: &Arrow) -> bool {
    modules.ancestry(arrow.from).get(1) != modules.ancestry(arrow.to).get(1)
}

/// The two modules beside each other of which the upper one is used by the lower one, if the arrow
/// leads up.
fn upward(modules: &Modules, arrow: &Arrow) -> Option<(String, String)> {
    let (from, to) = (modules.ancestry(arrow.from), modules.ancestry(arrow.to));
    let common = from.iter().zip(&to).take_while(|(from, to)| from == to).count();
    // One lies in the other: no floor is above the other.
    let (own, other) = (*from.get(common)?, *to.get(common)?);
    let children = &modules.all[from[common - 1]].children;
    let place = |module: usize| children.iter().position(|&child| child == module);
    let name = |module: usize| modules.all[module].path.join("::");
    (place(other) > place(own)).then(|| (name(own), name(other)))
}
