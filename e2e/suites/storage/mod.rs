//! Swap files and remote stores.
mod remote;
mod swap;
mod swapped;
