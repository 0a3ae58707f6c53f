//! Where the kernel begins when it executes this library, which then loads the program itself
//! (`run/process/src/loader`). There is no dynamic linker and no libc.
//!
//! The code in assembly relocates the library, because nothing else of it works before. It knows
//! the relocations that `cargo xtask symbols` allows. A symbol that the library doesn't define is 0:
//! all of them are weak.
use crate::heap;
use core::arch::global_asm;

global_asm!(
    ".pushsection .text.memfold_executed,\"ax\",@progbits",
    ".hidden __ehdr_start",
    ".globl memfold_executed",
    ".hidden memfold_executed",
    ".type memfold_executed,@function",
    "memfold_executed:",
    " xor %ebp,%ebp",
    " mov %rsp,%rbx",
    " lea __ehdr_start(%rip),%rsi",
    " mov 32(%rsi),%rdi",
    " add %rsi,%rdi",
    // The dynamic section, by its program header, because `patchelf` moves it.
    "6: cmpl ${dynamic},(%rdi)",
    " je 2f",
    " add $56,%rdi",
    " jmp 6b",
    "2: mov 16(%rdi),%rdi",
    " add %rsi,%rdi",
    " xor %r8d,%r8d",
    " xor %r9d,%r9d",
    " xor %r10d,%r10d",
    " xor %r11d,%r11d",
    " xor %r12d,%r12d",
    // The tables of relocations and their lengths, and the table of symbols.
    "1: mov (%rdi),%rax",
    " mov 8(%rdi),%rcx",
    " add $16,%rdi",
    " test %rax,%rax",
    " jz 3f",
    " cmp ${rela},%rax",
    " cmove %rcx,%r8",
    " cmp ${rela_bytes},%rax",
    " cmove %rcx,%r9",
    " cmp ${plt},%rax",
    " cmove %rcx,%r10",
    " cmp ${plt_bytes},%rax",
    " cmove %rcx,%r11",
    " cmp ${symbols},%rax",
    " cmove %rcx,%r12",
    " jmp 1b",
    "3: add %rsi,%r12",
    " call 4f",
    " mov %r10,%r8",
    " mov %r11,%r9",
    " call 4f",
    " mov %rbx,%rdi",
    " call {load}",
    // The program begins as after execve: with its stack, and nothing in other registers.
    " mov %rbx,%rsp",
    " xor %ebx,%ebx",
    " xor %ecx,%ecx",
    " xor %edx,%edx",
    " xor %esi,%esi",
    " xor %edi,%edi",
    " xor %r8d,%r8d",
    " xor %r9d,%r9d",
    " xor %r10d,%r10d",
    " xor %r11d,%r11d",
    " xor %r12d,%r12d",
    " xor %r13d,%r13d",
    " xor %r14d,%r14d",
    " xor %r15d,%r15d",
    " xor %ebp,%ebp",
    " jmp *%rax",
    // Relocates by the table of %r9 bytes at %r8.
    "4: add %rsi,%r8",
    " add %r8,%r9",
    "5: cmp %r9,%r8",
    " jae 9f",
    " mov (%r8),%rdi",
    " mov 8(%r8),%rcx",
    " mov 16(%r8),%rax",
    " add $24,%r8",
    " cmp ${relative},%ecx",
    " je 7f",
    // The symbol's address, or 0 if it is not defined here.
    " shr $32,%rcx",
    " lea (%rcx,%rcx,2),%rcx",
    " cmpw $0,6(%r12,%rcx,8)",
    " je 8f",
    " add 8(%r12,%rcx,8),%rax",
    "7: add %rsi,%rax",
    "8: mov %rax,(%rsi,%rdi)",
    " jmp 5b",
    "9: ret",
    ".size memfold_executed,.-memfold_executed",
    ".popsection",
    load = sym load,
    dynamic = const 2,
    rela = const 7,
    rela_bytes = const 8,
    plt = const 23,
    plt_bytes = const 2,
    symbols = const 6,
    relative = const 8,
    options(att_syntax)
);

/// Loads the program. Returns the address at which it begins.
///
/// # Safety
/// - `stack` is the stack pointer with which the kernel started this process.
/// - The library is relocated, and the caller is the only thread.
unsafe extern "C" fn load(stack: *mut usize) -> usize {
    // SAFETY: the caller promises that `stack` is the kernel's, that the library is relocated, and
    // that this is the only thread.
    unsafe { memfold_process::load(stack, heap::arena()) }
}
