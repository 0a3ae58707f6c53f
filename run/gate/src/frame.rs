//! The structs that the kernel writes when it calls a signal handler, and reads when the handler
//! returns (`arch/x86/include/uapi/asm/sigcontext.h`, `ucontext.h`).

use memfold_os::raw::system_call;

/// The kernel's `struct sigcontext`.
#[repr(C)]
#[derive(Copy, Clone)]
#[allow(missing_docs)]
pub struct SavedRegisters {
    pub r8: u64,
    pub r9: u64,
    pub r10: u64,
    pub r11: u64,
    pub r12: u64,
    pub r13: u64,
    pub r14: u64,
    pub r15: u64,
    pub rdi: u64,
    pub rsi: u64,
    pub rbp: u64,
    pub rbx: u64,
    pub rdx: u64,
    pub rax: u64,
    pub rcx: u64,
    pub rsp: u64,
    pub rip: u64,
    pub flags: u64,
    pub segments: u64,
    pub error: u64,
    pub trap: u64,
    pub old_mask: u64,
    pub address: u64,
    /// The address of the floating point state. 0 means the state that a program starts with.
    pub fp: u64,
    pub reserved: [u64; 8],
}

impl SavedRegisters {
    /// Returns the number and the arguments of the system call that these registers make.
    pub fn call(&self) -> (usize, [usize; 6]) {
        let args = [self.rdi, self.rsi, self.rdx, self.r10, self.r8, self.r9];
        (self.rax as usize, args.map(|word| word as usize))
    }
}

/// The kernel's `stack_t`.
#[repr(C)]
#[derive(Copy, Clone, PartialEq, Eq)]
pub struct AlternateStack {
    /// The address of the stack's first byte.
    pub sp: usize,
    /// Bits of SS_DISABLE, SS_ONSTACK and SS_AUTODISARM.
    pub flags: i32,
    pub(crate) padding: i32,
    /// The length of the stack in bytes.
    pub size: usize,
}

impl AlternateStack {
    /// A disabled alternate stack.
    pub const NONE: AlternateStack =
        AlternateStack { sp: 0, flags: libc::SS_DISABLE, padding: 0, size: 0 };

    /// Returns whether the stack pointer `sp` lies in this stack.
    pub fn contains(&self, sp: usize) -> bool {
        sp > self.sp && sp - self.sp <= self.size
    }
}

/// The kernel's `struct ucontext`.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct SignalContext {
    pub(crate) flags: u64,
    pub(crate) link: u64,
    /// The alternate stack of the interrupted code.
    pub stack: AlternateStack,
    /// The registers of the interrupted code.
    pub regs: SavedRegisters,
    /// The signal mask that the return from the handler sets.
    pub mask: u64,
}

/// The kernel's `siginfo_t`.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct SignalInfo {
    pub(crate) signal: i32,
    errno: i32,
    /// The reason. It is above 0 if the kernel sent the signal, and otherwise a process sent it.
    pub code: i32,
    arch_padding: i32,
    /// The address of a fault. In a sent signal, the sender's process and user.
    pub address: u64,
    /// In SIGSYS, the call's number (low half) and architecture (high half).
    pub call: u64,
    rest: [u64; 12],
}

/// Bounds and marks of signal codes. The kernel's signal codes are below `CODES` in absolute value.
/// The gate marks a signal by subtracting one of the other three from its code. They mark a signal
/// that is sent on, a nudge, and a fault that the program has made up.
const CODES: u32 = 1 << 12;
const FORWARDED: i32 = 1 << 16;
const NUDGE: i32 = 1 << 20;
const MADE_UP: i32 = 1 << 30;
/// The mark of a made-up fault that was sent to one thread.
const MADE_UP_FOR_THREAD: i32 = MADE_UP + MADE_UP_CODES;
/// The first code that isn't marked when the program makes it up.
const MADE_UP_CODES: i32 = 1 << 29;

/// Returns the code of the signal that a nudge is about, or `None` if `code` isn't a nudge's.
pub fn code_of_nudge(code: i32) -> Option<i32> {
    let code = code.saturating_add(NUDGE);
    (code.unsigned_abs() < CODES).then_some(code)
}

/// Returns the code that the program made up, or `None` if `code` has no such mark.
fn made_up(code: i32) -> Option<i32> {
    let of = |mark: i32| code.checked_add(mark).filter(|code| (1..MADE_UP_CODES).contains(code));
    of(MADE_UP).or_else(|| of(MADE_UP_FOR_THREAD))
}

/// Returns the code as it was before the signal was sent on, or `None` if it wasn't sent on.
fn code_before_forwarding(code: i32) -> Option<i32> {
    let code = code.saturating_add(FORWARDED);
    (code.unsigned_abs() < CODES).then_some(code)
}

/// Returns the code without marks of the gate, as the program must see it.
pub fn code_to_show(code: i32) -> i32 {
    let code = code_before_forwarding(code).unwrap_or(code);
    made_up(code).unwrap_or(code)
}

/// The kernel's code for a signal without a special reason. It is also the greatest code of a
/// fault.
const SI_KERNEL: i32 = 0x80;

impl SignalInfo {
    /// All fields zero.
    pub const NONE: SignalInfo = SignalInfo {
        signal: 0,
        errno: 0,
        code: 0,
        arch_padding: 0,
        address: 0,
        call: 0,
        rest: [0; 12],
    };

    /// Returns the information of a signal that the kernel forces, for example if it can't write a
    /// frame.
    pub fn forced(signal: i32) -> SignalInfo {
        SignalInfo { signal, code: SI_KERNEL, ..SignalInfo::NONE }
    }

    /// Returns the information of a signal for `rt_tgsigqueueinfo`. It carries `number`.
    pub fn queued(signal: i32, code: i32, process: u32, number: u64) -> SignalInfo {
        SignalInfo { signal, code, address: u64::from(process), call: number, ..SignalInfo::NONE }
    }

    /// Returns the number of the call that a filter has refused by SECCOMP_RET_TRAP, or `None` if
    /// this is another signal.
    pub fn refused(&self) -> Option<usize> {
        const SYS_SECCOMP: i32 = 1;
        let is = self.signal == libc::SIGSYS && self.code == SYS_SECCOMP;
        is.then_some(self.call as u32 as usize)
    }

    /// Returns the information of a signal that `process` sends by `kill`.
    pub fn of_user(signal: i32, process: u32) -> SignalInfo {
        // SAFETY: the call takes no arguments and touches no memory.
        let user = unsafe { system_call(libc::SYS_getuid, [0; 6]) }.unwrap_or(0) as u64;
        SignalInfo { signal, address: user << 32 | u64::from(process), ..SignalInfo::NONE }
    }

    /// Returns the information with a code that one thread may send to another. The kernel refuses
    /// codes of 0 and above, and that of `tgkill`.
    pub fn forwarded(&self) -> SignalInfo {
        if made_up(self.code).is_some() {
            return *self;
        }
        SignalInfo { code: self.code - FORWARDED, ..*self }
    }

    /// Marks a signal that a thread sends to itself with the code of a fault. Returns `None` if it
    /// has no such code. Without the mark, the gate and the kernel would take it for a fault: the
    /// kernel would deliver it beside a SIGSYS even if it is blocked
    /// (`dequeue_synchronous_signal`). Words that the kernel doesn't know are dropped, as the
    /// kernel does.
    pub fn made_up(&self, for_thread: bool) -> Option<SignalInfo> {
        const KNOWN_WORDS: usize = 2;
        let mut rest = self.rest;
        rest[KNOWN_WORDS..].fill(0);
        let is = (1..MADE_UP_CODES).contains(&self.code) && self.can_be_fault();
        let mark = if for_thread { MADE_UP_FOR_THREAD } else { MADE_UP };
        is.then(|| SignalInfo { code: self.code - mark, rest, ..*self })
    }

    /// Returns the same information for another signal.
    pub fn of(&self, signal: i32) -> SignalInfo {
        SignalInfo { signal, ..*self }
    }

    /// Returns the information as the program must see it, without marks of the gate.
    pub fn shown(&self) -> SignalInfo {
        SignalInfo { code: code_to_show(self.code), ..*self }
    }

    /// Returns the signal as it was before it was sent on, or `None` if it wasn't sent on.
    pub fn before_forwarding(&self) -> Option<SignalInfo> {
        code_before_forwarding(self.code).map(|code| SignalInfo { code, ..*self })
    }

    /// Returns a nudge about this signal. A nudge makes a thread check the kept signals again.
    pub fn nudge(&self) -> SignalInfo {
        let code = if made_up(self.code).is_some() { 0 } else { self.code };
        SignalInfo { code: code - NUDGE, ..*self }
    }

    /// Returns whether this is a nudge.
    pub fn is_nudge(&self) -> bool {
        code_of_nudge(self.code).is_some()
    }

    /// Returns whether the signal was sent to a thread (`tgkill`) and not to a process.
    pub fn is_for_thread(&self) -> bool {
        const SI_TKILL: i32 = -6;
        let of_thread = self.code.saturating_add(MADE_UP_FOR_THREAD);
        self.code == SI_TKILL || (1..MADE_UP_CODES).contains(&of_thread)
    }

    /// Returns the same information for the instruction that ends at `address`.
    pub fn made_at(&self, address: u64) -> SignalInfo {
        SignalInfo { address, ..*self }
    }

    /// Returns the number of the process that sent the signal.
    pub fn sender(&self) -> u32 {
        self.address as u32
    }

    fn can_be_fault(&self) -> bool {
        let faults = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP];
        faults.contains(&self.signal) || self.signal == libc::SIGSYS
    }

    /// Returns whether the interrupted instruction caused the signal. Two codes of these signals
    /// don't come from an instruction: damaged memory that isn't touched yet, and a counter that
    /// has overflowed.
    pub fn is_fault(&self) -> bool {
        const BUS_MCEERR_AO: i32 = 5;
        const TRAP_PERF: i32 = 6;
        let is_sent = match self.signal {
            libc::SIGBUS => self.code == BUS_MCEERR_AO,
            libc::SIGTRAP => self.code == TRAP_PERF,
            _ => false,
        };
        (1..=SI_KERNEL).contains(&self.code) && self.can_be_fault() && !is_sent
    }
}

const _: () = assert!(size_of::<SignalContext>() == 304 && size_of::<SignalInfo>() == 128);

/// The frame that the kernel writes on a handler's stack.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct SignalFrame {
    /// The address of the restorer, to which the handler returns.
    pub returns_to: usize,
    /// The state of the interrupted code.
    pub context: SignalContext,
    /// The signal's information.
    pub info: SignalInfo,
}

const LEGACY_BYTES: usize = 512;
const HEADER_BYTES: usize = 64;
const MAGIC: u32 = 0x4650_5853;
const MAGIC_AT: usize = 464;

/// Returns the length in bytes of the floating point state that begins with `legacy`.
pub fn fp_bytes(legacy: &[u8; LEGACY_BYTES]) -> usize {
    let word = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|i| legacy[at + i]));
    if word(MAGIC_AT) == MAGIC { word(MAGIC_AT + 4) as usize } else { LEGACY_BYTES }
}

/// Returns the length in bytes of a floating point state that the kernel wrote.
///
/// # Safety
/// - `at` is the address of a floating point state that the kernel wrote. No other code writes to
///   it.
pub unsafe fn fp_bytes_at(at: usize) -> usize {
    // SAFETY: the caller promises that the kernel wrote a state at `at`. Each state has at least
    // LEGACY_BYTES bytes, and `u8` needs no alignment.
    fp_bytes(unsafe { &*(at as *const [u8; LEGACY_BYTES]) })
}

/// Copies the context of a handler, with the floating point state that it names, to the end of
/// `stack`. The copy has the alignment of the original.
///
/// # Safety
/// - The kernel wrote the context for a handler that hasn't returned.
/// - `stack` is writable and has room, and no other code uses it.
pub unsafe fn copy_context(
    context: &SignalContext,
    stack: &AlternateStack,
) -> &'static mut SignalContext {
    let from = &raw const *context as usize;
    let fp = context.regs.fp as usize;
    // SAFETY: the kernel wrote the context and the floating point state above it, to which `fp`
    // points.
    let bytes = fp + unsafe { fp_bytes_at(fp) } - from;
    let to = ((stack.sp + stack.size - bytes - 64) & !63) + from % 64;
    // SAFETY: the `bytes` bytes from `from` on are the handler's frame. `to` leaves room for them
    // below the end of `stack`, which by the caller's promise nothing else uses. So the two don't
    // overlap.
    let copy = unsafe {
        core::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes);
        &mut *(to as *mut SignalContext)
    };
    copy.regs.fp = (fp - from + to) as u64;
    copy
}

/// Resets a floating point state to the one that a program starts with.
///
/// # Safety
/// - `at` is the address of a floating point state that the kernel wrote, and no other code uses
///   it.
pub unsafe fn clear_fp(at: usize) {
    // SAFETY: the caller promises that a state lies at `at` and that no other code uses it. The
    // kernel aligns it to at least 16 bytes. A state that is longer than the legacy part and the
    // header has the header, so the header's first word may be written.
    unsafe {
        if fp_bytes_at(at) > LEGACY_BYTES + HEADER_BYTES {
            ((at + LEGACY_BYTES) as *mut u64).write(0);
        }
        // The control words of x87 and SSE. A state without the header leaves the other registers
        // as they are, and handlers don't rely on their values.
        (at as *mut u16).write(0x37f);
        ((at + 24) as *mut u32).write(0x1f80);
    }
}

/// The kernel's `struct sigaction`.
#[repr(C)]
#[derive(Copy, Clone, PartialEq, Eq)]
pub struct SignalAction {
    /// The address of a function, or SIG_DFL or SIG_IGN.
    pub handler: usize,
    /// Bits of SA_*.
    pub flags: u64,
    /// The address that the handler returns to.
    pub restorer: usize,
    /// The set of signals that are blocked while the handler runs.
    pub mask: u64,
}

impl SignalAction {
    /// The default action.
    pub const DEFAULT: SignalAction = SignalAction { handler: 0, flags: 0, restorer: 0, mask: 0 };

    /// Returns whether the action is a function, and not SIG_DFL or SIG_IGN.
    pub fn is_handler(&self) -> bool {
        self.handler > libc::SIG_IGN
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_os::thread::process_id;

    /// Asks the kernel, by signal 0, whether the calling thread may send this to its process.
    fn may_send(info: &SignalInfo) -> bool {
        let args = [process_id() as usize, 0, &raw const *info as usize, 0, 0, 0];
        // SAFETY: the kernel reads one `siginfo_t`, which `info` is, and sends no signal.
        unsafe { system_call(libc::SYS_rt_sigqueueinfo, args) }.is_ok()
    }

    /// Threads of the engine send signals on, and none of them is the first of its process.
    #[test]
    fn any_thread_may_send_a_signal_on_to_its_process() {
        const SI_TKILL: i32 = -6;
        for code in [0, SI_TKILL, SI_KERNEL, -1, -2] {
            let info = SignalInfo { code, ..SignalInfo::of_user(libc::SIGSYS, process_id()) };
            let info_sent = info.forwarded();
            let may = std::thread::scope(|scope| {
                let both = scope.spawn(|| [may_send(&info), may_send(&info_sent)]);
                both.join().unwrap()
            });
            assert_eq!(may, [code < 0 && code != SI_TKILL, true], "{code}");
            let before = info_sent.before_forwarding().map(|before| before.code);
            assert_eq!((info_sent.shown().code, before), (code, Some(code)));
        }
    }
}
