//! Tests of the swap file over a device and a store in memory, with faults on purpose.
mod fork;
mod objects;
