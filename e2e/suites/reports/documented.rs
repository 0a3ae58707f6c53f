//! Every command of `memfold` in the documents works as it is written, with stand-ins for the programs
//! that it names.
use crate::common::{Holder, Scratch, binaries, compile};
use std::env;
use std::path::Path;
use std::process::{Command, Output};

/// The documents, in an order in which what one makes is there for the next.
const DOCUMENTS: [&str; 6] = [
    "README.md",
    "docs/usage.md",
    "docs/agents.md",
    "docs/reports.md",
    "docs/places.md",
    "docs/python.md",
];

/// Parts of commands that are not run here, each with the reason.
const NOT_RUN: [(&str, &str); 5] = [
    ("--remote", "it needs a server; e2e/suites/storage runs such commands"),
    ("--listen", "it does not end; metrics.rs runs it"),
    ("--service", "it needs systemd; `make recipes` runs it"),
    ("srun", "it needs Slurm; `make recipes` runs it"),
    ("memfold stat 9959", "it is an example with its output"),
];

/// Returns the commands in the blocks of code of a document: lines that begin with `memfold`, also after
/// a prompt. Two spaces end a command; a semicolon and a space part two.
fn commands(document: &str) -> Vec<String> {
    let mut is_code = false;
    let mut all = Vec::new();
    for line in document.lines() {
        if line.starts_with("```") {
            is_code = !is_code;
            continue;
        }
        let line = line.strip_prefix("$ ").unwrap_or(line);
        if !is_code || !line.starts_with("memfold ") {
            continue;
        }
        // In a list of commands, more may follow after a semicolon and blanks.
        let parts = line.split(';').map(|part| part.trim_start());
        let parts = parts.map(|part| part.split("  ").next().unwrap_or_default().trim());
        let is_command = |part: &&str| part.starts_with("memfold ") && !part.contains(": ");
        all.extend(parts.filter(is_command).map(str::to_string));
    }
    all
}

/// Returns a command with values for its placeholders, without brackets, and with sizes for any machine.
fn filled(command: &str, pid: u32) -> String {
    let rest = match command {
        "memfold top" => " --once".to_string(),
        // Runs of other tests may be there.
        "memfold explain" => format!(" {pid}"),
        _ => String::new(),
    };
    let words = command.split(' ').map(|word| match word.trim_matches(['[', ']']) {
        "PID" | "14909" => pid.to_string(),
        "KERNEL.JSON" => "kernel.json".to_string(),
        "DIR" => "kernels".to_string(),
        size if size.len() == 2 && size.ends_with('G') => size.replace('G', "00M"),
        word => word.to_string(),
    });
    let words: Vec<String> = words.collect();
    words.join(" ") + &rest
}

/// Makes stand-ins for the programs and files of the documents.
fn prepare(scratch: &Scratch) {
    let program = "#!/bin/sh\nexit 0\n";
    for name in ["node", "java", "python3", "app"] {
        scratch.file(name, program, 0o755);
    }
    scratch.file("kernel.json", r#"{"argv": ["node", "{connection_file}"]}"#, 0o644);
    std::fs::create_dir_all(scratch.0.join(".venv/bin")).unwrap();
    scratch.file(".venv/bin/python", program, 0o755);
}

fn run_in(scratch: &Scratch, bin: &Path, command: &str) -> Output {
    let others = env::var("PATH").unwrap_or_default();
    let path = format!("{}:{}:{others}", scratch.0.display(), bin.display());
    Command::new("sh")
        .args(["-c", command])
        .current_dir(&scratch.0)
        .env("PATH", path)
        .env("HOME", &scratch.0)
        .env("XDG_RUNTIME_DIR", &scratch.0)
        .env_remove("XDG_DATA_HOME")
        .env_remove("JUPYTER_DATA_DIR")
        .output()
        .unwrap()
}

#[test]
fn commands_of_the_documents_work_as_they_are_written() {
    let Some(bin) = binaries() else { return };
    let bin = bin.canonicalize().unwrap();
    let (program, scratch) = (compile("holder"), Scratch::new());
    prepare(&scratch);
    let mut holder = Holder::start(&bin, &scratch, &["--limit", "64M"], &program.path, "96");
    // What is folded is loaded, so that there is something to report.
    holder.check();
    let (mut failures, mut count, mut left_out) = (Vec::new(), 0, [false; NOT_RUN.len()]);
    for document in DOCUMENTS {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(document);
        for command in commands(&std::fs::read_to_string(path).unwrap()) {
            if let Some(at) = NOT_RUN.iter().position(|(part, _)| command.contains(part)) {
                left_out[at] = true;
                continue;
            }
            let filled = filled(&command, holder.runner.id());
            // Each of these commands makes the same file, and replaces none.
            let _ = std::fs::remove_dir_all(scratch.0.join(".local/share/jupyter"));
            let output = run_in(&scratch, &bin, &filled);
            count += 1;
            if !output.status.success() {
                let why = String::from_utf8_lossy(&output.stderr).into_owned();
                failures.push(format!("{document}: {filled}: {why}"));
            }
        }
    }
    holder.end();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(count >= 40, "only {count} commands were found");
    let unused = NOT_RUN.iter().zip(left_out).filter(|(_, is_used)| !is_used);
    assert_eq!(unused.map(|(one, _)| one.0).collect::<Vec<_>>(), [""; 0], "no document has these");
}
