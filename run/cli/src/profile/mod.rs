//! A profile of a run: which functions touch folded memory. Samples are taken by `recorder` during
//! the run, and get names and become files at its end.
mod elf_file;
mod python;
mod process;
mod recording;
mod symbols;
mod tables;
mod flame;
mod outputs;
pub mod recorder;
