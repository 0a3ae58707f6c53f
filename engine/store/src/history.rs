//! Whether a method of compression has paid off.

/// Failures in a row after which a method is tried on some blocks only.
const LOSSES_MAX: u8 = 4;
/// Blocks that are then stored without a try.
const UNTRIED: u8 = 7;

/// Whether a method has made the latest blocks smaller. Neighbouring blocks mostly have similar
/// content.
#[derive(Default)]
pub(crate) struct ShrinkHistory {
    losses: u8,
    untried: u8,
}

impl ShrinkHistory {
    /// Returns whether it should be tried on this block.
    pub fn tries(&mut self) -> bool {
        let tries = self.untried == 0;
        self.untried = self.untried.saturating_sub(1);
        tries
    }

    /// Notes whether it has made a block smaller.
    pub fn note(&mut self, won: bool) {
        self.losses = if won { 0 } else { self.losses.saturating_add(1) };
        self.untried = if self.losses > LOSSES_MAX { UNTRIED } else { 0 };
    }
}
