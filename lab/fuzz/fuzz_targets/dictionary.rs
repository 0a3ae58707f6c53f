//! Bytes as a dictionary file. See `memfold_store::fuzz::dictionary`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| memfold_store::fuzz::dictionary(data));
