//! Blocks of numbers, encoded and decoded.
use super::*;
use crate::block::{BlockPacker, EncodeScratch, EncodedBlock};
use crate::codec::{CodecSpec, decoders};
use crate::format;
use crate::store::tests::{Pages, Random, corpus};
use memfold_os::units::Order;

/// Returns the size of a block of `words` by a plan, after comparing the decoded block; `None` if
/// it is refused.
fn size(spec: &str, plan: ShufflePlan, words: &[u8]) -> Option<usize> {
    let spec = CodecSpec::parse(spec).unwrap();
    let mut encoder = spec.encoder(words.len());
    let codes = spec.format() != format::NONE;
    let mut planes = vec![0; words.len()];
    let mut output = vec![0; words.len() + 4096];
    let src = CodecInput { at: words.as_ptr(), len: words.len() };
    // SAFETY: the words are borrowed, and the planes and the encoder made for as many.
    let size =
        unsafe { encode(&mut *encoder, codes, plan, src, &mut planes, &mut output).unwrap()? };
    let mut decoders = decoders();
    let decoder = &mut *decoders[spec.format() as usize];
    let mut back = vec![0xc3; words.len()];
    // SAFETY: this function owns the buffer.
    let outcome =
        unsafe { decode(decoder, &output[..size], &mut planes, CodecOutput::of(&mut back)) };
    assert_eq!(outcome, Ok(()));
    assert!(back == words, "{spec} {plan:?}");
    for part in [&output[..size - 1], &output[..size + 1], &[]] {
        // SAFETY: this function owns the buffer.
        let outcome = unsafe { decode(decoder, part, &mut planes, CodecOutput::of(&mut back)) };
        assert!(outcome.is_err(), "{spec} {plan:?}: of {size} bytes {} were read", part.len());
    }
    Some(size)
}

fn plans() -> impl Iterator<Item = ShufflePlan> {
    (0..=u8::MAX).filter_map(ShufflePlan::unpack)
}

#[test]
fn every_plan_gives_back_any_block() {
    assert_eq!(plans().count(), 8);
    let mut random = Random::new(3);
    for pages in [1, 2, 3, 4, 16] {
        let any: Vec<u8> = (0..pages * 4096).map(|_| random.word() as u8).collect();
        let small: Vec<u8> = any.iter().map(|byte| byte % 3).collect();
        let pattern = vec![7; pages * 4096];
        let rising: Vec<u8> =
            (0..pages as u64 * 512).flat_map(|i| (i * i + (7 << 50)).to_le_bytes()).collect();
        for plan in plans() {
            for spec in ["none", "lz4", "zstd", "deflate"] {
                let is_table = plan.words == PlaneWords::Table;
                assert_eq!(size(spec, plan, &any).is_none(), is_table, "{spec} {plan:?}");
                assert!(size(spec, plan, &small).is_some() || is_table);
                assert!(size(spec, plan, &pattern).unwrap() < 32, "{spec} {plan:?}");
                assert!(size(spec, plan, &rising).is_some() || is_table);
            }
        }
    }
}

#[test]
fn numbers_shrink_as_their_planes_say() {
    let mut random = Random::new(9);
    let mut row = 1u64 << 40;
    let rows: Vec<u8> = (0..2048)
        .flat_map(|_| {
            row += random.below(64) as u64;
            row.to_le_bytes()
        })
        .collect();
    let deltas = ShufflePlan { width: 8, words: PlaneWords::Deltas };
    assert!(size("zstd", deltas, &rows).unwrap() < 2048 + 32, "one plane of eight");
    let table = ShufflePlan { width: 4, words: PlaneWords::Table };
    let few: Vec<u8> =
        (0..4096).flat_map(|_| (random.below(200) as f32 / 127.0).to_le_bytes()).collect();
    assert!(size("none", table, &few).unwrap() < 4096 + 810, "a byte for each, and the table");
    // More words than a table holds.
    let many: Vec<u8> = (0..4096u32).flat_map(|i| (i % 257).to_le_bytes()).collect();
    assert_eq!(size("none", table, &many), None);
    let most: Vec<u8> = (0..4096u32).flat_map(|i| (i % 256).to_le_bytes()).collect();
    assert!(size("none", table, &most).is_some());
}

#[test]
fn block_that_does_not_fit_is_refused_without_an_error() {
    let words: Vec<u8> = (0..512u64).flat_map(|i| (i * i * i).to_le_bytes()).collect();
    let mut encoder = CodecSpec::default().encoder(words.len());
    let mut planes = vec![0; words.len()];
    let src = CodecInput { at: words.as_ptr(), len: words.len() };
    for plan in plans() {
        let mut whole = vec![0; 8192];
        // SAFETY: the words are borrowed, and the planes and the encoder were made for as many.
        let size =
            unsafe { encode(&mut *encoder, false, plan, src, &mut planes, &mut whole).unwrap() };
        let Some(size) = size else { continue };
        for room in [0, 1, 3, 9, 12, size - 1] {
            let mut output = vec![0xaa; size];
            // SAFETY: this function owns the buffer.
            let refusal = unsafe {
                encode(&mut *encoder, false, plan, src, &mut planes, &mut output[..room]).unwrap()
            };
            assert_eq!(refusal, None, "{plan:?} {room}");
            assert!(output[room..].iter().all(|byte| *byte == 0xaa));
        }
    }
}

/// Returns the size of blocks of 16 KiB, and how many were split.
fn stored(spec: &str, blocks: &[u8]) -> (usize, usize) {
    let (spec, order) = (CodecSpec::parse(spec).unwrap(), Order::new(2).unwrap());
    let (mut scratch, mut encoder) = (EncodeScratch::new(order), spec.encoder(order.bytes()));
    let mut sums = (0, 0);
    for bytes in blocks.chunks_exact(order.bytes()) {
        let mut block = Pages::new(order.pages());
        block.bytes_mut().copy_from_slice(bytes);
        let (format, shuffle) = (spec.format(), spec.shuffles());
        let packer = BlockPacker { encoder: &mut *encoder, format, dictionary: None, shuffle };
        // SAFETY: a whole block, page-aligned; scratch and encoder were made for it.
        let block_encoded = unsafe {
            crate::block::encode(&mut scratch, packer, block.bytes().as_ptr(), order).unwrap()
        };
        if let EncodedBlock::Object { format, head_len, len, .. } = block_encoded {
            sums.0 += head_len + len;
            sums.1 += format::shuffled(format).is_some() as usize;
        }
    }
    sums
}

#[test]
fn blocks_without_numbers_are_left_to_the_codec() {
    for spec in ["lz4", "zstd"] {
        let (baseline, none) = stored(spec, corpus());
        let (size, some) = stored(&format!("{spec}+shuffle"), corpus());
        assert!(none == 0 && some > 0, "{some} blocks of programs");
        assert!(
            size * 100 <= baseline * 102,
            "{spec}: {baseline} bytes become {size}, {some} blocks"
        );
    }
    let numbers: Vec<u8> = (0..1u64 << 15).flat_map(|i| (i * 24 + (i & 3)).to_le_bytes()).collect();
    let (baseline, _) = stored("zstd", &numbers);
    let (size, all) = stored("zstd+shuffle", &numbers);
    assert!(all == 16 && size * 4 < baseline, "{baseline} bytes become {size}");
}

/// Prints the speed of encoding and decoding a block of row numbers, and one with a table.
#[test]
#[ignore = "measures"]
fn measure() {
    let mut random = Random::new(9);
    let mut row = 0u64;
    let rows: Vec<u8> = (0..2048)
        .flat_map(|_| {
            row += random.below(64) as u64;
            row.to_le_bytes()
        })
        .collect();
    let few: Vec<u8> =
        (0..4096).flat_map(|_| (random.below(128) as f32 / 127.0).to_le_bytes()).collect();
    for (name, block) in [("rows", rows), ("few", few)] {
        for spec in ["none", "lz4", "zstd"] {
            let spec = CodecSpec::parse(spec).unwrap();
            let mut encoder = spec.encoder(block.len());
            let (mut planes, mut output) = (vec![0; block.len()], vec![0; block.len() + 4096]);
            let src = CodecInput { at: block.as_ptr(), len: block.len() };
            let (mut size, turns) = (0, 20_000);
            let start = std::time::Instant::now();
            for _ in 0..turns {
                // SAFETY: the words are borrowed, and the planes and the encoder were made for as
                // many.
                size = unsafe {
                    let plan = plan(src).unwrap();
                    let codes = spec.format() != format::NONE;
                    encode(&mut *encoder, codes, plan, src, &mut planes, &mut output)
                        .unwrap()
                        .unwrap()
                };
            }
            let encode_time = start.elapsed() / turns;
            let looks = std::time::Instant::now();
            for _ in 0..turns {
                // SAFETY: the words are borrowed, and the planes and the encoder were made for as
                // many.
                std::hint::black_box(unsafe { plan(src) });
            }
            let looked = looks.elapsed() / turns;
            let mut decoders = decoders();
            let decoder = &mut *decoders[spec.format() as usize];
            let mut back = vec![0; block.len()];
            let start = std::time::Instant::now();
            for _ in 0..turns {
                // SAFETY: this function owns the buffer.
                unsafe {
                    decode(decoder, &output[..size], &mut planes, CodecOutput::of(&mut back))
                        .unwrap()
                };
            }
            let decode_time = start.elapsed() / turns;
            println!(
                "{name} {spec}: {size} bytes, {encode_time:?} in, of it {looked:?} to look, {decode_time:?} out"
            );
        }
    }
}
