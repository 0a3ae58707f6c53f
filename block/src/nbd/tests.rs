//! Tests the server's promises one by one, with a client that verifies everything.
use super::client::{NbdClient, info, text};
use super::socket::SocketListener;
use super::wire::{self, allocation, command, flag, option, reply};
use super::*;
use crate::device::{Device, DeviceMemory, MemorySettings};
use crate::export::Export;
use memfold_os::units::Order;
use memfold_testkit::fill::fill;
use memfold_testkit::random::{Random, seed};
use std::io::{self, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const EPERM: u32 = 1;

fn exports(order: u8, size: u64) -> Vec<Arc<Export>> {
    let block_order = Order::new(order).unwrap();
    let backing =
        DeviceMemory::new(&MemorySettings { block_order, pools: 2, ..MemorySettings::default() })
            .unwrap();
    let device = Device::new(&backing, size).unwrap();
    vec![
        Arc::new(Export::new("", device, false, 512)),
        Arc::new(Export::new("fixed", Device::new(&backing, 1 << 20).unwrap(), true, 4096)),
    ]
}

/// A server on its own abstract socket.
struct Served {
    server: Option<NbdServer>,
    address: SocketAddr,
}

impl Served {
    fn new(exports: &[Arc<Export>], connections: usize) -> Served {
        Served::with(|| NbdServer::new(exports, None, connections))
    }

    fn with(server: impl FnOnce() -> NbdServer) -> Served {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name =
            format!("memfold-nbd-test-{}-{}", std::process::id(), NUMBER.fetch_add(1, Relaxed));
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let mut server = server();
        server.listen(SocketListener::Unix(UnixListener::bind_addr(&address).unwrap())).unwrap();
        Served { server: Some(server), address }
    }

    fn connect(&self) -> NbdClient<UnixStream> {
        NbdClient::greet(UnixStream::connect_addr(&self.address).unwrap()).unwrap()
    }

    fn client(&self, export: &str) -> NbdClient<UnixStream> {
        let mut client = self.connect();
        assert_eq!(client.go(export).unwrap(), reply::ACK);
        client
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.server.take().unwrap().end();
    }
}

/// Returns whether the server has ended the connection.
fn is_gone(client: &mut NbdClient<UnixStream>) -> bool {
    matches!(client.link.read(&mut [0]), Ok(0) | Err(_))
}

#[test]
fn client_that_never_ends_its_handshake_is_dropped() {
    let patience = Duration::from_millis(10);
    let exports = exports(2, 8 << 20);
    let server = Served::with(|| NbdServer::with_patience(&exports, None, 1, patience));
    let connect = || UnixStream::connect_addr(&server.address).unwrap();
    // On a busy machine even the greeting may be late.
    let greeted = || loop {
        if let Ok(client) = NbdClient::greet(connect()) {
            return client;
        }
    };
    // The client sends nothing, before and after the greeting.
    let _ = connect().read_to_end(&mut Vec::new());
    assert!(is_gone(&mut greeted()));
    // The client sends an option byte by byte, which takes far longer.
    let (mut drip, len) = (greeted(), 1_u32 << 20);
    let head = [&wire::OPTION_MAGIC.to_be_bytes()[..], &[0, 0, 0, 77], &len.to_be_bytes()].concat();
    let mut is_sent = drip.link.write_all(&head).is_ok();
    for _ in 0..len {
        is_sent = is_sent && drip.link.write_all(&[0]).is_ok();
    }
    assert!(!is_sent && is_gone(&mut drip), "it was heard to its end");
    // The client sends one option after the other, and never chooses.
    let mut client = greeted();
    let is_heard = (0..len).all(|_| client.option(option::LIST, &[]).is_ok());
    assert!(!is_heard, "it was heard for ever");
    // A client that has chosen is served for any time.
    let mut client = loop {
        let mut client = greeted();
        if matches!(client.go(""), Ok(reply::ACK)) {
            break client;
        }
    };
    let begin = Instant::now();
    while begin.elapsed() < 3 * patience {
        let answer = client.request(command::READ, 0, 0, PAGE as u32, &[]);
        assert_eq!(answer.unwrap().error, 0);
    }
}

#[test]
fn options_are_answered_as_the_protocol_says() {
    let server = Served::new(&exports(2, 8 << 20), 4);
    let mut client = server.connect();
    let (kind, names) = client.option(option::LIST, &[]).unwrap();
    assert_eq!((kind, names), (reply::ACK, vec![text(""), text("fixed")]));
    assert_eq!(client.option(option::LIST, b"x").unwrap().0, reply::INVALID);
    assert_eq!(client.option(77, b"what").unwrap().0, reply::UNSUP);
    assert_eq!(client.option(option::STARTTLS, &[]).unwrap().0, reply::POLICY);
    assert_eq!(client.option(option::INFO, &info("none", &[])).unwrap().0, reply::UNKNOWN);
    assert_eq!(client.option(option::INFO, &info("", &[])[..5]).unwrap().0, reply::INVALID);
    assert_eq!(
        client.option(option::INFO, &[info("", &[]), vec![0]].concat()).unwrap().0,
        reply::INVALID
    );
    assert_eq!(client.option(option::LIST, &vec![0; 20_000]).unwrap().0, reply::TOO_BIG);
    let (kind, about) = client.option(option::INFO, &info("fixed", &[1, 2, 3, 99])).unwrap();
    assert_eq!((kind, about.len()), (reply::ACK, 4));
    assert_eq!(about[0][..10], [0, 0, 0, 0, 0, 0, 0, 16, 0, 0]);
    let flags = u16::from_be_bytes(about[0][10..].try_into().unwrap());
    assert_eq!(flags & wire::export::READ_ONLY, wire::export::READ_ONLY);
    assert_eq!(
        flags & (wire::export::SEND_TRIM | wire::export::SEND_DF),
        0,
        "no structured replies yet"
    );
    assert_eq!(about[1], [&[0, 1][..], b"fixed"].concat());
    assert_eq!(about[3][2..6], 4096u32.to_be_bytes());
    // A context needs structured replies, and an export.
    let query = |name: &str, queries: &[&str]| {
        let mut data = text(name);
        data.extend((queries.len() as u32).to_be_bytes());
        queries.iter().for_each(|query| data.extend(text(query)));
        data
    };
    let list = option::LIST_META_CONTEXT;
    assert_eq!(client.option(list, &query("", &[])).unwrap().0, reply::INVALID);
    assert_eq!(client.option(option::STRUCTURED_REPLY, &[]).unwrap().0, reply::ACK);
    assert_eq!(client.option(list, &query("none", &[])).unwrap().0, reply::UNKNOWN);
    let context = |id: u32| [&id.to_be_bytes()[..], b"base:allocation"].concat();
    for queries in [&[][..], &["base:"], &["other:x", "base:allocation"]] {
        assert_eq!(
            client.option(list, &query("", queries)).unwrap(),
            (reply::ACK, vec![context(0)]),
            "{queries:?}"
        );
    }
    assert_eq!(client.option(list, &query("", &["other:x"])).unwrap(), (reply::ACK, vec![]));
    let set = option::SET_META_CONTEXT;
    assert_eq!(client.option(set, &query("", &["base:"])).unwrap(), (reply::ACK, vec![]));
    assert_eq!(
        client.option(set, &query("", &["base:allocation"])).unwrap(),
        (reply::ACK, vec![context(1)])
    );
    // An option that states far more queries than it has costs no memory.
    let mut many = text("");
    many.extend(u32::MAX.to_be_bytes());
    assert_eq!(client.option(set, &many).unwrap().0, reply::INVALID);
    assert_eq!(client.option(option::ABORT, &[]).unwrap().0, reply::ACK);
    assert!(is_gone(&mut client));
    // Invalid bytes end the connection, and so does an option that is far too long.
    let mut client = server.connect();
    client.link.write_all(&[7; 16]).unwrap();
    assert!(is_gone(&mut client));
    let mut client = server.connect();
    client
        .link
        .write_all(&[&wire::OPTION_MAGIC.to_be_bytes()[..], &[0, 0, 0, 3, 0x7f, 0, 0, 0]].concat())
        .unwrap();
    assert!(is_gone(&mut client));
}

#[test]
fn oldest_export_option_works_with_simple_replies() {
    let server = Served::new(&exports(2, 8 << 20), 4);
    let mut client = server.connect();
    client.send_option(option::EXPORT_NAME, b"").unwrap();
    let mut about = [0; 10];
    client.link.read_exact(&mut about).unwrap();
    assert_eq!(about[..8], (8u64 << 20).to_be_bytes());
    let bytes: Vec<u8> = (0..3_000_000u32).map(|i| ((i * 7) >> 5) as u8).collect();
    assert_eq!(
        client.request(command::WRITE, 0, 1001, bytes.len() as u32, &bytes).unwrap().error,
        0
    );
    let answer = client.request(command::READ, 0, 1001, bytes.len() as u32, &[]).unwrap();
    assert!(answer.data == bytes && answer.chunks == 0);
    assert_eq!(client.request(command::READ, 0, 8 << 20, 1, &[]).unwrap().error, EINVAL);
    assert_eq!(
        client.request(command::READ, flag::DF, 0, 1, &[]).unwrap().error,
        EINVAL,
        "DF is for structured replies"
    );
    assert_eq!(client.request(command::BLOCK_STATUS, 0, 0, 512, &[]).unwrap().error, EINVAL);
    assert_eq!(client.request(command::READ, 0, 0, 0, &[]).unwrap().error, 0);
    let mut other = server.connect();
    other.send_option(option::EXPORT_NAME, b"none").unwrap();
    assert!(is_gone(&mut other));
}

#[test]
fn random_requests_are_what_a_vector_of_bytes_says() {
    let mut random = Random::new(seed(40));
    for order in [0, 2, 9] {
        let size = (3 << 20) + 512;
        let server = Served::new(&exports(order, size as u64), 4);
        let mut clients = [server.client(""), server.client("")];
        let mut expected = vec![0u8; size];
        for turn in 0..300 {
            let client = &mut clients[turn % 2];
            let most = random.pick(&[512, 5000, 70_000, 1 << 20]);
            let unit = random.pick(&[1, 512, 4096]);
            let at = random.below(size) / unit * unit;
            let len = (1 + random.below(most)).next_multiple_of(unit).min(size - at);
            let fua = random.pick(&[0, flag::FUA]);
            let range = at..at + len;
            match random.below(8) {
                0..3 => {
                    let flags = random.pick(&[0, flag::DF]);
                    let answer =
                        client.request(command::READ, flags, at as u64, len as u32, &[]).unwrap();
                    if flags == flag::DF && answer.error != 0 {
                        assert_eq!((answer.error, len > 512 << 10), (75, true));
                        continue;
                    }
                    assert_eq!(answer.error, 0);
                    assert!(answer.data == expected[range], "{at}, {len} bytes, order {order}");
                    assert!(flags == 0 || answer.chunks == 1);
                }
                3..6 => {
                    fill(&mut random, &mut expected[range.clone()]);
                    let answer = client
                        .request(command::WRITE, fua, at as u64, len as u32, &expected[range])
                        .unwrap();
                    assert_eq!(answer.error, 0);
                }
                6 => {
                    expected[range].fill(0);
                    assert_eq!(
                        client
                            .request(command::TRIM, fua, at as u64, len as u32, &[])
                            .unwrap()
                            .error,
                        0
                    );
                }
                _ => {
                    expected[range].fill(0);
                    let flags =
                        fua | random.pick(&[0, flag::NO_HOLE]) | random.pick(&[0, flag::FAST_ZERO]);
                    let answer = client
                        .request(command::WRITE_ZEROES, flags, at as u64, len as u32, &[])
                        .unwrap();
                    assert_eq!(answer.error, 0);
                }
            }
        }
        let answer = clients[0].request(command::READ, 0, 0, size as u32, &[]).unwrap();
        assert!(answer.data == expected);
        for client in &mut clients {
            assert_eq!(client.request(command::FLUSH, 0, 0, 0, &[]).unwrap().error, 0);
            assert_eq!(client.request(command::CACHE, 0, 0, 4096, &[]).unwrap().error, 0);
        }
    }
}

#[test]
fn zeros_and_holes_are_told_and_not_sent() {
    let server = Served::new(&exports(2, 64 << 20), 4);
    let mut client = server.client("");
    client.request(command::WRITE, 0, 4 << 20, 3 * PAGE as u32, &[7; 3 * PAGE]).unwrap();
    client.request(command::WRITE_ZEROES, flag::NO_HOLE, 8 << 20, 1 << 20, &[]).unwrap();
    let (hole, zero) = (allocation::HOLE | allocation::ZERO, allocation::ZERO);
    let answer = client.request(command::BLOCK_STATUS, 0, 0, 64 << 20, &[]).unwrap();
    let page = PAGE as u32;
    let mut all = vec![(4 << 20, hole), (3 * page, 0), ((4 << 20) - 3 * page, hole)];
    all.extend([(1 << 20, zero), (55 << 20, hole)]);
    assert_eq!(answer.runs, all);
    let answer = client.request(command::BLOCK_STATUS, flag::REQ_ONE, 1000, 1 << 20, &[]).unwrap();
    assert_eq!(answer.runs, [(1 << 20, hole)]);
    // One answer has the most runs; the next request continues.
    for at in (0..1200).step_by(2) {
        client.request(command::WRITE, 0, (20 << 20) + at * PAGE as u64, page, &[1; PAGE]).unwrap();
    }
    let answer = client.request(command::BLOCK_STATUS, 0, 20 << 20, 1200 * page, &[]).unwrap();
    assert_eq!(answer.runs.len(), 512);
    assert!(
        answer
            .runs
            .iter()
            .enumerate()
            .all(|(i, run)| *run == (page, if i % 2 == 0 { 0 } else { hole }))
    );
    let answer = client.request(command::READ, 0, 0, 1 << 20, &[]).unwrap();
    assert_eq!((answer.holes, answer.error), (1 << 20, 0));
    let answer = client.request(command::READ, flag::DF, 0, 4096, &[]).unwrap();
    assert_eq!((answer.holes, answer.chunks), (0, 1));
    for (flags, offset, len) in
        [(0, 0, 0), (flag::FAST_ZERO, 0, 512), (0, 64 << 20, 1), (0, u64::MAX, 512)]
    {
        assert_eq!(
            client.request(command::BLOCK_STATUS, flags, offset, len, &[]).unwrap().error,
            EINVAL
        );
    }
    // A client that did not choose the context gets none.
    let mut other = server.connect();
    other.structured = other.option(option::STRUCTURED_REPLY, &[]).unwrap().0 == reply::ACK;
    assert_eq!(other.option(option::GO, &info("", &[])).unwrap().0, reply::ACK);
    assert_eq!(other.request(command::BLOCK_STATUS, 0, 0, 512, &[]).unwrap().error, EINVAL);
}

#[test]
fn impossible_request_is_an_error_and_the_connection_goes_on() {
    let server = Served::new(&exports(2, 1 << 20), 4);
    let mut client = server.client("");
    let end = 1 << 20;
    client.request(command::WRITE, 0, end - 512, 512, &[9; 512]).unwrap();
    for (command, flags, offset, len, error) in [
        (command::READ, 0, end, 1, EINVAL),
        (command::READ, 0, end - 511, 512, EINVAL),
        (command::READ, 0, u64::MAX, 512, EINVAL),
        (command::READ, flag::NO_HOLE, 0, 512, EINVAL),
        (command::READ, 0, 0, (32 << 20) + 1, EINVAL),
        (command::TRIM, 0, end - 511, 512, EINVAL),
        (command::TRIM, flag::NO_HOLE, 0, 512, EINVAL),
        (command::WRITE_ZEROES, 0, end, 512, ENOSPC),
        (command::WRITE_ZEROES, 0, u64::MAX - 10, 512, ENOSPC),
        (command::CACHE, 0, end, 512, EINVAL),
        (command::FLUSH, 0, 512, 0, EINVAL),
        (99, 0, 0, 0, EINVAL),
    ] {
        let answer = client.request(command, flags, offset, len, &[]).unwrap();
        assert_eq!(answer.error, error, "command {command}, flags {flags}, {offset}, {len}");
    }
    // The payload of a refused write is not a request.
    for (flags, offset, error) in
        [(0, end - 511, ENOSPC), (0, u64::MAX, ENOSPC), (flag::DF, 0, EINVAL)]
    {
        assert_eq!(
            client.request(command::WRITE, flags, offset, 512, &[1; 512]).unwrap().error,
            error
        );
    }
    assert_eq!(client.request(command::WRITE, 0, 0, 0, &[]).unwrap().error, 0);
    let mut whole = vec![0; end as usize];
    whole[end as usize - 512..].fill(9);
    assert!(
        client.request(command::READ, 0, 0, end as u32, &[]).unwrap().data == whole,
        "a refused write changed a byte"
    );
    let mut client_fixed = server.client("fixed");
    for command in [command::WRITE_ZEROES, command::TRIM] {
        assert_eq!(client_fixed.request(command, 0, 0, 512, &[]).unwrap().error, EPERM);
    }
    assert_eq!(
        client_fixed.request(command::WRITE, 0, 0, 600_000, &vec![1; 600_000]).unwrap().error,
        EPERM
    );
    assert_eq!(client_fixed.request(command::READ, 0, 0, 4096, &[]).unwrap().data, [0; 4096]);
    // Invalid bytes end the connection, after the requests before them are answered.
    client.send(command::READ, 0, end - 512, 512, &[]).unwrap();
    client.link.write_all(&[0; 28]).unwrap();
    assert_eq!(client.receive(command::READ, end - 512, 512).unwrap().data, [9; 512]);
    assert!(is_gone(&mut client));
    // A payload that is far too long ends it, too.
    let mut client = server.client("");
    client.send(command::WRITE, 0, 0, u32::MAX, &[]).unwrap();
    assert!(is_gone(&mut client));
}

#[test]
fn the_longest_payloads_come_through_with_blocks_of_every_size() {
    for order in [0, 4, 9] {
        let server = Served::new(&exports(order, 40 << 20), 4);
        let mut client = server.client("");
        let mut bytes = vec![0; 32 << 20];
        fill(&mut Random::new(41), &mut bytes);
        assert_eq!(client.request(command::WRITE, 0, 4096, 32 << 20, &bytes).unwrap().error, 0);
        assert!(
            client.request(command::READ, 0, 4096, 32 << 20, &[]).unwrap().data == bytes,
            "order {order}"
        );
    }
}

#[test]
fn concurrent_clients_lose_no_byte_when_one_dies_in_a_write() {
    let exports = exports(2, 16 << 20);
    let server = Served::new(&exports, 8);
    thread::scope(|scope| {
        for n in 0..4u64 {
            let server = &server;
            scope.spawn(move || {
                let (mut client, mut random) = (server.client(""), Random::new(n));
                let mut own = vec![0u8; 4 << 20];
                for _ in 0..60 {
                    let len = 1 + random.below(100_000);
                    let at = random.below(own.len() - len);
                    fill(&mut random, &mut own[at..at + len]);
                    let offset = (n << 22) + at as u64;
                    client
                        .request(command::WRITE, 0, offset, len as u32, &own[at..at + len])
                        .unwrap();
                    let other = server.client("");
                    drop(other);
                }
                let answer = client.request(command::READ, 0, n << 22, 4 << 20, &[]).unwrap();
                assert!(answer.data == own, "client {n}");
                // The client sends half of a write, and disconnects.
                let mut client_broken = server.client("");
                client_broken.send(command::WRITE, 0, n << 22, 4 << 20, &own[..1 << 20]).unwrap();
                drop(client_broken);
                let answer = client.request(command::READ, 0, n << 22, 4 << 20, &[]).unwrap();
                assert!(answer.data == own, "client {n}: the same bytes, so nothing has changed");
            });
        }
    });
    assert_eq!(
        exports[0].device().check().unwrap().0,
        exports[0].device().backing().stats().store.objects
    );
}

#[test]
fn a_client_beyond_the_most_waits_for_a_place() {
    let server = Served::new(&exports(2, 1 << 20), 1);
    let mut first = server.client("");
    let second = thread::scope(|scope| {
        let waits = scope.spawn(|| server.client(""));
        for _ in 0..50 {
            assert_eq!(first.request(command::READ, 0, 0, 512, &[]).unwrap().error, 0);
        }
        assert_eq!(server.server.as_ref().unwrap().connections(), (1, 1));
        drop(first);
        waits.join().unwrap()
    });
    assert_eq!(server.server.as_ref().unwrap().connections(), (1, 2));
    drop(second);
}

#[test]
fn a_server_that_ends_answers_what_it_has_taken() {
    let exports = exports(2, 8 << 20);
    let server = Served::new(&exports, 4);
    let mut client = server.client("");
    client.send(command::WRITE, 0, 0, 1 << 20, &[3; 1 << 20]).unwrap();
    let idle = server.client("");
    // When the first byte of the reply arrives, the request was accepted.
    assert_eq!(client.receive(command::WRITE, 0, 1 << 20).unwrap().error, 0);
    client.send(command::READ, 0, 0, 8 << 20, &[]).unwrap();
    let mut first = [0];
    client.link.read_exact(&mut first).unwrap();
    let reader = thread::spawn(move || {
        let mut rest = Vec::new();
        client.link.read_to_end(&mut rest).map(|_| rest.len())
    });
    drop(server);
    assert!(reader.join().unwrap().unwrap() >= 1 << 20, "the data that was there");
    drop(idle);
}

#[test]
fn a_port_that_others_can_reach_needs_tls() {
    let exports = exports(2, 1 << 20);
    let mut server = NbdServer::new(&exports, None, 1);
    let everywhere = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let refusal = server.listen(SocketListener::Tcp(everywhere)).unwrap_err();
    assert_eq!(refusal.kind(), io::ErrorKind::PermissionDenied);
    server
        .listen(SocketListener::Tcp(std::net::TcpListener::bind("127.0.0.1:0").unwrap()))
        .unwrap();
    server.end();
}
