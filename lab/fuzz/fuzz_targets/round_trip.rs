//! Pages through the save path and back. See `memfold_store::fuzz::round_trip`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| memfold_store::fuzz::round_trip(data));
