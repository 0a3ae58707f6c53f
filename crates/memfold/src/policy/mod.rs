//! Policy: how much to load, and which folios to keep. It does no I/O and knows no `Pager`.
pub mod workingset;
pub mod thrash;
pub mod stream_readahead;
pub mod swap_readahead;
