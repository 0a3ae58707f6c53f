//! The programs that the program executes, and the environment that they are given.
pub mod environment;
pub mod way;
pub mod executes;
