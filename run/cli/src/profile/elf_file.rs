//! An ELF file of a recorded process, as far as a profile needs it: its segments, the sections with
//! unwind information, and single symbols.
use elf::abi::{EI_NIDENT, PT_LOAD, SHN_UNDEF, SHT_NOBITS};
use elf::endian::LittleEndian;
use elf::file::{Class, ELF64_EHDR_TAILSIZE, FileHeader, parse_ident};
use elf::parse::{ParseAt, ParsingTable};
use elf::section::{Elf64_Shdr, SectionHeader};
use elf::segment::{Elf64_Phdr, ProgramHeader};
use elf::string_table::StringTable;
use elf::symbol::Symbol;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

const HEADER_LEN: usize = EI_NIDENT + ELF64_EHDR_TAILSIZE;
/// A section that is longer is not read, bytes.
const SECTION_BYTES_MAX: u64 = 1 << 30;
const PAGE_MASK: u64 = 0xfff;

/// A file of a program or library for x86-64.
pub struct ElfFile {
    file: File,
    segments: Vec<ProgramHeader>,
    sections: Vec<(String, SectionHeader)>,
}

/// A section: its addresses in the file's own terms, and its bytes.
pub struct ElfSection {
    pub addresses: Range<u64>,
    pub bytes: Arc<[u8]>,
}

impl ElfFile {
    /// Reads the headers of a file. Returns `None` if it is no such file or can't be read.
    pub fn read(file: File) -> Option<ElfFile> {
        let header = bytes_at(&file, 0, HEADER_LEN as u64)?;
        let (ident, rest) = header.split_at(EI_NIDENT);
        let (order, class, abi, abi_version) = parse_ident::<LittleEndian>(ident).ok()?;
        if class != Class::ELF64 {
            return None;
        }
        let header = FileHeader::parse_tail((order, class, abi, abi_version), rest).ok()?;
        let segments = table(&file, header.e_phoff, header.e_phnum, size_of::<Elf64_Phdr>())?;
        let sections = table(&file, header.e_shoff, header.e_shnum, size_of::<Elf64_Shdr>())?;
        let mut elf = ElfFile { file, segments, sections: Vec::new() };
        let names = sections.get(header.e_shstrndx as usize).and_then(|names| elf.bytes_of(names));
        let names = names.unwrap_or_default();
        let names = StringTable::new(&names);
        let name = |section: &SectionHeader| {
            names.get(section.sh_name as usize).unwrap_or_default().to_string()
        };
        elf.sections = sections.into_iter().map(|section| (name(&section), section)).collect();
        Some(elf)
    }

    /// Returns what must be added to the file's own addresses if its bytes from `offset` on are
    /// mapped at `start`.
    pub fn bias(&self, start: u64, offset: u64) -> Option<u64> {
        let segment = self.segment(|segment| {
            let first = segment.p_offset & !PAGE_MASK;
            (first..segment.p_offset.saturating_add(segment.p_filesz)).contains(&offset)
        })?;
        // A damaged file may name any address.
        let address =
            (segment.p_vaddr & !PAGE_MASK).wrapping_add(offset - (segment.p_offset & !PAGE_MASK));
        Some(start.wrapping_sub(address))
    }

    /// Returns the bytes at one of the file's own addresses.
    pub fn bytes_at_address(&self, address: u64, len: u64) -> Option<Vec<u8>> {
        let segment = self.segment(|segment| {
            let end = segment.p_vaddr.saturating_add(segment.p_filesz);
            (segment.p_vaddr..end).contains(&address)
        })?;
        bytes_at(&self.file, segment.p_offset.checked_add(address - segment.p_vaddr)?, len)
    }

    fn segment(&self, is_wanted: impl Fn(&ProgramHeader) -> bool) -> Option<&ProgramHeader> {
        self.segments.iter().find(|segment| segment.p_type == PT_LOAD && is_wanted(segment))
    }

    /// Returns a section that has bytes.
    pub fn section(&self, name: &str) -> Option<ElfSection> {
        let header = self.header(name)?;
        let addresses = header.sh_addr..header.sh_addr.checked_add(header.sh_size)?;
        Some(ElfSection { addresses, bytes: self.bytes_of(header)?.into() })
    }

    /// Returns the address of a symbol of the dynamic table or of the whole one.
    pub fn address_of(&self, name: &str) -> Option<u64> {
        [(".dynsym", ".dynstr"), (".symtab", ".strtab")].into_iter().find_map(|(symbols, names)| {
            let symbols = self.bytes_of(self.header(symbols)?)?;
            let names = self.bytes_of(self.header(names)?)?;
            let names = StringTable::new(&names);
            let mut symbols =
                ParsingTable::<_, Symbol>::new(LittleEndian, Class::ELF64, &symbols).iter();
            let symbol = symbols.find(|symbol| {
                symbol.st_shndx != SHN_UNDEF
                    && names.get(symbol.st_name as usize).is_ok_and(|own_name| own_name == name)
            })?;
            Some(symbol.st_value)
        })
    }

    fn header(&self, name: &str) -> Option<&SectionHeader> {
        let is_it = |(found, header): &&(String, SectionHeader)| {
            found == name && header.sh_type != SHT_NOBITS
        };
        self.sections.iter().find(is_it).map(|(_, header)| header)
    }

    fn bytes_of(&self, section: &SectionHeader) -> Option<Vec<u8>> {
        let fits = section.sh_type != SHT_NOBITS && section.sh_size <= SECTION_BYTES_MAX;
        fits.then(|| bytes_at(&self.file, section.sh_offset, section.sh_size)).flatten()
    }
}

fn bytes_at(file: &File, offset: u64, len: u64) -> Option<Vec<u8>> {
    // A header may name any length.
    let end = offset.checked_add(len)?;
    if end > file.metadata().ok()?.len() {
        return None;
    }
    let mut bytes = vec![0; len as usize];
    file.read_exact_at(&mut bytes, offset).ok()?;
    Some(bytes)
}

/// Reads a table of headers.
fn table<T: ParseAt>(file: &File, offset: u64, count: u16, len: usize) -> Option<Vec<T>> {
    let bytes = bytes_at(file, offset, u64::from(count) * len as u64)?;
    Some(ParsingTable::<_, T>::new(LittleEndian, Class::ELF64, &bytes).iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_testkit::scratch::Scratch;
    use proptest::prelude::*;

    fn read(bytes: &[u8]) -> Option<ElfFile> {
        let scratch = Scratch::new();
        ElfFile::read(File::open(scratch.file("elf", bytes, 0o644)).unwrap())
    }

    #[test]
    fn own_program_has_its_sections_and_symbols() {
        let elf = ElfFile::read(File::open("/proc/self/exe").unwrap()).unwrap();
        let frames = elf.section(".eh_frame").unwrap();
        let first = elf.bytes_at_address(frames.addresses.start, 64).unwrap();
        assert_eq!(first[..], frames.bytes[..64]);
        assert_eq!(elf.bias(0x5000_0000, 0), Some(0x5000_0000), "it is position-independent");
        assert!(elf.address_of("main").is_some_and(|main| elf.bytes_at_address(main, 1).is_some()));
        assert!(elf.address_of("no_such_symbol").is_none());
    }

    proptest! {
        #[test]
        fn damaged_file_is_read_as_far_as_it_goes(
            // Words of the header and of the table of segments.
            places in proptest::collection::vec(
                (0usize..0x80, prop_oneof![any::<u64>(), Just(u64::MAX), Just(!0xfff), 0u64..0x9000]),
                1..12,
            ),
            end in 0usize..0x8000,
            at in any::<u64>(),
        ) {
            let mut bytes = std::fs::read("/bin/true").unwrap();
            for (place, word) in places {
                bytes[place * 8..][..8].copy_from_slice(&word.to_le_bytes());
            }
            for bytes in [&bytes[..], &bytes[..end.min(bytes.len())]] {
                if let Some(elf) = read(bytes) {
                    for offset in (0..0x9000).step_by(0x800).chain([at, !at >> 1, u64::MAX]) {
                        elf.bias(at, offset);
                        elf.bytes_at_address(offset, at & 0xff);
                    }
                    elf.address_of("main");
                    elf.section(".eh_frame");
                }
            }
        }
    }
}
