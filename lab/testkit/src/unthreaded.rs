//! An engine without threads over the process's real memory. The test runs the fault before each
//! touch, and does the work of the threads.
use memfold_engine::Delivery;
use memfold_engine::config::{Config, WORKABLE_MIN_BYTES};
use memfold_engine::pager::{Pager, PagerParts, StatsPlace};
use memfold_os::uffd::Uffd;
use memfold_os::uffd::space::UffdSpace;
use memfold_stats::Stats;

/// Makes an engine with signal delivery and the least resident memory, whose frames are registered
/// with `uffd`. It manages nothing yet. `space` is that of the process, with the same descriptor.
///
/// # Panics If it is unavailable.
pub fn engine(uffd: &Uffd, space: UffdSpace) -> Pager {
    let parts = PagerParts {
        space: Box::new(space),
        has_move: true,
        reports_limit: false,
        stats: StatsPlace::Own(Box::new(Stats::new())),
        cpus: 1,
        disk: None,
        remote: None,
        delegate_queue: None,
        shared_limit: None,
        compressors: None,
    };
    let mut config = Config::new(1 << 30);
    config.resident_bytes = Some(WORKABLE_MIN_BYTES);
    config.delivery = Delivery::Signal;
    let pager = Pager::new(config, parts).expect("an engine");
    let (start, len) = pager.frames_zone();
    // SAFETY: the engine touches no frame that is empty.
    unsafe { uffd.register(start, len, false).expect("frames can be registered") };
    pager
}
