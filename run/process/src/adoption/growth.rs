//! Which memory can be managed, and whether the program could pass its bound with it.
use crate::adoption::Adoption;
use crate::marks::state::ProgramState;
use memfold_engine::known::TOP;

/// [`Adoption::may_pass`] may find so much of the bound too late.
const SUM_SHARE: u64 = 32;

impl Adoption<'_> {
    /// Returns whether memory that isn't managed could pass the bound with no further call, once it
    /// has `grows` bytes more. What is writable counts, touched or not: threads may touch all of it
    /// while no engine thread has a CPU.
    ///
    /// `state.writable` is at least as much, and only when it passes the bound, the mappings are
    /// summed. A sum is not due again before one part in [`SUM_SHARE`] of the bound was mapped.
    pub fn may_pass(&self, state: &mut ProgramState, grows: u64) -> bool {
        if self.memory.is_managing() || !state.takes() || !self.pager.limits().is_bounded() {
            return false;
        }
        let bound = self.pager.limits().bound_bytes();
        let most = state.writable.unwrap_or(u64::MAX).saturating_add(grows);
        if most <= bound {
            state.writable = Some(most);
            return false;
        }
        let Some(all) = self.memory.read_suitable(&(0..TOP)) else {
            // Nothing was counted, so the next call counts again.
            state.writable = None;
            return false;
        };
        let all = state.unmarked(all);
        let all = state.sparse.cut_out_of(all);
        let sum = all.iter().map(|part| part.len() as u64).sum::<u64>() + grows;
        state.writable = Some(sum.min(bound - bound / SUM_SHARE));
        sum > bound
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{Calls, Room, each_paging_alone, raw};
    use crate::program::PLAIN;
    use core::ops::Range;
    use memfold_os::units::PAGE_SIZE;

    /// So much of the bound is mapped, and more than the rest of the test's process has.
    const MOST: usize = 384 << 20;
    const REST: u64 = (128 << 20) + PAGE_SIZE as u64;

    fn set_access(range: &Range<usize>, access: i32) {
        let args = [range.start, range.len(), access as usize, 0, 0, 0];
        assert_eq!(raw(libc::SYS_mprotect, args), 0);
    }

    /// One test, because all memory of the process counts.
    #[test]
    fn writable_memory_counts_though_it_was_never_touched() {
        each_paging_alone(|program| {
            program.memory().set_managing(false);
            let (calls, room) = (Calls(program), Room::new(MOST / PAGE_SIZE));
            let (all, bound) =
                (room.pages(0..MOST / PAGE_SIZE), program.pager().limits().bound_bytes());
            let passes =
                |grows: u64| calls.with_state(|state| Adoption::of(program).may_pass(state, grows));
            assert!(!passes(0), "reserved memory isn't writable");
            set_access(&all, PLAIN);
            // The next sum finds it. The rest of the test's process may have nothing that counts.
            assert!(passes(bound + 1));
            assert_eq!(
                calls.with_state(|state| state.writable),
                Some(bound - bound / SUM_SHARE),
                "the sum is not due again at once"
            );
            assert!(!passes(0) && passes(REST));
            // Memory that isn't expected to be filled.
            calls.with_state(|state| state.sparse.add(all.clone()));
            assert!(!passes(REST / 2));
            calls.with_state(|state| state.forget(&all));
            assert!(passes(bound));
            set_access(&all, libc::PROT_NONE);
            assert!(!passes(REST / 2));
        });
    }
}
