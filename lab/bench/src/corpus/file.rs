//! A corpus file as a read-only mapping of whole pages.

use crate::common::refusal::Refusal;
use memfold_engine::Region;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

/// Size of a page.
pub const PAGE: usize = 4096;
/// Words of 8 bytes in a page.
pub const WORDS: usize = PAGE / 8;
/// The smallest corpus for a walk, in bytes. A smaller one is not representative for a compressor.
pub const CORPUS_BYTES_MIN: u64 = 1 << 20;

/// A mapped corpus file. It is page cache: neither anonymous memory of the process, nor charged to
/// the cgroup of a walk, because the parent reads the file first. So it costs no peer any memory.
pub struct CorpusFile {
    start: *const u8,
    pages: usize,
}

// SAFETY: the mapping is read-only and lives as long as the value; all access is by reads.
unsafe impl Send for CorpusFile {}
// SAFETY: the mapping is read-only, so concurrent reads don't conflict.
unsafe impl Sync for CorpusFile {}

impl CorpusFile {
    /// Maps the whole pages of `path`.
    pub fn open(path: &Path) -> anyhow::Result<CorpusFile> {
        let refuse = |why: String| Refusal::Corpus(format!("corpus {}: {why}", path.display()));
        let file = File::open(path).map_err(|e| refuse(e.to_string()))?;
        let meta = file.metadata().map_err(|e| refuse(e.to_string()))?;
        if !meta.is_file() {
            return Err(refuse("not a regular file".into()).into());
        }
        if meta.len() < CORPUS_BYTES_MIN {
            return Err(refuse(format!(
                "too small: {} bytes, needs {CORPUS_BYTES_MIN}",
                meta.len()
            ))
            .into());
        }
        let pages = meta.len() as usize / PAGE;
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice, of a length that the file
        // has; nothing aliases it.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                pages * PAGE,
                libc::PROT_READ,
                flags,
                file.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(refuse(format!("can't map it: {}", std::io::Error::last_os_error())).into());
        }
        Ok(CorpusFile { start: start.cast(), pages })
    }

    /// Returns the number of whole pages, at least 256.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Returns the start of page `number` modulo the corpus: 4096 readable bytes, page-aligned.
    #[inline]
    pub fn page(&self, number: u64) -> *const u8 {
        let index = (number % self.pages as u64) as usize;
        // SAFETY: index < pages, so the result lies inside the mapping.
        unsafe { self.start.add(index * PAGE) }
    }

    /// Fills the region with the corpus's pages, repeated.
    pub fn fill(&self, region: &mut Region) {
        for number in 0..region.len() / PAGE {
            // SAFETY: the page lies in the region, which is borrowed for writing; a corpus page is
            // readable and lies elsewhere.
            unsafe {
                let to = region.as_ptr().add(number * PAGE);
                std::ptr::copy_nonoverlapping(self.page(number as u64), to, PAGE);
            }
        }
    }
}

impl Drop for CorpusFile {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `open`; no pointer from `page` outlives the walk that
        // borrows self.
        unsafe { libc::munmap(self.start.cast_mut().cast(), self.pages * PAGE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unreadable_or_small_corpus_is_refused_in_one_line() {
        let path = std::env::temp_dir().join(format!("memfold-small-{}", std::process::id()));
        std::fs::write(&path, b"tiny").unwrap();
        for bad in [path.as_path(), Path::new("/nonexistent/corpus"), Path::new("/")] {
            let error = CorpusFile::open(bad).err().expect("taken").to_string();
            assert!(!error.contains('\n') && error.starts_with("corpus "), "{error}");
        }
        std::fs::remove_file(path).unwrap();
    }
}
