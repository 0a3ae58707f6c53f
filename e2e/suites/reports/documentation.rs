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
