//! A process that finds the table of its run by its path. What a process is a member of is known to
//! all of it, so this is one test.
use memfold_run::door::{DoorKey, HALF};
use memfold_run::member;
use memfold_run::request::{RunRequest, TableAddress, path_of};
use memfold_run::table::bounds::RunBounds;
use memfold_run::users::UserTables;
use rustix::fd::AsRawFd;

const MIB: u64 = 1 << 20;

#[test]
fn process_finds_its_table_and_shares_with_others() {
    let key = DoorKey { ask: [1; HALF], answer: [2; HALF] };
    let (bounds, file) = RunBounds::create(u64::MAX, &key).unwrap();
    let uid = rustix::process::getuid().as_raw();
    let tables = UserTables::create(uid, 64, u64::MAX, bounds).unwrap();
    tables.set_bounds(Some(100 * MIB), None);
    let own = std::process::id();
    let table_file = tables.users()[0].file;
    let paths = [path_of(own, table_file.as_raw_fd()), path_of(own, file.as_raw_fd())];
    let address = TableAddress { paths: [&paths[0], &paths[1]], door: "memfold-nobody", key };
    let text = RunRequest::write("limit=5", &address).leak();

    // Without a table a process goes on by itself.
    assert!(member::bounds().is_none() && member::mailbox().is_none() && !member::is_first());
    assert_eq!(member::share_of(100, 70, true), (100, 0));
    assert!(member::report_limit() && member::given().is_none());
    assert!(!member::has_given_up());

    member::open(RunRequest::new(text).address().unwrap(), None);
    assert!(member::is_first() && tables.has_begun());
    assert_eq!(member::bounds(), Some((100 * MIB, u64::MAX)));
    let (bounds, least) = member::whole(true).unwrap();
    assert_eq!((bounds, least.bytes), ((100 * MIB, u64::MAX), 0));
    assert!(member::own().is_none() && member::number() == own);

    // The slot is the thread's, and its figures are where `memfold run` reads them.
    member::claim().faults.store(7, std::sync::atomic::Ordering::Relaxed);
    let slots: Vec<_> = tables.processes().collect();
    assert_eq!(slots.len(), 1);
    assert!(slots[0].is(member::own().unwrap()) && slots[0].pid() == own);
    assert_eq!(slots[0].stats().faults.load(std::sync::atomic::Ordering::Relaxed), 7);

    member::set_need(90 * MIB);
    member::set_least(60 * MIB, 5 * MIB);
    assert_eq!(tables.tables()[0].asked(true).claim.least, 65 * MIB);
    assert_eq!(tables.tables()[0].asked(false).claim.least, 60 * MIB);
    let (questions, answers) = (std::sync::mpsc::channel(), std::sync::mpsc::channel());
    let other = std::thread::spawn({
        let table = tables.tables()[0];
        move || {
            // SAFETY: threads of this test use no robust mutex.
            unsafe { table.claim(1) }.unwrap().set_need(80 * MIB);
            questions.0.send(()).unwrap();
            answers.1.recv().unwrap();
        }
    });
    questions.1.recv().unwrap();
    assert_eq!(member::share_of(100 * MIB, 90 * MIB, true), (65 * MIB, 1));
    answers.0.send(()).unwrap();
    other.join().unwrap();

    tables.set_bounds(Some(20 * MIB), None);
    assert_eq!(member::given(), Some((20 * MIB, u64::MAX)));
    let first = member::note_unmanaged(b"/x: static");
    assert!(first && tables.unmanaged() == (1, b"/x: static".to_vec()));
    member::forget_unmanaged(first);
    assert_eq!(tables.unmanaged().0, 0);
    assert!(member::mailbox().unwrap().leave(member::number(), false, b"a line"));
    assert_eq!(tables.tables()[0].mailbox().take()[0].text, "a line");
    assert!(member::report_limit() && !member::report_limit(), "once in a run");
    assert!(!member::change_user().unwrap(), "it is the same user");

    member::note_begun();
    member::begin_as_child();
    assert!(!member::is_first() && member::own().is_none());
}
