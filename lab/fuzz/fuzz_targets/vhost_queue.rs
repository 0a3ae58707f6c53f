//! A guest's memory of any bytes, its queue first. See `memfold_block::vhost::fuzz::queue`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| memfold_block::vhost::fuzz::queue(data));
