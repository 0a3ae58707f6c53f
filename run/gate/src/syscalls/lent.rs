//! Serves calls that lend pages of the program to the kernel beyond the end of the call:
//! `vmsplice`, and sockets with MSG_ZEROCOPY. The kernel doesn't pin such pages. So the keeper
//! can't see that they are lent, and would reuse their frames.
//!
//! - `vmsplice` writes copies of the pages into the pipe. It waits as the kernel's `vmsplice` does.
//! - `setsockopt(SO_ZEROCOPY)` fails with EINVAL, as on kernels that lack it.
//! - A socket may have got SO_ZEROCOPY in another process. On such a socket, sending with
//!   MSG_ZEROCOPY fails with ENOBUFS, as if the limit of lent pages were reached.
use crate::touch::read;
use memfold_os::raw::system_call;
use memfold_os::units::PAGE_SIZE;

/// A function that makes a call of the program, given its number and arguments, and returns the
/// result.
pub type MakeLentCall<'a> = &'a mut dyn FnMut(i64, [usize; 6]) -> isize;

const AGAIN: isize = -(libc::EAGAIN as isize);
/// All flags that `vmsplice` knows.
const SPLICE_FLAGS: u32 =
    libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MORE | libc::SPLICE_F_GIFT;

/// Makes the call in a way that lends nothing, and returns its result. Returns `None` for a call
/// that lends nothing anyway. `names` tells whether the call names memory of the keeper.
pub fn make(
    nr: usize,
    args: &[usize; 6],
    names: impl FnOnce() -> bool,
    make: MakeLentCall,
) -> Option<isize> {
    match nr as i64 {
        libc::SYS_vmsplice => (gives(args) && names()).then(|| copy(args, make)),
        libc::SYS_setsockopt => {
            let lends = args[1] as i32 == libc::SOL_SOCKET && args[2] as i32 == libc::SO_ZEROCOPY;
            // Without a value the kernel refuses the option, with EINVAL, or EBADF if this isn't a
            // descriptor.
            lends.then(|| raw(libc::SYS_setsockopt, [args[0], args[1], args[2], 0, 0, 0]))
        }
        libc::SYS_sendto | libc::SYS_sendmsg | libc::SYS_sendmmsg => {
            let flags = if nr as i64 == libc::SYS_sendmsg { args[2] } else { args[3] };
            let lends = flags as i32 & libc::MSG_ZEROCOPY != 0 && lends_pages(args[0]) && names();
            lends.then_some(-(libc::ENOBUFS as isize))
        }
        _ => None,
    }
}

fn raw(nr: i64, args: [usize; 6]) -> isize {
    // SAFETY: the call asks about a descriptor and writes at most to `value` and `size` of the
    // caller, or it is the program's own `setsockopt` without its pointer.
    match unsafe { system_call(nr, args) } {
        Ok(value) => value as isize,
        Err(e) => -(e.raw_os_error() as isize),
    }
}

/// Returns whether a `vmsplice` gives pages to a pipe. All other calls are left to the kernel.
fn gives(args: &[usize; 6]) -> bool {
    let ask = |command: i32| raw(libc::SYS_fcntl, [args[0], command as usize, 0, 0, 0, 0]);
    args[3] as u32 & !SPLICE_FLAGS == 0
        && ask(libc::F_GETPIPE_SZ) >= 0
        && ask(libc::F_GETFL) as i32 & libc::O_ACCMODE != libc::O_RDONLY
}

/// Returns whether a socket has SO_ZEROCOPY.
fn lends_pages(fd: usize) -> bool {
    let (mut on, mut len) = (0u32, 4u32);
    let (value, size) = (&raw mut on as usize, &raw mut len as usize);
    let (level, name) = (libc::SOL_SOCKET as usize, libc::SO_ZEROCOPY as usize);
    raw(libc::SYS_getsockopt, [fd, level, name, value, size, 0]) == 0 && on != 0
}

/// Polls a pipe for room. The result is above 0 if there is room, or never will be any.
fn poll(fd: usize, wait: bool, make: MakeLentCall) -> isize {
    let mut room = libc::pollfd { fd: fd as i32, events: libc::POLLOUT, revents: 0 };
    let time: isize = if wait { -1 } else { 0 };
    make(libc::SYS_poll, [&raw mut room as usize, 1, time as usize, 0, 0, 0])
}

/// The most parts of a call that are taken. The kernel takes one for each page for which the pipe
/// has room, 16 by default.
const PARTS_MAX: usize = 128;
type SplicePart = [usize; 2];

/// The parts (first addresses and lengths) that a pipe could take at once.
struct SpliceParts {
    parts: [SplicePart; PARTS_MAX],
    count: usize,
}

impl SpliceParts {
    fn read(at: usize, count: usize, room: usize) -> Result<SpliceParts, isize> {
        let (mut all, mut room) = (SpliceParts { parts: [[0; 2]; PARTS_MAX], count: 0 }, room);
        if count > libc::UIO_MAXIOV as usize {
            return Err(-(libc::EINVAL as isize));
        }
        while all.count < count.min(PARTS_MAX) && room > 0 {
            let [start, len] = match read::<SplicePart>(at + all.count * size_of::<SplicePart>()) {
                Ok(part) => part,
                Err(_) if all.count > 0 => break,
                Err(_) => return Err(-(libc::EFAULT as isize)),
            };
            if (len as isize) < 0 {
                return Err(-(libc::EINVAL as isize));
            }
            all.parts[all.count] = [start, len.min(room)];
            room -= len.min(room);
            all.count += 1;
        }
        Ok(all)
    }
}

/// Writes the bytes of the parts as far as there is room, and at least one. Returns the number of
/// bytes, or an error.
fn copy(args: &[usize; 6], make: MakeLentCall) -> isize {
    let [fd, parts, count, flags, ..] = *args;
    let waits = flags as u32 & libc::SPLICE_F_NONBLOCK == 0;
    // No more is held than the pipe has room for.
    let room = raw(libc::SYS_fcntl, [fd, libc::F_GETPIPE_SZ as usize, 0, 0, 0, 0]);
    let parts = match SpliceParts::read(parts, count, room.max(1) as usize) {
        Ok(parts) => parts,
        Err(e) => return e,
    };
    loop {
        // With the offset -1 a pipe takes as much as fits.
        let (at, flags) = (parts.parts.as_ptr() as usize, libc::RWF_NOWAIT as usize);
        let now = [fd, at, parts.count, usize::MAX, usize::MAX, flags];
        match make(libc::SYS_pwritev2, now) {
            AGAIN if !waits => return AGAIN,
            AGAIN => {}
            // Some pipes, and all of older kernels, don't take RWF_NOWAIT.
            made if made == -(libc::EOPNOTSUPP as isize) => {}
            made => return made,
        }
        match copy_by_pages(fd, &parts, waits, make) {
            // The program has set O_NONBLOCK, which `vmsplice` ignores.
            AGAIN if waits => {
                let result = poll(fd, true, make);
                if result < 0 {
                    return result;
                }
            }
            made => return made,
        }
    }
}

/// Writes page by page. Only the first write may wait for room.
fn copy_by_pages(fd: usize, parts: &SpliceParts, waits: bool, make: MakeLentCall) -> isize {
    let mut count = 0;
    for [start, len] in &parts.parts[..parts.count] {
        for offset in (0..*len).step_by(PAGE_SIZE) {
            if (count > 0 || !waits) && poll(fd, false, make) <= 0 {
                return if count > 0 { count } else { AGAIN };
            }
            // A pipe takes a page as a whole or not at all.
            let some = PAGE_SIZE.min(len - offset);
            let result = make(libc::SYS_write, [fd, start.wrapping_add(offset), some, 0, 0, 0]);
            if result <= 0 {
                return if count > 0 { count } else { result };
            }
            count += result;
        }
    }
    count
}
