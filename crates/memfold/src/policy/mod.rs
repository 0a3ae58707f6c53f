//! Policy: how much to load, and what to keep. It does no I/O and knows no `Pager`.
pub mod workingset;
pub mod thrash;
pub mod stream_readahead;
pub mod swap_readahead;
