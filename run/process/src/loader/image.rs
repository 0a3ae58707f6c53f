//! The segments of an ELF program, read from its file and checked. Nothing is allocated, because a
//! child of vfork reads them too.
use core::ops::Range;
use elf::abi::{EI_CLASS, EI_DATA, EI_NIDENT, ELFCLASS64, ELFDATA2LSB, ELFMAGIC, EM_X86_64};
use elf::abi::{ET_DYN, ET_EXEC, PF_R, PF_W, PF_X, PT_GNU_STACK, PT_INTERP, PT_LOAD};
use elf::endian::LittleEndian;
use elf::file::{Class, ELF64_EHDR_TAILSIZE, FileHeader};
use elf::parse::ParseAt;
use elf::segment::{Elf64_Phdr, ProgramHeader};
use memfold_os::units::PAGE_SIZE;
use rustix::fd::AsFd;
use rustix::fs::fstat;
use rustix::io::pread;
use rustix::mm::ProtFlags;

const HEADER_BYTES: usize = EI_NIDENT + ELF64_EHDR_TAILSIZE;
const ENTRY_BYTES: usize = size_of::<Elf64_Phdr>();
/// A program with more segments is left to the kernel.
const SEGMENTS_MAX: usize = 32;
/// The end of the addresses that a program may have.
const ADDRESSES_END: usize = 0x7fff_ffff_f000;
/// The kernel's own bound of the interpreter's path (PATH_MAX).
pub const PATH_BYTES: usize = 4096;

/// A segment that is mapped.
#[derive(Copy, Clone)]
pub struct Segment {
    /// Its address in the file's own numbering.
    pub at: usize,
    pub offset: u64,
    pub file_bytes: usize,
    pub memory_bytes: usize,
    pub access: ProtFlags,
}

impl Segment {
    const NONE: Segment =
        Segment { at: 0, offset: 0, file_bytes: 0, memory_bytes: 0, access: ProtFlags::empty() };

    /// Returns the addresses of its pages.
    pub fn pages(&self) -> Range<usize> {
        self.at & !(PAGE_SIZE - 1)..(self.at + self.memory_bytes).next_multiple_of(PAGE_SIZE)
    }
}

/// A program, or an interpreter, as its file describes it.
pub struct ProgramImage {
    /// The address of its first instruction.
    pub entry: usize,
    /// Whether it must be mapped at its own addresses.
    pub is_fixed: bool,
    /// The address of its program headers, if a segment has them, and their number.
    pub headers: Option<usize>,
    pub header_count: usize,
    /// Whether the stack must be executable.
    pub has_executable_stack: bool,
    /// Its alignment, a power of two.
    pub align: usize,
    /// The place of its interpreter's path in the file, and the path's length with its final zero.
    interpreter: Option<(u64, usize)>,
    segments: [Segment; SEGMENTS_MAX],
    count: usize,
}

impl ProgramImage {
    /// Reads the description of a program.
    ///
    /// # Errors
    /// Why only the kernel can judge or execute this file.
    pub fn read(file: impl AsFd) -> Result<ProgramImage, &'static str> {
        let headers = ElfHeaders::read(&file).map_err(NotProgram::why)?;
        let header = &headers.header;
        let mut image = ProgramImage {
            entry: header.e_entry as usize,
            is_fixed: header.e_type == ET_EXEC,
            headers: None,
            header_count: header.e_phnum as usize,
            has_executable_stack: false,
            align: PAGE_SIZE,
            interpreter: None,
            segments: [Segment::NONE; SEGMENTS_MAX],
            count: 0,
        };
        if !matches!(header.e_type, ET_EXEC | ET_DYN) {
            return Err("it is not a program");
        }
        let bytes = fstat(&file).map_err(|_| "it can't be examined")?.st_size as u64;
        for entry in headers.entries(&file) {
            image.add(&entry?, bytes)?;
        }
        let own = |segment: &&Segment| {
            let from = header.e_phoff.checked_sub(segment.offset);
            from.is_some_and(|from| from < segment.file_bytes as u64)
        };
        let with_headers = image.segments().iter().find(own);
        image.headers = with_headers.map(|its| its.at + (header.e_phoff - its.offset) as usize);
        let runs = |segment: &Segment| {
            let range = segment.at..segment.at + segment.memory_bytes;
            segment.access.contains(ProtFlags::EXEC) && range.contains(&image.entry)
        };
        if !image.segments().iter().any(runs) {
            return Err("it begins outside its code");
        }
        Ok(image)
    }

    fn add(&mut self, entry: &ProgramHeader, file_bytes: u64) -> Result<(), &'static str> {
        match entry.p_type {
            PT_INTERP if self.interpreter.is_none() => {
                if !(2..=PATH_BYTES as u64).contains(&entry.p_filesz) {
                    return Err("its interpreter's name has a wrong length");
                }
                self.interpreter = Some((entry.p_offset, entry.p_filesz as usize));
                Ok(())
            }
            PT_GNU_STACK => {
                self.has_executable_stack = entry.p_flags & PF_X != 0;
                Ok(())
            }
            PT_LOAD if entry.p_memsz > 0 => {
                let segment = segment(entry, file_bytes).ok_or("a segment of it is invalid")?;
                if entry.p_align.is_power_of_two() {
                    self.align = self.align.max(entry.p_align as usize);
                }
                let before = self.segments().last().map_or(0, |last| last.pages().end);
                let place = self.segments.get_mut(self.count).ok_or("it has too many segments")?;
                if segment.pages().start < before {
                    return Err("its segments overlap");
                }
                *place = segment;
                self.count += 1;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Returns the segments in the order of their addresses.
    pub fn segments(&self) -> &[Segment] {
        &self.segments[..self.count]
    }

    /// Returns the addresses from the first page to the last one.
    pub fn pages(&self) -> Range<usize> {
        let all = self.segments();
        all[0].pages().start..all[all.len() - 1].pages().end
    }

    /// Reads the path of the program's interpreter into `path`, with its final zero. Returns
    /// `false` if it has none.
    ///
    /// # Errors
    /// The path can't be read.
    pub fn read_interpreter(
        &self,
        file: impl AsFd,
        path: &mut [u8; PATH_BYTES],
    ) -> Result<bool, &'static str> {
        let Some((offset, len)) = self.interpreter else { return Ok(false) };
        read_whole(&file, &mut path[..len], offset)?;
        if path[len - 1] != 0 {
            return Err("its interpreter's name has no end");
        }
        Ok(true)
    }
}

/// The reason for a file that ends too early.
const CUT: &str = "it is cut short";

/// Why a file has no headers of a program.
pub enum NotProgram {
    /// It is of another format, or damaged.
    Damaged(&'static str),
    OtherMachine,
}

impl NotProgram {
    /// Returns the reason as text.
    pub fn why(self) -> &'static str {
        match self {
            NotProgram::Damaged(why) => why,
            NotProgram::OtherMachine => "it is a program for another machine",
        }
    }
}

/// The headers of an ELF file of this machine.
pub struct ElfHeaders {
    header: FileHeader<LittleEndian>,
}

impl ElfHeaders {
    /// Reads the file's header.
    ///
    /// # Errors
    /// The file is no program of this machine.
    pub fn read(file: &impl AsFd) -> Result<ElfHeaders, NotProgram> {
        let mut bytes = [0u8; HEADER_BYTES];
        read_whole(file, &mut bytes, 0).map_err(NotProgram::Damaged)?;
        let (ident, rest) = bytes.split_at(EI_NIDENT);
        if !ident.starts_with(&ELFMAGIC) {
            return Err(NotProgram::Damaged("it is no ELF file"));
        }
        let header = FileHeader::parse_tail((LittleEndian, Class::ELF64, 0, 0), rest);
        let header = header.map_err(|_| NotProgram::Damaged(CUT))?;
        let is_ours = ident[EI_CLASS] == ELFCLASS64 && ident[EI_DATA] == ELFDATA2LSB;
        if !is_ours || header.e_machine != EM_X86_64 {
            return Err(NotProgram::OtherMachine);
        }
        if header.e_phentsize as usize != ENTRY_BYTES {
            return Err(NotProgram::Damaged("its headers have a wrong size"));
        }
        Ok(ElfHeaders { header })
    }

    /// Returns the program headers in the order of the file.
    pub fn entries(
        &self,
        file: &impl AsFd,
    ) -> impl Iterator<Item = Result<ProgramHeader, &'static str>> {
        (0..u64::from(self.header.e_phnum)).map(|n| {
            let mut entry = [0u8; ENTRY_BYTES];
            let at = self.header.e_phoff.checked_add(n * ENTRY_BYTES as u64).ok_or(CUT)?;
            read_whole(file, &mut entry, at)?;
            ProgramHeader::parse_at(LittleEndian, Class::ELF64, &mut 0, &entry).map_err(|_| CUT)
        })
    }
}

fn read_whole(file: &impl AsFd, to: &mut [u8], at: u64) -> Result<(), &'static str> {
    match pread(file, &mut *to, at) {
        Ok(len) if len == to.len() => Ok(()),
        Ok(_) => Err(CUT),
        Err(_) => Err("it can't be read"),
    }
}

/// Returns the segment of a header, if its numbers are possible.
fn segment(entry: &ProgramHeader, file_bytes: u64) -> Option<Segment> {
    let (at, end) = (entry.p_vaddr, entry.p_vaddr.checked_add(entry.p_memsz)?);
    let file_end = entry.p_offset.checked_add(entry.p_filesz)?;
    let in_page = |number: u64| number % PAGE_SIZE as u64;
    let is_possible = end <= ADDRESSES_END as u64
        && entry.p_filesz <= entry.p_memsz
        && file_end <= file_bytes
        && in_page(at) == in_page(entry.p_offset);
    let with = |flag, access| match entry.p_flags & flag {
        0 => ProtFlags::empty(),
        _ => access,
    };
    let access =
        with(PF_R, ProtFlags::READ) | with(PF_W, ProtFlags::WRITE) | with(PF_X, ProtFlags::EXEC);
    is_possible.then_some(Segment {
        at: at as usize,
        offset: entry.p_offset,
        file_bytes: entry.p_filesz as usize,
        memory_bytes: entry.p_memsz as usize,
        access,
    })
}
