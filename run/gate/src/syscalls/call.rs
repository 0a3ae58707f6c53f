//! Serves a call that has trapped, as its row says.
use crate::actions::{PROTECTED, UNBLOCKABLE};
use crate::call_state::CallOutcome;
use crate::keeper::BadAddress;
use crate::record::GateThread;
use crate::signals;
use crate::syscalls::plain::raw;
use crate::syscalls::row::{CallRow, CallingThread, MaskUse, ProgramCall, ServedBy};
use crate::touch::read;
use core::sync::atomic::Ordering::SeqCst;

/// The gate's copy of a set of signals. `nested` is its address and size, for calls that take
/// those.
#[derive(Default)]
struct OwnSignalSet {
    set: u64,
    nested: [usize; 2],
}

impl ProgramCall<'_> {
    /// Serves the call, and returns how it ended.
    pub fn serve(&mut self) -> CallOutcome {
        CallOutcome::of(match self.row().served(&self.args) {
            ServedBy::Plain | ServedBy::Trapped | ServedBy::Unknown => self.wait(),
            ServedBy::Masked(at, how) => self.wait_masked(at as usize, how),
            ServedBy::Change => self.change(),
            ServedBy::Special(handler) => handler.0(self),
            ServedBy::Direct(handler) => handler.0(self.caller(), self.nr, &self.args),
            ServedBy::InContext(handler) => {
                handler.0(self);
                return CallOutcome::InContext;
            }
            ServedBy::ByCommand(_) => unreachable!("the command has decided"),
        })
    }

    /// Returns the call's row.
    pub fn row(&self) -> &'static CallRow {
        self.rows.look_up(self.nr)
    }

    /// Returns the call's thread.
    pub fn caller(&self) -> CallingThread<'static> {
        CallingThread { keeper: self.keeper, record: self.record, rows: self.rows }
    }

    /// Makes the call without a hold, and returns its result.
    pub fn raw(&self) -> isize {
        raw(self.nr, &self.args)
    }

    /// Returns whether the caller is the only thread of its process.
    pub fn is_alone(&self) -> bool {
        let mut is_alone = true;
        self.record.each_of_process(|each| is_alone &= core::ptr::eq(each, self.record));
        is_alone
    }

    /// Makes the call by [`PageKeeper::change`](crate::keeper::PageKeeper::change), which changes
    /// the keeper's areas with it.
    fn change(&mut self) -> isize {
        let (keeper, nr, args) = (self.keeper, self.nr, self.args);
        self.caller().held(self.row(), &args, || {
            signals::block_all();
            keeper.pages.change(nr, &args, &mut |args| raw(nr, args))
        })
    }

    /// Makes a call on which the thread may wait.
    pub fn wait(&mut self) -> isize {
        self.record.waiting_mask.set(None);
        self.caller().plain(self.row(), self.nr, &self.args)
    }

    /// Makes a call that takes a set of signals, to which argument `at` points. The kernel may have
    /// the gate's own signals blocked while the call waits. A signal that interrupts the call only
    /// becomes pending, which raises none of them.
    fn wait_masked(&mut self, at: usize, how: MaskUse) -> isize {
        let (mut own, mut args) = (OwnSignalSet::default(), self.args);
        let has_set = match own.take(&mut args[at], how == MaskUse::BlockedNested) {
            Ok(has_set) => has_set,
            Err(BadAddress) => return -(libc::EFAULT as isize),
        };
        let record = self.record;
        let (mut awaits, mut blocks) = (0, None);
        match how {
            _ if !has_set => {}
            // The thread takes signals that it doesn't block anyway, so only blocked ones are
            // noted.
            MaskUse::Blocked | MaskUse::BlockedNested => {
                let mask = own.set & !UNBLOCKABLE;
                (awaits, blocks) = (!mask & record.blocked.get(), Some(mask));
            }
            MaskUse::Awaited => awaits = own.set,
            MaskUse::Read => signals::note_read(own.set),
        }
        record.awaits.set(awaits & PROTECTED);
        record.waiting_mask.set(blocks);
        let result = self.caller().plain(self.row(), self.nr, &args);
        record.awaits.set(0);
        if how == MaskUse::Awaited && result > 0 && args[1] != 0 {
            signals::tell_as_sent(args[1]);
        }
        end_wait(record, result);
        result
    }
}

/// Ends the mask of a call, unless a pending signal has interrupted the call.
fn end_wait(record: &GateThread, made: isize) {
    let is_interrupted = made == -(libc::EINTR as isize);
    if !is_interrupted || record.pending.load(SeqCst) == 0 {
        record.waiting_mask.set(None);
    }
}

impl OwnSignalSet {
    /// Makes `argument` point to a copy of the set. Returns `false` if there is no set.
    ///
    /// # Errors
    /// The set can't be read.
    fn take(&mut self, argument: &mut usize, is_nested: bool) -> Result<bool, BadAddress> {
        if *argument == 0 {
            return Ok(false);
        }
        if !is_nested {
            self.set = read::<u64>(*argument)?;
            *argument = &raw const self.set as usize;
            return Ok(true);
        }
        self.nested = read::<[usize; 2]>(*argument)?;
        *argument = self.nested.as_ptr() as usize;
        if self.nested[0] == 0 {
            return Ok(false);
        }
        self.set = read::<u64>(self.nested[0])?;
        self.nested[0] = &raw const self.set as usize;
        Ok(true)
    }
}
