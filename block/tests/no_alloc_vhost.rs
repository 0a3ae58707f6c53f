//! A guest's requests are served without allocations, because the device may hold the swap of its
//! own machine.
use memfold_testkit::counting::{Counting, calls, wait_until_others_sleep};

#[allow(dead_code)]
#[path = "vhost/client.rs"]
mod client;
#[allow(dead_code)]
#[path = "vhost/frontend.rs"]
mod frontend;
#[allow(dead_code)]
#[path = "vhost/served.rs"]
mod served;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn requests_allocate_nothing_once_tables_exist() {
    let server = served::Served::with(false, 1);
    server.device.preallocate().unwrap();
    let memory = frontend::Memory::new();
    let mut vmm = frontend::Vmm::new(&server, &memory);
    let kick = frontend::event();
    let call = vmm.start(&memory, 0, 0, &kick);
    let write = |n: u16| {
        memory.lay_out_write(0, n % 4, u64::from(n), n as u8);
        memory.offer(0, n, &[3 * (n % 4)]);
        kick.write(1).unwrap();
        frontend::wait(&memory, 0, &call, n + 1);
        assert_eq!(memory.status(0, n % 4), 0);
    };
    // A thread allocates what it needs once with its first request.
    write(0);
    wait_until_others_sleep();
    let before = calls();
    (1..500).for_each(write);
    let more = calls() - before;
    assert_eq!(more, 0, "{more} calls of the allocator");
    assert_eq!(server.bytes(499 * 512, 512), [499_u16 as u8; 512]);
}
