use super::{any_row, heard, run_of};
use crate::top::areas::parse;
use crate::top::columns::sort;
use crate::top::draw::{Screen, draw};
use crate::top::history::{LOOKS, LoadHistory};
use crate::top::keys::{Input, ViewState, press};
use crate::top::model::{Row, RowKey, TopPage, rows};
use crate::top::watch::WatchSource;
use proptest::prelude::*;
use ratatui_core::backend::TestBackend;
use ratatui_core::style::Color;
use ratatui_core::terminal::Terminal;
use ratatui_termion::termion::event::Key;
use serde_json::json;
use std::time::{Duration, Instant};

/// Draws a screen on a terminal of this size. Returns it.
fn drawn(width: u16, height: u16, screen: &Screen<'_>) -> Terminal<TestBackend> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal
        .draw(|frame| {
            let area = frame.area();
            draw(frame.buffer_mut(), area, screen);
        })
        .unwrap();
    terminal
}

fn lines(terminal: &Terminal<TestBackend>) -> Vec<String> {
    let buffer = terminal.backend().buffer();
    let width = usize::from(buffer.area.width);
    let symbols: Vec<&str> = buffer.content().iter().map(|cell| cell.symbol()).collect();
    symbols.chunks(width).map(|line| line.concat().trim_end().to_string()).collect()
}

fn screen<'a>(rows: &'a [Row], state: &'a ViewState) -> Screen<'a> {
    Screen { rows, all: rows, at: 0, state, is_coloured: false, counters: &[], areas: None }
}

fn some_rows() -> Vec<Row> {
    let counters = |faults: u64| {
        json!({
            "resident_bytes": 16 << 20, "pool_bytes": 16 << 20, "folded_bytes": 48 << 20,
            "saved_bytes": 3 << 20, "payload_bytes": 1 << 20, "faults": faults,
            "pgmajfault": faults, "faults_zero": 0, "fault_ns": faults * 1000,
        })
    };
    let run = |faults| run_of(&["/usr/bin/python3", "/x/train.py"], 1.0, counters(faults));
    let group = json!([{"group": "agents", "limit_bytes": 1 << 30, "used_bytes": 0, "runs": 0}]);
    let answers = [
        heard(WatchSource::Groups, None, group),
        heard(WatchSource::Run(1234), Some(run(0)), run(12_345)),
    ];
    rows(&answers, &TopPage::All, Instant::now())
}

#[test]
fn list_fits_80_columns_with_all_that_matters() {
    let (rows, state) = (some_rows(), ViewState::new());
    let lines_shown = lines(&drawn(80, 24, &screen(&rows, &state)));
    assert_eq!(
        lines_shown[0],
        "memfold top: 1 run, 1 group, 0 servers; used 32.0M, folded 48.0M, spilled 0B"
    );
    assert_eq!(
        lines_shown[1],
        "## uncompressed  == compressed  .. in the swap file or remote store"
    );
    let head = "    PID* NAME            USED/LIMIT MEMORY     RATIO LOAD/S ZERO/S FAULT% CODEC";
    assert_eq!(lines_shown[2], head);
    assert!(
        lines_shown[3].starts_with(">   1234 python3 train~ 32.0M/64.0M ###==       3.00"),
        "{}",
        lines_shown[3]
    );
    assert!(lines_shown[3].ends_with("12.3k      0    1.2 lz4"), "{}", lines_shown[3]);
    assert!(lines_shown[4].starts_with("   group agents  "), "{}", lines_shown[4]);
    assert!(lines_shown[23].starts_with("q quit  ? help"), "{}", lines_shown[23]);
}

#[test]
fn run_above_its_limit_is_red_and_has_its_cause() {
    let run = |resident: u64, dense: u64| {
        let counters =
            json!({"resident_bytes": resident << 20, "refused_dense_bytes": dense << 20});
        let about = run_of(&["app"], 1.0, counters);
        let all = [
            heard(WatchSource::Run(5), None, about.clone()),
            heard(WatchSource::Run(6), None, about),
        ];
        rows(&all, &TopPage::All, Instant::now())
    };
    let causes = [
        (64, 60, None),
        (70, 60, Some("60.0M do not compress; --swap DIR moves them to a file")),
        (70, 0, Some("it uses memory faster than memfold folds it")),
    ];
    for (resident, dense, cause) in causes {
        let (rows, state) = (run(resident, dense), ViewState::new());
        let screen = Screen { is_coloured: true, ..screen(&rows, &state) };
        let terminal = drawn(80, 24, &screen);
        let is_red = terminal.backend().buffer().content().iter().any(|cell| cell.fg == Color::Red);
        let lines = lines(&terminal);
        assert_eq!(is_red, cause.is_some(), "{lines:#?}");
        let Some(cause) = cause else { continue };
        assert_eq!(lines[4], format!("         above its limit: {cause}"));
        assert!(lines[5].starts_with("       6 app") && lines[6] == lines[4], "{lines:#?}");
        // The selected row stays on a screen of two rows.
        let small = Screen { at: 1, ..screen };
        let lines = self::lines(&drawn(80, 6, &small));
        assert!(lines[3].starts_with(">      6 app") && lines[4].contains(cause), "{lines:#?}");
    }
}

#[test]
fn last_loads_are_drawn_for_each_look() {
    let mut history = LoadHistory::default();
    let mut some = some_rows();
    for loads in [0.0, 0.9, 1.0, 4.9, 5.0, 3125.0, 1e9] {
        some.iter_mut().for_each(|row| row.rates.loads = Some(loads));
        history.note(some.iter().chain(&some));
    }
    history.fill(&mut some);
    assert_eq!(some[0].loads_by_look.len(), 7, "a row counts once a look");
    let state = ViewState::new();
    let lines = lines(&drawn(120, 24, &screen(&some, &state)));
    assert!(lines[2].contains("LAST LOADS") && lines[3].contains("  ▁▁▂▆█"), "{lines:#?}");
    (0..20).for_each(|_| history.note(some.iter()));
    history.fill(&mut some);
    assert_eq!(some[0].loads_by_look.len(), LOOKS);
    history.note([].iter());
    history.fill(&mut some);
    assert!(some[0].loads_by_look.is_empty(), "a run that has ended is forgotten");
}

#[test]
fn colours_are_used_only_where_they_are_wanted() {
    let (rows, mut state) = (some_rows(), ViewState::new());
    state.is_help = false;
    let colours = |is_coloured| {
        let screen = Screen { is_coloured, ..screen(&rows, &state) };
        let terminal = drawn(80, 24, &screen);
        let cells = terminal.backend().buffer().content().iter();
        let mut colours: Vec<Color> = cells.flat_map(|cell| [cell.fg, cell.bg]).collect();
        colours.dedup();
        (colours.contains(&Color::Green) && colours.contains(&Color::Yellow), colours.len() > 1)
    };
    assert_eq!((colours(true), colours(false)), ((true, true), (false, false)));
}

#[test]
fn silent_run_has_no_old_figures() {
    let (mut rows, state) = (some_rows(), ViewState::new());
    rows[0].silent = Some(Duration::from_secs(7));
    let lines_shown = lines(&drawn(80, 24, &screen(&rows, &state)));
    assert_eq!(lines_shown[3], ">   1234 python3 train~ no answer for 7 s; it may be busy");
    rows[0].is_stopped = true;
    let lines_shown = lines(&drawn(80, 24, &screen(&rows, &state)));
    assert_eq!(lines_shown[3], ">   1234 python3 train~ no answer for 7 s; it is stopped");
}

#[test]
fn empty_screen_says_that_it_goes_on_looking() {
    let mut state = ViewState::new();
    let lines_shown = lines(&drawn(80, 24, &screen(&[], &state)));
    assert!(lines_shown[3].contains("No runs, groups or block devices"), "{}", lines_shown[3]);
    state.filter = "x".to_string();
    let lines_shown = lines(&drawn(80, 24, &screen(&[], &state)));
    assert!(lines_shown[3].contains("Nothing here has \"x\""), "{}", lines_shown[3]);
}

#[test]
fn selected_row_is_always_on_the_screen() {
    let row = |pid| Row { pid: Some(pid), ..Row::new(RowKey::Run(pid), "x".to_string()) };
    let (rows, state) = ((1..100).map(row).collect::<Vec<_>>(), ViewState::new());
    for at in [0, 5, 50, 98] {
        let screen = Screen { at, ..screen(&rows, &state) };
        let lines_shown = lines(&drawn(60, 10, &screen));
        let selection: Vec<_> = lines_shown.iter().filter(|line| line.starts_with('>')).collect();
        assert_eq!(selection.len(), 1, "{lines_shown:?}");
        assert!(selection[0].contains(&format!(" {} ", at + 1)), "{selection:?}");
    }
}

#[test]
fn page_of_a_process_tells_its_areas_apart() {
    let areas = Ok(parse(
        "1000-401000 rw-p 0 0:0 0 [heap]\nRss: 1024 kB\nVmFlags: um\n\
         900000-a00000 r-xp 0 0:0 1 /lib/x.so\nRss: 64 kB\nVmFlags: rd\n",
    ));
    let (rows, mut state) =
        ([Row::new(RowKey::Process(7), "python3".to_string())], ViewState::new());
    press(&mut state, Key::Char('\n'), &[Row::new(RowKey::Run(3), String::new())]);
    press(&mut state, Key::Char('\n'), &rows);
    let counters: Vec<_> = (0..24).map(|n| ("first touches/s", n.to_string())).collect();
    let screen = Screen { counters: &counters, areas: Some(&areas), ..screen(&rows, &state) };
    let text = lines(&drawn(80, 24, &screen)).join("\n");
    for phrase in [
        "process 7: python3",
        "first touches/s         0 first touches/s         8 first touches/s        16",
        "    4.00M     1.00M     3.00M  [heap]",
        "    1.00M     64.0K         -  /lib/x.so (not managed)",
    ] {
        assert!(text.contains(phrase), "{phrase:?} is missing:\n{text}");
    }
    let failure = Err("Permission denied".to_string());
    let screen = Screen { areas: Some(&failure), ..screen };
    assert!(lines(&drawn(80, 24, &screen)).join("\n").contains("can't be read: Permission denied"));
}

#[test]
fn help_fits_80_columns_and_24_lines() {
    let (rows, mut state) = (some_rows(), ViewState::new());
    state.is_help = true;
    let lines_shown = lines(&drawn(80, 24, &screen(&rows, &state)));
    let is_whole = |line: &String| line.len() <= 80 && !line.ends_with('~');
    assert!(lines_shown[2..23].iter().all(is_whole), "{lines_shown:?}");
    assert!(lines_shown[22].starts_with("Wider terminals"), "{lines_shown:?}");
}

fn any_state() -> impl Strategy<Value = ViewState> {
    (any::<String>(), any::<String>(), 0usize..8, any::<bool>()).prop_map(
        |(filter, message, kind, is_help)| {
            let mut state = ViewState::new();
            let keys = [RowKey::Run(3), RowKey::Group("g\u{1b}".to_string()), RowKey::Server(1)];
            if let Some(key) = keys.get(kind % 4) {
                press(&mut state, Key::Char('\n'), &[Row::new(key.clone(), String::new())]);
            }
            if kind == 4 {
                press(&mut state, Key::Char('\n'), &[Row::new(RowKey::Process(7), String::new())]);
            }
            let limit =
                || Input::Limit { of: RowKey::Export(filter.clone()), text: filter.clone() };
            state.input = (kind > 5).then(limit);
            (state.filter, state.message, state.is_help) = (filter, message, is_help);
            state
        },
    )
}

proptest! {
    #[test]
    fn no_size_and_no_rows_break_the_screen(
        rows in prop::collection::vec(any_row(), 0..30), column in 0usize..17, at in 0usize..40,
        state in any_state(), counters in 0usize..40, is_coloured in any::<bool>(),
        size in prop_oneof![
            Just((80, 24)), Just((1, 1)), Just((20, 5)), Just((0, 0)), (0u16..250, 0u16..80)
        ],
    ) {
        let mut rows = rows;
        sort(&mut rows, column);
        let counters = vec![("pages from swap/s", "1234567890123456789012345".to_string()); counters];
        let areas = Ok(parse("1-2 r 0 0 0 a\u{1b}é日本\nRss: 1 kB\nVmFlags: um\n"));
        let screen = Screen {
            rows: &rows, all: &rows, at, state: &state, is_coloured, counters: &counters,
            areas: Some(&areas),
        };
        let terminal = drawn(size.0, size.1, &screen);
        let cells = terminal.backend().buffer().content();
        prop_assert_eq!(cells.len(), usize::from(size.0) * usize::from(size.1));
        let has_control = cells.iter().any(|cell| cell.symbol().chars().any(char::is_control));
        prop_assert!(!has_control);
    }
}
