//! Thread delivery for a whole program: faults and address-space events from one descriptor.
//!
//! Handlers, each pinned to a CPU; those on duty sleep in `poll`. Reading is serialised by `changes.rs`, so that no
//! fault that follows an event is ever served before the event was applied. A fault that can't be resolved while an
//! event waits stays with its handler, which reads and applies events until it can.
use crate::area::{Areas, page_of};
use crate::duty::{Duty, Shift};
use crate::fault::{Fault, Served};
use crate::moment::Pages;
use crate::pager::Pager;
use crate::rest::Notes;
use crate::throttle::Throttle;
use crate::worker::Spawn;
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::ControlFlow;
use memfold_sys::Errno;
use memfold_sys::lookup::each_private_area;
use memfold_sys::maps::{Area, Details, each_detailed, flag};
use memfold_sys::pagemap::Pagemap;
use memfold_sys::sync::MutexGuard;
use memfold_sys::sync::atomic::{AtomicBool, Ordering::Relaxed};
use memfold_sys::thread::{is_asleep, now_ns, sleep_ns, wait_readable, yield_now};
use memfold_sys::uffd::{Event, Uffd};
use memfold_sys::units::PAGE_SIZE;
use memfold_sys::zone::{Zone, overlaps_own, set_inherited, set_marked};

/// Faults that one handler keeps while events must be applied first; the threads of others fault again.
const PENDING: usize = 256;
/// So long a fork looks for a moment at which what was changed while it looked can be settled.
const SETTLE_NS: u64 = 10_000_000_000;
/// Time between looks for a moment at which no mapping is being changed.
const QUIET_PACE_NS: u64 = 20_000;
/// Time between looks whether the thread that forks waits for something.
const REST_PACE_NS: u64 = 50_000;
/// Time between looks whether memory is within its bounds again, while faults are held back.
const HELD_NS: u64 = 100_000;

struct Start {
    watcher: &'static Watcher,
    handler: usize,
    cpu: usize,
}

/// Why a child of fork could not be put under management.
pub enum NotCopied {
    /// The kernel refused.
    Refused(Errno),
    /// It can't be told what other threads of the parent were changing when the copy was made.
    Moving(&'static str),
}

impl From<Errno> for NotCopied {
    fn from(errno: Errno) -> NotCopied {
        NotCopied::Refused(errno)
    }
}

/// Tells the bounds of the private anonymous area that holds an address.
pub type AreaOf = fn(usize) -> Option<(usize, usize)>;

/// Serves one program.
pub struct Watcher {
    pager: Arc<Pager>,
    uffd: Arc<Uffd>,
    pagemap: Arc<Pagemap>,
    duty: Duty,
    /// A registered page that is always there: copying onto it tells whether the address space is changing.
    probe: Zone,
    /// Tells the private anonymous area that holds an address.
    area_of: AreaOf,
    /// Something of the program has been registered.
    begun: AtomicBool,
}

impl Watcher {
    /// Starts handlers for the events and faults of `uffd` (non-blocking, with the events enabled). They never end. With
    /// `keeps`, a thread that faults all the time is kept on one CPU for short times: see [`Watcher::release_cpu`].
    ///
    /// # Errors
    /// No more threads, or registering failed.
    pub fn start(
        pager: &Arc<Pager>,
        uffd: &Arc<Uffd>,
        pagemap: &Arc<Pagemap>,
        area_of: AreaOf,
        spawn: Spawn,
        keeps: bool,
    ) -> Result<&'static Watcher, Errno> {
        let probe = Zone::reserve(PAGE_SIZE, PAGE_SIZE)?;
        // SAFETY: the zone is the engine's own; its one page is made before anybody touches it.
        unsafe {
            uffd.register(probe.start(), PAGE_SIZE, false)?;
            uffd.zero(probe.start(), PAGE_SIZE).map_err(|p| p.errno)?;
        }
        let watcher: &'static Watcher = Box::leak(Box::new(Watcher {
            pager: pager.clone(),
            uffd: uffd.clone(),
            pagemap: pagemap.clone(),
            duty: Duty::new(uffd, keeps),
            probe,
            area_of,
            begun: AtomicBool::new(false),
        }));
        for (handler, &cpu) in watcher.duty.cpus().iter().enumerate() {
            let start: &'static Start = Box::leak(Box::new(Start { watcher, handler, cpu }));
            spawn(c"memfold-fault", Some(cpu), run, start as *const Start as usize)?;
        }
        if let Some((main, arg)) = watcher.duty.waker_thread() {
            spawn(c"memfold-wake", None, main, arg)?;
        }
        Ok(watcher)
    }

    /// In a child of fork, at rest, before any handler runs: registers with a userfaultfd of its own what the parent had under
    /// management. The frames are registered by the caller, who has reopened the page map.
    ///
    /// # Errors
    /// Registering failed; or the parent's other threads were changing something that nobody can tell.
    pub fn begin_as_child(&self) -> Result<(), NotCopied> {
        // SAFETY: no handler runs yet.
        unsafe { self.duty.reset_in_child() };
        // SAFETY: the engine's own page, which is there.
        unsafe { self.uffd.register(self.probe.start(), PAGE_SIZE, false)? };
        let mut lent = Vec::new();
        if self.begun.load(Relaxed) {
            each_private(|area, about| {
                if about.has(flag::RANDOM) {
                    lent.push(*area);
                }
            });
        }
        if let Err(why) = self.pager.catch_up(lent.iter().map(pages_of).collect()) {
            return Err(NotCopied::Moving(why));
        }
        for area in &lent {
            let (Area { start, end, .. }, (first, last)) = (*area, pages_of(area));
            set_marked(start, end, false);
            // As in the parent, all of a mapping or nothing of it.
            if self.pager.areas.read().touch(first, last) {
                // SAFETY: the handlers will serve the range, and no engine thread touches it.
                unsafe { self.uffd.register(start, end - start, false)? };
                set_inherited(start, end, false);
            }
        }
        Ok(())
    }

    /// At rest: lets children of fork get what is registered, and marks the mappings of which something is managed
    /// ([`flag::RANDOM`]), so that a child can tell them from what came in their place. Returns whether no other thread of the
    /// program has changed a mapping at rest. If one has, and this is not the `last` try, it is not done.
    ///
    /// Called by an engine thread.
    ///
    /// # Errors
    /// What the page-map scan says.
    pub fn lend_to_children(&self, last: bool) -> Result<bool, Errno> {
        self.pager.note_inherited(true);
        self.lend(true, true);
        if !last && self.pager.rest.has_changed() {
            return Ok(false);
        }
        if !self.settle(true, true) {
            self.pager.rest.note_unsure();
        }
        self.pager.note_strays(&self.pagemap, || self.is_quiet(), || sleep_ns(QUIET_PACE_NS))?;
        Ok(!self.pager.rest.has_changed())
    }

    /// At rest, when all is in place, so that a child needs no mark: lets it get what is registered. Called by an engine thread.
    pub fn leave_to_children(&self) {
        self.pager.note_inherited(true);
        self.lend(true, false);
        self.settle(true, false);
    }

    /// At rest: ends [`Watcher::lend_to_children`] and [`Watcher::leave_to_children`]. A child that comes to be past libc gets
    /// nothing that is registered. Called by an engine thread.
    pub fn keep_from_children(&self) {
        self.pager.note_inherited(false);
        self.lend(false, false);
        self.settle(false, false);
    }

    /// At rest: lets children get what is registered, or doesn't, and marks the mappings of which something is managed, or none.
    /// What others change meanwhile is still to be settled.
    ///
    /// All of a mapping or nothing: other parts with other properties would be mappings of their own, which mremap refuses
    /// to move at once.
    fn lend(&self, lent: bool, marked: bool) {
        if !self.begun.load(Relaxed) {
            return;
        }
        let wait = || sleep_ns(QUIET_PACE_NS);
        let managed = marked.then(|| self.pager.managed_at_rest(|| self.is_quiet(), wait).0);
        each_private(|area, about| {
            let registered = about.has(flag::UFFD_MISSING);
            if registered && about.has(flag::DONT_FORK) == lent {
                set_inherited(area.start, area.end, lent);
            }
            let (start, end) = pages_of(area);
            let wanted = registered && managed.as_ref().is_some_and(|managed| managed.touch(start, end));
            if wanted != about.has(flag::RANDOM) {
                set_marked(area.start, area.end, wanted);
            }
        });
    }

    /// At rest: after [`Watcher::lend`], the same for what other threads have changed since the rest began. That may not have been
    /// where one looked, or have given way to something else before one acted. All else was there all the time, so it was
    /// seen (proc(5), and `Documentation/filesystems/proc.rst` in the kernel). `false` if they never stopped for a moment.
    fn settle(&self, lent: bool, marked: bool) -> bool {
        let begin = now_ns();
        let settle = |managed: &Areas, changed: &[(usize, usize)]| {
            let done = each_private_area(changed, |start, end| {
                if !overlaps_own(start, end) {
                    let is_managed = managed.touch(page_of(start), page_of(end));
                    set_inherited(start, end, lent || !is_managed);
                    set_marked(start, end, marked && is_managed);
                }
            });
            done.expect("memfold: reading /proc/self/maps failed");
        };
        while !self.pager.settle_at_rest(|| self.is_quiet(), settle) {
            if now_ns() - begin > SETTLE_NS {
                return false;
            }
            sleep_ns(QUIET_PACE_NS);
        }
        true
    }

    /// To be called by a thread of the program that is about to make a thread or a process, to execute a program, or to ask for
    /// or set the CPUs of a thread: a thread that is kept on one CPU is let go, and for a second none is kept.
    pub fn release_cpu(&self) {
        self.duty.release();
    }

    /// As [`Pager::find_stray`].
    ///
    /// # Errors
    /// What the page-map scan says.
    pub fn find_stray(&self) -> Result<Option<usize>, Errno> {
        self.pager.find_stray(&self.pagemap)
    }

    /// Takes what is not under management yet of ranges of private anonymous memory. `still` is asked, after a part was
    /// registered, whether it is still what it was taken for. Returns whether it was done; if not, the address space was
    /// changing, or other threads were at work for long: try again later. What is registered by then makes its program wait
    /// for a handler at every first touch.
    pub fn adopt(&self, ranges: &[(usize, usize)], still: &mut dyn FnMut(usize, usize) -> bool) -> bool {
        let reading = self.pager.changes.reading();
        let mut parts = Vec::new();
        for &(start, end) in ranges {
            for (start, end) in self.pager.unmanaged_parts(start, end) {
                self.register(start, end, &mut parts);
            }
        }
        self.begun.fetch_or(!parts.is_empty(), Relaxed);
        // Nothing is unregistered when it can't be taken: while an event is on its way, what looks unmanaged may be managed
        // memory that mremap has just brought here. Registered and not managed, a range is served page by page.
        let quiet = self.is_quiet();
        let mut done = quiet;
        for &(start, end) in &parts {
            done &= quiet && still(start, end) && self.manage(start, end);
        }
        drop(reading);
        done
    }

    /// Whether something of the program has been registered.
    pub fn has_begun(&self) -> bool {
        self.begun.load(Relaxed)
    }

    /// Brings what is managed of `[start, end)` home and gives it back to the kernel: it is not folded again unless it is
    /// adopted again. With `inherited`, children of fork get it; without, that stays as it is. No adoption may be under way.
    pub fn release(&self, start: usize, end: usize, inherited: bool) {
        self.pager.leave(start..end, |start, end| {
            if inherited {
                set_inherited(start, end, true);
            }
            // It may have been unmapped meanwhile.
            let _ = self.uffd.unregister(start, end - start);
        });
    }

    /// Registers `[start, end)` and notes it in `parts`; mapping by mapping where the kernel refuses it as a whole, without
    /// those that it refuses, as one that the program serves through a userfaultfd of its own.
    fn register(&self, start: usize, end: usize, parts: &mut Vec<(usize, usize)>) {
        let mut register = |start: usize, end: usize| {
            // SAFETY: the handlers serve the range from now on. It is the program's, so no engine thread touches it.
            let done = unsafe { self.uffd.register(start, end - start, false) }.is_ok();
            if done {
                parts.push((start, end));
            }
            done
        };
        if !register(start, end) {
            each_mapping(start, end, |start, end| {
                register(start, end);
            });
        }
    }

    /// The parts of `[start, end)` that are registered. A part may have come after the rest was: the kernel registers what is
    /// mapped, says nothing of holes, and the program's break moves up again beside it. Who takes such a part for managed never
    /// hears of its faults.
    ///
    /// Called with the right to read events. What is found is true until an event is on its way: what is registered ends with
    /// one, and nobody else registers.
    fn registered(&self, start: usize, end: usize) -> Vec<(usize, usize)> {
        let mut parts: Vec<(usize, usize)> = Vec::new();
        each_mapping(start, end, |start, end| {
            // A mapping is registered whole or not at all.
            // SAFETY: nobody else defines what is registered and not managed: a missing page there is a new one.
            match unsafe { self.uffd.zero(start, PAGE_SIZE) } {
                Err(partial) if partial.errno != Errno::EXIST => {}
                _ => match parts.last_mut() {
                    Some(last) if last.1 == start => last.1 = end,
                    _ => parts.push((start, end)),
                },
            }
        });
        parts
    }

    /// Takes what is registered of `[start, end)` under management. Returns whether all of it is managed now.
    fn manage(&self, start: usize, end: usize) -> bool {
        let parts = self.registered(start, end);
        let mut done = parts == [(start, end)];
        for (start, end) in parts {
            done &= self.manage_registered(start, end);
        }
        done
    }

    /// Takes a registered part under management. A child that comes to be past libc has no engine: it must not get the
    /// part, or it would read zeros where something is folded. Returns whether it is managed now. If not, that stays as it is,
    /// as for all that is registered: a part of a mapping with a property of its own would be another mapping to the kernel.
    fn manage_registered(&self, start: usize, end: usize) -> bool {
        if !self.is_quiet() {
            return false;
        }
        set_inherited(start, end, self.pager.is_inherited());
        if self.is_quiet() {
            return self.pager.manage(start, end, &self.pagemap).is_ok();
        }
        self.inherit_unregistered(start, end);
        false
    }

    /// Lets children of fork get what is not registered of `[start, end)`: it was mapped there after one last looked, and has
    /// a property that was meant for what was there before.
    fn inherit_unregistered(&self, start: usize, end: usize) {
        each_private(|area, about| {
            let (start, end) = (area.start.max(start), area.end.min(end));
            if start < end && about.has(flag::DONT_FORK) && !about.has(flag::UFFD_MISSING) {
                set_inherited(start, end, true);
            }
        });
    }

    /// Whether no change of the address space is on its way.
    fn is_quiet(&self) -> bool {
        // SAFETY: the probe's page is there, so nothing is copied: EEXIST at rest, EAGAIN while an event is on its way.
        let probed = unsafe { self.uffd.copy(self.probe.start(), self.pager.zeros(), PAGE_SIZE, false) };
        probed.is_err_and(|p| p.errno == Errno::EXIST)
    }

    /// Serves what comes while the engine is at rest: see [`crate::rest`].
    fn receive_at_rest(&self) {
        let mut wait = false;
        self.pager.rest.receive(|rest| {
            if self.pager.rest.may_miss(rest, is_asleep) {
                wait = true;
                return false;
            }
            match rest.read(|| self.uffd.read()) {
                Ok(Event::Fault { address, .. }) => self.serve_at_rest(rest, address & !(PAGE_SIZE - 1)),
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
            // SAFETY: a missing page of a registered area, and what it holds, as nothing changes at rest. No lock is held: when
            // the page is there, the thread that forks goes on.
            match unsafe { self.uffd.copy(page, bytes, PAGE_SIZE, true) } {
                Err(partial) if partial.errno == Errno::AGAIN => match rest.read(|| self.uffd.read()) {
                    Ok(Event::Fault { address, .. }) => self.serve_at_rest(rest, address & !(PAGE_SIZE - 1)),
                    Ok(_) => {}
                    Err(_) => yield_now(),
                },
                Err(_) => return self.uffd.wake(page, PAGE_SIZE),
                Ok(()) => return,
            }
        }
    }

    /// Ends the rest, in the parent or the child of a fork: what has changed meanwhile is applied, the gates are opened,
    /// and what was served is put in order. Called by an engine thread.
    ///
    /// # Safety
    /// - [`Pager::come_to_rest`] has returned, in this process or in the parent that it is a copy of, and this is called
    ///   once for it.
    pub unsafe fn end_rest(&self) {
        let reading = self.pager.changes.reading();
        self.pager.rest.end(|note| self.pager.apply_note(note));
        // SAFETY: by the caller's promise.
        unsafe { self.pager.start_again() };
        drop(reading);
        let mut shift = Shift::new(usize::MAX, 0);
        // A page may be moved meanwhile; it is followed (`Rest::tell`).
        while let Some(addr) = self.pager.rest.noted_page() {
            if self.serve(Fault { addr, protected: false, late: false }, &mut shift) {
                self.pager.rest.settle(addr);
            } else {
                yield_now();
            }
        }
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
                    self.pager.rest.tell(change);
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
                self.manage(start, end);
            }
        }
        true
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

/// What of private memory without a file lies in `[start, end)`: each mapping, or its part in there. None if the kernel doesn't tell.
fn each_mapping(start: usize, end: usize, mut each: impl FnMut(usize, usize)) {
    let _ = each_private_area(&[(start, end)], |from, to| each(from.max(start), to.min(end)));
}

fn pages_of(area: &Area) -> Pages {
    (page_of(area.start), page_of(area.end))
}

fn run(start: usize) {
    // SAFETY: `start` leaked it.
    let Start { watcher, handler, cpu } = *unsafe { &*(start as *const Start) };
    let mut shift = Shift::new(handler, cpu);
    let (mut throttle, mut held) = (Throttle::default(), false);
    let mut pending = Pending { faults: [Fault::default(); PENDING], count: 0, thread: 0 };
    let mut has_served = false;
    loop {
        let may_look = core::mem::take(&mut has_served) && shift.may_look();
        if pending.count == 0 {
            if !may_look {
                watcher.duty.wait(&mut shift);
            }
        } else if held {
            wait_readable(watcher.uffd.fd(), Some(HELD_NS));
        } else {
            yield_now();
        }
        let Some(_open) = watcher.pager.gates.serving() else {
            // Whoever waits for one of these faults again, and is served at rest if need be.
            pending.retain(|fault| {
                watcher.uffd.wake(fault.addr & !(PAGE_SIZE - 1), PAGE_SIZE);
                false
            });
            watcher.receive_at_rest();
            continue;
        };
        watcher.receive(&mut pending);
        held = pending.count > 0 && throttle.holds(&watcher.pager, now_ns);
        if held {
            continue;
        }
        has_served = pending.count > 0;
        let late = has_served && watcher.duty.note(&mut shift, pending.thread);
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
