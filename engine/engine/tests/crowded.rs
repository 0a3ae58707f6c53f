//! A process that has nearly all areas of the engine's own. They are the process's, so the test is
//! the only one here.
use memfold_engine::{Delivery, Memory, Region};

fn engine() -> Result<Memory, memfold_engine::Error> {
    Memory::builder().resident_bytes(8 << 20).delivery(Delivery::Signal).build()
}

/// Each region has a page of its own bytes.
fn fill(region: &mut Region, n: usize) {
    region.as_mut_slice().fill(n as u8 | 1);
}

#[test]
fn regions_are_refused_before_the_last_area_and_others_work() {
    let memory = engine().unwrap();
    let mut regions: Vec<Region> = Vec::new();
    let refusal = loop {
        match memory.region(4096) {
            Ok(mut region) => {
                fill(&mut region, regions.len());
                regions.push(region);
            }
            Err(refused) => break refused.to_string(),
        }
    };
    assert!(refusal.contains("another region") && refusal.contains("Drop some"), "{refusal}");
    let refusal = engine().err().expect("there is no room for another engine").to_string();
    assert!(refusal.contains("another engine") && refusal.contains("end some"), "{refusal}");
    // There is room for what these need: here for an area that isn't a region.
    let spare: Vec<_> =
        (0..400).map(|_| memfold_os::memory::zone::Zone::reserve(4096, 4096).unwrap()).collect();
    for (n, region) in regions.iter().enumerate() {
        region.pageout(0..4096);
        assert!(region.as_slice().iter().all(|byte| *byte == n as u8 | 1), "{n}");
    }
    drop(spare);
    memory.check().unwrap();
    // An engine has some dozens of areas.
    regions.truncate(regions.len() - 64);
    fill(&mut memory.region(4096).unwrap(), 7);
    drop(engine().unwrap().region(4096).unwrap());
}
