//! A panic in the engine ends the process with a message: a program whose faults nobody serves
//! would hang for ever.
use core::panic::PanicInfo;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use memfold_os::thread::{sleep_ns, thread_id};
use memfold_process::diagnostics::{die, last_words};

/// The thread that has panicked first; 0 if none has.
static FIRST: AtomicU32 = AtomicU32::new(0);
/// It has said why.
static SAID: AtomicBool = AtomicBool::new(false);
/// How often another thread that panics looks whether that is so, and the time between.
const LOOKS: usize = 1000;
const PACE_NS: u64 = 1_000_000;

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    match FIRST.compare_exchange(0, thread_id(), SeqCst, SeqCst) {
        Ok(_) => {
            last_words(format_args!("Engine panic: {info}"));
            SAID.store(true, SeqCst);
        }
        // The message itself panics.
        Err(first) if first == thread_id() => {}
        // Several threads often panic for the same reason: whoever ends the process must not be
        // faster than the reason is told.
        Err(_) => {
            for _ in 0..LOOKS {
                if SAID.load(SeqCst) {
                    break;
                }
                sleep_ns(PACE_NS);
            }
        }
    }
    die(format_args!("The process is ended, because its folded memory can't be loaded any more"))
}

// `core` and `alloc` come compiled for unwinding and name these two, though nothing here unwinds.
// They are hidden: visible ones would take the place of those of a Rust or C++ program.
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
