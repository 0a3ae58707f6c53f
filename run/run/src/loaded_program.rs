//! The program that the library itself loads, because no dynamic linker does: the text of one
//! environment variable. It is the last entry of the environment. The program never sees it.
//!
//! The text is `DESCRIPTOR:LENGTH:PATHNAME`: a descriptor or nothing, the length of the path in
//! bytes, the path, and the name for AT_EXECFN.

/// The name of the environment variable.
pub const VARIABLE: &str = "MEMFOLD_PROGRAM";

/// The program to load.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct LoadedProgram<'a> {
    /// The path of its file.
    pub path: &'a [u8],
    /// The name by which it was executed: that of the script, if it is the interpreter of one.
    pub name: &'a [u8],
    /// An open descriptor of the file, to be used in place of the path and closed.
    pub descriptor: Option<u32>,
}

impl<'a> LoadedProgram<'a> {
    /// Passes the parts of the text to `add`.
    pub fn write(&self, add: &mut dyn FnMut(&[u8])) {
        if let Some(descriptor) = self.descriptor {
            add_number(descriptor, add);
        }
        add(b":");
        add_number(self.path.len() as u32, add);
        add(b":");
        add(self.path);
        add(self.name);
    }

    /// Reads a text.
    pub fn parse(text: &'a [u8]) -> Option<LoadedProgram<'a>> {
        let mut parts = text.splitn(3, |byte| *byte == b':');
        let descriptor = match parts.next()? {
            [] => None,
            digits => Some(number(digits)?),
        };
        let (path, name) = {
            let len = number(parts.next()?)? as usize;
            parts.next()?.split_at_checked(len)?
        };
        Some(LoadedProgram { path, name, descriptor })
    }
}

fn number(digits: &[u8]) -> Option<u32> {
    core::str::from_utf8(digits).ok()?.parse().ok()
}

fn add_number(number: u32, add: &mut dyn FnMut(&[u8])) {
    let (mut digits, mut at, mut rest) = ([0u8; 10], 10, number);
    loop {
        at -= 1;
        digits[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            return add(&digits[at..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn text_is_read_as_it_was_written() {
        for (path, name, descriptor) in
            [("/bin/true", "./true", None), ("a:b", "", Some(0)), ("", "x:1:y", Some(u32::MAX))]
        {
            let program =
                LoadedProgram { path: path.as_bytes(), name: name.as_bytes(), descriptor };
            let mut text = Vec::new();
            program.write(&mut |part| text.extend_from_slice(part));
            assert_eq!(LoadedProgram::parse(&text), Some(program), "{text:?}");
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in ["", ":", "::", ":5:abc", "x:1:ab", ":x:ab", ":-1:ab", "4294967296:0:"] {
            assert_eq!(LoadedProgram::parse(text.as_bytes()), None, "{text}");
        }
    }
}
