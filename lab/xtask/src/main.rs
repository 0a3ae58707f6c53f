//! Checks of the workspace that rustc, clippy and rustfmt don't make.
//!
//! `cargo xtask tidy` reads the sources and manifests; `cargo xtask symbols LIBRARY` reads a built
//! preload library; `cargo xtask commands MEMFOLD` compares its help with the documents; `cargo xtask api` reads the pages of the public crate. Each finding is one line, `file:line: what is wrong and what to do`; any error
//! makes the exit status 1.

mod finding;
mod scan;
mod source;
mod tree;

mod floors;
mod order;
mod sizes;
mod symbols;
mod text;
mod locks;
mod documents;
mod api;

use std::path::Path;
use std::process::ExitCode;

use finding::Finding;

const USAGE: &str = "\
usage: cargo xtask tidy                 check floors, module order, folders, lengths, no_std, locks, leftovers and documents
       cargo xtask symbols LIBRARY.so   check that the preload library needs no thread-local storage and no host malloc
       cargo xtask commands MEMFOLD     check that the commands in the documents have only flags that this memfold has
       cargo xtask api DOC [--write]  check what the crate memfold exports, by its pages in DOC, against bindings/memfold/api.txt, or write that
       cargo xtask glibc FILE VERSION   check that a built file needs no glibc newer than that, such as 2.17";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let findings = match words[..] {
        ["tidy"] => tidy(),
        ["commands", memfold] => {
            tree::root().and_then(|root| documents::commands::check(&root, Path::new(memfold)))
        }
        ["symbols", library] => symbols::check(Path::new(library)),
        ["api", pages] => tree::root().and_then(|root| api::check(&root, Path::new(pages), false)),
        ["api", pages, "--write"] => {
            tree::root().and_then(|root| api::check(&root, Path::new(pages), true))
        }
        ["glibc", file, version] => symbols::check_glibc(Path::new(file), version),
        ["help" | "-h" | "--help"] => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match findings {
        Ok(findings) => finding::report(words[0], findings),
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn tidy() -> anyhow::Result<Vec<Finding>> {
    let tree = tree::Tree::read(&tree::root()?)?;
    let mut findings = floors::check(&tree);
    findings.extend(order::check(&tree));
    findings.extend(sizes::check(&tree));
    findings.extend(text::check(&tree));
    findings.extend(locks::check(&tree));
    findings.extend(documents::check(&tree));
    Ok(findings)
}
