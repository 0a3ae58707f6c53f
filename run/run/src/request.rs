//! The request of `memfold run` to each process: the text of one environment variable, and how it
//! is found there.
//!
//! The text is lines joined by semicolons: the settings of the engine, and `stats=PATH`,
//! `bounds=PATH` and `door=NAME,KEY`, which lead to the shared memory. A run under `memfold record`
//! has `samples=PATH` too. A process in another network namespace passes `socket=NUMBER` on.
use crate::door::DoorKey;
use alloc::format;
use alloc::string::String;
use core::ffi::CStr;

/// The name of the environment variable as a C string.
pub const NAME: &CStr = c"MEMFOLD_RUN";
/// The name of the environment variable.
pub const VARIABLE: &str = match NAME.to_str() {
    Ok(name) => name,
    Err(_) => unreachable!(),
};

/// Prefixes of the paths: that of the table for processes of the user of `memfold run`, and that of
/// the bounds of the run.
const STATS: &str = "stats=";
const BOUNDS: &str = "bounds=";
/// Prefix of the path of the ring for samples.
const SAMPLES: &str = "samples=";
/// Prefix of the name of the door and the key.
const DOOR: &str = "door=";
/// Prefix of the number of a socket that is connected to the door.
pub const LINK: &str = "socket=";
/// Start of the paths of the descriptors of `memfold run`.
const PROC: &str = "/proc/";

/// How to get at the table.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct TableAddress<'a> {
    /// The paths of the table of the user of `memfold run`, and of the bounds. They work for a
    /// process that sees `memfold run` in /proc and may open its descriptors.
    pub paths: [&'a str; 2],
    /// The name of the door, for every other process.
    pub door: &'a str,
    /// The key. It proves to the door that a process may ask, and to the process that the table is
    /// that of its run.
    pub key: DoorKey,
}

/// Returns the path of a descriptor of the process `pid`, for [`TableAddress::paths`].
pub fn path_of(pid: u32, descriptor: i32) -> String {
    format!("{PROC}{pid}/fd/{descriptor}")
}

/// The request that a process is given.
#[derive(Copy, Clone)]
pub struct RunRequest<'a> {
    text: &'a str,
}

impl<'a> RunRequest<'a> {
    /// Returns the text of a request. No line of `settings` may have a semicolon.
    pub fn write(settings: &str, address: &TableAddress<'_>) -> String {
        let settings = settings.trim_end().replace('\n', ";");
        let TableAddress { paths: [stats, bounds], door, key } = address;
        format!("{settings};{STATS}{stats};{BOUNDS}{bounds};{DOOR}{door},{key}")
    }

    /// Adds the path of a ring for samples to the text of a request.
    pub fn add_samples(text: &mut String, path: &str) {
        *text += &format!(";{SAMPLES}{path}");
    }

    /// Returns the request with this text.
    pub fn new(text: &'a str) -> RunRequest<'a> {
        RunRequest { text }
    }

    /// Finds the request in an environment as `/proc/PID/environ` shows it. The environment that
    /// the program itself sees no longer has it, because memfold's library hides it. Returns `None`
    /// if the process belongs to no run.
    pub fn find(environment: &'a [u8]) -> Option<RunRequest<'a>> {
        let value = environment.split(|byte| *byte == 0).find_map(|entry| {
            let value = entry.strip_prefix(VARIABLE.as_bytes())?.strip_prefix(b"=")?;
            Some(value).filter(|value| !value.is_empty())
        })?;
        core::str::from_utf8(value).ok().map(RunRequest::new)
    }

    /// Returns the text.
    pub fn text(&self) -> &'a str {
        self.text
    }

    fn lines(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.text.split(';')
    }

    fn line(&self, prefix: &str) -> Option<&'a str> {
        self.lines().find_map(|line| line.strip_prefix(prefix))
    }

    /// Returns the settings, one in each line.
    pub fn settings(&self) -> String {
        let is_setting = |line: &&str| {
            [STATS, BOUNDS, DOOR, SAMPLES, LINK].iter().all(|what| !line.starts_with(what))
        };
        // In one allocation: each size of one costs a program a page fault at its start.
        let mut settings = String::with_capacity(self.text.len() + 1);
        self.lines()
            .filter(is_setting)
            .flat_map(|line| [line, "\n"])
            .for_each(|part| settings += part);
        settings
    }

    /// Returns how to get at the table, or `None` if the text does not say it.
    pub fn address(&self) -> Option<TableAddress<'a>> {
        let (door, key) = self.line(DOOR)?.split_once(',')?;
        let paths = [self.line(STATS)?, self.line(BOUNDS)?];
        Some(TableAddress { paths, door, key: DoorKey::parse(key)? })
    }

    /// Returns the path of the ring for samples, or `None` if nothing is recorded. It works for the
    /// same processes as [`TableAddress::paths`].
    pub fn samples(&self) -> Option<&'a str> {
        self.line(SAMPLES)
    }

    /// Returns the number of the socket that the program before has left.
    pub fn link(&self) -> Option<i32> {
        self.line(LINK)?.parse().ok()
    }

    /// Returns the process ID of `memfold run` in its own PID namespace.
    pub fn runner(&self) -> Option<u32> {
        self.line(STATS)?.strip_prefix(PROC)?.split('/').next()?.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::door::HALF;

    const KEY: DoorKey = DoorKey { ask: [0x1f; HALF], answer: [0xa0; HALF] };

    fn address(paths: [&str; 2]) -> TableAddress<'_> {
        TableAddress { paths, door: "memfold-12ab", key: KEY }
    }

    #[test]
    fn reader_gets_what_the_writer_was_given() {
        let paths = [path_of(77, 5), path_of(77, 6)];
        let address = address([&paths[0], &paths[1]]);
        let text = RunRequest::write("limit=5\nswap=/a=b,c\n", &address);
        let request = RunRequest::new(&text);
        assert_eq!(request.settings(), "limit=5\nswap=/a=b,c\n");
        assert_eq!(request.address(), Some(address));
        assert_eq!((request.runner(), request.samples()), (Some(77), None));
        let mut text_with_samples = text.clone();
        RunRequest::add_samples(&mut text_with_samples, "/proc/77/fd/9");
        let request = RunRequest::new(&text_with_samples);
        assert_eq!((request.samples(), request.address()), (Some("/proc/77/fd/9"), Some(address)));
        assert_eq!((request.settings().as_str(), request.link()), ("limit=5\nswap=/a=b,c\n", None));
        let text_with_link = text_with_samples + ";socket=994";
        let request = RunRequest::new(&text_with_link);
        assert_eq!(
            (request.settings().as_str(), request.link()),
            ("limit=5\nswap=/a=b,c\n", Some(994))
        );
        assert_eq!(
            text,
            format!(
                "limit=5;swap=/a=b,c;stats=/proc/77/fd/5;bounds=/proc/77/fd/6;door=memfold-12ab,{}{}",
                "1f".repeat(HALF),
                "a0".repeat(HALF)
            )
        );
    }

    #[test]
    fn text_without_a_whole_address_has_settings_only() {
        let whole = RunRequest::write("limit=5", &address(["/proc/1/fd/2", "/proc/1/fd/3"]));
        for part in [STATS, BOUNDS, DOOR] {
            let rest: alloc::vec::Vec<&str> =
                whole.split(';').filter(|line| !line.starts_with(part)).collect();
            let text = rest.join(";");
            let request = RunRequest::new(&text);
            assert_eq!(
                (request.address(), request.settings().as_str()),
                (None, "limit=5\n"),
                "{part}"
            );
        }
        for text in
            [whole.replace("1f", "1g"), whole[..whole.len() - 1].into(), whole.clone() + "0"]
        {
            assert_eq!(RunRequest::new(&text).address(), None, "{text}");
        }
        for text in ["stats=/proc/x/fd/5", "stats=/run/5", "limit=5", ""] {
            assert_eq!(RunRequest::new(text).runner(), None, "{text}");
        }
    }

    #[test]
    fn request_is_found_in_an_environment() {
        let of =
            |text: &'static str| RunRequest::find(text.as_bytes()).map(|request| request.text());
        assert_eq!(of("A=1\0MEMFOLD_RUN=limit=5;x\0B=2\0"), Some("limit=5;x"));
        let none = ["", "A=1\0MEMFOLD_RUN=\0", "XMEMFOLD_RUN=1\0MEMFOLD_RUNS=2\0"];
        assert_eq!(none.map(of), [None; 3]);
    }
}
