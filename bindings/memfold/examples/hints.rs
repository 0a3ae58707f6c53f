//! A program that knows what it will use: hints fold and load memory before a touch would.
use memfold::{Error, Memory};

fn main() -> Result<(), Error> {
    let memory = Memory::builder().resident_bytes(64 << 20).build()?;
    let mut region = memory.region(32 << 20)?;
    let (index, archive) = (0..8 << 20, 8 << 20..32 << 20);
    region.as_mut_slice().fill(b'x');

    let pages = region.pageout(archive.clone()); // fold it now
    println!("{pages} pages folded");
    let pin = region.pin(index); // never fold this while the value lives
    region.willneed(archive.clone()); // load it again, ahead of the touches
    assert!(region.as_slice()[archive].iter().all(|byte| *byte == b'x'));
    drop(pin);
    Ok(())
}
