use crate::top::columns::{COLUMNS, shown};
use crate::top::keys::{Input, KeyAction, ViewState, press};
use crate::top::model::{Row, RowKey, TopPage};
use proptest::prelude::*;
use ratatui_termion::termion::event::Key;

fn rows() -> Vec<Row> {
    let keys = [RowKey::Run(3), RowKey::Run(5), RowKey::Group("g".to_string()), RowKey::Server(9)];
    keys.into_iter().map(|key| Row::new(key, "x".to_string())).collect()
}

/// Presses each key. Returns the last action.
fn type_all(state: &mut ViewState, keys: &[Key], rows: &[Row]) -> KeyAction {
    keys.iter().fold(KeyAction::None, |_, key| press(state, *key, rows))
}

fn chars(text: &str) -> Vec<Key> {
    text.chars().map(Key::Char).collect()
}

#[test]
fn enter_opens_and_escape_leads_back_to_the_same_row() {
    let (mut state, all) = (ViewState::new(), rows());
    type_all(&mut state, &[Key::Down, Key::Char('\n')], &all);
    assert_eq!(state.page(), &TopPage::Run(5));
    let processes = [Row::new(RowKey::Process(7), "p".to_string())];
    type_all(&mut state, &[Key::Char('\n')], &processes);
    assert_eq!(state.page(), &TopPage::Process { run: 5, pid: 7 });
    type_all(&mut state, &[Key::Char('\n')], &processes);
    assert_eq!(state.page(), &TopPage::Process { run: 5, pid: 7 });
    type_all(&mut state, &[Key::Esc, Key::Left], &processes);
    assert_eq!(state.page(), &TopPage::All);
    assert_eq!(state.select_in(&all), 1);
    type_all(&mut state, &[Key::Esc, Key::End, Key::Char('\n')], &all);
    assert_eq!(state.page(), &TopPage::Server(9));
}

#[test]
fn selection_stays_at_its_row_when_rows_move() {
    let (mut state, mut all) = (ViewState::new(), rows());
    type_all(&mut state, &chars("jj"), &all);
    all.rotate_left(1);
    assert_eq!(state.select_in(&all), 1);
    all.remove(1);
    assert_eq!(state.select_in(&all), 1, "the row at its place is selected");
    assert_eq!(state.select_in(&[]), 0);
}

#[test]
fn limit_is_asked_and_given_for_the_selected_row() {
    let (mut state, all) = (ViewState::new(), rows());
    let keys = [vec![Key::Char('G'), Key::Up, Key::Char('l')], chars("51x")].concat();
    assert_eq!(type_all(&mut state, &keys, &all), KeyAction::None);
    let input = Input::Limit { of: RowKey::Group("g".to_string()), text: "51x".to_string() };
    assert_eq!(state.input, Some(input));
    let keys = [vec![Key::Backspace], chars("2M\n")].concat();
    let action = type_all(&mut state, &keys, &all);
    let of = RowKey::Group("g".to_string());
    assert_eq!(action, KeyAction::SetLimit { of, size: "512M".to_string() });
    assert_eq!(type_all(&mut state, &chars("l \n"), &all), KeyAction::None);
    let keys = [chars("lq"), vec![Key::Esc]].concat();
    assert_eq!(type_all(&mut state, &keys, &all), KeyAction::None);
    assert_eq!(state.input, None);
    // In a run, it is the limit of the run.
    let keys = [vec![Key::Home, Key::Char('\n'), Key::Char('l')], chars("9%\n")].concat();
    let action = type_all(&mut state, &keys, &all);
    assert_eq!(action, KeyAction::SetLimit { of: RowKey::Run(3), size: "9%".to_string() });
    let mut state = ViewState::new();
    type_all(&mut state, &chars("l"), &[]);
    assert_eq!((state.input, state.message.as_str()), (None, "No run is selected."));
}

#[test]
fn limit_of_an_ended_run_is_not_asked() {
    let (mut state, all) = (ViewState::new(), rows());
    state.note(&all);
    type_all(&mut state, &[Key::Down, Key::Char('\n')], &all);
    state.note(&all);
    type_all(&mut state, &chars("l"), &[]);
    assert!(state.input.take().is_some());
    state.note(&all[..1]);
    type_all(&mut state, &chars("l"), &[]);
    assert_eq!(
        (state.input, state.message.as_str()),
        (None, "It has ended, so its limit can't be changed.")
    );
}

#[test]
fn filter_is_typed_kept_and_ended() {
    let (mut state, all) = (ViewState::new(), rows());
    type_all(&mut state, &chars("/qs"), &all);
    assert_eq!(state.filter, "qs");
    type_all(&mut state, &chars("\n"), &all);
    assert_eq!((state.filter.as_str(), &state.input), ("qs", &None));
    type_all(&mut state, &[chars("/zz"), vec![Key::Esc]].concat(), &all);
    assert_eq!(state.filter, "qs", "the filter before is kept");
    type_all(&mut state, &[Key::Char('\n')], &all);
    assert_eq!((state.filter.as_str(), state.page()), ("", &TopPage::Run(3)));
    type_all(&mut state, &[Key::Esc], &all);
    assert_eq!((state.filter.as_str(), state.page()), ("qs", &TopPage::All));
    type_all(&mut state, &[Key::Esc], &all);
    assert_eq!(state.filter, "");
}

#[test]
fn sort_passes_all_columns_and_comes_back() {
    let (mut state, all) = (ViewState::new(), rows());
    type_all(&mut state, &chars("sS"), &all);
    assert_eq!(state.sort, 0);
    type_all(&mut state, &vec![Key::Char('s'); shown(80).len()], &all);
    assert_eq!(state.sort, 0);
    state.width = 1000;
    type_all(&mut state, &vec![Key::Char('s'); COLUMNS.len() - 1], &all);
    assert_eq!(state.sort, COLUMNS.len() - 1);
    (state.width, state.sort) = (1, 9);
    type_all(&mut state, &chars("s"), &all);
    assert_eq!(state.sort, 0, "no column is shown");
}

#[test]
fn quit_and_export_are_actions() {
    for keys in [vec![Key::Char('q')], chars("?q"), vec![Key::Char('/'), Key::Ctrl('c')]] {
        assert_eq!(type_all(&mut ViewState::new(), &keys, &rows()), KeyAction::Quit, "{keys:?}");
    }
    assert_eq!(type_all(&mut ViewState::new(), &chars("e"), &rows()), KeyAction::Export);
    for keys in [vec![Key::Ctrl('z')], vec![Key::Char('/'), Key::Ctrl('z')]] {
        assert_eq!(type_all(&mut ViewState::new(), &keys, &rows()), KeyAction::Suspend, "{keys:?}");
    }
    let mut state = ViewState::new();
    type_all(&mut state, &chars("?j"), &rows());
    assert!(!state.is_help && state.select_in(&rows()) == 0, "a key only ends the help");
}

fn any_key() -> impl Strategy<Value = Key> {
    let others = [
        Key::Esc,
        Key::Up,
        Key::Down,
        Key::Left,
        Key::Right,
        Key::Home,
        Key::End,
        Key::PageUp,
        Key::PageDown,
        Key::Backspace,
        Key::F(1),
        Key::Null,
        Key::Ctrl('u'),
        Key::Insert,
    ];
    prop_oneof![
        any::<char>().prop_map(Key::Char),
        prop::sample::select(chars("qel?sS/jkGgh\n")),
        prop::sample::select(others.to_vec()),
    ]
}

proptest! {
    #[test]
    fn any_keys_leave_a_valid_state(
        keys in prop::collection::vec(any_key(), 0..60), count in 0usize..5
    ) {
        let (mut state, rows) = (ViewState::new(), rows()[..count.min(4)].to_vec());
        for key in keys {
            press(&mut state, key, &rows);
            prop_assert!(state.sort < COLUMNS.len());
            let at = state.select_in(&rows);
            prop_assert!(at < rows.len() || (at == 0 && rows.is_empty()));
            prop_assert!(!state.filter.chars().any(char::is_control));
        }
    }
}
