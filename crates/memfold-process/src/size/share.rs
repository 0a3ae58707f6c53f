//! The size of this process, and its share of what the whole run may use.
use crate::size::process_size::{self, Rollup, Statm};
use core::sync::atomic::Ordering::Relaxed;
use memfold::config::Config;
use memfold::pager::{Pager, SharedLimit};
use memfold_os::Errno;
use memfold_os::thread::{cpu_ns, now_ns, process_cpu_ns};
use memfold_run::member;

/// The time between looks grows by one period for each this many other processes that share the
/// limit. A growing process looks as often as before.
const LOOK_OTHERS: i64 = 16;
/// A process shares no memory if others have less than this of it.
const SHARED_LEAST_BYTES: u64 = 1 << 20;
/// Time between two measurements of shared memory, at least. It is also at least `MEASURE_SHARE`
/// times the CPU time of the last measurement.
const MEASURE_NS: u64 = 10_000_000;
const MEASURE_SHARE: u64 = 10;

/// A process has hardly worked between two looks if it took less CPU time than this, nanoseconds.
const QUIET_NS: u64 = 300_000;
/// Most looks that are skipped in a row.
const SKIPPED_MOST: u32 = 9;

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
    /// Whether this process may share memory with others, because a fork has made it or a child of
    /// it.
    pub sharing: bool,
    /// Number of other processes that need a part of the limit.
    company: i64,
    /// The part of the resident memory that counts in the processes that share it, bytes.
    /// `measure_at_ns` is when to measure again.
    others: u64,
    measure_at_ns: u64,
    /// Bytes that were folded when a fork made this process.
    inherited_away: u64,
    /// CPU time of the process at the last look that wasn't skipped, nanoseconds, and the number of
    /// looks skipped since.
    worked_ns: u64,
    skipped: u32,
}

impl SizeLevel {
    /// Returns whether a look can be skipped, because the process has hardly worked since the last
    /// one. After some looks in a row none is. While the process shares memory, none is either:
    /// shared memory must be measured often, so that it isn't folded where that would take more.
    pub fn is_quiet(&mut self) -> bool {
        let worked = process_cpu_ns();
        let is_quiet = worked.saturating_sub(self.worked_ns) < QUIET_NS && !self.sharing;
        if is_quiet && self.skipped < SKIPPED_MOST {
            self.skipped += 1;
            return true;
        }
        (self.worked_ns, self.skipped) = (worked, 0);
        false
    }
}

/// The result of one look.
pub struct SizeLook {
    /// Resident at the look before, bytes.
    pub before: u64,
    /// Resident and not under management, bytes.
    pub unmanaged: u64,
    /// The factor by which looks become rarer if there are many processes.
    pub slower: i64,
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
        // Until the first measurement all memory counts as shared. Most children end or execute a
        // program before it.
        (level.sharing, level.measure_at_ns) = (true, now_ns() + MEASURE_NS);
        level.others = level.anonymous.min(pager.limits().bound_bytes());
        level.inherited_away = pager.gauges().away_bytes();
        self.reopen()
    }

    /// Measures the size, publishes it to the other processes, and takes this process's share.
    /// Returns `None` if the size is unknown. Before any memory is managed, it is unknown how much
    /// of it can be folded.
    pub fn look(
        &self,
        pager: &Pager,
        level: &mut SizeLevel,
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
        let unmanaged = anonymous.saturating_sub(managed);
        pager.gauges().set_unmanaged_bytes(unmanaged);
        pager.gauges().publish();
        let before = core::mem::replace(&mut level.anonymous, anonymous);
        match &self.rollup {
            Some(rollup) => measure_shared(rollup, pager, level),
            None => (level.sharing, level.others) = (false, 0),
        }
        let need = anonymous.saturating_sub(level.others)
            + pager.gauges().away_bytes().saturating_sub(level.inherited_away);
        // An idle process needs only what it can't fold.
        let need = if pager.gauges().is_idle() { 0 } else { need };
        pager.stats().need_bytes.store(need, Relaxed);
        pager.stats().shared_bytes.store(level.others, Relaxed);
        member::set_need(need);
        let stays = if is_managing { pager.gauges().least_resident_bytes() } else { 0 };
        let least = stays.saturating_sub(level.others);
        member::set_least(least, pager.limits().stored_bytes());
        member::note_totals();
        self.take_share(pager, level, need);
        Some(SizeLook { before, unmanaged, slower: 1 + level.company / LOOK_OTHERS })
    }

    /// Takes this process's share of what the whole run may use.
    fn take_share(&self, pager: &Pager, level: &mut SizeLevel, need: u64) {
        let (limit, resident) = self.shares(level, need);
        let (most, processes) = (self.bounds(), level.company as u64 + 1);
        pager.gauges().set_bounds(limit, resident, most.0.min(most.1) / processes);
    }

    /// Returns the run's bounds in bytes, as (limit, resident); `u64::MAX` for none.
    fn bounds(&self) -> (u64, u64) {
        let or_none = |bound: Option<u64>| bound.unwrap_or(u64::MAX);
        let given = || (or_none(self.config.limit_bytes), or_none(self.config.resident_bytes));
        member::bounds().unwrap_or_else(given)
    }

    /// Returns this process's shares of the bounds.
    fn shares(&self, level: &mut SizeLevel, need: u64) -> (u64, u64) {
        let mut of = |bound: u64, is_limit: bool| {
            if bound == u64::MAX {
                return bound;
            }
            let (own, company) = member::share_of(bound, need, is_limit);
            level.company = company as i64;
            own.saturating_add(level.others)
        };
        let (limit, resident) = self.bounds();
        (of(limit, true), of(resident, false))
    }

    /// Returns whether this process may grow to `most` bytes before its next look. Publishes this
    /// need to the other processes at once. Otherwise processes that begin to grow at the same time
    /// would each find room for all of it.
    pub fn has_room(&self, level: &mut SizeLevel, most: u64) -> bool {
        let need = most.saturating_sub(level.others);
        member::set_need(need);
        let (limit, resident) = self.shares(level, need);
        most <= limit.min(resident)
    }
}

/// Measures the memory that this process shares with others of the run. Each process counts only
/// its part, so that the sum is right. It is measured from time to time while there is any, because
/// a write to shared memory makes a private page that the engine does not see.
fn measure_shared(rollup: &Rollup, pager: &Pager, level: &mut SizeLevel) {
    let now = now_ns();
    if !level.sharing || now < level.measure_at_ns {
        return;
    }
    let begin = cpu_ns();
    let shared = rollup.shared_memory();
    level.sharing = shared.others_bytes >= SHARED_LEAST_BYTES;
    level.others = if level.sharing { shared.others_bytes } else { 0 };
    level.measure_at_ns = now + MEASURE_NS.max((cpu_ns() - begin) * MEASURE_SHARE);
    if level.sharing {
        pager.fork().note_shared(shared.bytes, shared.bytes - shared.others_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{Calls, Room, each_paging_alone};

    #[test]
    fn program_of_no_run_has_all_of_its_limit() {
        each_paging_alone(|program| {
            let (pager, scale, mut level) = (&program.pager, &program.scale, SizeLevel::default());
            let limit = program.config.limit_bytes.unwrap();
            let seen = scale.look(pager, &mut level, true).unwrap();
            assert_eq!((seen.before, seen.slower), (0, 1));
            assert!(level.anonymous >= seen.unmanaged && level.anonymous > 0);
            assert_eq!(pager.limits().bound_bytes(), limit);
            assert!(scale.has_room(&mut level, limit) && !scale.has_room(&mut level, limit + 1));
        });
    }

    #[test]
    fn folded_memory_is_needed_as_if_it_were_not() {
        each_paging_alone(|program| {
            let (calls, room) = (Calls(program), Room::new(256));
            let (all, mut level) = (room.pages(0..256), SizeLevel::default());
            calls.map(&all);
            calls.fold(&all);
            program.scale.look(&program.pager, &mut level, true).unwrap();
            let need = || program.pager.stats().need_bytes.load(Relaxed);
            assert_eq!(need(), level.anonymous + all.len() as u64);
            // A child of fork has a part of this memory from its parent.
            level.inherited_away = all.len() as u64;
            program.scale.look(&program.pager, &mut level, true).unwrap();
            assert_eq!(need(), level.anonymous);
        });
    }

    #[test]
    fn shared_memory_counts_where_others_have_it() {
        each_paging_alone(|program| {
            let limit = program.config.limit_bytes.unwrap();
            let mut level = SizeLevel { others: 1000, ..SizeLevel::default() };
            program.scale.look(&program.pager, &mut level, true).unwrap();
            assert_eq!(program.pager.stats().need_bytes.load(Relaxed), level.anonymous - 1000);
            assert_eq!(program.pager.limits().bound_bytes(), limit + 1000);
            assert!(program.scale.has_room(&mut level, limit + 1000));
        });
    }
}
