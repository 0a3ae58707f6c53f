//! `memfold check`, and `memfold run --check`: what works here, what does not work, why, and what
//! to do.
//!
//! Each line is the result of a probe (`memfold_os::probe`) or of a file. The last line runs a
//! program as `memfold run` would, so it also finds reasons that no other line knows.
use crate::failure::CommandFailure;
use crate::group;
use crate::printable::printable;
use crate::{delivery, machine, program, run};
use clap::parser::ValueSource;
use clap::{ArgMatches, Command};
use memfold_engine::config::keys::{Audience, KEYS};
use memfold_engine::config::{Config, PagingKind, Size};
use memfold_os::probe::{self, CALLS};
use memfold_os::uffd::{Uffd, UffdSource, feature};
use memfold_swap::disk::file_disk::{FileDisk, FileDiskOptions};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::process::Stdio;

/// The result of a check.
enum CheckAnswer {
    /// It works, or is only information.
    Good(String),
    /// It does not work, and `run` works without it.
    Less(String),
    /// It does not work, and `run` needs it.
    Bad(String),
}
use CheckAnswer::{Bad, Good, Less};

struct SystemCheck {
    name: &'static str,
    probe: CheckProbe,
    /// The loss if the check fails. `fix` is the remedy, which every check that can fail has.
    why: &'static str,
    fix: &'static str,
}

enum CheckProbe {
    /// It is only information, and can't fail.
    Tells(fn(&ArgMatches) -> String),
    Tests(fn(&ArgMatches) -> CheckAnswer),
}
use CheckProbe::{Tells, Tests};

/// The checks, in the order of the output.
const CHECKS: &[SystemCheck] = &[
    SystemCheck {
        name: "kernel",
        probe: Tests(kernel),
        why: "memfold run needs these features; docs/limits.md lists them",
        fix: "use a newer kernel",
    },
    SystemCheck { name: "user", probe: Tells(user), why: "", fix: "" },
    SystemCheck {
        name: "sandbox",
        probe: Tests(sandbox),
        why: "a seccomp filter refuses these calls, or the kernel does not have them",
        fix: "only lines marked NO stop a run; docs/places.md lists what each profile allows",
    },
    SystemCheck {
        name: "userfaultfd",
        probe: Tests(userfaultfd),
        why: "without it memory is paged by guard pages or page protection, which is slower",
        fix: "in a container, `--device /dev/userfaultfd`; elsewhere, as root, `sysctl vm.unprivileged_userfaultfd=1`, or \
              install contrib/90-memfold-userfaultfd.rules for the device, or grant CAP_SYS_PTRACE",
    },
    SystemCheck {
        name: "  by system call",
        probe: Tests(by_call),
        why: "one of the two ways to a userfaultfd; one is enough",
        fix: "not needed where the device can be opened; else, as root, `sysctl vm.unprivileged_userfaultfd=1`",
    },
    SystemCheck {
        name: "  by device",
        probe: Tests(by_device),
        why: "one of the two ways to a userfaultfd; one is enough",
        fix: "not needed where the system call is allowed; else see userfaultfd above",
    },
    SystemCheck {
        name: "  features",
        probe: Tests(features),
        why: "without MOVE pages are copied; if another feature is missing, memory is paged by guard pages or page protection",
        fix: "use Linux 6.8 or newer, and allow userfaultfd as above",
    },
    SystemCheck {
        name: "UFFDIO_MOVE",
        probe: Tests(moves),
        why: "without it pages are copied, which is slower",
        fix: "use Linux 6.8 or newer, and allow userfaultfd",
    },
    SystemCheck {
        name: "protection",
        probe: Tests(hides),
        why: "memory can't be paged at all where userfaultfd is unavailable",
        fix: "mount /proc, and boot with proc_mem.force_override=always on the kernel command line",
    },
    SystemCheck {
        name: "guard pages",
        probe: Tests(guards),
        why: "without them memory is paged by page protection where userfaultfd is unavailable, which is slower",
        fix: "use Linux 6.16 or newer",
    },
    SystemCheck {
        name: "PAGEMAP_SCAN",
        probe: Tests(scans),
        why: "without it memfold reads the whole page map, which is slower",
        fix: "use Linux 6.7 or newer, with /proc",
    },
    SystemCheck {
        name: "PROCMAP_QUERY",
        probe: Tests(queries),
        why: "without it memfold reads all of /proc/self/maps for each look-up",
        fix: "use Linux 6.11 or newer",
    },
    SystemCheck {
        name: "process_madvise",
        probe: Tests(drops),
        why: "without it pages are evicted one range at a time instead of in batches",
        fix: "use Linux 6.13 or newer; in a container, `--cap-add SYS_PTRACE` or a profile that allows the call",
    },
    SystemCheck {
        name: "dispatch",
        probe: Tests(dispatches),
        why: "the gate needs Syscall User Dispatch, and memfold run needs the gate",
        fix: "use Linux 5.11 or newer on x86-64; a sandbox such as gVisor does not have it",
    },
    SystemCheck {
        name: "patching",
        probe: Tests(patches),
        why: "without it each system call of a program takes about a microsecond longer",
        fix: "allow code to be written: no MemoryDenyWriteExecute= in the unit, no PR_SET_MDWE, execmem and execmod in SELinux",
    },
    SystemCheck {
        name: "faults",
        probe: Tests(served),
        why: "memfold run handles page faults in the faulting thread, and one of its needs is missing",
        fix: "fix what is marked above",
    },
    SystemCheck {
        name: "io_uring",
        probe: Tests(rings),
        why: "without it each transfer to or from the swap file costs a system call",
        fix: "set kernel.io_uring_disabled=0; in a container, use a profile that allows io_uring_setup, _enter and _register",
    },
    SystemCheck {
        name: "swap file",
        probe: Tests(swap),
        why: "without O_DIRECT its pages also fill the page cache, which memfold does not limit",
        fix: "give a directory on ext4, xfs or btrfs, not on tmpfs or overlayfs",
    },
    SystemCheck {
        name: "addresses",
        probe: Tests(addresses),
        why: "the engine reserves far more addresses than it uses memory",
        fix: "run `ulimit -v unlimited -d unlimited`",
    },
    SystemCheck {
        name: "descriptors",
        probe: Tests(descriptors),
        why: "memfold uses about ten descriptors in each process",
        fix: "run `ulimit -n 1024`",
    },
    SystemCheck { name: "memory", probe: Tells(memory), why: "", fix: "" },
    SystemCheck {
        name: "overcommit",
        probe: Tests(overcommit),
        why: "the kernel counts reserved memory and may refuse memory for pools and tables",
        fix: "as root, `sysctl vm.overcommit_memory=0`, or add swap",
    },
    SystemCheck {
        name: "mappings",
        probe: Tests(mappings),
        why: "a program with many mappings may reach this limit",
        fix: "as root, `sysctl vm.max_map_count=65530` or more",
    },
    SystemCheck {
        name: "preload library",
        probe: Tests(library),
        why: "this library is the part of memfold that works inside the program",
        fix: "keep libmemfold_preload.so beside memfold, or in ../lib/memfold",
    },
    SystemCheck {
        name: "settings",
        probe: Tests(settings),
        why: "memfold run refuses these settings",
        fix: "see `memfold run --help`",
    },
    SystemCheck {
        name: "command",
        probe: Tests(command_given),
        why: "memfold run refuses this command",
        fix: "give a dynamically linked program for this machine and C library",
    },
    SystemCheck {
        name: "a program",
        probe: Tests(trial),
        why: "a trial run of `memfold --version` under memfold run failed or warned",
        fix: "fix what is marked NO above, or follow the message",
    },
];

const STATUSES: &str = "Exit status: 0 if memfold run with these settings would work here, 1 if not, 125 if the check failed.";

/// Returns the command line of `check`: that of `run`.
pub fn command() -> Command {
    run::command()
        .name("check")
        .about("Checks whether memfold run works here, and prints what does not work, why, and what to do")
        .override_usage("memfold check [OPTIONS of run] [--] [CMD]")
        .after_help(STATUSES)
        .after_long_help(STATUSES)
}

/// Prints the results. Returns 0 if a run would work, else 1.
///
/// # Errors
/// Stdout can't be written.
pub fn main(matches: &ArgMatches) -> Result<u8, CommandFailure> {
    use std::io::Write;
    let (mut text, mut bad) = (String::new(), Vec::new());
    let calls = delivery::killing_calls();
    if !calls.is_empty() {
        // In the other checks the filter would kill this process.
        let (kills, allow) = (delivery::KILLS, delivery::ALLOW);
        let _ = writeln!(text, "{:<17}NO  {kills} {}", "sandbox", calls.join(", "));
        let _ = writeln!(text, "{:<21}fix: {allow}", "");
        bad.push("sandbox");
    }
    for check in CHECKS.iter().filter(|_| calls.is_empty()) {
        let answer = match check.probe {
            Tells(tell) => Good(tell(matches)),
            Tests(test) => test(matches),
        };
        let (mark, answer) = match answer {
            Good(answer) => ("ok", answer),
            Less(answer) => ("--", answer),
            Bad(answer) => {
                bad.push(check.name.trim());
                ("NO", answer)
            }
        };
        let _ = writeln!(text, "{:<17}{mark}  {}", check.name, printable(&answer));
        for (word, line) in [("why", check.why), ("fix", check.fix)] {
            if mark != "ok" && !line.is_empty() {
                let _ = writeln!(text, "{:<21}{word}: {line}", "");
            }
        }
    }
    let _ = match bad.is_empty() {
        true => writeln!(text, "memfold run works here"),
        false => writeln!(text, "memfold run does not work here: {}", bad.join(", ")),
    };
    std::io::stdout().write_all(text.as_bytes()).map_err(|e| {
        CommandFailure::own(format!("Writing to stdout failed: {}", program::plain(&e)))
    })?;
    Ok(!bad.is_empty() as u8)
}

/// Returns the result of a probe of the kernel.
fn of<E: std::fmt::Display>(
    result: Result<(), E>,
    good: &str,
    otherwise: fn(String) -> CheckAnswer,
) -> CheckAnswer {
    match result {
        Ok(()) => Good(good.to_string()),
        Err(e) => otherwise(e.to_string()),
    }
}

/// Returns an error by its name in manuals, which identifies a sandbox.
fn named(e: Errno) -> String {
    match e {
        Errno::PERM => "EPERM".to_string(),
        Errno::ACCESS => "EACCES".to_string(),
        Errno::NOSYS => "ENOSYS".to_string(),
        Errno::NOENT => "ENOENT".to_string(),
        e => e.to_string(),
    }
}

/// Returns the number in a file of /proc/sys.
fn system_number(name: &str) -> Option<u64> {
    fs::read_to_string(format!("/proc/sys/{name}")).ok()?.trim().parse().ok()
}

fn kernel(_: &ArgMatches) -> CheckAnswer {
    let names = rustix::system::uname();
    let release = names.release().to_string_lossy().into_owned();
    let text = format!("Linux {release}, {}", names.machine().to_string_lossy());
    // Some kernels have an old number, but the features of newer ones.
    match newer_than(&release) {
        lacking if lacking.is_empty() || delivery::can_have_gate().is_ok() => Good(text),
        lacking => Bad(format!("{text}; missing: {}", lacking.join(", "))),
    }
}

/// Returns the needs of the gate that kernels have only after this release.
fn newer_than(release: &str) -> Vec<String> {
    let mut numbers =
        release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let newer = delivery::NEEDS.iter().filter(|need| need.linux > version);
    newer.map(|need| format!("{} (Linux {}.{})", need.what, need.linux.0, need.linux.1)).collect()
}

/// Returns a line of /proc/self/status.
fn status(name: &str) -> Option<String> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    Some(line.trim().to_string())
}

fn user(_: &ArgMatches) -> String {
    const CAP_SYS_PTRACE: u64 = 1 << 19;
    let uid = rustix::process::geteuid().as_raw();
    let who = if uid == 0 { "root".to_string() } else { format!("user {uid}") };
    let capabilities =
        status("CapEff").and_then(|text| u64::from_str_radix(&text, 16).ok()).unwrap_or(0);
    let with = if capabilities & CAP_SYS_PTRACE != 0 { "with" } else { "without" };
    format!("{who}, {with} CAP_SYS_PTRACE")
}

fn sandbox(_: &ArgMatches) -> CheckAnswer {
    let mode = match status("Seccomp").as_deref() {
        Some("0") => "no seccomp filter",
        Some("2") => "a seccomp filter",
        _ => "seccomp unknown",
    };
    let refusals: Vec<String> = CALLS
        .iter()
        .filter_map(|call| Some(format!("{} {}", call.name, named(call.refusal()?))))
        .collect();
    match refusals.is_empty() {
        true => Good(format!("{mode}; no call of memfold is refused")),
        false => Less(format!("{mode}; refused: {}", refusals.join(", "))),
    }
}

fn userfaultfd(_: &ArgMatches) -> CheckAnswer {
    let sysctl = system_number("vm/unprivileged_userfaultfd")
        .map_or("unknown".to_string(), |number| number.to_string());
    let sysctl = format!("vm.unprivileged_userfaultfd={sysctl}");
    match (Uffd::open(0, false), Uffd::probe()) {
        (Ok(_), _) => {
            Good(format!("available, also for page faults inside system calls ({sysctl})"))
        }
        (Err(_), Ok(_)) => Good(format!(
            "available for page faults of user code, which is all that the gate needs ({sysctl})"
        )),
        (Err(_), Err(_)) => lacks(format!("refused ({sysctl})")),
    }
}

/// Returns the answer about a missing feature of userfaultfd. It is bad only if page protection
/// does not work either.
fn lacks(text: String) -> CheckAnswer {
    if delivery::can_hide().is_ok() { Less(text) } else { Bad(text) }
}

fn hides(_: &ArgMatches) -> CheckAnswer {
    match probe::hides() {
        Ok(false) => Less(delivery::FORCES_NONE.to_string()),
        tried => of(
            tried.map(drop).map_err(named),
            "a protected page was filled and made accessible",
            Less,
        ),
    }
}

fn guards(_: &ArgMatches) -> CheckAnswer {
    of(probe::guards().map_err(named), "yes", Less)
}

fn by_way(way: UffdSource) -> CheckAnswer {
    match (Uffd::can_open(way, false), Uffd::can_open(way, true)) {
        (Ok(()), _) => Good("yes, for all page faults".to_string()),
        (Err(e), Ok(())) => Less(format!("only for page faults of user code ({})", named(e))),
        (Err(e), Err(_)) => Less(format!("no ({})", named(e))),
    }
}

fn by_call(_: &ArgMatches) -> CheckAnswer {
    by_way(UffdSource::Call)
}

fn by_device(_: &ArgMatches) -> CheckAnswer {
    by_way(UffdSource::Device)
}

fn features(_: &ArgMatches) -> CheckAnswer {
    const NAMES: &[(u64, &str)] = &[
        (feature::MOVE, "MOVE"),
        (feature::WP, "WP"),
        (feature::WP_UNPOPULATED, "WP_UNPOPULATED"),
        (feature::SIGBUS, "SIGBUS"),
    ];
    let Ok(features) = Uffd::probe() else {
        return lacks("unknown, because userfaultfd is unavailable".to_string());
    };
    let of = |there: bool| -> Vec<&str> {
        NAMES
            .iter()
            .filter(|(bit, _)| (features & bit != 0) == there)
            .map(|(_, name)| *name)
            .collect()
    };
    let (has, lacks) = (of(true).join(" "), of(false).join(" "));
    if features & feature::GATE != feature::GATE {
        self::lacks(format!("missing: {lacks}"))
    } else if lacks.is_empty() {
        Good(has)
    } else {
        Less(format!("{has}; missing: {lacks}"))
    }
}

fn moves(_: &ArgMatches) -> CheckAnswer {
    match probe::moves() {
        Ok(()) => Good("a page was moved".to_string()),
        Err(memfold_engine::OpenError::Forbidden) => {
            lacks("can't be tried without userfaultfd".to_string())
        }
        Err(e) => Less(e.to_string()),
    }
}

fn scans(_: &ArgMatches) -> CheckAnswer {
    of(probe::scans().map_err(named), "a page was found", Less)
}

fn queries(_: &ArgMatches) -> CheckAnswer {
    of(probe::queries_maps().map_err(named), "yes", Less)
}

fn drops(_: &ArgMatches) -> CheckAnswer {
    of(
        probe::drops_batches().map_err(named),
        "pages of two ranges were evicted with one call",
        Less,
    )
}

fn dispatches(_: &ArgMatches) -> CheckAnswer {
    if probe::dispatches() { Good("yes".to_string()) } else { Bad("no".to_string()) }
}

fn patches(_: &ArgMatches) -> CheckAnswer {
    of(probe::patches().map_err(named), "code can be written", Less)
}

/// Returns how the faults of a run with these settings are handled.
fn served(matches: &ArgMatches) -> CheckAnswer {
    let Ok((mut config, _)) = config(&given(matches)) else {
        return Less("unknown, because the settings are wrong (see below)".to_string());
    };
    match delivery::settle(&mut config) {
        Ok(None) if config.paging == PagingKind::Guard => {
            Good("handled in the faulting thread (gate), by guard pages".to_string())
        }
        Ok(None) if config.paging == PagingKind::Protection => {
            Good("handled in the faulting thread (gate), by page protection".to_string())
        }
        Ok(None) => Good("handled in the faulting thread (gate)".to_string()),
        Ok(Some(line)) => Less(line),
        Err(e) => Bad(e.text),
    }
}

fn rings(_: &ArgMatches) -> CheckAnswer {
    of(probe::rings().map_err(named), "yes", Less)
}

fn swap(matches: &ArgMatches) -> CheckAnswer {
    let Some(path) = matches.get_one::<String>("swap") else {
        return Good("not used (--swap DIR)".to_string());
    };
    match FileDisk::open(path, FileDiskOptions::default()) {
        Ok(disk) if disk.is_direct() => Good(format!("{path}: O_DIRECT")),
        Ok(_) => Less(format!("{path}: no O_DIRECT")),
        Err(e) => Bad(e),
    }
}

fn shown(limit: Option<u64>) -> String {
    limit.map_or("unlimited".to_string(), |bytes| Size(bytes).to_string())
}

fn addresses(_: &ArgMatches) -> CheckAnswer {
    let (space, data) = (getrlimit(Resource::As).current, getrlimit(Resource::Data).current);
    let text = format!("ulimit -v {}, -d {}", shown(space), shown(data));
    // The trial run shows whether they suffice.
    if space.or(data).is_none() { Good(text) } else { Less(text) }
}

fn descriptors(_: &ArgMatches) -> CheckAnswer {
    let most = getrlimit(Resource::Nofile).current;
    let text = format!("ulimit -n {}", most.map_or("unlimited".to_string(), |n| n.to_string()));
    if most.is_none_or(|n| n >= 64) { Good(text) } else { Less(text) }
}

fn memory(_: &ArgMatches) -> String {
    let cgroup =
        machine::cgroup_bytes().map_or("no limit".to_string(), |bytes| Size(bytes).to_string());
    format!("{}; cgroup: {cgroup}", Size(machine::memory_bytes()))
}

fn overcommit(_: &ArgMatches) -> CheckAnswer {
    match system_number("vm/overcommit_memory") {
        Some(2) => Less("vm.overcommit_memory=2".to_string()),
        Some(mode) => Good(format!("vm.overcommit_memory={mode}")),
        None => Good("unknown".to_string()),
    }
}

fn mappings(_: &ArgMatches) -> CheckAnswer {
    match system_number("vm/max_map_count") {
        Some(most) if most < 65530 => Less(format!("vm.max_map_count={most}")),
        Some(most) => Good(format!("vm.max_map_count={most}")),
        None => Good("unknown".to_string()),
    }
}

fn library(_: &ArgMatches) -> CheckAnswer {
    match run::library() {
        Ok(path) => Good(path.display().to_string()),
        Err(e) => Bad(e.text),
    }
}

/// Returns the given settings, for another `memfold run`.
fn given(matches: &ArgMatches) -> Vec<OsString> {
    let is_given = |name: &str| matches.value_source(name) == Some(ValueSource::CommandLine);
    let mut flags: Vec<OsString> = Vec::new();
    let keys = KEYS.iter().filter(|key| key.audience != Audience::Libraries);
    let names = keys.map(|key| key.name).chain(group::FLAGS.map(|[name, ..]| name));
    for name in names.filter(|name| is_given(name)) {
        let value = matches.get_one::<String>(name).cloned().unwrap_or_default();
        flags.push(format!("--{name}={value}").into());
    }
    flags
}

/// Returns the settings that `memfold run` would use with these flags, and a line about the group.
fn config(flags: &[OsString]) -> Result<(Config, Option<String>), String> {
    let line = [OsString::from("run")].into_iter().chain(flags.iter().cloned());
    let matches = run::command().try_get_matches_from(line).map_err(|e| e.to_string())?;
    let config = run::config(&matches).map_err(|e| e.text)?;
    Ok((config, group::about(&matches).map_err(|e| e.text)?))
}

fn settings(matches: &ArgMatches) -> CheckAnswer {
    let flags = given(matches);
    let mut names: Vec<_> = flags.iter().map(|flag| flag.to_string_lossy()).collect();
    match config(&flags) {
        Ok((_, Some(line))) => {
            names.push(format!("({line})").into());
            Good(names.join(" "))
        }
        Ok((config, None)) => {
            if config.limit_bytes.is_none() && config.resident_bytes.is_none() {
                names.push("(without a limit: what the program does not use is folded)".into());
            }
            Good(names.join(" "))
        }
        Err(why) => Bad(why),
    }
}

fn command_given(matches: &ArgMatches) -> CheckAnswer {
    let arguments: Vec<OsString> =
        matches.get_many(run::COMMAND).map(|all| all.cloned().collect()).unwrap_or_default();
    let Some(name) = arguments.first() else { return Good("none given".to_string()) };
    let program_path = program::find(name, std::env::var_os("PATH").as_deref(), |_| false);
    match program_path.and_then(|path| program::loading(&path, &arguments).map(|_| path)) {
        Ok(path) => Good(path.display().to_string()),
        Err(e) => Bad(e.text),
    }
}

/// Runs a program that does nothing, and returns its message or memfold's. The program is memfold
/// itself, which uses the same C library as the preload library. `true` may be static.
fn trial(matches: &ArgMatches) -> CheckAnswer {
    let own = match std::env::current_exe() {
        Ok(own) => own,
        Err(e) => return Bad(program::plain(&e)),
    };
    let mut command = std::process::Command::new(&own);
    command
        .arg("run")
        .args(given(matches))
        .arg("--")
        .arg(&own)
        .arg("--version")
        .stdin(Stdio::null());
    match command.output() {
        Ok(output) if output.status.success() && output.stderr.is_empty() => {
            Good("`memfold --version` ran under memfold run".to_string())
        }
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stderr);
            let text = text
                .lines()
                .next()
                .unwrap_or("it printed no message")
                .trim_start_matches("memfold: ");
            let answer = format!("{text} ({})", output.status);
            // The text is a warning of a successful run.
            if output.status.success() { Less(answer) } else { Bad(answer) }
        }
        Err(e) => Bad(program::plain(&e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_check_that_can_fail_says_what_to_do() {
        for check in CHECKS {
            let can_fail = matches!(check.probe, Tests(_));
            assert_eq!(can_fail, !check.fix.is_empty(), "{}: its remedy", check.name);
            assert_eq!(can_fail, !check.why.is_empty(), "{}: its reason", check.name);
        }
    }

    #[test]
    fn kernels_from_the_documented_version_on_are_accepted() {
        for release in ["5.14.0-427.el9.x86_64", "5.15.0", "6.1.0-18-amd64", "6.18.5", "7.0-rc1"] {
            assert!(newer_than(release).is_empty(), "{release}");
        }
        for release in ["5.13.19", "5.4.0-150-generic", "4.18.0-553.el8_10.x86_64", ""] {
            let lack = newer_than(release).join(", ");
            assert!(lack.contains("MADV_POPULATE_WRITE (Linux 5.14)"), "{release}: {lack}");
        }
    }
}
