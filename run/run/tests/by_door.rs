//! A process that doesn't see `memfold run` in its /proc, and asks at the door. What a process is a
//! member of is known to all of it, so this is one test.
use memfold_os::raw::receive_with_files;
use memfold_run::door::{self, DoorAddress, DoorKey, HALF};
use memfold_run::member;
use memfold_run::request::TableAddress;
use memfold_run::table::bounds::RunBounds;
use memfold_run::users::UserTables;
use rustix::fd::AsFd;
use rustix::io::IoSlice;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, bind, getsockname, sendmsg, socket_with,
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
            let mut key_half = [0u8; HALF];
            let (len, [to, _]) = receive_with_files(&socket, &mut key_half).unwrap();
            let to = to.expect("the request brings a socket");
            let own = SocketAddrUnix::try_from(getsockname(&to).unwrap()).unwrap();
            let has_name = own.abstract_name().is_some_and(|name| !name.is_empty());
            assert!(len == HALF && !has_name);
            let answer = if key_half == key.ask { key.answer } else { [9; HALF] };
            let bytes = [&answer[..], &NUMBER.to_ne_bytes()].concat();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let files = [table_file.as_fd(), bounds_file.as_fd()];
            assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
            sendmsg(&to, &[IoSlice::new(&bytes)], &mut control, SendFlags::empty()).unwrap();
        }
    });

    let stranger = DoorKey { ask: [3; HALF], ..key };
    let address = DoorAddress::Name(name.as_bytes());
    assert!(door::ask(address, &stranger).is_err(), "the answer proves nothing");
    assert!(door::ask(DoorAddress::Name(b"memfold-nobody"), &key).is_err());
    assert_eq!(door::ask(address, &key).unwrap().number, NUMBER);

    let paths = ["/nonexistent/table", "/nonexistent/bounds"];
    // Descriptor 0 is not connected to the door.
    member::open(TableAddress { paths, door: name, key }, Some(0));
    assert_eq!(member::link(), -1);
    assert_eq!(member::bounds(), Some((77, u64::MAX)));
    assert_eq!(member::number(), NUMBER);
    // A child of fork has another number, which it asks for.
    member::begin_as_child();
    assert_eq!(member::number(), std::process::id());
    member::claim();
    assert_eq!(member::number(), NUMBER);
    // A connected socket leads there where the name is unknown, and is kept.
    member::keep_link(500);
    let link = member::link();
    assert!(link >= 500 && door::connected(link, name.as_bytes()).is_some());
    member::keep_link(600);
    assert_eq!(member::link(), link);
    member::begin_as_child();
    member::claim();
    assert_eq!(member::number(), NUMBER);
    assert_eq!(tables.with_slots().keys().copied().collect::<Vec<_>>(), [NUMBER]);
}
