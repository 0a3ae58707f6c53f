//! What tells the gate of a touch of folded memory: a userfaultfd, or the protection of memory. Where
//! the gate can't be had, nothing is run.
use crate::failure::Failure;
use memfold::config::{Config, Delivery};
use memfold_sys::maps::lookup::Maps;
use memfold_sys::probe;
use memfold_sys::uffd::{Uffd, feature};
use memfold_sys::units::Order;

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

/// Chooses how memory is paged: by a userfaultfd, or by its protection where none can be had. Returns
/// the line that says so and why.
///
/// # Errors
/// The gate can't be had: status 125, with the reason and what to do.
pub fn settle(config: &mut Config) -> Result<Option<String>, Failure> {
    config.delivery = Delivery::Gate;
    if config.by_protection {
        can_hide().map_err(|e| Failure::own(format!("--paging protection: {e}")))?;
        hide(config);
        return Ok(None);
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
        Ok(()) => {
            hide(config);
            Ok(Some(format!(
                "warning: memory is paged by its protection (--paging protection), which is slower and folds at least \
                 64K at once, as no userfaultfd can be had here: {why}"
            )))
        }
        Err(e) if e == why => Err(Failure::own(format!("no program can be managed here: {why}"))),
        Err(e) => Err(Failure::own(format!(
            "no program can be managed here: {why}; nor can memory be paged by its protection: {e}"
        ))),
    }
}

/// What a program needs in both ways.
fn can_be_gated() -> Result<(), String> {
    if !cfg!(target_arch = "x86_64") {
        return Err("the gate is for x86-64".to_string());
    }
    if !probe::dispatches() {
        let why = "no Syscall User Dispatch, or a sandbox hides it (gVisor has none); it needs Linux 5.11 or newer, \
                   outside of such a sandbox";
        return Err(why.to_string());
    }
    Ok(())
}

/// Whether a program can be served by the gate: tried in this process, which the program will be
/// alike. Returns whether pages can be moved there.
///
/// # Errors
/// What is lacking.
pub fn can_have_gate() -> Result<bool, String> {
    can_be_gated()?;
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
    can_be_gated()?;
    if !probe::populates() {
        return Err("no MADV_POPULATE_WRITE (Linux 5.14)".to_string());
    }
    probe::hides().map_err(|e| format!("/proc/self/mem gives no access to hidden memory: {e}"))?;
    Maps::open().map(drop).map_err(|e| format!("/proc/self/maps: {e}"))
}
