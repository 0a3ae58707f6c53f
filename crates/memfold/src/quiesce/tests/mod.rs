//! Tests of parts of this folder that have no public door.
mod copy_moment;
