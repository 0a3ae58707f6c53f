//! Thread delivery for a whole program: faults and address-space events from one descriptor.
//!
//! Handlers, each pinned to a CPU; those on duty sleep in `poll`. Reading is serialised by [`crate::changes::Changes`], so that no
//! fault that follows an event is ever served before the event was applied. A fault that can't be resolved while an
//! event waits stays with its handler, which reads and applies events until it can.
use crate::duty::{Duty, Shift};
use crate::fault::{Fault, Served};
use crate::pager::Pager;
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use memfold_sys::Errno;
use memfold_sys::pagemap::Pagemap;
use memfold_sys::sync::MutexGuard;
use memfold_sys::thread::{Thread, yield_now};
use memfold_sys::uffd::{Event, Uffd};
use memfold_sys::units::PAGE_SIZE;
use memfold_sys::zone::Zone;

/// Faults that one handler keeps while events must be applied first; the threads of others fault again.
const PENDING: usize = 256;

struct Start {
    watcher: &'static Watcher,
    handler: usize,
    cpu: usize,
}

/// Tells the bounds of the private anonymous area that holds an address.
pub type AreaOf = fn(usize) -> Option<(usize, usize)>;

/// Serves one program.
pub struct Watcher {
    pager: Arc<Pager>,
    uffd: Arc<Uffd>,
    pagemap: Pagemap,
    duty: Duty,
    /// A registered page that is always there: copying onto it tells whether the address space is changing.
    probe: Zone,
    /// Tells the private anonymous area that holds an address.
    area_of: AreaOf,
}

impl Watcher {
    /// Starts handlers for the events and faults of `uffd` (non-blocking, with the events enabled). They never end.
    ///
    /// # Errors
    /// No more threads, no /proc, or registering failed.
    pub fn start(pager: &Arc<Pager>, uffd: &Arc<Uffd>, area_of: AreaOf) -> Result<&'static Watcher, Errno> {
        let probe = Zone::reserve(PAGE_SIZE, PAGE_SIZE)?;
        // SAFETY: the zone is the engine's own; its one page is made before anybody touches it.
        unsafe {
            uffd.register(probe.start(), PAGE_SIZE, false)?;
            uffd.zero(probe.start(), PAGE_SIZE).map_err(|p| p.errno)?;
        }
        let watcher: &'static Watcher = Box::leak(Box::new(Watcher {
            pager: pager.clone(),
            uffd: uffd.clone(),
            pagemap: Pagemap::open()?,
            duty: Duty::new(uffd),
            probe,
            area_of,
        }));
        for (handler, &cpu) in watcher.duty.cpus().iter().enumerate() {
            let start: &'static Start = Box::leak(Box::new(Start { watcher, handler, cpu }));
            Thread::start(c"memfold-fault", Some(cpu), run, start as *const Start as usize)?;
        }
        if let Some((main, arg)) = watcher.duty.waker_thread() {
            Thread::start(c"memfold-wake", None, main, arg)?;
        }
        Ok(watcher)
    }

    /// Takes what is not under management yet of ranges of private anonymous memory. `still` is asked, after a part was
    /// registered, whether it is still what it was taken for. Returns whether it was done; if not, the address space was
    /// changing: try again later.
    pub fn adopt(&self, ranges: &[(usize, usize)], still: &mut dyn FnMut(usize, usize) -> bool) -> bool {
        let reading = self.pager.changes.reading();
        let mut parts = Vec::new();
        for &(start, end) in ranges {
            parts.extend(self.pager.unmanaged_parts(start, end));
        }
        for &(start, end) in &parts {
            // SAFETY: the handlers serve the range from now on. It is the program's, so no engine thread touches it.
            let _ = unsafe { self.uffd.register(start, end - start, false) };
        }
        // Nothing is unregistered when it can't be taken: while an event is on its way, what looks unmanaged may be managed
        // memory that mremap has just brought here. Registered and not managed, a range is served page by page.
        let quiet = self.is_quiet();
        for &(start, end) in &parts {
            if quiet && still(start, end) {
                let _ = self.pager.manage(start, end, &self.pagemap);
            }
        }
        drop(reading);
        quiet
    }

    /// Whether no change of the address space is on its way.
    fn is_quiet(&self) -> bool {
        // SAFETY: the probe's page is there, so nothing is copied: EEXIST at rest, EAGAIN while an event is on its way.
        let probed = unsafe { self.uffd.copy(self.probe.start(), self.pager.zeros(), PAGE_SIZE) };
        probed.is_err_and(|p| p.errno == Errno::EXIST)
    }

    fn next(&self, reading: &MutexGuard<'_, ()>) -> Option<Event> {
        let is_change = |e: &Result<Event, Errno>| matches!(e, Ok(event) if !matches!(event, Event::Fault { .. }));
        self.pager.changes.read(reading, || self.uffd.read(), is_change).ok()
    }

    /// Reads one fault, applying the changes that come before it. With faults pending, reads all there is: the kernel
    /// hands out faults first, so the event that a pending one waits for is reached only by reading on.
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
                Some(Event::Fault { address, protected, thread, .. }) => {
                    pending.thread = thread;
                    pending.note(Fault { addr: address, protected, late: false });
                    if !drain {
                        return;
                    }
                }
                Some(change) => {
                    self.pager.apply(change);
                    self.pager.changes.end(&reading);
                }
            }
        }
    }

    /// Serves a fault; `false` if it must be tried again.
    fn serve(&self, fault: Fault, shift: &mut Shift) -> bool {
        match self.pager.fault(fault) {
            Served::Yes => true,
            Served::Mapped { start, len } => {
                self.duty.wake(shift, start, len);
                true
            }
            Served::Again => false,
            Served::NotManaged => self.serve_unmanaged(fault.addr & !(PAGE_SIZE - 1)),
        }
    }

    /// Serves a fault outside of what is managed: the kernel has grown a registered area (mremap), and the new part is
    /// taken; or the fault is out of date, and by now anything may be at its address. `false` if it must be tried again.
    fn serve_unmanaged(&self, page: usize) -> bool {
        // While it is held no event is read, so what is found below is true as long as the address space is quiet.
        let _reading = self.pager.changes.reading();
        if self.pager.manages(page) {
            return false;
        }
        // SAFETY: the kernel does this in registered areas only, and nobody else defines what is not managed: a missing
        // page of such an area is a new one. Frames are registered too, but the engine touches none that is empty.
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
                let _ = self.pager.manage(start, end, &self.pagemap);
            }
        }
        true
    }
}

fn run(start: usize) {
    // SAFETY: `start` leaked it.
    let Start { watcher, handler, cpu } = *unsafe { &*(start as *const Start) };
    let mut shift = Shift::new(handler, cpu);
    let mut pending = Pending { faults: [Fault::default(); PENDING], count: 0, thread: 0 };
    loop {
        if pending.count == 0 {
            watcher.duty.wait(&mut shift);
        } else {
            yield_now();
        }
        watcher.receive(&mut pending);
        let late = pending.count > 0 && watcher.duty.note(&mut shift, pending.thread);
        pending.retain(|fault| !watcher.serve(Fault { late, ..fault }, &mut shift));
    }
}

/// Faults that one handler has read and not served yet.
struct Pending {
    faults: [Fault; PENDING],
    count: usize,
    /// The thread of the newest.
    thread: u32,
}

impl Pending {
    fn has_room(&self) -> bool {
        self.count < PENDING
    }

    /// Notes a fault, unless one of the same page is noted: serving that wakes every thread that waits for the page.
    fn note(&mut self, fault: Fault) {
        let page = |f: &Fault| f.addr & !(PAGE_SIZE - 1);
        if !self.faults[..self.count].iter().any(|f| page(f) == page(&fault) && f.protected == fault.protected) {
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
