//! Runs each benchmark at its smallest size, as a user calls it.
use crate::common::{Scratch, assert_refused, benchmarks, binaries, json, memfold};

#[test]
fn usemem_finds_every_byte_of_every_task() {
    let Some(bin) = benchmarks() else { return };
    let scratch = Scratch::new();
    let out = scratch.path("usemem.json");
    let arguments = [
        "bench", "usemem", "-n", "2", "-w", "-O", "-r", "2", "16M", "--limit", "10M", "--json",
        &out,
    ];
    let output = memfold(&bin, &arguments)
        .args(["--peer", "memfold:zstd:64k+verify", "--check"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let peer = &json(&out)["peers"][0];
    assert_eq!(peer["bytes_wrong"], 0);
    assert!(
        peer["out_mb_s"]["median"].as_f64().unwrap() > 0.0
            && peer["in_mb_s"]["median"].as_f64().unwrap() > 0.0
    );
    assert!(peer["counters"]["zswpout_64K"].as_u64().unwrap() > 0, "{peer}");
}

#[test]
fn a_report_is_written_compared_and_put_into_a_file() {
    let Some(bin) = benchmarks() else { return };
    let scratch = Scratch::new();
    let (first, second, readme) =
        (scratch.path("first"), scratch.path("second"), scratch.path("readme"));
    let arguments = ["bench", "report", "--quick", "--only", "blocks", "--out", &first];
    let output = memfold(&bin, &arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    std::fs::write(&readme, "before\n<!-- report:begin -->\n<!-- report:end -->\nafter\n").unwrap();
    let earlier = format!("{first}/report.json");
    let arguments =
        ["bench", "report", "--from", &earlier, "--against", &earlier, "--out", &second];
    let output = memfold(&bin, &arguments).args(["--readme", &readme]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let page = std::fs::read_to_string(format!("{second}/report.html")).unwrap();
    assert!(page.contains("Ratio by block size") && page.contains("deflate, blocks of 16K"));
    let against =
        json(&format!("{second}/report.json"))["against"][0].as_str().unwrap().to_string();
    assert!(against.ends_with("figures compared, 0 differ by more than 15%"), "{against}");
    let text = std::fs::read_to_string(&readme).unwrap();
    assert!(
        text.starts_with("before\n")
            && text.ends_with("after\n")
            && text.contains("Requirements: "),
        "{text}"
    );
}

#[test]
fn error_about_nonsense_is_one_line() {
    let Some(bin) = benchmarks() else { return };
    let scratch = Scratch::new();
    let out = scratch.path("out");
    let assert_refusal = |arguments: &[&str], why: &str| {
        assert_refused(&memfold(&bin, arguments).output().unwrap(), 64, &[why]);
    };
    assert_refusal(
        &["bench", "report", "--only", "everything", "--out", &out],
        "no benchmark 'everything'",
    );
    assert_refusal(&["bench", "usemem", "--peer", "memfold:lz4:3k"], "unknown peer");
    assert_refusal(
        &["bench", "usemem", "-n", "2", "16M", "--limit", "64M"],
        "--limit must be smaller",
    );
    assert_refusal(&["bench", "usemem", "-n", "0"], "-n must be");
    let output = memfold(&bin, &["bench", "apps", "--resident", "8M"]).output().unwrap();
    assert_refused(&output, 125, &["not provided: <CMD>"]);
}

#[test]
fn help_shows_benchmarks_under_the_called_name() {
    let Some(bin) = benchmarks() else { return };
    let output_of = |arguments: &[&str]| {
        let output = memfold(&bin, arguments).output().unwrap();
        assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0), "{arguments:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    for arguments in [&["bench", "--help"][..], &["bench", "help"], &["help", "bench"]] {
        let help = output_of(arguments);
        assert!(
            help.contains("Usage: memfold bench <COMMAND>") && help.contains("  usemem "),
            "{help}"
        );
        assert!(!help.contains("child"), "{help}");
    }
    for arguments in
        [&["bench", "walk", "--help"][..], &["bench", "help", "walk"], &["help", "bench", "walk"]]
    {
        let help = output_of(arguments);
        assert!(
            help.contains("Usage: memfold bench walk [OPTIONS]") && help.contains("--no-memfold"),
            "{help}"
        );
    }
    let nothing = memfold(&bin, &["bench"]).output().unwrap();
    assert_eq!((nothing.status.code(), nothing.stdout.len()), (Some(125), 0));
    assert_refused(&memfold(&bin, &["bench", "dance"]).output().unwrap(), 125, &["dance"]);
    assert_refused(
        &memfold(&bin, &["bench", "walk", "--size", "much"]).output().unwrap(),
        125,
        &["'much'"],
    );
}

#[test]
fn without_the_benchmarks_one_line_says_how_to_build_them() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    scratch.file("memfold", std::fs::read(bin.join("memfold")).unwrap(), 0o755);
    for arguments in [&["bench", "walk", "--quick"][..], &["bench", "--help"], &["help", "bench"]] {
        let output = memfold(&scratch.0, arguments).env("PATH", &scratch.0).output().unwrap();
        assert_refused(&output, 125, &["memfold-bench", "cargo build --release -p memfold-bench"]);
    }
    // A program named memfold-bench in PATH, not the one beside the command.
    let script = scratch.file("elsewhere", "#!/bin/sh\necho $0 \"$@\"\n", 0o755);
    let directory = scratch.path("bin");
    std::fs::create_dir(&directory).unwrap();
    std::fs::rename(script, format!("{directory}/memfold-bench")).unwrap();
    let output = memfold(&scratch.0, &["bench", "walk", "--size", "1G"])
        .env("PATH", &directory)
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.ends_with("walk --size 1G\n"), "{text:?}");
}
