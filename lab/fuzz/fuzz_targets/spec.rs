//! Text as a codec's name. See `memfold_store::fuzz::spec`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| memfold_store::fuzz::spec(data));
