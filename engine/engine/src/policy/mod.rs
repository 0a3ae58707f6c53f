//! Policy: how much to load, and which folios to keep. It does no I/O and knows no `Pager`.
//! `memfold bench policy` calls the same code on page traces of programs.
pub mod workingset;
pub mod eviction;
pub mod first_touches;
pub mod thrash;
pub mod slowdown;
pub mod stream_readahead;
pub mod swap_readahead;
