//! Sockets.
use crate::files::vector;
use crate::run::{Case, case, halves, words};
use crate::world::{World, sys};
use libc::*;

fn pair(kind: i32) -> [usize; 2] {
    let mut ends = [0u32; 2];
    sys(SYS_socketpair, [AF_UNIX as usize, kind as usize, 0, &raw mut ends as usize]);
    ends.map(|e| e as usize)
}

fn with(kind: i32, bytes: &[u8]) -> usize {
    let [a, b] = pair(kind);
    sys(SYS_sendto, [b, bytes.as_ptr() as usize, bytes.len(), 0, 0, 0]);
    a
}

fn unix(name: &str) -> Vec<u8> {
    [&[AF_UNIX as u8, 0], name.as_bytes(), b"\0"].concat()
}

/// Any port of this machine's own address.
fn own_address() -> Vec<u8> {
    vec![AF_INET as u8, 0, 0, 0, 127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]
}

fn bound(kind: i32) -> (usize, [u8; 16]) {
    let s = sys(SYS_socket, [AF_INET as usize, kind as usize, 0]);
    let (mut at, mut len) = (<[u8; 16]>::try_from(own_address()).unwrap(), 16u32);
    sys(SYS_bind, [s, at.as_ptr() as usize, 16]);
    sys(SYS_getsockname, [s, at.as_mut_ptr() as usize, &raw mut len as usize]);
    (s, at)
}

fn connected() -> (usize, usize) {
    let (server, at) = bound(SOCK_STREAM);
    sys(SYS_listen, [server, 4]);
    let client = sys(SYS_socket, [AF_INET as usize, SOCK_STREAM as usize, 0]);
    sys(SYS_connect, [client, at.as_ptr() as usize, 16]);
    (server, client)
}

fn datagram() -> usize {
    let (s, at) = bound(SOCK_DGRAM);
    sys(SYS_sendto, [s, c"hello".as_ptr() as usize, 5, 0, at.as_ptr() as usize, 16]);
    s
}

fn header(
    w: &mut World,
    name: (usize, usize),
    parts: &[&[u8]],
    control: (usize, usize),
    fill: bool,
) -> Vec<u8> {
    let v = vector(w, parts, fill);
    words(&[name.0, name.1, v, parts.len(), control.0, control.1, 0])
}

fn rights(fd: usize) -> Vec<u8> {
    [words(&[20]), halves(&[SOL_SOCKET as u32, SCM_RIGHTS as u32, fd as u32, 0])].concat()
}

const LOOP: &[usize] = &[0x0000_0000_0000_0006 | 0xffff << 32];

pub const CASES: &[Case] = &[
    case("connect", |w| {
        let (s, at) = bound(SOCK_STREAM);
        sys(SYS_listen, [s, 4]);
        vec![sys(SYS_socket, [2, 1, 0]), w.put(&at), 16]
    })
    .volatile(),
    case("bind", |w| vec![sys(SYS_socket, [1, 1, 0]), w.put(&unix("s")), 4]),
    case("bind:inet", |w| vec![sys(SYS_socket, [2, 2, 0]), w.put(&own_address()), 16]),
    case("accept", |w| vec![connected().0, w.room(16), w.both(&halves(&[16]))]).volatile(),
    case("accept4", |w| vec![connected().0, w.room(16), w.both(&halves(&[16])), 0]).volatile(),
    case("accept:short", |w| vec![connected().0, w.room(5), w.both(&halves(&[5]))]).volatile(),
    case("getsockname", |w| vec![bound(SOCK_STREAM).0, w.room(16), w.both(&halves(&[16]))])
        .volatile(),
    case("getpeername", |w| vec![connected().1, w.room(16), w.both(&halves(&[16]))]).volatile(),
    case("socketpair", |w| vec![1, 1, 0, w.room(8)]),
    case("sendto", |w| {
        let [a, b] = pair(SOCK_STREAM);
        w.watch(b);
        vec![a, w.put(b"hello"), 5, 0, 0, 0]
    }),
    case("sendto:address", |w| {
        let (s, at) = bound(SOCK_DGRAM);
        w.watch(s);
        vec![s, w.put(b"hello"), 5, 0, w.put(&at), 16]
    })
    .volatile(),
    case("recvfrom", |w| vec![with(SOCK_STREAM, b"hello"), w.room(9), 9, 0, 0, 0]),
    case("recvfrom:address", |w| {
        vec![datagram(), w.room(9), 9, 0, w.room(16), w.both(&halves(&[16]))]
    })
    .volatile(),
    case("recvfrom:datagram", |w| vec![with(SOCK_DGRAM, &[7; 8000]), w.room(9000), 9000, 0, 0, 0]),
    case("read:socket", |w| vec![with(SOCK_STREAM, &[7; 8000]), w.room(9000), 9000]),
    case("sendmsg", |w| {
        let [a, b] = pair(SOCK_STREAM);
        w.watch(b);
        let h = header(w, (0, 0), &[b"abc", &[8; 5000]], (0, 0), false);
        vec![a, w.put(&h), 0]
    }),
    case("sendmsg:all", |w| {
        let (s, at) = bound(SOCK_DGRAM);
        w.watch(s);
        let n = w.put(&at);
        let c = w.put(&[words(&[20]), halves(&[0, 2, 64, 0])].concat());
        let h = header(w, (n, 16), &[b"abc"], (c, 24), false);
        vec![s, w.put(&h), 0]
    })
    .volatile(),
    case("sendmsg:rights", |w| {
        let [a, b] = pair(SOCK_STREAM);
        w.watch(b);
        let c = w.put(&rights(a));
        let h = header(w, (0, 0), &[b"abc"], (c, 24), false);
        vec![a, w.put(&h), 0]
    }),
    case("recvmsg", |w| {
        let s = with(SOCK_STREAM, b"hello");
        let h = header(w, (0, 0), &[b"xx", b"yyyy"], (0, 0), true);
        vec![s, w.both(&h), 0]
    }),
    case("recvmsg:address", |w| {
        let s = datagram();
        let n = w.room(16);
        let c = w.room(64);
        let h = header(w, (n, 16), &[b"xx", b"yyyy"], (c, 64), true);
        vec![s, w.both(&h), 0]
    })
    .volatile(),
    case("recvmsg:rights", |w| {
        let [a, b] = pair(SOCK_STREAM);
        let (x, c) = (*b"x", rights(a));
        let v = [x.as_ptr() as usize, 1];
        let m = words(&[0, 0, v.as_ptr() as usize, 1, c.as_ptr() as usize, 24, 0]);
        sys(SYS_sendmsg, [a, m.as_ptr() as usize, 0]);
        let c = w.room(24);
        let h = header(w, (0, 0), &[b"y"], (c, 24), true);
        vec![b, w.both(&h), 0]
    }),
    case("sendmmsg", |w| {
        let [a, b] = pair(SOCK_DGRAM);
        w.watch(b);
        let mut all = header(w, (0, 0), &[b"abc"], (0, 0), false);
        all.extend(words(&[0]));
        all.extend(header(w, (0, 0), &[b"de", b"f"], (0, 0), false));
        all.extend(words(&[0]));
        vec![a, w.both(&all), 2, 0]
    }),
    case("recvmmsg", |w| {
        let s = with(SOCK_DGRAM, b"hello");
        let mut all = header(w, (0, 0), &[b"abc"], (0, 0), true);
        all.extend(words(&[0]));
        all.extend(header(w, (0, 0), &[b"de", b"f"], (0, 0), true));
        all.extend(words(&[0]));
        vec![s, w.both(&all), 2, MSG_DONTWAIT as usize, w.both(&words(&[1, 0]))]
    })
    .volatile(),
    case("setsockopt", |w| {
        vec![sys(SYS_socket, [2, 1, 0]), 1, SO_REUSEADDR as usize, w.put(&halves(&[1])), 4]
    }),
    case("setsockopt:time", |w| {
        vec![sys(SYS_socket, [2, 1, 0]), 1, SO_RCVTIMEO as usize, w.put(&words(&[1, 0])), 16]
    }),
    case("setsockopt:filter", |w| {
        let f = w.put(&words(LOOP));
        vec![sys(SYS_socket, [2, 2, 0]), 1, 26, w.put(&words(&[1, f])), 16]
    }),
    case("getsockopt", |w| {
        vec![sys(SYS_socket, [2, 1, 0]), 1, SO_TYPE as usize, w.room(4), w.both(&halves(&[4]))]
    }),
    case("getsockopt:linger", |w| {
        vec![sys(SYS_socket, [2, 1, 0]), 1, SO_LINGER as usize, w.room(8), w.both(&halves(&[8]))]
    }),
    case("getsockopt:tcp_info", |w| {
        vec![connected().1, 6, TCP_INFO as usize, w.room(200), w.both(&halves(&[200]))]
    })
    .volatile(),
    case("getsockopt:filter", |w| {
        let s = sys(SYS_socket, [2, 2, 0]);
        let f = words(LOOP);
        let p = words(&[1, f.as_ptr() as usize]);
        sys(SYS_setsockopt, [s, 1, 26, p.as_ptr() as usize, 16]);
        vec![s, 1, 26, w.room(8), w.both(&halves(&[1]))]
    }),
    case("ioctl:SIOCGIFCONF", |w| {
        let b = w.room(400);
        vec![sys(SYS_socket, [2, 2, 0]), 0x8912, w.both(&words(&[400, b]))]
    })
    .volatile(),
    case("ioctl:SIOCGIFINDEX", |w| {
        let mut i = b"lo".to_vec();
        i.resize(40, 0);
        vec![sys(SYS_socket, [2, 2, 0]), 0x8933, w.both(&i)]
    }),
    case("ioctl:SIOCATMARK", |w| vec![connected().1, 0x8905, w.room(4)]),
];
