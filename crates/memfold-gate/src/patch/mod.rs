//! Patches system call sites of libc and the loader that are used often. A patched site enters the
//! gate by a jump, which costs a thirtieth of a trap.
//!
//! A site is patched when it has trapped [`HOT`] times, so that short programs copy no page of
//! libc. Other threads may run through the site meanwhile, and it isn't known which jumps lead
//! there. There are two ways:
//! - In `mov $nr,%eax; syscall` a jump replaces the first instruction, which has the same length. A
//!   thread that is at the second instruction, or jumps there, traps as before. The jump is written
//!   in three stores: a jump to itself, the last byte, the rest. None crosses a cache line.
//! - Elsewhere a short jump replaces the two bytes of the system call, in one store. It leads to a
//!   long jump in the padding after a return nearby ([`padding`]).
//!
//! In both ways the last instruction of the site ends where it did. A handler of the program sees
//! the same address, and a call that is made again starts from there.
pub mod entry;
mod padding;

use crate::patch::entry::{BELOW, PatchHandler, set_up};
use crate::patch::padding::JUMP_BYTES;
use core::mem::forget;
use core::ops::ControlFlow;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use memfold_os::maps::{Vma, each_area};
use memfold_os::memory::zone::Zone;
use memfold_os::raw::{LINE_BYTES, system_call};
use memfold_os::sync::StaticMutex;
use memfold_os::thread::capabilities;
use memfold_os::units::PAGE_SIZE;

/// The number of traps after which a site is patched. By then they have cost more than the page
/// that is copied.
const HOT: u32 = 8;
const COUNTERS: usize = 1024;
static HITS: [AtomicU32; COUNTERS] = [const { AtomicU32::new(0) }; COUNTERS];
static ON: AtomicBool = AtomicBool::new(false);
static HANDLER: AtomicUsize = AtomicUsize::new(0);
static START: AtomicUsize = AtomicUsize::new(0);

const SITES_BYTES: usize = 64 << 10;
const STRIDE: usize = 32;
/// The number of strides at the start, which hold the entry's address and the two instructions that
/// trap.
const HEAD_STRIDES: usize = 2;
const TRAP_DONE: usize = 8;
const TRAP_CALL: usize = 16;
const SYSCALL: [u8; 2] = [0x0f, 0x05];
const UD2: [u8; 2] = [0x0f, 0x0b];
/// `mov (%rsp),%rcx; lea 136(%rsp),%rsp; jmp *%rcx`. It leads an unarmed thread back to the site
/// after the kernel has made its call.
const BACK: [u8; 14] = [0x48, 0x8b, 0x0c, 0x24, 0x48, 0x8d, 0xa4, 0x24, 136, 0, 0, 0, 0xff, 0xe1];
const _: () = assert!(BELOW == 136);
const MOV_BYTES: usize = 5;
const SITE_BYTES: usize = MOV_BYTES + SYSCALL.len();
const _: () = assert!(MOV_BYTES == JUMP_BYTES);
const TEXTS: usize = 4;
const HALVES: usize = 32;
/// The address below which nothing is mapped (`vm.mmap_min_addr`). A `mov` is replaced only if its
/// number is below half of this.
const LOWEST: usize = 1024;
/// The reach of a short jump in bytes, less the length of the long jump.
const REACH: usize = 112;

struct PatchedSites {
    /// The start and end of each text of libc and the loader.
    texts: [(usize, usize); TEXTS],
    /// The second halves of padding of which one jump uses the first half. 0 marks a free entry.
    halves: [usize; HALVES],
    used: usize,
}

static SITES: StaticMutex<PatchedSites> =
    StaticMutex::new(PatchedSites { texts: [(0, 0); TEXTS], halves: [0; HALVES], used: 0 });

/// Allows patching of sites. `handler` makes their calls. Does nothing if the kernel doesn't let
/// programs read `fs`.
pub fn allow(handler: PatchHandler) {
    /// The bit of `AT_HWCAP2` that tells that programs may read `fs`.
    const FSGSBASE: usize = 2;
    if capabilities().1 & FSGSBASE != 0 {
        HANDLER.store(handler as *const () as usize, SeqCst);
        ON.store(true, SeqCst);
    }
}

/// Returns whether the instruction at `at` lies between a patched site and the gate's stack.
pub fn contains(at: usize) -> bool {
    let start = START.load(Relaxed);
    entry::contains(at) || start != 0 && at.wrapping_sub(start) < SITES_BYTES
}

/// Notes that call `nr` has trapped at the instruction that ends at `after`. Patches the site when
/// it has trapped often enough.
pub fn note_trap(after: usize, nr: usize) {
    if !ON.load(Relaxed) {
        return;
    }
    let hits = &HITS[(after ^ after >> 10) % COUNTERS];
    if hits.fetch_add(1, Relaxed) + 1 == HOT && after > SITE_BYTES {
        SITES.lock().patch(after, nr);
    }
}

/// Stops patching until [`resume`], by keeping the lock.
pub fn stop() {
    forget(SITES.lock());
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
        if self.used == 0 && !self.prepare() {
            return ON.store(false, SeqCst);
        }
        if !self.texts.iter().any(|text| text.0 + BEFORE < after - SITE_BYTES && after < text.1)
            || (self.used + 1) * STRIDE > SITES_BYTES
        {
            return;
        }
        let step = START.load(SeqCst) + self.used * STRIDE;
        let site = after - SITE_BYTES;
        if sets_number(site, nr) {
            self.go_by(step, Some(nr), after, (site, MOV_BYTES), |distance| {
                // SAFETY: `sets_number` found that the five bytes at `site` are one whole
                // instruction, and that the first four lie in one line. `go_by` has made the page
                // writable.
                unsafe { replace(site, distance) };
            });
        } else if (after - 2) % LINE_BYTES < LINE_BYTES - 1
            && let Some(room) = self.room_near(after)
        {
            self.go_by(step, None, after, (room, JUMP_BYTES), |distance| {
                // SAFETY: `go_by` has made the pages writable. `padding` found that no code runs
                // through the bytes at `room`. The two bytes of the system call lie in one line, as
                // checked above.
                unsafe { detour(after - SYSCALL.len(), room, distance) };
            });
        }
    }

    /// Makes the step of a site, and then lets `write` write the jump that leads there. `jump` is
    /// the address and the length of that jump. `write` gets the jump's distance.
    fn go_by(
        &mut self,
        step: usize,
        nr: Option<usize>,
        after: usize,
        jump: (usize, usize),
        write: impl FnOnce(i32),
    ) {
        let Ok(distance) = i32::try_from(step.wrapping_sub(jump.0 + jump.1) as isize) else {
            return;
        };
        let page = jump.0.min(after - SITE_BYTES) & !(PAGE_SIZE - 1);
        let bytes = (jump.0 + jump.1).max(after).next_multiple_of(PAGE_SIZE) - page;
        if !protect(START.load(SeqCst), SITES_BYTES, true) {
            return;
        }
        self.write_step(step, nr, after);
        self.used += 1;
        protect(START.load(SeqCst), SITES_BYTES, false);
        if protect(page, bytes, true) {
            write(distance);
            protect(page, bytes, false);
        }
    }

    /// Finds room for a long jump that a short jump at the system call before `after` can reach.
    fn room_near(&mut self, after: usize) -> Option<usize> {
        let reach = after - REACH..after + REACH;
        if let Some(half) = self.halves.iter_mut().find(|half| reach.contains(half)) {
            return Some(core::mem::take(half));
        }
        let text = self
            .texts
            .iter()
            .find(|text| text.0 < reach.start && reach.end + padding::LONGEST < text.1)?;
        let from = reach.start.max(text.0 + padding::BEFORE);
        // SAFETY: the bytes from `padding::BEFORE` before `at` to `padding::LONGEST` after it lie
        // in one text, as checked above. The text stays mapped and readable.
        let found =
            (from..reach.end).find_map(|at| unsafe { padding::at(at) }.map(|len| (at, len)));
        let (at, len) = found?;
        if len >= 2 * JUMP_BYTES
            && let Some(free) = self.halves.iter_mut().find(|half| **half == 0)
        {
            *free = at + JUMP_BYTES;
        }
        Some(at)
    }

    fn prepare(&mut self) -> bool {
        let mut found = 0;
        let read = each_area(|area| {
            if area.executable && is_libc(area) && found < TEXTS {
                self.texts[found] = (area.start, area.end);
                found += 1;
            }
            ControlFlow::Continue(())
        });
        let Some(zone) = Zone::reserve(SITES_BYTES, PAGE_SIZE).ok().filter(|_| read.is_ok()) else {
            return false;
        };
        let start = zone.start();
        let mut head = [0u8; HEAD_STRIDES * STRIDE];
        let mut put = |at: usize, bytes: &[u8]| head[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &entry::entry().to_le_bytes());
        put(TRAP_DONE, &SYSCALL);
        put(TRAP_DONE + SYSCALL.len(), &UD2);
        put(TRAP_CALL, &SYSCALL);
        put(TRAP_CALL + SYSCALL.len(), &BACK);
        // SAFETY: the zone is new, so no other code uses it, and it has SITES_BYTES bytes. `head`
        // is shorter.
        unsafe { core::ptr::copy_nonoverlapping(head.as_ptr(), zone.as_ptr(), head.len()) };
        forget(zone);
        // SAFETY: sites are patched only if ON is set, and `allow` stores a `PatchHandler` before
        // it sets ON.
        let handler = unsafe { core::mem::transmute::<usize, PatchHandler>(HANDLER.load(SeqCst)) };
        set_up(handler, start + TRAP_CALL, start + TRAP_DONE);
        START.store(start, SeqCst);
        self.used = HEAD_STRIDES;
        protect(start, SITES_BYTES, false)
    }

    /// Writes the step from a site to the entry. The step sets the call's number, if `nr` is given,
    /// and the address to continue at.
    fn write_step(&self, at: usize, nr: Option<usize>, after: usize) {
        let (mut step, mut used) = ([0xccu8; STRIDE], 0);
        let mut add = |bytes: &[u8]| {
            step[used..used + bytes.len()].copy_from_slice(bytes);
            used += bytes.len();
            used
        };
        if let Some(nr) = nr {
            add(&[0xb8]);
            add(&(nr as u32).to_le_bytes());
        }
        // movabs $after,%rcx
        add(&[0x48, 0xb9]);
        add(&after.to_le_bytes());
        // jmp *entry(%rip)
        let end = add(&[0xff, 0x25]) + 4;
        add(&(-((self.used * STRIDE + end) as i32)).to_le_bytes());
        // SAFETY: the stride at `at` lies in the zone, which the caller has made writable. No site
        // leads there yet, so no thread runs it.
        unsafe { core::ptr::copy_nonoverlapping(step.as_ptr(), at as *mut u8, STRIDE) };
    }
}

/// The number of bytes before a site that are checked.
const BEFORE: usize = 5;

/// Returns whether the instruction before a system call only sets the call's number.
fn sets_number(site: usize, nr: usize) -> bool {
    // SAFETY: `patch` has checked that the site lies in a text, with BEFORE bytes of the text
    // before it. The text stays mapped and readable.
    let bytes = unsafe { &*((site - BEFORE) as *const [u8; BEFORE + SITE_BYTES]) };
    let (before, site_bytes) = bytes.split_at(BEFORE);
    nr < LOWEST / 2
        && site % LINE_BYTES <= LINE_BYTES - 4
        && site_bytes[0] == 0xb8
        && site_bytes[1..MOV_BYTES] == (nr as u32).to_le_bytes()
        && site_bytes[MOV_BYTES..] == SYSCALL
        && !may_go_on(before)
}

fn is_libc(area: &Vma) -> bool {
    let file = area.name().rsplit(|byte| *byte == b'/').next().unwrap_or(&[]);
    area.name().contains(&b'/')
        && (file == b"libc.so.6" || file == b"libpthread.so.0" || file.starts_with(b"ld-linux"))
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

/// Makes pages executable and readable, and writable if `write` is true. Returns whether that
/// succeeded.
fn protect(start: usize, bytes: usize, write: bool) -> bool {
    let access = libc::PROT_READ | libc::PROT_EXEC | if write { libc::PROT_WRITE } else { 0 };
    // SAFETY: the pages hold code of libc, the loader or the gate's steps. They stay readable and
    // executable, and no Rust reference to them exists.
    unsafe { system_call(libc::SYS_mprotect, [start, bytes, access as usize, 0, 0, 0]) }.is_ok()
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

    fn is_site(before: &[u8], nr: u32) -> bool {
        let (mut code, start) = (AlignedCode([0x90; 16]), BEFORE);
        code.0[start - before.len()..start].copy_from_slice(before);
        code.0[start] = 0xb8;
        code.0[start + 1..start + MOV_BYTES].copy_from_slice(&nr.to_le_bytes());
        code.0[start + MOV_BYTES..start + SITE_BYTES].copy_from_slice(&SYSCALL);
        sets_number(code.0.as_ptr() as usize + start, nr as usize)
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
