//! What benchmarks run: memory, the phases over it, a child process that runs them, and the parent
//! that follows it.

pub mod plain;
pub mod region;
pub mod workload;
pub mod message;
pub mod runner;
pub mod stats_file;
pub mod zram_run;
pub mod file_run;
pub mod report;
pub mod brief;
