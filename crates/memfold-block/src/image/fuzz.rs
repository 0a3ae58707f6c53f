//! What fuzzers call: takes any bytes and panics if a promise is broken. Built for tests and for
//! fuzzers only.
use super::format::{self, Record};
use super::{Entry, read_head, restore, scan};
use crate::device::{Backing, Device, Piece, Settings, Zeros};
use memfold_sys::units::Order;
use std::fs::File;
use std::io::Write;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;

const SIZE: u64 = 64 << 10;

/// Bytes as an image: refused, or devices that are intact. Every checksum in it is made right
/// first, so that what lies behind them is reached.
pub fn image(data: &[u8]) {
    let mut bytes = data.to_vec();
    seal(&mut bytes);
    for bytes in [data, &bytes] {
        let file = nameless(bytes);
        let Ok((entries, start)) = read_head(&file) else { continue };
        let Ok(extent) = scan(&file, start) else { continue };
        assert!(extent.end <= bytes.len() as u64 && extent.start <= extent.end);
        let backing =
            Backing::new(&Settings { pools: 1, ..Settings::default() }).expect("defaults");
        let devices: Vec<Arc<Device>> =
            entries.iter().map(|_| Device::new(&backing, SIZE).expect("small")).take(4).collect();
        let _ = restore(&file, &extent, &devices);
        for device in &devices {
            device.check().expect("intact");
        }
    }
}

/// Makes the checksums of records right that begin where one may.
fn seal(bytes: &mut [u8]) {
    let Ok((_, mut at)) = format::parse_head(bytes) else { return };
    while let Some(record) = bytes.get(at..).and_then(Record::parse) {
        let Some(whole) = bytes.get_mut(at..at + record.bytes()) else { return };
        Record::seal(whole, record.payload_len);
        at += record.bytes();
    }
}

fn nameless(bytes: &[u8]) -> File {
    // SAFETY: the name is a C string; the descriptor is new and ours alone.
    let fd = unsafe {
        let fd = libc::memfd_create(c"image".as_ptr(), libc::MFD_CLOEXEC);
        assert!(fd >= 0);
        OwnedFd::from_raw_fd(fd)
    };
    let mut file = File::from(fd);
    file.write_all(bytes).expect("memory");
    file
}

/// An image that makes sense, for a fuzzer to start from.
pub fn seeds() -> Vec<Vec<u8>> {
    let entries =
        [Entry { name: String::new(), size: SIZE }, Entry { name: "b".to_string(), size: SIZE }];
    let backing = Backing::new(&Settings { pools: 1, ..Settings::default() }).expect("defaults");
    let device = Device::new(&backing, SIZE).expect("small");
    let text: Vec<u8> = (0..40_000u32).map(|i| (i / 7 % 50) as u8).collect();
    device.write(&mut device.io(), 0, &text).expect("no limit");
    device.zero(&mut device.io(), 4096, 4096, Zeros::Hole).expect("no limit");
    let mut bytes = format::head(&entries);
    let mut room = vec![0; device.payload_max()];
    for block in 0..4 {
        let described = device.describe(block, &mut room, |piece| {
            let payload = if let Piece::Object { payload, .. } = piece { payload } else { &[] };
            Record::of(0, &piece).put(payload, &mut bytes);
            Ok::<(), crate::device::IoError>(())
        });
        described.expect("readable");
    }
    Record::end(0).put(&[], &mut bytes);
    let raw = Piece::Object { offset: 0, order: Order::PAGE, fields: 77, payload: b"abc" };
    Record::of(1, &raw).put(b"abc", &mut bytes);
    Record::end(1).put(&[], &mut bytes);
    vec![bytes]
}
