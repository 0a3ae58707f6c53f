//! The door of a run: a socket at which its processes get the table of their user and the bounds of
//! the run ([`memfold_run::door`]).
use memfold_run::door::{ANSWER_BYTES, DoorKey, HALF};
use std::io;
use std::mem::{offset_of, zeroed};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// Room for a control message with two descriptors, or with the credentials of one process.
#[repr(C)]
union DescriptorBuffer {
    _head: libc::cmsghdr,
    _bytes: [u8; 64],
}

/// A door and its key.
pub struct Door {
    socket: OwnedFd,
    name: String,
    key: DoorKey,
}

/// The address of a socket, and its length.
#[derive(Copy, Clone)]
struct SocketAddress(libc::sockaddr_un, libc::socklen_t);

impl SocketAddress {
    fn none() -> SocketAddress {
        // SAFETY: the struct has only integers, for which zeros are valid. They are an address of
        // no family.
        SocketAddress(unsafe { zeroed() }, size_of::<libc::sockaddr_un>() as libc::socklen_t)
    }

    /// Returns the abstract address of a name, which must be short.
    fn of(name: &str) -> SocketAddress {
        let mut address = SocketAddress::none();
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
    /// Makes a door with a random key. Requests wait until [`Door::serve`] answers them.
    ///
    /// # Errors
    /// The kernel gives no socket or no random bytes.
    pub fn open() -> io::Result<Door> {
        let mut random = [0u8; 2 * HALF + 8];
        memfold_os::random::fill(&mut random)
            .map_err(|e| io::Error::from_raw_os_error(e.raw_os_error()))?;
        let half = |at: usize| std::array::from_fn(|n| random[at + n]);
        let (key, name) = (
            DoorKey { ask: half(0), answer: half(HALF) },
            format!("memfold-{}", hex(&random[2 * HALF..])),
        );
        // SAFETY: the call has no pointers; it only makes a descriptor.
        let fd =
            checked(
                unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) }
                    as isize,
            )?;
        // SAFETY: the kernel has just made this descriptor, so nothing else owns it.
        let socket = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        let (on, address) = (1i32, SocketAddress::of(&name));
        // SAFETY: option and address are local, and have the lengths that are passed.
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

    pub fn key(&self) -> &DoorKey {
        &self.key
    }

    /// Returns the name of the socket.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Answers each process that sends the right key. Never returns. `files` returns the table and
    /// the bounds for the process's real user, which the kernel reports. If it returns `None`, the
    /// answer has no files.
    pub fn serve<F: AsFd>(&self, mut files: impl FnMut(u32) -> Option<[F; 2]>) {
        // The kernel removes a message before an error of it is seen, so the loop continues with
        // the next one. An error costs only its sender the answer.
        loop {
            if let Ok(Some((to, who))) = self.next() {
                let _ = match files(who.uid) {
                    Some(files) => {
                        let fds = files.each_ref().map(|file| file.as_fd().as_raw_fd());
                        self.answer(&to, who.pid as u32, &fds)
                    }
                    None => self.answer(&to, who.pid as u32, &[]),
                };
            }
        }
    }

    /// Receives the next message. Returns the socket for the answer that came with it, and its
    /// sender. Returns `None` if one of them is missing, or if the key is wrong.
    fn next(&self) -> io::Result<Option<(OwnedFd, libc::ucred)>> {
        // One byte more than a key, so that a longer message is noticed.
        let mut bytes = [0u8; HALF + 1];
        let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let mut control = DescriptorBuffer { _bytes: [0; 64] };
        // SAFETY: zeros are a valid empty header. All buffers are local, and have the lengths that
        // are passed.
        let (len, header) = unsafe {
            let mut message: libc::msghdr = zeroed();
            (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
            (message.msg_control, message.msg_controllen) =
                ((&raw mut control).cast(), size_of::<DescriptorBuffer>());
            let len = checked(libc::recvmsg(
                self.socket.as_raw_fd(),
                &raw mut message,
                libc::MSG_CMSG_CLOEXEC,
            ))?;
            (len, sent_with(&message))
        };
        let has_key = len == HALF && bytes[..HALF] == self.key.ask;
        Ok(header.0.filter(|_| has_key).filter(is_unix_socket).zip(header.1))
    }

    fn answer(&self, to: &OwnedFd, number: u32, files: &[i32]) -> io::Result<()> {
        let mut bytes = [0u8; ANSWER_BYTES];
        bytes[..HALF].copy_from_slice(&self.key.answer);
        bytes[HALF..].copy_from_slice(&number.to_ne_bytes());
        let mut control = DescriptorBuffer { _bytes: [0; 64] };
        let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        // SAFETY: zeros are a valid empty header. All buffers are local, and have the lengths that
        // are passed. The control buffer has room for two descriptors, and `files` has no more.
        let header = unsafe {
            let mut message: libc::msghdr = zeroed();
            (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
            if !files.is_empty() {
                let len = size_of_val(files) as u32;
                message.msg_control = (&raw mut control).cast();
                message.msg_controllen = libc::CMSG_SPACE(len) as usize;
                let head = libc::CMSG_FIRSTHDR(&raw const message);
                ((*head).cmsg_level, (*head).cmsg_type) = (libc::SOL_SOCKET, libc::SCM_RIGHTS);
                (*head).cmsg_len = libc::CMSG_LEN(len) as usize;
                for (n, fd) in files.iter().enumerate() {
                    libc::CMSG_DATA(head).cast::<i32>().add(n).write_unaligned(*fd);
                }
            }
            libc::sendmsg(
                to.as_raw_fd(),
                &raw const message,
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            )
        };
        checked(header).map(drop)
    }
}

/// Returns the descriptor that came with a message, and the credentials of the process that sent
/// it. Its process ID is 0 if it has none in this PID namespace. Closes further descriptors.
///
/// # Safety
/// - `recvmsg` has just filled the message.
unsafe fn sent_with(message: &libc::msghdr) -> (Option<OwnedFd>, Option<libc::ucred>) {
    let (mut first, mut sender) = (None, None);
    // SAFETY: the caller promises that `recvmsg` has just filled the message, so its control
    // messages are whole. The descriptors in them are new and nothing else owns them.
    unsafe {
        let mut head = libc::CMSG_FIRSTHDR(message);
        while !head.is_null() {
            let (data, kind) = (libc::CMSG_DATA(head), ((*head).cmsg_level, (*head).cmsg_type));
            if kind == (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) {
                sender = Some(data.cast::<libc::ucred>().read_unaligned());
            } else if kind == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let count = ((*head).cmsg_len - libc::CMSG_LEN(0) as usize) / size_of::<i32>();
                for n in 0..count {
                    let file = OwnedFd::from_raw_fd(data.cast::<i32>().add(n).read_unaligned());
                    first.get_or_insert(file);
                }
            }
            head = libc::CMSG_NXTHDR(message, head);
        }
    }
    (first, sender)
}

/// Returns whether a descriptor is a socket of this machine. A stranger's descriptor may be of any
/// kind.
fn is_unix_socket(file: &OwnedFd) -> bool {
    let (mut domain, mut len) = (0i32, size_of::<i32>() as libc::socklen_t);
    // SAFETY: the value is local, and has the length that is passed.
    let code = unsafe {
        libc::getsockopt(
            file.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_DOMAIN,
            (&raw mut domain).cast(),
            &raw mut len,
        )
    };
    code == 0 && domain == libc::AF_UNIX
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_run::door::DoorAddress;
    use std::sync::Arc;

    #[test]
    fn process_with_the_key_gets_the_files_of_its_user() {
        let door = Arc::new(Door::open().unwrap());
        let files = ["/etc/passwd", "/etc/group"].map(|path| std::fs::File::open(path).unwrap());
        let (server, mut count) = (door.clone(), 0);
        // SAFETY: getuid has no conditions.
        let user = unsafe { libc::getuid() };
        std::thread::spawn(move || {
            server.serve(|who| {
                count += 1;
                (who == user && count <= 2).then(|| files.each_ref().map(AsFd::as_fd))
            });
        });
        let (name, key) = (door.name(), *door.key());
        // A message with a wrong key is ignored.
        let stranger = SocketAddress::of("");
        let other = std::os::unix::net::UnixDatagram::unbound().unwrap();
        // SAFETY: bytes and address are local, and have the lengths that are passed.
        let result = unsafe {
            let to = SocketAddress::of(name);
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
        assert_eq!((result, stranger.0.sun_family as i32), (17, libc::AF_UNIX));
        let ask = |name: &str| memfold_run::door::ask(DoorAddress::Name(name.as_bytes()), &key);
        let answer = ask(name).unwrap();
        assert_eq!(answer.number, std::process::id());
        // A connected socket leads to the door too, but only to this one.
        let socket = memfold_run::door::connect(name.as_bytes()).unwrap();
        let number = rustix::fd::AsRawFd::as_raw_fd(&socket);
        let socket = memfold_run::door::connected(number, name.as_bytes()).unwrap();
        let again = memfold_run::door::ask(DoorAddress::Socket(socket), &key).unwrap();
        assert_eq!(again.number, std::process::id());
        let other = |number, name: &str| memfold_run::door::connected(number, name.as_bytes());
        assert!(other(number, "memfold-nobody").is_none() && other(-1, name).is_none());
        assert!(other(0, name).is_none());
        for (fd, path) in [(answer.table, "/etc/passwd"), (answer.bounds, "/etc/group")] {
            // SAFETY: `into_raw_fd` has given up the descriptor, so nothing else owns it.
            let file =
                unsafe { std::fs::File::from_raw_fd(rustix::fd::IntoRawFd::into_raw_fd(fd)) };
            assert_eq!(
                std::io::read_to_string(file).unwrap(),
                std::fs::read_to_string(path).unwrap()
            );
        }
        // The third request gets no files, and the second name has no door.
        assert!(ask(name).is_err() && ask("memfold-nobody").is_err());
    }
}
