//! One file for each kind of call.
mod advice;
mod change;
mod given;
mod remap;
