//! Where there is no gate: only x86-64 has one.
use crate::order::Order;
use crate::say;
use core::ffi::c_char;
use memfold::config::Delivery;
use memfold::pager::Pager;

/// What has an engine.
pub struct Gated {
    /// It.
    pub pager: Pager,
}

/// Never.
pub fn get() -> Option<&'static Gated> {
    None
}

/// Never.
pub fn is_on() -> bool {
    false
}

/// Gives the order back, for thread delivery.
///
/// # Safety
/// - None: it is unsafe where there is a gate.
pub unsafe fn start(mut order: Order, _: usize, _: *mut *mut c_char) -> Option<Order> {
    say::warn(format_args!("warning: --delivery gate is for x86-64, so it is thread"));
    order.config.delivery = Delivery::Thread;
    Some(order)
}
