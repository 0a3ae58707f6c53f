//! Padding that nobody runs through: behind `cmp $-4096,%rax; ja error; ret` or
//! `add $x,%rsp; ret`, up to where the next code is aligned.
//!
//! That a byte is a return can't be told from itself: `c3` ends many instructions. Behind these it
//! can.

/// So many bytes before padding are looked at.
pub const BEFORE: usize = 9;

const NOPS: [&[u8]; 7] = [
    &[0x0f, 0x1f, 0x44, 0, 0],
    &[0x66, 0x0f, 0x1f, 0x44, 0, 0],
    &[0x0f, 0x1f, 0x80, 0, 0, 0, 0],
    &[0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0],
    &[0x66, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0],
    &[0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0],
    &[0x66, 0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0],
];
const LONGEST: usize = 11;
const ALIGN: usize = 16;

/// The length of the padding that begins at `at`; `None`: there is none.
///
/// # Safety
/// - [`BEFORE`] bytes before, and 11 from there on, can be read.
pub unsafe fn at(at: usize) -> Option<usize> {
    // SAFETY: the caller's promise.
    let bytes = unsafe { &*((at - BEFORE) as *const [u8; BEFORE + LONGEST]) };
    let (before, padding) = bytes.split_at(BEFORE);
    let nop = NOPS.iter().find(|nop| padding.starts_with(nop))?;
    let ends = (at + nop.len()).is_multiple_of(ALIGN) && returns(before);
    ends.then_some(nop.len())
}

fn returns(before: &[u8]) -> bool {
    let [.., b, c, d, e, f, g, h, i, ret] = *before else { return false };
    let compares = b == 0x48 && c == 0x3d && d <= 1 && (e, f, g) == (0xf0, 0xff, 0xff);
    let (jumps, adds) = (h == 0x77, (f, g, h) == (0x48, 0x83, 0xc4));
    let _ = i;
    ret == 0xc3 && (compares && jumps || adds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(16))]
    struct Code([u8; 32]);

    fn padding_in(bytes: &[u8], start: usize) -> Option<usize> {
        let mut code = Code([0xcc; 32]);
        code.0[..bytes.len()].copy_from_slice(bytes);
        // SAFETY: it lies inside.
        unsafe { at(code.0.as_ptr() as usize + start) }
    }

    #[test]
    fn padding_is_told_from_instructions_that_are_run_through() {
        // cmp $-4096,%rax; ja; ret; nop
        let behind_ret =
            [0x48, 0x3d, 0, 0xf0, 0xff, 0xff, 0x77, 0x10, 0xc3, 0x0f, 0x1f, 0x80, 0, 0, 0, 0];
        assert_eq!(padding_in(&behind_ret, 9), Some(7));
        // mov %rax,%rbx ends with the same byte, and runs into what follows.
        let mut runs_on = behind_ret;
        runs_on[6..9].copy_from_slice(&[0x48, 0x89, 0xc3]);
        assert_eq!(padding_in(&runs_on, 9), None);
        // add $8,%rsp; ret
        let mut adds = behind_ret;
        adds[..9].copy_from_slice(&[0x90, 0x90, 0x90, 0x90, 0x48, 0x83, 0xc4, 0x08, 0xc3]);
        assert_eq!(padding_in(&adds, 9), Some(7));
        // What doesn't end where code is aligned isn't padding.
        let mut moved = [0x90; 17];
        moved[1..].copy_from_slice(&behind_ret);
        assert_eq!(padding_in(&moved, 10), None);
    }
}
