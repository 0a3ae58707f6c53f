//! Ways to split a block.

/// The widest words, in bytes, and so the most planes.
pub const WIDTH_MAX: usize = 8;
/// The longest table.
pub const TABLE_MAX: usize = 256;

/// How to split a block.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(in crate::block) struct ShufflePlan {
    /// Bytes of a word: 2, 4 or 8.
    pub width: usize,
    pub words: PlaneWords,
}

/// What the planes contain.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(in crate::block) enum PlaneWords {
    Plain,
    Deltas,
    /// Positions of words of 4 or 8 bytes in a table: one plane.
    Table,
}

impl ShufflePlan {
    pub fn pack(self) -> u8 {
        self.width as u8 | (self.words as u8) << 4
    }

    pub fn unpack(byte: u8) -> Option<ShufflePlan> {
        let words = match byte >> 4 {
            0 => PlaneWords::Plain,
            1 => PlaneWords::Deltas,
            2 => PlaneWords::Table,
            _ => return None,
        };
        let width = (byte & 0xf) as usize;
        let is_width =
            matches!((width, words), (4 | 8, _) | (2, PlaneWords::Plain | PlaneWords::Deltas));
        is_width.then_some(ShufflePlan { width, words })
    }

    pub fn planes(self) -> usize {
        if self.words == PlaneWords::Table { 1 } else { self.width }
    }
}
