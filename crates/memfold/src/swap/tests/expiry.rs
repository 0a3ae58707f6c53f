//! The service that is silent.
use crate::swap::remote::expiry::Watched;
use core::time::Duration;
use memfold_testkit::remote::MemoryRemote;

/// Asks until there is a warning.
fn warning(watched: &Watched, remote: &MemoryRemote) -> String {
    loop {
        if let Some(why) = watched.ask(remote, true) {
            return why;
        }
    }
}

#[test]
fn a_service_that_is_silent_is_told_of_once_and_anew_when_it_has_answered() {
    let remote = MemoryRemote::default();
    let watched = Watched::new(Duration::from_millis(40));
    remote.set_silent(true);
    for _ in 0..2 {
        let why = warning(&watched, &remote);
        assert!(
            why.contains("nobody answers")
                && why.contains("kill -CONT")
                && why.contains("--remote-expiry"),
            "{why}"
        );
        (0..100).for_each(|_| assert_eq!(watched.ask(&remote, true), None));
        remote.set_silent(false);
        assert_eq!(watched.ask(&remote, true), None);
        remote.set_silent(true);
    }
}

#[test]
fn nothing_is_said_while_nothing_lies_in_the_store() {
    let remote = MemoryRemote::default();
    remote.set_silent(true);
    let watched = Watched::new(Duration::ZERO);
    (0..100).for_each(|_| assert_eq!(watched.ask(&remote, false), None));
    assert_eq!(watched.left_ns(), 0);
    assert!(Watched::new(Duration::from_secs(86400)).left_ns() > 0);
}
