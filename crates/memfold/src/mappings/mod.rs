//! Mappings: what the owner of memory asks for, and what the program's calls mean for what is managed.
pub(crate) mod ranges;
mod advice;
mod managed;
pub(crate) mod release;
pub mod calls;

use crate::parts::walk;

walk! {
    /// What is managed, by address: hints, adoption, and calls that change mappings.
    pub struct Mappings
}
