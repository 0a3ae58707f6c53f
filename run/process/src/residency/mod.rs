//! What makes the program's memory resident: faults, holds of system calls, and loans to other
//! processes.
pub mod faults;
pub mod holds;
pub mod lender;
