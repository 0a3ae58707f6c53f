//! Where patched sites arrive: on the thread's slot, with what a system call keeps kept.
//!
//! Until the stack pointer is on the slot, and after it has left it, a signal is put off as in the
//! gate; it is seen before the site is gone back to. A thread whose record isn't found, and a call
//! that needs a full context, go on as a trapped call of the same site.
use crate::record::{Record, SLOT_BYTES};
use core::arch::global_asm;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use memfold_sys::vectors::have_avx2;

/// What [`Handler`] gives for a call that must come as SIGSYS.
pub const AGAIN: isize = -513;

/// Below the program's stack pointer, while it is trapped from here: the end of the site's
/// instruction, and below that the number of the call.
pub const BELOW: usize = 136;

/// What the entry has put onto the slot.
#[repr(C)]
pub struct Entered {
    /// Number.
    pub nr: usize,
    rdi: usize,
    rsi: usize,
    rdx: usize,
    r10: usize,
    r8: usize,
    r9: usize,
    /// The end of the site's instruction.
    pub resume: usize,
    /// The program's stack pointer.
    pub sp: usize,
}

impl Entered {
    /// The arguments.
    pub fn args(&self) -> [usize; 6] {
        [self.rdi, self.rsi, self.rdx, self.r10, self.r8, self.r9]
    }
}

/// Makes a call.
pub type Handler = unsafe extern "C" fn(*const Record, *const Entered) -> isize;

const PLACES: usize = 1024;

/// Records by their thread's `fs`; what is here may be another thread's.
#[unsafe(export_name = "memfold_gate_known")]
static KNOWN: [AtomicUsize; PLACES] = [const { AtomicUsize::new(0) }; PLACES];
/// The [`Handler`].
#[unsafe(export_name = "memfold_gate_handler")]
static HANDLER: AtomicUsize = AtomicUsize::new(0);
/// Whether vector registers have 32 bytes, in which a libc that was built for such processors may
/// keep something across a call. None is built to use more.
#[unsafe(export_name = "memfold_gate_wide")]
static WIDE: AtomicBool = AtomicBool::new(false);
/// Instructions that trap: one makes the call, the other says that it has been made.
#[unsafe(export_name = "memfold_gate_trap_call")]
static TRAP_CALL: AtomicUsize = AtomicUsize::new(0);
#[unsafe(export_name = "memfold_gate_trap_done")]
static TRAP_DONE: AtomicUsize = AtomicUsize::new(0);

const _: () = assert!(core::mem::offset_of!(Record, fs) == 8 && SLOT_BYTES == 262144);

global_asm!(
    ".hidden memfold_gate_known",
    ".hidden memfold_gate_handler",
    ".hidden memfold_gate_wide",
    ".hidden memfold_gate_trap_call",
    ".hidden memfold_gate_trap_done",
    ".macro MEMFOLD_GATE_RESTORE",
    " testb $1,memfold_gate_wide(%rip)",
    " jz 8f",
    " vmovups 96(%rsp),%ymm0",
    " vmovups 128(%rsp),%ymm1",
    " vmovups 160(%rsp),%ymm2",
    " vmovups 192(%rsp),%ymm3",
    " vmovups 224(%rsp),%ymm4",
    " vmovups 256(%rsp),%ymm5",
    " vmovups 288(%rsp),%ymm6",
    " vmovups 320(%rsp),%ymm7",
    " vmovups 352(%rsp),%ymm8",
    " vmovups 384(%rsp),%ymm9",
    " vmovups 416(%rsp),%ymm10",
    " vmovups 448(%rsp),%ymm11",
    " vmovups 480(%rsp),%ymm12",
    " vmovups 512(%rsp),%ymm13",
    " vmovups 544(%rsp),%ymm14",
    " vmovups 576(%rsp),%ymm15",
    " jmp 9f",
    "8:",
    " movups 96(%rsp),%xmm0",
    " movups 112(%rsp),%xmm1",
    " movups 128(%rsp),%xmm2",
    " movups 144(%rsp),%xmm3",
    " movups 160(%rsp),%xmm4",
    " movups 176(%rsp),%xmm5",
    " movups 192(%rsp),%xmm6",
    " movups 208(%rsp),%xmm7",
    " movups 224(%rsp),%xmm8",
    " movups 240(%rsp),%xmm9",
    " movups 256(%rsp),%xmm10",
    " movups 272(%rsp),%xmm11",
    " movups 288(%rsp),%xmm12",
    " movups 304(%rsp),%xmm13",
    " movups 320(%rsp),%xmm14",
    " movups 336(%rsp),%xmm15",
    "9:",
    " mov 8(%rsp),%rdi",
    " mov 16(%rsp),%rsi",
    " mov 24(%rsp),%rdx",
    " mov 32(%rsp),%r10",
    " mov 40(%rsp),%r8",
    " mov 48(%rsp),%r9",
    ".endm",
    ".pushsection .text.memfold_gate,\"ax\",@progbits",
    ".balign 64",
    ".globl memfold_gate_patched",
    ".hidden memfold_gate_patched",
    ".type memfold_gate_patched,@function",
    // From a site: rax the number, rcx where to go on.
    "memfold_gate_patched:",
    " lea -128(%rsp),%rsp",
    " push %rcx",
    " push %rax",
    " push %rdx",
    " rdfsbase %r11",
    " mov %r11,%rcx",
    " shr $12,%rcx",
    " mov %r11,%rdx",
    " shr $22,%rdx",
    " xor %rdx,%rcx",
    " and $1023,%ecx",
    " lea memfold_gate_known(%rip),%rdx",
    " mov (%rdx,%rcx,8),%rdx",
    " test %rdx,%rdx",
    " jz 3f",
    " cmp %r11,8(%rdx)",
    " jne 3f",
    // A call of somebody's on whom the gate relies, who is on the slot already.
    " mov %rdx,%rcx",
    " sub %rsp,%rcx",
    " cmp $262144,%rcx",
    " jb 3f",
    " mov %rsp,%r11",
    " lea -608(%rdx),%rsp",
    " mov %rdi,8(%rsp)",
    " mov %rsi,16(%rsp)",
    " mov %r10,32(%rsp)",
    " mov %r8,40(%rsp)",
    " mov %r9,48(%rsp)",
    " mov 0(%r11),%rcx",
    " mov %rcx,24(%rsp)",
    " mov 8(%r11),%rcx",
    " mov %rcx,0(%rsp)",
    " mov 16(%r11),%rcx",
    " mov %rcx,56(%rsp)",
    " lea 152(%r11),%rcx",
    " mov %rcx,64(%rsp)",
    " mov %rdx,72(%rsp)",
    " testb $1,memfold_gate_wide(%rip)",
    " jz 4f",
    " vmovups %ymm0,96(%rsp)",
    " vmovups %ymm1,128(%rsp)",
    " vmovups %ymm2,160(%rsp)",
    " vmovups %ymm3,192(%rsp)",
    " vmovups %ymm4,224(%rsp)",
    " vmovups %ymm5,256(%rsp)",
    " vmovups %ymm6,288(%rsp)",
    " vmovups %ymm7,320(%rsp)",
    " vmovups %ymm8,352(%rsp)",
    " vmovups %ymm9,384(%rsp)",
    " vmovups %ymm10,416(%rsp)",
    " vmovups %ymm11,448(%rsp)",
    " vmovups %ymm12,480(%rsp)",
    " vmovups %ymm13,512(%rsp)",
    " vmovups %ymm14,544(%rsp)",
    " vmovups %ymm15,576(%rsp)",
    " jmp 5f",
    "4:",
    " movups %xmm0,96(%rsp)",
    " movups %xmm1,112(%rsp)",
    " movups %xmm2,128(%rsp)",
    " movups %xmm3,144(%rsp)",
    " movups %xmm4,160(%rsp)",
    " movups %xmm5,176(%rsp)",
    " movups %xmm6,192(%rsp)",
    " movups %xmm7,208(%rsp)",
    " movups %xmm8,224(%rsp)",
    " movups %xmm9,240(%rsp)",
    " movups %xmm10,256(%rsp)",
    " movups %xmm11,272(%rsp)",
    " movups %xmm12,288(%rsp)",
    " movups %xmm13,304(%rsp)",
    " movups %xmm14,320(%rsp)",
    " movups %xmm15,336(%rsp)",
    "5:",
    " mov %rdx,%rdi",
    " mov %rsp,%rsi",
    " call *memfold_gate_handler(%rip)",
    " mov %rax,80(%rsp)",
    ".globl memfold_gate_patched_look",
    ".hidden memfold_gate_patched_look",
    "memfold_gate_patched_look:",
    " cmpq $-513,80(%rsp)",
    " je 2f",
    " mov 72(%rsp),%r11",
    " cmpl $0,(%r11)",
    " jne 1f",
    " MEMFOLD_GATE_RESTORE",
    " mov 80(%rsp),%rax",
    " mov 56(%rsp),%rcx",
    " mov 64(%rsp),%rsp",
    ".globl memfold_gate_patched_out",
    ".hidden memfold_gate_patched_out",
    "memfold_gate_patched_out:",
    " jmp *%rcx",
    // A signal is to be handled first.
    "1:",
    " MEMFOLD_GATE_RESTORE",
    " mov 80(%rsp),%rax",
    " mov 64(%rsp),%rsp",
    " lea -136(%rsp),%rsp",
    " jmp *memfold_gate_trap_done(%rip)",
    // The call must come as SIGSYS.
    "2:",
    " MEMFOLD_GATE_RESTORE",
    " mov 0(%rsp),%rax",
    " mov 64(%rsp),%rsp",
    " lea -136(%rsp),%rsp",
    " jmp *memfold_gate_trap_call(%rip)",
    // The thread isn't known.
    "3:",
    " pop %rdx",
    " pop %rax",
    " jmp *memfold_gate_trap_call(%rip)",
    ".globl memfold_gate_patched_end",
    ".hidden memfold_gate_patched_end",
    "memfold_gate_patched_end:",
    " ud2",
    ".popsection",
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

/// Where sites jump to.
pub fn entry() -> usize {
    patched as *const () as usize
}

/// The way back, where a signal must be looked for again.
pub fn rewind(at: usize) -> usize {
    let look = look as *const () as usize;
    if (look..out as *const () as usize).contains(&at) { look } else { at }
}

/// Whether an instruction is the entry's.
pub fn contains(at: usize) -> bool {
    (entry()..end as *const () as usize).contains(&at)
}

/// Whether only the jump back is left.
pub fn is_out(at: usize) -> bool {
    at == out as *const () as usize
}

/// Has calls made by `handler`, and trapped by instructions at these addresses.
pub fn set_up(handler: Handler, trap_call: usize, trap_done: usize) {
    WIDE.store(have_avx2(), SeqCst);
    HANDLER.store(handler as *const () as usize, SeqCst);
    TRAP_CALL.store(trap_call, SeqCst);
    TRAP_DONE.store(trap_done, SeqCst);
}

/// Where the trapping instructions are.
pub fn traps() -> (usize, usize) {
    (TRAP_CALL.load(SeqCst), TRAP_DONE.load(SeqCst))
}

/// Lets the calling thread, whose record this is, be found.
pub fn learn(record: &'static Record) {
    if record.shares_fs.get() {
        return;
    }
    let fs: usize;
    // SAFETY: reads a register; sites are patched only where the kernel lets programs.
    unsafe { core::arch::asm!("rdfsbase {}", out(reg) fs, options(nomem, nostack)) };
    record.fs.set(fs);
    KNOWN[(fs >> 12 ^ fs >> 22) % PLACES].store(&raw const *record as usize, SeqCst);
}
