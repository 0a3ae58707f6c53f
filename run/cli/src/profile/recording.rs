//! What has been recorded so far: stacks as places in code, without names. The names are found at
//! the end.
use crate::profile::process::{CodePlace, MappedFiles, RecordedProcess};
use memfold_run::samples::{Sample, SampleKind, SampleRing, SampledProcess};
use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

/// The shortest and the longest time between two reads of what a process has mapped, nanoseconds.
/// Each read that explains no more addresses doubles it.
const READ_AGAIN_MIN_NS: u64 = 10_000_000;
const READ_AGAIN_MAX_NS: u64 = 1_000_000_000;

/// A stack: its process, its places in compiled code, and its Python functions, each the innermost
/// first. In the latter, 0 stands for a change to compiled code.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct RawStack {
    pub process: usize,
    pub code: Vec<CodePlace>,
    pub frames: Vec<u64>,
}

/// A load that was sampled. It stands for [`Recording::every`] loads.
pub struct RecordedLoad {
    /// Index of its stack.
    pub stack: usize,
    pub thread: u32,
    pub time_ns: u64,
    pub spent_ns: u64,
    /// Index of the mapping that holds the address, if that is known.
    pub mapping: Option<usize>,
}

/// A mapping that the program has made.
pub struct RecordedMapping {
    pub len: u64,
    /// Index of the stack that made it.
    pub stack: usize,
}

/// A Python function.
pub struct PythonFunction {
    pub name: String,
    pub file: String,
    pub line: u64,
}

/// A process, and what is needed to read its samples.
struct OpenProcess {
    key: SampledProcess,
    about: RecordedProcess,
    /// Indices of its mappings by their start, with their end.
    mappings: BTreeMap<u64, (u64, usize)>,
    read_ns: u64,
    read_again_ns: u64,
}

/// All that was recorded.
pub struct Recording {
    pub every: u64,
    pub files: MappedFiles,
    pub loads: Vec<RecordedLoad>,
    pub mappings: Vec<RecordedMapping>,
    pub stacks: Interned<RawStack>,
    processes: Vec<OpenProcess>,
    /// Python functions by the image of their process and their code object.
    functions: HashMap<(u64, u64), PythonFunction>,
}

/// Values, each of them once.
pub struct Interned<T> {
    by_value: HashMap<T, usize>,
    values: Vec<T>,
}

impl<T: Clone + Eq + Hash> Interned<T> {
    /// No values.
    pub fn new() -> Interned<T> {
        Interned { by_value: HashMap::new(), values: Vec::new() }
    }

    /// Returns the index of a value, which is added if it is new.
    pub fn index(&mut self, value: T) -> usize {
        if let Some(known) = self.by_value.get(&value) {
            return *known;
        }
        self.values.push(value.clone());
        self.by_value.insert(value, self.values.len() - 1);
        self.values.len() - 1
    }

    /// Returns all values in the order of their indices.
    pub fn values(&self) -> &[T] {
        &self.values
    }
}

impl Recording {
    /// Begins without samples.
    pub fn new(every: u64) -> Recording {
        Recording {
            every,
            files: MappedFiles::default(),
            loads: Vec::new(),
            mappings: Vec::new(),
            stacks: Interned::new(),
            processes: Vec::new(),
            functions: HashMap::new(),
        }
    }

    /// Takes the samples that processes have left.
    pub fn take(&mut self, ring: &SampleRing) {
        for mut sample in ring.take() {
            let frames = std::mem::take(&mut sample.frames);
            match &mut sample.kind {
                SampleKind::Name { code, name, file, line } => {
                    let (name, file) = (std::mem::take(name), std::mem::take(file));
                    let function = PythonFunction { name, file, line: *line };
                    self.functions.insert((sample.process.image, *code), function);
                }
                SampleKind::Load { address, spent_ns } => {
                    let (address, spent_ns) = (*address, *spent_ns);
                    let stack = self.stack(ring, &sample, frames);
                    let mapping = self.mapping_at(sample.process, address);
                    let (thread, time_ns) = (sample.thread, sample.time_ns);
                    self.loads.push(RecordedLoad { stack, thread, time_ns, spent_ns, mapping });
                }
                SampleKind::Mapping { start, len } => {
                    let (start, len) = (*start, *len);
                    let stack = self.stack(ring, &sample, frames);
                    self.mappings.push(RecordedMapping { len, stack });
                    let (index, process) = (self.mappings.len() - 1, self.process(sample.process));
                    self.processes[process].add_mapping(start, len, index);
                }
            }
        }
    }

    /// Returns the process with an index.
    pub fn about(&self, process: usize) -> (SampledProcess, &RecordedProcess) {
        let open = &self.processes[process];
        (open.key, &open.about)
    }

    /// Returns the number of processes.
    pub fn process_count(&self) -> usize {
        self.processes.len()
    }

    /// Returns a Python function of a process.
    pub fn function(&self, process: usize, code: u64) -> Option<&PythonFunction> {
        self.functions.get(&(self.processes[process].key.image, code))
    }

    /// Returns the index of a process, which is begun if it is new.
    fn process(&mut self, key: SampledProcess) -> usize {
        if let Some(known) = self.processes.iter().rposition(|open| open.key == key) {
            return known;
        }
        let original = self.processes.iter().find(|open| open.key.image == key.image);
        let mut about = match original {
            Some(open) => open.about.begin_copy(key.number, &self.files),
            None => RecordedProcess::begin(key.number),
        };
        about.read_maps(key.number, &mut self.files);
        self.processes.push(OpenProcess {
            key,
            about,
            mappings: BTreeMap::new(),
            read_ns: 0,
            read_again_ns: READ_AGAIN_MIN_NS,
        });
        self.processes.len() - 1
    }

    /// Returns the index of a sample's stack.
    fn stack(&mut self, ring: &SampleRing, sample: &Sample, frames: Vec<u64>) -> usize {
        let process = self.process(sample.process);
        let open = &mut self.processes[process];
        let code = open.walk(sample, &mut self.files);
        // A copy of a process has the interpreter of the process that it was copied from.
        if let Some(interpreter) = open.about.interpreter()
            && ring.interpreter(sample.process.image).is_none()
        {
            ring.set_interpreter(sample.process.image, interpreter);
        }
        self.stacks.index(RawStack { process, code, frames })
    }

    /// Returns the index of the mapping at an address. A copy of a process has those of the process
    /// that it was copied from.
    fn mapping_at(&mut self, key: SampledProcess, address: u64) -> Option<usize> {
        let own = self.process(key);
        let is_of_image = |open: &&OpenProcess| open.key.image == key.image;
        let processes = self.processes.iter().filter(is_of_image);
        [&self.processes[own]]
            .into_iter()
            .chain(processes)
            .find_map(|open| open.mapping_at(address))
    }
}

impl OpenProcess {
    /// Walks the stack of a sample. Reads again what the process has mapped if some of it is unknown.
    fn walk(&mut self, sample: &Sample, files: &mut MappedFiles) -> Vec<CodePlace> {
        let (code, is_whole) = self.about.walk(sample);
        if is_whole || sample.time_ns < self.read_ns.saturating_add(self.read_again_ns) {
            return code;
        }
        self.about.read_maps(self.key.number, files);
        self.read_ns = sample.time_ns;
        let (now, _) = self.about.walk(sample);
        self.read_again_ns = match now.len() > code.len() {
            true => READ_AGAIN_MIN_NS,
            false => (2 * self.read_again_ns).min(READ_AGAIN_MAX_NS),
        };
        now
    }

    fn add_mapping(&mut self, start: u64, len: u64, index: usize) {
        let end = start.saturating_add(len);
        // What lay there before has been replaced, at least in part.
        let before = self.mappings.range(..start).next_back().map(|(at, (end, _))| (*at, *end));
        if let Some((at, _)) = before.filter(|(_, before)| *before > start)
            && let Some((until, _)) = self.mappings.get_mut(&at)
        {
            *until = start;
        }
        let starts: Vec<u64> = self.mappings.range(start..end).map(|(at, _)| *at).collect();
        for at in starts {
            self.mappings.remove(&at);
        }
        self.mappings.insert(start, (end, index));
    }

    fn mapping_at(&self, address: u64) -> Option<usize> {
        let (_, (end, index)) = self.mappings.range(..=address).next_back()?;
        (address < *end).then_some(*index)
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// This process, with an image.
    pub fn own(image: u64) -> SampledProcess {
        SampledProcess { number: std::process::id(), image }
    }

    /// Leaves the sample of a load at an address equal to the instruction's.
    pub fn leave(ring: &SampleRing, process: SampledProcess, ip: u64, frames: &[u64]) {
        let sample = ring.begin().unwrap();
        sample.set_thread(process, 1, ip);
        sample.set_load(ip, 10);
        sample.set_registers([ip, 0x1000, 0]);
        sample.set_frames(frames);
        sample.finish();
    }

    fn map(ring: &SampleRing, process: SampledProcess, time_ns: u64, start: u64, len: u64) {
        let sample = ring.begin().unwrap();
        sample.set_thread(process, 1, time_ns);
        sample.set_mapping(start, len);
        sample.finish();
    }

    #[test]
    fn load_is_of_the_last_mapping_at_its_address() {
        let (ring, _file) = SampleRing::create(5).unwrap();
        let mut recording = Recording::new(5);
        map(&ring, own(1), 1, 0x10_0000, 0x10_0000);
        map(&ring, own(1), 2, 0x18_0000, 0x10_0000);
        map(&ring, own(1), 3, 0x40_0000, 0x1000);
        for address in [0x10_0000, 0x17_ffff, 0x18_0000, 0x27_ffff, 0x28_0000, 0x40_0fff] {
            leave(&ring, own(1), address, &[]);
        }
        recording.take(&ring);
        let mappings: Vec<_> = recording.loads.iter().map(|load| load.mapping).collect();
        assert_eq!(mappings, [Some(0), Some(0), Some(1), Some(1), None, Some(2)]);
        assert_eq!(recording.mappings[1].len, 0x10_0000);
    }

    #[test]
    fn copy_of_a_process_has_its_code_and_mappings() {
        let (ring, _file) = SampleRing::create(5).unwrap();
        let mut recording = Recording::new(5);
        let code = copy_of_a_process_has_its_code_and_mappings as *const () as u64;
        map(&ring, own(1), 1, code & !0xfff, 0x1000);
        leave(&ring, own(1), code, &[]);
        // A process that has ended, or never was.
        leave(&ring, SampledProcess { number: u32::MAX / 2, image: 1 }, code, &[]);
        leave(&ring, SampledProcess { number: u32::MAX / 2, image: 2 }, code, &[]);
        recording.take(&ring);
        let of =
            |load: &RecordedLoad| (recording.stacks.values()[load.stack].code.len(), load.mapping);
        assert_eq!(
            recording.loads.iter().map(of).collect::<Vec<_>>(),
            [(1, Some(0)), (1, Some(0)), (0, None)]
        );
    }
}
