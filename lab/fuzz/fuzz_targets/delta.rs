//! A page, or the payload of one, for the codec `delta`. See `memfold_store::fuzz::delta`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| memfold_store::fuzz::delta(data));
