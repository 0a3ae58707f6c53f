//! Bytes as a client's requests. See `memfold_block::nbd::fuzz::requests`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| memfold_block::nbd::fuzz::requests(data));
