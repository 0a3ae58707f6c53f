//! `include/memfold.h` matches the source. MEMFOLD_WRITE_HEADER=1 writes it anew.
use std::path::Path;

/// Returns the header that cbindgen generates from the source, without the `# Safety` sections,
/// which are for callers in Rust. A C caller reads the sentences before them.
fn header() -> String {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut out = Vec::new();
    cbindgen::generate(directory).expect("cbindgen").write(&mut out);
    let text = String::from_utf8(out).expect("text");
    let text = text.replace("uint64_t memory)", "memfold_t memory)");
    let text = text
        .replace("uint64_t memory,", "memfold_t memory,")
        .replace("uint64_t *memory", "memfold_t *memory");
    let mut lines = Vec::new();
    let mut is_safety = false;
    for line in text.lines() {
        is_safety = (is_safety || line.trim() == "# Safety") && line.trim() != "*/";
        if is_safety {
            continue;
        }
        if line.trim() == "*/" && lines.last().is_some_and(|last: &&str| last.trim().is_empty()) {
            lines.pop();
        }
        lines.push(line);
    }
    lines.join("\n") + "\n"
}

#[test]
fn the_header_is_made_of_the_source() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/memfold.h");
    let want = header();
    if std::env::var_os("MEMFOLD_WRITE_HEADER").is_some() {
        std::fs::write(&path, &want).expect("writing the header");
    }
    let have = std::fs::read_to_string(&path).expect("include/memfold.h");
    assert!(
        have == want,
        "the source has changed: MEMFOLD_WRITE_HEADER=1 cargo test -p memfold-ffi --test header"
    );
}

/// Checks that every function is exported under its version, and that nothing else is.
#[test]
fn the_version_script_names_every_function() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = std::fs::read_to_string(directory.join("src/lib.rs")).expect("source");
    let script = std::fs::read_to_string(directory.join("memfold.map")).expect("memfold.map");
    let mut functions: Vec<&str> = source
        .lines()
        .filter_map(|line| line.split("extern \"C\" fn ").nth(1)?.split('(').next())
        .collect();
    let mut names: Vec<&str> = script
        .lines()
        .filter_map(|line| line.trim().strip_suffix(';'))
        .filter(|name| name.starts_with("memfold_"))
        .collect();
    functions.sort_unstable();
    names.sort_unstable();
    assert_eq!(functions, names);
}
