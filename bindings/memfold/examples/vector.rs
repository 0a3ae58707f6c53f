//! A vector that grows past its limit.
use memfold::{Error, FoldedVec, Heap, Memory};

fn main() -> Result<(), Error> {
    let memory = Memory::builder().limit_bytes(64 << 20).build()?;
    let heap = Heap::new(&memory);
    let mut squares = FoldedVec::new(&heap);
    for number in 0..16_000_000u64 {
        squares.push(number * number)?;
    }
    let sum: u64 = squares.iter().step_by(1_000_000).sum();
    assert_eq!(sum, (0..16).map(|millions: u64| (millions * 1_000_000).pow(2)).sum());
    println!("{} numbers, {} MiB of addresses", squares.len(), heap.allocated_bytes() >> 20);
    Ok(())
}
