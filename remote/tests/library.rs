//! A program that uses the library and starts the service itself, with real servers on loopback.
//! Rows B3, C2.
mod common;
use common::Scratch;
use memfold::{Memory, Region};
use memfold_os::memory::descendant_watch::DescendantWatch;
use memfold_remote::{Service, StoreSettings};
use memfold_swap::remote::socket::SocketRemote;
use memfold_swap::remote::{ObjectFetch, Remote, StoredObject};
use memfold_testkit::fill::partly_random;
use memfold_testkit::redis::{Server, is_there};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;
/// Longer than any operation takes that waits for no server.
const LONG: Duration = Duration::from_secs(600);

/// An engine with 16 MiB of memory and 16 MiB of file; the rest goes to the store. The first field
/// is dropped last.
struct World {
    region: Region,
    memory: Memory,
    service: Service,
    _dir: Scratch,
}

impl World {
    fn new(url: &str, pages: usize, expiry: Option<Duration>) -> World {
        let dir = Scratch::new();
        let socket = dir.0.join("socket");
        let mut settings = StoreSettings::parse(url, Duration::from_secs(20)).unwrap();
        if let Some(expiry) = expiry {
            settings.set_expiry(expiry);
        }
        let service = Service::start(settings, &socket).unwrap();
        let memory = Memory::builder()
            .limit_bytes(16 << 20)
            .set("swap", dir.0.to_str().unwrap())
            .set("swap-size", "16M")
            .set("swap-keep-free", "64M")
            .set("remote", url)
            .set("remote-size", "256M")
            .set("remote-at", "50")
            .set("remote-expiry", &expiry.map_or(86400, |expiry| expiry.as_secs()).to_string())
            .remote_socket(socket.to_str().unwrap())
            .build()
            .unwrap();
        let region = memory.region(pages * PAGE).unwrap();
        World { region, memory, service, _dir: dir }
    }

    fn fill(&mut self, pages: std::ops::Range<usize>, share: usize) {
        for n in pages {
            self.region.as_mut_slice()[n * PAGE..][..PAGE]
                .copy_from_slice(&partly_random(n as u64, share));
        }
    }

    fn is_right(&self, n: usize, share: usize) -> bool {
        self.region.as_slice()[n * PAGE..][..PAGE] == partly_random(n as u64, share)
    }

    fn count(&self, of: fn(&memfold_stats::Stats) -> &AtomicU64) -> u64 {
        of(self.memory.stats()).load(Relaxed)
    }
}

#[track_caller]
fn wait_for(what: &str, mut wanted: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !wanted() {
        assert!(begin.elapsed() < LONG, "in vain for: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn b3_region_moves_to_a_real_server_and_back_intact() {
    if !is_there() {
        return;
    }
    let server = Server::start(&[]);
    let pages = 64 * MIB / PAGE;
    let mut world = World::new(&server.url(), pages, None);
    world.fill(0..pages, 0);
    let keys = server.keys();
    assert!(
        keys.len() > 100 && keys.iter().all(|key| key.starts_with("memfold:")),
        "{} keys",
        keys.len()
    );
    assert!((0..pages).all(|n| world.is_right(n, 0)));
    assert!(world.count(|s| &s.remote_out) > 4096 && world.count(|s| &s.remote_in) > 4096);
    world.memory.check().unwrap();
    // The memory is dropped first, as the documentation says.
    let World { region, memory, service, _dir } = world;
    drop((region, memory));
    drop(service);
    assert_eq!(server.cli(&["dbsize"]), "0", "no key is left");
}

/// Ends a child at the end of `main`, or by an exec that fails. It drops its copies.
#[test]
fn service_dropped_in_a_forked_child_keeps_parent_data() {
    if !is_there() {
        return;
    }
    let server = Server::start(&[]);
    let pages = 48 * MIB / PAGE;
    let mut world = World::new(&server.url(), pages, None);
    world.fill(0..pages, 0);
    wait_for("data in the store", || world.count(|s| &s.remote_out) > 2048);
    // SAFETY: the child drops the service, for which it needs only malloc's lock, which fork leaves
    // free; and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let World { service, region, memory, _dir } = world;
        let outcome = service.delete_keys().is_ok();
        drop(service);
        std::mem::forget((region, memory, _dir));
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(if outcome { 7 } else { 8 }) }
    }
    let mut status = 0;
    // SAFETY: waits for the child, whose number it is.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(libc::WEXITSTATUS(status), 7, "{status:#x}");
    assert!((0..pages).all(|n| world.is_right(n, 0)), "no key was deleted");
    assert!(!server.keys().is_empty());
    // The socket was not removed: a new engine is served.
    let remote = common::remote(&world._dir.0.join("socket"));
    remote.keep(LONG).unwrap();
    let World { region, memory, service, _dir } = world;
    drop((region, memory));
    drop(service);
    assert_eq!(server.cli(&["dbsize"]), "0");
}

fn say(mut to: &UnixStream) {
    to.write_all(b"x").unwrap();
}

fn hear(mut from: &UnixStream) {
    from.read_exact(&mut [0]).unwrap();
}

/// Runs `work` in a child of fork, which then ends.
fn child(work: impl FnOnce()) -> i32 {
    // SAFETY: the child needs only malloc's lock, which fork leaves free; and ends.
    match unsafe { libc::fork() } {
        0 => {
            let has_failed = catch_unwind(AssertUnwindSafe(work)).is_err();
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(has_failed as i32) }
        }
        pid => pid,
    }
}

fn wait(pid: i32) {
    let mut status = 0;
    // SAFETY: waits for a child of this test.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert_eq!(status, 0);
}

/// Puts an object from an engine in a process that ends at once.
fn put_and_end(socket: &Path, then: impl FnOnce(&SocketRemote)) {
    wait(child(|| {
        let remote = common::remote(socket);
        remote.put(&[StoredObject { number: 1, bytes: &[7; PAGE] }]).unwrap();
        then(&remote);
    }));
}

#[test]
fn data_lent_to_a_forked_child_is_kept_until_it_ends() {
    if !is_there() {
        return;
    }
    let (server, dir) = (Server::start(&[]), Scratch::new());
    let socket = dir.0.join("socket");
    let settings = StoreSettings::parse(&server.url(), Duration::from_secs(20)).unwrap();
    let _service = Service::start(settings, &socket).unwrap();
    let pair = || UnixStream::pair().unwrap();
    let ((go, stop), (answer, tell)) = (pair(), pair());
    put_and_end(&socket, |remote| {
        let copies = DescendantWatch::new().unwrap();
        copies.begin_copy().unwrap();
        child(|| {
            // A child of an engine has no copy of its connections.
            remote.close();
            // SAFETY: nothing else uses this copy of it.
            unsafe { remote.begin_in_child().unwrap() };
            remote.get(&mut []).unwrap();
            hear(&go);
            let mut page = [0; PAGE];
            remote
                .get(&mut [ObjectFetch { forks: 1, number: 1, offset: 0, to: &mut page }])
                .unwrap();
            assert_eq!(page, [7; PAGE]);
            say(&tell);
            hear(&go);
        });
        remote.lend(&copies).unwrap();
    });
    // A process that ends reports it.
    drop(tell);
    let keys_lent = server.keys();
    assert_eq!(keys_lent.len(), 1);
    // Objects that are not lent are deleted, so the service has looked by then.
    for _ in 0..2 {
        put_and_end(&socket, |_| ());
        wait_for("what another process has left to go", || server.keys() == keys_lent);
    }
    say(&stop);
    hear(&answer);
    say(&stop);
    wait_for("what was lent to go", || server.keys().is_empty());
}

/// Runs a service that is killed while its engines still store.
#[test]
fn objects_in_transfer_at_the_runs_end_are_deleted() {
    if !is_there() {
        return;
    }
    let server = Server::start(&[]);
    for round in 0..200 {
        let dir = Scratch::new();
        let socket = dir.0.join("socket");
        let settings = StoreSettings::parse(&server.url(), Duration::from_secs(20)).unwrap();
        let service = Service::start(settings, &socket).unwrap();
        let (store_count, over) = (AtomicUsize::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let (remote, bytes) = (common::remote(&socket), vec![7; 100_000]);
                    while !over.load(Relaxed) {
                        // Puts are refused after the end of the run.
                        let number = store_count.fetch_add(1, Relaxed) as u64;
                        let _ = remote.put(&[StoredObject { number, bytes: &bytes }]);
                    }
                });
            }
            while store_count.load(Relaxed) < 20 + round % 7 {
                std::thread::yield_now();
            }
            service.delete_keys().unwrap();
            over.store(true, Relaxed);
        });
        assert_eq!(server.cli(&["dbsize"]), "0", "in round {round}");
    }
}

#[test]
fn c2_pool_fault_is_handled_while_the_store_hangs() {
    if !is_there() {
        return;
    }
    let server = Server::start(&[]);
    let (far, near) = (48 * MIB / PAGE, 4 * MIB / PAGE);
    let mut world = World::new(&server.url(), far + near, None);
    world.fill(0..far, 0);
    world.fill(far..far + near, 3);
    world.region.pageout(0..(far + near) * PAGE);
    wait_for("data in the store", || world.count(|s| &s.remote_out) > 4096);
    server.pause(true);
    let (world, reach, sight) = (&world, &AtomicUsize::new(0), &AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let first = scope.spawn(move || {
            (0..far).all(|n| {
                reach.store(n + 1, Relaxed);
                world.is_right(n, 0)
            })
        });
        let is_stuck = || {
            let before = reach.load(Relaxed);
            std::thread::sleep(Duration::from_millis(300));
            before > 0 && reach.load(Relaxed) == before
        };
        wait_for("a read of what is in the store", is_stuck);
        let at = reach.load(Relaxed);
        let second = scope.spawn(move || {
            (far..far + near).all(|n| {
                sight.store(n + 1 - far, Relaxed);
                world.is_right(n, 3)
            })
        });
        let begin = Instant::now();
        while !second.is_finished() && begin.elapsed() < Duration::from_secs(15) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let (is_done, still) = (second.is_finished(), reach.load(Relaxed));
        server.pause(false);
        assert!(
            is_done,
            "it waits for a server that it does not need, at page {} of {near}",
            sight.load(Relaxed)
        );
        assert_eq!(still, at, "the first thread waits all the time");
        assert!(second.join().unwrap() && first.join().unwrap(), "every byte is right");
    });
}

const EXPIRY: Duration = Duration::from_secs(3);
const URL: &str = "MEMFOLD_LIBRARY_TEST_URL";

/// Not a test: the next test runs this in its own process, and kills it.
#[test]
fn a_program_that_is_killed() {
    let Ok(url) = std::env::var(URL) else { return };
    let pages = 40 * MIB / PAGE;
    let mut world = World::new(&url, pages, Some(EXPIRY));
    world.fill(0..pages, 0);
    println!("\nfilled");
    for _ in std::io::stdin().lines() {
        println!("\n{}", if (0..pages).all(|n| world.is_right(n, 0)) { "right" } else { "wrong" });
    }
    // The process that started this one is gone.
    std::process::exit(0);
}

#[test]
fn b3_keys_outlive_expiry_only_while_the_run_lives() {
    if !is_there() {
        return;
    }
    let server = Server::start(&[]);
    // Its remains are removed too.
    let dir = Scratch::new();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "a_program_that_is_killed", "--nocapture"])
        .env(URL, server.url())
        .env("TMPDIR", &dir.0);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line == "filled"));
    let mut keys = Vec::new();
    wait_for("the mover to rest", || {
        let before = std::mem::replace(&mut keys, server.keys());
        std::thread::sleep(Duration::from_millis(200));
        keys.len() > 50 && keys.len() == before.len() && before.iter().all(|key| keys.contains(key))
    });
    let time_left: i64 = server.cli(&["pttl", &keys[0]]).parse().unwrap();
    assert!(
        time_left <= EXPIRY.as_millis() as i64,
        "the interval is that of the test: {time_left} ms"
    );
    std::thread::sleep(EXPIRY * 2 + EXPIRY / 2);
    let now = server.keys();
    assert!(keys.iter().all(|key| now.contains(key)), "{} keys were {}", now.len(), keys.len());
    use std::io::Write;
    writeln!(child.stdin.as_ref().unwrap()).unwrap();
    assert_eq!(lines.find(|line| line == "right" || line == "wrong").as_deref(), Some("right"));
    assert!(!server.keys().is_empty());
    child.kill().unwrap();
    child.wait().unwrap();
    wait_for("the keys to expire", || server.cli(&["dbsize"]) == "0");
}
