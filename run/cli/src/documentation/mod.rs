//! Completions and man pages. Both are generated from the command line that clap parses, so they
//! have every flag.
pub mod completions;
pub mod man;
#[cfg(test)]
mod reference;
