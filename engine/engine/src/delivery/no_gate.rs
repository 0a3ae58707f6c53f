//! Replaces the gate where there is none.
use alloc::string::String;
use core::ops::Range;

/// Returns an error: the process can't be armed.
///
/// # Errors
/// Always.
///
/// # Safety
/// - No condition.
pub unsafe fn arm() -> Result<(), String> {
    Err(String::from("the gate is for x86-64"))
}

/// Returns whether the process is armed: never.
pub fn is_armed() -> bool {
    false
}

pub(crate) struct EngineCount;

impl EngineCount {
    pub fn one_more() -> EngineCount {
        EngineCount
    }
}

pub(crate) fn apart<T>(with: impl FnOnce() -> T) -> T {
    with()
}

pub(crate) fn begins(_region: &Range<usize>) {}

pub(crate) fn ends(_region: &Range<usize>) {}

pub(crate) fn least_descriptor() -> i32 {
    0
}

pub(crate) fn own(_fd: i32) -> bool {
    true
}

pub(crate) fn disown(_fd: i32) {}
