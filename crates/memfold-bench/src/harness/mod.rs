//! What benchmarks run: memory, the phases over it, a child process that goes through them, and who
//! follows it.

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
