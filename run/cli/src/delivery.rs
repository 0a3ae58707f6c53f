//! How touches of folded memory are detected: by userfaultfd, by guard pages, or by page protection.
//! If the gate is unavailable, `run` refuses.
use crate::failure::CommandFailure;
use memfold_engine::config::{Config, Delivery, PagingKind};
use memfold_os::maps::lookup::Maps;
use memfold_os::probe;
use memfold_os::uffd::{Uffd, feature};
use memfold_os::units::Order;

/// The smallest block with page protection. Each border between folded and resident memory uses one
/// of a process's 65,530 mappings.
const HIDDEN_LEAST: Order = match Order::new(4) {
    Some(order) => order,
    None => unreachable!(),
};

/// Sets a run to page protection.
fn hide(config: &mut Config) {
    config.paging = PagingKind::Protection;
    config.block_order = config.block_order.max(HIDDEN_LEAST);
    config.folio_order = config.folio_order.max(HIDDEN_LEAST);
}

/// Chooses how memory is paged: by userfaultfd, or by guard pages if that is unavailable, or by page
/// protection if these are too. Returns the warning about the last two.
///
/// # Errors
/// 125: the gate is unavailable. The text has the reason and what to do.
pub fn settle(config: &mut Config) -> Result<Option<String>, CommandFailure> {
    config.delivery = Delivery::Gate;
    match config.paging {
        PagingKind::Userfaultfd => {}
        PagingKind::Guard => {
            can_hide().and_then(|()| can_guard()).map_err(|e| {
                CommandFailure::own(format!("--paging guard: {e}. Use --paging protection"))
            })?;
            return Ok(None);
        }
        PagingKind::Protection => {
            can_hide().map_err(|e| CommandFailure::own(format!("--paging protection: {e}")))?;
            hide(config);
            return Ok(forces_none().then(|| format!("warning: {FORCES_NONE}")));
        }
    }
    let why = match can_have_gate() {
        Ok(moves) => {
            // Before Linux 6.8 pages are copied.
            config.use_move &= moves;
            return Ok(None);
        }
        Err(why) => why,
    };
    match can_hide() {
        Ok(()) if can_guard().is_ok() => {
            config.paging = PagingKind::Guard;
            Ok(Some(format!(
                "warning: userfaultfd is unavailable, so memory is paged by guard pages (--paging guard). This is \
                 slower. Reason: {why}."
            )))
        }
        Ok(()) => {
            hide(config);
            let forced = if forces_none() { format!(" {FORCES_NONE}") } else { String::new() };
            Ok(Some(format!(
                "warning: userfaultfd is unavailable, so memory is paged by page protection (--paging protection). This is \
                 slower and folds at least 64K at once. Reason: {why}.{forced}"
            )))
        }
        Err(e) if e == why => {
            Err(CommandFailure::own(format!("memfold can manage no program here: {why}")))
        }
        Err(e) => Err(CommandFailure::own(format!(
            "memfold can manage no program here: {why}. Paging by page protection is unavailable too: {e}"
        ))),
    }
}

fn forces_none() -> bool {
    probe::hides() == Ok(false)
}

/// The warning for a kernel on which page protection is slower still.
pub const FORCES_NONE: &str = "The kernel does not let /proc/self/mem write to protected memory, which is slower. Boot with proc_mem.force_override=always to change that.";

/// One thing that the gate needs of the kernel. It is tried in this process, and the result holds
/// for the program too. Refusals, `memfold check` and `docs/limits.md` all come from [`NEEDS`].
pub struct GateNeed {
    /// Its name.
    pub what: &'static str,
    /// The first Linux version that has it; 0.0 for every version on which memfold runs.
    pub linux: (u32, u32),
    /// Whether it is needed with userfaultfd. The next field is the same for page protection.
    with_uffd: bool,
    with_protection: bool,
    /// Tries it.
    ///
    /// # Errors
    /// The reason why it is unavailable.
    probe: fn() -> Result<(), String>,
}

/// Everything that the gate needs, in the order in which it is tried.
pub const NEEDS: &[GateNeed] = &[
    GateNeed {
        what: "Syscall User Dispatch",
        linux: (5, 11),
        with_uffd: true,
        with_protection: true,
        probe: || {
            let why = "Syscall User Dispatch (Linux 5.11) is missing, or a sandbox such as gVisor hides it";
            or_else(probe::dispatches(), why)
        },
    },
    GateNeed {
        what: "userfaultfd for page faults of user code",
        linux: (5, 11),
        with_uffd: true,
        with_protection: false,
        probe: || Uffd::open(feature::GATE, true).map(drop).map_err(|e| e.to_string()),
    },
    GateNeed {
        what: "MADV_POPULATE_WRITE",
        linux: (5, 14),
        with_uffd: true,
        with_protection: true,
        probe: || or_else(probe::populates(), "MADV_POPULATE_WRITE (Linux 5.14) is missing"),
    },
    GateNeed {
        what: "UFFDIO_MOVE (Linux 6.8), or process_vm_readv on its own memory",
        linux: (0, 0),
        with_uffd: true,
        with_protection: false,
        probe: || {
            let lacks = "UFFDIO_MOVE (Linux 6.8) is missing, and copying pages instead needs process_vm_readv";
            probe::moves().or_else(|_| probe::reads_itself()).map_err(|e| format!("{lacks}: {e}"))
        },
    },
    GateNeed {
        what: "access to its own protected memory through /proc/self/mem",
        linux: (0, 0),
        with_uffd: false,
        with_protection: true,
        probe: || {
            let lacks = "/proc/self/mem gives no access to protected memory";
            probe::hides().map(drop).map_err(|e| format!("{lacks}: {e}"))
        },
    },
    GateNeed {
        what: "/proc/self/maps",
        linux: (0, 0),
        with_uffd: true,
        with_protection: true,
        probe: || Maps::open().map(drop).map_err(|e| format!("/proc/self/maps: {e}")),
    },
];

fn or_else(holds: bool, why: &str) -> Result<(), String> {
    if holds { Ok(()) } else { Err(why.to_string()) }
}

/// Returns the names of the system calls for which a seccomp filter kills this process. No probe
/// that makes one of them may run then.
pub fn killing_calls() -> Vec<&'static str> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    if !status.lines().any(|line| line.split_ascii_whitespace().eq(["Seccomp:", "2"])) {
        return Vec::new();
    }
    probe::killing_calls()
}

/// Refuses a run that a seccomp filter would kill. `swaps` is whether the run has a swap file.
///
/// # Errors
/// 125: the filter kills for a call that this run makes.
pub fn survives(swaps: bool) -> Result<(), CommandFailure> {
    let mut calls = killing_calls();
    calls.retain(|call| *call != probe::RING || swaps);
    match calls.is_empty() {
        true => Ok(()),
        false => Err(CommandFailure::own(format!("{KILLS} {}. {ALLOW}.", calls.join(", ")))),
    }
}

/// The message about a filter that kills. The names of the calls follow it, then [`ALLOW`].
pub const KILLS: &str = "A seccomp filter kills any process that calls";
/// The advice after [`KILLS`] and the names.
pub const ALLOW: &str = "Let the filter allow these calls, or refuse them with EPERM";

/// Checks that a program can be managed by the gate. Returns whether pages can be moved there.
///
/// # Errors
/// A message that says what is lacking.
pub fn can_have_gate() -> Result<bool, String> {
    NEEDS.iter().filter(|need| need.with_uffd).try_for_each(|need| (need.probe)())?;
    Ok(probe::moves().is_ok())
}

/// Checks that a program can be managed by the gate without userfaultfd.
///
/// # Errors
/// A message that says what is lacking.
pub fn can_hide() -> Result<(), String> {
    NEEDS.iter().filter(|need| need.with_protection).try_for_each(|need| (need.probe)())
}

/// Checks whether folded pages can be guard pages, where [`can_hide`] holds.
///
/// # Errors
/// The reason why not.
pub fn can_guard() -> Result<(), String> {
    let lacks = "guard pages that the page map tells (MADV_GUARD_INSTALL and PAGE_IS_GUARD, Linux 6.16) are unavailable";
    probe::guards().map_err(|e| format!("{lacks}: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documents_list_what_is_needed() {
        let text = include_str!("../../../docs/limits.md");
        let rows = NEEDS.iter().map(|need| {
            let yes = |needed: bool| if needed { "yes" } else { "no" };
            let linux = match need.linux {
                (0, 0) => "any".to_string(),
                (major, minor) => format!("{major}.{minor}"),
            };
            let (uffd, with_protection) = (yes(need.with_uffd), yes(need.with_protection));
            format!("| {} | {linux} | {uffd} | {with_protection} |\n", need.what)
        });
        let table = "| what the gate needs | since Linux | with userfaultfd | with page protection |\n|---|---|---|---|\n";
        let table_text = table.to_string() + &rows.collect::<String>();
        assert!(text.contains(&table_text), "docs/limits.md lacks\n{table_text}");
        let (major, minor) = NEEDS.iter().map(|need| need.linux).max().unwrap();
        let readme = include_str!("../../../README.md");
        assert!(readme.contains(&format!("Linux {major}.{minor} or newer")));
    }
}
