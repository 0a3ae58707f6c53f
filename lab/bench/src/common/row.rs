//! Rows of the store's report: a figure, its target, and the verdict.

use crate::common::summary::show;
use crate::common::verdict::Verdict;
use serde::Serialize;

/// One row.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StoreRow {
    /// The name of the figure, with its unit.
    pub label: String,
    /// The figure.
    pub figure: Option<f64>,
    /// `<= 1.1x`; empty for a figure that only explains another.
    pub target: String,
    /// The verdict; none without a target.
    pub verdict: Option<Verdict>,
    /// How the figure was computed, or why there is none.
    pub note: String,
}

impl StoreRow {
    /// Makes the row of a figure that must be at most `most`.
    pub fn at_most(label: &str, figure: f64, most: f64, note: String) -> StoreRow {
        StoreRow::judged(label, figure, format!("<= {most}"), figure <= most, note)
    }

    /// Makes the row of a figure that must be at most `most`. `floor` is the figure of the codec's
    /// output alone. If that is above `most`, no store can reach the target with this codec on this
    /// data, and the row says so.
    pub fn at_most_of(label: &str, figure: f64, most: f64, floor: f64, note: String) -> StoreRow {
        let row = StoreRow::at_most(label, figure, most, note);
        if row.verdict == Some(Verdict::Pass) || floor <= most {
            return row;
        }
        let note = format!("{}; the codec's output alone is {floor:.3}", row.note);
        StoreRow { verdict: Some(Verdict::Bound), note, ..row }
    }

    /// Makes the row of a figure that must be at least `least`.
    pub fn at_least(label: &str, figure: f64, least: f64, note: String) -> StoreRow {
        StoreRow::judged(label, figure, format!(">= {least}"), figure >= least, note)
    }

    /// Makes the row of a figure without a target.
    pub fn plain(label: &str, figure: f64, note: String) -> StoreRow {
        StoreRow {
            label: label.into(),
            figure: Some(figure),
            target: String::new(),
            verdict: None,
            note,
        }
    }

    /// Makes the row of a target that could not be measured.
    pub fn not_run(label: &str, target: &str, why: &str) -> StoreRow {
        let verdict = Some(Verdict::NotRun);
        StoreRow {
            label: label.into(),
            figure: None,
            target: target.into(),
            verdict,
            note: why.into(),
        }
    }

    fn judged(label: &str, figure: f64, target: String, good: bool, note: String) -> StoreRow {
        let verdict = Some(if good { Verdict::Pass } else { Verdict::Short });
        StoreRow { label: label.into(), figure: Some(figure), target, verdict, note }
    }

    /// Returns the cells of the printed table.
    pub fn cells(&self) -> Vec<String> {
        let figure = match self.figure {
            None => "-".into(),
            Some(figure) if figure.abs() < 10.0 => format!("{figure:.3}"),
            Some(figure) => show(figure),
        };
        let verdict = self.verdict.map_or(String::new(), |verdict| verdict.name().into());
        vec![self.label.clone(), figure, self.target.clone(), verdict, self.note.clone()]
    }
}

/// Returns whether no row is short.
pub fn all_good(rows: &[StoreRow]) -> bool {
    rows.iter().all(|row| row.verdict != Some(Verdict::Short))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_on_the_wrong_side_of_its_target_is_short() {
        let verdict = |row: StoreRow| row.verdict.unwrap();
        assert_eq!(verdict(StoreRow::at_most("a", 1.11, 1.1, String::new())), Verdict::Short);
        assert_eq!(verdict(StoreRow::at_most("a", 1.1, 1.1, String::new())), Verdict::Pass);
        assert_eq!(verdict(StoreRow::at_least("a", 1.69, 1.7, String::new())), Verdict::Short);
        let of = |figure, floor| StoreRow::at_most_of("a", figure, 0.85, floor, "n".into());
        assert_eq!(verdict(of(0.85, 0.84)), Verdict::Pass);
        assert_eq!(verdict(of(0.9, 0.84)), Verdict::Short);
        assert_eq!(
            (verdict(of(0.9, 0.87)), of(0.9, 0.87).note),
            (Verdict::Bound, "n; the codec's output alone is 0.870".into())
        );
        assert_eq!(verdict(of(f64::NAN, 0.84)), Verdict::Short);
        assert_eq!(verdict(StoreRow::at_least("a", f64::NAN, 1.7, String::new())), Verdict::Short);
        let rows =
            [StoreRow::not_run("a", "<= 1", "no zram"), StoreRow::plain("b", 1.0, String::new())];
        assert!(all_good(&rows));
        assert!(!all_good(&[StoreRow::at_most("a", 2.0, 1.0, String::new())]));
    }
}
