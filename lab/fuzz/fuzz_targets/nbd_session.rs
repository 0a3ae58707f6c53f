//! Bytes as a client's whole session. See `memfold_block::nbd::fuzz::session`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| memfold_block::nbd::fuzz::session(data));
