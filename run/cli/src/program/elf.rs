//! ELF headers, read as far as needed to tell the kind of a program.
use elf::abi::{EI_CLASS, EI_DATA, EI_NIDENT, ELFCLASS32, ELFCLASS64, ELFDATA2LSB, ELFMAGIC};
use elf::abi::{EM_386, EM_AARCH64, EM_ARM, EM_RISCV, EM_X86_64, ET_DYN, ET_EXEC, PT_INTERP};
use elf::endian::{AnyEndian, EndianParse, LittleEndian};
use elf::file::{Class, ELF64_EHDR_TAILSIZE, FileHeader};
use elf::parse::ParseAt;
use elf::segment::{Elf64_Phdr, ProgramHeader};
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;

/// `e_machine` of the machine that memfold was built for.
pub const HOST_MACHINE: u16 = EM_X86_64;

const HEADER_LEN: usize = EI_NIDENT + ELF64_EHDR_TAILSIZE;
const ENTRY_LEN: usize = size_of::<Elf64_Phdr>();
/// End of `e_machine` in the header. It is at the same place in 32-bit files.
const MACHINE_END: usize = EI_NIDENT + 4;
/// The kernel's own bound (PATH_MAX).
const INTERPRETER_LEN_MAX: usize = 4096;

/// The kind of a program according to its ELF header.
#[derive(Debug, PartialEq, Eq)]
pub enum Elf {
    /// A program for this machine's native instruction set.
    Native {
        /// The dynamic linker that it names; `None` for a static program.
        interpreter: Option<String>,
    },
    /// A program for another machine, or a 32-bit one. The text names which.
    Foreign(String),
}

/// Returns whether `file` begins like an ELF file. Returns `true` for a file that can't be read, so
/// that [`read`] reports the reason.
pub fn is_one(file: &File) -> bool {
    let mut start = [0u8; ELFMAGIC.len()];
    read_up_to(file, &mut start).is_err() || start == ELFMAGIC
}

/// Reads the header of `file`. Returns `None` if it isn't an ELF file.
///
/// # Errors
/// - InvalidData: the ELF file is cut short or isn't a program.
/// - The errors of reading the file.
pub fn read(file: &File) -> io::Result<Option<Elf>> {
    let mut header = [0u8; HEADER_LEN];
    let len = read_up_to(file, &mut header)?;
    if !header.starts_with(&ELFMAGIC) {
        return Ok(None);
    }
    if len < MACHINE_END {
        return Err(damaged("its header is cut short"));
    }
    let (ident, rest) = header.split_at(EI_NIDENT);
    let (class, order) = (ident[EI_CLASS], ident[EI_DATA]);
    // The kernel ignores the version, which `parse_ident` would check.
    let byte_order = AnyEndian::from_ei_data(order).unwrap_or(AnyEndian::Big);
    let machine = byte_order.parse_u16_at(&mut 2, rest).map_err(damaged_at)?;
    if class != ELFCLASS64 || order != ELFDATA2LSB || machine != HOST_MACHINE {
        return Ok(Some(Elf::Foreign(foreign_name(class, machine))));
    }
    if len < HEADER_LEN {
        return Err(damaged("its header is cut short"));
    }
    let header = FileHeader::parse_tail((LittleEndian, Class::ELF64, 0, 0), rest);
    let header = header.map_err(damaged_at)?;
    // Other types are object files and core dumps.
    if !matches!(header.e_type, ET_EXEC | ET_DYN) {
        return Err(damaged("it is not a program"));
    }
    Ok(Some(Elf::Native { interpreter: interpreter(file, &header)? }))
}

fn interpreter(file: &File, header: &FileHeader<LittleEndian>) -> io::Result<Option<String>> {
    if header.e_phentsize as usize != ENTRY_LEN {
        return Err(damaged("its program headers have a wrong size"));
    }
    for index in 0..header.e_phnum as u64 {
        let mut entry = [0u8; ENTRY_LEN];
        let at = header
            .e_phoff
            .checked_add(index * ENTRY_LEN as u64)
            .ok_or_else(|| damaged("its program headers lie outside"))?;
        read_all(file, &mut entry, at)?;
        let entry = ProgramHeader::parse_at(LittleEndian, Class::ELF64, &mut 0, &entry);
        let entry = entry.map_err(damaged_at)?;
        if entry.p_type != PT_INTERP {
            continue;
        }
        let len = entry.p_filesz as usize;
        if !(2..=INTERPRETER_LEN_MAX).contains(&len) {
            return Err(damaged("its interpreter's name has a wrong length"));
        }
        let mut name = vec![0u8; len];
        read_all(file, &mut name, entry.p_offset)?;
        let end = name.iter().position(|&b| b == 0).unwrap_or(len);
        return Ok(Some(String::from_utf8_lossy(&name[..end]).into_owned()));
    }
    Ok(None)
}

fn foreign_name(class: u8, machine: u16) -> String {
    let bits = if class == ELFCLASS32 { 32 } else { 64 };
    let name = match machine {
        EM_386 => "i386",
        EM_ARM => "ARM",
        EM_X86_64 if bits == 32 => "x32",
        EM_X86_64 => "x86-64",
        EM_AARCH64 => "AArch64",
        EM_RISCV => "RISC-V",
        _ => return format!("machine {machine}, {bits} bits"),
    };
    format!("{name}, {bits} bits")
}

fn damaged(why: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, why.to_string())
}

fn damaged_at(why: elf::ParseError) -> io::Error {
    damaged(&why.to_string())
}

fn read_all(file: &File, buffer: &mut [u8], at: u64) -> io::Result<()> {
    file.read_exact_at(buffer, at).map_err(|e| match e.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::InvalidInput => damaged("it is cut short"),
        _ => e,
    })
}

/// Fills `buffer` from the start of the file, as far as the file goes. Returns the number of bytes
/// read.
pub fn read_up_to(file: &File, buffer: &mut [u8]) -> io::Result<usize> {
    let mut len = 0;
    while len < buffer.len() {
        match file.read_at(&mut buffer[len..], len as u64) {
            Ok(0) => break,
            Ok(n) => len += n,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn file_of(bytes: &[u8]) -> File {
        let path =
            std::env::temp_dir().join(format!("memfold-elf-{}-{:p}", std::process::id(), bytes));
        std::fs::File::create(&path).unwrap().write_all(bytes).unwrap();
        let file = File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file
    }

    fn own_bytes() -> Vec<u8> {
        std::fs::read("/proc/self/exe").unwrap()
    }

    #[test]
    fn this_test_is_native_and_dynamic() {
        let elf = read(&File::open("/proc/self/exe").unwrap()).unwrap();
        let Some(Elf::Native { interpreter: Some(name) }) = elf else { panic!("{elf:?}") };
        assert!(std::path::Path::new(&name).exists(), "{name}");
    }

    #[test]
    fn other_machines_are_told_apart() {
        let mut bytes = own_bytes()[..64].to_vec();
        bytes[4] = 1;
        bytes[18..20].copy_from_slice(&3u16.to_le_bytes());
        assert_eq!(read(&file_of(&bytes)).unwrap(), Some(Elf::Foreign("i386, 32 bits".into())));
        bytes[5] = 2;
        bytes[18..20].copy_from_slice(&243u16.to_be_bytes());
        assert_eq!(read(&file_of(&bytes)).unwrap(), Some(Elf::Foreign("RISC-V, 32 bits".into())));
    }

    #[test]
    fn no_elf_and_damaged_elf_are_errors_not_panics() {
        assert_eq!(read(&file_of(b"hello")).unwrap(), None);
        assert_eq!(read(&file_of(b"")).unwrap(), None);
        let own = own_bytes();
        for len in [4, 19, 20, 63, 64, 100] {
            assert_eq!(
                read(&file_of(&own[..len])).unwrap_err().kind(),
                ErrorKind::InvalidData,
                "{len}"
            );
        }
        let mut far = own[..4096].to_vec();
        far[32..40].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(read(&file_of(&far)).unwrap_err().kind(), ErrorKind::InvalidData);
    }
}
