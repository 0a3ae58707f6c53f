//! Policy: how much to load, what to keep, and who gets what share. It does no I/O and knows no
//! `Pager`.
pub mod fair_share;
pub mod workingset;
pub mod thrash;
pub mod stream_readahead;
pub mod swap_readahead;
