//! Shared by all benchmarks: numbers, sizes, tables, rows and their verdicts.

pub mod refusal;
pub mod size;
pub mod latency;
pub mod summary;
pub mod table;
pub mod verdict;
pub mod row;
pub mod output;
