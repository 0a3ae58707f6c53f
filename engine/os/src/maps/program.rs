//! The file of the program that another process runs, by its map and its auxiliary vector.
use crate::Errno;
use crate::maps::each_area_in;
use crate::maps::own::open;
use crate::text::TextBuffer;
use core::ops::ControlFlow;
use rustix::fs::{CWD, readlinkat_raw};

/// Most pairs of an auxiliary vector that are read. Linux 6.18 has 26.
const PAIRS_MAX: usize = 64;
const PAIR_BYTES: usize = 16;

/// Writes the path of the file at which the program of a process begins into `path`, which may be
/// cut off. Returns the path's length in bytes. The kernel's own answer, `/proc/PID/exe`, is the
/// file that was executed, which may have loaded that program.
///
/// # Errors
/// The errors of opening and reading files of /proc: EACCES without permission to trace the process.
/// NOENT: it doesn't exist, or begins in no mapping, or the path leads to no such file: the file was
/// removed, or is in another mount namespace.
pub fn path_of_program(process: u32, path: &mut [u8]) -> Result<usize, Errno> {
    let name = |file| TextBuffer::<32>::of(format_args!("/proc/{process}/{file}"));
    let open_its = |file| open(name(file).as_c_str().map_err(|_| Errno::NOENT)?);
    let mut vector = [0u8; PAIRS_MAX * PAIR_BYTES];
    let len = rustix::io::read(&open_its("auxv")?, &mut vector)?;
    let entry = entry_in(&vector[..len]).ok_or(Errno::NOENT)?;
    let mut bounds = None;
    each_area_in(&open_its("maps")?, |area| {
        if !(area.start..area.end).contains(&entry) {
            return ControlFlow::Continue(());
        }
        bounds = Some((area.start, area.end, area.inode));
        ControlFlow::Break(())
    })?;
    let (start, end, inode) = bounds.ok_or(Errno::NOENT)?;
    let link = TextBuffer::<80>::of(format_args!("/proc/{process}/map_files/{start:x}-{end:x}"));
    let link = link.as_c_str().map_err(|_| Errno::NOENT)?;
    let len = readlinkat_raw(CWD, link, &mut *path)?;
    match rustix::fs::stat(&path[..len]) {
        Ok(about) if about.st_ino == inode => Ok(len),
        _ => Err(Errno::NOENT),
    }
}

/// Returns the value of AT_ENTRY in an auxiliary vector.
fn entry_in(vector: &[u8]) -> Option<usize> {
    let word = |bytes: &[u8]| bytes.try_into().map(usize::from_ne_bytes).ok();
    let mut pairs = vector.chunks_exact(PAIR_BYTES).map(|pair| pair.split_at(PAIR_BYTES / 2));
    let (_, entry) = pairs.find(|(kind, _)| word(kind) == Some(libc::AT_ENTRY as usize))?;
    word(entry)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::process::Stdio;

    #[test]
    fn program_of_a_process_is_what_the_kernel_executed() {
        let mut cat = std::process::Command::new("cat");
        let mut child = cat.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        // When it answers, it has executed its program.
        child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        for process in [std::process::id(), child.id()] {
            let mut path = [0u8; 4096];
            let len = path_of_program(process, &mut path).unwrap();
            let exe = std::fs::read_link(std::format!("/proc/{process}/exe")).unwrap();
            assert_eq!(&path[..len], exe.as_os_str().as_encoded_bytes());
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(path_of_program(child.id(), &mut [0; 64]), Err(Errno::NOENT));
    }

    #[test]
    fn entry_is_found_by_its_kind() {
        let bytes = |words: &[usize]| -> std::vec::Vec<u8> {
            words.iter().flat_map(|word| word.to_ne_bytes()).collect()
        };
        assert_eq!(entry_in(&bytes(&[3, 9, 9, 70, 0, 0])), Some(70));
        assert_eq!(entry_in(&bytes(&[3, 9, 0, 0])), None);
        assert_eq!(entry_in(&bytes(&[9])), None);
    }
}
