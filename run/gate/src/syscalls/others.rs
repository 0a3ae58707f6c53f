//! Makes `process_vm_readv` and `process_vm_writev` on the memory of another process. If that process
//! has a keeper too, its memory may be folded, and the kernel can't load it. Then the keepers make it
//! resident and hold it ([`crate::keeper::HoldKeeper::lent`]).
//!
//! The call is made in pieces, so that only a piece is held at a time in either process. The kernel
//! copies page by page too, and returns how much it has copied before an error.
//!
//! A read is first tried without a hold, because it can only fail where memory is folded. A write
//! needs the hold from its start: the kernel writes to pages that are write-protected, or on their
//! way out, only if their engine knows of it.
use crate::syscalls::decode::vectors::is_self;
use crate::syscalls::operands::{BYTES_MAX, PARTS_MAX, ReadMemory};
use crate::syscalls::pieces::{CallBuffers, PieceParts, part_at, total_of};
use memfold_os::raw::system_call;

/// The most bytes of a piece, whatever the keeper says.
const PIECE_MOST: usize = 4 << 20;

/// A call on the memory of another process.
pub struct OtherTransfer {
    nr: usize,
    /// The number of the process or thread.
    pub process: u32,
    /// Whether the call writes to the other process.
    pub writes: bool,
    local: CallBuffers,
    remote: CallBuffers,
    /// The number of bytes to transfer.
    pub total: usize,
}

/// A piece of such a call.
pub struct OtherPiece {
    /// The memory of the caller.
    pub local: PieceParts,
    /// The memory of the other process.
    pub remote: PieceParts,
}

impl OtherTransfer {
    /// Returns the call with these arguments. Returns `None` if it is another call, or a call on the
    /// caller's own memory, or if the kernel refuses it.
    pub fn of(nr: usize, args: &[usize; 6], read: ReadMemory) -> Option<OtherTransfer> {
        let writes = match nr as i64 {
            libc::SYS_process_vm_readv => false,
            libc::SYS_process_vm_writev => true,
            _ => return None,
        };
        let [process, local, local_count, remote, remote_count, flags] = *args;
        if flags != 0 || is_self(process as u32) {
            return None;
        }
        let total = total_of(local, local_count, read)?;
        let total = total.min(remote_total(remote, remote_count, read)?);
        Some(OtherTransfer {
            nr,
            process: process as u32,
            writes,
            local: CallBuffers::Vector(local, local_count),
            remote: CallBuffers::Vector(remote, remote_count),
            total,
        })
    }

    /// Returns the piece that begins at byte `done`, with `most` bytes at most. Returns `None` if
    /// the arrays can't be read any more.
    pub fn piece(&self, done: usize, most: usize, read: ReadMemory) -> Option<OtherPiece> {
        let most = most.min(PIECE_MOST).min(self.total - done);
        let mut local = PieceParts::of(self.local, done, most, read)?;
        let remote = PieceParts::of(self.remote, done, local.bytes, read)?;
        local.cut(remote.bytes);
        Some(OtherPiece { local, remote })
    }

    /// Transfers between the memory of the caller and that of the other process, and returns the
    /// result.
    pub fn make(&self, local: &PieceParts, remote: &PieceParts) -> isize {
        let (local, remote) = (local.named(), remote.named());
        let args = [
            self.process as usize,
            local.as_ptr() as usize,
            local.len(),
            remote.as_ptr() as usize,
            remote.len(),
            0,
        ];
        // SAFETY: the piece is part of a call that the program makes itself, and names a part of its
        // memory.
        match unsafe { system_call(self.nr as i64, args) } {
            Ok(value) => value as isize,
            Err(e) => -(e.raw_os_error() as isize),
        }
    }

    /// Reads words at an address of the other process. Returns whether it has read all.
    pub fn read_words(&self, at: usize, to: &mut [u64]) -> bool {
        let (local, remote) = ([to.as_mut_ptr() as usize, size_of_val(to)], [at, size_of_val(to)]);
        let (local, remote) = (local.as_ptr() as usize, remote.as_ptr() as usize);
        let args = [self.process as usize, local, 1, remote, 1, 0];
        // SAFETY: both are laid out as an `iovec`, and `to` has room.
        let result = unsafe { system_call(libc::SYS_process_vm_readv, args) };
        result == Ok(size_of_val(to) as i64)
    }
}

/// Returns the number of bytes that the kernel transfers at most. The addresses may be any: the
/// kernel transfers what comes before a bad one.
fn remote_total(at: usize, count: usize, read: ReadMemory) -> Option<usize> {
    let mut total = 0usize;
    for n in 0..count.min(PARTS_MAX + 1) {
        let [_, bytes] = part_at(at, n, read)?;
        if bytes > isize::MAX as usize {
            return None;
        }
        total = total.saturating_add(bytes);
    }
    (count <= PARTS_MAX).then_some(total.min(BYTES_MAX))
}
