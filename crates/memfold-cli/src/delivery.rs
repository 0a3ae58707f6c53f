//! Who serves the faults of a run: the gate wherever it can be had, with a userfaultfd or by
//! protection, else handler threads.
use crate::failure::Failure;
use memfold::config::{Config, Delivery};
use memfold_sys::maps::lookup::Maps;
use memfold_sys::probe;
use memfold_sys::uffd::{OpenError, Uffd, feature};
use memfold_sys::units::Order;

/// What it is for a run where nothing is asked for.
pub const BY_DEFAULT: Delivery =
    if cfg!(target_arch = "x86_64") { Delivery::Gate } else { Delivery::Thread };

/// The least block where memory is paged by its protection: each border between what is folded and
/// what isn't is one of 65,530 that a process has.
const HIDDEN_LEAST: Order = match Order::new(4) {
    Some(order) => order,
    None => unreachable!(),
};

/// Pages the memory of a run by its protection.
fn hide(config: &mut Config) {
    config.by_protection = true;
    config.block_order = config.block_order.max(HIDDEN_LEAST);
    config.folio_order = config.folio_order.max(HIDDEN_LEAST);
}

/// Where the gate is wanted and no userfaultfd can be had, pages by protection; where the gate can't
/// be had, makes it handler threads; returns the line that says so and why.
///
/// # Errors
/// Nor can those be had: status 125, with both reasons.
pub fn settle(config: &mut Config) -> Result<Option<String>, Failure> {
    if config.by_protection && config.delivery != Delivery::Gate {
        let text = "--paging: protection is for --delivery gate, which is what run does where nothing is asked for";
        return Err(Failure::own(text));
    }
    if config.by_protection {
        can_hide().map_err(|e| Failure::own(format!("--paging protection: {e}")))?;
        hide(config);
        return Ok(None);
    }
    let Delivery::Gate = config.delivery else {
        return can_have_threads().map(|()| None).map_err(|e| {
            let gate = match can_have_gate() {
                Ok(_) => "; without --delivery thread no permission is needed here",
                Err(_) => "",
            };
            Failure::own(format!("{e}{gate}"))
        });
    };
    let why = match can_have_gate() {
        Ok(moves) => {
            // Before Linux 6.8 pages are copied.
            config.use_move &= moves;
            return Ok(None);
        }
        Err(why) => why,
    };
    if can_hide().is_ok() {
        hide(config);
        return Ok(Some(format!(
            "warning: memory is paged by its protection (--paging protection), which is slower and folds at least 64K \
             at once, as no userfaultfd can be had here: {why}"
        )));
    }
    match can_have_threads() {
        Ok(()) => {
            config.delivery = Delivery::Thread;
            Ok(Some(format!(
                "warning: faults are served by handler threads (--delivery thread), which is slower, as the gate can't \
                 be had here: {why}"
            )))
        }
        Err(e) if e.to_string() == why => Err(Failure::own(why)),
        Err(e) => Err(Failure::own(format!("the gate can't be had here: {why}; and {e}"))),
    }
}

/// Whether a program can be served by the gate: tried in this process, which the program will be
/// alike. Returns whether pages can be moved there.
///
/// # Errors
/// What is lacking.
pub fn can_have_gate() -> Result<bool, String> {
    if !cfg!(target_arch = "x86_64") {
        return Err("it is for x86-64".to_string());
    }
    if !probe::dispatches() {
        return Err(
            "no Syscall User Dispatch (Linux 5.11), or a sandbox hides it (gVisor has none)".into(),
        );
    }
    Uffd::open(feature::GATE, true).map_err(|e| e.to_string())?;
    if !probe::populates() {
        return Err("no MADV_POPULATE_WRITE (Linux 5.14)".to_string());
    }
    let moves = probe::moves().is_ok();
    if !moves {
        probe::reads_itself().map_err(|e| {
            format!(
                "no UFFDIO_MOVE (Linux 6.8), and what is in its place needs process_vm_readv: {e}"
            )
        })?;
    }
    Maps::open().map(|_| moves).map_err(|e| format!("/proc/self/maps: {e}"))
}

/// Whether a program can be served by the gate without a userfaultfd.
///
/// # Errors
/// What is lacking.
pub fn can_hide() -> Result<(), String> {
    if !cfg!(target_arch = "x86_64") {
        return Err("it is for x86-64".to_string());
    }
    if !probe::dispatches() {
        return Err("no Syscall User Dispatch (Linux 5.11), or a sandbox hides it".to_string());
    }
    if !probe::populates() {
        return Err("no MADV_POPULATE_WRITE (Linux 5.14)".to_string());
    }
    probe::hides().map_err(|e| format!("/proc/self/mem gives no access to hidden memory: {e}"))?;
    Maps::open().map(drop).map_err(|e| format!("/proc/self/maps: {e}"))
}

/// Whether this user may have faults served that happen inside system calls, as handler threads
/// need.
///
/// # Errors
/// Not so.
pub fn can_have_threads() -> Result<(), OpenError> {
    Uffd::open(feature::HANDLERS, false).map(drop)
}
