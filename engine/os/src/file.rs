//! Reading a whole file without std.
use crate::Errno;
use alloc::vec;
use alloc::vec::Vec;
use rustix::fs::{Mode, OFlags};

/// Returns the bytes of the file at `path`, at most `bytes_max`.
///
/// # Errors
/// The errors of `open` and `read`; EFBIG for a longer file.
pub fn read(path: &str, bytes_max: usize) -> Result<Vec<u8>, Errno> {
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    // One byte more, to find out whether the file ends.
    let mut bytes = vec![0; bytes_max + 1];
    let mut len = 0;
    loop {
        match rustix::io::read(&file, &mut bytes[len..]) {
            Ok(0) => break,
            Ok(n) => len += n,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        if len > bytes_max {
            return Err(Errno::FBIG);
        }
    }
    bytes.truncate(len);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_whole_or_not_at_all() {
        let path = std::env::temp_dir().join(format!("memfold-file-{}", std::process::id()));
        std::fs::write(&path, [7; 5000]).unwrap();
        let name = path.to_str().unwrap();
        assert_eq!(read(name, 5000).unwrap(), [7; 5000]);
        assert_eq!(read(name, 4999), Err(Errno::FBIG));
        assert_eq!(read("/nonexistent", 10), Err(Errno::NOENT));
        assert_eq!(read("/", 10), Err(Errno::ISDIR));
        std::fs::remove_file(path).unwrap();
    }
}
