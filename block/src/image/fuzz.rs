//! Fuzz targets: they take any bytes and panic if a promise is broken. Built only for tests and
//! fuzzers.
use super::format::{self, GroupHash, ImageRecord, ImageSums, RECORD_BYTES, RecordKind, SUM_BYTES};
use super::{DeviceEntry, VerifiedImage};
use crate::device::{Device, DeviceMemory, DirtyPiece, IoError, MemorySettings, ZeroPolicy};
use memfold_os::Errno;
use memfold_os::units::Order;
use memfold_swap::disk::durable::{File, FileIdentity};
use std::sync::Arc;

const SIZE: u64 = 64 << 10;

/// Opens bytes as an image, which is refused or gives intact devices. All its checksums are
/// corrected first, so that the code behind them is reached.
pub fn image(data: &[u8]) {
    let mut bytes = data.to_vec();
    seal(&mut bytes);
    for bytes in [data, &bytes] {
        let Ok(image) = VerifiedImage::read(Box::new(Bytes(bytes.to_vec()))) else { continue };
        let extent = &image.extent;
        assert!(extent.start <= extent.first_end && extent.first_end <= extent.end);
        let end = bytes.len() as u64;
        assert!(extent.end <= end.next_multiple_of(format::GROUP_UNIT));
        let backing = DeviceMemory::new(&MemorySettings { pools: 1, ..MemorySettings::default() })
            .expect("defaults");
        let new = |_| Device::new(&backing, SIZE).expect("small");
        let devices: Vec<Arc<Device>> = image.entries().iter().map(new).take(4).collect();
        let _ = image.restore(&devices);
        for device in &devices {
            device.check().expect("intact");
        }
    }
}

/// Corrects the checksums of records at possible positions, and the hashes of groups.
fn seal(bytes: &mut [u8]) {
    let Ok(head) = format::parse_head(bytes) else { return };
    let (mut at, mut hash) = (head.start as usize, GroupHash::default());
    while let Some(record) = bytes.get(at..).and_then(ImageRecord::parse) {
        let Some(whole) = bytes.get_mut(at..at + record.bytes()) else { return };
        let is_end = record.what == RecordKind::End;
        if is_end && record.payload_len == SUM_BYTES {
            whole[RECORD_BYTES..].copy_from_slice(&hash.0);
        }
        hash.add(ImageRecord::seal(&head.sums, at as u64, whole, record.payload_len));
        at += record.bytes();
        if is_end {
            hash = GroupHash::default();
            if head.sums.random.is_some() {
                at = at.next_multiple_of(format::GROUP_UNIT as usize);
            }
        }
    }
}

/// A file that is only read.
struct Bytes(Vec<u8>);

impl File for Bytes {
    fn read(&self, at: u64, to: &mut [u8]) -> Result<usize, Errno> {
        let rest = self.0.get(at as usize..).unwrap_or_default();
        let count = rest.len().min(to.len());
        to[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }

    fn write(&self, _at: u64, _from: &[u8]) -> Result<usize, Errno> {
        Err(Errno::BADF)
    }

    fn set_len(&self, _len: u64) -> Result<(), Errno> {
        Err(Errno::BADF)
    }

    fn sync(&self) -> Result<(), Errno> {
        Err(Errno::BADF)
    }

    fn lock(&self) -> Result<(), Errno> {
        Ok(())
    }

    fn link(&self, _name: &[u8]) -> Result<(), Errno> {
        Err(Errno::BADF)
    }

    fn identity(&self) -> Result<FileIdentity, Errno> {
        Ok((0, 0))
    }
}

/// Returns a valid image as a seed.
pub fn seeds() -> Vec<Vec<u8>> {
    let entries = [
        DeviceEntry { name: String::new(), size: SIZE },
        DeviceEntry { name: "b".to_string(), size: SIZE },
    ];
    let backing = DeviceMemory::new(&MemorySettings { pools: 1, ..MemorySettings::default() })
        .expect("defaults");
    let device = Device::new(&backing, SIZE).expect("small");
    let text: Vec<u8> = (0..40_000u32).map(|i| (i / 7 % 50) as u8).collect();
    device.write(&mut device.io(), 0, &text).expect("no limit");
    device.zero(&mut device.io(), 4096, 4096, ZeroPolicy::Hole).expect("no limit");
    vec![of_version_2(&entries, &device), of_version_1(&entries, &device)]
}

fn of_version_2(entries: &[DeviceEntry], device: &Device) -> Vec<u8> {
    let random = [7; SUM_BYTES];
    let sums = ImageSums { random: Some(random) };
    let mut bytes = format::head(entries, random);
    for number in 0..2 {
        let mut hash = GroupHash::default();
        let mut append = |record: &ImageRecord, payload: &[u8]| {
            let at = bytes.len() as u64;
            hash.add(record.put(&sums, at, payload, &mut bytes));
            hash.0
        };
        append(&ImageRecord::begin(number), &[]);
        let hash = if number == 0 { put_blocks(device, &mut append) } else { put_raw(&mut append) };
        append(&ImageRecord::end(number), &hash);
        bytes.resize(bytes.len().next_multiple_of(format::GROUP_UNIT as usize), 0);
    }
    bytes
}

/// Writes it as version 1 did.
fn of_version_1(entries: &[DeviceEntry], device: &Device) -> Vec<u8> {
    let sums = ImageSums { random: None };
    let mut bytes = format::old_head(entries);
    let mut append = |record: &ImageRecord, payload: &[u8]| {
        let at = bytes.len() as u64;
        record.put(&sums, at, payload, &mut bytes)
    };
    put_blocks(device, &mut append);
    append(&ImageRecord { payload_len: 0, ..ImageRecord::end(0) }, &[]);
    put_raw(&mut append);
    append(&ImageRecord { payload_len: 0, ..ImageRecord::end(1) }, &[]);
    bytes
}

type Put<'a> = dyn FnMut(&ImageRecord, &[u8]) -> [u8; SUM_BYTES] + 'a;

/// Writes the records of the first blocks of a device, and returns the last one.
fn put_blocks(device: &Device, put: &mut Put) -> [u8; SUM_BYTES] {
    let mut room = vec![0; device.payload_max()];
    let mut last = [0; SUM_BYTES];
    for block in 0..4 {
        let outcome = device.describe(block, &mut room, |piece| {
            let payload =
                if let DirtyPiece::Object { payload, .. } = piece { payload } else { &[] };
            last = put(&ImageRecord::of(0, &piece), payload);
            Ok::<(), IoError>(())
        });
        outcome.expect("readable");
    }
    last
}

fn put_raw(put: &mut Put) -> [u8; SUM_BYTES] {
    let raw = DirtyPiece::Object { offset: 0, order: Order::PAGE, fields: 77, payload: b"abc" };
    put(&ImageRecord::of(1, &raw), b"abc")
}
