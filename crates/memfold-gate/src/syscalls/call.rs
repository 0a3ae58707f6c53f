//! Serves a call that has come as SIGSYS, as its row says.
use crate::actions::{PROTECTED, UNBLOCKABLE};
use crate::call_state::CallOutcome;
use crate::keeper::BadAddress;
use crate::record::GateThread;
use crate::signals;
use crate::syscalls::plain::{CallingThread, raw};
use crate::syscalls::row::{CallRow, MaskUse, ProgramCall, ServedBy};
use crate::touch::read;
use core::sync::atomic::Ordering::SeqCst;

/// The gate's copy of a set of signals. `nested` is its address and size, for calls that want
/// those.
#[derive(Default)]
struct OwnSignalSet {
    set: u64,
    nested: [usize; 2],
}

impl ProgramCall<'_> {
    /// Serves the call.
    pub fn serve(&mut self) -> CallOutcome {
        CallOutcome::of(match self.row().served(&self.args) {
            ServedBy::Plain | ServedBy::Trapped | ServedBy::Unknown => self.wait(),
            ServedBy::Masked(at, how) => self.wait_masked(at as usize, how),
            ServedBy::Change => self.change(),
            ServedBy::Special(handler) => handler.0(self),
            ServedBy::InContext(handler) => {
                handler.0(self);
                return CallOutcome::InContext;
            }
            ServedBy::ByCommand(_) => unreachable!("the command has decided"),
        })
    }

    /// Returns its row.
    pub fn row(&self) -> &'static CallRow {
        self.rows.look_up(self.nr)
    }

    /// Returns its thread.
    pub fn caller(&self) -> CallingThread<'static> {
        CallingThread { keeper: self.keeper, record: self.record, rows: self.rows }
    }

    /// Makes the call without a hold.
    pub fn raw(&self) -> isize {
        raw(self.nr, &self.args)
    }

    /// Whether the program has one thread, the caller.
    pub fn is_alone(&self) -> bool {
        let mut is_alone = true;
        self.record.each_of_process(|each| is_alone &= core::ptr::eq(each, self.record));
        is_alone
    }

    /// Has the keeper change its areas with the call.
    fn change(&mut self) -> isize {
        let (keeper, nr, args) = (self.keeper, self.nr, self.args);
        self.caller().held(self.row(), &args, || {
            signals::block_all();
            keeper.change(nr, &args, &mut |args| raw(nr, args))
        })
    }

    /// Makes a call on which the thread may wait.
    pub fn wait(&mut self) -> isize {
        self.record.waiting_mask.set(None);
        self.caller().plain(self.row(), self.nr, &self.args)
    }

    /// Makes a call that takes a set of signals, which argument `at` points to. The kernel may have the
    /// gate's own signals blocked while it waits: what interrupts the call is pending, which raises none.
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
            // To those that it doesn't block it is open anyway.
            MaskUse::Blocked | MaskUse::BlockedNested => {
                let mask = own.set & !UNBLOCKABLE;
                (awaits, blocks) = (!mask & record.blocked.get(), Some(mask));
            }
            MaskUse::Awaited => awaits = own.set,
            MaskUse::Read => signals::note_read(own.set),
        }
        record.awaits.set(awaits & PROTECTED);
        record.waiting_mask.set(blocks);
        let made = self.caller().plain(self.row(), self.nr, &args);
        record.awaits.set(0);
        if how == MaskUse::Awaited && made > 0 && args[1] != 0 {
            signals::tell_as_sent(args[1]);
        }
        end_wait(record, made);
        made
    }
}

/// Ends the mask of a call, unless a signal has interrupted it.
fn end_wait(record: &GateThread, made: isize) {
    let interrupted = made == -(libc::EINTR as isize);
    if !interrupted || record.pending.load(SeqCst) == 0 {
        record.waiting_mask.set(None);
    }
}

impl OwnSignalSet {
    /// Has `argument` point to a copy of the set. `false`: there is no set.
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
