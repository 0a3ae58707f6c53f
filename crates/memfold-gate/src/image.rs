//! The object that holds this code, as the dynamic linker has mapped it: its own ELF headers.
use elf::endian::LittleEndian;
use elf::file::{Class, ELF64_EHDR_TAILSIZE, FileHeader};
use elf::segment::{Elf64_Phdr, SegmentTable};

const IDENT_BYTES: usize = elf::abi::EI_NIDENT;
const HEADER_BYTES: usize = IDENT_BYTES + ELF64_EHDR_TAILSIZE;

unsafe extern "C" {
    /// The linker's: the object's own header.
    static __ehdr_start: [u8; HEADER_BYTES];
}

/// Where the object's first byte lies.
pub fn start() -> usize {
    &raw const __ehdr_start as usize
}

/// Returns where the program headers lie, and how many there are.
fn program_headers() -> Option<(usize, usize)> {
    // SAFETY: the linker puts the header into the first segment, which stays mapped and unwritten.
    let rest = unsafe { &__ehdr_start }.get(IDENT_BYTES..)?;
    let header = FileHeader::parse_tail((LittleEndian, Class::ELF64, 0, 0), rest).ok()?;
    Some((start() + header.e_phoff as usize, header.e_phnum as usize))
}

/// Returns the object's segments.
pub fn segments() -> Option<SegmentTable<'static, LittleEndian>> {
    let (at, count) = program_headers()?;
    let bytes = count * size_of::<Elf64_Phdr>();
    // SAFETY: the linker puts its program headers into the first segment, too; `count` says how many.
    let bytes = unsafe { core::slice::from_raw_parts(at as *const u8, bytes) };
    Some(SegmentTable::new(LittleEndian, Class::ELF64, bytes))
}

/// Whether this object is the program itself, and not a library of its.
pub fn is_program() -> bool {
    // SAFETY: asking has no conditions.
    let of_program = unsafe { libc::getauxval(libc::AT_PHDR) } as usize;
    program_headers().is_some_and(|(at, _)| at == of_program)
}
