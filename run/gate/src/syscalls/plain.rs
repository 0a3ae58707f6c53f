//! Makes a call of the program about which nothing else must be known. It is made while the memory
//! that it names is held, whole or in pieces.
//!
//! Nearly all calls take this path. A call that names no managed memory costs a walk through the
//! row's operands, one question to the keeper ([`HoldKeeper::hold`]), and the call.
use crate::keeper::{HoldKeeper, KeeperFault, NamedSpan, Names, OtherProcess};
use crate::signals;
use crate::syscalls::others::{OtherPiece, OtherTransfer};
use crate::syscalls::own_program::{PATH_BYTES, program_at};
use crate::syscalls::pieces::{self, CallPiece};
use crate::syscalls::row::{CallRow, CallingThread, CutInto};
use crate::syscalls::{lent, messages, own_program, seen};
use crate::touch::{read, read_bytes, touch};
use memfold_os::raw::system_call;
use memfold_os::units::PAGE_SIZE;

/// Makes a call without a hold, and returns its result.
pub fn raw(nr: usize, args: &[usize; 6]) -> isize {
    // SAFETY: the call is one that the program makes itself, or a piece of one, or it asks about a
    // descriptor into memory of the caller. So it does nothing to the program's memory that the
    // program hasn't asked for.
    match unsafe { system_call(nr as i64, *args) } {
        Ok(value) => value as isize,
        Err(e) => -(e.raw_os_error() as isize),
    }
}

/// Calls `each` with the ranges that a call names.
fn name(row: &CallRow, args: &[usize; 6], each: &mut dyn FnMut(NamedSpan)) {
    // Pointers that can't be read name nothing. The kernel will fail at them too.
    let _ = row.name_memory(args, &read_bytes, each);
}

/// Returns whether any of the ranges may hold managed memory.
fn concerns(holds: &dyn HoldKeeper, names: Names) -> bool {
    let mut any = false;
    names(&mut |span| any |= holds.concerns(span.start, span.len));
    any
}

impl CallingThread<'_> {
    /// Calls `make` while the ranges of `names` are held, and returns its result. Returns ENOMEM if
    /// there is no memory to note the hold.
    pub fn under_hold(&self, names: Names, make: impl FnOnce() -> isize) -> isize {
        let (holds, record) = (self.keeper.holds, self.record);
        let Ok(hold) = holds.hold(names, record.number.get(), touch) else {
            return -(libc::ENOMEM as isize);
        };
        record.hold.set(hold);
        let result = make();
        record.hold.set(None);
        if let Some(hold) = hold {
            holds.release(hold);
        }
        result
    }

    /// Calls `make` while the memory that the call names is held, and returns its result.
    pub fn held(&self, row: &CallRow, args: &[usize; 6], make: impl FnOnce() -> isize) -> isize {
        if !row.names {
            return make();
        }
        self.under_hold(&|each: &mut dyn FnMut(NamedSpan)| name(row, args, each), make)
    }

    /// Makes a call that needs no more than a hold, and returns its result.
    pub fn plain(&self, row: &CallRow, nr: usize, args: &[usize; 6]) -> isize {
        if let Some(at) = own_program::asks_by(row, args)
            && own_program::may_name_program(args[at])
            && let Some(result) = self.about_program(row, nr, args, at)
        {
            return result;
        }
        self.shown(row, nr, args)
    }

    /// Makes a call whose argument `at` is the path of a program in /proc. Returns `None` if it is
    /// another path, or if the kernel's own answer is right.
    #[inline(never)]
    fn about_program(
        &self,
        row: &CallRow,
        nr: usize,
        args: &[usize; 6],
        at: usize,
    ) -> Option<isize> {
        let mut room = [0; PATH_BYTES];
        let path = program_at(args[at], &mut room)?;
        Some(own_program::answer(row, args, (at, path), |args| self.shown(row, nr, args)))
    }

    /// Makes a call, and removes from its answer what would reveal the engine. Returns its result.
    fn shown(&self, row: &CallRow, nr: usize, args: &[usize; 6]) -> isize {
        if !row.tells {
            return self.made(row, nr, args);
        }
        loop {
            // The kernel sees zeros where memory is hidden.
            let result = match self.keeper.pages.hides() && seen::names_own_memory(nr, args) {
                true => -(libc::EIO as isize),
                false => self.made(row, nr, args),
            };
            let result = seen::with_own_memory(nr, args, result, |nr, args, span| {
                self.in_own_memory(nr, args, span)
            });
            if result < 0 {
                return result;
            }
            if let Some(result_shown) =
                seen::without_threads(self.keeper.threads, self.record, nr, args, result)
            {
                return result_shown;
            }
        }
    }

    /// Makes a call that copies between a buffer and the program's memory `seen`, through a file.
    /// Returns its result.
    fn in_own_memory(&self, nr: usize, args: &[usize; 6], seen: NamedSpan) -> isize {
        let make = |write: bool| {
            let names = |each: &mut dyn FnMut(NamedSpan)| {
                each(NamedSpan { start: args[1], len: args[2], write: !seen.write });
                each(NamedSpan { write, ..seen });
            };
            self.under_hold(&names, || {
                if seen.write && !write {
                    let first = seen.start & !(PAGE_SIZE - 1);
                    for address in (first..seen.start + seen.len).step_by(PAGE_SIZE) {
                        let fault = KeeperFault { address, write: true, protected: true };
                        self.keeper.pages.fault(fault);
                    }
                }
                raw(nr, args)
            })
        };
        match make(seen.write) {
            // The file lets the program write where the mapping doesn't.
            failed if failed == -(libc::EIO as isize) && seen.write => make(false),
            made => made,
        }
    }

    /// Makes a call while all that it names is held, whole or in pieces. Returns its result.
    fn made(&self, row: &CallRow, nr: usize, args: &[usize; 6]) -> isize {
        let CallingThread { record, rows, .. } = *self;
        let holds = self.keeper.holds;
        // SAFETY: the program makes this call itself, so it may be made with these arguments. What
        // it names is held.
        let call = |nr: usize, args: &[usize; 6]| unsafe { signals::call(record, nr, args) };
        if !row.names {
            return checked(holds, row, nr, args, &|_| {}, call(nr, args));
        }
        let names = |each: &mut dyn FnMut(NamedSpan)| name(row, args, each);
        if row.lends {
            let concerns = || concerns(holds, &names);
            let mut make = |nr: i64, args: [usize; 6]| {
                self.plain(rows.look_up(nr as usize), nr as usize, &args)
            };
            if let Some(result) = lent::make(nr, args, concerns, &mut make) {
                return result;
            }
        }
        let pieces = match row.cut {
            CutInto::Whole => None,
            CutInto::Bytes => self.in_pieces(row, nr, args, &names),
            CutInto::Messages => {
                messages::in_pieces(nr, args, &mut |args| self.plain(row, nr, args))
            }
            CutInto::Others => self.on_other(nr, args),
        };
        pieces.unwrap_or_else(|| {
            self.under_hold(&names, || checked(holds, row, nr, args, &names, call(nr, args)))
        })
    }

    /// Makes a large call in pieces, and returns its result. Returns `None` if it must be made
    /// whole.
    fn in_pieces(
        &self,
        row: &CallRow,
        nr: usize,
        args: &[usize; 6],
        names: Names,
    ) -> Option<isize> {
        let (holds, record) = (self.keeper.holds, self.record);
        let concerns = || concerns(holds, names);
        let most = || holds.piece_bytes();
        let pieces = pieces::in_pieces(nr, args, most, concerns, &read_bytes, &mut raw)?;
        let mut make = |piece: &CallPiece| {
            let names = |each: &mut dyn FnMut(NamedSpan)| piece.names(each);
            self.under_hold(&names, || {
                let result = match piece.must {
                    true => raw(piece.nr, &piece.args),
                    // SAFETY: the piece is part of a call that the program makes itself, and names
                    // a part of its memory. What the piece names is held.
                    false => unsafe { signals::call(record, piece.nr, &piece.args) },
                };
                // The rest of the call's memory isn't held. So the keeper is shown only what the
                // piece names.
                checked(holds, row, nr, &piece.args, &names, result)
            })
        };
        pieces.run(&read_bytes, &mut raw, &mut make)
    }
}

impl CallingThread<'_> {
    /// Makes a call on the memory of another process, and returns its result. Returns `None` if it
    /// must be made whole.
    #[inline(never)]
    fn on_other(&self, nr: usize, args: &[usize; 6]) -> Option<isize> {
        let transfer = OtherTransfer::of(nr, args, &read_bytes)?;
        let (mut count, mut result) = (0, 0);
        while count < transfer.total {
            let piece = transfer.piece(count, self.keeper.holds.piece_bytes(), &read_bytes);
            result = piece.map_or(-(libc::EFAULT as isize), |piece| self.other(&transfer, piece));
            if result <= 0 {
                break;
            }
            count += result as usize;
        }
        Some(if count > 0 { count as isize } else { result })
    }

    /// Makes a piece of such a call, and returns its result. It may transfer less than the piece,
    /// and not fail, although more can be transferred.
    fn other(&self, transfer: &OtherTransfer, piece: OtherPiece) -> isize {
        let OtherPiece { local, remote } = piece;
        let names = |each: &mut dyn FnMut(NamedSpan)| {
            let name = |[start, len]: &[usize; 2]| NamedSpan::new(*start, *len, !transfer.writes);
            local.named().iter().filter_map(name).for_each(each);
        };
        self.under_hold(&names, || {
            let bad = -(libc::EFAULT as isize);
            let result = if transfer.writes { bad } else { transfer.make(&local, &remote) };
            if result != bad {
                return result;
            }
            let read_words = |at: usize, to: &mut [u64]| transfer.read_words(at, to);
            let process = OtherProcess { number: transfer.process, read: &read_words };
            self.keeper.holds.lent(process, remote.named(), transfer.writes, &mut |len| {
                let mut part = remote;
                if len > 0 {
                    part.cut(len);
                }
                transfer.make(&local, &part)
            })
        })
    }
}

/// The most words of a call that are shown to the keeper. Each may be a pointer to memory that the
/// row doesn't name.
const WORDS_MAX: usize = 160;
const STRUCT_MAX: usize = 512;
/// The number of these words that are the starts of the ranges that the call names.
const SPANS_MAX: usize = 32;
const _: () = assert!(WORDS_MAX > 6 + SPANS_MAX);

/// Calls that take addresses of another process. Those addresses tell nothing about this process's
/// memory.
const FOR_OTHERS: [i64; 5] = [
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_ptrace,
    libc::SYS_move_pages,
];

/// Returns the result of a call. If it is EFAULT, shows the call to the keeper, to find out whether
/// the table lacks something. The call isn't made again, because the first try may have had an
/// effect.
fn checked(
    holds: &dyn HoldKeeper,
    row: &CallRow,
    nr: usize,
    args: &[usize; 6],
    names: Names,
    made: isize,
) -> isize {
    if made == -(libc::EFAULT as isize) && !FOR_OTHERS.contains(&(nr as i64)) {
        let (mut words, mut count) = ([0; WORDS_MAX], args.len());
        words[..count].copy_from_slice(args);
        // The arguments of a piece don't point to its parts.
        names(&mut |span| {
            if count < args.len() + SPANS_MAX {
                words[count] = span.start;
                count += 1;
            }
        });
        names(&mut |span| {
            let len = if span.len <= STRUCT_MAX { span.len / 8 * 8 } else { 0 };
            for at in (span.start..span.start + len).step_by(8) {
                if count < WORDS_MAX
                    && let Ok(word) = read::<usize>(at)
                {
                    words[count] = word;
                    count += 1;
                }
            }
        });
        holds.refused(nr, row.name, &words[..count]);
    }
    made
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keeper::{
        AnyRights, BadAddress, Keeper, KeeperHold, LifeKeeper, NoHoldRoom, NoServer, NoThreads,
        PageKeeper,
    };
    use crate::record::GateThread;
    use crate::syscalls::table::TABLE;
    use std::sync::Mutex;

    /// A keeper that owns all memory, holds nothing, and notes the failed calls that it is shown.
    struct Asked(Mutex<Vec<Vec<usize>>>);

    impl HoldKeeper for Asked {
        fn concerns(&self, _: usize, _: usize) -> bool {
            true
        }

        fn hold(
            &self,
            _: Names,
            _: usize,
            _: fn(usize, bool) -> Result<(), BadAddress>,
        ) -> Result<Option<KeeperHold>, NoHoldRoom> {
            Ok(None)
        }

        fn release(&self, _: KeeperHold) {}

        fn lent(
            &self,
            _: OtherProcess,
            _: &[[usize; 2]],
            _: bool,
            make: &mut dyn FnMut(usize) -> isize,
        ) -> isize {
            make(0)
        }

        fn piece_bytes(&self) -> usize {
            64 << 10
        }

        fn refused(&self, _: usize, _: &str, words: &[usize]) {
            self.0.lock().unwrap().push(words.to_vec());
        }
    }

    /// A keeper that plain calls ask nothing.
    struct NotAsked;

    impl PageKeeper for NotAsked {
        fn hides(&self) -> bool {
            false
        }

        fn fault(&self, _: KeeperFault) -> bool {
            unreachable!()
        }

        fn change(
            &self,
            _: usize,
            _: &[usize; 6],
            _: &mut dyn FnMut(&[usize; 6]) -> isize,
        ) -> isize {
            unreachable!()
        }

        fn never_fold(&self, _: usize, _: usize) {
            unreachable!()
        }

        fn keep_all(&self, _: bool) {
            unreachable!()
        }

        fn keep_home(&self, _: bool) -> bool {
            unreachable!()
        }
    }

    impl LifeKeeper for NotAsked {
        fn expect_copy(&self) {
            unreachable!()
        }

        fn begin_copy(&self) {
            unreachable!()
        }

        fn end_copy(&self, _: isize) {
            unreachable!()
        }

        fn execute(
            &self,
            _: usize,
            _: &[usize; 6],
            _: &mut dyn FnMut(&[usize; 6]) -> isize,
        ) -> isize {
            unreachable!()
        }

        fn owns_descriptor(&self, _: i32) -> bool {
            false
        }

        fn ends(&self) {
            unreachable!()
        }
    }

    /// Makes a call by a keeper that notes what it is shown, and returns the result and the notes.
    fn made_and_asked(nr: usize, args: &[usize; 6]) -> (isize, Vec<Vec<usize>>) {
        let requests: &Asked = Box::leak(Box::new(Asked(Mutex::new(Vec::new()))));
        let keeper = Keeper {
            holds: requests,
            pages: &NotAsked,
            life: &NotAsked,
            children: &NoServer,
            rights: &AnyRights,
            threads: &NoThreads,
        };
        let record = GateThread::take().unwrap();
        let caller = CallingThread { keeper: &keeper, record, rows: &TABLE };
        let result = caller.plain(TABLE.look_up(nr), nr, args);
        record.give_back();
        (result, requests.0.lock().unwrap().clone())
    }

    #[test]
    fn failed_piece_is_reported_as_a_whole_call_is() {
        const BYTES: usize = 1 << 20;
        let (protection, flags) = (libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let args = [0, BYTES, protection as usize, flags as usize, usize::MAX, 0];
        // SAFETY: the kernel chooses an address for the new mapping, so nothing else uses it.
        let bad = unsafe { system_call(libc::SYS_mmap, args) }.unwrap() as usize;
        let (_reader, writer) = std::io::pipe().unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&writer) as usize;
        let parts = [[bad, BYTES / 2], [bad + BYTES / 2, BYTES / 2]];
        let calls = [
            (libc::SYS_write, [fd, bad, BYTES, 0, 0, 0]),
            (libc::SYS_writev, [fd, parts.as_ptr() as usize, 2, 0, 0, 0]),
        ];
        for (nr, args) in calls {
            let (result, requests) = made_and_asked(nr as usize, &args);
            assert_eq!(result, -(libc::EFAULT as isize));
            assert!(requests.len() == 1 && requests[0].contains(&bad), "{requests:x?}");
        }
    }

    /// When the first piece is done, the start of the buffer may be folded. So it must not be read.
    #[test]
    fn failed_later_piece_is_reported_without_the_start() {
        const PIECE: usize = 64 << 10;
        let (access, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let args = [0, 2 * PIECE, access as usize, flags as usize, usize::MAX, 0];
        // SAFETY: the kernel chooses an address for the new mapping. Nothing uses its second half,
        // which becomes inaccessible.
        let start = unsafe {
            let start = system_call(libc::SYS_mmap, args).unwrap() as usize;
            let half = [start + PIECE, PIECE, libc::PROT_NONE as usize, 0, 0, 0];
            system_call(libc::SYS_mprotect, half).unwrap();
            start
        };
        let (_reader, writer) = std::io::pipe().unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&writer) as usize;
        // The pipe has room for all bytes.
        let room = [fd, libc::F_SETPIPE_SZ as usize, 4 * PIECE, 0, 0, 0];
        // SAFETY: the call touches no memory.
        unsafe { system_call(libc::SYS_fcntl, room) }.unwrap();
        let args = [fd, start, 2 * PIECE, 0, 0, 0];
        let (result, requests) = made_and_asked(libc::SYS_write as usize, &args);
        assert_eq!(result, PIECE as isize);
        assert!(requests.len() == 1 && requests[0].contains(&(start + PIECE)), "{requests:x?}");
        assert!(!requests[0].contains(&start), "{requests:x?}");
    }
}
