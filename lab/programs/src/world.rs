//! The worlds in which programs run.
use memfold_testkit::random::Random;
use memfold_testkit::redis::{self, Server};
use memfold_testkit::scratch::Scratch;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// How a program is run.
pub struct World {
    /// Its name.
    pub name: &'static str,
    /// What comes before `memfold`.
    before: &'static [&'static str],
    /// Flags of `memfold run`. `DIR` is a directory for its swap file.
    flags: &'static [&'static str],
    /// Part of the data moves to a remote store.
    is_remote: bool,
}

const fn world(name: &'static str, flags: &'static [&'static str]) -> World {
    World { name, before: &[], flags, is_remote: false }
}

const SWAP: &[&str] = &["--resident", "8M", "--swap-keep-free", "64M", "--swap", "DIR"];
const AS_OTHER_USER: &[&str] = &["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];

/// All worlds.
pub const WORLDS: &[World] = &[
    world("userfaultfd", &["--resident", "8M"]),
    world("swap", SWAP),
    world("protection", &["--resident", "8M", "--paging", "protection"]),
    world("guard", &["--resident", "8M", "--paging", "guard"]),
    world(
        "checksums",
        &["--resident", "8M", "--swap-keep-free", "64M", "--swap", "DIR", "--swap-encrypt", "off"],
    ),
    world("packed", &["--limit", "12M", "--swap-keep-free", "64M", "--swap", "DIR"]),
    world("tiny", &["--limit", "8M"]),
    world("group", &["--group", "programs"]),
    World { name: "user", before: AS_OTHER_USER, flags: &["--resident", "8M"], is_remote: false },
    World { name: "namespace", before: &["unshare", "-Ur"], flags: SWAP, is_remote: false },
    World { name: "remote", before: &[], flags: SWAP, is_remote: true },
];

/// Flags that a seed adds in some of its runs.
const MORE: &[&[&str]] = &[
    &["--folio", "4K", "--block", "4K"],
    &["--folio", "64K"],
    &["--block", "4K"],
    &["--block", "64K"],
    &["--codec", "lz4"],
    &["--codec", "zstd"],
    &["--canned", "on"],
    &["--verify", "on"],
    &["--readahead", "off"],
    &["--recompress", "zstd", "--recompress-after", "1", "--recompress-cpu", "100"],
    &["--workers", "4", "--pools", "2"],
    &["--clean", "0"],
];

/// Draws the flags that a seed adds in a world: none half of the time.
pub fn more_flags(seed: u64, world: &World) -> &'static [&'static str] {
    let number = world.name.bytes().map(u64::from).sum::<u64>();
    let mut random = Random::new(seed.wrapping_mul(1 << 10).wrapping_add(number));
    if random.per_mille(500) { &[] } else { random.pick(MORE) }
}

/// Where `memfold` is, and what its runs need.
pub struct Place {
    memfold: PathBuf,
    /// Swap files and sockets.
    scratch: Scratch,
    server: Option<Server>,
}

impl Place {
    /// Prepares for runs of the `memfold` in a directory.
    ///
    /// # Panics
    /// If there is none.
    pub fn new(directory: &Path) -> Place {
        let memfold = directory.join("memfold").canonicalize().expect("a built memfold");
        let scratch = Scratch::new();
        std::fs::set_permissions(&scratch.0, PermissionsExt::from_mode(0o777)).expect("it's ours");
        let server = redis::is_there().then(|| Server::start(&[]));
        let place = Place { memfold, scratch, server };
        let group = ["set", "--group", "programs", "--limit", "8M"];
        let status = place.command(&place.memfold, &[]).args(group).status();
        assert!(status.expect("memfold starts").success(), "a group can't be made");
        place
    }

    fn command(&self, program: &Path, before: &[&str]) -> Command {
        let mut command = match before {
            [] => Command::new(program),
            [first, rest @ ..] => {
                let mut command = Command::new(first);
                command.args(rest).arg(program);
                command
            }
        };
        command
            .env_remove("MEMFOLD_RUN")
            .env_remove("MEMFOLD_DISABLE")
            .env("XDG_RUNTIME_DIR", &self.scratch.0)
            .current_dir(&self.scratch.0)
            .stdin(Stdio::null());
        command
    }

    /// Returns the command that runs a program plainly.
    pub fn plainly(&self, program: &str) -> Command {
        self.command(Path::new(program), &[])
    }

    /// Returns the command that runs a program in a world, and writes figures to a file.
    pub fn run(&self, world: &World, more: &[&str], figures: &str, program: &str) -> Command {
        let mut command = self.command(&self.memfold, world.before);
        command.args(["run", "--stats-file", figures]);
        for flag in world.flags {
            match *flag {
                "DIR" => command.arg(&self.scratch.0),
                flag => command.arg(flag),
            };
        }
        if let (true, Some(server)) = (world.is_remote, &self.server) {
            let url = server.url();
            command.args(["--swap-size", "10M", "--remote-at", "50", "--remote", &url]);
        }
        command.args(more).args(["--", program]);
        command
    }

    /// Returns why programs don't run in this world on this machine, if they don't.
    pub fn refuses(&self, world: &World) -> Option<String> {
        if world.is_remote && self.server.is_none() {
            return Some("no redis-server".to_string());
        }
        let figures = self.scratch.path(world.name);
        match self.run(world, &[], &figures, "true").output() {
            Ok(output) if output.status.success() => None,
            Ok(output) => Some(String::from_utf8_lossy(&output.stderr).trim().to_string()),
            Err(why) => Some(why.to_string()),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let group = ["set", "--group", "programs", "--limit", "none"];
        let _ = self.command(&self.memfold, &[]).args(group).status();
    }
}
