//! A panic in the engine ends the process with a message. A program whose faults are no longer
//! served would hang.
use core::panic::PanicInfo;
use memfold_os::text::OneLine;
use memfold_process::diagnostics::die;

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    die(format_args!(
        "Engine panic: {}. The process is ended, because its folded memory can't be loaded any more. \
         This is a bug of memfold: please report it",
        OneLine(info)
    ))
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
    "ud2",
);
