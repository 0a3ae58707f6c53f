//! `memfold completions` and `memfold man` cover the whole command line.
use crate::common::{Scratch, assert_refused, binaries, memfold};
use std::path::Path;
use std::process::Command;

fn printed(bin: &Path, arguments: &[&str]) -> String {
    let output = memfold(bin, arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns what bash completes for a line without bash-completion, sorted.
fn completed(script: &str, words: &[&str]) -> Vec<String> {
    let last = words.last().unwrap();
    let before = words[words.len() - 2];
    let line = format!(
        "{script}\nCOMP_WORDS=({}) COMP_CWORD={}\n_memfold_or_command memfold '{last}' '{before}'\n\
         printf '%s\\n' \"${{COMPREPLY[@]}}\"",
        words.iter().map(|word| format!("'{word}' ")).collect::<String>(),
        words.len() - 1,
    );
    let output = Command::new("bash").args(["-c", &line]).output().unwrap();
    let mut lines: Vec<String> =
        String::from_utf8(output.stdout).unwrap().lines().map(str::to_string).collect();
    lines.sort();
    lines.dedup();
    lines
}

#[test]
fn bash_completes_subcommands_flags_and_the_program() {
    let Some(bin) = binaries() else { return };
    let script = printed(&bin, &["completions", "bash"]);
    assert_eq!(completed(&script, &["memfold", "unw"]), ["unwrap"]);
    assert_eq!(completed(&script, &["memfold", "run", "--lim"]), ["--limit"]);
    assert_eq!(completed(&script, &["memfold", "blk", "com"]), ["compact"]);
    assert_eq!(completed(&script, &["memfold", "run", "--", "printf"]), ["printf"]);
    assert_eq!(completed(&script, &["memfold", "--versi"]), ["--version"]);
}

#[test]
fn zsh_and_fish_scripts_have_every_subcommand_and_flag() {
    let Some(bin) = binaries() else { return };
    for shell in ["zsh", "fish"] {
        let script = printed(&bin, &["completions", shell]);
        for word in ["unwrap", "jupyter", "swap-encrypt", "stats-file", "writeback"] {
            assert!(script.contains(word), "{shell}: no {word}");
        }
    }
    let output = memfold(&bin, &["completions", "tcsh"]).output().unwrap();
    assert_refused(&output, 125, &["tcsh", "bash, zsh, fish"]);
}

#[test]
fn each_subcommand_has_a_man_page() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let directory = scratch.path("man1");
    assert_refused(
        &memfold(&bin, &["man", &directory]).output().unwrap(),
        125,
        &["man1", "No such"],
    );
    std::fs::create_dir(&directory).unwrap();
    assert_eq!(printed(&bin, &["man", &directory]), "");
    let page = |name: &str| std::fs::read_to_string(format!("{directory}/{name}.1")).unwrap();
    assert!(page("memfold").contains("memfold\\-jupyter(1)"), "{}", page("memfold"));
    for name in ["memfold", "memfold-run", "memfold-man"] {
        assert!(!page(name).contains("EXTRA"), "{}", page(name));
    }
    assert!(page("memfold-run").contains("\n.SH NOTES\n"), "{}", page("memfold-run"));
    assert!(page("memfold").contains("memfold completions bash"), "{}", page("memfold"));
    assert!(page("memfold-run").contains("\\-\\-swap\\-encrypt"), "{}", page("memfold-run"));
    assert!(
        page("memfold-blk-set").contains(".TH memfold-blk-set 1"),
        "{}",
        page("memfold-blk-set")
    );
}

/// Returns the documents and the texts that packages install, with their paths.
fn documents() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let entries = std::fs::read_dir(root.join("docs")).unwrap().flatten();
    let docs = entries.map(|entry| format!("docs/{}", entry.file_name().to_str().unwrap()));
    let others = ["README.md", "CONTRIBUTING.md", "bindings/memfold/README.md"];
    docs.chain(others.map(str::to_string))
        .filter(|path| path.ends_with(".md"))
        .map(|path| (path.clone(), std::fs::read_to_string(root.join(path)).unwrap()))
        .collect()
}

/// Returns the commands of `memfold` in a document, as words after its name: those in code blocks, and
/// those in code spans. A command ends at `--` and at what ends it in a shell.
fn commands(text: &str) -> Vec<Vec<String>> {
    let mut is_block = false;
    let mut codes = Vec::new();
    // A backslash continues a line.
    for line in text.replace("\\\n", " ").lines() {
        if line.trim_start().starts_with("```") {
            is_block = !is_block;
        } else if is_block {
            codes.push(line.to_string());
        } else {
            codes.extend(line.split('`').skip(1).step_by(2).map(str::to_string));
        }
    }
    let ends =
        |word: &str| matches!(word, "--" | "|" | "||" | "&&" | ";" | ">" | "#" | "…" | "...");
    codes
        .iter()
        .filter_map(|code| {
            // What follows two spaces, or a semicolon, is no part of the command.
            let code = code.trim().split("  ").next()?.split("; ").next()?;
            let words: Vec<&str> = code.split_whitespace().collect();
            let at = words.iter().position(|word| word.rsplit('/').next() == Some("memfold"))?;
            // Words before are a prompt, variables, or a program that runs it.
            let rest = words[at + 1..].iter().take_while(|word| !ends(word));
            Some(rest.map(|word| word.to_string()).collect())
        })
        .collect()
}

/// Returns the help of the subcommand that a command begins with, or `None` if it names none.
fn help_of(bin: &Path, command: &[String]) -> Option<String> {
    let is_name = |word: &&String| word.chars().all(|c| c.is_ascii_lowercase() || c == '-');
    let names: Vec<&str> = command
        .iter()
        .take(3)
        .take_while(is_name)
        .filter(|word| !word.starts_with('-'))
        .map(String::as_str)
        .collect();
    (1..=names.len()).rev().find_map(|count| {
        let output = memfold(bin, &[&names[..count], &["--help"]].concat()).output().unwrap();
        (output.status.code() == Some(0)).then(|| String::from_utf8(output.stdout).unwrap())
    })
}

#[test]
fn commands_in_the_documents_name_only_flags_that_there_are() {
    let Some(bin) = binaries() else { return };
    let (mut helps, mut count) = (std::collections::HashMap::new(), 0);
    let mut wrong = Vec::new();
    for (path, text) in documents() {
        for command in commands(&text) {
            let flags: Vec<&str> = command
                .iter()
                .filter(|word| word.starts_with("--") && word.len() > 2)
                .map(|word| word.trim_end_matches(|c: char| !c.is_alphanumeric()))
                .map(|word| word.split(['=', '[', '|', ']']).next().unwrap())
                .collect();
            if flags.is_empty() || command[0].starts_with('-') {
                continue;
            }
            let key: Vec<String> = command.iter().take(3).cloned().collect();
            let help = helps.entry(key).or_insert_with(|| help_of(&bin, &command));
            for flag in flags {
                count += 1;
                let has = |help: &String| {
                    help.split_whitespace().any(|word| word.trim_end_matches(',') == flag)
                };
                if !help.as_ref().is_some_and(has) {
                    wrong.push(format!("{path}: {flag} in `memfold {}`", command.join(" ")));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "no such flags:\n{}", wrong.join("\n"));
    assert!(count > 100, "only {count} flags were found");
}
