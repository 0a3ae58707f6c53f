//! The service with many engines, and with few descriptors or none. Row B3.
mod common;
use common::{Scratch, remote};
use memfold_remote::{Service, StoreSettings};
use memfold_swap::remote::socket::SocketRemote;
use memfold_swap::remote::{ObjectFetch, Remote, StoredObject};
use memfold_testkit::fill::partly_random;
use memfold_testkit::redis::{Server, is_there};
use std::fs::File;
use std::io::{BufRead, BufReader, Lines, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

const PLACE: &str = "MEMFOLD_MANY_TEST_PLACE";
const ENGINES: u64 = 200;

/// Not a test: a service in its own process, which takes commands by lines.
#[test]
fn a_service_by_itself() {
    let Ok(place) = std::env::var(PLACE) else { return };
    let (url, socket) = place.split_once(' ').unwrap();
    let settings = StoreSettings::parse(url, Duration::from_secs(30)).unwrap();
    let service = Service::start(settings, socket.as_ref()).unwrap();
    println!("\nready");
    let mut lines_held = Vec::new();
    for line in std::io::stdin().lines() {
        match line.unwrap().split_once(' ') {
            Some(("limit", count)) => {
                let count = count.parse().unwrap();
                let limit = libc::rlimit { rlim_cur: count, rlim_max: count };
                // SAFETY: `limit` is local.
                assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
            }
            Some(("hold", _)) => {
                lines_held.extend(std::iter::from_fn(|| File::open("/dev/null").ok()))
            }
            _ => lines_held.clear(),
        }
        println!("\ndone");
    }
    drop(service);
    std::process::exit(0);
}

/// A process with a service. It ends with this value.
struct World {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    socket: PathBuf,
    _server: Server,
    _dir: Scratch,
}

impl World {
    fn new() -> World {
        let (server, dir) = (Server::start(&[]), Scratch::new());
        let socket = dir.0.join("socket");
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "a_service_by_itself", "--nocapture"]);
        command.env(PLACE, format!("{} {}", server.url(), socket.display()));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut world = World { child, lines, socket, _server: server, _dir: dir };
        world.await_line("ready");
        world
    }

    fn await_line(&mut self, line: &str) {
        assert!(
            self.lines.by_ref().map(Result::unwrap).any(|line_read| line_read == line),
            "the service has ended"
        );
    }

    fn tell(&mut self, what: &str) {
        writeln!(self.child.stdin.as_ref().unwrap(), "{what}").unwrap();
        self.await_line("done");
    }

    fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count()
    }

    /// Returns the processor time of the process.
    fn cpu(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        // SAFETY: this call only asks.
        let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as u64;
        Duration::from_millis(
            (fields[11..13].iter().map(|f| f.parse::<u64>().unwrap()).sum::<u64>()) * 1000 / ticks,
        )
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns an object of an engine, different from all others.
fn object(engine: u64, number: u64) -> Vec<u8> {
    partly_random(engine << 32 | number, 0)
}

fn puts(remote: &SocketRemote, engine: u64) {
    let all: Vec<Vec<u8>> = (1..4).map(|number| object(engine, number)).collect();
    let objects: Vec<StoredObject<'_>> = all
        .iter()
        .zip(1..)
        .map(|(bytes, number)| StoredObject { number, bytes: &bytes[..] })
        .collect();
    remote.put(&objects).unwrap();
}

/// Returns whether three threads read what was put, each several times.
fn gets(remote: &SocketRemote, engine: u64) -> bool {
    let get = |number: u64| {
        let mut to = vec![0; 4096];
        remote.get(&mut [ObjectFetch { forks: 0, number, offset: 0, to: &mut to }]).unwrap();
        to == object(engine, number)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            (1..4).map(|number| scope.spawn(move || (0..5).all(|_| get(number)))).collect();
        threads.into_iter().all(|thread| thread.join().unwrap())
    })
}

/// Makes all engines at once.
fn each(remotes: &[SocketRemote], does: impl Fn(&SocketRemote, u64) -> bool + Sync) -> bool {
    let does = &does;
    std::thread::scope(|scope| {
        let engines = remotes.iter().zip(1..);
        let threads: Vec<_> =
            engines.map(|(remote, engine)| scope.spawn(move || does(remote, engine))).collect();
        threads.into_iter().all(|thread| thread.join().unwrap())
    })
}

fn put_and_get(remote: &SocketRemote, engine: u64) -> bool {
    puts(remote, engine);
    gets(remote, engine)
}

#[test]
fn engine_takes_one_descriptor_and_shares_store_connections() {
    if !is_there() {
        return;
    }
    let world = World::new();
    let before = world.descriptors();
    let remotes: Vec<_> = (0..ENGINES).map(|_| remote(&world.socket)).collect();
    assert!(each(&remotes, put_and_get), "every byte is right");
    let descriptors = world.descriptors() - before;
    assert!(
        (200..=200 + 16).contains(&descriptors),
        "{descriptors} descriptors for {ENGINES} engines"
    );
}

#[test]
fn more_engines_than_descriptors_are_served_all_the_same() {
    if !is_there() {
        return;
    }
    let mut world = World::new();
    world.tell("limit 64");
    let remotes: Vec<_> = (0..ENGINES).map(|_| remote(&world.socket)).collect();
    for (remote, engine) in remotes.iter().zip(1..) {
        puts(remote, engine);
    }
    assert!(
        remotes.iter().zip(1..).all(|(remote, engine)| gets(remote, engine)),
        "every byte is right"
    );
    assert!(world.descriptors() <= 64);
}

/// The measure is a thread that takes all the time that it gets, so the load of the machine does
/// not matter.
#[test]
fn a_service_without_descriptors_sleeps_until_there_are_some() {
    if !is_there() {
        return;
    }
    let mut world = World::new();
    world.tell("limit 64");
    world.tell("hold all");
    let waits = UnixStream::connect(&world.socket).unwrap();
    let before = world.cpu();
    let mut own = 0;
    let start_ns = memfold_os::thread::cpu_ns();
    while own < 300_000_000 {
        own = memfold_os::thread::cpu_ns() - start_ns;
    }
    let cpu_time = world.cpu() - before;
    assert!(
        cpu_time < Duration::from_millis(75),
        "{cpu_time:?} in which a thread that spins gets 300 ms"
    );
    world.tell("free all");
    let remote = remote(&world.socket);
    assert!(put_and_get(&remote, 1));
    drop(waits);
}
