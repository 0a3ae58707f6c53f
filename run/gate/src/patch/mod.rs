//! Patches system call sites of the program, libc and the loader that are used often. A patched site
//! enters the gate by a jump, which costs a thirtieth of a trap. Code that the program writes, or
//! maps later, always traps.
//!
//! A site is patched when it has trapped often ([`counts`]), so that short programs copy no page of
//! code. Other threads may run through the site meanwhile, and it isn't known which jumps lead
//! there. There are two ways:
//! - In `mov $nr,%eax; syscall` a jump replaces the first instruction, which has the same length, and
//!   is run elsewhere. A thread that is at the second instruction, or jumps there, traps as before. The
//!   jump is written in three stores: a jump to itself, the last byte, the rest. None crosses a cache
//!   line. The same is done with `mov $AT_FDCWD,%edi; syscall`, by which glibc's `opendir` opens.
//! - Elsewhere a short jump replaces the two bytes of the system call, in one store. It leads to a
//!   long jump in the padding after a return nearby ([`padding`]).
//!
//! Either jump leads to a step ([`steps`]), and the step to the entry ([`entry`]).
//!
//! In both ways the last instruction of the site ends where it did. A handler of the program sees
//! the same address, and a call that is made again starts from there.
mod counts;
pub mod entry;
mod padding;
pub mod steps;

use crate::patch::counts::TrapCounts;
use crate::patch::entry::{PatchHandler, find_width, set_up};
use crate::patch::padding::JUMP_BYTES;
use crate::patch::steps::{Steps, protect};
use core::mem::forget;
use core::ops::{ControlFlow, Range};
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use memfold_os::maps::{Vma, each_area};
use memfold_os::raw::LINE_BYTES;
use memfold_os::sync::StaticMutex;
use memfold_os::thread::capabilities;
use memfold_os::units::PAGE_SIZE;

static TRAPS: TrapCounts = TrapCounts::new();
/// The site that a child of vfork leaves to its parent to patch: the end of its instruction, or 0,
/// and the call's number.
static AWAITED: AwaitedSite = AwaitedSite { after: AtomicUsize::new(0), nr: AtomicUsize::new(0) };
static ON: AtomicBool = AtomicBool::new(false);
/// The address at which the program begins, or 0.
static ENTRY: AtomicUsize = AtomicUsize::new(0);

const SYSCALL: [u8; 2] = [0x0f, 0x05];
const MOV_BYTES: usize = 5;
const SITE_BYTES: usize = MOV_BYTES + SYSCALL.len();
const _: () = assert!(MOV_BYTES == JUMP_BYTES);
const HALVES: usize = 32;
/// The address below which nothing is mapped (`vm.mmap_min_addr`). A `mov` is replaced only if its
/// number is below half of this.
const LOWEST: usize = 1024;
/// The reach of a short jump in bytes, less the length of the long jump.
const REACH: usize = 112;

struct AwaitedSite {
    after: AtomicUsize,
    nr: AtomicUsize,
}

struct PatchedSites {
    /// The second halves of padding of which one jump uses the first half. 0 marks a free entry.
    halves: [usize; HALVES],
    steps: Steps,
}

static SITES: StaticMutex<PatchedSites> =
    StaticMutex::new(PatchedSites { halves: [0; HALVES], steps: Steps::new() });

/// Allows patching of sites. `handler` makes their calls. Does nothing if the kernel doesn't let
/// programs read `fs`.
pub fn allow(handler: PatchHandler) {
    /// The bit of `AT_HWCAP2` that tells that programs may read `fs`.
    const FSGSBASE: usize = 2;
    if capabilities().1 & FSGSBASE != 0 {
        set_up(handler);
        ON.store(true, SeqCst);
    }
}

/// Notes the address at which the program begins, so that sites of its own code are patched too.
pub fn note_entry(entry: usize) {
    ENTRY.store(entry, SeqCst);
}

/// Keeps room for the steps of a program or library at `text`. The caller has mapped it beside memory
/// that the engine is about to reserve in terabytes, and jumps reach 2 GiB.
pub fn keep_room(text: &Range<usize>) {
    SITES.lock().steps.begin_near(text);
}

/// Returns whether the instruction at `at` lies between a patched site and the gate's stack.
pub fn contains(at: usize) -> bool {
    entry::contains(at) || steps::contains(at)
}

/// Notes that call `nr` has trapped at the instruction that ends at `after`. Patches the site when
/// it has trapped often enough.
pub fn note_trap(after: usize, nr: usize) {
    if is_hot(after) {
        SITES.lock().patch(after, nr);
    }
}

/// Does as [`note_trap`], but leaves it to [`patch_awaited`] to patch the site. Takes no lock.
pub fn note_trap_of_child(after: usize, nr: usize) {
    if is_hot(after) {
        AWAITED.nr.store(nr, SeqCst);
        AWAITED.after.store(after, SeqCst);
    }
}

/// Patches the site that trapped often in a child of vfork. Only the last such site is known.
pub fn patch_awaited() {
    if AWAITED.after.load(Relaxed) != 0 {
        // Another thread's child may change the two between the reads. `patch` checks both.
        let (after, nr) = (AWAITED.after.swap(0, SeqCst), AWAITED.nr.load(SeqCst));
        if after != 0 {
            SITES.lock().patch(after, nr);
        }
    }
}

/// Counts a trap. Returns whether the site has trapped often enough to be patched.
fn is_hot(after: usize) -> bool {
    ON.load(Relaxed) && TRAPS.note(after) && after > SITE_BYTES
}

/// Stops patching until [`resume`], by keeping the lock.
pub fn stop() {
    forget(SITES.lock());
}

/// Returns whether a thread patches, or has ended while it did.
pub fn is_held() -> bool {
    SITES.is_held()
}

/// Releases the lock of [`stop`].
///
/// # Safety
/// - `stop` was called in this process, or in the parent that this process is a copy of.
/// - This is called once for that `stop`.
pub unsafe fn resume() {
    // SAFETY: by the caller's promise `stop` took this lock, and no call has released it since.
    // `stop` forgot its guard, so the guard doesn't release it.
    unsafe { SITES.unlock() };
}

impl PatchedSites {
    fn patch(&mut self, after: usize, nr: usize) {
        let site = after - SITE_BYTES;
        let Some(text) = text_of(site - BEFORE..after) else { return };
        // SAFETY: the bytes lie in a text, which stays mapped and readable.
        if unsafe { *((after - SYSCALL.len()) as *const [u8; SYSCALL.len()]) } != SYSCALL {
            // It was noted in a child, and has been patched since.
            return;
        }
        find_width();
        if let Some(mov) = mov_before(site, nr) {
            let Some(step) = self.steps.add(&text, Some(&mov), after) else { return };
            go_by(step, after, (site, MOV_BYTES), |distance| {
                // SAFETY: `mov_before` found that the five bytes at `site` are one whole
                // instruction, and that the first four lie in one line. `go_by` has made the page
                // writable.
                unsafe { replace(site, distance) };
            });
        } else if (after - 2) % LINE_BYTES < LINE_BYTES - 1
            && let Some(room) = self.room_near(after, &text)
        {
            let Some(step) = self.steps.add(&text, None, after) else { return };
            go_by(step, after, (room, JUMP_BYTES), |distance| {
                // SAFETY: `go_by` has made the pages writable. `padding` found that no code runs
                // through the bytes at `room`. The two bytes of the system call lie in one line, as
                // checked above.
                unsafe { detour(after - SYSCALL.len(), room, distance) };
            });
        }
    }

    /// Finds room for a long jump that a short jump at the system call before `after` can reach.
    fn room_near(&mut self, after: usize, text: &Range<usize>) -> Option<usize> {
        let reach = after - REACH..after + REACH;
        if let Some(half) = self.halves.iter_mut().find(|half| reach.contains(half)) {
            return Some(core::mem::take(half));
        }
        let from = reach.start.max(text.start + padding::BEFORE);
        let to = reach.end.min(text.end.checked_sub(padding::LONGEST)?);
        // A thread has trapped at `after`, so an instruction begins there.
        let room = |at| {
            // SAFETY: the bytes from `padding::BEFORE` before `at` to `padding::LONGEST` after it
            // lie in one text, as checked above. The text stays mapped and readable.
            unsafe { padding::at(at, at == after + 1) }.map(|len| (at, len))
        };
        let room = (from..to).find_map(room);
        let (at, len) = room?;
        if len >= 2 * JUMP_BYTES
            && let Some(free) = self.halves.iter_mut().find(|half| **half == 0)
        {
            *free = at + JUMP_BYTES;
        }
        Some(at)
    }
}

/// Lets `write` write the jump that leads to a step. `jump` is the address and the length of that
/// jump. `write` gets the jump's distance.
fn go_by(step: usize, after: usize, jump: (usize, usize), write: impl FnOnce(i32)) {
    let Ok(distance) = i32::try_from(step.wrapping_sub(jump.0 + jump.1) as isize) else {
        return;
    };
    let page = jump.0.min(after - SITE_BYTES) & !(PAGE_SIZE - 1);
    let bytes = (jump.0 + jump.1).max(after).next_multiple_of(PAGE_SIZE) - page;
    if protect(page, bytes, true) {
        write(distance);
        protect(page, bytes, false);
    }
}

/// Returns the addresses of the mapping that holds this code, if its sites may be patched: code
/// from the file of the program, libc or the loader, as it was mapped. A page that was patched may
/// be a mapping of its own, so code at the border of two pages may lie in two mappings.
fn text_of(code: Range<usize>) -> Option<Range<usize>> {
    let (mut begin, mut end, mut of_program) = (None, None, None);
    let entry = ENTRY.load(SeqCst);
    let outcome = each_area(|area| {
        let range = area.start..area.end;
        let found = |at: usize| range.contains(&at).then_some(*area);
        begin = begin.or(found(code.start));
        end = end.or(found(code.end - 1));
        of_program = of_program.or(found(entry));
        ControlFlow::Continue(())
    });
    let (begin, end) = (begin.filter(|_| outcome.is_ok())?, end?);
    let has_same_file =
        |one: &Vma, other: &Vma| (one.inode, one.name()) == (other.inode, other.name());
    let is_text = |area: &Vma| {
        area.private
            && area.readable
            && !area.writable
            && area.executable
            && has_same_file(area, &begin)
    };
    // The code is shorter than a page, so no third mapping lies between the two.
    let is_one = is_text(&begin) && is_text(&end);
    let is_programs = begin.inode != 0 && of_program.is_some_and(|its| has_same_file(&its, &begin));
    (is_one && (is_programs || is_libc(&begin))).then_some(begin.start..end.end)
}

/// The number of bytes before a site that are checked.
const BEFORE: usize = 5;

/// Returns the instruction before a system call if a jump may replace it: it only sets the call's
/// number, or the directory `AT_FDCWD`.
fn mov_before(site: usize, nr: usize) -> Option<[u8; MOV_BYTES]> {
    // SAFETY: `patch` has checked that the site lies in a text, with BEFORE bytes of the text
    // before it. The text stays mapped and readable.
    let bytes = unsafe { &*((site - BEFORE) as *const [u8; BEFORE + SITE_BYTES]) };
    let (before, site_bytes) = bytes.split_at(BEFORE);
    let (mov, call) = site_bytes.split_first_chunk::<MOV_BYTES>()?;
    let [operation, value @ ..] = *mov;
    let sets_number = operation == 0xb8
        && nr < LOWEST / 2
        && value == (nr as u32).to_le_bytes()
        && !may_go_on(before);
    let is_whole = sets_number || is_cwd(before, mov);
    (is_whole && call == SYSCALL && site % LINE_BYTES <= LINE_BYTES - 4).then_some(*mov)
}

/// Returns whether an area is of libc or the loader, of glibc or musl.
fn is_libc(area: &Vma) -> bool {
    let file = area.name().rsplit(|byte| *byte == b'/').next().unwrap_or(&[]);
    let begins = |start: &[u8]| file.starts_with(start);
    area.name().contains(&b'/')
        && (matches!(file, b"libc.so.6" | b"libpthread.so.0" | b"libc.so")
            || begins(b"ld-linux")
            || begins(b"ld-musl"))
}

/// Returns whether `mov $nr,%eax` may be the end of a longer instruction that begins in these
/// bytes. A thread has reached the system call after it with this number in `%rax`.
///
/// In a longer instruction, 0xb8 would mean that the operand is memory at `%rax` plus the number.
/// It has no immediate operand: that would be the bytes of the system call, which a thread has
/// reached. If it left `%rax` unchanged, it would have faulted below [`LOWEST`], where nothing is
/// mapped. So only these remain: an instruction that doesn't touch memory (`lea`, `nop`, a
/// prefetch), one that sets `%rax` (`idiv`, `cmpxchg`), one that addresses memory from a segment,
/// or one with 0xb8 as its operation behind a prefix.
fn may_go_on(before: &[u8]) -> bool {
    let [.., escape, last] = *before else { return true };
    let is_alone = matches!(last, 0x0f | 0x40..=0x4f | 0x8d | 0x8f | 0xc4 | 0xc5 | 0xf6 | 0xf7);
    let is_second = escape == 0x0f && matches!(last, 0x0d | 0x18..=0x1f | 0xb0 | 0xb1);
    is_alone || is_second || before.iter().any(|byte| matches!(byte, 0x64 | 0x65))
}

/// Returns whether `mov` is `mov $AT_FDCWD,%edi`, behind `mov %rdi,%rsi`, and no part of a longer
/// instruction.
///
/// In a longer instruction 0xbf would be one of these, and none is possible behind these bytes:
/// - The byte of operands behind the operation 0xfe. The processor refuses that, with any prefix that
///   fits in front of 0x48.
/// - The last byte of a number. 0x9c 0xff 0xff would follow, which the processor refuses.
/// - A part of a number of four bytes. 0xff 0xff would follow, or 0xfe would be the byte of operands of
///   an operation with such a number. 0x89 has none.
/// - A part of the number of eight bytes that begins at 0x48, which is the only one behind which the
///   system call begins. So no operation that has one stands in front of that.
fn is_cwd(before: &[u8], mov: &[u8; MOV_BYTES]) -> bool {
    const MOV_RDI_RSI: [u8; 3] = [0x48, 0x89, 0xfe];
    let [operation, value @ ..] = *mov;
    let [.., first, a, b, c] = *before else { return false };
    operation == 0xbf
        && value == libc::AT_FDCWD.to_le_bytes()
        && [a, b, c] == MOV_RDI_RSI
        && !matches!(first, 0xa0..=0xa3 | 0xb8..=0xbf)
}

/// Writes a jump over the five bytes at `site`.
///
/// # Safety
/// - The five bytes are one instruction, and writable.
/// - The first four bytes lie in one cache line.
unsafe fn replace(site: usize, distance: i32) {
    const TO_ITSELF: u32 = 0xfeeb_feeb;
    let [a, b, c, last] = distance.to_le_bytes();
    let first = u32::from_le_bytes([0xe9, a, b, c]);
    // SAFETY: the caller promises that the bytes are writable and one instruction, so no thread is
    // in the middle of them. The first four lie in one line, so each store is atomic. Other threads
    // find the old instruction, the jump to itself or the new jump.
    unsafe {
        core::arch::asm!(
            "mov dword ptr [{site}], {itself:e}",
            "mfence",
            "mov byte ptr [{site} + 4], {last}",
            "mfence",
            "mov dword ptr [{site}], {first:e}",
            "mfence",
            site = in(reg) site,
            itself = in(reg) TO_ITSELF,
            last = in(reg_byte) last,
            first = in(reg) first,
            options(nostack)
        );
    }
}

/// Makes the system call at `site` a short jump to a long jump at `room`.
///
/// # Safety
/// - The bytes at both addresses are writable.
/// - No code runs through the five bytes at `room`.
/// - The two bytes at `site` lie in one cache line.
unsafe fn detour(site: usize, room: usize, distance: i32) {
    let [a, b, c, d] = distance.to_le_bytes();
    let short = (room as isize - (site + SYSCALL.len()) as isize) as i8;
    let jump = u16::from_le_bytes([0xeb, short as u8]);
    // SAFETY: the caller promises that the bytes are writable and that no code runs through the
    // five bytes at `room`. The two bytes at `site` lie in one line, so the store is atomic. Other
    // threads find the system call or the short jump.
    unsafe {
        core::ptr::copy_nonoverlapping([0xe9, a, b, c, d].as_ptr(), room as *mut u8, JUMP_BYTES);
        core::arch::asm!(
            "mfence",
            "mov word ptr [{site}], {jump:x}",
            "mfence",
            site = in(reg) site,
            jump = in(reg) jump,
            options(nostack)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(64))]
    struct AlignedCode([u8; 16]);

    fn is_mov(before: &[u8], operation: u8, value: u32, nr: u32) -> bool {
        let (mut code, start) = (AlignedCode([0x90; 16]), BEFORE);
        code.0[start - before.len()..start].copy_from_slice(before);
        code.0[start] = operation;
        code.0[start + 1..start + MOV_BYTES].copy_from_slice(&value.to_le_bytes());
        code.0[start + MOV_BYTES..start + SITE_BYTES].copy_from_slice(&SYSCALL);
        mov_before(code.0.as_ptr() as usize + start, nr as usize).is_some()
    }

    fn is_site(before: &[u8], nr: u32) -> bool {
        is_mov(before, 0xb8, nr, nr)
    }

    #[test]
    fn directory_is_set_by_a_whole_instruction() {
        const CWD: u32 = libc::AT_FDCWD as u32;
        // mov %rdi,%rsi, also behind another instruction
        let behind = |before: &[u8]| is_mov(before, 0xbf, CWD, 257);
        assert!(behind(&[0x48, 0x89, 0xfe]) && behind(&[0x01, 0x48, 0x89, 0xfe]));
        // movabs of these bytes; mov %edi,-100(%rdi); mov %edi,%esi
        assert!(!behind(&[0xb8, 0x48, 0x89, 0xfe]) && !behind(&[0x89]) && !behind(&[0x89, 0xfe]));
        // Another number, another register, and the number of a call
        assert!(
            !is_mov(&[0x48, 0x89, 0xfe], 0xbf, 3, 3)
                && !is_mov(&[0x48, 0x89, 0xfe], 0xbe, CWD, 257)
        );
        assert!(!is_mov(&[0x48, 0x89, 0xfe], 0xb8, CWD, 257));
    }

    #[test]
    fn number_site_differs_from_a_longer_instruction_end() {
        // xor %r9d,%r9d; xor %r8d,%r8d; mov %eax,%r10d; mov 8(%rsp),%edi; sub $8,%rsp; mov
        // %edx,%esi
        assert!(is_site(&[0x45, 0x31, 0xc9], 45) && is_site(&[0x45, 0x31, 0xc0], 45));
        assert!(is_site(&[0x41, 0x89, 0xca], 44) && is_site(&[0x8b, 0x7c, 0x24, 0x08], 7));
        assert!(is_site(&[0x48, 0x83, 0xec, 0x08], 202) && is_site(&[0x89, 0xd6], 202));
        // mov $45,%r8d; lea 45(%rax),%edi; idivl 45(%rax); cmpxchg %edi,45(%rax); nopl 45(%rax)
        assert!(!is_site(&[0x41], 45) && !is_site(&[0x8d], 45) && !is_site(&[0xf7], 45));
        assert!(!is_site(&[0x0f, 0xb1], 45) && !is_site(&[0x0f, 0x1f], 45));
        // popcnt; mov %fs:45(%rax),%rdi
        assert!(!is_site(&[0xf3, 0x0f], 45) && !is_site(&[0x64, 0x48, 0x8b], 45));
        // A program that maps memory at 0 may use the number 1000.
        assert!(!is_site(&[0x90], 1000));
    }
}
