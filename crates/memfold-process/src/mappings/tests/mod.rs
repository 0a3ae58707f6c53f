//! One file for each kind of call.
mod change;
