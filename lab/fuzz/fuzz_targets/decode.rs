//! Bytes of a stored object, of any format. See `memfold_store::fuzz::decode`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| memfold_store::fuzz::decode(data));
