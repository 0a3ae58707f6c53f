//! A panic in the engine ends the process with a message: a program whose faults nobody serves would hang for ever.
use crate::say::{die, say};
use core::panic::PanicInfo;
use core::sync::atomic::{AtomicU32, Ordering::SeqCst};

/// Panics that have begun, of all threads.
static PANICS: AtomicU32 = AtomicU32::new(0);

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    // The first says why. Later ones, as of other threads or of a message that itself panics, only end the process.
    if PANICS.fetch_add(1, SeqCst) == 0 {
        say(format_args!("engine panic: {info}"));
    }
    die(format_args!("the program is stopped, because its memory can't be served any more"))
}

// `core` and `alloc` come compiled for unwinding and name these two, though nothing here unwinds. They are hidden:
// visible ones would take the place of those of a Rust or C++ program.
core::arch::global_asm!(
    ".hidden rust_eh_personality",
    ".globl rust_eh_personality",
    "rust_eh_personality:",
    ".hidden _Unwind_Resume",
    ".globl _Unwind_Resume",
    "_Unwind_Resume:",
    #[cfg(target_arch = "x86_64")]
    "ud2",
    #[cfg(target_arch = "aarch64")]
    "udf #0",
);
