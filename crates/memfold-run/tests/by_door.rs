//! A process that doesn't see `memfold run` in its /proc, and asks at the door. What a process is a
//! member of is known to all of it, so this is one test.
use memfold_run::door::{self, DoorKey, HALF};
use memfold_run::member;
use memfold_run::request::TableAddress;
use memfold_run::table::bounds::RunBounds;
use memfold_run::users::UserTables;
use rustix::fd::AsFd;
use rustix::io::IoSlice;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, bind, recvfrom, sendmsg_addr, socket_with,
};
use std::mem::MaybeUninit;

const NUMBER: u32 = 4242;

#[test]
fn process_gets_table_and_number_at_the_door() {
    let key = DoorKey { ask: [1; HALF], answer: [2; HALF] };
    let (bounds, bounds_file) = RunBounds::create(u64::MAX, &key).unwrap();
    let tables = UserTables::create(0, 64, u64::MAX, bounds).unwrap();
    tables.set_bounds(Some(77), None);
    let name = format!("memfold-test-{}", std::process::id()).leak();
    let socket =
        socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None).unwrap();
    bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()).unwrap();
    let table_file = tables.users()[0].file;
    // Answers as `memfold run` does, but for the key, of which it keeps what a test asks for.
    std::thread::spawn(move || {
        loop {
            let mut asked = [0u8; HALF];
            let (_, _, from) = recvfrom(&socket, &mut asked[..], RecvFlags::empty()).unwrap();
            let answer = if asked == key.ask { key.answer } else { [9; HALF] };
            let bytes = [&answer[..], &NUMBER.to_ne_bytes()].concat();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let files = [table_file.as_fd(), bounds_file.as_fd()];
            assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
            let parts = [IoSlice::new(&bytes)];
            sendmsg_addr(&socket, &from.unwrap(), &parts, &mut control, SendFlags::empty())
                .unwrap();
        }
    });

    let stranger = DoorKey { ask: [3; HALF], ..key };
    assert!(door::ask(name.as_bytes(), &stranger).is_err(), "the answer proves nothing");
    assert!(door::ask(b"memfold-nobody", &key).is_err());
    assert_eq!(door::ask(name.as_bytes(), &key).unwrap().number, NUMBER);

    let paths = ["/nonexistent/table", "/nonexistent/bounds"];
    member::open(TableAddress { paths, door: name, key });
    assert_eq!(member::bounds(), Some((77, u64::MAX)));
    assert_eq!(member::number(), NUMBER);
    // A child of fork has another number, which it asks for.
    member::begin_as_child();
    assert_eq!(member::number(), std::process::id());
    member::claim();
    assert_eq!(member::number(), NUMBER);
    assert_eq!(tables.with_slots().keys().copied().collect::<Vec<_>>(), [NUMBER]);
}
