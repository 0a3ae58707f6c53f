//! Requests are served without allocations, because the device may hold the swap of its own
//! machine.
use memfold_block::nbd::{NbdServer, SocketListener};
use memfold_block::{Device, DeviceMemory, Export, MemorySettings};
use memfold_testkit::counting::{Counting, calls, wait_until_others_sleep};
use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SIZE: usize = 8 << 20;

/// Returns a request as a client sends it.
fn request(to: &mut [u8; 28], command: u16, flags: u16, offset: u64, len: u32) {
    to[..4].copy_from_slice(&0x2560_9513u32.to_be_bytes());
    to[4..6].copy_from_slice(&flags.to_be_bytes());
    to[6..8].copy_from_slice(&command.to_be_bytes());
    to[8..16].copy_from_slice(b"a cookie");
    to[16..24].copy_from_slice(&offset.to_be_bytes());
    to[24..].copy_from_slice(&len.to_be_bytes());
}

/// Chooses an export in the old way, with simple replies, because the client here must not allocate
/// either.
fn connect(address: &SocketAddr) -> UnixStream {
    let mut link = UnixStream::connect_addr(address).unwrap();
    let mut bytes = [0; 18];
    link.read_exact(&mut bytes).unwrap();
    link.write_all(&3u32.to_be_bytes()).unwrap();
    link.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
    link.read_exact(&mut bytes[..10]).unwrap();
    link
}

fn work(link: &mut UnixStream, from: &[u8], to: &mut [u8]) {
    let (mut head, mut reply) = ([0; 28], [0; 16]);
    for (turn, len) in [512, 4096, 5000, 16384, 100_000, 1 << 20].into_iter().enumerate() {
        for offset in [0, 512, 70_000, 4 << 20] {
            let payload = &from[offset..offset + len];
            request(&mut head, 1, (turn % 2) as u16, offset as u64, len as u32);
            link.write_all(&head).unwrap();
            link.write_all(payload).unwrap();
            link.read_exact(&mut reply).unwrap();
            assert_eq!(reply[4..8], [0; 4]);
            request(&mut head, 0, 0, offset as u64, len as u32);
            link.write_all(&head).unwrap();
            link.read_exact(&mut reply).unwrap();
            link.read_exact(&mut to[..len]).unwrap();
            assert!(to[..len] == *payload);
        }
    }
    // Discard, zeros, flush, a hint, and some invalid requests.
    for (command, flags, offset, len) in
        [(4, 0, 100, 50_000), (6, 2, 0, 4096), (3, 0, 0, 0), (5, 0, 0, 4096), (0, 0, 1 << 40, 1)]
    {
        request(&mut head, command, flags, offset, len);
        link.write_all(&head).unwrap();
        link.read_exact(&mut reply).unwrap();
    }
}

#[test]
fn requests_allocate_nothing_once_tables_exist() {
    let backing = DeviceMemory::new(&MemorySettings {
        limit_bytes: 64 << 20,
        pools: 2,
        ..MemorySettings::default()
    })
    .unwrap();
    let device = Device::new(&backing, SIZE as u64).unwrap();
    device.preallocate().unwrap();
    let exports = [Arc::new(Export::new("", device, false, 512))];
    let address =
        SocketAddr::from_abstract_name(format!("memfold-no-alloc-{}", std::process::id())).unwrap();
    let mut server = NbdServer::new(&exports, None, 4);
    server.listen(SocketListener::Unix(UnixListener::bind_addr(&address).unwrap())).unwrap();
    let from: Vec<u8> = (0..SIZE as u32).map(|i| (i.wrapping_mul(i) >> 11) as u8).collect();
    let mut to = vec![0; 1 << 20];
    let mut link = connect(&address);
    // A first use may allocate once, for example a thread's name for a message.
    request_once(&mut link);
    wait_until_others_sleep();
    let before = calls();
    work(&mut link, &from, &mut to);
    let more = calls() - before;
    assert_eq!(more, 0, "{more} calls of the allocator");
    drop(link);
    server.end();
}

fn request_once(link: &mut UnixStream) {
    let (mut head, mut reply) = ([0; 28], [0; 16]);
    request(&mut head, 3, 0, 0, 0);
    link.write_all(&head).unwrap();
    link.read_exact(&mut reply).unwrap();
}
