//! Tests of each codec alone.
use super::*;
use memfold_testkit::random::Random;

const BLOCK: usize = 1 << 21;

/// Returns text-like bytes that compress, from a small generator.
fn words(len: usize) -> Vec<u8> {
    let mut state = 1u32;
    let mut out = Vec::new();
    while out.len() < len {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        out.extend_from_slice(format!("key{} = {};\n", state >> 24, state >> 18 & 0xff).as_bytes());
    }
    out.truncate(len);
    out
}

fn specs() -> Vec<CodecSpec> {
    let names = [
        "none",
        "lz4",
        "lz4:8",
        "lz4:65537",
        "zstd",
        "zstd:-7",
        "zstd:-1",
        "zstd:3",
        "zstd:6",
        "zstd:19",
    ];
    let more =
        ["lz4hc", "lz4hc:2", "lz4hc:3", "deflate", "deflate:6", "deflate:9", "deflate:12", "delta"];
    names.iter().chain(&more).map(|n| CodecSpec::parse(n).unwrap()).collect()
}

#[test]
fn every_codec_gives_back_its_input_at_every_page_multiple() {
    let raw = words(BLOCK);
    let mut decoders = decoders();
    let mut output = vec![0; BLOCK];
    let mut back = vec![0; BLOCK];
    for spec in specs() {
        let mut encoder = spec.encoder(BLOCK);
        for pages in [1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 64, 65, 128, 511, 512] {
            if pages > 64 && (spec.level() == 19 || spec.level() == 12) {
                continue; // slow in debug builds
            }
            let len = pages * 4096;
            // SAFETY: the three buffers are distinct and BLOCK bytes long, and len <= BLOCK.
            let size = unsafe {
                encoder.encode(
                    CodecInput { at: raw.as_ptr(), len },
                    CodecOutput { at: output.as_mut_ptr(), len },
                    None,
                )
            };
            let Some(size) = size.unwrap() else {
                assert!(
                    spec.format() == format::NONE || spec.level() > 1000,
                    "{spec} {pages} pages"
                );
                continue;
            };
            if pages > 1 && spec.level() < 1000 {
                assert!(size < len * 3 / 4, "{spec} {pages} pages: {size}");
            }
            back.fill(0);
            let decoder = &mut decoders[spec.format() as usize];
            // SAFETY: the three buffers are distinct and BLOCK bytes long; size <= BLOCK.
            unsafe {
                decoder.decode(
                    CodecInput { at: output.as_ptr(), len: size },
                    CodecOutput { at: back.as_mut_ptr(), len },
                    None,
                )
            }
            .unwrap();
            assert!(back[..len] == raw[..len], "{spec} {pages} pages");
            // SAFETY: the three buffers are distinct and BLOCK bytes long; size <= BLOCK.
            let short = unsafe {
                decoder.decode(
                    CodecInput { at: output.as_ptr(), len: size - 1 },
                    CodecOutput { at: back.as_mut_ptr(), len },
                    None,
                )
            };
            assert!(short.is_err(), "{spec}: a truncated input was accepted");
        }
    }
}

#[test]
fn block_that_does_not_fit_is_refused_without_an_error() {
    let mut random = Random::new(1);
    let random: Vec<u8> = (0..16384).map(|_| random.word() as u8).collect();
    let mut output = vec![0xaa; 16384];
    for spec in specs() {
        let mut encoder = spec.encoder(16384);
        // SAFETY: distinct buffers of 16384 bytes; room is smaller.
        let size = unsafe {
            encoder.encode(
                CodecInput { at: random.as_ptr(), len: 16384 },
                CodecOutput { at: output.as_mut_ptr(), len: 15360 },
                None,
            )
        };
        assert_eq!(size, Ok(None), "{spec}");
        assert!(output[15360..].iter().all(|b| *b == 0xaa), "{spec} wrote past its room");
        let text = words(16384);
        // SAFETY: distinct buffers of 16384 bytes; room is smaller.
        let size = unsafe {
            encoder.encode(
                CodecInput { at: text.as_ptr(), len: 16384 },
                CodecOutput { at: output.as_mut_ptr(), len: 15360 },
                None,
            )
        };
        let shrinks = spec.format() != format::NONE && spec.level() < 1000;
        assert!(
            size.is_ok_and(|size| size.is_some() == shrinks),
            "{spec}: the next block: {size:?}"
        );
    }
}

#[test]
fn garbage_is_an_error_or_wrong_bytes_but_stays_in_bounds() {
    let mut random = Random::new(7);
    let mut decoders = decoders();
    let mut out = vec![0xaau8; 4096 + 64];
    for _ in 0..2000 {
        let garbage: Vec<u8> = (0..200).map(|_| random.word() as u8).collect();
        for decoder in &mut decoders {
            // SAFETY: `out` has more than 4096 bytes and does not overlap `garbage`.
            let _ = unsafe {
                decoder.decode(
                    CodecInput { at: garbage.as_ptr(), len: 200 },
                    CodecOutput { at: out.as_mut_ptr(), len: 4096 },
                    None,
                )
            };
        }
        assert!(out[4096..].iter().all(|b| *b == 0xaa));
    }
}
