//! Text tables.

/// Lays out rows in columns, the first left-aligned, the others right-aligned. The first row is the
/// heading.
pub fn layout(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max()
    };
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for (number, row) in rows.iter().enumerate() {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let (width, gap) = (widths[column], if column == 0 { "" } else { "  " });
            line += &if column == 0 {
                format!("{cell:<width$}")
            } else {
                format!("{gap}{cell:>width$}")
            };
        }
        text.push_str(line.trim_end());
        text.push('\n');
        if number == 0 {
            text.push_str(
                &"-".repeat(widths.iter().sum::<usize>() + 2 * columns.saturating_sub(1)),
            );
            text.push('\n');
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [vec!["peer", "MB/s"], vec!["a", "1"], vec!["long name", "12345"]];
        let rows: Vec<Vec<String>> =
            rows.iter().map(|row| row.iter().map(|cell| cell.to_string()).collect()).collect();
        assert_eq!(
            layout(&rows),
            "peer        MB/s\n----------------\na              1\nlong name  12345\n"
        );
    }
}
