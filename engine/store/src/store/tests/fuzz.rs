//! The fuzz targets on mutations of valid inputs, the same ones each time. `lab/fuzz` runs them for
//! longer.
use super::*;
use crate::codec::CODECS;
use crate::fuzz;
use memfold_testkit::mutations::feed;

#[test]
fn any_bytes_decode_to_an_error_or_a_block_and_nothing_else() {
    feed(11, fuzz::decode, &fuzz::seeds(), 6000);
}

#[test]
fn any_bytes_are_a_page_of_lines_to_all_forms_or_to_none() {
    let seeds = fuzz::delta_seeds();
    feed(11, fuzz::delta, &seeds, 4000);
}

#[test]
fn any_pages_come_back() {
    let seeds: Vec<Vec<u8>> =
        (0..40u8).map(|i| (0..200).map(|j| (i ^ (j / 3)).wrapping_mul(i)).collect()).collect();
    feed(11, fuzz::round_trip, &seeds, 300);
    // Every level of zstd on one block, twice, because AddressSanitizer reported level 11 (see
    // lab/fuzz/README.md).
    let zstd = CODECS.iter().position(|codec| codec.name == "zstd").unwrap() as u8;
    for level in (0..27).chain(0..27) {
        let input = [
            zstd, level, 0x79, 0x79, 0x79, 0xd6, 0x7e, 0xb5, 0x3c, 0x05, 0xe2, 0xe2, 0xe2, 0xe2,
            0x44, 0x0a,
        ];
        fuzz::round_trip(&input);
    }
}

#[test]
fn any_text_is_a_codec_or_refused() {
    let seeds = ["lz4:8", "zstd:-7", "deflate", "none:", ":1", "lz4hc:99999999999"]
        .map(|s| s.as_bytes().to_vec());
    feed(11, fuzz::spec, &seeds, 3000);
}

#[test]
fn any_bytes_are_a_dictionary_or_refused() {
    let content: Vec<u8> = (0..600u32).map(|i| ((i * i) >> 4) as u8).collect();
    let raw = Dictionary::new(DictionaryKind::Raw, content.clone()).unwrap().to_file();
    let zstd = [&0xEC30_A437u32.to_le_bytes()[..], &content].concat();
    let zstd = Dictionary::new(DictionaryKind::Zstd, zstd).unwrap().to_file();
    feed(11, fuzz::dictionary, &[raw, zstd], 3000);
}
