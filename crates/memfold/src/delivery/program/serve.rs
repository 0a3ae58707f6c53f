//! Handlers: threads that read faults and events, and serve them.
use super::{AreaOf, Watcher};
use crate::delivery::background;
use crate::delivery::region::handler_count;
use crate::fault::{Fault, Served};
use crate::pager::Pager;
use crate::quiesce::journal::Notes;
use crate::reclaim::throttle::Throttle;
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use memfold_sys::Errno;
use memfold_sys::maps::pagemap::Pagemap;
use memfold_sys::memory::zone::Zone;
use memfold_sys::sync::atomic::AtomicBool;
use memfold_sys::sync::{Mutex, MutexGuard};
use memfold_sys::thread::{is_asleep, now_ns, sleep_ns, wait_readable, yield_now};
use memfold_sys::uffd::{Event, Uffd};
use memfold_sys::units::PAGE_SIZE;

/// Faults that one handler keeps while events must be applied first; the threads of others fault
/// again.
const PENDING: usize = 256;
/// Time between looks whether the thread that forks waits for something.
const REST_PACE_NS: u64 = 50_000;
/// Time between looks whether memory is within its bounds again, while faults are held back.
const HELD_NS: u64 = 100_000;

impl Watcher {
    /// For the events and faults of `uffd` (non-blocking, with the events enabled).
    ///
    /// # Errors
    /// Registering failed.
    pub fn new(
        pager: &Arc<Pager>,
        uffd: &Arc<Uffd>,
        pagemap: &Arc<Pagemap>,
        area_of: AreaOf,
    ) -> Result<&'static Watcher, Errno> {
        let probe = Zone::reserve(PAGE_SIZE, PAGE_SIZE)?;
        // SAFETY: the zone is the engine's own; its one page is made before anybody touches it.
        unsafe {
            uffd.register(probe.start(), PAGE_SIZE, false)?;
            uffd.zero(probe.start(), PAGE_SIZE).map_err(|p| p.errno)?;
        }
        Ok(Box::leak(Box::new(Watcher {
            pager: pager.clone(),
            uffd: uffd.clone(),
            pagemap: pagemap.clone(),
            turn: Mutex::new(()),
            probe,
            area_of,
            begun: AtomicBool::new(false),
        })))
    }

    /// The handlers, which never end. All of them must run before anything of the program is
    /// adopted. To be called once.
    pub fn threads(&'static self) -> Vec<background::Start> {
        self.pager.prepare();
        let arg = self as *const Watcher as usize;
        let handler = |_| background::Start { name: c"memfold-fault", main: run, arg };
        (0..handler_count()).map(handler).collect()
    }

    /// Serves what comes while the engine is at rest: see [`crate::quiesce::journal`].
    fn receive_at_rest(&self) {
        let mut wait = false;
        self.pager.journal.receive(|rest| {
            if self.pager.journal.may_miss(rest, is_asleep) {
                wait = true;
                return false;
            }
            match rest.read(|| self.uffd.read()) {
                Ok(Event::Fault { address, .. }) => {
                    self.serve_at_rest(rest, address & !(PAGE_SIZE - 1))
                }
                Ok(_) => wait = rest.is_half_full(),
                Err(_) => return false,
            }
            !wait
        });
        if wait { sleep_ns(REST_PACE_NS) } else { yield_now() }
    }

    fn serve_at_rest(&self, rest: &mut Notes, page: usize) {
        rest.note_page(page);
        loop {
            // SAFETY: the engine is at rest, and whoever has the notes is alone.
            let bytes = unsafe { self.pager.page_at_rest(rest.origin(page)) };
            // SAFETY: a missing page of a registered area, and what it holds, as nothing changes at
            // rest. No lock is held: when the page is there, the thread that forks goes on.
            match unsafe { self.uffd.copy(page, bytes, PAGE_SIZE, true) } {
                Err(partial) if partial.errno == Errno::AGAIN => {
                    match rest.read(|| self.uffd.read()) {
                        Ok(Event::Fault { address, .. }) => {
                            self.serve_at_rest(rest, address & !(PAGE_SIZE - 1))
                        }
                        Ok(_) => {}
                        Err(_) => yield_now(),
                    }
                }
                Err(_) => return self.uffd.wake(page, PAGE_SIZE),
                Ok(()) => return,
            }
        }
    }

    fn next(&self, reading: &MutexGuard<'_, ()>) -> Option<Event> {
        let is_change = |e: &Result<Event, Errno>| matches!(e, Ok(event) if !matches!(event, Event::Fault { .. }));
        self.pager.changes.read(reading, || self.uffd.read(), is_change).ok()
    }

    /// Reads one fault, applying the changes that come before it. With faults pending, reads all
    /// there is: the kernel hands out faults first, so the event that a pending one waits for is
    /// reached only by reading on.
    fn receive(&self, pending: &mut Pending) {
        let drain = pending.count > 0;
        while pending.has_room() {
            let reading = self.pager.changes.reading();
            match self.next(&reading) {
                None => {
                    if self.pager.has_parked() && self.is_quiet() {
                        self.pager.end_parked();
                    }
                    return;
                }
                Some(Event::Fault { address, protected, .. }) => {
                    pending.note(Fault { addr: address, protected, ..Fault::default() });
                    if !drain {
                        return;
                    }
                }
                Some(change) => {
                    self.pager.journal.tell(change);
                    self.pager.apply(change);
                    self.pager.changes.end(&reading);
                }
            }
        }
    }

    /// Serves a fault; `false` if it must be tried again.
    pub(super) fn serve(&self, fault: Fault) -> bool {
        match self.pager.fault(fault) {
            Served::Yes => true,
            Served::Again => false,
            Served::NotManaged => self.serve_unmanaged(fault.addr & !(PAGE_SIZE - 1)),
        }
    }

    /// Serves a fault outside of what is managed: the kernel has grown a registered area (mremap),
    /// and the new part is taken; or the fault is out of date, and by now anything may be at its
    /// address. `false` if it must be tried again.
    fn serve_unmanaged(&self, page: usize) -> bool {
        // While it is held no event is read, so what is found below is true as long as the address
        // space is quiet.
        let _reading = self.pager.changes.reading();
        if self.pager.manages(page) {
            return false;
        }
        // SAFETY: the kernel does this in registered areas only, and nobody else defines what is
        // not managed: a missing page of such an area is a new one. Frames are registered too, but
        // the engine touches none that is empty.
        match unsafe { self.uffd.zero(page, PAGE_SIZE) } {
            Ok(()) => {}
            Err(partial) if partial.errno == Errno::AGAIN => return false,
            Err(_) => {
                self.uffd.wake(page, PAGE_SIZE);
                return true;
            }
        }
        if let Some((start, end)) = (self.area_of)(page)
            && self.is_quiet()
        {
            for (start, end) in self.pager.unmanaged_parts(start, end) {
                // What can't be taken now faults again, page by page.
                self.manage(start, end);
            }
        }
        true
    }
}

fn run(watcher: usize) {
    // SAFETY: `new` leaked it.
    let watcher = unsafe { &*(watcher as *const Watcher) };
    let (mut throttle, mut held) = (Throttle::default(), false);
    let mut pending = Pending { faults: [Fault::default(); PENDING], count: 0 };
    loop {
        // Who has faults pending goes on reading, whoever waits.
        let turn = (pending.count == 0).then(|| watcher.turn.lock());
        if turn.is_some() {
            wait_readable(watcher.uffd.fd(), None);
        } else if held {
            wait_readable(watcher.uffd.fd(), Some(HELD_NS));
        } else {
            yield_now();
        }
        let Some(_open) = watcher.pager.gates.serving() else {
            drop(turn);
            // Whoever waits for one of these faults again, and is served at rest if need be.
            pending.retain(|fault| {
                watcher.uffd.wake(fault.addr & !(PAGE_SIZE - 1), PAGE_SIZE);
                false
            });
            watcher.receive_at_rest();
            continue;
        };
        watcher.receive(&mut pending);
        drop(turn);
        held = pending.count > 0 && throttle.holds(&watcher.pager, now_ns);
        if held {
            continue;
        }
        pending.retain(|fault| !watcher.serve(fault));
    }
}

/// Faults that one handler has read and not served yet.
struct Pending {
    faults: [Fault; PENDING],
    count: usize,
}

impl Pending {
    fn has_room(&self) -> bool {
        self.count < PENDING
    }

    /// Notes a fault, unless one of the same page is noted: serving that wakes every thread that
    /// waits for the page.
    fn note(&mut self, fault: Fault) {
        let page = |f: &Fault| f.addr & !(PAGE_SIZE - 1);
        if !self.faults[..self.count]
            .iter()
            .any(|f| page(f) == page(&fault) && f.protected == fault.protected)
        {
            self.faults[self.count] = fault;
            self.count += 1;
        }
    }

    fn retain(&mut self, mut keep: impl FnMut(Fault) -> bool) {
        let mut kept = 0;
        for i in 0..self.count {
            if keep(self.faults[i]) {
                self.faults[kept] = self.faults[i];
                kept += 1;
            }
        }
        self.count = kept;
    }
}
