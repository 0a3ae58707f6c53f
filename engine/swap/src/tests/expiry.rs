//! Tests of a silent service.
use crate::remote::{ObjectFetch, Remote, RemoteError, StoredObject};
use crate::tier::expiry::ExpiryWatch;
use core::time::Duration;
use memfold_os::memory::descendant_watch::DescendantWatch;
use memfold_os::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// A store that only answers `keep`.
#[derive(Default)]
struct Keeper {
    is_silent: AtomicBool,
}

impl Keeper {
    fn set_silent(&self, silent: bool) {
        self.is_silent.store(silent, Relaxed);
    }
}

impl Remote for Keeper {
    fn put(&self, _: &[StoredObject<'_>]) -> Result<(), RemoteError> {
        unreachable!()
    }

    fn get(&self, _: &mut [ObjectFetch<'_>]) -> Result<(), RemoteError> {
        unreachable!()
    }

    fn delete(&self, _: &[u64]) -> Result<(), RemoteError> {
        unreachable!()
    }

    fn keep(&self, _: Duration) -> Result<(), RemoteError> {
        match self.is_silent.load(Relaxed) {
            true => {
                Err(RemoteError { is_lost: false, is_cut: true, why: "no service answers".into() })
            }
            false => Ok(()),
        }
    }

    fn lend(&self, _: &DescendantWatch) -> Result<(), RemoteError> {
        unreachable!()
    }

    fn name(&self) -> &str {
        "keeper"
    }
}

/// Asks until there is a warning, and returns it.
fn warning(watched: &ExpiryWatch, remote: &Keeper) -> String {
    loop {
        if let Some(why) = watched.ask(remote, true) {
            return why;
        }
    }
}

#[test]
fn silent_service_is_reported_once_until_it_answers_again() {
    let remote = Keeper::default();
    let watch = ExpiryWatch::new(Duration::from_millis(40));
    remote.set_silent(true);
    for _ in 0..2 {
        let why = warning(&watch, &remote);
        assert!(
            why.contains("no service answers")
                && why.contains("kill -CONT")
                && why.contains("--remote-expiry"),
            "{why}"
        );
        (0..100).for_each(|_| assert_eq!(watch.ask(&remote, true), None));
        remote.set_silent(false);
        assert_eq!(watch.ask(&remote, true), None);
        remote.set_silent(true);
    }
}

#[test]
fn nothing_is_said_while_nothing_lies_in_the_store() {
    let remote = Keeper::default();
    remote.set_silent(true);
    let watch = ExpiryWatch::new(Duration::ZERO);
    (0..100).for_each(|_| assert_eq!(watch.ask(&remote, false), None));
    assert_eq!(watch.left_ns(), 0);
    assert!(ExpiryWatch::new(Duration::from_secs(86400)).left_ns() > 0);
}
