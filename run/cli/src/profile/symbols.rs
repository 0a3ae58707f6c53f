//! Names for what was recorded: of compiled code by blazesym from the symbols and the debug
//! information of its file, of a JIT compiler's code from the file that it has left, and of Python.
use crate::profile::process::{CodePlace, path_of_open};
use crate::profile::recording::{Interned, RawStack, Recording};
use blazesym::symbolize::source::{Elf, Source};
use blazesym::symbolize::{Input, Symbolized, Symbolizer};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufRead, BufReader, Seek};

/// The function that runs Python code; compilers add suffixes.
const EVALUATES: &str = "_PyEval_EvalFrameDefault";

/// A function of a program.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Function {
    /// Its name, or the address of its code if it has none.
    pub name: String,
    /// Its file: that of the program or library, or the source of a Python function.
    pub file: String,
    /// The line of a Python function. `None` for compiled code.
    pub line: Option<u64>,
}

impl Function {
    fn compiled(name: &str, file: &str) -> Function {
        Function { name: name.to_string(), file: file.to_string(), line: None }
    }

    /// Returns whether it is one of Python.
    pub fn is_python(&self) -> bool {
        self.line.is_some()
    }
}

/// Stacks with names.
pub struct NamedStacks {
    pub functions: Interned<Function>,
    /// For each stack, the indices of its functions, the innermost first.
    pub stacks: Vec<Vec<usize>>,
}

impl NamedStacks {
    /// Finds the names of all stacks.
    pub fn of(recording: &Recording) -> NamedStacks {
        let mut stacks = NamedStacks { functions: Interned::new(), stacks: Vec::new() };
        let names = CodeFunctions::of(recording);
        for stack in recording.stacks.values() {
            let functions = joined(recording, &names, stack);
            let indices = functions.into_iter().map(|function| stacks.functions.index(function));
            let indices = indices.collect();
            stacks.stacks.push(indices);
        }
        stacks
    }

    /// Returns the functions of a stack, the innermost first.
    pub fn stack(&self, index: usize) -> impl DoubleEndedIterator<Item = &Function> {
        self.stacks[index].iter().map(|function| &self.functions.values()[*function])
    }
}

/// Returns the functions of a stack. Python functions take the place of the function that runs them.
fn joined(recording: &Recording, names: &CodeFunctions, stack: &RawStack) -> Vec<Function> {
    let python = |code: &u64| match recording.function(stack.process, *code) {
        Some(found) => {
            Function { name: found.name.clone(), file: found.file.clone(), line: Some(found.line) }
        }
        None => {
            Function { name: "Python function".to_string(), file: String::new(), line: Some(0) }
        }
    };
    let mut frames = stack.frames.iter();
    let mut functions = Vec::new();
    for place in &stack.code {
        for function in names.at(stack.process, *place) {
            if function.name.starts_with(EVALUATES) && !frames.as_slice().is_empty() {
                functions.extend(frames.by_ref().take_while(|code| **code != 0).map(python));
            } else {
                functions.push(function.clone());
            }
        }
    }
    functions.extend(frames.filter(|code| **code != 0).map(python));
    if functions.is_empty() {
        functions.push(Function::compiled("unknown", ""));
    }
    functions
}

/// The functions at places of compiled code, the innermost first: a compiler may have put several
/// into one.
struct CodeFunctions {
    in_files: HashMap<(usize, u64), Vec<Function>>,
    in_memory: HashMap<(usize, u64), Vec<Function>>,
}

impl CodeFunctions {
    fn of(recording: &Recording) -> CodeFunctions {
        let mut offsets = vec![Vec::new(); recording.files.len()];
        let mut addresses = vec![Vec::new(); recording.process_count()];
        for stack in recording.stacks.values() {
            for place in &stack.code {
                match place {
                    CodePlace::File(file, offset) => offsets[*file].push(*offset),
                    CodePlace::Anonymous(address) => addresses[stack.process].push(*address),
                }
            }
        }
        let mut names = CodeFunctions { in_files: HashMap::new(), in_memory: HashMap::new() };
        let symbolizer = Symbolizer::new();
        for (file, offsets) in offsets.iter_mut().enumerate() {
            offsets.sort_unstable();
            offsets.dedup();
            names.add_file(&symbolizer, recording, file, offsets);
        }
        for (process, addresses) in addresses.iter().enumerate().filter(|(_, of)| !of.is_empty()) {
            names.add_anonymous(recording, process, addresses);
        }
        names
    }

    fn add_file(
        &mut self,
        symbolizer: &Symbolizer,
        recording: &Recording,
        file: usize,
        offsets: &[u64],
    ) {
        let mapped_file = recording.files.get(file);
        let base = mapped_file.path.rsplit('/').next().unwrap_or_default();
        let symbols =
            mapped_file.opened.as_ref().filter(|_| !offsets.is_empty()).and_then(|handle| {
                let symbolize = |debug_syms: bool| {
                    let mut elf = Elf::new(path_of_open(handle));
                    elf.debug_syms = debug_syms;
                    symbolizer.symbolize(&Source::Elf(elf), Input::FileOffset(offsets)).ok()
                };
                // Debug information may be damaged, or of a kind that can't be read.
                symbolize(true).or_else(|| symbolize(false))
            });
        for (n, offset) in offsets.iter().enumerate() {
            let symbol = symbols.as_ref().and_then(|symbols| symbols.get(n));
            let of = |name: &str| Function::compiled(name, base);
            let functions = match symbol {
                Some(Symbolized::Sym(symbol)) => {
                    let frames = symbol.inlined.iter().rev().map(|frame| of(&frame.name));
                    frames.chain([of(&symbol.name)]).collect()
                }
                _ => vec![of(&format!("{base}+{offset:#x}"))],
            };
            self.in_files.insert((file, *offset), functions);
        }
    }

    fn add_anonymous(&mut self, recording: &Recording, process: usize, addresses: &[u64]) {
        let (_, about) = recording.about(process);
        let map = about.code_map().map(read_code_map).unwrap_or_default();
        for address in addresses {
            let function = map.range(..=*address).next_back();
            let name = function.filter(|(start, (len, _))| address - **start < *len);
            let name = name.map_or_else(|| format!("{address:#x}"), |(_, (_, name))| name.clone());
            let function = Function::compiled(&name, "generated code");
            self.in_memory.insert((process, *address), vec![function]);
        }
    }

    fn at(&self, process: usize, place: CodePlace) -> &[Function] {
        let functions = match place {
            CodePlace::File(file, offset) => self.in_files.get(&(file, offset)),
            CodePlace::Anonymous(address) => self.in_memory.get(&(process, address)),
        };
        functions.map_or(&[], Vec::as_slice)
    }
}

/// Reads a file of perf's format for generated code: lines of START LENGTH NAME, in hexadecimal
/// (`tools/perf/Documentation/jit-interface.txt`). A later line replaces an earlier one.
fn read_code_map(file: File) -> BTreeMap<u64, (u64, String)> {
    let mut reader = BufReader::new(file);
    let mut map = BTreeMap::new();
    if reader.rewind().is_err() {
        return map;
    }
    for line in reader.split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line);
        let mut fields = line.splitn(3, ' ');
        let number = |text: Option<&str>| {
            let text = text?;
            u64::from_str_radix(text.strip_prefix("0x").unwrap_or(text), 16).ok()
        };
        if let (Some(start), Some(len), Some(name)) =
            (number(fields.next()), number(fields.next()), fields.next())
        {
            map.insert(start, (len, name.trim().to_string()));
        }
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::recording::tests::{leave, own};
    use memfold_run::samples::SampleRing;
    use memfold_testkit::scratch::Scratch;

    #[inline(never)]
    fn function_with_a_name() -> u64 {
        std::hint::black_box(7)
    }

    #[test]
    fn place_in_this_program_has_the_name_of_its_function() {
        let (ring, _file) = SampleRing::create(1).unwrap();
        let mut recording = Recording::new(1);
        leave(&ring, own(1), function_with_a_name as *const () as u64 + 1, &[]);
        recording.take(&ring);
        let names = NamedStacks::of(&recording);
        // The compiler has put another function into it, which comes first.
        let is_it = |function: &Function| {
            function.name.contains("function_with_a_name") && function.file.starts_with("memfold-")
        };
        let functions: Vec<&Function> = names.stack(0).collect();
        assert!(functions.iter().any(|function| is_it(function)), "{functions:?}");
    }

    #[test]
    fn python_functions_take_the_place_of_the_interpreter() {
        let (ring, _file) = SampleRing::create(1).unwrap();
        let mut recording = Recording::new(1);
        leave(&ring, own(1), 0, &[]);
        for (code, text) in [(11, *b"inner\0f\0"), (12, *b"outer\0f\0"), (13, *b"first\0f\0")] {
            let sample = ring.begin().unwrap();
            sample.set_thread(own(1), 1, 1);
            sample.set_name(code, code);
            sample.add_words(&[u64::from_ne_bytes(text)]);
            sample.finish();
        }
        recording.take(&ring);
        let names = ["leaf", EVALUATES, "between", "_PyEval_EvalFrameDefault.cold", "main"];
        let in_memory = names
            .iter()
            .zip(1..)
            .map(|(name, at)| ((0, at), vec![Function::compiled(name, "python3")]));
        let names = CodeFunctions { in_files: HashMap::new(), in_memory: in_memory.collect() };
        let join = |code: &[u64], frames: &[u64]| {
            let code = code.iter().map(|at| CodePlace::Anonymous(*at)).collect();
            let stack = RawStack { process: 0, code, frames: frames.to_vec() };
            let functions = joined(&recording, &names, &stack);
            functions.into_iter().map(|function| function.name).collect::<Vec<_>>()
        };
        // Two Python functions share a call of the interpreter.
        let all = join(&[1, 2, 3, 4, 5], &[11, 12, 0, 13, 0]);
        assert_eq!(all, ["leaf", "inner", "outer", "between", "first", "main"]);
        // The stack was cut off.
        assert_eq!(join(&[1, 2], &[11, 12, 0, 13, 0]), ["leaf", "inner", "outer", "first"]);
        assert_eq!(join(&[1, 2], &[]), ["leaf", EVALUATES]);
        assert_eq!(join(&[1, 2], &[99, 0]), ["leaf", "Python function"]);
        assert_eq!(join(&[], &[]), ["unknown"]);
    }

    #[test]
    fn later_line_of_a_code_map_replaces_an_earlier_one() {
        let scratch = Scratch::new();
        let text = "1000 20 old name\n0x2000 10 second\nnonsense\n1000 8 new name with \u{fc}\n";
        let path = scratch.file("perf.map", text, 0o644);
        let map = read_code_map(File::open(path).unwrap());
        let expected = [(0x1000, (8, "new name with \u{fc}")), (0x2000, (16, "second"))];
        let entries = map.iter().map(|(start, (len, name))| (*start, (*len, name.as_str())));
        assert_eq!(entries.collect::<Vec<_>>(), expected);
    }
}
