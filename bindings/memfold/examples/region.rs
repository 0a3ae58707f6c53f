//! A table four times as large as its limit, filled and read at random.
use memfold::{Error, Memory};

const LIMIT: u64 = 64 << 20;
const LEN: usize = 256 << 20;
const ROW: usize = 4096;

fn main() -> Result<(), Error> {
    let memory = Memory::builder().limit_bytes(LIMIT).build()?;
    let mut table = memory.region(LEN)?;
    for (number, row) in table.as_mut_slice().chunks_exact_mut(ROW).enumerate() {
        let text = format!("row {number}: some text, as tables have it; ");
        row.iter_mut().zip(text.bytes().cycle()).for_each(|(to, from)| *to = from);
    }
    let rows = LEN / ROW;
    for step in 0..10_000 {
        let number = step * 7919 % rows;
        let expected = format!("row {number}:");
        assert_eq!(&table.as_slice()[number * ROW..][..expected.len()], expected.as_bytes());
    }
    let figure =
        |name| memory.stats().iter().find(|(n, _)| *n == name).map_or(0, |(_, value)| value);
    println!("{} MiB in at most {} MiB", LEN >> 20, figure("peak_bytes") >> 20);
    Ok(())
}
