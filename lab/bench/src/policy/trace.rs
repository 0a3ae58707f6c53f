//! Page traces: which pages a program touched, in which order, and whether it wrote to them.
//!
//! A file has the magic number and a zstd frame. The frame holds numbers of seven bits a byte, the
//! lowest first: the number of pages; for each page its distance from the page before; the number
//! of references; for each reference its distance from the page of the one before, with the sign in
//! bit 1 and "write" in bit 0.

use crate::common::refusal::Refusal;
use anyhow::{Context, bail};
use std::path::Path;

const MAGIC: &[u8; 8] = b"mftrace1";
const LEVEL: i32 = 19;
/// Most bytes that a trace may unpack to.
const UNPACKED_MOST: usize = 1 << 30;

/// A page of a trace: its number in the order of addresses, from 0.
pub type PageNumber = u32;

/// A touch of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reference {
    /// The page.
    pub page: PageNumber,
    /// Whether it was a write.
    pub write: bool,
}

/// A trace in memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trace {
    /// The address of each page, divided by the page size, in ascending order. Only the distances
    /// between the pages of a trace are meaningful.
    pub addresses: Vec<u64>,
    /// The touches in their order.
    pub references: Vec<Reference>,
}

impl Trace {
    /// Makes a trace of touches of pages, named by address. The addresses are moved so that the
    /// first is that of the first page of a 2 MiB chunk, or as far behind it as before.
    pub fn new(touches: &[(u64, bool)]) -> Trace {
        let mut addresses: Vec<u64> = touches.iter().map(|(address, _)| *address).collect();
        addresses.sort_unstable();
        addresses.dedup();
        let references = touches
            .iter()
            .map(|&(address, write)| {
                let page = addresses.binary_search(&address).expect("each address is in the list");
                Reference { page: page as PageNumber, write }
            })
            .collect();
        let base = addresses.first().map_or(0, |first| first & !511);
        Trace { addresses: addresses.iter().map(|address| address - base).collect(), references }
    }

    /// Returns the number of pages.
    pub fn pages(&self) -> usize {
        self.addresses.len()
    }

    /// Packs the trace.
    pub fn pack(&self) -> anyhow::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        push(&mut bytes, self.addresses.len() as u64);
        let mut before = 0;
        for address in &self.addresses {
            push(&mut bytes, address - before);
            before = *address;
        }
        push(&mut bytes, self.references.len() as u64);
        let mut before = 0i64;
        for Reference { page, write } in &self.references {
            let distance = *page as i64 - before;
            push(
                &mut bytes,
                (distance.unsigned_abs() << 2) | ((distance < 0) as u64 * 2) | *write as u64,
            );
            before = *page as i64;
        }
        let mut frame = MAGIC.to_vec();
        frame.resize(MAGIC.len() + zstd_safe::compress_bound(bytes.len()), 0);
        let len = zstd_safe::compress(&mut frame[MAGIC.len()..], &bytes, LEVEL)
            .map_err(|code| anyhow::anyhow!(zstd_safe::get_error_name(code)))?;
        frame.truncate(MAGIC.len() + len);
        Ok(frame)
    }

    /// Unpacks what [`Trace::pack`] returned.
    ///
    /// # Errors
    /// If the bytes are not those of a trace.
    pub fn unpack(packed: &[u8]) -> anyhow::Result<Trace> {
        let frame = packed.strip_prefix(MAGIC).context("not a page trace")?;
        let len = zstd_safe::get_frame_content_size(frame).ok().flatten().unwrap_or(0) as usize;
        if len == 0 || len > UNPACKED_MOST {
            bail!("a damaged page trace");
        }
        let mut bytes = vec![0; len];
        let len = zstd_safe::decompress(bytes.as_mut_slice(), frame)
            .map_err(|code| anyhow::anyhow!(zstd_safe::get_error_name(code)))?;
        let mut rest = &bytes[..len];
        let (mut addresses, mut address) = (Vec::new(), 0u64);
        for n in 0..pull(&mut rest)? {
            let distance = pull(&mut rest)?;
            address = address.checked_add(distance).context("a page past all addresses")?;
            if n > 0 && distance == 0 {
                bail!("a page is there twice");
            }
            addresses.push(address);
        }
        let (mut references, mut page) = (Vec::new(), 0i64);
        for _ in 0..pull(&mut rest)? {
            let word = pull(&mut rest)?;
            let distance = (word >> 2) as i64;
            page += if word & 2 != 0 { -distance } else { distance };
            if page < 0 || page >= addresses.len() as i64 {
                bail!("a reference to no page");
            }
            references.push(Reference { page: page as PageNumber, write: word & 1 != 0 });
        }
        Ok(Trace { addresses, references })
    }

    /// Reads a trace from a file.
    ///
    /// # Errors
    /// A refusal that names the file.
    pub fn read(path: &Path) -> anyhow::Result<Trace> {
        let bytes = std::fs::read(path).map_err(anyhow::Error::from);
        bytes
            .and_then(|bytes| Trace::unpack(&bytes))
            .map_err(|error| Refusal::Corpus(format!("{}: {error}", path.display())).into())
    }
}

fn push(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn pull(bytes: &mut &[u8]) -> anyhow::Result<u64> {
    let mut number = 0;
    for shift in (0..63).step_by(7) {
        let (first, rest) = bytes.split_first().context("a truncated page trace")?;
        *bytes = rest;
        number |= (*first as u64 & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Ok(number);
        }
    }
    bail!("a number of a page trace is too large")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_trace_is_the_same_after_unpacking() {
        let touches = [(0x7f00_0003, true), (0x1002, false), (0x7f00_0003, false), (0x1003, true)];
        let trace = Trace::new(&touches);
        assert_eq!(trace.addresses, [2, 3, 0x7eff_f003]);
        let pages: Vec<PageNumber> =
            trace.references.iter().map(|reference| reference.page).collect();
        assert_eq!(pages, [2, 0, 2, 1]);
        let bytes = trace.pack().unwrap();
        assert_eq!(Trace::unpack(&bytes).unwrap(), trace);
        assert_eq!(Trace::unpack(&Trace::default().pack().unwrap()).unwrap(), Trace::default());
        assert!(Trace::unpack(&bytes[1..]).is_err());
    }

    #[test]
    fn damaged_traces_are_refused() {
        let pack = |numbers: &[u64]| {
            let mut bytes = Vec::new();
            numbers.iter().for_each(|number| push(&mut bytes, *number));
            let mut frame = [0u8; 100];
            let len = zstd_safe::compress(frame.as_mut_slice(), &bytes, 1).unwrap();
            [MAGIC.as_slice(), &frame[..len]].concat()
        };
        assert!(Trace::unpack(&pack(&[1, 5, 1, 1])).is_ok());
        assert!(Trace::unpack(&pack(&[1, 5, 1, 4])).is_err(), "a reference past the last page");
        assert!(Trace::unpack(&pack(&[1, 5, 1, 6])).is_err(), "a reference before the first page");
        assert!(Trace::unpack(&pack(&[2, 5, 0, 0])).is_err(), "two pages at one address");
        assert!(Trace::unpack(&pack(&[1, 5, 2, 1])).is_err(), "fewer references than it says");
    }
}
