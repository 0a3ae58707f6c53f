//! The code that the steps of patched sites jump to, with the stack pointer on the thread's slot. It
//! keeps all registers that a system call keeps, and uses nothing of the program's stack: the stack
//! of a goroutine has no room to spare.
//!
//! Before the stack pointer is on the slot, and after it has left the slot, a signal becomes
//! pending as in the gate. The way back checks for it. If the call needs a full context, it
//! continues as a trap of its site.
use crate::record::GateThread;
use core::arch::global_asm;
use core::mem::offset_of;
use core::sync::atomic::{AtomicU8, AtomicUsize, Ordering::SeqCst};
use memfold_os::vectors::{have_avx2, have_avx512, have_wide_masks};

/// The result of a [`PatchHandler`] for a call that must trap.
pub const NEEDS_CONTEXT: isize = -513;

/// The offsets, in a step, of the two instructions that trap. One makes the call, the other reports
/// that it has been made. The address at which the program continues is at offset 0.
pub const STEP_CALL: usize = 24;
pub const STEP_DONE: usize = 32;

/// The frame that a step and the entry make on the slot, just below the record. The handler's stack
/// begins there:
///
/// ```text
///      record -> +------------+ 2144 whole
///                | vectors    |      %zmm0 to %zmm31, %ymm0 to %ymm15, or %xmm0 to %xmm15
///                |            | 96   without gaps
///                | bp         | 88
///                | result     | 80   of the handler
///                | record     | 72
///                | sp         | 64   the program's stack pointer
///                | step       | 56
///                | r9 .. rdi  | 8    arguments, the first one lowest
///   %rsp, args -> | nr         | 0
///                +------------+
/// ```
#[repr(C)]
pub struct EnteredCall {
    /// The number of the call.
    pub nr: usize,
    rdi: usize,
    rsi: usize,
    rdx: usize,
    r10: usize,
    r8: usize,
    r9: usize,
    /// The address of the site's step.
    pub step: usize,
    /// The program's stack pointer.
    pub sp: usize,
    record: *const GateThread,
    result: isize,
    /// The program's frame pointer, if it has one.
    pub bp: usize,
    vectors: [[u8; VECTOR_BYTES]; VECTORS],
    masks: [u64; MASKS],
}

/// The vector registers. A system call keeps them, but the handler's code may use them.
const VECTORS: usize = 32;
const VECTOR_BYTES: usize = 64;
/// The mask registers. Only code for AVX-512BW uses them.
const MASKS: usize = 8;
/// The alignment of the stack with which the handler is called.
const STACK_ALIGN: usize = 16;
const _: () = assert!(size_of::<EnteredCall>().is_multiple_of(STACK_ALIGN));

/// The values of [`WIDTH`].
const WIDTH_16: u8 = 0;
const WIDTH_32: u8 = 1;
const WIDTH_64: u8 = 2;
const WIDTH_64_MASKS: u8 = 3;

impl EnteredCall {
    /// Returns the arguments of the call.
    pub fn args(&self) -> [usize; 6] {
        [self.rdi, self.rsi, self.rdx, self.r10, self.r8, self.r9]
    }
}

/// A function that makes a call from a patched site and returns its result, or [`NEEDS_CONTEXT`].
pub type PatchHandler = unsafe extern "C" fn(*const GateThread, *const EnteredCall) -> isize;

/// The address of the [`PatchHandler`].
#[unsafe(export_name = "memfold_gate_handler")]
static HANDLER: AtomicUsize = AtomicUsize::new(0);
/// The width of the vector registers, and whether there are mask registers. A program that was built for such processors may keep
/// something in them across a call.
#[unsafe(export_name = "memfold_gate_width")]
static WIDTH: AtomicU8 = AtomicU8::new(WIDTH_16);

// Assembly finds `pending` at the record's address. The entry makes its frame directly below the
// record, so the frame has the record's alignment.
const _: () =
    assert!(offset_of!(GateThread, pending) == 0 && align_of::<GateThread>() >= size_of::<usize>());

global_asm!(
    ".hidden memfold_gate_handler",
    ".hidden memfold_gate_width",
    // Applies `vmovups` or `movups` to each register and its place in the frame, and `kmovq` to masks.
    ".macro MEMFOLD_GATE_VECTORS save",
    " cmpb ${width_32},memfold_gate_width(%rip)",
    " jb 7f",
    " je 8f",
    ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31",
    " .if \\save",
    " vmovups %zmm\\n,{vectors}+64*\\n(%rsp)",
    " .else",
    " vmovups {vectors}+64*\\n(%rsp),%zmm\\n",
    " .endif",
    ".endr",
    " cmpb ${width_64},memfold_gate_width(%rip)",
    " je 9f",
    ".irp n,0,1,2,3,4,5,6,7",
    " .if \\save",
    " kmovq %k\\n,{masks}+8*\\n(%rsp)",
    " .else",
    " kmovq {masks}+8*\\n(%rsp),%k\\n",
    " .endif",
    ".endr",
    " jmp 9f",
    "8:",
    ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15",
    " .if \\save",
    " vmovups %ymm\\n,{vectors}+32*\\n(%rsp)",
    " .else",
    " vmovups {vectors}+32*\\n(%rsp),%ymm\\n",
    " .endif",
    ".endr",
    " jmp 9f",
    "7:",
    ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15",
    " .if \\save",
    " movups %xmm\\n,{vectors}+16*\\n(%rsp)",
    " .else",
    " movups {vectors}+16*\\n(%rsp),%xmm\\n",
    " .endif",
    ".endr",
    "9:",
    ".endm",
    ".macro MEMFOLD_GATE_RESTORE",
    " MEMFOLD_GATE_VECTORS 0",
    " mov {rdi}(%rsp),%rdi",
    " mov {rsi}(%rsp),%rsi",
    " mov {rdx}(%rsp),%rdx",
    " mov {r10}(%rsp),%r10",
    " mov {r8}(%rsp),%r8",
    " mov {r9}(%rsp),%r9",
    " mov {step}(%rsp),%rcx",
    ".endm",
    ".pushsection .text.memfold_gate,\"ax\",@progbits",
    ".balign 64",
    ".globl memfold_gate_patched",
    ".hidden memfold_gate_patched",
    ".type memfold_gate_patched,@function",
    // From a step: rax holds the call's number, rcx the record's address. `sp` and `step` are in
    // the frame.
    "memfold_gate_patched:",
    " mov %rax,{nr}(%rsp)",
    " mov %rdi,{rdi}(%rsp)",
    " mov %rsi,{rsi}(%rsp)",
    " mov %rdx,{rdx}(%rsp)",
    " mov %r10,{r10}(%rsp)",
    " mov %r8,{r8}(%rsp)",
    " mov %r9,{r9}(%rsp)",
    " mov %rcx,{record}(%rsp)",
    " mov %rbp,{bp}(%rsp)",
    " MEMFOLD_GATE_VECTORS 1",
    " mov %rcx,%rdi",
    " mov %rsp,%rsi",
    " call *memfold_gate_handler(%rip)",
    " mov %rax,{result}(%rsp)",
    ".globl memfold_gate_patched_look",
    ".hidden memfold_gate_patched_look",
    "memfold_gate_patched_look:",
    " cmpq ${needs_context},{result}(%rsp)",
    " je 2f",
    " mov {record}(%rsp),%r11",
    " cmpl $0,{pending}(%r11)",
    " jne 1f",
    " MEMFOLD_GATE_RESTORE",
    " mov {result}(%rsp),%rax",
    " mov (%rcx),%rcx",
    " mov {sp}(%rsp),%rsp",
    ".globl memfold_gate_patched_out",
    ".hidden memfold_gate_patched_out",
    "memfold_gate_patched_out:",
    " jmp *%rcx",
    // A signal is pending and must be handled first.
    "1:",
    " MEMFOLD_GATE_RESTORE",
    " mov {result}(%rsp),%rax",
    " add ${step_done},%rcx",
    " mov {sp}(%rsp),%rsp",
    " jmp *%rcx",
    // The call must trap.
    "2:",
    " MEMFOLD_GATE_RESTORE",
    " mov {nr}(%rsp),%rax",
    " add ${step_call},%rcx",
    " mov {sp}(%rsp),%rsp",
    " jmp *%rcx",
    ".globl memfold_gate_patched_end",
    ".hidden memfold_gate_patched_end",
    "memfold_gate_patched_end:",
    " ud2",
    ".popsection",
    nr = const offset_of!(EnteredCall, nr),
    rdi = const offset_of!(EnteredCall, rdi),
    rsi = const offset_of!(EnteredCall, rsi),
    rdx = const offset_of!(EnteredCall, rdx),
    r10 = const offset_of!(EnteredCall, r10),
    r8 = const offset_of!(EnteredCall, r8),
    r9 = const offset_of!(EnteredCall, r9),
    step = const offset_of!(EnteredCall, step),
    sp = const offset_of!(EnteredCall, sp),
    record = const offset_of!(EnteredCall, record),
    bp = const offset_of!(EnteredCall, bp),
    result = const offset_of!(EnteredCall, result),
    vectors = const offset_of!(EnteredCall, vectors),
    masks = const offset_of!(EnteredCall, masks),
    pending = const offset_of!(GateThread, pending),
    needs_context = const NEEDS_CONTEXT,
    width_32 = const WIDTH_32,
    width_64 = const WIDTH_64,
    step_call = const STEP_CALL,
    step_done = const STEP_DONE,
    options(att_syntax)
);

unsafe extern "C" {
    #[link_name = "memfold_gate_patched"]
    fn patched();
    #[link_name = "memfold_gate_patched_look"]
    fn look();
    #[link_name = "memfold_gate_patched_out"]
    fn out();
    #[link_name = "memfold_gate_patched_end"]
    fn end();
}

/// Returns the address that patched sites jump to.
pub fn entry() -> usize {
    patched as *const () as usize
}

/// Returns whether the instruction at `at` belongs to the part of the way back that checks for a
/// pending signal, or that follows the check. The jump back isn't included.
pub fn looks(at: usize) -> bool {
    (look_again()..out as *const () as usize).contains(&at)
}

/// Returns the address at which the way back checks for a pending signal.
pub fn look_again() -> usize {
    look as *const () as usize
}

/// Returns whether the instruction at `at` belongs to the entry.
pub fn contains(at: usize) -> bool {
    (entry()..end as *const () as usize).contains(&at)
}

/// Returns whether the instruction at `at` is the jump back.
pub fn is_out(at: usize) -> bool {
    at == out as *const () as usize
}

/// Sets the function that makes calls.
pub fn set_up(handler: PatchHandler) {
    HANDLER.store(handler as *const () as usize, SeqCst);
}

/// Finds the width of the vector registers, which must be known before a site is patched. Most short
/// programs patch none, and each question to the processor costs some 10 us in a virtual machine.
pub fn find_width() {
    let width = match (have_wide_masks(), have_avx512(), have_avx2()) {
        (true, ..) => WIDTH_64_MASKS,
        (_, true, _) => WIDTH_64,
        (.., true) => WIDTH_32,
        _ => WIDTH_16,
    };
    WIDTH.store(width, SeqCst);
}
