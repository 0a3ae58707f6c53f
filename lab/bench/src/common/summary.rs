//! The results of several runs in three numbers.

use serde::{Deserialize, Serialize};

/// Median, minimum and maximum of some measurements.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// The median (the mean of the two middle ones of an even number).
    pub median: f64,
    /// The minimum.
    pub min: f64,
    /// The maximum.
    pub max: f64,
}

impl Spread {
    /// Returns `None` without measurements.
    pub fn of(mut values: Vec<f64>) -> Option<Spread> {
        values.sort_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let median = if values.len() % 2 == 1 {
            values[middle]
        } else {
            (values[middle - 1] + values[middle]) / 2.0
        };
        Some(Spread { median, min, max })
    }

    /// Formats as `270`, or as `270 (255..281)` if the shown digits differ. Numbers below 100 have
    /// one decimal.
    pub fn show(&self) -> String {
        let (median, min, max) = (show(self.median), show(self.min), show(self.max));
        if min == max { median } else { format!("{median} ({min}..{max})") }
    }
}

/// Formats a figure with three or four significant digits.
pub fn show(value: f64) -> String {
    if value >= 99.95 || value == 0.0 { format!("{value:.0}") } else { format!("{value:.1}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_lies_between_the_extremes() {
        assert_eq!(Spread::of(vec![]), None);
        assert_eq!(
            Spread::of(vec![3.0, 1.0, 2.0]),
            Some(Spread { median: 2.0, min: 1.0, max: 3.0 })
        );
        assert_eq!(Spread::of(vec![4.0, 1.0]), Some(Spread { median: 2.5, min: 1.0, max: 4.0 }));
    }

    #[test]
    fn figures_print_short() {
        assert_eq!(Spread { median: 270.4, min: 255.0, max: 281.2 }.show(), "270 (255..281)");
        assert_eq!(Spread { median: 13.84, min: 13.84, max: 13.84 }.show(), "13.8");
    }
}
