//! docs/reference.md, made from the command lines that clap parses and from the tables of settings,
//! codecs and columns.
use crate::run::help::wrapped_at;
use crate::top::{columns, keys_of_screen};
use clap::{Arg, Command};
use memfold_engine::config::keys::{Audience, KEYS, SettingKey};
use std::path::Path;

const WRITE: &str = "MEMFOLD_WRITE";
/// Subcommands whose pages are elsewhere.
const ELSEWHERE: [&str; 2] = ["bench", "help"];
/// Columns of text in blocks.
const BLOCK_COLUMNS: usize = 120;

const HEAD: &str = "\
# Reference

All commands, flags, settings, codecs and columns. This page is made from the tables in the code by `MEMFOLD_WRITE=1 cargo test -p memfold-cli
reference`. [usage.md](usage.md) says what to use when, [messages.md](messages.md) explains messages, and [counters.md](counters.md) has every
counter.
";

fn row(cells: &[&str]) -> String {
    let plain =
        |cell: &&str| cell.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|");
    format!("| {} |\n", cells.iter().map(plain).collect::<Vec<_>>().join(" | "))
}

fn table(head: &[&str], rows: impl Iterator<Item = String>) -> String {
    let rows: String = rows.collect();
    if rows.is_empty() {
        return rows;
    }
    format!("\n{}|{}\n{rows}", row(head), "---|".repeat(head.len()))
}

fn settings(is_shown: fn(&SettingKey) -> bool) -> String {
    let keys = KEYS.iter().filter(|key| is_shown(key));
    let rows =
        keys.map(|key| row(&[&format!("`--{} {}`", key.name, key.value), key.default, key.help]));
    table(&["flag", "default", "what it sets"], rows)
}

/// Returns the flags and arguments of a command, without settings and those of the command that it
/// extends.
fn arguments(command: &Command, extended: Option<&Command>) -> String {
    let is_known = |arg: &Arg| {
        let is_same = |other: &Arg| other.get_id() == arg.get_id();
        arg.is_hide_set()
            || arg.get_id() == "help" && extended.is_none() && command.get_name() != "run"
            || KEYS.iter().any(|key| {
                arg.get_id() == key.name && command.get_name() != "set" && extended.is_some()
            })
            || extended.is_some_and(|run| run.get_arguments().any(is_same))
    };
    let own = command.get_arguments().filter(|arg| !is_known(arg));
    let rows = own.map(|arg| {
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let defaults = arg.get_default_values().iter().map(|value| value.to_string_lossy());
        let default =
            defaults.filter(|_| arg.get_action().takes_values()).collect::<Vec<_>>().join(" ");
        let help = if default.is_empty() { help } else { format!("{help} [default: {default}]") };
        row(&[&format!("`{}`", form(arg)), &help])
    });
    table(&["argument", "what it does"], rows)
}

/// Returns an argument as it is written: `--limit SIZE`, `--summary[=curve]`, `PID`.
fn form(arg: &Arg) -> String {
    let value = arg.get_value_names().map(|names| names[0].to_string());
    let takes_value = arg.get_action().takes_values();
    match (arg.get_long(), value.filter(|_| takes_value)) {
        (Some(long), Some(value)) if arg.is_require_equals_set() => format!("--{long}[={value}]"),
        (Some(long), Some(value)) => format!("--{long} {value}"),
        (Some(long), None) => format!("--{long}"),
        (None, value) => value.unwrap_or_else(|| format!("-{}", arg.get_short().unwrap_or('?'))),
    }
}

fn block(text: &str) -> String {
    let lines: Vec<String> = text.trim_end().lines().map(shortened).collect();
    if lines.is_empty() { String::new() } else { format!("\n```text\n{}\n```\n", lines.join("\n")) }
}

/// Breaks a long line. Shorter ones keep their indentation.
fn shortened(line: &str) -> String {
    if line.len() <= BLOCK_COLUMNS { line.to_owned() } else { wrapped_at(line, BLOCK_COLUMNS) }
}

/// Returns the sections of a command and its subcommands.
fn sections(command: &Command, path: &str, run: &Command) -> String {
    let name = format!("{path} {}", command.get_name());
    let extended = ["record", "check"].contains(&command.get_name()).then_some(run);
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ");
    let mut out = format!("\n## {name}\n{about}.\n\n```text\n{usage}\n```\n");
    if command.get_name() == "run" && path == "memfold" {
        out += &settings(|key| key.audience == Audience::Users);
        out += "\nSettings for measurements:\n";
        out += &settings(|key| key.audience == Audience::Measuring);
        out += "\nFlags that are no settings:\n";
        out += &arguments(command, Some(&Command::new("none")));
    } else {
        out += &arguments(command, extended);
    }
    let after = command.get_after_long_help().or(command.get_after_help());
    let after = after.map(ToString::to_string).unwrap_or_default();
    // What `record` and `check` add is in their own short help.
    out += &block(&after);
    if name == "memfold top" {
        out += &table(&["column", "what it is"], columns().map(titled));
        out += &table(&["key", "what it does"], keys_of_screen().map(titled));
    }
    let below = command.get_subcommands().filter(|one| !ELSEWHERE.contains(&one.get_name()));
    out + &below.map(|one| sections(one, &name, run)).collect::<String>()
}

fn titled((title, help): (&str, &str)) -> String {
    row(&[&format!("`{title}`"), help])
}

fn page() -> String {
    let mut root = crate::command();
    root.build();
    let run = crate::run::command();
    let shown = root.get_subcommands().filter(|one| !ELSEWHERE.contains(&one.get_name()));
    let all: String = shown.map(|one| sections(one, "memfold", &run)).collect();
    format!("{HEAD}{all}")
}

#[test]
fn reference_is_made_from_the_tables() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference.md");
    let wanted = page();
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(&path, &wanted).expect("it can be written");
    }
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        text == wanted,
        "docs/reference.md is old. Run: {WRITE}=1 cargo test -p memfold-cli reference"
    );
}
