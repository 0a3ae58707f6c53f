//! Images: acknowledged data is restored, whatever is cut off or damaged, and nothing else counts.
use super::format::{self, ImageRecord, ImageSums, RECORD_BYTES, RecordKind};
use super::*;
use crate::device::tests::{spill_settings, spilling};
use crate::device::{Device, DeviceMemory, MemorySettings, RangeStatus, ZeroPolicy};
use memfold_os::units::Order;
use memfold_testkit::fill::fill;
use memfold_testkit::mutations::feed;
use memfold_testkit::random::{Random, seed};
use memfold_testkit::scratch::Scratch;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::thread;

const SIZE: u64 = (2 << 20) + 1536;

fn devices(order: u8, limit_bytes: u64) -> Vec<Arc<Device>> {
    let backing = spilling(order, limit_bytes, spill_settings(1 << 28, None));
    vec![Device::new(&backing, SIZE).unwrap(), Device::new(&backing, 1 << 20).unwrap()]
}

fn entries() -> Vec<DeviceEntry> {
    vec![
        DeviceEntry { name: String::new(), size: SIZE },
        DeviceEntry { name: "other".to_string(), size: 1 << 20 },
    ]
}

fn read(device: &Device) -> Vec<u8> {
    let mut bytes = vec![0; device.size() as usize];
    device.read(&mut device.io(), 0, &mut bytes).unwrap();
    bytes
}

fn status(device: &Device) -> Vec<(u64, RangeStatus)> {
    let mut runs: Vec<(u64, RangeStatus)> = Vec::new();
    let each = |len, status| {
        match runs.last_mut() {
            Some(last) if last.1 == status => last.0 += len,
            _ => runs.push((len, status)),
        }
        true
    };
    device.status(0, device.size(), each).unwrap();
    runs
}

/// Makes a few changes of any kind, also to the expected bytes.
fn change(device: &Device, wanted: &mut [u8], random: &mut Random) {
    let mut io = device.io();
    for _ in 0..6 {
        let most = random.pick(&[700, 5000, 40_000, 400_000]);
        let at = random.below(wanted.len());
        let len = (1 + random.below(most)).min(wanted.len() - at);
        match random.below(6) {
            0 => {
                wanted[at..at + len].fill(0);
                device.zero(&mut io, at as u64, len as u64, ZeroPolicy::Hole).unwrap();
            }
            1 => {
                wanted[at..at + len].fill(0);
                device.zero(&mut io, at as u64, len as u64, ZeroPolicy::Written).unwrap();
            }
            _ => {
                fill(random, &mut wanted[at..at + len]);
                device.write(&mut io, at as u64, &wanted[at..at + len]).unwrap();
            }
        }
    }
}

/// Opens the image's devices in new memory, with blocks of `order`.
fn open(path: &Path, order: u8) -> Result<(Vec<Arc<Device>>, ImageJournal), ImageError> {
    let place = ImagePlace::open(path)?;
    let image = ImageJournal::look(&place)?.expect("it is there");
    assert_eq!(image.entries(), entries());
    let devices = devices(order, 0);
    image.restore(&devices)?;
    let journal = ImageJournal::resume(place, image, &devices)?;
    Ok((devices, journal))
}

fn create(path: &Path, devices: &[Arc<Device>]) -> ImageJournal {
    ImageJournal::create(ImagePlace::open(path).unwrap(), &entries(), devices).unwrap()
}

fn load(path: &Path) -> VerifiedImage {
    VerifiedImage::open(&ImagePlace::open(path).unwrap()).unwrap().expect("it is there")
}

#[test]
fn image_restores_bytes_and_holes_also_after_writeback() {
    let mut random = Random::new(seed(50));
    for order in [0, 2, 5] {
        let (scratch, all) = (Scratch::new(), devices(order, 0));
        let mut expected = [vec![0; SIZE as usize], vec![0; 1 << 20]];
        for turn in 0..6 {
            all.iter()
                .zip(&mut expected)
                .for_each(|(device, bytes)| change(device, bytes, &mut random));
            if turn == 3 {
                all[0].backing().write_back(crate::device::ObjectPick::All).unwrap();
            }
        }
        let path = scratch.0.join("image");
        save(&ImagePlace::open(&path).unwrap(), &entries(), &all).unwrap();
        assert_eq!(fs::read_dir(&scratch.0).unwrap().count(), 1, "nothing else stays behind");
        // Blocks of another size work as well.
        for order in [order, 2] {
            let image = load(&path);
            assert_eq!((image.entries(), image.extent.groups), (&entries()[..], 1));
            let back = devices(order, 0);
            image.restore(&back).unwrap();
            for ((device, back), bytes) in all.iter().zip(&back).zip(&expected) {
                assert!(read(device) == *bytes && read(back) == *bytes, "order {order}");
                assert_eq!(status(back), status(device));
            }
        }
    }
}

#[test]
fn image_cut_after_a_flush_restores_all_flushed_data() {
    let mut random = Random::new(seed(51));
    let (scratch, all) = (Scratch::new(), devices(2, 0));
    let path = scratch.0.join("image");
    let journal = create(&path, &all);
    let mut now = vec![0; SIZE as usize];
    // The content at each flush, and the length of the image then.
    let mut states = vec![(journal.bytes(), now.clone(), status(&all[0]))];
    for _ in 0..5 {
        change(&all[0], &mut now, &mut random);
        journal.flush().unwrap();
        states.push((journal.bytes(), now.clone(), status(&all[0])));
    }
    let end = journal.bytes();
    journal.flush().unwrap();
    assert_eq!(journal.bytes(), end, "nothing has changed, so nothing is written");
    // This was written but never flushed.
    change(&all[0], &mut now, &mut random);
    drop(journal);
    let whole = fs::read(&path).unwrap();
    // The begin of the next group follows it.
    assert_eq!(whole.len() as u64, end + RECORD_BYTES as u64);
    let mut cuts: Vec<u64> = states.iter().flat_map(|(at, ..)| [*at, at + 47, at - 1]).collect();
    cuts.extend((0..10).map(|_| states[0].0 + random.below((end - states[0].0) as usize) as u64));
    for cut_len in cuts.into_iter().filter(|at_most| *at_most <= end && *at_most >= states[0].0) {
        let next = states.iter().position(|(at, ..)| *at > cut_len).unwrap_or(states.len());
        let copy = scratch.0.join("cut");
        // This is the state after a power cut: the end of the file is missing, or was never
        // written.
        for rest in [&[][..], &[0; 4096], &[0x5a; 333]] {
            fs::write(&copy, [&whole[..cut_len as usize], rest].concat()).unwrap();
            let (back, journal) = open(&copy, 2).unwrap();
            // A group that lost only its padding is complete.
            let contents = (read(&back[0]), status(&back[0]));
            let is_whole = |(at, ..): &&(u64, _, _)| *at - cut_len < format::GROUP_UNIT;
            let mut matches =
                states[next - 1..next].iter().chain(states.get(next).filter(is_whole));
            let is_fitting =
                matches.any(|(_, now, holes)| contents == (now.clone(), holes.clone()));
            assert!(is_fitting, "cut at {cut_len} of {end}");
            // The image continues from there.
            back[0].write(&mut back[0].io(), 100, b"more").unwrap();
            journal.flush().unwrap();
            drop((back, journal));
            let (back, _) = open(&copy, 2).unwrap();
            assert_eq!(read(&back[0])[100..104], *b"more");
        }
    }
}

#[test]
fn damaged_flushed_data_is_refused_not_truncated() {
    let mut random = Random::new(seed(52));
    let (scratch, all) = (Scratch::new(), devices(2, 0));
    let path = scratch.0.join("image");
    let journal = create(&path, &all);
    let mut now = vec![0; SIZE as usize];
    for _ in 0..3 {
        change(&all[0], &mut now, &mut random);
        journal.flush().unwrap();
    }
    drop(journal);
    let whole = fs::read(&path).unwrap();
    // Without the begin of the next group the last one was not acknowledged.
    let last = whole.len() - RECORD_BYTES;
    let copy = scratch.0.join("damaged");
    for round in 0..120 {
        let mut bytes = whole.clone();
        // Padding is not a byte of anything.
        let at = random.below(last);
        let before = bytes[at];
        bytes[at] ^= 1 << random.below(8);
        fs::write(&copy, &bytes).unwrap();
        match open(&copy, 2) {
            Err(error) => assert!(!matches!(error, ImageError::System(_)), "{error:?}"),
            Ok((back, _)) => {
                assert!(read(&back[0]) == now, "round {round}, byte {at}, which was {before}")
            }
        }
        assert_eq!(
            fs::read(&copy).unwrap()[..last],
            bytes[..last],
            "what is refused is left as it is"
        );
    }
    for (bytes, error) in [
        (b"no image at all, but long enough to be one".to_vec(), ImageError::NoImage),
        (vec![], ImageError::NoImage),
        ([&whole[..16], &[3, 0, 0, 0], &whole[20..]].concat(), ImageError::Version(3)),
        (whole[..30].to_vec(), ImageError::Short),
    ] {
        fs::write(&copy, &bytes).unwrap();
        assert_eq!(open(&copy, 2).err(), Some(error));
        assert_eq!(fs::read(&copy).unwrap(), bytes);
    }
}

#[test]
fn bytes_that_look_like_records_count_nowhere_else() {
    let scratch = Scratch::new();
    let own = |name: &str| {
        let all = devices(2, 0);
        let path = scratch.0.join(name);
        let journal = create(&path, &all);
        for turn in 0..6 {
            all[0].write(&mut all[0].io(), 0, &[turn; 9000]).unwrap();
            journal.flush().unwrap();
        }
        (fs::read(&path).unwrap(), journal.bytes(), all)
    };
    let (mut first, end, all) = own("first");
    let (second, same_end, _) = own("second");
    assert_eq!((first.len(), end), (second.len(), same_end));
    first.truncate(end as usize);
    let cut_len = first.len() - 3 * format::GROUP_UNIT as usize;
    let copy = scratch.0.join("copy");
    let opens = |bytes: &[u8]| {
        fs::write(&copy, bytes).unwrap();
        open(&copy, 2).map(|(back, _)| read(&back[0])[..9000].to_vec())
    };
    let last = opens(&first[..cut_len]).unwrap();
    assert!(last[0] < 5);
    // The rest of another image with the same history, at the positions of its records.
    assert_eq!(opens(&[&first[..cut_len], &second[cut_len..]].concat()), Ok(last.clone()));
    // A client has written the whole image into its device, and the power is cut.
    assert_eq!(opens(&[&first[..cut_len], &first, &first].concat()), Ok(last));
    // It is in an incompressible payload.
    let path = scratch.0.join("nested");
    let journal = create(&path, &all);
    let mut noise = Random::new(55).noise(200_000);
    for at in (0..noise.len() - 8192).step_by(8192) {
        noise[at..at + RECORD_BYTES].copy_from_slice(&first[end as usize - 4096..][..RECORD_BYTES]);
        let mut ends = Vec::new();
        let old = ImageRecord { payload_len: 0, ..ImageRecord::end(at as u64 / 8192) };
        old.put(&ImageSums { random: None }, 0, &[], &mut ends);
        noise[at + 4096..at + 4096 + RECORD_BYTES].copy_from_slice(&ends);
    }
    all[1].write(&mut all[1].io(), 0, &noise).unwrap();
    let before = journal.bytes() as usize;
    journal.flush().unwrap();
    drop(journal);
    let whole = fs::read(&path).unwrap();
    for cut_len in (before..whole.len() - format::GROUP_UNIT as usize).step_by(3000) {
        assert_eq!(opens(&whole[..cut_len]), Ok(vec![5; 9000]), "cut at {cut_len}");
        // The first sector is lost, too.
        let image_with_loss = [&whole[..before], &[0; 512], &whole[before + 512..]].concat();
        assert_eq!(
            opens(&image_with_loss[..cut_len.max(before + 512)]),
            Ok(vec![5; 9000]),
            "cut at {cut_len}"
        );
    }
}

#[test]
fn image_of_the_old_version_opens_and_is_new_after_a_change() {
    let scratch = Scratch::new();
    let path = scratch.0.join("old");
    // Without its second group, which has no bytes of any codec.
    let old = &fuzz::seeds()[1];
    let old = &old[..old.len() - 2 * RECORD_BYTES - format::UNIT];
    fs::write(&path, old).unwrap();
    let open = || {
        let place = ImagePlace::open(&path).unwrap();
        let image = ImageJournal::look(&place).unwrap().expect("it is there");
        let backing =
            DeviceMemory::new(&MemorySettings { pools: 1, ..MemorySettings::default() }).unwrap();
        let new = |entry: &DeviceEntry| Device::new(&backing, entry.size).unwrap();
        let devices: Vec<_> = image.entries().iter().map(new).collect();
        image.restore(&devices).unwrap();
        (ImageJournal::resume(place, image, &devices).unwrap(), devices)
    };
    let (journal, devices) = open();
    let mut head = read(&devices[0]);
    assert_eq!(head[..9], [0, 0, 0, 0, 0, 0, 0, 1, 1]);
    journal.flush().unwrap();
    assert_eq!(fs::read(&path).unwrap(), old, "nothing has changed");
    devices[0].write(&mut devices[0].io(), 50_000, b"new").unwrap();
    head[50_000..50_003].copy_from_slice(b"new");
    journal.flush().unwrap();
    drop((journal, devices));
    assert_eq!(fs::read(&path).unwrap()[16..20], [2, 0, 0, 0]);
    assert!(read(&open().1[0]) == head);
}

#[test]
fn file_that_was_left_over_is_no_obstacle() {
    let (scratch, all) = (Scratch::new(), devices(2, 0));
    let path = scratch.0.join("image");
    fs::write(scratch.0.join(format!(".image.{}.new", std::process::id())), b"").unwrap();
    let journal = create(&path, &all);
    drop(journal);
    assert_eq!(fs::read_dir(&scratch.0).unwrap().count(), 2);
}

#[test]
fn threads_that_write_and_flush_at_once_find_all_they_flushed() {
    let (scratch, all) = (Scratch::new(), devices(2, 0));
    let path = scratch.0.join("image");
    let journal = create(&path, &all);
    let own = 500_000;
    let state = |n: usize| {
        let (device, journal) = (&all[0], &journal);
        move || {
            let (mut io, mut random, mut bytes) =
                (device.io(), Random::new(n as u64), vec![0; own]);
            for _ in 0..12 {
                let len = 1 + random.below(50_000);
                let at = random.below(own - len);
                fill(&mut random, &mut bytes[at..at + len]);
                device.write(&mut io, (n * own + at) as u64, &bytes[at..at + len]).unwrap();
                journal.flush().unwrap();
            }
            bytes
        }
    };
    let expected: Vec<Vec<u8>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|n| scope.spawn(state(n))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    drop(journal);
    let (back, _) = open(&path, 2).unwrap();
    assert!(read(&back[0])[..4 * own] == expected.concat());
}

#[test]
fn image_grown_far_is_rewritten_with_equal_content() {
    let (scratch, all) = (Scratch::new(), devices(2, 0));
    let path = scratch.0.join("image");
    let journal = create(&path, &all);
    let mut random = Random::new(53);
    let (mut io, mut bytes) = (all[0].io(), Vec::new());
    let mut most = 0;
    for _ in 0..40 {
        bytes = random.noise(2 << 20);
        all[0].write(&mut io, 0, &bytes).unwrap();
        journal.flush().unwrap();
        most = most.max(journal.bytes());
    }
    assert!(
        most < 80 << 20 && most > 60 << 20 && journal.bytes() < most,
        "{most}, then {}",
        journal.bytes()
    );
    assert_eq!(fs::metadata(&path).unwrap().len(), journal.bytes() + RECORD_BYTES as u64);
    // The image that replaced it is in use, too.
    let place = ImagePlace::open(&path).unwrap();
    assert_eq!(ImageJournal::look(&place).err(), Some(ImageError::InUse));
    drop(journal);
    let (back, _) = open(&path, 2).unwrap();
    assert!(read(&back[0])[..bytes.len()] == bytes);
}

#[test]
fn image_beyond_the_limit_is_refused() {
    let (scratch, all) = (Scratch::new(), devices(2, 0));
    let path = scratch.0.join("image");
    let noise = Random::new(54).noise(2 << 20);
    let backing = DeviceMemory::new(&MemorySettings {
        limit_bytes: 8 << 20,
        pools: 1,
        ..MemorySettings::default()
    })
    .unwrap();
    let own = [Device::new(&backing, 32 << 20).unwrap()];
    let big = DeviceMemory::new(&MemorySettings { pools: 1, ..MemorySettings::default() }).unwrap();
    let large = [Device::new(&big, 32 << 20).unwrap()];
    for at in 0..8 {
        large[0].write(&mut large[0].io(), at << 21, &noise).unwrap();
    }
    let entries = [DeviceEntry { name: String::new(), size: 32 << 20 }];
    save(&ImagePlace::open(&path).unwrap(), &entries, &large).unwrap();
    assert_eq!(load(&path).restore(&own), Err(ImageError::NoSpace));
    drop(all);
}

#[test]
fn records_come_back_and_say_what_they_cover() {
    let piece = crate::device::DirtyPiece::Object {
        offset: 4096,
        order: Order::new(2).unwrap(),
        fields: 77,
        payload: b"abc",
    };
    let record = ImageRecord::of(3, &piece);
    let sums = ImageSums { random: Some([9; 16]) };
    let mut bytes = Vec::new();
    let sum = record.put(&sums, 4096, b"abc", &mut bytes);
    assert_eq!(bytes.len(), RECORD_BYTES + format::UNIT);
    assert_eq!(ImageRecord::parse(&bytes), Some(record));
    assert_eq!(ImageRecord::checksum(&sums, 4096, &bytes, 3), Some(sum));
    // At another position, or in another image, it is not a record.
    assert_eq!(ImageRecord::checksum(&sums, 8192, &bytes, 3), None);
    assert_eq!(ImageRecord::checksum(&ImageSums { random: Some([8; 16]) }, 4096, &bytes, 3), None);
    assert_eq!(record.what, RecordKind::Object { order: Order::new(2).unwrap(), fields: 77 });
    bytes[RECORD_BYTES] ^= 1;
    assert_eq!(ImageRecord::checksum(&sums, 4096, &bytes, 3), None);
}

#[test]
fn any_bytes_are_an_image_or_refused_and_devices_stay_intact() {
    feed(12, fuzz::image, &fuzz::seeds(), 400);
}
