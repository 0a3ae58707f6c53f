//! `memfold dict train` writes a dictionary only if it improves compression, and refuses bad input
//! with one line.
use crate::common::{Scratch, assert_refused, binaries, memfold};
use memfold_testkit::random::Random;

/// Returns records with common words.
fn records(bytes: usize) -> Vec<u8> {
    let mut state = 1u32;
    let mut text = Vec::new();
    while text.len() < bytes {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        let key = ["customer_identifier", "payment_status", "delivery_address", "temperature"]
            [state as usize >> 16 & 3];
        text.extend(
            format!("{{\"{key}\": {}, \"source\": \"node-{}\"}}\n", state >> 5, state >> 27)
                .bytes(),
        );
    }
    text
}

#[test]
fn a_dictionary_is_trained_written_and_used_if_it_wins() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let (input, out) = (scratch.path("input"), scratch.path("out.dict"));
    std::fs::write(&input, records(4 << 20)).unwrap();
    for codec in ["lz4", "zstd:3"] {
        let arguments = ["dict", "train", "--codec", codec, "--out", &out, &input];
        let output = memfold(&bin, &arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        assert!(memfold_store::Dictionary::from_file(&std::fs::read(&out).unwrap()).is_ok());
        let arguments = ["run", "--limit", "64M", "--codec", codec, "--canned", &out, "--", "true"];
        let output = memfold(&bin, &arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        std::fs::remove_file(&out).unwrap();
    }
    let mut random = Random::new(1);
    let noise = std::iter::repeat_with(|| random.word() as u8);
    std::fs::write(&input, noise.take(1 << 20).collect::<Vec<u8>>()).unwrap();
    let arguments = ["dict", "train", "--out", &out, &input];
    let output = memfold(&bin, &arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(
        !std::path::Path::new(&out).exists()
            && String::from_utf8_lossy(&output.stdout).contains("not written")
    );
}

#[test]
fn bad_input_is_one_line() {
    let Some(bin) = binaries() else { return };
    let cases: &[(&[&str], &[&str])] = &[
        (&["/etc/passwd"], &["--out"]),
        (&["--out", "/tmp/x"], &["INPUT"]),
        (&["--out", "/tmp/x", "/nonexistent"], &["/nonexistent", "No such file"]),
        (&["--out", "/tmp/x", "/tmp"], &["/tmp", "not a regular file"]),
        (&["--out", "/tmp/x", "/etc/hostname"], &["only 0 blocks", "128.0 KiB"]),
        (
            &["--out", "/tmp/x", "--codec", "deflate", "/etc/passwd"],
            &["--codec", "deflate", "lz4 or zstd"],
        ),
        (&["--out", "/tmp/x", "--codec", "zstd:20", "/etc/passwd"], &["zstd:20", "-7 to 19"]),
        (&["--out", "/tmp/x", "--block", "5K", "/etc/passwd"], &["5K", "4K to 2M"]),
    ];
    for (flags, words) in cases {
        let arguments = [&["dict", "train"], *flags].concat();
        assert_refused(&memfold(&bin, &arguments).output().unwrap(), 125, words);
    }
}
