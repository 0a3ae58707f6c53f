//! Ways to split a block.

/// The widest words, in bytes, and so the most planes.
pub const WIDTH_MAX: usize = 8;
/// The longest table.
pub const TABLE_MAX: usize = 256;

/// How to split a block.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(in crate::block) struct Plan {
    /// Bytes of a word: 2, 4 or 8.
    pub width: usize,
    pub words: Words,
}

/// What the planes contain.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(in crate::block) enum Words {
    Plain,
    Deltas,
    /// Positions of words of 4 or 8 bytes in a table: one plane.
    Table,
}

impl Plan {
    pub fn pack(self) -> u8 {
        self.width as u8 | (self.words as u8) << 4
    }

    pub fn unpack(byte: u8) -> Option<Plan> {
        let words = match byte >> 4 {
            0 => Words::Plain,
            1 => Words::Deltas,
            2 => Words::Table,
            _ => return None,
        };
        let width = (byte & 0xf) as usize;
        let is_width = matches!((width, words), (4 | 8, _) | (2, Words::Plain | Words::Deltas));
        is_width.then_some(Plan { width, words })
    }

    pub fn planes(self) -> usize {
        if self.words == Words::Table { 1 } else { self.width }
    }
}
