//! What the program executes, and what that is given.
pub mod environment;
pub mod executes;
