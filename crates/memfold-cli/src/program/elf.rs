//! ELF headers: just enough to tell what kind of program a file is.
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;

/// `e_machine` of the machine that memfold was built for.
#[cfg(target_arch = "x86_64")]
pub const HOST_MACHINE: u16 = 62;
/// `e_machine` of the machine that memfold was built for.
#[cfg(target_arch = "aarch64")]
pub const HOST_MACHINE: u16 = 183;

const MAGIC: &[u8; 4] = b"\x7fELF";
const HEADER_LEN: usize = 64;
const ENTRY_LEN: usize = 56;
const PT_INTERP: u32 = 3;
/// The kernel's own bound (PATH_MAX).
const INTERPRETER_LEN_MAX: usize = 4096;

/// What a program's ELF header says.
#[derive(Debug, PartialEq, Eq)]
pub enum Elf {
    /// Runs on this machine's native instruction set.
    Native {
        /// The dynamic linker it asks for; `None` for a static program.
        interpreter: Option<String>,
    },
    /// For another machine, or 32-bit; the text names which.
    Foreign(String),
}

/// Whether `file` begins as an ELF file does. What can't be read is taken for one: [`read`] says
/// why it can't.
pub fn is_one(file: &File) -> bool {
    let mut start = [0u8; MAGIC.len()];
    read_up_to(file, &mut start).is_err() || start == *MAGIC
}

/// Reads the header of `file`; `None` if it isn't an ELF file at all.
///
/// # Errors
/// InvalidData for an ELF file that is cut short or isn't a program; otherwise what reading says.
pub fn read(file: &File) -> io::Result<Option<Elf>> {
    let mut header = [0u8; HEADER_LEN];
    let len = read_up_to(file, &mut header)?;
    if !header.starts_with(MAGIC) {
        return Ok(None);
    }
    if len < 20 {
        return Err(damaged("its header is cut short"));
    }
    let (bits, little) = (header[4], header[5] == 1);
    let machine =
        if little { u16_at(&header, 18) } else { u16::from_be_bytes([header[18], header[19]]) };
    if bits != 2 || !little || machine != HOST_MACHINE {
        return Ok(Some(Elf::Foreign(foreign_name(bits, machine))));
    }
    if len < HEADER_LEN {
        return Err(damaged("its header is cut short"));
    }
    // ET_EXEC or ET_DYN; the rest are object files and core dumps.
    if !matches!(u16_at(&header, 16), 2 | 3) {
        return Err(damaged("it is not a program"));
    }
    Ok(Some(Elf::Native { interpreter: interpreter(file, &header)? }))
}

fn interpreter(file: &File, header: &[u8; HEADER_LEN]) -> io::Result<Option<String>> {
    let (offset, entry_len, entries) = (u64_at(header, 32), u16_at(header, 54), u16_at(header, 56));
    if entry_len as usize != ENTRY_LEN {
        return Err(damaged("its program headers have a wrong size"));
    }
    for index in 0..entries as u64 {
        let mut entry = [0u8; ENTRY_LEN];
        let at = offset
            .checked_add(index * ENTRY_LEN as u64)
            .ok_or_else(|| damaged("its program headers lie outside"))?;
        read_all(file, &mut entry, at)?;
        if u32_at(&entry, 0) != PT_INTERP {
            continue;
        }
        let len = u64_at(&entry, 32) as usize;
        if !(2..=INTERPRETER_LEN_MAX).contains(&len) {
            return Err(damaged("its interpreter's name has a wrong length"));
        }
        let mut name = vec![0u8; len];
        read_all(file, &mut name, u64_at(&entry, 8))?;
        let end = name.iter().position(|&b| b == 0).unwrap_or(len);
        return Ok(Some(String::from_utf8_lossy(&name[..end]).into_owned()));
    }
    Ok(None)
}

fn foreign_name(bits: u8, machine: u16) -> String {
    let name = match machine {
        3 => "i386",
        40 => "ARM",
        62 if bits == 1 => "x32",
        62 => "x86-64",
        183 => "AArch64",
        243 => "RISC-V",
        _ => return format!("machine {machine}, {} bits", if bits == 1 { 32 } else { 64 }),
    };
    format!("{name}, {} bits", if bits == 1 { 32 } else { 64 })
}

fn damaged(why: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, why.to_string())
}

fn read_all(file: &File, buffer: &mut [u8], at: u64) -> io::Result<()> {
    file.read_exact_at(buffer, at).map_err(|e| match e.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::InvalidInput => damaged("it is cut short"),
        _ => e,
    })
}

/// Fills as much of `buffer` as the file has from its start; the count.
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

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
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
