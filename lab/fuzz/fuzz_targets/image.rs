//! Bytes as an image of devices. See `memfold_block::image::fuzz::image`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| memfold_block::image::fuzz::image(data));
