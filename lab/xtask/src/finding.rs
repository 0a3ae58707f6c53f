//! A finding of a check, and its output.

use std::fmt;
use std::process::ExitCode;

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// Path from the root of the workspace.
    pub path: String,
    /// Line, counted from 1; 0 for the file as a whole.
    pub line: usize,
    /// A warning is printed but doesn't fail the check.
    pub warning: bool,
    /// What is wrong and what to do.
    pub message: String,
}

impl Finding {
    /// Makes a finding that fails the check.
    pub fn error(path: &str, line: usize, message: impl Into<String>) -> Self {
        Finding { path: path.to_owned(), line, warning: false, message: message.into() }
    }

    /// Makes a finding that is only a warning.
    pub fn warning(path: &str, line: usize, message: impl Into<String>) -> Self {
        Finding { warning: true, ..Self::error(path, line, message) }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.warning { "warning: " } else { "" };
        match self.line {
            0 => write!(out, "{}: {kind}{}", self.path, self.message),
            line => write!(out, "{}:{line}: {kind}{}", self.path, self.message),
        }
    }
}

/// Prints all findings in the order of files and lines; fails if one of them is an error.
pub fn report(task: &str, mut findings: Vec<Finding>) -> ExitCode {
    findings.sort();
    findings.dedup();
    for finding in &findings {
        println!("{finding}");
    }
    let errors = findings.iter().filter(|finding| !finding.warning).count();
    match errors {
        0 => {
            println!("{task}: ok, {} warnings", findings.len());
            ExitCode::SUCCESS
        }
        _ => {
            println!("{task}: {errors} errors, {} warnings", findings.len() - errors);
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_names_file_line_and_kind() {
        assert_eq!(Finding::error("a.rs", 3, "wrong").to_string(), "a.rs:3: wrong");
        assert_eq!(Finding::warning("a.rs", 0, "long").to_string(), "a.rs: warning: long");
    }

    #[test]
    fn only_errors_fail() {
        let is_failure = |findings| {
            format!("{:?}", report("test", findings)) == format!("{:?}", ExitCode::FAILURE)
        };
        assert!(!is_failure(vec![]));
        assert!(!is_failure(vec![Finding::warning("a.rs", 1, "long")]));
        assert!(is_failure(vec![
            Finding::warning("a.rs", 1, "long"),
            Finding::error("a.rs", 1, "wrong")
        ]));
    }
}
