//! Rows of calls on sockets.
use crate::syscalls::decode::{control, vectors};
use crate::syscalls::row::Arg::{Decoded, In, Out};
use crate::syscalls::row::CallRow;
use crate::syscalls::row::OperandSize::{Address, AddressAt, Bytes, Len};
use crate::syscalls::row::{CutInto, plain};

const LENGTH: usize = 4;

pub(super) const CALLS: &[CallRow] = &[
    plain(41, "socket", &[]),
    plain(42, "connect", &[In(1, Address(2))]),
    plain(43, "accept", &[Out(1, AddressAt(2)), Out(2, Bytes(LENGTH))]),
    plain(44, "sendto", &[In(1, Len(2)), In(4, Address(5))]).cut(CutInto::Bytes).lending(),
    plain(45, "recvfrom", &[Out(1, Len(2)), Out(4, AddressAt(5)), Out(5, Bytes(LENGTH))])
        .cut(CutInto::Bytes),
    plain(46, "sendmsg", &[Decoded(vectors::sendmsg)]).lending(),
    plain(47, "recvmsg", &[Decoded(vectors::recvmsg)]),
    plain(48, "shutdown", &[]),
    plain(49, "bind", &[In(1, Address(2))]),
    plain(50, "listen", &[]),
    plain(51, "getsockname", &[Out(1, AddressAt(2)), Out(2, Bytes(LENGTH))]),
    plain(52, "getpeername", &[Out(1, AddressAt(2)), Out(2, Bytes(LENGTH))]),
    plain(53, "socketpair", &[Out(3, Bytes(8))]),
    plain(54, "setsockopt", &[Decoded(control::setsockopt)]).lending(),
    plain(55, "getsockopt", &[Decoded(control::getsockopt)]),
    plain(288, "accept4", &[Out(1, AddressAt(2)), Out(2, Bytes(LENGTH))]),
    plain(299, "recvmmsg", &[Decoded(vectors::recvmmsg)]).cut(CutInto::Messages),
    plain(307, "sendmmsg", &[Decoded(vectors::sendmmsg)]).cut(CutInto::Messages).lending(),
];
