//! Memory that stays because folding it costs too much.
use super::fault::Engine;
use crate::config::{Config, WORKABLE_MIN_BYTES};
use crate::policy::thrash::{FoldingCost, FoldingGain};
use memfold_os::units::PAGE_SIZE;

/// What stayed, and the least limit that was reported, once was a quarter more than all memory.
#[test]
fn never_more_is_kept_than_the_program_has_without_memfold() {
    const MIB: u64 = 1 << 20;
    const PAGES: usize = 2048;
    let mut config = Config::new(1 << 30);
    config.limit_bytes = Some(WORKABLE_MIN_BYTES);
    let engine = Engine::with(config, PAGES);
    engine.fill(0..PAGES, 0);
    let all = (PAGES * PAGE_SIZE) as u64;
    let gain = FoldingGain { plain: all, folded: 0, stored: all, takes: all, resident: all };
    engine.pager.0.budget.judge(FoldingCost { fault_ns: 900_000_000, own_ns: 1_000_000 }, &gain);
    let (limits, gauges) = (engine.pager.limits(), engine.pager.gauges());
    let most = all + MIB;
    assert!(limits.kept_bytes() > all / 2, "{} of {all} are kept", limits.kept_bytes());
    assert!(limits.kept_bytes() + limits.stored_bytes() <= most);
    assert!(gauges.least_limit_bytes() <= most + MIB, "{}", gauges.least_limit_bytes());
}
