//! The code that can't be written in Rust: system calls that a signal can call off, the ways out of
//! a handler, and the restorer.
//!
//! A signal that arrives in the gate is pending until the thread leaves the gate. Two ranges of
//! instructions check whether a signal is pending. A thread that is interrupted inside such a range
//! checks again (`call_state.rs`).
use core::arch::global_asm;

/// The result of [`call`] if the call was not made because a signal must be handled first. No
/// system call returns this. It differs from the kernel's ERESTARTSYS for this reason: a patched
/// site may leave by a trap with the result in its register, and the kernel would turn ERESTARTSYS
/// into EINTR there.
pub const CALLED_OFF: isize = -8192;

/// The bytes between the context of a handler that is left and the stack of the code that delivers
/// pending signals.
const LEAVE_BYTES: usize = 512;

global_asm!(
    ".pushsection .text.memfold_gate,\"ax\",@progbits",
    // Unwinders and debuggers know a signal frame by these bytes and this name. They also look at
    // the byte before.
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
    " mov {word}*0(%r11),%rdi",
    " mov {word}*1(%r11),%rsi",
    " mov {word}*2(%r11),%rdx",
    " mov {word}*3(%r11),%r10",
    " mov {word}*4(%r11),%r8",
    " mov {word}*5(%r11),%r9",
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
    " mov ${called_off},%rax",
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
    " mov ${sigreturn},%eax",
    ".globl memfold_gate_left",
    ".hidden memfold_gate_left",
    "memfold_gate_left:",
    " syscall",
    " ud2",
    "1:",
    " lea -{leave_bytes}(%rdi),%rsp",
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
    " mov {word}*0(%r11),%rdi",
    " mov {word}*1(%r11),%rsi",
    " mov {word}*2(%r11),%rdx",
    " mov {word}*3(%r11),%r10",
    " mov {word}*4(%r11),%r8",
    " mov {word}*5(%r11),%r9",
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
    // on_stack(top, code, argument)
    ".balign 16",
    ".globl memfold_gate_on_stack",
    ".hidden memfold_gate_on_stack",
    "memfold_gate_on_stack:",
    " push %rbx",
    " mov %rsp,%rbx",
    " mov %rdi,%rsp",
    " mov %rdx,%rdi",
    " call *%rsi",
    " mov %rbx,%rsp",
    " pop %rbx",
    " ret",
    // ! exit(state, code): another thread may take the stack as soon as the store is done.
    ".balign 16",
    ".globl memfold_gate_exit",
    ".hidden memfold_gate_exit",
    "memfold_gate_exit:",
    " mov %rdi,%rcx",
    " mov %rsi,%rdi",
    " mov ${exit},%eax",
    " movl $0,(%rcx)",
    " syscall",
    " ud2",
    ".popsection",
    called_off = const CALLED_OFF,
    sigreturn = const libc::SYS_rt_sigreturn,
    exit = const libc::SYS_exit,
    leave_bytes = const LEAVE_BYTES,
    word = const size_of::<usize>(),
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
    fn call_off_code();
    #[link_name = "memfold_gate_leave"]
    fn leave_code(context: usize, record: usize, deliver: usize) -> !;
    #[link_name = "memfold_gate_left"]
    fn left();
    #[link_name = "memfold_gate_clone"]
    fn clone_code(nr: usize, args: *const [usize; 6], child: usize, record: usize) -> isize;
    #[link_name = "memfold_gate_on_stack"]
    fn on_stack_code(top: usize, code: usize, argument: usize);
    #[link_name = "memfold_gate_exit"]
    fn exit_code(state: *const u32, code: usize) -> !;
}

/// Returns the address that the gate's own handlers return to.
pub fn restorer() -> usize {
    restorer_code as *const () as usize
}

/// Makes a system call on which the thread may wait, and returns its result. If `pending` isn't 0,
/// or changes from 0 before the call is made, the call is not made and the result is
/// [`CALLED_OFF`].
///
/// # Safety
/// - The conditions of the system call hold.
/// - `pending` points to a readable word.
pub unsafe fn call(nr: usize, args: &[usize; 6], pending: *const u32) -> isize {
    // SAFETY: `args` is a reference to six words. The caller promises that `pending` is readable
    // and that the system call may be made.
    unsafe { call_code(nr, args, pending) }
}

fn address(code: unsafe extern "C" fn()) -> usize {
    code as *const () as usize
}

/// Returns whether the instruction at `at` is one of [`call`] that checks for a pending signal, or
/// the system call after the check.
pub fn looks(at: usize) -> bool {
    (address(call_look)..=address(call_made)).contains(&at)
}

/// Returns whether the instruction at `at` is the system call of [`call`].
pub fn makes(at: usize) -> bool {
    at == address(call_made)
}

/// Returns the address from which [`call`] returns [`CALLED_OFF`].
pub fn call_off() -> usize {
    address(call_off_code)
}

/// Returns whether the instruction at `at` is one of [`leave`] that checks for a pending signal, or
/// one that leaves after the check.
pub fn leaves(at: usize) -> bool {
    (leave_again()..=address(left)).contains(&at)
}

/// Returns the address at which [`leave`] checks for a pending signal.
pub fn leave_again() -> usize {
    leave_code as *const () as usize
}

/// Leaves a handler. Calls `deliver(context, record)` while a signal is pending, and then continues
/// as the context says.
///
/// # Safety
/// - `context` is the address of the context that the kernel made for this handler. It lies on this
///   stack, and no frame below it is needed any more.
/// - The first word of `record` is not 0 while a signal is pending.
pub unsafe fn leave(
    context: usize,
    record: usize,
    deliver: unsafe extern "C" fn(usize, usize),
) -> ! {
    // SAFETY: the caller promises that `context` is this handler's context and that no frame below
    // it on this stack is needed, so the stack pointer may move there. It also promises that the
    // first word of `record` tells whether a signal is pending.
    unsafe { leave_code(context, record, deliver as *const () as usize) }
}

/// Makes `clone` or `clone3`, and returns its result in the parent. The child begins with
/// `child(record)`, on the stack that the arguments name.
///
/// # Safety
/// - The conditions of the system call hold.
/// - No other code uses the child's stack.
/// - All signals but the gate's own are blocked.
pub unsafe fn clone(
    nr: usize,
    args: &[usize; 6],
    child: unsafe extern "C" fn(usize) -> !,
    record: usize,
) -> isize {
    // SAFETY: the caller promises that the system call may be made, and that the stack is the
    // child's alone. With the program's signals blocked, none of its handlers runs on that stack.
    unsafe { clone_code(nr, args, child as *const () as usize, record) }
}

/// Calls `code(argument)` on the stack that ends at `top`.
///
/// # Safety
/// - The conditions of `code` hold.
/// - `top` is a multiple of 16. No other code uses the stack below it.
pub unsafe fn on_stack(top: usize, code: unsafe extern "C" fn(usize), argument: usize) {
    // SAFETY: the caller promises that the stack is free and that `code` may be called.
    unsafe { on_stack_code(top, code as *const () as usize, argument) }
}

/// Ends the thread, and stores 0 at `state` when the thread no longer uses its stack.
///
/// # Safety
/// - All signals are blocked.
/// - `state` may be written, and stays mapped.
pub unsafe fn exit(state: *const u32, code: usize) -> ! {
    // SAFETY: the caller promises that `state` may be written. With all signals blocked, no handler
    // uses the stack after the store.
    unsafe { exit_code(state, code) }
}
