//! Tells a program written in Go: its runtime makes threads and processes by system calls of its
//! own.
use core::ffi::{c_int, c_void};
use core::mem::size_of;

/// The name of the notes that the Go linker writes (`cmd/link/internal/ld/elf.go`, ELFNOTEGOSTART).
const NAME: &[u8] = b"Go\0\0";

/// Whether the program or a library that it is linked with is written in Go.
pub fn is_there() -> bool {
    let mut found = false;
    // SAFETY: the function is of the right type and gets what it expects.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut found).cast()) };
    found
}

unsafe extern "C" fn look(object: *mut libc::dl_phdr_info, _: usize, found: *mut c_void) -> c_int {
    // SAFETY: the dynamic linker tells of an object that is loaded, with its program headers; its
    // notes are mapped.
    unsafe {
        let object = &*object;
        for header in core::slice::from_raw_parts(object.dlpi_phdr, object.dlpi_phnum as usize) {
            if header.p_type == libc::PT_NOTE {
                let notes = (object.dlpi_addr + header.p_vaddr) as *const u8;
                if has_go(core::slice::from_raw_parts(notes, header.p_memsz as usize)) {
                    found.cast::<bool>().write(true);
                    return 1;
                }
            }
        }
    }
    0
}

/// Whether one of these notes (elf(5): the sizes of name and content, a type, name, content) is of
/// Go's.
fn has_go(mut notes: &[u8]) -> bool {
    const HEAD: usize = 3 * size_of::<u32>();
    while let Some(head) = notes.first_chunk::<HEAD>() {
        let word = |at: usize| {
            u32::from_ne_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]) as usize
        };
        let (name, content) = (word(0), word(4));
        if notes.get(HEAD..HEAD + name) == Some(NAME) {
            return true;
        }
        let len = HEAD + name.next_multiple_of(4) + content.next_multiple_of(4);
        notes = notes.get(len..).unwrap_or(&[]);
    }
    false
}
