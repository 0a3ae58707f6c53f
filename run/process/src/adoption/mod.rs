//! Which memory comes under management, and when.
mod growth;
mod adopt;
pub mod look;

use crate::program::{ManagedProgram, ProgramAccount, ProgramMemory, ProgramThreads};
use memfold_engine::pager::Pager;

/// What takes the program's memory under management, and gives it back.
#[derive(Copy, Clone)]
pub struct Adoption<'a> {
    pager: &'a Pager,
    memory: &'a ProgramMemory,
    account: &'a ProgramAccount,
    threads: &'a ProgramThreads,
}

impl Adoption<'_> {
    /// Returns the walk over the parts of `program`.
    pub fn of(program: &ManagedProgram) -> Adoption<'_> {
        Adoption {
            pager: program.pager(),
            memory: program.memory(),
            account: program.account(),
            threads: program.threads(),
        }
    }
}
