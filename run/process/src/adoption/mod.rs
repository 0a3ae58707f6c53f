//! Which memory comes under management, and when.
pub mod growth;
mod adopt;
