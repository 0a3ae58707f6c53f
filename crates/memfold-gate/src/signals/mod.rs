//! Signals as the program has them, beside what the kernel is told.
//!
//! Each handler of the program's is installed as the gate's own, on the gate's stack. What arrives
//! while code of the program runs is delivered at once: the gate writes the frame where the kernel
//! would have, by the program's own means, so that no page of it need be there, and goes on in the
//! handler. What arrives in the gate is put off until it is left, and a call that waits is called
//! off, so that no state of the gate lies below a handler of the program's: it may leave by
//! `longjmp`, switch stacks, or never return.
mod sent;
mod actions;
mod alternate;
mod deliver;
mod masks;
mod resume;

pub use actions::{
    HANDLER, calling, give_back, ignore_really, install_protected, set_action, set_real, take_over,
};
pub use alternate::set_alternate;
pub use deliver::{defer, deliver, deliver_pending, end_by};
pub use masks::{block_all, pending, set_mask};
pub use resume::resume;
pub use sent::{call, hand_over, kill, make_up, note_read, tell_as_sent};
