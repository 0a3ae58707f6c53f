//! The loads of the last looks, for the column that draws them.
use super::model::{Row, RowKey};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Looks that are kept, one for each character of the column.
pub const LOOKS: usize = 12;
/// The characters by height. The first is for less than one load a second.
const BARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// Each step is so many times as many loads as the one below it.
pub const STEP: f64 = 5.0;

/// Loads a second at each look, the oldest first.
#[derive(Default)]
pub struct LoadHistory(BTreeMap<RowKey, VecDeque<f64>>);

impl LoadHistory {
    /// Adds a look at all rows. Rows that are not in it are forgotten.
    pub fn note<'a>(&mut self, rows: impl Iterator<Item = &'a Row> + Clone) {
        let keys: BTreeSet<&RowKey> = rows.clone().map(|row| &row.key).collect();
        self.0.retain(|key, _| keys.contains(key));
        let mut seen = BTreeSet::new();
        for row in rows.filter(|row| seen.insert(&row.key)) {
            let Some(loads) = row.rates.loads.filter(|_| row.silent.is_none()) else { continue };
            let looks = self.0.entry(row.key.clone()).or_default();
            looks.push_back(loads);
            looks.drain(..looks.len().saturating_sub(LOOKS));
        }
    }

    /// Gives rows their looks.
    pub fn fill(&self, rows: &mut [Row]) {
        for row in rows {
            let looks = self.0.get(&row.key).into_iter().flatten();
            row.loads_by_look = looks.copied().collect();
        }
    }
}

/// Returns a character for each look.
pub fn drawn(loads_by_look: &[f64]) -> String {
    let height = |loads: &f64| match *loads < 1.0 {
        true => 0,
        false => ((loads.log(STEP) + 1e-9) as usize + 1).min(BARS.len() - 1),
    };
    loads_by_look.iter().map(|loads| BARS[height(loads)]).collect()
}
