//! Thread delivery for a whole program: faults and address-space events from one descriptor.
//!
//! Handlers, of which one waits for what comes. Reading is serialised by
//! `area/event_order.rs`, so that no fault that follows an event is ever served before the event
//! was applied. A fault that can't be resolved while an event waits stays with its handler, which
//! reads and applies events until it can.
mod adopt;
mod serve;
mod fork;

use crate::area::page_of;
use crate::pager::Pager;
use crate::quiesce::copy_moment::Pages;
use alloc::sync::Arc;
use core::ops::ControlFlow;
use memfold_sys::Errno;
use memfold_sys::maps::lookup::each_private_area;
use memfold_sys::maps::pagemap::Pagemap;
use memfold_sys::maps::{Area, Details, each_detailed};
use memfold_sys::memory::zone::{Zone, overlaps_own};
use memfold_sys::sync::Mutex;
use memfold_sys::sync::atomic::{AtomicBool, Ordering::Relaxed};
use memfold_sys::uffd::Uffd;
use memfold_sys::units::PAGE_SIZE;

pub use fork::NotCopied;

/// Tells the bounds of the private anonymous area that holds an address.
pub type AreaOf = fn(usize) -> Option<(usize, usize)>;

/// Serves one program.
pub struct Watcher {
    pager: Arc<Pager>,
    uffd: Arc<Uffd>,
    pagemap: Arc<Pagemap>,
    /// Held by the handler that waits: a fault wakes every thread that waits for the descriptor.
    turn: Mutex<()>,
    /// A registered page that is always there: copying onto it tells whether the address space is
    /// changing.
    probe: Zone,
    /// Tells the private anonymous area that holds an address.
    area_of: AreaOf,
    /// Something of the program has been registered.
    begun: AtomicBool,
}

impl Watcher {
    /// Whether something of the program has been registered.
    pub fn has_begun(&self) -> bool {
        self.begun.load(Relaxed)
    }

    /// Whether no change of the address space is on its way.
    fn is_quiet(&self) -> bool {
        // SAFETY: the probe's page is there, so nothing is copied: EEXIST at rest, EAGAIN while an
        // event is on its way.
        let probed =
            unsafe { self.uffd.copy(self.probe.start(), self.pager.zeros(), PAGE_SIZE, false) };
        probed.is_err_and(|p| p.errno == Errno::EXIST)
    }
}

/// Private anonymous memory that isn't the engine's own, as the kernel's map shows it.
fn each_private(mut each: impl FnMut(&Area, &Details)) {
    let done = each_detailed(|area, about| {
        if area.is_private_anonymous() && !overlaps_own(area.start, area.end) {
            each(area, about);
        }
        ControlFlow::Continue(())
    });
    done.expect("memfold: reading /proc/self/smaps failed");
}

/// What of private memory without a file lies in `[start, end)`: each mapping, or its part in
/// there. None if the kernel doesn't tell.
fn each_mapping(start: usize, end: usize, mut each: impl FnMut(usize, usize)) {
    let _ = each_private_area(&[(start, end)], |from, to| each(from.max(start), to.min(end)));
}

fn pages_of(area: &Area) -> Pages {
    (page_of(area.start), page_of(area.end))
}
