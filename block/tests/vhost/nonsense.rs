//! Invalid clients. Whatever they do, the next one is served.
use crate::client::Client;
use crate::frontend::{MEMORY, Memory, Vmm, event};
use crate::served::Served;
use memfold_testkit::random::{Random, seed};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;
use vhost::vhost_user::VhostUserFrontend;
use vhost::{VhostBackend, VringConfigData};
use vm_memory::{Bytes, VolatileMemory};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

fn is_served(served: &Served) {
    let mut client = Client::new(served, 1);
    client.line().write(8192, &[3; 4096]).unwrap();
    assert_eq!(client.line().read(8192, 4096), Ok(vec![3; 4096]));
}

/// A message of the protocol: request, flags with version 1, and payload.
fn message(request: u32, payload: &[u8]) -> Vec<u8> {
    [
        &request.to_le_bytes()[..],
        &1_u32.to_le_bytes(),
        &(payload.len() as u32).to_le_bytes(),
        payload,
    ]
    .concat()
}

#[test]
fn any_bytes_on_the_socket() {
    let server = Served::new();
    let mut random = Random::new(seed(5));
    for round in 0..300 {
        let mut stream = UnixStream::connect(server.path()).unwrap();
        let len = random.below(64);
        let noise: Vec<u8> = (0..len).map(|_| random.word() as u8).collect();
        let bytes = match round % 3 {
            0 => noise,
            1 => message(random.below(48) as u32, &noise),
            _ => {
                let start: Vec<u8> = [message(3, &[]), message(1, &[])].concat();
                [start, message(random.below(48) as u32, &noise[..len / 8 * 8])].concat()
            }
        };
        // The server may have disconnected before everything was sent.
        let _ = stream.write_all(&bytes).and_then(|()| stream.shutdown(std::net::Shutdown::Write));
        let _ = stream.read_to_end(&mut Vec::new());
    }
    is_served(&server);
    assert!(!server.reports.lock().unwrap().is_empty());
}

#[test]
fn a_message_that_says_it_is_huge_is_not_waited_for() {
    let server = Served::new();
    let mut stream = UnixStream::connect(server.path()).unwrap();
    stream
        .write_all(&[5_u32.to_le_bytes(), 1_u32.to_le_bytes(), u32::MAX.to_le_bytes()].concat())
        .unwrap();
    assert_eq!(stream.read_to_end(&mut Vec::new()).unwrap(), 0);
    is_served(&server);
}

#[test]
fn queues_of_any_bytes() {
    let server = Served::new();
    let mut random = Random::new(seed(6));
    for _ in 0..60 {
        let memory = Memory::new();
        let noise: Vec<u8> = (0..MEMORY / 4).map(|_| random.word() as u8).collect();
        memory.region.as_volatile_slice().write_slice(&noise, 0).unwrap();
        for n in 0..4 {
            memory.lay_out_write(0, n, 0, 1);
        }
        let mut vmm = Vmm::new(&server, &memory);
        let kicks = [event(), event()];
        let used_ring = memory.used(0);
        let heads: Vec<u16> = (0..8).map(|_| random.below(20) as u16).collect();
        memory.offer(0, used_ring, &heads);
        for (queue, kick) in kicks.iter().enumerate() {
            vmm.start(&memory, queue as u64, used_ring, kick);
            kick.write(1).unwrap();
        }
        // Answers after the queues are idle.
        for queue in 0..2 {
            vmm.frontend.get_vring_base(queue).unwrap();
        }
        server.device.check().unwrap();
    }
    is_served(&server);
}

/// Each event wakes the thread for both queues, but can be read only once. A thread that ended or
/// slept after a failed read would answer no more, and this would wait forever.
#[test]
fn two_queues_may_have_one_event() {
    let server = Served::with(false, 1);
    let memory = Memory::new();
    let mut vmm = Vmm::new(&server, &memory);
    let kick = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).unwrap();
    let _calls = [0, 1].map(|queue| vmm.start(&memory, queue, 0, &kick));
    for n in 0..4 {
        for queue in 0..2 {
            memory.lay_out_write(queue, n, u64::from(n), 0x70);
            memory.offer(queue, n, &[3 * n]);
        }
        while [0, 1].map(|queue| memory.used(queue)) != [n + 1; 2] {
            kick.write(1).unwrap();
            thread::yield_now();
        }
    }
}

#[test]
fn rings_outside_of_the_memory_are_refused() {
    let server = Served::new();
    let memory = Memory::new();
    let mut vmm = Vmm::new(&server, &memory);
    let base = memory.region.as_ptr() as u64;
    for at in [0, base + MEMORY as u64, base + 1, u64::MAX - 15] {
        let config = VringConfigData {
            queue_max_size: 16,
            queue_size: 16,
            flags: 0,
            desc_table_addr: at,
            used_ring_addr: base,
            avail_ring_addr: base,
            log_addr: None,
        };
        let _ = vmm.frontend.set_vring_addr(0, &config);
        let _ = vmm.frontend.get_queue_num();
        vmm = Vmm::new(&server, &memory);
    }
    drop(vmm);
    is_served(&server);
}

#[test]
fn a_ring_that_ends_beyond_the_memory_is_not_served() {
    let server = Served::new();
    let memory = Memory::new();
    let mut vmm = Vmm::new(&server, &memory);
    let at = memory.region.as_ptr() as u64 + MEMORY as u64 - 64;
    let config = VringConfigData {
        queue_max_size: 16,
        queue_size: 16,
        flags: 0,
        desc_table_addr: at,
        used_ring_addr: at,
        avail_ring_addr: at,
        log_addr: None,
    };
    let kick = event();
    vmm.frontend.set_vring_num(0, 16).unwrap();
    vmm.frontend.set_vring_addr(0, &config).unwrap();
    vmm.frontend.set_vring_call(0, &event()).unwrap();
    vmm.frontend.set_vring_kick(0, &kick).unwrap();
    vmm.frontend.set_vring_enable(0, true).unwrap();
    kick.write(1).unwrap();
    assert_eq!(vmm.frontend.get_vring_base(0).unwrap(), 0);
    drop(vmm);
    is_served(&server);
}
