//! The program's signals: actions, masks, frames and stacks. The gate keeps what the program has
//! set, and the kernel has the gate's own.
//!
//! For each handler of the program the kernel has the gate's handler, which runs on the slot's
//! stack.
//! - **The program was interrupted**: the gate delivers the signal at once. It writes the frame
//!   where the kernel would have, by ordinary stores, so that the stack may be folded. Then it
//!   enters the handler.
//! - **The gate was interrupted**: the signal is pending until the thread leaves the gate. A
//!   waiting call is called off (`call_state.rs`).
//!
//! So no state of the gate lies below a handler of the program. The handler may leave by `longjmp`,
//! switch stacks, or never return.
mod sent;
mod actions;
mod alternate;
mod deliver;
mod masks;
mod resume;

pub use actions::{
    HANDLER, calling, give_back, give_back_some, ignore_really, install_protected, keep_no_more,
    set_action, set_real, take_over,
};
pub use alternate::set_alternate;
pub use deliver::{defer, deliver, deliver_pending, end_by};
pub use masks::{block_all, pending, set_mask};
pub use resume::resume;
pub use sent::{call, hand_over, kill, make_up, note_read, tell_as_sent};
