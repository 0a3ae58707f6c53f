//! What the program may have: its size, its share of the run's limit, and what happens past that.
use crate::diagnostics::{self, limit};
use crate::marks::state::ProgramState;
use crate::size::process_size;
use crate::size::share::{SizeLevel, SizeLook, SizeScale};
use alloc::sync::Arc;
use core::ops::ControlFlow;
use core::sync::atomic::Ordering::Relaxed;
use memfold_engine::config::{Config, OnFull};
use memfold_engine::pager::Pager;
use memfold_os::Errno;
use memfold_os::maps::{Smaps, SmapsDetails, Vma};
use memfold_os::thread::now_ns;
use memfold_run::member;

/// Without a limit, smaller processes are left alone.
const FOLDED_LEAST_BYTES: u64 = 16 << 20;

/// The program's account.
pub struct ProgramAccount {
    pager: Arc<Pager>,
    scale: SizeScale,
    /// Opened in the descriptor table of the engine's threads.
    smaps: Smaps,
    config: Config,
}

impl ProgramAccount {
    /// Opens the account of the calling process.
    pub fn new(
        pager: &Arc<Pager>,
        scale: SizeScale,
        smaps: Smaps,
        config: Config,
    ) -> ProgramAccount {
        ProgramAccount { pager: pager.clone(), scale, smaps, config }
    }

    /// Measures the size, and takes this process's share ([`SizeScale::look`]).
    pub fn look(
        &self,
        level: &mut SizeLevel,
        worked_ns: u64,
        is_managing: bool,
    ) -> Option<SizeLook> {
        self.scale.look(&self.pager, level, worked_ns, is_managing)
    }

    /// Returns whether the run has room for this process to have so many bytes
    /// ([`SizeScale::has_room`]).
    pub fn has_room(&self, level: &mut SizeLevel, most: u64) -> bool {
        self.scale.has_room(level, most)
    }

    /// Returns whether this is a child of fork that can't see its own size.
    pub fn is_blind(&self) -> bool {
        self.scale.is_blind()
    }

    /// Reopens the files in a thread with a new descriptor table. Without them, sizes stay as they
    /// were.
    pub fn reopen(&self) {
        let _ = self.scale.reopen();
        let _ = self.smaps.reopen();
    }

    /// Begins in a child of fork, before it has an engine of its own.
    pub fn begin_as_child(&self, level: &mut SizeLevel) {
        let _ = self.scale.begin_as_child(&self.pager, level);
        let _ = self.smaps.reopen();
    }

    /// Calls `each` with the kernel's mappings and their details.
    ///
    /// # Errors
    /// ENOENT without /proc.
    pub fn each_mapping(
        &self,
        each: impl FnMut(&Vma, &SmapsDetails) -> ControlFlow<()>,
    ) -> Result<(), Errno> {
        self.smaps.each(each)
    }

    /// Returns whether memory is folded that the program keeps from core dumps.
    pub fn folds_dont_dump(&self) -> bool {
        self.config.fold_dont_dump
    }

    /// Returns the size at which the program's memory comes under management, bytes.
    pub fn managed_from_bytes(&self) -> u64 {
        self.pager.limits().bound_bytes() / 100 * self.config.adopt_percent as u64
    }

    /// Returns whether only a slowdown was asked for, and no limit.
    pub fn is_unbounded(&self) -> bool {
        self.config.slowdown > 0 && !self.pager.limits().is_bounded()
    }

    /// Returns whether a slowdown was asked for that concerns a process of this size.
    pub fn is_weighed(&self, level: &SizeLevel, is_managing: bool) -> bool {
        let is_small = level.anonymous < FOLDED_LEAST_BYTES && !is_managing;
        self.config.slowdown > 0 && !is_small
    }

    /// Decides what the slowdown that was asked for leaves. Each time that memory begins to sink,
    /// all of it is due to be managed.
    pub fn weigh_slowdown(&self, state: &mut ProgramState, unmanaged: u64, is_managing: bool) {
        if !self.is_weighed(&state.level, is_managing) {
            return;
        }
        let unmanaged_bytes = if is_managing { 0 } else { unmanaged };
        state.is_due |= self.pager.gauges().weigh_slowdown(unmanaged_bytes);
    }

    /// Reports that the run's limit can't be kept, with the causes: once in a run, mostly by the
    /// process that can fold least. With `--on-full stop`, ends that process instead. Records the
    /// least limit that could be kept, as long as that rises.
    pub fn judge_limit(&self, state: &mut ProgramState) {
        // A child that has just been forked shares what can't be folded meanwhile, and mostly ends
        // soon. After it has ended, that can be folded once it is known what is still shared.
        let is_unknown = state.level.sharing.due_ns().is_some();
        let is_waiting = state.limit_report.due_ns().is_some();
        if is_unknown || !self.pager.gauges().take_past() && !is_waiting {
            return;
        }
        let Some(reach) = limit::reach(&self.pager) else {
            return state.limit_report.wait_no_more();
        };
        self.pager.stats().over_limit.fetch_add(1, Relaxed);
        reach.note();
        if self.config.on_full == OnFull::Stop {
            if reach.is_largest {
                diagnostics::die(format_args!("{}", limit::end(&self.pager, &self.smaps, &reach)));
            }
            return;
        }
        if !state.limit_report.takes_turn(reach.is_largest, now_ns()) {
            return;
        }
        if state.merges {
            diagnostics::warn(format_args!("{}", process_size::MERGES));
        }
        if member::report_limit() {
            diagnostics::warn(format_args!("{}", limit::report(&self.pager, &self.smaps, &reach)));
        }
    }

    /// Publishes the sums of a process that ends, or that no longer has an engine.
    pub fn publish_totals(&self) {
        member::note_totals();
        self.pager.stats().need_bytes.store(0, Relaxed);
        member::set_need(0);
    }
}
