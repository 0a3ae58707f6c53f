//! VMMs come and go; the disk stays.
use crate::client::Client;
use crate::frontend::{Memory, Vmm, event, wait};
use crate::served::{SIZE, Served};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::thread;
use vhost::VhostBackend;

#[test]
fn next_vmm_reads_the_data_of_the_last_one() {
    let server = Served::new();
    Client::new(&server, 1).line().write(4096, &[5; 4096]).unwrap();
    assert_eq!(Client::new(&server, 2).lines[1].read(4096, 4096), Ok(vec![5; 4096]));
    assert!(server.reports.lock().unwrap().is_empty());
}

#[test]
fn vmm_that_dies_amid_requests_leaves_the_disk_intact() {
    let server = Served::new();
    for round in 0..20 {
        let mut client = Client::new(&server, 1);
        let at = |n: u64| (n * 65536) % SIZE;
        for n in 0..12 {
            client.line().put(0, &[round; 65536]);
            client.line().send_write(at(n), 0, 65536);
        }
        drop(client);
    }
    let mut client = Client::new(&server, 1);
    for n in 0..12 {
        let bytes = client.line().read(n * 65536, 65536).unwrap();
        assert!(
            bytes.chunks(4096).all(|page| page.iter().all(|byte| *byte == page[0])),
            "a page of two rounds"
        );
    }
    assert!(server.reports.lock().unwrap().is_empty());
}

#[test]
fn connections_leave_no_open_files_and_no_threads() {
    let mut server = Served::new();
    let count = |what: &str| std::fs::read_dir(format!("/proc/self/{what}")).unwrap().count();
    let connect = |times| (0..times).for_each(|_| drop(Client::new(&server, 4)));
    connect(2);
    // Other tests have their own files and threads, which come and go. A leak would grow with the
    // connections.
    let (files, threads) = (count("fd"), count("task"));
    connect(200);
    server.stop();
    assert!(count("fd") < files + 150, "{} open files, {files} before", count("fd"));
    assert!(count("task") < threads + 150, "{} threads, {threads} before", count("task"));
}

#[test]
fn one_vmm_is_served_at_a_time() {
    let server = Served::new();
    let mut first = Client::new(&server, 1);
    let (sender, second) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut second = Client::new(&server, 1);
            sender.send(second.line().read(0, 4096).unwrap()).unwrap();
        });
        for byte in 0..50 {
            first.line().write(0, &[byte; 4096]).unwrap();
            assert!(second.try_recv().is_err(), "two were served at once");
        }
        drop(first);
        assert_eq!(second.recv().unwrap(), [49; 4096]);
    });
}

#[test]
fn a_server_stops_whatever_its_connection_does() {
    Served::new().stop();
    for queues in [0, 1, 4] {
        let mut server = Served::new();
        let client = (queues > 0).then(|| Client::new(&server, queues));
        let idle = (queues == 0).then(|| UnixStream::connect(server.path()).unwrap());
        server.stop();
        drop((client, idle));
    }
}

#[test]
fn a_vmm_that_connects_again_has_its_unanswered_requests_served() {
    let (first, second) = (Served::new(), Served::new());
    let memory = Memory::new();
    for n in 0..5 {
        memory.lay_out_write(0, n, u64::from(n), 0x40 + n as u8);
    }
    let mut vmm = Vmm::new(&first, &memory);
    let kick = event();
    let call = vmm.start(&memory, 0, 0, &kick);
    memory.offer(0, 0, &[0, 3]);
    kick.write(1).unwrap();
    wait(&memory, 0, &call, 2);
    // No driver is there to receive three more answers.
    drop(first);
    memory.offer(0, 2, &[6, 9, 12]);
    let mut vmm = Vmm::new(&second, &memory);
    // Requests are answered in order, so the queue continues where the answers end.
    let call = vmm.start(&memory, 0, memory.used(0), &kick);
    wait(&memory, 0, &call, 5);
    assert_eq!([0, 1, 2, 3, 4].map(|n| memory.status(0, n)), [0; 5]);
    for n in 2..5 {
        assert_eq!(second.bytes(n * 512, 512), [0x40 + n as u8; 512]);
    }
}

#[test]
fn a_queue_that_was_stopped_goes_on_where_it_was() {
    let server = Served::new();
    let memory = Memory::new();
    for n in 0..4 {
        memory.lay_out_write(0, n, u64::from(n), 0x60 + n as u8);
    }
    let mut vmm = Vmm::new(&server, &memory);
    let kick = event();
    let call = vmm.start(&memory, 0, 0, &kick);
    memory.offer(0, 0, &[0, 3]);
    kick.write(1).unwrap();
    wait(&memory, 0, &call, 2);
    assert_eq!(vmm.frontend.get_vring_base(0).unwrap(), 2);
    memory.offer(0, 2, &[6, 9]);
    kick.write(1).unwrap();
    // The queue stands still: this answer comes from the thread that would serve it.
    assert_eq!(vmm.frontend.get_vring_base(0).unwrap(), 2);
    assert_eq!(memory.used(0), 2);
    let call = vmm.start(&memory, 0, 2, &kick);
    wait(&memory, 0, &call, 4);
    assert_eq!(server.bytes(3 * 512, 512), [0x63; 512]);
}

/// A queue that always has more requests does not delay other queues, or the end of its thread.
#[test]
fn queues_of_one_thread_are_served_in_turns() {
    let mut server = Served::in_turns();
    let memory = Memory::new();
    let mut vmm = Vmm::new(&server, &memory);
    let kicks = [event(), event()];
    let calls = [0, 1].map(|queue| vmm.start(&memory, queue, 0, &kicks[queue as usize]));
    // Both queues hold all of their requests before the first kick.
    let count = 5;
    for queue in 0..2 {
        (0..count).for_each(|n| memory.lay_out_write(queue, n, u64::from(n), 0x70));
        memory.offer(queue, 0, &[0, 3, 6, 9, 12]);
    }
    // Postponed queues are served without another event.
    for queue in 0..2 {
        kicks[queue as usize].write(1).unwrap();
    }
    for queue in 0..2 {
        wait(&memory, queue, &calls[queue as usize], count);
        assert!((0..count).all(|n| memory.status(queue, n) == 0));
    }
    server.stop();
}
