//! The code that patched sites jump to. It moves to the thread's slot, and keeps all registers that
//! a system call keeps.
//!
//! Before the stack pointer is on the slot, and after it has left the slot, a signal becomes
//! pending as in the gate. The way back checks for it. If the thread's record isn't found, or the
//! call needs a full context, the call continues as a trap of its site.
use crate::record::{GateThread, SLOT_BYTES};
use core::arch::global_asm;
use core::mem::offset_of;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use memfold_os::vectors::have_avx2;

/// The result of a [`PatchHandler`] for a call that must trap.
pub const NEEDS_CONTEXT: isize = -513;

/// The words below the program's stack pointer between a site and the slot, and while the thread is
/// trapped from there. The stack pointer is at `rdx` first, and at `resume` when it traps:
///
/// ```text
///     program's sp -> +-----------+ 152  whole
///                     | red zone  |      128 bytes that the program may use
///  sp while it traps -> resume    | 16   the end of the site's instruction
///                     | nr        | 8    the number of the call
///       sp at first -> | rdx       | 0
///                     +-----------+
/// ```
#[repr(C)]
struct BelowStack {
    rdx: usize,
    nr: usize,
    resume: usize,
    red_zone: [u8; 128],
}

/// The distance in bytes from the program's stack pointer down to `resume`. The number of the call
/// lies a word below `resume`.
pub const BELOW: usize = size_of::<BelowStack>() - offset_of!(BelowStack, resume);
const _: () =
    assert!(offset_of!(BelowStack, resume) - offset_of!(BelowStack, nr) == size_of::<usize>());
const _: () =
    assert!(offset_of!(BelowStack, nr) - offset_of!(BelowStack, rdx) == size_of::<usize>());

/// The frame that the entry makes on the slot, just below the record. The handler's stack begins
/// there:
///
/// ```text
///      record -> +------------+ 608  whole
///                | vectors    |      %ymm0 to %ymm15, or %xmm0 to %xmm15
///                |            | 96   in the first half, 16 bytes each
///                | result     | 80   of the handler
///                | record     | 72
///                | sp         | 64   the program's stack pointer
///                | resume     | 56
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
    /// The address after the site's last instruction.
    pub resume: usize,
    /// The program's stack pointer.
    pub sp: usize,
    record: *const GateThread,
    result: isize,
    unused: usize,
    vectors: [[u8; WIDE_BYTES]; VECTORS],
}

/// The vector registers. A system call keeps them, but the handler's code may use them.
const VECTORS: usize = 16;
const WIDE_BYTES: usize = 32;
/// The alignment of the stack with which the handler is called.
const STACK_ALIGN: usize = 16;
const _: () = assert!(size_of::<EnteredCall>().is_multiple_of(STACK_ALIGN));
const _: () = assert!(offset_of!(EnteredCall, vectors).is_multiple_of(WIDE_BYTES));

impl EnteredCall {
    /// Returns the arguments of the call.
    pub fn args(&self) -> [usize; 6] {
        [self.rdi, self.rsi, self.rdx, self.r10, self.r8, self.r9]
    }
}

/// A function that makes a call from a patched site and returns its result, or [`NEEDS_CONTEXT`].
pub type PatchHandler = unsafe extern "C" fn(*const GateThread, *const EnteredCall) -> isize;

const PLACES: usize = 1024;

/// The addresses of records, by a hash of their thread's `fs`. An entry may belong to another
/// thread with the same hash.
#[unsafe(export_name = "memfold_gate_known")]
static KNOWN: [AtomicUsize; PLACES] = [const { AtomicUsize::new(0) }; PLACES];
/// The address of the [`PatchHandler`].
#[unsafe(export_name = "memfold_gate_handler")]
static HANDLER: AtomicUsize = AtomicUsize::new(0);
/// True if vector registers have 32 bytes. A libc that was built for such processors may keep
/// something in them across a call. None is built to use more.
#[unsafe(export_name = "memfold_gate_wide")]
static WIDE: AtomicBool = AtomicBool::new(false);
/// The addresses of the instructions that trap. One makes the call, the other reports that it has
/// been made.
#[unsafe(export_name = "memfold_gate_trap_call")]
static TRAP_CALL: AtomicUsize = AtomicUsize::new(0);
#[unsafe(export_name = "memfold_gate_trap_done")]
static TRAP_DONE: AtomicUsize = AtomicUsize::new(0);

// Assembly finds `pending` at the record's address. The entry makes its frame directly below the
// record, so the frame has the record's alignment.
const _: () =
    assert!(offset_of!(GateThread, pending) == 0 && align_of::<GateThread>() >= size_of::<usize>());
const _: () = assert!(PLACES.is_power_of_two());

global_asm!(
    ".hidden memfold_gate_known",
    ".hidden memfold_gate_handler",
    ".hidden memfold_gate_wide",
    ".hidden memfold_gate_trap_call",
    ".hidden memfold_gate_trap_done",
    ".macro MEMFOLD_GATE_RESTORE",
    " testb $1,memfold_gate_wide(%rip)",
    " jz 8f",
    " vmovups {vectors}+32*0(%rsp),%ymm0",
    " vmovups {vectors}+32*1(%rsp),%ymm1",
    " vmovups {vectors}+32*2(%rsp),%ymm2",
    " vmovups {vectors}+32*3(%rsp),%ymm3",
    " vmovups {vectors}+32*4(%rsp),%ymm4",
    " vmovups {vectors}+32*5(%rsp),%ymm5",
    " vmovups {vectors}+32*6(%rsp),%ymm6",
    " vmovups {vectors}+32*7(%rsp),%ymm7",
    " vmovups {vectors}+32*8(%rsp),%ymm8",
    " vmovups {vectors}+32*9(%rsp),%ymm9",
    " vmovups {vectors}+32*10(%rsp),%ymm10",
    " vmovups {vectors}+32*11(%rsp),%ymm11",
    " vmovups {vectors}+32*12(%rsp),%ymm12",
    " vmovups {vectors}+32*13(%rsp),%ymm13",
    " vmovups {vectors}+32*14(%rsp),%ymm14",
    " vmovups {vectors}+32*15(%rsp),%ymm15",
    " jmp 9f",
    "8:",
    " movups {vectors}+16*0(%rsp),%xmm0",
    " movups {vectors}+16*1(%rsp),%xmm1",
    " movups {vectors}+16*2(%rsp),%xmm2",
    " movups {vectors}+16*3(%rsp),%xmm3",
    " movups {vectors}+16*4(%rsp),%xmm4",
    " movups {vectors}+16*5(%rsp),%xmm5",
    " movups {vectors}+16*6(%rsp),%xmm6",
    " movups {vectors}+16*7(%rsp),%xmm7",
    " movups {vectors}+16*8(%rsp),%xmm8",
    " movups {vectors}+16*9(%rsp),%xmm9",
    " movups {vectors}+16*10(%rsp),%xmm10",
    " movups {vectors}+16*11(%rsp),%xmm11",
    " movups {vectors}+16*12(%rsp),%xmm12",
    " movups {vectors}+16*13(%rsp),%xmm13",
    " movups {vectors}+16*14(%rsp),%xmm14",
    " movups {vectors}+16*15(%rsp),%xmm15",
    "9:",
    " mov {rdi}(%rsp),%rdi",
    " mov {rsi}(%rsp),%rsi",
    " mov {rdx}(%rsp),%rdx",
    " mov {r10}(%rsp),%r10",
    " mov {r8}(%rsp),%r8",
    " mov {r9}(%rsp),%r9",
    ".endm",
    ".pushsection .text.memfold_gate,\"ax\",@progbits",
    ".balign 64",
    ".globl memfold_gate_patched",
    ".hidden memfold_gate_patched",
    ".type memfold_gate_patched,@function",
    // From a site: rax holds the call's number, rcx the address to continue at.
    "memfold_gate_patched:",
    " lea -{red_zone}(%rsp),%rsp",
    " push %rcx",
    " push %rax",
    " push %rdx",
    " rdfsbase %r11",
    " mov %r11,%rcx",
    " shr $12,%rcx",
    " mov %r11,%rdx",
    " shr $22,%rdx",
    " xor %rdx,%rcx",
    " and ${places}-1,%ecx",
    " lea memfold_gate_known(%rip),%rdx",
    " mov (%rdx,%rcx,8),%rdx",
    " test %rdx,%rdx",
    " jz 3f",
    " cmp %r11,{fs}(%rdx)",
    " jne 3f",
    // The thread is on its slot already: a library function that the gate has called makes a call.
    " mov %rdx,%rcx",
    " sub %rsp,%rcx",
    " cmp ${slot_bytes},%rcx",
    " jb 3f",
    " mov %rsp,%r11",
    " lea -{entered_bytes}(%rdx),%rsp",
    " mov %rdi,{rdi}(%rsp)",
    " mov %rsi,{rsi}(%rsp)",
    " mov %r10,{r10}(%rsp)",
    " mov %r8,{r8}(%rsp)",
    " mov %r9,{r9}(%rsp)",
    " mov {below_rdx}(%r11),%rcx",
    " mov %rcx,{rdx}(%rsp)",
    " mov {below_nr}(%r11),%rcx",
    " mov %rcx,{nr}(%rsp)",
    " mov {below_resume}(%r11),%rcx",
    " mov %rcx,{resume}(%rsp)",
    " lea {below_bytes}(%r11),%rcx",
    " mov %rcx,{sp}(%rsp)",
    " mov %rdx,{record}(%rsp)",
    " testb $1,memfold_gate_wide(%rip)",
    " jz 4f",
    " vmovups %ymm0,{vectors}+32*0(%rsp)",
    " vmovups %ymm1,{vectors}+32*1(%rsp)",
    " vmovups %ymm2,{vectors}+32*2(%rsp)",
    " vmovups %ymm3,{vectors}+32*3(%rsp)",
    " vmovups %ymm4,{vectors}+32*4(%rsp)",
    " vmovups %ymm5,{vectors}+32*5(%rsp)",
    " vmovups %ymm6,{vectors}+32*6(%rsp)",
    " vmovups %ymm7,{vectors}+32*7(%rsp)",
    " vmovups %ymm8,{vectors}+32*8(%rsp)",
    " vmovups %ymm9,{vectors}+32*9(%rsp)",
    " vmovups %ymm10,{vectors}+32*10(%rsp)",
    " vmovups %ymm11,{vectors}+32*11(%rsp)",
    " vmovups %ymm12,{vectors}+32*12(%rsp)",
    " vmovups %ymm13,{vectors}+32*13(%rsp)",
    " vmovups %ymm14,{vectors}+32*14(%rsp)",
    " vmovups %ymm15,{vectors}+32*15(%rsp)",
    " jmp 5f",
    "4:",
    " movups %xmm0,{vectors}+16*0(%rsp)",
    " movups %xmm1,{vectors}+16*1(%rsp)",
    " movups %xmm2,{vectors}+16*2(%rsp)",
    " movups %xmm3,{vectors}+16*3(%rsp)",
    " movups %xmm4,{vectors}+16*4(%rsp)",
    " movups %xmm5,{vectors}+16*5(%rsp)",
    " movups %xmm6,{vectors}+16*6(%rsp)",
    " movups %xmm7,{vectors}+16*7(%rsp)",
    " movups %xmm8,{vectors}+16*8(%rsp)",
    " movups %xmm9,{vectors}+16*9(%rsp)",
    " movups %xmm10,{vectors}+16*10(%rsp)",
    " movups %xmm11,{vectors}+16*11(%rsp)",
    " movups %xmm12,{vectors}+16*12(%rsp)",
    " movups %xmm13,{vectors}+16*13(%rsp)",
    " movups %xmm14,{vectors}+16*14(%rsp)",
    " movups %xmm15,{vectors}+16*15(%rsp)",
    "5:",
    " mov %rdx,%rdi",
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
    " mov {resume}(%rsp),%rcx",
    " mov {sp}(%rsp),%rsp",
    ".globl memfold_gate_patched_out",
    ".hidden memfold_gate_patched_out",
    "memfold_gate_patched_out:",
    " jmp *%rcx",
    // A signal is pending and must be handled first.
    "1:",
    " MEMFOLD_GATE_RESTORE",
    " mov {result}(%rsp),%rax",
    " mov {sp}(%rsp),%rsp",
    " lea -{below}(%rsp),%rsp",
    " jmp *memfold_gate_trap_done(%rip)",
    // The call must trap.
    "2:",
    " MEMFOLD_GATE_RESTORE",
    " mov {nr}(%rsp),%rax",
    " mov {sp}(%rsp),%rsp",
    " lea -{below}(%rsp),%rsp",
    " jmp *memfold_gate_trap_call(%rip)",
    // The thread's record wasn't found.
    "3:",
    " pop %rdx",
    " pop %rax",
    " jmp *memfold_gate_trap_call(%rip)",
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
    resume = const offset_of!(EnteredCall, resume),
    sp = const offset_of!(EnteredCall, sp),
    record = const offset_of!(EnteredCall, record),
    result = const offset_of!(EnteredCall, result),
    vectors = const offset_of!(EnteredCall, vectors),
    entered_bytes = const size_of::<EnteredCall>(),
    below_rdx = const offset_of!(BelowStack, rdx),
    below_nr = const offset_of!(BelowStack, nr),
    below_resume = const offset_of!(BelowStack, resume),
    below_bytes = const size_of::<BelowStack>(),
    red_zone = const size_of::<BelowStack>() - offset_of!(BelowStack, red_zone),
    below = const BELOW,
    pending = const offset_of!(GateThread, pending),
    fs = const offset_of!(GateThread, fs),
    slot_bytes = const SLOT_BYTES,
    places = const PLACES,
    needs_context = const NEEDS_CONTEXT,
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

/// Sets the function that makes calls, and the addresses of the two instructions that trap.
pub fn set_up(handler: PatchHandler, trap_call: usize, trap_done: usize) {
    WIDE.store(have_avx2(), SeqCst);
    HANDLER.store(handler as *const () as usize, SeqCst);
    TRAP_CALL.store(trap_call, SeqCst);
    TRAP_DONE.store(trap_done, SeqCst);
}

/// Returns the addresses of the two instructions that trap.
pub fn traps() -> (usize, usize) {
    (TRAP_CALL.load(SeqCst), TRAP_DONE.load(SeqCst))
}

/// Stores the record of the calling thread where patched sites find it, unless another thread has
/// the same `fs`.
pub fn learn(record: &'static GateThread) {
    if record.shares_fs.get() {
        return;
    }
    let fs: usize;
    // SAFETY: the instruction only reads a register. Sites are patched only if the kernel lets
    // programs read `fs`, and this is called only for a patched site.
    unsafe { core::arch::asm!("rdfsbase {}", out(reg) fs, options(nomem, nostack)) };
    record.fs.set(fs);
    KNOWN[(fs >> 12 ^ fs >> 22) % PLACES].store(&raw const *record as usize, SeqCst);
}
