//! Mappings: the owner's requests, and the effect of the program's calls on managed memory.
pub(crate) mod ranges;
mod advice;
mod managed;
pub(crate) mod release;
pub mod calls;

use crate::parts::walk;

walk! {
    /// Changes managed memory, by address: hints, adoption, and calls that change mappings.
    pub struct Mappings
}
