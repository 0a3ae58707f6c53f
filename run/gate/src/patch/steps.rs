//! Steps: the code between a patched site and the entry. A step finds the thread's record by `fs`,
//! and moves the stack pointer to the thread's slot. If no record is found, or the thread is on its
//! slot already, the step traps in place of its site.
//!
//! Steps are copies of one piece of code, in groups. A group lies within the reach of a jump from
//! its sites, and is executable and read-only but while a step is added.
use crate::patch::entry::{self, EnteredCall, STEP_CALL, STEP_DONE};
use crate::record::{GateThread, SLOT_BYTES};
use core::arch::global_asm;
use core::mem::{forget, offset_of};
use core::ops::Range;
use core::slice::from_raw_parts;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use memfold_os::maps::free_near;
use memfold_os::memory::zone::Zone;
use memfold_os::raw::system_call;
use memfold_os::units::PAGE_SIZE;

const GROUP_BYTES: usize = 64 << 10;
/// A program's own code and its libraries are in two places.
const GROUPS: usize = 4;
/// The first addresses of the groups. 0 marks a free entry, and those behind it are free too.
static STARTS: [AtomicUsize; GROUPS] = [const { AtomicUsize::new(0) }; GROUPS];

/// The length of a step, rounded up.
const STEP_BYTES: usize = 160;
const SYSCALL_BYTES: usize = 2;
const ENTRY: usize = 8;
const KNOWN_AT: usize = 16;
const MOV: usize = 40;
const FIND: usize = 45;

const PLACES: usize = 1024;
/// The addresses of records, by a hash of their thread's `fs`. An entry may belong to another
/// thread with the same hash.
static KNOWN: [AtomicUsize; PLACES] = [const { AtomicUsize::new(0) }; PLACES];
const _: () = assert!(PLACES.is_power_of_two());
/// The multiplier of the hash (2^32 divided by the golden ratio: D. Knuth, The Art of Computer
/// Programming, 6.4), as a negative number of 32 bits.
const MIX: i32 = 0x9e37_79b1_u32 as i32;
/// The lowest bit of the product that the hash uses. Those below depend on few bits of `fs`, and
/// those at the top are nearly the same for neighbours.
const MIX_SHIFT: u32 = 34;

const fn place_of(fs: usize) -> usize {
    (fs.wrapping_mul(MIX as usize) >> MIX_SHIFT) % PLACES
}

const _: () = assert!(size_of::<EnteredCall>() < SLOT_BYTES);

global_asm!(
    ".pushsection .text.memfold_gate_step,\"ax\",@progbits",
    ".balign 64",
    ".globl memfold_gate_step",
    ".hidden memfold_gate_step",
    "memfold_gate_step:",
    // The address after the site, the entry's, and that of KNOWN.
    "1: .quad 0",
    "2: .quad 0",
    "3: .quad 0",
    // STEP_CALL: the call traps. If the thread is not armed, the kernel makes it.
    "4: syscall",
    " jmp *1b(%rip)",
    // STEP_DONE
    " syscall",
    " ud2",
    " .balign 8",
    // MOV
    " mov $0x7fffffff,%eax",
    // FIND
    " rdfsbase %r11",
    " imul ${mix},%r11,%rcx",
    " shr ${shift},%rcx",
    " and ${places}-1,%ecx",
    " mov 3b(%rip),%r11",
    " mov (%r11,%rcx,8),%rcx",
    " test %rcx,%rcx",
    " jz 4b",
    " rdfsbase %r11",
    " cmp %r11,{fs}(%rcx)",
    " jne 4b",
    // The thread is on its slot already: a library function that the gate has called makes a call.
    " mov %rcx,%r11",
    " sub %rsp,%r11",
    " cmp ${slot_bytes},%r11",
    " jb 4b",
    " mov %rsp,%r11",
    " lea -{entered_bytes}(%rcx),%rsp",
    " mov %r11,{sp}(%rsp)",
    " lea 1b(%rip),%r11",
    " mov %r11,{step}(%rsp)",
    " jmp *2b(%rip)",
    ".globl memfold_gate_step_end",
    ".hidden memfold_gate_step_end",
    "memfold_gate_step_end:",
    ".popsection",
    mix = const MIX,
    shift = const MIX_SHIFT,
    places = const PLACES,
    fs = const offset_of!(GateThread, fs),
    slot_bytes = const SLOT_BYTES,
    entered_bytes = const size_of::<EnteredCall>(),
    sp = const offset_of!(EnteredCall, sp),
    step = const offset_of!(EnteredCall, step),
    options(att_syntax)
);

unsafe extern "C" {
    #[link_name = "memfold_gate_step"]
    fn code();
    #[link_name = "memfold_gate_step_end"]
    fn code_end();
}

/// Returns whether the instruction at `at` belongs to a step.
pub fn contains(at: usize) -> bool {
    group_of(at).is_some()
}

/// Returns the first address of the group that `at` lies in.
fn group_of(at: usize) -> Option<usize> {
    let starts = STARTS.iter().map(|start| start.load(Relaxed)).take_while(|start| *start != 0);
    starts.into_iter().find(|start| at.wrapping_sub(*start) < GROUP_BYTES)
}

/// A step.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Step(usize);

/// How a step has trapped.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum StepTrap {
    /// The call is to be made.
    Call,
    /// The call has been made.
    Done,
}

impl Step {
    /// Returns the step of an entered call.
    pub fn of(entered: &EnteredCall) -> Step {
        Step(entered.step)
    }

    /// Returns the step whose instruction before `after` has trapped, and which one it was.
    pub fn trapped(after: usize) -> Option<(Step, StepTrap)> {
        let group = group_of(after)?;
        let (step, trap) = ((after - group) / STEP_BYTES, (after - group) % STEP_BYTES);
        let trap = match trap.checked_sub(SYSCALL_BYTES)? {
            STEP_CALL => StepTrap::Call,
            STEP_DONE => StepTrap::Done,
            _ => return None,
        };
        Some((Step(group + step * STEP_BYTES), trap))
    }

    /// Returns the address after the site's last instruction.
    pub fn site_end(self) -> usize {
        // SAFETY: `of` and `trapped` are given addresses of steps that a thread has run through.
        // Steps are aligned to 8 bytes, stay mapped, and are not changed after they are reachable.
        unsafe { *(self.0 as *const usize) }
    }
}

/// Stores the record of the calling thread where steps find it, unless another thread has the same
/// `fs`.
pub fn learn(record: &'static GateThread) {
    if record.shares_fs.get() {
        return;
    }
    let fs: usize;
    // SAFETY: the instruction only reads a register. Sites are patched only if the kernel lets
    // programs read `fs`, and this is called only for a patched site.
    unsafe { core::arch::asm!("rdfsbase {}", out(reg) fs, options(nomem, nostack)) };
    record.fs.set(fs);
    KNOWN[place_of(fs)].store(&raw const *record as usize, SeqCst);
}

/// The steps in use. The caller's lock guards them.
pub struct Steps {
    used: [usize; GROUPS],
}

impl Steps {
    pub const fn new() -> Steps {
        Steps { used: [0; GROUPS] }
    }

    /// Makes a step within the reach of jumps from the code around a site, which is `text`. Returns the
    /// address to jump to, or `None` if there is no room. The step first runs `mov`, the instruction
    /// that the jump to it replaces, if it replaces one. The program continues at `site_end`.
    pub fn add(
        &mut self,
        text: &Range<usize>,
        mov: Option<&[u8; FIND - MOV]>,
        site_end: usize,
    ) -> Option<usize> {
        let group = self.group_near(text, site_end)?;
        let start = STARTS[group].load(SeqCst);
        let at = start + self.used[group] * STEP_BYTES;
        if !protect(start, GROUP_BYTES, true) {
            return None;
        }
        self.used[group] += 1;
        let known = &raw const KNOWN as usize;
        // SAFETY: the code lies in this library's text, which stays mapped and readable. No symbol
        // in between ends it.
        let code = unsafe {
            let start = code as *const () as usize;
            from_raw_parts(start as *const u8, code_end as *const () as usize - start)
        };
        let mut step = [0xcc; STEP_BYTES];
        let mut copy = |at: usize, bytes: &[u8]| step[at..at + bytes.len()].copy_from_slice(bytes);
        copy(0, code);
        copy(0, &site_end.to_le_bytes());
        copy(ENTRY, &entry::entry().to_le_bytes());
        copy(KNOWN_AT, &known.to_le_bytes());
        mov.iter().for_each(|mov| copy(MOV, *mov));
        // SAFETY: the bytes lie in a group, which is writable now. No site leads there yet, so no
        // thread runs them.
        unsafe { core::ptr::copy_nonoverlapping(step.as_ptr(), at as *mut u8, STEP_BYTES) };
        protect(start, GROUP_BYTES, false);
        Some(at + if mov.is_some() { MOV } else { FIND })
    }

    /// Makes the first group near the code at `text`, before other memory takes the place.
    pub fn begin_near(&mut self, text: &Range<usize>) {
        self.group_near(text, text.start);
    }

    /// Returns the number of a group that has room and is near, and makes one if there is none.
    fn group_near(&self, text: &Range<usize>, site: usize) -> Option<usize> {
        for (group, start) in STARTS.iter().enumerate() {
            let at = start.load(SeqCst);
            if at == 0 {
                let place = free_near(GROUP_BYTES, text, REACH_BYTES - GROUP_BYTES)?;
                let zone = Zone::reserve_at(GROUP_BYTES, place).ok()?;
                start.store(zone.start(), SeqCst);
                forget(zone);
                return Some(group);
            }
            let has_room = (self.used[group] + 1) * STEP_BYTES <= GROUP_BYTES;
            if has_room && at.abs_diff(site) < REACH_BYTES {
                return Some(group);
            }
        }
        None
    }
}

/// A jump reaches 2 GiB. Code and steps are within this of each other, with room to spare.
const REACH_BYTES: usize = (2 << 30) - (64 << 20);

/// Makes pages executable and readable, and writable if `write` is true. Returns whether that
/// succeeded.
pub fn protect(start: usize, bytes: usize, write: bool) -> bool {
    debug_assert!(start.is_multiple_of(PAGE_SIZE));
    let access = libc::PROT_READ | libc::PROT_EXEC | if write { libc::PROT_WRITE } else { 0 };
    // SAFETY: the pages hold code of the program, its libraries or the gate's steps. They stay
    // readable and executable, and no Rust reference to them exists.
    unsafe { system_call(libc::SYS_mprotect, [start, bytes, access as usize, 0, 0, 0]) }.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_fits_and_its_parts_are_where_they_are_expected() {
        let (start, end) = (code as *const () as usize, code_end as *const () as usize);
        assert!(end - start <= STEP_BYTES, "{}", end - start);
        // SAFETY: the code lies in this program's text.
        let bytes = unsafe { from_raw_parts(start as *const u8, end - start) };
        const SYSCALL: [u8; 2] = [0x0f, 0x05];
        assert_eq!(bytes[STEP_CALL..][..2], SYSCALL);
        assert_eq!(bytes[STEP_DONE..][..2], SYSCALL);
        assert_eq!(bytes[MOV..FIND], [0xb8, 0xff, 0xff, 0xff, 0x7f]);
        // rdfsbase %r11
        assert_eq!(bytes[FIND..][..5], [0xf3, 0x49, 0x0f, 0xae, 0xc3]);
    }

    #[test]
    fn places_of_neighbouring_threads_differ() {
        // Stacks of 8 MiB with a guard page, and small ones in a heap.
        for distance in [(8 << 20) + 4096, 8 << 20, 256 << 10, 2048] {
            let places = (0..64).map(|n| place_of(0x7f12_3456_7740 - n * distance));
            let different = places.collect::<std::collections::BTreeSet<_>>().len();
            assert!(different > 56, "{distance}: {different}");
        }
    }
}
