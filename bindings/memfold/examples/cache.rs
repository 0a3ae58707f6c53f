//! A cache whose entries are folded when they weren't used for a while, and are never lost.
use memfold::{Error, FoldedVec, Heap, Memory};
use std::collections::HashMap;

/// Pages by address, in folded memory.
struct Cache {
    heap: Heap,
    pages: HashMap<String, FoldedVec<u8>>,
}

impl Cache {
    fn page(&mut self, address: &str) -> Result<&[u8], Error> {
        if !self.pages.contains_key(address) {
            let mut page = FoldedVec::new(&self.heap);
            page.extend_from_slice(render(address).as_bytes())?;
            self.pages.insert(address.to_string(), page);
        }
        Ok(&self.pages[address])
    }
}

fn render(address: &str) -> String {
    format!("<p>The page of {address}</p>\n").repeat(2000)
}

fn main() -> Result<(), Error> {
    let memory = Memory::builder().limit_bytes(16 << 20).build()?;
    let mut cache = Cache { heap: Heap::new(&memory), pages: HashMap::new() };
    for round in 0..2 {
        for number in 0..1000 {
            let address = format!("/articles/{number}");
            assert_eq!(cache.page(&address)?, render(&address).as_bytes(), "round {round}");
        }
    }
    println!("{} pages", cache.pages.len());
    Ok(())
}
