//! The programs that the program executes, and the environment that they are given.
pub mod environment;
pub mod method;
pub mod executes;
