//! Sockets.
use crate::syscalls::decode::{control, vectors};
use crate::syscalls::row::Arg::{In, Out, Own};
use crate::syscalls::row::Entry;
use crate::syscalls::row::Size::{Address, AddressAt, Bytes, Len};
use crate::syscalls::row::plain;

const LENGTH: usize = 4;

pub(super) const CALLS: &[Entry] = &[
    plain(41, "socket", &[]),
    plain(42, "connect", &[In(1, Address(2))]),
    plain(43, "accept", &[Out(1, AddressAt(2)), Out(2, Bytes(LENGTH))]),
    plain(44, "sendto", &[In(1, Len(2)), In(4, Address(5))]).lending(),
    plain(45, "recvfrom", &[Out(1, Len(2)), Out(4, AddressAt(5)), Out(5, Bytes(LENGTH))]),
    plain(46, "sendmsg", &[Own(vectors::sendmsg)]).lending(),
    plain(47, "recvmsg", &[Own(vectors::recvmsg)]),
    plain(48, "shutdown", &[]),
    plain(49, "bind", &[In(1, Address(2))]),
    plain(50, "listen", &[]),
    plain(51, "getsockname", &[Out(1, AddressAt(2)), Out(2, Bytes(LENGTH))]),
    plain(52, "getpeername", &[Out(1, AddressAt(2)), Out(2, Bytes(LENGTH))]),
    plain(53, "socketpair", &[Out(3, Bytes(8))]),
    plain(54, "setsockopt", &[Own(control::setsockopt)]).lending(),
    plain(55, "getsockopt", &[Own(control::getsockopt)]),
    plain(288, "accept4", &[Out(1, AddressAt(2)), Out(2, Bytes(LENGTH))]),
    plain(299, "recvmmsg", &[Own(vectors::recvmmsg)]),
    plain(307, "sendmmsg", &[Own(vectors::sendmmsg)]).lending(),
];
