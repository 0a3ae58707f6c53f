//! Finds padding that no code runs through. It lies behind a function that makes system calls, and
//! ends where the next function is aligned.
//!
//! A byte `c3` alone doesn't prove a return, because many instructions end in it. After the endings
//! that [`ends`] knows it does. Behind `c3` and [`TRAPS_MIN`] instructions that trap, no code
//! continues either: that many bytes don't fit into the instruction with the `c3`, so code would run
//! into a trap.

/// The number of bytes before padding that are checked.
pub const BEFORE: usize = 24;
/// The number of bytes of padding that are checked.
pub const LONGEST: usize = 16;
/// The length of a jump in bytes. In shorter padding it would overwrite code.
pub const JUMP_BYTES: usize = 5;

const NOPS: [&[u8]; 11] = [
    &[0x66, 0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0],
    &[0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0],
    &[0x66, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0],
    &[0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0],
    &[0x0f, 0x1f, 0x80, 0, 0, 0, 0],
    &[0x66, 0x0f, 0x1f, 0x44, 0, 0],
    &[0x0f, 0x1f, 0x44, 0, 0],
    &[0x0f, 0x1f, 0x40, 0],
    &[0x0f, 0x1f, 0],
    &[0x66, 0x90],
    &[0x90],
];
/// `int3`, with which Go's linker fills gaps.
const TRAP: u8 = 0xcc;
/// The number of traps that prove a return. An instruction has at most eight bytes after its first
/// three: a displacement and an operand of four bytes each, or an operand of eight.
const TRAPS_MIN: usize = 9;
/// The smallest alignment of code that follows padding.
const ALIGN: usize = 8;
const RET: u8 = 0xc3;
/// `mov $-1,%rax`.
const FAILS: [u8; 7] = [0x48, 0xc7, 0xc0, 0xff, 0xff, 0xff, 0xff];
/// `or $-1,%rax`.
const FAILS_BY_OR: [u8; 4] = [0x48, 0x83, 0xc8, 0xff];
/// The first byte of a short `jmp`. Its distance is the second byte.
const JUMP: u8 = 0xeb;

/// Returns the length of the padding that begins at `at`, or `None` if there is none that can hold
/// a jump. `after_one` is true if the byte before `at` is known to begin an instruction.
///
/// # Safety
/// - [`BEFORE`] bytes before `at` and [`LONGEST`] bytes from `at` on are readable.
pub unsafe fn at(at: usize, after_one: bool) -> Option<usize> {
    // SAFETY: the caller promises that these bytes are readable, and `u8` needs no alignment.
    let bytes = unsafe { &*((at - BEFORE) as *const [u8; BEFORE + LONGEST]) };
    let (before, padding) = bytes.split_at(BEFORE);
    let traps = padding.iter().take_while(|byte| **byte == TRAP).count();
    if before.ends_with(&[RET]) && traps >= TRAPS_MIN {
        return Some(traps);
    }
    if !(after_one && before.ends_with(&[RET]) || ends(before)) {
        return None;
    }
    let mut len = 0;
    while let Some(nop) = NOPS.iter().find(|nop| padding[len..].starts_with(nop)) {
        len += nop.len();
    }
    (len >= JUMP_BYTES && (at + len).is_multiple_of(ALIGN)).then_some(len)
}

/// Returns whether code doesn't continue after these bytes. They end with one of:
/// - `cmp $-4096,%rax; ja error; ret`
/// - a return or a jump that follows `mov $-1,%rax`
/// - a return that follows `or $-1,%rax`
/// - a return after `add $x,%rsp` and any number of `pop`
fn ends(before: &[u8]) -> bool {
    if let [rest @ .., JUMP, _] = before
        && rest.ends_with(&FAILS)
    {
        return true;
    }
    let Some((&RET, mut rest)) = before.split_last() else { return false };
    if rest.ends_with(&FAILS) || rest.ends_with(&FAILS_BY_OR) {
        return true;
    }
    if let [.., 0x48, 0x3d, 0 | 1, 0xf0, 0xff, 0xff, 0x77 | 0x73, _] = rest {
        return true;
    }
    while let [before @ .., 0x58..=0x5f] = rest {
        rest = before.strip_suffix(&[0x41]).unwrap_or(before);
    }
    matches!(rest, [.., 0x48, 0x83, 0xc4, _])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(16))]
    struct AlignedCode([u8; 64]);

    /// Returns the padding at offset `start` of `bytes`. `bytes` are placed at an aligned address.
    fn padding_in(bytes: &[u8], start: usize) -> Option<usize> {
        padding_behind(bytes, start, false)
    }

    fn padding_behind(bytes: &[u8], start: usize, after_one: bool) -> Option<usize> {
        const AT: usize = 32;
        let mut code = AlignedCode([0xcc; 64]);
        code.0[AT..AT + bytes.len()].copy_from_slice(bytes);
        // SAFETY: BEFORE bytes before the address and LONGEST from it on lie in `code`.
        unsafe { at(code.0.as_ptr() as usize + AT + start, after_one) }
    }

    #[test]
    fn padding_differs_from_reachable_instructions() {
        // cmp $-4096,%rax; ja; ret; nop
        let behind_ret =
            [0x48, 0x3d, 0, 0xf0, 0xff, 0xff, 0x77, 0x10, 0xc3, 0x0f, 0x1f, 0x80, 0, 0, 0, 0];
        assert_eq!(padding_in(&behind_ret, 9), Some(7));
        // `mov %rax,%rbx` ends with the same byte, and code continues after it.
        let mut runs_on = behind_ret;
        runs_on[6..9].copy_from_slice(&[0x48, 0x89, 0xc3]);
        assert_eq!(padding_in(&runs_on, 9), None);
        // add $8,%rsp; ret
        let mut adds = behind_ret;
        adds[..9].copy_from_slice(&[0x90, 0x90, 0x90, 0x90, 0x48, 0x83, 0xc4, 0x08, 0xc3]);
        assert_eq!(padding_in(&adds, 9), Some(7));
        // add $32,%rsp; pop %r12; pop %rbp; ret. Then the same without the `add`: the bytes may end
        // mov -61(%rbp),%ebx.
        let pops =
            [0x48, 0x83, 0xc4, 0x20, 0x41, 0x5c, 0x5d, 0xc3, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0];
        assert_eq!(padding_in(&pops, 8), Some(8));
        let mut loads = pops;
        loads[..6].copy_from_slice(&[0x90, 0x90, 0x90, 0x90, 0x90, 0x8b]);
        assert_eq!(padding_in(&loads, 8), None);
        // mov $-1,%rax; jmp; nopw; nop
        let mut jumps = [0x90; 24];
        jumps[5..12].copy_from_slice(&FAILS);
        jumps[12..14].copy_from_slice(&[JUMP, 0xb7]);
        jumps[14..23].copy_from_slice(NOPS[2]);
        assert_eq!(padding_in(&jumps, 14), Some(10));
        // or $-1,%rax; ret; nopw; nop, as behind `syscall`. Then the same after another `or`.
        let mut fails = [0x90; 24];
        fails[6..10].copy_from_slice(&FAILS_BY_OR);
        fails[10] = RET;
        fails[11..21].copy_from_slice(NOPS[1]);
        fails[21..24].copy_from_slice(NOPS[8]);
        assert_eq!(padding_in(&fails, 11), Some(13));
        fails[9] = 0x0f;
        assert_eq!(padding_in(&fails, 11), None);
        // add $8,%rsp; ret; and a nop of four bytes, which holds no jump: `sched_getaffinity`
        let mut short = [0x90; 16];
        short[7..].copy_from_slice(&[0x48, 0x83, 0xc4, 0x08, 0xc3, 0x0f, 0x1f, 0x40, 0]);
        assert_eq!(padding_in(&short, 12), None);
        // syscall; ret: only an instruction that begins with this byte is a return.
        let mut call = [0x0f, 0x05, RET, 0x90, 0x90, 0x90, 0x90, 0x90];
        assert_eq!((padding_behind(&call, 3, true), padding_in(&call, 3)), (Some(5), None));
        call[2] = 0xc2;
        assert_eq!(padding_behind(&call, 3, true), None);
        // Nine traps after a return, and eight, which may be operands.
        let mut traps = [0x90; 32];
        traps[6] = RET;
        traps[7..16].fill(TRAP);
        assert_eq!(padding_in(&traps, 7), Some(9));
        traps[15] = 0x90;
        assert_eq!(padding_in(&traps, 7), None);
        // Bytes that don't end where code is aligned aren't padding.
        let mut code = [0x90; 17];
        code[1..].copy_from_slice(&behind_ret);
        assert_eq!(padding_in(&code, 10), None);
    }
}
