//! The instructions that aren't Rust: system calls that a signal can call off, the ways out of a
//! handler, and the restorer.
//!
//! A signal that arrives in the gate is put off until the gate is left. Two ranges of instructions
//! decide whether it has been noticed; who is interrupted inside one is sent to where it looks
//! again ([`rewind`]).
use core::arch::global_asm;

/// What [`call`] gives for a call that was not made, or that is to be made again, because a signal
/// is to be handled first. No call has this result. Nor is it the kernel's own ERESTARTSYS: the way
/// out of a patched site is a trap with the result in the register of number and result, and the
/// kernel would take that for a call to be restarted, and make it EINTR.
pub const RESTART: isize = -8192;
const RESTART_SYSCALL: u64 = 219;

global_asm!(
    ".pushsection .text.memfold_gate,\"ax\",@progbits",
    // Bytes and name are those by which unwinders and debuggers know a signal's frame. They look at
    // the byte before, too.
    ".balign 16",
    ".type __restore_rt,@function",
    "__restore_rt:",
    " nop",
    ".globl memfold_gate_restorer",
    ".hidden memfold_gate_restorer",
    "memfold_gate_restorer:",
    " mov $15,%rax",
    " syscall",
    " ud2",
    ".size __restore_rt,.-__restore_rt",
    // isize call(nr, args, pending)
    ".balign 16",
    ".globl memfold_gate_call",
    ".hidden memfold_gate_call",
    ".type memfold_gate_call,@function",
    "memfold_gate_call:",
    " .cfi_startproc",
    " mov %rdi,%rax",
    " mov %rsi,%r11",
    " mov %rdx,%rcx",
    " mov 0(%r11),%rdi",
    " mov 8(%r11),%rsi",
    " mov 16(%r11),%rdx",
    " mov 24(%r11),%r10",
    " mov 32(%r11),%r8",
    " mov 40(%r11),%r9",
    ".globl memfold_gate_call_look",
    ".hidden memfold_gate_call_look",
    "memfold_gate_call_look:",
    " cmpl $0,(%rcx)",
    " jne memfold_gate_call_off",
    ".globl memfold_gate_call_made",
    ".hidden memfold_gate_call_made",
    "memfold_gate_call_made:",
    " syscall",
    " ret",
    ".globl memfold_gate_call_off",
    ".hidden memfold_gate_call_off",
    "memfold_gate_call_off:",
    " mov $-8192,%rax",
    " ret",
    " .cfi_endproc",
    ".size memfold_gate_call,.-memfold_gate_call",
    // ! leave(context, record, deliver)
    ".balign 16",
    ".globl memfold_gate_leave",
    ".hidden memfold_gate_leave",
    "memfold_gate_leave:",
    " cmpl $0,(%rsi)",
    " jne 1f",
    " mov %rdi,%rsp",
    " mov $15,%eax",
    ".globl memfold_gate_left",
    ".hidden memfold_gate_left",
    "memfold_gate_left:",
    " syscall",
    " ud2",
    "1:",
    " lea -512(%rdi),%rsp",
    " and $-16,%rsp",
    " mov %rdi,%rbx",
    " mov %rsi,%r12",
    " mov %rdx,%r13",
    " call *%rdx",
    " mov %rbx,%rdi",
    " mov %r12,%rsi",
    " mov %r13,%rdx",
    " jmp memfold_gate_leave",
    // isize clone(nr, args, child, record)
    ".balign 16",
    ".globl memfold_gate_clone",
    ".hidden memfold_gate_clone",
    "memfold_gate_clone:",
    " push %rbx",
    " push %r12",
    " mov %rdx,%rbx",
    " mov %rcx,%r12",
    " mov %rdi,%rax",
    " mov %rsi,%r11",
    " mov 0(%r11),%rdi",
    " mov 8(%r11),%rsi",
    " mov 16(%r11),%rdx",
    " mov 24(%r11),%r10",
    " mov 32(%r11),%r8",
    " mov 40(%r11),%r9",
    " syscall",
    " test %rax,%rax",
    " jz 1f",
    " pop %r12",
    " pop %rbx",
    " ret",
    "1:",
    " xor %ebp,%ebp",
    " and $-16,%rsp",
    " mov %r12,%rdi",
    " call *%rbx",
    " ud2",
    // ! exit(state, code): from the store on, the stack may be somebody else's.
    ".balign 16",
    ".globl memfold_gate_exit",
    ".hidden memfold_gate_exit",
    "memfold_gate_exit:",
    " mov %rdi,%rcx",
    " mov %rsi,%rdi",
    " mov $60,%eax",
    " movl $0,(%rcx)",
    " syscall",
    " ud2",
    ".popsection",
    options(att_syntax)
);

unsafe extern "C" {
    #[link_name = "memfold_gate_restorer"]
    fn restorer_code();
    #[link_name = "memfold_gate_call"]
    fn call_code(nr: usize, args: *const [usize; 6], pending: *const u32) -> isize;
    #[link_name = "memfold_gate_call_look"]
    fn call_look();
    #[link_name = "memfold_gate_call_made"]
    fn call_made();
    #[link_name = "memfold_gate_call_off"]
    fn call_off();
    #[link_name = "memfold_gate_leave"]
    fn leave_code(context: usize, record: usize, deliver: usize) -> !;
    #[link_name = "memfold_gate_left"]
    fn left();
    #[link_name = "memfold_gate_clone"]
    fn clone_code(nr: usize, args: *const [usize; 6], child: usize, record: usize) -> isize;
    #[link_name = "memfold_gate_exit"]
    fn exit_code(state: *const u32, code: usize) -> !;
}

/// Where the gate's own handlers return to.
pub fn restorer() -> usize {
    restorer_code as *const () as usize
}

/// A system call on which the thread may wait: its result, or [`RESTART`] without having been made
/// if `pending` isn't 0, or becomes so before it is made.
///
/// # Safety
/// - As the system call's own conditions say.
/// - `pending` can be read.
pub unsafe fn call(nr: usize, args: &[usize; 6], pending: *const u32) -> isize {
    // SAFETY: the caller's promise.
    unsafe { call_code(nr, args, pending) }
}

/// Where a thread that was interrupted at `at` must go on, so that it sees what is pending: there,
/// or where it looks. `result` is the register of number and result.
pub fn rewind(at: usize, result: u64) -> (usize, u64) {
    let within = |from: unsafe extern "C" fn(), to: unsafe extern "C" fn()| {
        (from as *const () as usize..=to as *const () as usize).contains(&at)
    };
    if within(call_look, call_made) {
        // The number of the call is lost if the kernel was about to go on with one that waits for a
        // time. With a handler in between it would not go on either.
        if at == call_made as *const () as usize && result == RESTART_SYSCALL {
            return (at + 2, -i64::from(libc::EINTR) as u64);
        }
        return (call_off as *const () as usize, result);
    }
    let leave = leave_code as *const () as usize;
    if (leave..=left as *const () as usize).contains(&at) { (leave, result) } else { (at, result) }
}

/// Leaves a handler: delivers what is pending by `deliver(context, record)`, and goes on as the
/// context says.
///
/// # Safety
/// - `context` is the kernel's of the handler, on this stack and above all that lives.
/// - `record`'s first word says what is pending.
pub unsafe fn leave(
    context: usize,
    record: usize,
    deliver: unsafe extern "C" fn(usize, usize),
) -> ! {
    // SAFETY: the caller's promise.
    unsafe { leave_code(context, record, deliver as *const () as usize) }
}

/// `clone` or `clone3` whose child begins on the stack that they name, by `child(record)`.
///
/// # Safety
/// - As the system call's own conditions say; the stack is nobody else's, and all signals are
///   blocked.
pub unsafe fn clone(
    nr: usize,
    args: &[usize; 6],
    child: unsafe extern "C" fn(usize) -> !,
    record: usize,
) -> isize {
    // SAFETY: the caller's promise.
    unsafe { clone_code(nr, args, child as *const () as usize, record) }
}

/// Ends the thread, and stores 0 at `state` when it needs its stack no more.
///
/// # Safety
/// - All signals are blocked.
pub unsafe fn exit(state: *const u32, code: usize) -> ! {
    // SAFETY: the caller's promise.
    unsafe { exit_code(state, code) }
}
