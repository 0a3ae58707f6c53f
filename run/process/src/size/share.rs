//! The size of this process, and its share of what the whole run may use.
use crate::size::pace::LookPace;
use crate::size::process_size::{self, Rollup, SharedMemory, Statm};
use crate::size::sharing::{ProcessMoves, SharingWatch};
use core::sync::atomic::Ordering::Relaxed;
use memfold_engine::config::Config;
use memfold_engine::pager::{Pager, SharedLimit};
use memfold_os::Errno;
use memfold_os::thread::{cpu_ns, now_ns};
use memfold_os::units::PAGE_SHIFT;
use memfold_run::member;
use memfold_run::table::News;
use memfold_stats as stats;

/// The time between looks grows by one period for each this many other processes that share the
/// limit. A growing process looks as often as before.
const LOOK_OTHERS: u64 = 16;
/// A process that needs more than its share sends news if it needs so much more or less than when it
/// last did, bytes, and if so much time has passed, nanoseconds.
const SHORT_BYTES: u64 = 1 << 20;
const SHORT_NS: u64 = 20_000_000;

/// The charge of this process in its slot. Without a slot there is no charge.
pub struct OwnCharge;

impl SharedLimit for OwnCharge {
    fn charge(&self, bytes: u64, limit: bool) -> bool {
        member::own().is_none_or(|own| own.charge(bytes, limit))
    }

    fn settle(&self, bytes: u64) {
        if let Some(own) = member::own() {
            own.settle(bytes);
        }
    }
}

/// The result of the last look.
#[derive(Default)]
pub struct SizeLevel {
    /// Resident at the last look, bytes.
    pub anonymous: u64,
    /// The memory that it shares with others. A part of the resident memory counts in them.
    pub sharing: SharingWatch,
    /// When the next look is due.
    pub pace: LookPace,
    /// Number of other processes that need a part of the limit.
    company: u64,
    /// Bytes that were folded when a fork made this process.
    inherited_away: u64,
    /// Whether this child of fork is charged with all that it shares, so that it may write to it. If
    /// the run has too little for that, its memory counts where it is from the next measurement on.
    is_prepaid: bool,
    is_short: bool,
    /// What it needed when it last sent news that its share is too small, bytes, and when.
    short: Option<(u64, u64)>,
}

impl SizeLevel {
    /// Returns the part of the resident memory that counts in the processes that share it, bytes.
    pub fn counted_in_others(&self) -> u64 {
        if self.is_prepaid { 0 } else { self.sharing.others }
    }

    /// Returns whether this child of fork is charged with all that it shares.
    pub fn is_prepaid(&self) -> bool {
        self.is_prepaid
    }
}

/// The result of one look.
pub struct SizeLook {
    /// Resident at the look before, bytes.
    pub before: u64,
    /// Resident and not under management, bytes.
    pub unmanaged: u64,
    /// The factor by which looks become rarer if there are many processes.
    pub slower: u64,
}

/// Measures the process's size.
pub struct SizeScale {
    statm: Statm,
    /// `None` if the kernel has no such file.
    rollup: Option<Rollup>,
    config: Config,
}

impl SizeScale {
    /// Opens the scale for the calling process.
    ///
    /// # Errors
    /// ENOENT without /proc.
    pub fn open(config: Config) -> Result<SizeScale, Errno> {
        Ok(SizeScale { statm: Statm::open()?, rollup: Rollup::open(), config })
    }

    /// Returns whether this is a child of fork that can't see its own size.
    pub fn is_blind(&self) -> bool {
        self.statm.is_lost()
    }

    /// Reopens the files in a thread with a new descriptor table.
    ///
    /// # Errors
    /// The errors of [`SizeScale::open`].
    pub fn reopen(&self) -> Result<(), Errno> {
        self.rollup.iter().for_each(Rollup::reopen);
        self.statm.reopen()
    }

    /// Begins in a child of fork, before it has an engine of its own.
    ///
    /// # Errors
    /// The errors of [`SizeScale::open`].
    pub fn begin_as_child(&self, pager: &Pager, level: &mut SizeLevel) -> Result<(), Errno> {
        let is_open = self.reopen();
        level.anonymous = self.statm.anonymous_bytes().unwrap_or(level.anonymous);
        // Until the first measurement all memory counts as shared. Most children end or execute a
        // program before it.
        level.sharing.note_fork(now_ns(), Some(level.anonymous));
        // The CPU time of this process begins at 0.
        level.pace = LookPace::default();
        level.inherited_away = pager.gauges().away_bytes();
        // Without a bound no copy is charged, and each process counts its part.
        level.is_prepaid = pager.limits().is_bounded()
            && OwnCharge.charge(level.anonymous, pager.limits().is_limited());
        let others = pager.gauges().others_bytes();
        pager.gauges().update_others_bytes(others, level.counted_in_others());
        is_open
    }

    /// Measures the size, publishes it to the other processes, and takes this process's share.
    /// Returns `None` if the size is unknown. Before any memory is managed, it is unknown how much
    /// of it can be folded. `worked_ns` is the CPU time of the program's threads.
    pub fn look(
        &self,
        pager: &Pager,
        level: &mut SizeLevel,
        worked_ns: u64,
        is_managing: bool,
    ) -> Option<SizeLook> {
        let managed = pager.gauges().own_bytes() + pager.gauges().mapped_bytes();
        let anonymous = match self.statm.is_lost() {
            // Then the unmanaged memory is assumed to be as it was at the fork.
            true if pager.gauges().mapped_bytes() + pager.gauges().away_bytes() > 0 => {
                managed + pager.gauges().unmanaged_bytes()
            }
            true => process_size::peak_bytes(),
            false => self.statm.anonymous_bytes()?,
        };
        let unmanaged_bytes = anonymous.saturating_sub(managed);
        pager.gauges().set_unmanaged_bytes(unmanaged_bytes);
        pager.gauges().publish();
        let before = core::mem::replace(&mut level.anonymous, anonymous);
        let mut others = pager.gauges().others_bytes();
        if pager.fork().charges_copies() {
            level.sharing.others = level.sharing.others.min(others);
        }
        let is_measured = self.measure_shared(pager, level, worked_ns);
        if is_measured && is_managing && level.is_short && level.sharing.begin_paying() {
            // All copies stay charged until each is noticed. Where that fails, they are measured.
            let _ = pager.fork().charge_copies_from_now_on();
            others = pager.gauges().others_bytes();
            level.sharing.others = self.shared_memory().others_bytes;
            level.is_prepaid = false;
        }
        pager.gauges().update_others_bytes(others, level.counted_in_others());
        let need = anonymous.saturating_sub(level.counted_in_others())
            + pager.gauges().away_bytes().saturating_sub(level.inherited_away);
        // An idle process needs only what it can't fold.
        let need = if pager.gauges().is_idle() { 0 } else { need };
        pager.stats().need_bytes.store(need, Relaxed);
        pager.stats().shared_bytes.store(level.sharing.others, Relaxed);
        member::set_need(need);
        let stays = if is_managing { pager.gauges().least_resident_bytes() } else { 0 };
        // Pages of the pool are shared as others are.
        let (stored_bytes, others) = (pager.limits().stored_bytes(), level.counted_in_others());
        let least = stays.saturating_sub(others);
        member::set_least(least, stored_bytes.saturating_sub(others.saturating_sub(stays)));
        member::note_totals();
        self.take_share(pager, level, need);
        Some(SizeLook {
            before,
            unmanaged: unmanaged_bytes,
            slower: 1 + level.company / LOOK_OTHERS,
        })
    }

    /// Takes this process's share of what the whole run may use.
    fn take_share(&self, pager: &Pager, level: &mut SizeLevel, need: u64) {
        let (limit, resident) = self.shares(level, need);
        let (most, processes) = (self.bounds(), level.company + 1);
        pager.gauges().set_bounds(limit, resident, most.0.min(most.1) / processes);
        let is_short = need > limit.min(resident);
        level.is_short = is_short;
        if is_short {
            level.sharing.ask();
        }
        if !is_short || level.company == 0 {
            level.short = None;
            return;
        }
        // Processes that sleep have the rest, and don't know yet that they are to give some of it.
        let now = now_ns();
        let is_known = |(bytes, at_ns): (u64, u64)| {
            bytes.abs_diff(need) < SHORT_BYTES || now.saturating_sub(at_ns) < SHORT_NS
        };
        if !level.short.is_some_and(is_known) {
            level.short = Some((need, now));
            member::send(News::BOUNDS);
        }
    }

    /// Returns the run's bounds in bytes, as (limit, resident); `u64::MAX` for none.
    fn bounds(&self) -> (u64, u64) {
        let or_none = |bound: Option<u64>| bound.unwrap_or(u64::MAX);
        let bounds = || (or_none(self.config.limit_bytes), or_none(self.config.resident_bytes));
        member::bounds().unwrap_or_else(bounds)
    }

    /// Returns this process's shares of the bounds.
    fn shares(&self, level: &mut SizeLevel, need: u64) -> (u64, u64) {
        let mut of = |bound: u64, is_limit: bool| {
            if bound == u64::MAX {
                return bound;
            }
            let (own, company) = member::share_of(bound, need, is_limit);
            level.company = company as u64;
            own
        };
        let (limit, resident) = self.bounds();
        (of(limit, true), of(resident, false))
    }

    /// Returns whether this process may grow to `most` bytes before its next look. Publishes this
    /// need to the other processes at once. Otherwise processes that begin to grow at the same time
    /// would each find room for all of it.
    pub fn has_room(&self, level: &mut SizeLevel, most: u64) -> bool {
        let need = most.saturating_sub(level.counted_in_others());
        member::set_need(need);
        let (limit, resident) = self.shares(level, need);
        need <= limit.min(resident)
    }

    /// Measures the memory that this process shares with others of the run, if that is due. Returns
    /// whether it was.
    fn measure_shared(&self, pager: &Pager, level: &mut SizeLevel, worked_ns: u64) -> bool {
        if !level.sharing.is_sharing() {
            return false;
        }
        level.sharing.note_forks(now_ns(), member::forks());
        let loads = pager.stats().zswpin.load(Relaxed) + pager.stats().pswpin.load(Relaxed);
        let now = ProcessMoves {
            now_ns: now_ns(),
            worked_ns,
            // Copies that were charged have changed the part already.
            moved_bytes: match pager.fork().charges_copies() {
                true => 0,
                false => process_size::faulted_bytes() + (loads << PAGE_SHIFT),
            },
            anonymous: level.anonymous,
        };
        let mut is_measured = false;
        if level.sharing.is_due(&now) {
            let begin = cpu_ns();
            let sharing = self.shared_memory();
            let cost_ns = cpu_ns() - begin;
            stats::add(&pager.stats().sharing_measured, 1);
            if level.sharing.note(&now, sharing.bytes, sharing.others_bytes, cost_ns) {
                member::send(News::SHARING);
            }
            member::set_shares_memory(level.sharing.is_sharing());
            is_measured = true;
        }
        let SharingWatch { bytes, others, .. } = level.sharing;
        if !level.sharing.is_sharing() {
            // No look comes here again before the next fork.
            pager.fork().note_private();
        } else if level.sharing.is_counted() {
            pager.fork().note_shared(bytes, bytes - others, member::sharers());
        } else {
            pager.fork().note_uncounted();
        }
        if is_measured {
            pager.fork().retry_shared();
        }
        is_measured
    }

    /// Measures the memory that this process shares with others of the run; none without its file.
    fn shared_memory(&self) -> SharedMemory {
        self.rollup.as_ref().map_or_else(SharedMemory::default, Rollup::shared_memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{Calls, LIMIT, Room, each_paging_alone};

    #[test]
    fn program_of_no_run_has_all_of_its_limit() {
        each_paging_alone(|program| {
            let (pager, account, mut level) =
                (program.pager(), program.account(), SizeLevel::default());
            let limit = LIMIT;
            let look = account.look(&mut level, 0, true).unwrap();
            assert_eq!((look.before, look.slower), (0, 1));
            assert!(level.anonymous >= look.unmanaged && level.anonymous > 0);
            assert_eq!(pager.limits().bound_bytes(), limit);
            assert!(
                account.has_room(&mut level, limit) && !account.has_room(&mut level, limit + 1)
            );
        });
    }

    #[test]
    fn folded_memory_is_needed_as_if_it_were_not() {
        each_paging_alone(|program| {
            let (calls, room) = (Calls(program), Room::new(256));
            let (all, mut level) = (room.pages(0..256), SizeLevel::default());
            calls.map(&all);
            calls.fold(&all);
            program.account().look(&mut level, 0, true).unwrap();
            let need = || program.pager().stats().need_bytes.load(Relaxed);
            assert_eq!(need(), level.anonymous + all.len() as u64);
            // A child of fork has a part of this memory from its parent.
            level.inherited_away = all.len() as u64;
            program.account().look(&mut level, 0, true).unwrap();
            assert_eq!(need(), level.anonymous);
        });
    }

    #[test]
    fn shared_memory_counts_where_others_have_it() {
        each_paging_alone(|program| {
            let limit = LIMIT;
            let mut level = SizeLevel::default();
            level.sharing.note_fork(u64::MAX / 2, Some(1000));
            program.account().look(&mut level, 0, true).unwrap();
            assert_eq!(program.pager().stats().need_bytes.load(Relaxed), level.anonymous - 1000);
            assert_eq!(program.pager().limits().bound_bytes(), limit + 1000);
            assert!(program.account().has_room(&mut level, limit + 1000));
        });
    }
}
