//! The four parts of a corpus: shared libraries, a pickled Python heap, JSON, floats.

use crate::common::refusal::Refusal;
use memfold_testkit::random::Sequence as Random;
use std::fmt::Write as _;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A single library provides at most one in this many bytes of the part, so that a huge file can't
/// fill it.
const LIBRARY_SHARES: usize = 8;

/// Returns `bytes` of this machine's shared libraries, largest first (by name where equal), and the
/// number of files used.
pub fn libraries(bytes: usize) -> anyhow::Result<(Vec<u8>, usize)> {
    let mut paths = Vec::new();
    for root in ["/usr/lib", "/lib", "/usr/lib64", "/lib64", "/usr/local/lib"] {
        if let Ok(root) = fs::canonicalize(root) {
            find_libraries(&root, 0, &mut paths);
        }
    }
    paths.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
    paths.dedup();
    let mut part = Vec::with_capacity(bytes);
    let mut files = 0;
    for (_, path) in &paths {
        let count = (bytes / LIBRARY_SHARES).min(bytes - part.len());
        let Ok(file) = fs::File::open(path) else { continue };
        if file.take(count as u64).read_to_end(&mut part).is_ok() {
            files += 1;
        }
        if part.len() >= bytes {
            return Ok((part, files));
        }
    }
    let len = part.len();
    Err(Refusal::Corpus(format!(
        "only {len} bytes of shared libraries found on this machine, needs {bytes}"
    ))
    .into())
}

fn find_libraries(dir: &Path, depth: usize, found: &mut Vec<(u64, PathBuf)>) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        let Ok(meta) = entry.metadata() else { continue };
        let name = entry.file_name().to_string_lossy().into_owned();
        if meta.is_dir() && depth < 8 {
            find_libraries(&path, depth + 1, found);
        } else if meta.is_file() && (name.ends_with(".so") || name.contains(".so.")) {
            found.push((meta.len(), path));
        }
    }
}

const PICKLE_SCRIPT: &str = r#"
import pickle, random, sys
want = int(sys.argv[1])
r = random.Random(20240229)
syllables = [a + b for a in "b c d f g k l m n p r s t v st tr".split() for b in "a e i o u ai or en".split()]
words = ["".join(r.choice(syllables) for _ in range(r.randint(1, 4))) for _ in range(6000)]
def word():
    return words[min(int(r.expovariate(1 / 700)), len(words) - 1)]
class Node:
    def __init__(self, key, left, right):
        self.key, self.left, self.right, self.colour = key, left, right, r.choice("rb")
def tree(depth):
    return None if depth == 0 or r.random() < 0.1 else Node(r.getrandbits(40), tree(depth - 1), tree(depth - 1))
sent = 0
number = 0
while sent < want:
    rows = []
    for _ in range(400):
        number += 1
        rows.append({
            "id": number, "name": word().title() + " " + word().title(), "mail": word() + "@" + word() + ".org",
            "balance": round(r.gauss(1000, 300), 2), "tags": [word() for _ in range(r.randint(0, 6))],
            "text": " ".join(word() for _ in range(r.randint(5, 40))), "parent": r.randint(0, number),
            "flags": (r.random() < 0.5, None, r.getrandbits(16)), "key": r.getrandbits(128).to_bytes(16, "little")})
    block = pickle.dumps((rows, tree(9), {word(): r.random() for _ in range(300)}), protocol=4)
    sys.stdout.buffer.write(block)
    sent += len(block)
"#;

/// Returns `bytes` of pickled Python objects (rows, trees, tables of words), made by python3 from a
/// fixed seed.
pub fn pickled_heap(bytes: usize) -> anyhow::Result<Vec<u8>> {
    let refuse = |why: String| Refusal::Corpus(format!("the pickled heap needs python3: {why}"));
    let mut python = Command::new("python3")
        .args(["-", &bytes.to_string()])
        .env("PYTHONHASHSEED", "0")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| refuse(e.to_string()))?;
    python.stdin.take().expect("piped above").write_all(PICKLE_SCRIPT.as_bytes())?;
    let output = python.wait_with_output()?;
    if !output.status.success() {
        return Err(refuse(format!("its script ended with {}", output.status)).into());
    }
    let mut part = output.stdout;
    if part.len() < bytes {
        return Err(refuse(format!("it wrote {} bytes of {bytes}", part.len())).into());
    }
    part.truncate(bytes);
    Ok(part)
}

/// Returns `bytes` of JSON lines as in a web service's log.
pub fn json_text(bytes: usize, seed: u64) -> Vec<u8> {
    const VERBS: [&str; 5] = ["GET", "GET", "POST", "PUT", "DELETE"];
    const PATHS: [&str; 6] =
        ["/api/v2/orders", "/api/v2/users", "/login", "/static/app.js", "/search", "/health"];
    const AGENTS: [&str; 4] =
        ["Mozilla/5.0 (X11; Linux x86_64)", "curl/8.5.0", "okhttp/4.12", "Mozilla/5.0 (Macintosh)"];
    let mut random = Random::new(seed);
    let mut text = String::with_capacity(bytes + 1024);
    let mut time_ms = 1_700_000_000_000u64;
    while text.len() < bytes {
        time_ms += random.below(250) as u64;
        let (verb, path) = (VERBS[random.below(5)], PATHS[random.below(6)]);
        let agent = AGENTS[random.below(4)];
        let status = [200, 200, 200, 200, 201, 304, 404, 500][random.below(8)];
        let latency = (random.normal() * 0.8 + 3.0).exp();
        let _ = write!(
            text,
            "{{\"time\":{time_ms},\"level\":\"info\",\"request\":{{\"method\":\"{verb}\",\"path\":\"{path}/{}\",\
             \"agent\":\"{agent}\",\"id\":\"{:016x}\"}},\"status\":{status},\"latency_ms\":{latency:.3},\
             \"client\":\"10.{}.{}.{}\",\"items\":[",
            random.below(100_000),
            random.word(),
            random.below(4),
            random.below(256),
            random.below(256),
        );
        for item in 0..random.below(6) {
            let comma = if item == 0 { "" } else { "," };
            let price = random.below(50_000) as f64 / 100.0;
            let _ = write!(
                text,
                "{comma}{{\"sku\":\"A{:05}\",\"price\":{price:.2},\"qty\":{}}}",
                random.below(30_000),
                1 + random.below(9)
            );
        }
        text.push_str("]}\n");
    }
    let mut part = text.into_bytes();
    part.truncate(bytes);
    part
}

/// Returns `bytes` of arrays of 64 KiB, f64 and f32 in turn: smooth series with noise, readings of
/// a 12-bit converter, and running counts. The noise of the first kind is incompressible, as in
/// real measurements.
pub fn floats(bytes: usize, seed: u64) -> Vec<u8> {
    const ARRAY: usize = 64 << 10;
    let mut random = Random::new(seed);
    let mut part = Vec::with_capacity(bytes + ARRAY);
    let mut kind = 0u64;
    while part.len() < bytes {
        let wide = kind.is_multiple_of(2);
        let count = ARRAY / if wide { 8 } else { 4 };
        let phase = random.unit();
        let mut level = random.unit() * 100.0;
        for i in 0..count {
            let smooth = (i as f64 / 300.0 + phase).sin() * 20.0 + level;
            let value = match kind / 2 % 3 {
                0 => smooth + random.normal() * 0.01,
                1 => ((smooth + random.normal()) * 16.0).round() / 16.0,
                _ => level.round(),
            };
            level +=
                if kind / 2 % 3 == 2 { random.below(4) as f64 } else { random.normal() * 0.05 };
            if wide {
                part.extend_from_slice(&value.to_le_bytes());
            } else {
                part.extend_from_slice(&(value as f32).to_le_bytes());
            }
        }
        kind += 1;
    }
    part.truncate(bytes);
    part
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeded_parts_are_reproducible_and_have_the_given_length() {
        for bytes in [1000, 200_000] {
            assert_eq!(json_text(bytes, 1), json_text(bytes, 1));
            assert_eq!(floats(bytes, 1), floats(bytes, 1));
            assert_eq!((json_text(bytes, 1).len(), floats(bytes, 1).len()), (bytes, bytes));
        }
        assert_ne!(json_text(1000, 1), json_text(1000, 2));
    }

    #[test]
    fn json_lines_parse() {
        let text = String::from_utf8(json_text(50_000, 3)).unwrap();
        let whole = &text[..text.rfind('\n').unwrap()];
        assert!(whole.lines().count() > 50);
        for line in whole.lines() {
            serde_json::from_str::<serde_json::Value>(line).unwrap();
        }
    }

    #[test]
    fn a_pickled_heap_is_the_same_every_time() {
        let heap = pickled_heap(300_000).unwrap();
        assert_eq!(heap.len(), 300_000);
        assert_eq!(heap, pickled_heap(300_000).unwrap());
    }
}
