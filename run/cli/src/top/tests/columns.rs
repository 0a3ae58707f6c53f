use super::any_row;
use crate::top::columns::{BAR, COLUMNS, NAME, bar, filter, padded, shown, sort, table};
use crate::top::model::{Row, RowKey};
use proptest::prelude::*;
use unicode_width::UnicodeWidthStr;

fn keys(rows: &[Row]) -> Vec<RowKey> {
    rows.iter().map(|row| row.key.clone()).collect()
}

proptest! {
    #[test]
    fn filter_keeps_exactly_the_rows_with_the_text(
        rows in prop::collection::vec(any_row(), 0..12), text in "[a-c0-9é]{0,2}"
    ) {
        let mut rows_kept = rows.clone();
        filter(&mut rows_kept, &text);
        let has = |row: &Row| {
            let cells = [row.name.clone(), row.group.clone().unwrap_or_default()];
            cells.iter().any(|cell| cell.to_lowercase().contains(&text.to_lowercase()))
        };
        let rows_expected: Vec<Row> = rows.into_iter().filter(|row| has(row)).collect();
        prop_assert_eq!(keys(&rows_kept), keys(&rows_expected));
    }

    #[test]
    fn sorting_keeps_all_rows_and_gives_one_order(
        rows in prop::collection::vec(any_row(), 0..12), column in 0..COLUMNS.len()
    ) {
        let (mut one, mut other) = (rows.clone(), rows.clone());
        other.reverse();
        sort(&mut one, column);
        sort(&mut other, column);
        prop_assert_eq!(keys(&one), keys(&other));
        let (mut before, mut after) = (keys(&rows), keys(&one));
        before.sort();
        after.sort();
        prop_assert_eq!(before, after);
    }

    #[test]
    fn bar_is_never_longer_than_its_column(row in any_row(), width in 0u16..200) {
        let parts = bar(&row, width);
        prop_assert!(parts.iter().map(|part| u32::from(*part)).sum::<u32>() <= u32::from(width));
        prop_assert!(row.spilled_bytes > 0 || parts[2] == 0);
    }

    #[test]
    fn cells_are_as_wide_as_their_column(row in any_row(), width in 0usize..40) {
        for column in &COLUMNS {
            let cell = column.cell(&row);
            prop_assert_eq!(padded(&cell, width, column.is_text()).width(), width);
            let is_free = column.is_text() || column.title == "PID";
            prop_assert!(is_free || cell.len() <= column.width.max(6), "{}: {cell}", column.title);
        }
    }

    #[test]
    fn table_has_one_line_for_each_row(rows in prop::collection::vec(any_row(), 0..6)) {
        let lines = table(&rows);
        prop_assert_eq!(lines.len(), rows.len() + 1);
        prop_assert!(lines.iter().all(|line| !line.chars().any(char::is_control)));
    }
}

#[test]
fn columns_fit_every_width_and_wider_ones_show_more() {
    let titles =
        |width| -> Vec<&str> { shown(width).iter().map(|(at, _)| COLUMNS[*at].title).collect() };
    for width in 0..300 {
        let used_width: usize = shown(width).iter().map(|(_, width)| width + 1).sum();
        assert!(used_width <= width + 1, "{width}: {used_width}");
        assert!(titles(width).len() <= titles(width + 1).len(), "{width}");
    }
    let base = ["PID", NAME, "USED/LIMIT", BAR, "RATIO", "LOAD/S", "ZERO/S", "FAULT%", "CODEC"];
    assert_eq!(titles(79), base);
    assert_eq!(titles(200).len(), COLUMNS.len());
}

#[test]
fn ranks_and_titles_are_unique() {
    let mut titles: Vec<&str> = COLUMNS.iter().map(|column| column.title).collect();
    titles.sort_unstable();
    titles.dedup();
    assert_eq!(titles.len(), COLUMNS.len());
    // One more column is shown at each rank, so no two have the same.
    let counts: Vec<usize> = (0..300).map(|width| shown(width).len()).collect();
    assert!(counts.windows(2).all(|two| two[1] <= two[0] + 1), "{counts:?}");
}

#[test]
fn numbers_sort_from_the_largest_and_names_from_a() {
    let row = |pid, name: &str, used_bytes| Row {
        used_bytes,
        pid: Some(pid),
        ..Row::new(RowKey::Run(pid), name.to_string())
    };
    let mut rows = vec![row(1, "b", 5), row(2, "C", 9), row(3, "a", 5)];
    let at = |title: &str| COLUMNS.iter().position(|column| column.title == title).unwrap();
    let mut order = |title: &str| {
        sort(&mut rows, at(title));
        rows.iter().map(|row| row.pid.unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(order("USED/LIMIT"), [2, 1, 3]);
    assert_eq!(order(NAME), [3, 1, 2]);
    assert_eq!(order("PID"), [1, 2, 3]);
}

#[test]
fn bar_shows_the_room_below_the_limit() {
    let mut row = Row::new(RowKey::Run(1), String::new());
    assert_eq!(bar(&row, 10), [0, 0, 0]);
    (row.resident_bytes, row.compressed_bytes, row.limit_bytes) = (30, 20, Some(100));
    assert_eq!(bar(&row, 10), [3, 2, 0]);
    row.spilled_bytes = 100;
    assert_eq!(bar(&row, 20), [3, 2, 10]);
    row.limit_bytes = None;
    assert_eq!(bar(&row, 15), [3, 2, 10]);
}
