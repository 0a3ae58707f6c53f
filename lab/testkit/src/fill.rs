//! Contents for pages: real bytes of this machine's shared libraries, zeros, short patterns, and
//! noise.
use crate::random::Random;
use memfold_os::units::PAGE_SIZE;
use std::path::PathBuf;
use std::sync::OnceLock;

/// Returns a page of random bytes by `seed`, of which `zeros` quarters of each 512 bytes are zeros.
pub fn partly_random(seed: u64, zeros: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut page = vec![0; PAGE_SIZE];
    page.chunks_exact_mut(8).enumerate().for_each(|(i, word)| {
        if i % 64 / 16 >= zeros {
            word.copy_from_slice(&random.word().to_le_bytes());
        }
    });
    page
}

/// Changes two words of a page so that its XXH3-128 equals that of the same page with any other `x`
/// and `y` of equal sum. The public secret of XXH3 makes one factor of each of its products 0, and
/// only the sum remains.
pub fn equal_xxh3(page: &mut [u8], x: u32, y: u32) {
    for (at, high, low) in [(0, x, 0x396c_feb8u32), (64, y, 0x2c81_017c)] {
        page[at..at + 8].copy_from_slice(&((high as u64) << 32 | low as u64).to_le_bytes());
    }
}

/// Fills bytes in one of the ways that data comes in: mostly real bytes, else zeros, an 8-byte
/// pattern, or noise.
pub fn fill(random: &mut Random, bytes: &mut [u8]) {
    match random.below(8) {
        0 => bytes.fill(0),
        1 => {
            let pattern = if random.below(2) == 0 { 0x0101_0101_0101_0101 } else { random.word() };
            bytes.chunks_mut(8).for_each(|c| c.copy_from_slice(&pattern.to_ne_bytes()[..c.len()]));
        }
        2 => bytes
            .chunks_mut(8)
            .for_each(|c| c.copy_from_slice(&random.word().to_ne_bytes()[..c.len()])),
        _ => {
            for chunk in bytes.chunks_mut(PAGE_SIZE) {
                let at = random.below(corpus().len() - chunk.len());
                chunk.copy_from_slice(&corpus()[at..at + chunk.len()]);
            }
        }
    }
}

fn corpus() -> &'static [u8] {
    static CORPUS: OnceLock<Vec<u8>> = OnceLock::new();
    CORPUS.get_or_init(|| libraries(512 << 10, 4 << 20))
}

/// Returns this machine's shared libraries by name, up to `each` bytes of one, until there are
/// `most` bytes, and the test's own executable if they are fewer. It reads only one directory:
/// packages change the others, and so the input of tests.
pub fn libraries(each: usize, most: usize) -> Vec<u8> {
    let dirs =
        ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"];
    let of = |dir: &&str| -> Option<Vec<PathBuf>> {
        let entries = std::fs::read_dir(dir).ok()?.flatten().map(|entry| entry.path());
        let libraries = entries.filter(|path| path.to_string_lossy().contains(".so"));
        Some(libraries.collect::<Vec<_>>()).filter(|paths| !paths.is_empty())
    };
    let mut files = dirs.iter().find_map(of).unwrap_or_default();
    files.sort();
    files.extend(std::env::current_exe());
    let mut bytes = Vec::new();
    for file in files {
        if bytes.len() >= most {
            break;
        }
        bytes.extend(std::fs::read(file).unwrap_or_default().into_iter().take(each));
    }
    assert!(bytes.len() > PAGE_SIZE, "no file to take bytes from");
    bytes
}
