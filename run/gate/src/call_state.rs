//! The states of a thread on its way through the gate, and the effect of a signal in each. The way
//! begins at an instruction of the program that makes a system call, and ends back in the program.
//!
//! **Promise**: a signal is handled in [`CallStage::Program`] only. A signal that arrives in
//! another stage is *pending* ([`GateThread::pending`](crate::record::GateThread::pending)) until
//! the thread is back there. A thread never sleeps in the kernel, and never returns to the program,
//! with a signal pending. It checks just before. A signal that arrives after the check makes it
//! check again ([`CallStage::interrupted`]).
//!
//! | state | event | next | by |
//! |---|---|---|---|
//! | `Program` | a system call traps (SIGSYS) | `Working` | kernel, `trap::on_signal` |
//! | `Program` | a patched site jumps | `Coming` | `patch/entry.rs` |
//! | `Program` | a signal | its handler begins (`Program`) | `signals::deliver` |
//! | `Coming` | the thread's record is found | `Working` | `patch/entry.rs`, `trap::on_patched` |
//! | `Coming` | it isn't found | traps: `Program`, `Working` | `STEP_CALL` |
//! | `Coming` | a signal | pending; `Coming` | `signals::defer` |
//! | `Working` | the call needs a context ([`NEEDS_CONTEXT`]) | traps: `Working` | `STEP_CALL` |
//! | `Working` | the call is to be made | `Looking` | `entry::call` |
//! | `Working` | trapped, and all is done | `Leaving` | `trap::on_signal` |
//! | `Working` | patched, and all is done | `LookingBack` | `patch/entry.rs` |
//! | `Working` | a signal | pending; `Working` | `signals::defer` |
//! | `Looking` | nothing is pending | the kernel, then `Working` | `entry::call` |
//! | `Looking` | a signal is pending | `Working` with [`CALLED_OFF`] | `entry::call` |
//! | `Looking` | a signal | pending; checks again | `CallStage::interrupted` |
//! | kernel | a signal ends the call (EINTR, a short count) | pending; `Working` | kernel |
//! | kernel | a signal; the call would restart | pending; `Looking` | `CallStage::interrupted` |
//! | `Leaving` | nothing is pending | `Program` | `entry::leave` (`rt_sigreturn`) |
//! | `Leaving` | a signal is pending | writes its frame; `Leaving` | `signals::deliver_pending` |
//! | `Leaving` | a signal | pending; `Leaving` from its start | `CallStage::interrupted` |
//! | `LookingBack` | nothing is pending | `Back` | `patch/entry.rs` |
//! | `LookingBack` | a signal is pending | traps: `Working`, `Leaving` | `STEP_DONE` |
//! | `LookingBack` | a signal | pending; checks again | `CallStage::interrupted` |
//! | `Back` | the jump, or a signal | `Program` | `patch/entry.rs`, `trap::on_signal` |
//!
//! From the kernel the thread returns to `Working` with the call's result. At `STEP_CALL` and
//! `STEP_DONE` a step has instructions that trap.
//!
//! A call that was called off has done nothing. The program continues at the call's instruction, so
//! it makes the call again when the handler returns, as the kernel does with SA_RESTART. Some calls
//! the kernel ends with EINTR whatever the handler's flags say. Such a call returns EINTR. It is
//! made again only if no handler of the program runs (`signals::call`).
//!
//! **Masks.** While a signal is pending, the kernel has all others blocked:
//!
//! | word of the record | set by | read by |
//! |---|---|---|
//! | `pending` | `defer`, `promote` | `entry::call`, `entry::leave`, `patch/entry.rs` |
//! | `mask_before` | `defer` | `put_back`, `trap::on_signal` |
//! | `blocked` | `replace_mask`, `deliver` | `deliver`, `keep` |
//! | `awaits` | `ProgramCall::wait_masked` | `keep`, `call` |
//! | `waiting_mask` | `ProgramCall::wait_masked` | `deliver` |
//! | `sent` | `keep` | `promote`, `hand_over` |
//!
//! - `pending` tells which entries of `deferred` are in use.
//! - `mask_before` is the kernel's mask when the first pending signal arrived.
//! - `blocked` has the gate's own signals that the program blocks.
//! - `awaits` has those of `blocked` that the thread's call still takes.
//! - `waiting_mask` is the mask of a call that waits with a mask of its own.
//! - `sent` has those of `blocked` that are kept for the thread.
use crate::entry;
pub use crate::entry::CALLED_OFF;
use crate::patch;
use crate::patch::entry as patched;
pub use crate::patch::entry::NEEDS_CONTEXT;

/// To restart a call by `restart_syscall`, the kernel puts this number into the register of the
/// result.
const RESTART_SYSCALL: u64 = libc::SYS_restart_syscall as u64;
const SYSCALL_BYTES: usize = 2;

/// The position of a thread on its way through the gate, given by its instruction and its stack.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum CallStage {
    /// The thread runs the program.
    Program,
    /// The thread is between a patched site and the slot's stack, or between the slot's stack and a
    /// trap.
    Coming,
    /// The thread is in the gate, on the slot's stack.
    Working,
    /// The thread checks for a pending signal, and then makes a call.
    Looking,
    /// The thread checks for a pending signal, and then leaves a handler.
    Leaving,
    /// The thread checks for a pending signal, and then returns to a patched site.
    LookingBack,
    /// Only the jump back to a patched site is left.
    Back,
}

impl CallStage {
    /// Returns the stage of a thread at the instruction `at`. `on_slot` is true if its stack
    /// pointer lies on its slot's stack.
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

    /// Returns the address at which an interrupted thread continues, and its result. The signal
    /// that interrupted it is pending by then. `result` is the content of the register that holds
    /// the call's number and result.
    pub fn interrupted(self, at: usize, result: u64) -> (usize, u64) {
        match self {
            CallStage::LookingBack => (patched::look_again(), result),
            CallStage::Leaving => (entry::leave_again(), result),
            // The kernel was about to resume a call that waits for a time, so the call's number is
            // lost. The kernel would end such a call after a handler, too.
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

/// How a call of the program ended.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum CallOutcome {
    /// The call returned this result.
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
        let address = signal_sends_thread_back_to_its_look as *const () as usize;
        assert_eq!(
            (CallStage::of(address, true), CallStage::of(address, false)),
            (CallStage::Working, CallStage::Program)
        );
        assert_eq!(CallStage::Working.interrupted(address, 7), (address, 7));
    }
}
