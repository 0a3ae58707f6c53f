//! Why a program ended: a few lines, if a signal ended it or it lacked memory.
//!
//! The lines name only causes that the kernel has counted, or that the settings show. memfold does
//! not read the streams of the program, so it says which messages of a runtime to look for.
use crate::machine::oom::{GroupLimit, OomKills};
use memfold_engine::config::Size;
use std::ffi::OsString;

/// Status of a JVM with [`JVM_EXITS`] if an allocation has failed.
const JVM_STATUS: u8 = 3;
const JVM_EXITS: &str = "-XX:+ExitOnOutOfMemoryError";
const JVM_CRASHES: &str = "-XX:+CrashOnOutOfMemoryError";
/// The flag of V8 for its largest heap.
const V8_HEAP: &str = "--max-old-space-size";
/// The status of a shell or of another program that has waited for a process that SIGKILL ended.
const KILLED_STATUS: u8 = 128 + libc::SIGKILL as u8;

/// The least limit that memfold accepts, bytes.
const LIMIT_MIN: u64 = 8 << 20;

/// The facts about the end of a program.
#[derive(Clone, Default)]
pub struct Ending {
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// The exit status, as memfold passes it on.
    pub status: u8,
    /// The name of the file that the kernel executed: for a script, that of its interpreter.
    pub image: String,
    /// Its arguments, and then the words of the variables that its runtime reads.
    pub words: Vec<String>,
    /// Processes that the kernel has ended meanwhile for lack of memory.
    pub kills: OomKills,
    /// The most memory of the run in memfold's samples, bytes; 0 if there was none.
    pub peak_bytes: u64,
    /// The largest resident size of a process, including pages of files, bytes.
    pub largest_bytes: u64,
    /// The bound of the run as it was given.
    pub bound: String,
    /// The limit of the run, bytes.
    pub limit_bytes: Option<u64>,
    /// Data that does not compress, and has no swap file to go to, bytes.
    pub dense_bytes: u64,
    /// The limits of address space that it inherited, as `ulimit` names them, in bytes.
    pub address_limits: Vec<(&'static str, u64)>,
    /// The CPU time at which the kernel sends SIGKILL, if the program has used so much, seconds.
    pub cpu_limit: Option<u64>,
    /// Whether memfold has ended the program, and said why.
    pub is_ours: bool,
    /// Processes of the run that memfold has ended, and said why.
    pub ended: usize,
}

impl Ending {
    /// Returns the lines, each with the prefix `memfold: `. Returns `None` for an ordinary end, for
    /// signals with which users end programs, and if memfold has said why it ended the program.
    pub fn lines(&self) -> Option<String> {
        let [what, advice] = self.cause().filter(|_| !self.is_ours)?;
        let lines = [what, self.sizes(), advice];
        Some(lines.iter().map(|line| format!("memfold: {line}\n")).collect())
    }

    /// Returns what happened and why, and what to do.
    fn cause(&self) -> Option<[String; 2]> {
        match (self.signal, self.status) {
            (Some(libc::SIGKILL), _) => Some(self.killed()),
            (Some(libc::SIGABRT), _) => Some(self.aborted()),
            (Some(libc::SIGSEGV), _) => Some([
                format!("SIGSEGV ended the program: it accessed memory that it may not access, or got the signal from a process.{}", self.failing()),
                ELSEWHERE.to_string(),
            ]),
            (Some(libc::SIGBUS), _) => Some([
                "SIGBUS ended the program: it accessed a mapped page that its file does not have, or got the signal from a process.".to_string(),
                format!("Look whether the file was cut, or whether its file system (/dev/shm too) is full. {ELSEWHERE}"),
            ]),
            (Some(libc::SIGSYS), _) => Some([
                "SIGSYS ended the program: a seccomp filter refused a system call, or a process sent the signal.".to_string(),
                "If it works with MEMFOLD_DISABLE=1, let the filter allow the calls that docs/limits.md lists under Programs.".to_string(),
            ]),
            (None, JVM_STATUS) if self.is("java") && self.has_word(JVM_EXITS) => Some([
                format!("java ended with status {JVM_STATUS}, which {JVM_EXITS} makes of an OutOfMemoryError."),
                self.java_heap(),
            ]),
            (None, KILLED_STATUS) if self.kills.in_group > 0 => Some(self.oom_kill(&format!(
                "The program ended with status {KILLED_STATUS}, as if SIGKILL ended a process that it waited for"
            ))),
            _ => None,
        }
    }

    /// Returns the cause of a SIGKILL, and what to do.
    fn killed(&self) -> [String; 2] {
        let what = "SIGKILL ended the program";
        if self.kills.in_group > 0 {
            return self.oom_kill(what);
        }
        if let Some(seconds) = self.cpu_limit {
            return [
                format!("{what}. It used the {seconds} s of CPU time that `ulimit -t` allows it."),
                "Raise `ulimit -t`. memfold's threads count too.".to_string(),
            ];
        }
        let what = match self.kills.in_machine {
            0 => format!(
                "{what}. memfold does not know who sent it: the program itself, another process, or a limit that the program set."
            ),
            count => format!(
                "{what}. memfold does not know who sent it: the program itself, another process, a limit that the program set, or the kernel's OOM killer, which ended {} on this machine during the run.",
                processes(count)
            ),
        };
        [
            what,
            "Look in the logs of the batch system, container runtime, systemd-oomd or earlyoom. `dmesg` shows the kernel's own kills.".to_string(),
        ]
    }

    /// Returns that the kernel ended processes of the cgroup, and what to do.
    fn oom_kill(&self, what: &str) -> [String; 2] {
        let killer = format!(
            "{what}. The kernel's OOM killer ended {} of its cgroup during the run",
            processes(self.kills.in_group)
        );
        let Some(GroupLimit { folder, name, bytes }) = &self.kills.limit else {
            let lower = self.limit_bytes.map_or(self.peak_bytes, |limit| limit - limit / 4);
            let advice = match self.dense_bytes > lower / 2 {
                true => format!(
                    "{} Give --swap DIR, or more memory or swap to the machine.",
                    dense(self.dense_bytes)
                ),
                false => "Give a lower --limit, or more memory or swap to the machine.".to_string(),
            };
            return [
                format!("{killer}, because the machine or a cgroup around it was short of memory."),
                advice,
            ];
        };
        let what = format!(
            "{killer}, because {} reached its {name} of {}.",
            folder.display(),
            Size(*bytes)
        );
        let fits = bytes - bytes / 8;
        let limit = self.limit_bytes.filter(|limit| *limit <= fits);
        let lower = limit.map_or(fits, |limit| limit - limit / 4);
        let advice = match limit {
            // Half of it, because the rest of the program needs memory too.
            _ if self.dense_bytes > lower / 2 => format!(
                "{} Give --swap DIR, or raise {name}; a lower --limit can't be kept.",
                dense(self.dense_bytes)
            ),
            None if fits < LIMIT_MIN => format!("Raise {name}."),
            Some(_) if lower < LIMIT_MIN => format!("{UNCOUNTED} Raise {name}."),
            None => format!("Give --limit {}M or less, or raise {name}.", lower >> 20),
            // Other memory was the reason.
            Some(limit) if self.peak_bytes < limit / 2 => {
                format!(
                    "{UNCOUNTED} A lower --limit would not help. Raise {name}, or use less of that."
                )
            }
            Some(_) => {
                format!("{UNCOUNTED} Give --limit {}M or less, or raise {name}.", lower >> 20)
            }
        };
        [what, advice]
    }

    fn aborted(&self) -> [String; 2] {
        let what = format!(
            "SIGABRT ended the program: it called abort, or got the signal from a process.{}",
            self.failing()
        );
        let advice = match () {
            () if self.is("node") || self.is("nodejs") => {
                let now = self.words.iter().rev().find_map(|word| word.strip_prefix(V8_HEAP)?.strip_prefix('='));
                let now = now.map_or(String::new(), |mib| format!(", now {mib}"));
                format!("If node reported that it reached its heap limit: {V8_HEAP}=MIB (in NODE_OPTIONS or after node{now}) raises it. memfold's limit does not change it.")
            }
            () if self.is("java") && self.has_word(JVM_CRASHES) => format!("{JVM_CRASHES} is set. {}", self.java_heap()),
            () if self.is("java") => "If java reported an OutOfMemoryError: -Xmx raises its heap. Its hs_err_pid file says more.".to_string(),
            () => format!("Read what it printed before. {ELSEWHERE}"),
        };
        [what, advice]
    }

    fn java_heap(&self) -> String {
        let now = self.words.iter().rev().find(|word| word.starts_with("-Xmx"));
        let now = now.map_or(String::new(), |word| format!(" (now {word})"));
        format!("-Xmx raises the heap{now}. memfold's limit does not change it.")
    }

    /// Returns a sentence about the limits on address space, if there are any: an allocation that
    /// fails makes many programs abort or crash.
    fn failing(&self) -> String {
        let of = |(flag, bytes): &(&str, u64)| {
            format!(" `ulimit {flag}` is {}; allocations past it fail.", Size(*bytes))
        };
        self.address_limits.iter().map(of).collect()
    }

    /// Returns the sizes of the run.
    fn sizes(&self) -> String {
        let largest = Size(self.largest_bytes);
        let size = match self.peak_bytes {
            0 => format!("The largest process had {largest} with its pages of files"),
            // A short program grows and ends between two samples.
            peak if peak < self.largest_bytes => format!(
                "memfold sampled at most {} in the run, and its largest process had {largest} with its pages of files",
                Size(peak)
            ),
            peak => format!("memfold sampled at most {} in the run", Size(peak)),
        };
        let end = match self.ended {
            0 => String::new(),
            count => {
                format!(" memfold ended {} of it, as the lines above say.", processes(count as u64))
            }
        };
        format!("{size} ({}).{end}", self.bound)
    }

    fn is(&self, image: &str) -> bool {
        self.image == image
    }

    fn has_word(&self, wanted: &str) -> bool {
        self.words.iter().any(|word| word == wanted)
    }
}

/// Why a run reaches the limit of its cgroup though it keeps its own.
const UNCOUNTED: &str =
    "The cgroup also counts page cache, shared memory, kernel memory and its other processes.";
/// Advice for an end of which memfold knows no cause.
const ELSEWHERE: &str =
    "MEMFOLD_DISABLE=1 shows whether it ends so without memfold; if not, please report it.";

/// Returns the sentence about data that does not compress and has no swap file.
fn dense(bytes: u64) -> String {
    format!("{} of data do not compress, so only a file can take them.", Size(bytes))
}

/// Returns the words of a program and of the variables that its runtime reads.
pub fn words(arguments: &[OsString]) -> Vec<String> {
    const VARIABLES: [&str; 3] = ["NODE_OPTIONS", "JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS"];
    let options = VARIABLES.into_iter().filter_map(|name| std::env::var(name).ok());
    let options: Vec<String> = options
        .flat_map(|text| text.split_whitespace().map(str::to_string).collect::<Vec<_>>())
        .collect();
    // Arguments come last, because they count more than variables.
    options
        .into_iter()
        .chain(arguments.iter().map(|word| word.to_string_lossy().into_owned()))
        .collect()
}

/// Returns the line of the summary about processes that the kernel ended.
pub fn kills_line(kills: &OomKills) -> Option<String> {
    let limit = kills.limit.as_ref().map_or(String::new(), |limit| {
        format!(
            ", because {} reached its {} of {}",
            limit.folder.display(),
            limit.name,
            Size(limit.bytes)
        )
    });
    (kills.in_group > 0).then(|| {
        format!(
            "the kernel's OOM killer ended {} of this cgroup during the run{limit}",
            processes(kills.in_group)
        )
    })
}

fn processes(count: u64) -> String {
    if count == 1 { "1 process".to_string() } else { format!("{count} processes") }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn limit() -> GroupLimit {
        GroupLimit { folder: "/sys/fs/cgroup/job".into(), name: "memory.max", bytes: 64 * MIB }
    }

    fn by(signal: i32) -> Ending {
        let image = "app".to_string();
        Ending {
            signal: Some(signal),
            status: 128 + signal as u8,
            image,
            peak_bytes: 50 * MIB,
            bound: "limit 9.0 MiB".to_string(),
            ..Ending::default()
        }
    }

    #[track_caller]
    fn assert_says(ending: &Ending, words: &[&str]) {
        let text = ending.lines().unwrap();
        assert!(
            text.lines().count() == 3 && text.lines().all(|line| line.starts_with("memfold: ")),
            "{text}"
        );
        assert!(words.iter().all(|word| text.contains(word)), "{words:?}: {text}");
    }

    #[test]
    fn ordinary_ends_and_those_by_users_have_no_lines() {
        for status in [0, 1, 2, 3, 42, 125, 127, 134, 137, 255] {
            assert_eq!(Ending { status, ..Ending::default() }.lines(), None, "{status}");
        }
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT, libc::SIGPIPE] {
            assert_eq!(by(signal).lines(), None, "{signal}");
        }
        assert_eq!(Ending { is_ours: true, ..by(libc::SIGABRT) }.lines(), None);
    }

    #[test]
    fn kill_by_the_kernel_names_the_cgroup_and_a_limit_that_fits() {
        let kills = OomKills { in_group: 1, in_machine: 1, limit: Some(limit()) };
        let kill = Ending { kills: kills.clone(), ..by(libc::SIGKILL) };
        assert_says(
            &kill,
            &[
                "SIGKILL ended the program. The kernel's OOM killer ended 1 process of its cgroup during the run, because /sys/fs/cgroup/job reached its memory.max of 64.0 MiB.\n",
                "memfold: memfold sampled at most 50.0 MiB in the run (limit 9.0 MiB).",
                "Give --limit 56M or less, or raise memory.max.",
            ],
        );
        let near = Ending { limit_bytes: Some(60 * MIB), ..kill.clone() };
        assert_says(&near, &["--limit 56M"]);
        let below = Ending { limit_bytes: Some(56 * MIB), ..near };
        assert_says(&below, &["also counts page cache", "Give --limit 42M or less"]);
        let little = Ending { peak_bytes: 8 * MIB, ..below };
        assert_says(&little, &["A lower --limit would not help. Raise memory.max"]);
        let wait = Ending { signal: None, status: 137, ..little };
        assert_says(
            &wait,
            &["status 137, as if SIGKILL ended a process that it waited for. The kernel's"],
        );
        // 123 MiB of random data stay above any limit.
        let full = Ending { dense_bytes: 123 * MIB, ..kill.clone() };
        assert_says(
            &full,
            &["123.0 MiB of data do not compress", "Give --swap DIR, or raise memory.max;"],
        );
        let few = Ending { dense_bytes: 20 * MIB, ..kill.clone() };
        assert_says(&few, &["Give --limit 56M or less"]);
        let of_machine = OomKills { in_group: 2, in_machine: 5, limit: None };
        assert_says(
            &Ending { kills: of_machine, ..by(libc::SIGKILL) },
            &[
                "2 processes of its cgroup during the run, because the machine or a cgroup around it was short of memory",
                "more memory or swap",
            ],
        );
    }

    #[test]
    fn kill_without_counts_of_the_kernel_has_an_unknown_sender() {
        assert_says(
            &by(libc::SIGKILL),
            &[
                "does not know who sent it: the program itself, another process, or a limit that the program set.\n",
            ],
        );
        let elsewhere = OomKills { in_group: 0, in_machine: 2, limit: None };
        assert_says(
            &Ending { kills: elsewhere, ..by(libc::SIGKILL) },
            &[
                "the program set, or the kernel's OOM killer, which ended 2 processes on this machine during the run",
            ],
        );
        let slow = Ending { cpu_limit: Some(9), ..by(libc::SIGKILL) };
        assert_says(
            &slow,
            &["It used the 9 s of CPU time that `ulimit -t` allows it.", "Raise `ulimit -t`"],
        );
    }

    #[test]
    fn limits_of_runtimes_are_named_with_their_flags() {
        let of = |image: &str, words: &[&str]| {
            let words = words.iter().map(|word| word.to_string()).collect();
            Ending { image: image.to_string(), words, ..by(libc::SIGABRT) }
        };
        assert_says(
            &of("app", &["--max-old-space-size=30"]),
            &["it called abort", "MEMFOLD_DISABLE=1"],
        );
        let node =
            of("node", &["--max-old-space-size=20", "node", "--max-old-space-size=30", "x.js"]);
        assert_says(
            &node,
            &["If node reported that it reached its heap limit", "after node, now 30) raises it"],
        );
        assert_says(&of("java", &[]), &["If java reported an OutOfMemoryError", "hs_err_pid"]);
        assert_says(
            &of("java", &["-Xmx64m", JVM_CRASHES]),
            &["is set. -Xmx raises the heap (now -Xmx64m)"],
        );
        let ends = Ending { signal: None, status: 3, ..of("java", &[JVM_EXITS]) };
        assert_says(
            &ends,
            &["status 3, which -XX:+ExitOnOutOfMemoryError makes of an OutOfMemoryError"],
        );
        assert_eq!(Ending { signal: None, status: 3, ..of("java", &[]) }.lines(), None);
    }

    #[test]
    fn known_limits_and_ends_by_memfold_are_added() {
        let ending =
            Ending { address_limits: vec![("-v", 90 << 30)], ended: 2, ..by(libc::SIGSEGV) };
        assert_says(
            &ending,
            &[
                "`ulimit -v` is 90.00 GiB; allocations past it fail",
                "memfold ended 2 processes of it",
            ],
        );
        assert_says(&by(libc::SIGBUS), &["/dev/shm too"]);
        assert_says(&by(libc::SIGSYS), &["a seccomp filter refused"]);
        let small = Ending { peak_bytes: 0, largest_bytes: 3 * MIB, ..by(libc::SIGSEGV) };
        assert_says(
            &small,
            &["The largest process had 3.0 MiB with its pages of files (limit 9.0 MiB).\n"],
        );
        let short = Ending { peak_bytes: 2 * MIB, ..small };
        assert_says(
            &short,
            &["sampled at most 2.0 MiB in the run, and its largest process had 3.0 MiB with"],
        );
    }

    #[test]
    fn summary_counts_processes_that_the_kernel_ended() {
        assert_eq!(kills_line(&OomKills { in_machine: 3, ..OomKills::default() }), None);
        let kills = OomKills { in_group: 2, in_machine: 3, limit: Some(limit()) };
        assert_eq!(
            kills_line(&kills).unwrap(),
            "the kernel's OOM killer ended 2 processes of this cgroup during the run, because /sys/fs/cgroup/job reached its memory.max of 64.0 MiB"
        );
    }
}
