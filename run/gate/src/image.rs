//! Gives access to the ELF headers of the object that holds this code, as the dynamic linker has
//! mapped it.
use elf::endian::LittleEndian;
use elf::file::{Class, ELF64_EHDR_TAILSIZE, FileHeader};
use elf::segment::{Elf64_Phdr, SegmentTable};

/// The object's file name.
pub const FILE_NAME: &[u8] = b"libmemfold_preload.so";

const IDENT_BYTES: usize = elf::abi::EI_NIDENT;
const HEADER_BYTES: usize = IDENT_BYTES + ELF64_EHDR_TAILSIZE;

unsafe extern "C" {
    /// The object's ELF header. The linker defines this symbol.
    static __ehdr_start: [u8; HEADER_BYTES];
}

/// Returns the address of the object's first byte.
pub fn start() -> usize {
    &raw const __ehdr_start as usize
}

/// Returns the address of the program headers and their number.
fn program_headers() -> Option<(usize, usize)> {
    // SAFETY: the linker defines the symbol at the ELF header, which has HEADER_BYTES bytes. It
    // lies in the first segment, which stays mapped and which nothing writes to.
    let rest = unsafe { &__ehdr_start }.get(IDENT_BYTES..)?;
    let header = FileHeader::parse_tail((LittleEndian, Class::ELF64, 0, 0), rest).ok()?;
    Some((start() + header.e_phoff as usize, header.e_phnum as usize))
}

/// Returns the object's segments, or `None` if the headers can't be parsed.
pub fn segments() -> Option<SegmentTable<'static, LittleEndian>> {
    let (at, count) = program_headers()?;
    let bytes = count * size_of::<Elf64_Phdr>();
    // SAFETY: the linker puts the program headers into the first segment, which stays mapped and
    // which nothing writes to. `count` is their number, so `bytes` is their length. `u8` needs no
    // alignment.
    let bytes = unsafe { core::slice::from_raw_parts(at as *const u8, bytes) };
    Some(SegmentTable::new(LittleEndian, Class::ELF64, bytes))
}

/// Returns whether this object is the program itself, and not one of its libraries.
pub fn is_program() -> bool {
    // SAFETY: `getauxval` has no conditions.
    let of_program = unsafe { libc::getauxval(libc::AT_PHDR) } as usize;
    program_headers().is_some_and(|(at, _)| at == of_program)
}
