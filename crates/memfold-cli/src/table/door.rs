//! The door of a run: a socket at which its processes get the table that they share
//! ([`memfold_sys::run::door`]).
use memfold_sys::run::door::{ANSWER_BYTES, HALF, Key};
use std::io;
use std::mem::{offset_of, zeroed};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Room for one descriptor or the credentials of one process.
#[repr(C)]
union Control {
    _head: libc::cmsghdr,
    _bytes: [u8; 64],
}

/// A door, with the key to it.
pub struct Door {
    socket: OwnedFd,
    name: String,
    key: Key,
}

/// The address of a socket, and its length.
#[derive(Copy, Clone)]
struct Address(libc::sockaddr_un, libc::socklen_t);

impl Address {
    fn none() -> Address {
        // SAFETY: all zeros are an address of no family.
        Address(unsafe { zeroed() }, size_of::<libc::sockaddr_un>() as libc::socklen_t)
    }

    /// The abstract one of a name, which is short.
    fn of(name: &str) -> Address {
        let mut address = Address::none();
        address.0.sun_family = libc::AF_UNIX as libc::sa_family_t;
        for (to, from) in address.0.sun_path[1..].iter_mut().zip(name.bytes()) {
            *to = from as libc::c_char;
        }
        address.1 = (offset_of!(libc::sockaddr_un, sun_path) + 1 + name.len()) as libc::socklen_t;
        address
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn checked(result: isize) -> io::Result<usize> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as usize) }
}

impl Door {
    /// A new one, with a key that nobody has yet. Nobody answers before [`Door::serve`].
    ///
    /// # Errors
    /// No socket, or no random bytes.
    pub fn open() -> io::Result<Door> {
        let mut random = [0u8; 2 * HALF + 8];
        // SAFETY: the bytes are local, and as many as is said.
        checked(unsafe { libc::getrandom(random.as_mut_ptr().cast(), random.len(), 0) })?;
        let half = |at: usize| std::array::from_fn(|n| random[at + n]);
        let (key, name) = (
            Key { ask: half(0), answer: half(HALF) },
            format!("memfold-{}", hex(&random[2 * HALF..])),
        );
        // SAFETY: makes a descriptor.
        let fd =
            checked(
                unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) }
                    as isize,
            )?;
        // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
        let socket = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        let (on, address) = (1i32, Address::of(&name));
        // SAFETY: option and address are local, of the lengths that are given.
        unsafe {
            let len = size_of::<i32>() as libc::socklen_t;
            checked(libc::setsockopt(
                fd as i32,
                libc::SOL_SOCKET,
                libc::SO_PASSCRED,
                (&raw const on).cast(),
                len,
            ) as isize)?;
            checked(libc::bind(fd as i32, (&raw const address.0).cast(), address.1) as isize)?;
        }
        Ok(Door { socket, name, key })
    }

    /// What opens it.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Name and key, as processes of the run are told.
    pub fn order(&self) -> String {
        format!("{},{}{}", self.name, hex(&self.key.ask), hex(&self.key.answer))
    }

    /// Answers who asks with the right key, for ever, with `file`.
    pub fn serve(&self, file: &OwnedFd) {
        // A message is taken before it can fail, and the kernel waits for the next: an error costs
        // its sender its answer.
        loop {
            if let Ok(Some((from, number))) = self.next() {
                let _ = self.answer(&from, number, file);
            }
        }
    }

    /// The next message: from where, and the number of the process that sent it; `None` if its key
    /// is wrong.
    fn next(&self) -> io::Result<Option<(Address, u32)>> {
        // One more than is right.
        let (mut bytes, mut from) = ([0u8; HALF + 1], Address::none());
        let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let mut control = Control { _bytes: [0; 64] };
        // SAFETY: all zeros are a header of nothing; what it is given is local and of the lengths
        // that are given.
        let (len, number) = unsafe {
            let mut message: libc::msghdr = zeroed();
            (message.msg_name, message.msg_namelen) = ((&raw mut from.0).cast(), from.1);
            (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
            (message.msg_control, message.msg_controllen) =
                ((&raw mut control).cast(), size_of::<Control>());
            let len = checked(libc::recvmsg(
                self.socket.as_raw_fd(),
                &raw mut message,
                libc::MSG_CMSG_CLOEXEC,
            ))?;
            from.1 = message.msg_namelen;
            (len, number_in(&message))
        };
        Ok((len == HALF && bytes[..HALF] == self.key.ask).then_some((from, number)))
    }

    fn answer(&self, to: &Address, number: u32, file: &OwnedFd) -> io::Result<()> {
        let mut bytes = [0u8; ANSWER_BYTES];
        bytes[..HALF].copy_from_slice(&self.key.answer);
        bytes[HALF..].copy_from_slice(&number.to_ne_bytes());
        let (mut to, mut control) = (*to, Control { _bytes: [0; 64] });
        let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        // SAFETY: all zeros are a header of nothing; what it is given is local and of the lengths
        // that are given, and the control message has room for one descriptor.
        let sent = unsafe {
            let mut message: libc::msghdr = zeroed();
            (message.msg_name, message.msg_namelen) = ((&raw mut to.0).cast(), to.1);
            (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
            message.msg_control = (&raw mut control).cast();
            message.msg_controllen = libc::CMSG_SPACE(size_of::<i32>() as u32) as usize;
            let head = libc::CMSG_FIRSTHDR(&raw const message);
            ((*head).cmsg_level, (*head).cmsg_type) = (libc::SOL_SOCKET, libc::SCM_RIGHTS);
            (*head).cmsg_len = libc::CMSG_LEN(size_of::<i32>() as u32) as usize;
            libc::CMSG_DATA(head).cast::<i32>().write_unaligned(file.as_raw_fd());
            libc::sendmsg(
                self.socket.as_raw_fd(),
                &raw const message,
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            )
        };
        checked(sent).map(drop)
    }
}

/// The number of the process that has sent a message; 0 if it has none here. Descriptors that came
/// with it are closed.
///
/// # Safety
/// - `recvmsg` has just filled the message.
unsafe fn number_in(message: &libc::msghdr) -> u32 {
    let mut number = 0;
    // SAFETY: by the caller's promise the control messages are whole.
    unsafe {
        let mut head = libc::CMSG_FIRSTHDR(message);
        while !head.is_null() {
            let (data, kind) = (libc::CMSG_DATA(head), ((*head).cmsg_level, (*head).cmsg_type));
            if kind == (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) {
                number = data.cast::<libc::ucred>().read_unaligned().pid as u32;
            } else if kind == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let count = ((*head).cmsg_len - libc::CMSG_LEN(0) as usize) / size_of::<i32>();
                for n in 0..count {
                    libc::close(data.cast::<i32>().add(n).read_unaligned());
                }
            }
            head = libc::CMSG_NXTHDR(message, head);
        }
    }
    number
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::sync::Arc;

    #[test]
    fn who_has_the_key_gets_the_file_and_its_own_number_and_nobody_else_does() {
        let door = Arc::new(Door::open().unwrap());
        let file = OwnedFd::from(std::fs::File::open("/etc/passwd").unwrap());
        let server = door.clone();
        std::thread::spawn(move || server.serve(&file));
        let order = door.order();
        let (name, key) = order.split_once(',').unwrap();
        let key = Key::parse(key).unwrap();
        assert_eq!(&key, door.key());
        // One that is wrong is passed over.
        let stranger = Address::of("");
        let other = std::os::unix::net::UnixDatagram::unbound().unwrap();
        // SAFETY: bytes and address are local, of the lengths that are given.
        let sent = unsafe {
            let to = Address::of(name);
            let fd = other.as_fd().as_raw_fd();
            libc::sendto(
                fd,
                b"let me in, please".as_ptr().cast(),
                17,
                0,
                (&raw const to.0).cast(),
                to.1,
            )
        };
        assert_eq!((sent, stranger.0.sun_family as i32), (17, libc::AF_UNIX));
        let (got, number) = memfold_sys::run::door::ask(name.as_bytes(), &key).unwrap();
        assert_eq!(number, std::process::id());
        // SAFETY: the descriptor is given up by the one that had it.
        let got = unsafe { std::fs::File::from_raw_fd(rustix::fd::IntoRawFd::into_raw_fd(got)) };
        let text = std::io::read_to_string(got).unwrap();
        assert_eq!(text, std::fs::read_to_string("/etc/passwd").unwrap());
        assert!(memfold_sys::run::door::ask(b"memfold-nobody", &key).is_err());
    }
}
