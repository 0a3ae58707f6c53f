//! A recorded process: what is mapped where, and the walk of its stacks.
use crate::machine::smaps::ProcessMap;
use crate::profile::elf_file::{ElfFile, ElfSection};
use crate::profile::python;
use framehop::x86_64::{CacheX86_64, UnwindRegsX86_64, UnwinderX86_64};
use framehop::{ExplicitModuleSectionInfo, Module, Unwinder};
use memfold_run::samples::{Interpreter, Sample};
use std::collections::HashMap;
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

/// Frames of a stack, at most.
const FRAMES_MAX: usize = 256;

/// A file by its device and number, as /proc/PID/maps has them.
type FileKey = (String, u64);

/// The files that recorded processes have mapped. An index stands for each.
#[derive(Default)]
pub struct MappedFiles {
    by_key: HashMap<FileKey, usize>,
    files: Vec<MappedFile>,
}

/// A file that processes have mapped.
pub struct MappedFile {
    /// The path as the process sees it.
    pub path: String,
    /// The file, opened when it was first seen. `None` if it has been replaced since it was mapped,
    /// or can't be opened.
    pub opened: Option<File>,
    /// Its headers and unwind information, if it is a program or library that was opened.
    elf: Option<(ElfFile, UnwindSections)>,
}

/// The sections from which a stack is unwound.
#[derive(Clone)]
struct UnwindSections {
    frames: Option<(Range<u64>, Arc<[u8]>)>,
    index: Option<(Range<u64>, Arc<[u8]>)>,
    debug: Option<Arc<[u8]>>,
}

/// A place in the code of a process.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum CodePlace {
    /// In a mapped file: its index, and the offset in it.
    File(usize, u64),
    /// In memory without a file, such as the code of a JIT compiler: the address.
    Anonymous(u64),
}

#[derive(Clone)]
struct MappedCode {
    range: Range<u64>,
    /// The file's index, and the offset of the range in it.
    file: Option<(usize, u64)>,
}

/// A process while it is recorded.
pub struct RecordedProcess {
    /// The name of its program.
    pub name: String,
    /// Its number in its own PID namespace.
    own_number: u32,
    /// The file with the names of functions that a JIT compiler has made, if it is there already.
    code_map: Option<File>,
    begin: SystemTime,
    code: Vec<MappedCode>,
    interpreter: Option<Interpreter>,
    unwinder: UnwinderX86_64<Arc<[u8]>>,
    cache: CacheX86_64,
}

impl MappedFiles {
    /// Returns a file by its index.
    pub fn get(&self, index: usize) -> &MappedFile {
        &self.files[index]
    }

    /// Returns the number of files.
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Returns the index of a file that a process has mapped.
    fn index(&mut self, process: u32, key: FileKey, path: &str) -> usize {
        if let Some(known) = self.by_key.get(&key) {
            return *known;
        }
        let file = open_of(process, path, key.1);
        let elf = file.as_ref().and_then(|file| ElfFile::read(file.try_clone().ok()?));
        let elf = elf.map(|elf| {
            let unwind = UnwindSections::of(&elf);
            (elf, unwind)
        });
        self.files.push(MappedFile { path: path.to_string(), opened: file, elf });
        self.by_key.insert(key, self.files.len() - 1);
        self.files.len() - 1
    }
}

/// Opens a file that a process has mapped. Returns `None` if the path leads to another file by now.
fn open_of(process: u32, path: &str, inode: u64) -> Option<File> {
    let paths = [format!("/proc/{process}/root{path}"), path.to_string()];
    let is_it = |file: &File| file.metadata().is_ok_and(|metadata| metadata.ino() == inode);
    paths.into_iter().find_map(|path| File::open(path).ok().filter(is_it))
}

impl UnwindSections {
    fn of(elf: &ElfFile) -> UnwindSections {
        let of = |name| elf.section(name).map(|ElfSection { addresses, bytes }| (addresses, bytes));
        UnwindSections {
            frames: of(".eh_frame"),
            index: of(".eh_frame_hdr"),
            debug: of(".debug_frame").map(|(_, bytes)| bytes),
        }
    }

    fn sections(&self) -> ExplicitModuleSectionInfo<Arc<[u8]>> {
        let halves = |section: &Option<(Range<u64>, Arc<[u8]>)>| {
            section.clone().map_or((None, None), |(range, bytes)| (Some(range), Some(bytes)))
        };
        let ((eh_frame_svma, eh_frame), (eh_frame_hdr_svma, eh_frame_hdr)) =
            (halves(&self.frames), halves(&self.index));
        ExplicitModuleSectionInfo {
            eh_frame_svma,
            eh_frame,
            eh_frame_hdr_svma,
            eh_frame_hdr,
            debug_frame: self.debug.clone(),
            ..ExplicitModuleSectionInfo::default()
        }
    }
}

impl RecordedProcess {
    /// Begins with a process. If it has ended, nothing is known of its code.
    pub fn begin(number: u32) -> RecordedProcess {
        let line = fs::read(format!("/proc/{number}/cmdline")).unwrap_or_default();
        let name = String::from_utf8_lossy(line.split(|byte| *byte == 0).next().unwrap_or(b""));
        let name = name.rsplit('/').next().filter(|name| !name.is_empty());
        RecordedProcess {
            name: name.map_or_else(|| format!("process {number}"), str::to_string),
            own_number: own_number(number).unwrap_or(number),
            code_map: None,
            begin: SystemTime::now(),
            code: Vec::new(),
            interpreter: None,
            unwinder: UnwinderX86_64::new(),
            cache: CacheX86_64::new(),
        }
    }

    /// Returns the interpreter of the process, if one has been found.
    pub fn interpreter(&self) -> Option<&Interpreter> {
        self.interpreter.as_ref()
    }

    /// Begins with a copy of this process, which has the same code at first.
    pub fn begin_copy(&self, number: u32, files: &MappedFiles) -> RecordedProcess {
        let mut copy = RecordedProcess::begin(number);
        copy.name.clone_from(&self.name);
        copy.interpreter = self.interpreter;
        copy.set_code(self.code.clone(), files);
        copy
    }

    /// Reads what the process `number` has mapped by now.
    pub fn read_maps(&mut self, number: u32, files: &mut MappedFiles) {
        let Ok(text) = fs::read_to_string(format!("/proc/{number}/maps")) else { return };
        let maps = ProcessMap::all(&text).into_iter().filter(|map| map.is_executable);
        let code: Vec<MappedCode> = maps.map(|map| code_of(&map, number, files)).collect();
        // A process that has ended has no mappings.
        if !code.is_empty() {
            self.set_code(code, files);
        }
        let path = self.path_of_code_map();
        let open = || File::open(format!("/proc/{number}/root{path}")).ok();
        self.code_map = self.code_map.take().or_else(open);
    }

    fn set_code(&mut self, code: Vec<MappedCode>, files: &MappedFiles) {
        self.unwinder = UnwinderX86_64::new();
        self.cache = CacheX86_64::new();
        for MappedCode { range, file } in &code {
            if let Some((index, offset)) = file {
                self.add_module(files.get(*index), range.clone(), *offset);
            }
        }
        self.code = code;
    }

    /// Where JIT compilers leave the names of their functions (`tools/perf/Documentation/
    /// jit-interface.txt`).
    fn path_of_code_map(&self) -> String {
        format!("/tmp/perf-{}.map", self.own_number)
    }

    /// Returns the file with the names of functions that a JIT compiler has made. It may have been
    /// written when the process ended, but not before it began: then it is of another process.
    pub fn code_map(&self) -> Option<File> {
        let is_its = |file: &File| {
            file.metadata().and_then(|of| of.modified()).is_ok_and(|at| at >= self.begin)
        };
        let now = || File::open(self.path_of_code_map()).ok().filter(is_its);
        self.code_map.as_ref().and_then(|file| file.try_clone().ok()).or_else(now)
    }

    fn add_module(&mut self, file: &MappedFile, range: Range<u64>, offset: u64) {
        let Some((elf, unwind)) = &file.elf else { return };
        let Some(bias) = elf.bias(range.start, offset) else { return };
        if self.interpreter.is_none()
            && file.path.contains("python")
            && let Some(interpreter) = python::find(elf, &file.path)
        {
            let runtime = bias.wrapping_add(interpreter.runtime);
            self.interpreter = Some(Interpreter { runtime, ..interpreter });
        }
        let module = Module::new(file.path.clone(), range, bias, unwind.sections());
        self.unwinder.add_module(module);
    }

    fn place(&self, address: u64) -> Option<CodePlace> {
        let at = self.code.partition_point(|code| code.range.end <= address);
        let code = self.code.get(at).filter(|code| code.range.contains(&address))?;
        Some(match code.file {
            Some((file, offset)) => CodePlace::File(file, address - code.range.start + offset),
            None => CodePlace::Anonymous(address),
        })
    }

    /// Walks the stack of a sample. Returns the places of its functions, the innermost first, and
    /// whether each of them is known.
    pub fn walk(&mut self, sample: &Sample) -> (Vec<CodePlace>, bool) {
        let [ip, sp, bp] = sample.registers;
        let mut read_word = |address: u64| {
            let at = address.checked_sub(sp & !7).filter(|at| at % 8 == 0).ok_or(())?;
            sample.stack.get((at / 8) as usize).copied().ok_or(())
        };
        let regs = UnwindRegsX86_64::new(ip, sp, bp);
        let mut frames = self.unwinder.iter_frames(ip, regs, &mut self.cache, &mut read_word);
        let mut addresses = Vec::new();
        while let Ok(Some(frame)) = frames.next() {
            addresses.push(frame.address_for_lookup());
            if addresses.len() == FRAMES_MAX {
                break;
            }
        }
        let places: Vec<CodePlace> =
            addresses.iter().map_while(|address| self.place(*address)).collect();
        let is_whole = places.len() == addresses.len() && !places.is_empty();
        (places, is_whole)
    }
}

/// Returns the number of a process in its own PID namespace.
fn own_number(number: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{number}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_whitespace().last()?.parse().ok()
}

/// Returns the code of a map of a process.
fn code_of(map: &ProcessMap, process: u32, files: &mut MappedFiles) -> MappedCode {
    let is_of_file = map.name.starts_with('/');
    let file = is_of_file.then(|| {
        let path = map.name.strip_suffix(" (deleted)").unwrap_or(&map.name);
        (files.index(process, (map.device.clone(), map.inode), path), map.offset)
    });
    MappedCode { range: map.start..map.end, file }
}

/// Returns the path of a file that can still be read, whatever its own path leads to by now.
pub fn path_of_open(file: &File) -> PathBuf {
    use std::os::fd::AsRawFd;
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}
