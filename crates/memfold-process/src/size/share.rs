//! How large this process is, and its share of what the whole run may use.
use crate::size::process_size::{self, Statm};
use core::sync::atomic::Ordering::Relaxed;
use memfold::config::Config;
use memfold::pager::{Pager, SharedLimit};
use memfold_os::Errno;
use memfold_os::thread::{cpu_ns, now_ns};
use memfold_run::member;

/// Of many processes that share a limit each looks less often, but for one that grows: with each so
/// many others by so much.
const LOOK_OTHERS: i64 = 16;
/// If others have less than this of the memory of a process, it shares none.
const SHARED_LEAST_BYTES: u64 = 1 << 20;
/// Time between two measurements of it: at least this, and so many times what the first takes of a
/// CPU.
const MEASURE_NS: u64 = 10_000_000;
const MEASURE_SHARE: u64 = 10;

/// What this process is charged with, in its slot; nothing while it has none.
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

/// What was seen last.
#[derive(Default)]
pub struct SizeLevel {
    /// Resident at the last look, bytes.
    pub anonymous: u64,
    /// A fork has made this process or a child of it, and they may still share memory.
    pub sharing: bool,
    /// Other processes that need a part of the limit.
    company: i64,
    /// Of what is resident here, the part that counts in the processes that it is shared with,
    /// bytes; and when to measure again.
    others: u64,
    measure_at_ns: u64,
    /// What was folded when a fork made this process, bytes.
    inherited_away: u64,
}

/// One look.
pub struct SizeLook {
    /// Resident at the look before, bytes.
    pub before: u64,
    /// Resident and not under management, bytes.
    pub unmanaged: u64,
    /// What makes looks rarer where there are many processes.
    pub slower: i64,
}

/// Looks at the process's size.
pub struct SizeScale {
    statm: Statm,
    config: Config,
}

impl SizeScale {
    /// For the calling process.
    ///
    /// # Errors
    /// ENOENT without /proc.
    pub fn open(config: Config) -> Result<SizeScale, Errno> {
        Ok(SizeScale { statm: Statm::open()?, config })
    }

    /// Whether this is a child of fork that can't see its own size.
    pub fn is_blind(&self) -> bool {
        self.statm.is_lost()
    }

    /// By a thread with a new table of descriptors.
    ///
    /// # Errors
    /// As [`SizeScale::open`].
    pub fn reopen(&self) -> Result<(), Errno> {
        self.statm.reopen()
    }

    /// In a child of fork, before it has an engine of its own.
    ///
    /// # Errors
    /// As [`SizeScale::open`].
    pub fn begin_as_child(&self, pager: &Pager, level: &mut SizeLevel) -> Result<(), Errno> {
        // Until the first measurement all counts as shared. Most children end sooner, or execute
        // something.
        (level.sharing, level.measure_at_ns) = (true, now_ns() + MEASURE_NS);
        level.others = level.anonymous.min(pager.limits().bound_bytes());
        level.inherited_away = pager.gauges().away_bytes();
        self.reopen()
    }

    /// Measures, tells the others, and takes this process's share. `None` if nothing can be known.
    /// Before anything is managed nobody knows how much of it can be folded.
    pub fn look(
        &self,
        pager: &Pager,
        level: &mut SizeLevel,
        is_managing: bool,
    ) -> Option<SizeLook> {
        let managed = pager.gauges().own_bytes() + pager.gauges().mapped_bytes();
        let anonymous = match self.statm.is_lost() {
            // What isn't managed is as it was at the fork then, as far as anybody knows.
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
        measure_shared(pager, level);
        let need = anonymous.saturating_sub(level.others)
            + pager.gauges().away_bytes().saturating_sub(level.inherited_away);
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

    /// The run's bounds (limit, resident), bytes; `u64::MAX` for none.
    fn bounds(&self) -> (u64, u64) {
        let or_none = |bound: Option<u64>| bound.unwrap_or(u64::MAX);
        let given = || (or_none(self.config.limit_bytes), or_none(self.config.resident_bytes));
        member::bounds().unwrap_or_else(given)
    }

    /// This process's shares of them.
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

    /// Whether this process may come to have `most` bytes before its next look. The others are told
    /// at once that it needs them: processes that begin to grow at the same time would each find room
    /// for all of it otherwise.
    pub fn has_room(&self, level: &mut SizeLevel, most: u64) -> bool {
        let need = most.saturating_sub(level.others);
        member::set_need(need);
        let (limit, resident) = self.shares(level, need);
        most <= limit.min(resident)
    }
}

/// What processes of a run share counts in each with its part, so that the sum is right: measured
/// from time to time, as long as there is any, because whoever writes to it gets a page of its own
/// that the engine knows nothing of.
fn measure_shared(pager: &Pager, level: &mut SizeLevel) {
    let now = now_ns();
    if !level.sharing || now < level.measure_at_ns {
        return;
    }
    let begin = cpu_ns();
    let shared = process_size::shared_memory();
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
            // A child of fork has a part of it from its parent.
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
