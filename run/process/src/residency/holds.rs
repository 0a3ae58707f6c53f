//! Holds of system calls: what a call names is resident until the call returns.
use crate::diagnostics;
use crate::engine;
use crate::program::{ManagedProgram, ProgramMemory, ProgramThreads, get, lost};
use core::ops::Range;
use memfold_engine::known::TOP;
use memfold_engine::pager::Pager;
use memfold_gate::{BadAddress, KeeperHold, Names, NoHoldRoom, child, touch};
use memfold_os::thread::bare;
use memfold_os::units::PAGE_SIZE;

/// A piece of a call may hold the limit divided by this, but no less than `PIECE_LEAST` and no more
/// than `PIECE_MOST` bytes.
const PIECE_SHARE: u64 = 64;
const PIECE_LEAST: u64 = 128 << 10;
const PIECE_MOST: u64 = 4 << 20;
/// When more than the limit divided by this is held, pieces have `PIECE_SMALL` bytes.
const HELD_SHARE: u64 = 8;
const PIECE_SMALL: usize = 64 << 10;
/// After this many pages of a range that can't be touched, the rest of the range is skipped. The
/// kernel gets no further in it.
const BAD_MAX: usize = 8;

/// Holds what system calls name.
#[derive(Copy, Clone)]
pub struct CallHolds<'a> {
    pager: &'a Pager,
    memory: &'a ProgramMemory,
    threads: &'a ProgramThreads,
}

impl CallHolds<'_> {
    /// Returns the walk over the parts of `program`.
    pub fn of(program: &ManagedProgram) -> CallHolds<'_> {
        CallHolds { pager: program.pager(), memory: program.memory(), threads: program.threads() }
    }

    /// Makes the managed part of the ranges resident, and keeps it so (`HoldKeeper::hold`).
    ///
    /// # Errors
    /// There is no memory to note the hold.
    pub fn hold(
        &self,
        names: Names,
        thread: usize,
        touch: fn(usize, bool) -> Result<(), BadAddress>,
    ) -> Result<Option<KeeperHold>, NoHoldRoom> {
        let holds = self.pager.holds();
        let is_child = child().is_some();
        if is_child {
            let mut count = 0;
            names(&mut |_| count += 1);
            if !holds.has_room(thread, count, false) {
                self.threads.try_on_behalf(|| holds.has_room(thread, count, true));
            }
        }
        let mut holding = holds.begin(thread);
        names(&mut |span| {
            let range = span.start..span.start + span.len;
            if self.memory.concerns(&range) {
                holding.push(range, span.write);
            }
        });
        let Some(hold) = holding.publish().map_err(|_| NoHoldRoom)? else { return Ok(None) };
        if is_child {
            // An evictor that has ended with its process never unmarks its pages.
            holds.wait_by_looking(hold, || {
                if bare::life() == 0 {
                    engine::inherit();
                }
                get().is_none()
            });
        } else {
            holds.wait(hold);
        }
        if self.memory.is_managing() {
            self.pager.gauges().note_held();
            holds.each(hold, |pages, write| self.touch_all(pages, write, touch));
        }
        Ok(Some(KeeperHold(hold.0)))
    }

    /// Returns the most bytes that a piece of a call should hold.
    pub fn piece_bytes(&self) -> usize {
        if !self.memory.is_managing() {
            return usize::MAX;
        }
        let bound = self.pager.limits().bound_bytes();
        if self.pager.holds().held_bytes() > bound / HELD_SHARE {
            return PIECE_SMALL;
        }
        (bound / PIECE_SHARE).clamp(PIECE_LEAST, PIECE_MOST) as usize
    }

    fn touch_all(
        &self,
        pages: Range<usize>,
        write: bool,
        touch: fn(usize, bool) -> Result<(), BadAddress>,
    ) {
        let (mut at, mut bad) = (pages.start, 0);
        while at < pages.end.min(TOP) && bad < BAD_MAX {
            if !self.memory.known().is_set(&(at..at + 1)) {
                at += PAGE_SIZE;
                continue;
            }
            let run = self.threads.try_on_behalf(|| self.pager.mappings().run_at(at));
            // A child of vfork that has lost the engine touches all that may be folded.
            let (is_managed, end) = run.unwrap_or((true, at + PAGE_SIZE));
            let end = end.min(pages.end).min(TOP);
            // Unmanaged memory is left to the kernel: a write here would change a file, or end
            // sharing. Only where memory is hidden, unmanaged memory may be hidden too. And unmanaged
            // memory may be registered.
            let may_be_missing = self.memory.may_miss_unmanaged();
            if is_managed || may_be_missing {
                let mut run = (at..end).step_by(PAGE_SIZE);
                let touch_page = |page: usize| touch(page, write && is_managed);
                bad += run
                    .by_ref()
                    .filter(|page| touch_page(*page).is_err())
                    .take(BAD_MAX - bad)
                    .count();
            }
            at = end;
        }
    }

    /// Checks a call that has failed although all that its row names was held
    /// (`HoldKeeper::refused`).
    pub fn refused(&self, nr: usize, name: &str, words: &[usize]) {
        let is_missing = |word: &&usize| {
            let page = **word & !(PAGE_SIZE - 1);
            page < TOP
                && self.memory.known().is_set(&(page..page + PAGE_SIZE))
                && self.pager.mappings().touches(&(page..page + PAGE_SIZE))
                && !self.memory.pagemap().is_populated(page)
                // If the program itself may not write there, the kernel is right to refuse.
                && touch(page, true).is_ok()
        };
        if let Some(word) = words.iter().find(is_missing) {
            memfold_stats::add(&self.pager.stats().calls_refused, 1);
            diagnostics::warn(format_args!(
                "warning: System call {nr} ({name}) failed because of folded memory at {word:#x}. This is a bug of memfold; please report it"
            ));
        }
    }
}

/// Touches what a call names, in a child of vfork that has lost the engine. So it ends with a message
/// if a part is folded.
pub fn touch_lost(names: Names, touch: fn(usize, bool) -> Result<(), BadAddress>) {
    let Some(program) = lost() else { return };
    names(&mut |span| {
        let pages = span.start & !(PAGE_SIZE - 1)..span.start.saturating_add(span.len).min(TOP);
        let known = pages
            .step_by(PAGE_SIZE)
            .filter(|page| program.memory().known().is_set(&(*page..page + 1)));
        let is_bad = |page: &usize| touch(*page, span.write).is_err();
        let _ = known.filter(is_bad).take(BAD_MAX).count();
    });
}
