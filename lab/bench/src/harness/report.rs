//! The report of every benchmark: machine, command line, results and rows.

use crate::common::output::Output;
use crate::common::row::{StoreRow, all_good};
use crate::common::table::layout;
use crate::host::machine::Machine;
use serde::Serialize;

/// A report. In JSON the fields of `found` are beside the others.
#[derive(Debug, Serialize)]
pub struct Report<T, R = StoreRow> {
    /// The machine.
    pub machine: Machine,
    /// The command line.
    pub command: String,
    /// The results of this benchmark.
    #[serde(flatten)]
    pub found: T,
    /// Figures, targets and verdicts.
    pub rows: Vec<R>,
}

impl<T, R> Report<T, R> {
    /// Makes a report of this machine and this command line, without rows.
    pub fn new(found: T) -> Report<T, R> {
        let command = std::env::args().collect::<Vec<_>>().join(" ");
        Report { machine: Machine::read(), command, found, rows: Vec::new() }
    }
}

impl<T: Serialize> Report<T> {
    /// Prints the report, writes it to the file of `--json`, and returns the exit status: 1 if the
    /// run failed or, with `--check`, a row is short. `beside` is printed after the name of the
    /// machine, and `body` between the command and the rows.
    pub fn finish(
        &self,
        output: &Output,
        name: &str,
        (beside, body): (&str, &str),
        is_wrong: bool,
    ) -> anyhow::Result<i32> {
        let mut rows = vec![
            ["it must reach", "figure", "target", "verdict", "from"].map(String::from).to_vec(),
        ];
        rows.extend(self.rows.iter().map(StoreRow::cells));
        println!(
            "memfold bench {name}, {}{beside}\ncommand: {}\n{body}",
            self.machine.heading(),
            self.command
        );
        print!("{}", layout(&rows));
        output.finish(self, is_wrong, all_good(&self.rows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn results_are_beside_the_rows() {
        #[derive(Serialize)]
        struct Found {
            dir: &'static str,
        }
        let mut report = Report::<_>::new(Found { dir: "/tmp" });
        report.rows.push(StoreRow::plain("a", 1.0, "b".into()));
        let json_report = serde_json::to_value(&report).unwrap();
        assert_eq!(
            (&json_report["dir"], &json_report["rows"][0]["label"]),
            (&json!("/tmp"), &json!("a"))
        );
        assert!(json_report["machine"]["kernel"].is_string() && json_report["command"].is_string());
    }
}
