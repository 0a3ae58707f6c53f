//! The states of a thread between an instruction of the program's that makes a system call and the way
//! back to the program, and what a signal does in each.
//!
//! **Promise**: a signal is handled in [`CallStage::Program`] only. One that comes in another stage is
//! *pending* ([`GateThread::pending`](crate::record::ThreadRecord::pending)) until the thread is back there. A
//! thread never sleeps in the kernel, and never goes back, with a signal pending: it looks just before,
//! and a signal that comes after the look sends it to the look again ([`CallStage::interrupted`]).
//!
//! | state | event | next | by |
//! |---|---|---|---|
//! | `Program` | a system call traps (SIGSYS) | `Working` | kernel, `trap::on_signal` |
//! | `Program` | a patched site jumps | `Coming` | `patch/entry.rs` |
//! | `Program` | a signal | its handler begins (`Program`) | `signals::deliver` |
//! | `Coming` | the thread's record is found | `Working` | `patch/entry.rs`, `trap::on_patched` |
//! | `Coming` | it isn't found | traps: `Program`, `Working` | `patch/entry.rs` (`TRAP_CALL`) |
//! | `Coming` | a signal | pending; `Coming` | `signals::defer` |
//! | `Working` | the call needs a context ([`NEEDS_CONTEXT`]) | traps: `Working` | `patch/entry.rs` (`TRAP_CALL`) |
//! | `Working` | the call is to be made | `Looking` | `entry::call` |
//! | `Working` | trapped, and all is done | `Leaving` | `trap::on_signal` |
//! | `Working` | patched, and all is done | `LookingBack` | `patch/entry.rs` |
//! | `Working` | a signal | pending; `Working` | `signals::defer` |
//! | `Looking` | nothing is pending | in the kernel, then `Working` with the result | `entry::call` |
//! | `Looking` | a signal is pending | `Working` with [`CALLED_OFF`] | `entry::call` |
//! | `Looking` | a signal | pending; looks again | `CallStage::interrupted` |
//! | in the kernel | a signal, and the call ends (EINTR, a short count) | pending; `Working` with the result | kernel |
//! | in the kernel | a signal, and the kernel would restart the call | pending; `Looking` | kernel, `CallStage::interrupted` |
//! | `Leaving` | nothing is pending | `Program` | `entry::leave` (`rt_sigreturn`) |
//! | `Leaving` | a signal is pending | its handler's frame is written; `Leaving` | `signals::deliver_pending` |
//! | `Leaving` | a signal | pending; `Leaving` from its start | `CallStage::interrupted` |
//! | `LookingBack` | nothing is pending | `Back` | `patch/entry.rs` |
//! | `LookingBack` | a signal is pending | traps: `Working`, `Leaving` | `patch/entry.rs` (`TRAP_DONE`) |
//! | `LookingBack` | a signal | pending; looks again | `CallStage::interrupted` |
//! | `Back` | the jump, or a signal | `Program` | `patch/entry.rs`, `trap::on_signal` |
//!
//! A call that was called off has done nothing. The program goes on at its instruction, so the call is
//! made again when the handler returns: as the kernel does with SA_RESTART. A call that the kernel ends
//! by EINTR whatever the handler says has that result, and is made again only where no handler of the
//! program's runs (`signals::call`).
//!
//! **Masks.** While a signal is pending, all others are blocked in the kernel:
//!
//! | word of the record | says | set by | read by |
//! |---|---|---|---|
//! | `pending` | which places of `deferred` count | `defer`, `promote` | `entry::call`, `entry::leave`, `patch/entry.rs` |
//! | `mask_before` | the kernel's mask when the first came | `defer` | `put_back`, `trap::on_signal` |
//! | `blocked` | the gate's own signals that the program blocks | `replace_mask`, `deliver` | `deliver`, `keep` |
//! | `awaits` | those of them that its call takes all the same | `ProgramCall::wait` | `keep`, `call` |
//! | `waiting_mask` | the mask of a call that waits with another one | `ProgramCall::wait` | `deliver` |
//! | `sent` | those of them that are kept for the thread | `keep` | `promote`, `hand_over` |
use crate::entry;
pub use crate::entry::CALLED_OFF;
use crate::patch;
use crate::patch::entry as patched;
pub use crate::patch::entry::NEEDS_CONTEXT;

/// The kernel puts this number into the register of the result to make a call again by
/// `restart_syscall`.
const RESTART_SYSCALL: u64 = libc::SYS_restart_syscall as u64;
const SYSCALL_BYTES: usize = 2;

/// Where a thread stands, by its instruction and its stack.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum CallStage {
    /// In the program.
    Program,
    /// Between a patched site and the slot's stack, or between that and a trap.
    Coming,
    /// In the gate, on the slot's stack.
    Working,
    /// Looks whether a signal is pending, and makes a call.
    Looking,
    /// Looks whether a signal is pending, and leaves a handler.
    Leaving,
    /// Looks whether a signal is pending, and goes back to a patched site.
    LookingBack,
    /// Only the jump back to a patched site is left.
    Back,
}

impl CallStage {
    /// Returns the stage of a thread at the instruction `at`. `on_slot`: it is on its slot's stack.
    pub fn of(at: usize, on_slot: bool) -> CallStage {
        match on_slot {
            false if !patch::contains(at) => CallStage::Program,
            false if patched::is_out(at) => CallStage::Back,
            false => CallStage::Coming,
            true if patched::looks(at) => CallStage::LookingBack,
            true if entry::looks(at) => CallStage::Looking,
            true if entry::leaves(at) => CallStage::Leaving,
            true => CallStage::Working,
        }
    }

    /// Returns where a thread goes on that a signal has interrupted, and with which result. The
    /// signal is pending now. `result` is the register of the call's number and result.
    pub fn interrupted(self, at: usize, result: u64) -> (usize, u64) {
        match self {
            CallStage::LookingBack => (patched::look_again(), result),
            CallStage::Leaving => (entry::leave_again(), result),
            // The kernel was about to go on with a call that waits for a time, so the call's number
            // is lost. After a handler it would end the call, too.
            CallStage::Looking if entry::makes(at) && result == RESTART_SYSCALL => {
                (at + SYSCALL_BYTES, -i64::from(libc::EINTR) as u64)
            }
            CallStage::Looking => (entry::call_off(), result),
            CallStage::Program | CallStage::Coming | CallStage::Working | CallStage::Back => {
                (at, result)
            }
        }
    }
}

/// The end of a call of the program's.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum CallOutcome {
    /// The call has this result.
    Returned(isize),
    /// The call was called off. The program makes it again.
    CalledOff,
    /// The call has no result. The context says how the program goes on.
    InContext,
}

impl CallOutcome {
    /// Returns the outcome of a call with this result, or [`CALLED_OFF`].
    pub fn of(made: isize) -> CallOutcome {
        if made == CALLED_OFF { CallOutcome::CalledOff } else { CallOutcome::Returned(made) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signal_sends_thread_back_to_its_look() {
        let making = entry::call_off() - 3;
        assert!(entry::makes(making), "the instruction and a return lie before");
        assert_eq!(CallStage::of(making, true), CallStage::Looking);
        let eintr = -i64::from(libc::EINTR) as u64;
        assert_eq!(CallStage::Looking.interrupted(making, 0), (entry::call_off(), 0));
        assert_eq!(CallStage::Looking.interrupted(making, RESTART_SYSCALL), (making + 2, eintr));
        assert_eq!(CallStage::of(entry::leave_again(), true), CallStage::Leaving);
        assert_eq!(CallStage::of(patched::look_again(), true), CallStage::LookingBack);
        assert_eq!(CallStage::of(patched::entry(), false), CallStage::Coming);
        let here = signal_sends_thread_back_to_its_look as *const () as usize;
        assert_eq!(
            (CallStage::of(here, true), CallStage::of(here, false)),
            (CallStage::Working, CallStage::Program)
        );
        assert_eq!(CallStage::Working.interrupted(here, 7), (here, 7));
    }
}
