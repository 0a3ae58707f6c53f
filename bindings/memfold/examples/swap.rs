//! Data that hardly compresses goes to an encrypted file in the directory that the first argument
//! names, or in the directory of temporary files.
use memfold::{Error, Memory};

fn main() -> Result<(), Error> {
    let directory = std::env::args().nth(1).unwrap_or_else(|| {
        std::env::temp_dir().into_os_string().into_string().unwrap_or_else(|_| "/tmp".into())
    });
    let memory = Memory::builder().limit_bytes(32 << 20).set("swap", &directory).build()?;
    let mut region = memory.region(96 << 20)?;
    let mut random = 88172645463325252u64;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random.to_le_bytes()
    };
    let mut sums = Vec::new();
    for page in region.as_mut_slice().chunks_exact_mut(4096) {
        page.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&next()));
        sums.push(page.iter().fold(0u64, |sum, byte| sum.wrapping_mul(31) + u64::from(*byte)));
    }
    for (page, sum) in region.as_slice().chunks_exact(4096).zip(sums) {
        assert_eq!(
            page.iter().fold(0u64, |sum, byte| sum.wrapping_mul(31) + u64::from(*byte)),
            sum
        );
    }
    println!("96 MiB of random bytes in 32 MiB and a file in {directory}");
    Ok(())
}
