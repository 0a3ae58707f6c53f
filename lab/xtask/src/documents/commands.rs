//! The commands of `memfold` in the documents have only subcommands and flags that its help names.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::finding::Finding;
use crate::tree::Tree;

use super::code::codes;

/// Checks the commands of all documents by the help of the built `memfold`.
pub fn check(root: &Path, memfold: &Path) -> Result<Vec<Finding>> {
    let version = Command::new(memfold).arg("--version").output();
    version.with_context(|| format!("can't run {}", memfold.display()))?;
    let (findings, count) = check_by(&Tree::read(root)?, |names| help(memfold, names));
    ensure!(count > 100, "the documents have only {count} flags of memfold: correct this check");
    Ok(findings)
}

/// Returns what `memfold NAMES... --help` prints, or `None` if it fails.
fn help(memfold: &Path, names: &[&str]) -> Option<String> {
    let output = Command::new(memfold).args(names).arg("--help").output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the findings and the number of flags.
fn check_by(tree: &Tree, help: impl Fn(&[&str]) -> Option<String>) -> (Vec<Finding>, usize) {
    let (mut helps, mut findings, mut count) = (HashMap::new(), Vec::new(), 0);
    for (path, text) in &tree.documents {
        for code in codes(text) {
            let Some(words) = command(&code.text) else { continue };
            let flags = flags(&words);
            if flags.is_empty() || words[0].starts_with('-') {
                continue;
            }
            let names = names(&words);
            let text = helps.entry(names.join(" ")).or_insert_with(|| help_of(&names, &help));
            count += flags.len();
            findings.extend(flags.iter().filter(|flag| !has(text.as_deref(), flag)).map(|flag| {
                let message = format!("`memfold {}` has no {flag}: correct it", words.join(" "));
                Finding::error(path, code.line, message)
            }));
        }
    }
    (findings, count)
}

/// Returns the words after `memfold`, up to `--` or to where the command ends in a shell.
fn command(code: &str) -> Option<Vec<&str>> {
    let ends =
        |word: &str| matches!(word, "--" | "|" | "||" | "&&" | ";" | ">" | "#" | "…" | "...");
    // Two spaces or a semicolon end the command.
    let code = code.trim().split("  ").next()?.split("; ").next()?;
    let words: Vec<&str> = code.split_whitespace().collect();
    // Words before it are a prompt, variables, or a program that runs it.
    let at = words.iter().position(|word| word.rsplit('/').next() == Some("memfold"))?;
    Some(words[at + 1..].iter().copied().take_while(|word| !ends(word)).collect())
}

fn flags<'a>(words: &[&'a str]) -> Vec<&'a str> {
    let flags = words.iter().filter(|word| word.starts_with("--") && word.len() > 2);
    flags
        .map(|word| word.trim_end_matches(|c: char| !c.is_alphanumeric()))
        .filter_map(|word| word.split(['=', '[', '|', ']']).next())
        .collect()
}

/// Returns the words that may be names of subcommands.
fn names<'a>(words: &[&'a str]) -> Vec<&'a str> {
    let is_name = |word: &&str| {
        !word.starts_with('-') && word.chars().all(|c| c.is_ascii_lowercase() || c == '-')
    };
    words.iter().copied().take(3).take_while(is_name).collect()
}

/// Returns the help of the subcommand that these words begin with.
fn help_of(names: &[&str], help: &impl Fn(&[&str]) -> Option<String>) -> Option<String> {
    (1..=names.len()).rev().find_map(|count| help(&names[..count]))
}

fn has(help: Option<&str>, flag: &str) -> bool {
    help.is_some_and(|help| help.split_whitespace().any(|word| word.trim_end_matches(',') == flag))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(document: &str) -> Vec<usize> {
        let documents = vec![("docs/one.md".into(), document.into())];
        let help = |names: &[&str]| match names {
            ["run"] => Some("  -l, --limit SIZE\n  --swap DIR".to_owned()),
            ["blk", "set"] => Some("  --unix PATH".to_owned()),
            _ => None,
        };
        let (findings, _) = check_by(&Tree::of_documents(documents), help);
        findings.iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn flags_of_subcommands_exist() {
        let right = "`memfold run --limit 1G -- sort --no` `sort --no` `memfold run` `x run --no`
`memfold blk set a.img --unix=p` `a; memfold run --swap d; b --no`
```sh
$ sudo ./memfold run --limit=1G \\
    --swap d | sort --no
```";
        assert_eq!(lines(right), [0usize; 0]);
        assert_eq!(lines("a\n`memfold run --limits 1G`"), [2]);
        assert_eq!(lines("```\nmemfold run \\\n  --no\n```"), [2]);
        assert_eq!(lines("`memfold gone --limit 1G`"), [1], "no such subcommand");
        assert_eq!(lines("`memfold blk set --swap d`"), [1], "a flag of another subcommand");
    }
}
