//! Signal delivery: the faulting thread serves itself in a SIGBUS handler.
//!
//! The handler runs with every signal blocked, so no other handler of the program can fault while
//! an engine lock is held. It makes only raw system calls, so `errno` is unchanged.
//!
//! A child of fork has the handler, but none of its parent's engines: the list of them is empty
//! there.
use crate::fault::{FaultOutcome, PageFault};
use crate::pager::Pager;
use alloc::boxed::Box;
use core::mem::forget;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering::SeqCst};
use memfold_os::Errno;
use memfold_os::memory::zone::Zone;
use memfold_os::sync::StaticMutex;
use memfold_os::thread::{PreviousAction, SigbusInfo, set_sigbus, yield_now};
use memfold_os::units::PAGE_SIZE;

/// Most engines with signal delivery in one process.
pub const ENGINES_MAX: usize = 64;

/// The list of engines, in a page that fork wipes, once there is one.
static LIST: AtomicPtr<RegistryState> = AtomicPtr::new(null_mut());
/// The action that the handler has replaced. It is stored before the handler is installed, and the
/// handler is marked as installed after that. A child of fork, which may be made at any time, reads
/// both and knows which steps remain.
static PREVIOUS: AtomicPtr<PreviousAction> = AtomicPtr::new(null_mut());
static INSTALLED: AtomicBool = AtomicBool::new(false);

/// State that a child of fork must find as new. Zeros are an empty list, not locked.
struct RegistryState {
    engines: EngineRegistry<Pager>,
    installing: StaticMutex<()>,
}

const _: () = assert!(size_of::<RegistryState>() <= PAGE_SIZE);

impl RegistryState {
    fn get() -> Option<&'static RegistryState> {
        // SAFETY: the pointer is null, or that of an aligned page. The page is large enough, is
        // used for nothing else, and is never freed. It began as zeros, as it does in children of
        // fork, and zeros are a list.
        unsafe { LIST.load(SeqCst).as_ref() }
    }

    fn get_or_make() -> Result<&'static RegistryState, Errno> {
        if let Some(list) = RegistryState::get() {
            return Ok(list);
        }
        let page = Zone::reserve(PAGE_SIZE, PAGE_SIZE)?;
        page.wipe_in_children()?;
        let list = page.as_ptr().cast::<RegistryState>();
        if LIST.compare_exchange(null_mut(), list, SeqCst, SeqCst).is_ok() {
            forget(page);
        }
        Ok(RegistryState::get().expect("there is one by now"))
    }
}

/// A list of engines that any thread may visit at any time, also from a signal handler, while
/// engines are listed and delisted.
struct EngineRegistry<T> {
    places: [RegistryPlace<T>; ENGINES_MAX],
}

struct RegistryPlace<T> {
    engine: AtomicPtr<T>,
    /// Number of threads that visit `engine`. A visitor counts itself before it reads the pointer.
    /// A thread that empties the place reads the count after that. All four accesses are
    /// sequentially consistent, so one of the two sees the other.
    visitors: AtomicU32,
}

#[cfg(test)]
impl<T> RegistryPlace<T> {
    const fn empty() -> RegistryPlace<T> {
        RegistryPlace { engine: AtomicPtr::new(null_mut()), visitors: AtomicU32::new(0) }
    }
}

impl<T> EngineRegistry<T> {
    /// Lists an engine. Returns `false` if there are too many.
    fn enlist(&self, engine: *const T) -> bool {
        self.places.iter().any(|p| {
            p.engine.compare_exchange(null_mut(), engine.cast_mut(), SeqCst, SeqCst).is_ok()
        })
    }

    /// Delists an engine, and waits until no thread visits it any more.
    fn delist(&self, engine: *const T) {
        for place in &self.places {
            if place.engine.compare_exchange(engine.cast_mut(), null_mut(), SeqCst, SeqCst).is_ok()
            {
                // A visit takes less than a microsecond, unless its thread loses its CPU meanwhile.
                while place.visitors.load(SeqCst) > 0 {
                    yield_now();
                }
            }
        }
    }

    /// Calls `visit` for each engine until it returns `true`. Returns whether it did.
    fn any(&self, mut visit: impl FnMut(&T) -> bool) -> bool {
        self.places.iter().any(|place| {
            if place.engine.load(SeqCst).is_null() {
                return false;
            }
            place.visitors.fetch_add(1, SeqCst);
            let engine = place.engine.load(SeqCst);
            // SAFETY: an engine is dropped only after it was delisted, which waits for visitors.
            let is_found = !engine.is_null() && visit(unsafe { &*engine });
            place.visitors.fetch_sub(1, SeqCst);
            is_found
        })
    }
}

/// Lists an engine. With `handles`, also installs the handler if it is not installed yet. Returns
/// `false` if there are too many engines.
///
/// # Errors
/// No memory for the list.
pub(crate) fn enlist(pager: &Pager, handles: bool) -> Result<bool, Errno> {
    let list = RegistryState::get_or_make()?;
    let installing = list.installing.lock();
    if handles && !INSTALLED.load(SeqCst) {
        set_sigbus(on_sigbus, |previous| PREVIOUS.store(Box::into_raw(Box::new(previous)), SeqCst));
        INSTALLED.store(true, SeqCst);
    }
    drop(installing);
    Ok(list.engines.enlist(pager))
}

/// Delists an engine. No thread may be touching its memory. Threads that touch memory of other
/// engines may be visiting this one: this waits for them.
pub(crate) fn delist(pager: &Pager) {
    if let Some(list) = RegistryState::get() {
        list.engines.delist(pager);
    }
}

/// Serves a fault, if it lies in a region of any listed engine. Returns whether it does.
pub(crate) fn serve(fault: PageFault) -> bool {
    let serve = |pager: &Pager| {
        loop {
            match pager.faults().fault(fault) {
                FaultOutcome::Yes => return true,
                FaultOutcome::Again => yield_now(),
                FaultOutcome::NotManaged => return false,
            }
        }
    };
    any(serve)
}

/// Calls `visit` for each listed engine until it returns `true`. Returns whether it did.
pub(crate) fn any(visit: impl FnMut(&Pager) -> bool) -> bool {
    RegistryState::get().is_some_and(|list| list.engines.any(visit))
}

fn on_sigbus(info: &SigbusInfo) {
    let (write, protected) = info.access();
    if serve(PageFault { addr: info.addr(), protected, write }) {
        return;
    }
    // The fault is the program's own, so its former action is taken.
    // SAFETY: the pointer is null, or that of a leaked box.
    match unsafe { PREVIOUS.load(SeqCst).as_ref() } {
        Some(previous) => previous.call(info),
        None => unreachable!("the handler is installed after what it replaced was noted"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc;

    #[test]
    fn a_list_of_zeros_is_an_empty_one() {
        // SAFETY: the type consists of pointers, numbers and a lock of numbers; zeros are valid for
        // all.
        let list: RegistryState = unsafe { core::mem::zeroed() };
        assert!(!list.engines.any(|_| true));
        drop(list.installing.lock());
        assert!(list.engines.places.iter().all(|place| place.visitors.load(SeqCst) == 0));
    }

    #[test]
    fn an_engine_is_not_gone_while_a_thread_looks_at_it() {
        let engines: EngineRegistry<u32> =
            EngineRegistry { places: [const { RegistryPlace::empty() }; ENGINES_MAX] };
        let (one, two) = (Box::new(1), Box::new(2));
        assert!(engines.enlist(&*one) && engines.enlist(&*two));
        let (looks, is_looking) = mpsc::channel();
        let (go_on, may_go_on) = mpsc::channel::<()>();
        let is_gone = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (engines, is_gone) = (&engines, &is_gone);
            scope.spawn(move || {
                engines.any(|_| {
                    looks.send(()).unwrap();
                    may_go_on.recv().unwrap();
                    assert!(!is_gone.load(SeqCst));
                    true
                })
            });
            is_looking.recv().unwrap();
            let one = &*one;
            scope.spawn(move || {
                engines.delist(one);
                is_gone.store(true, SeqCst);
            });
            // The engine is delisted at once, but the call returns only when the visit has ended.
            while !engines.places[0].engine.load(SeqCst).is_null() {
                yield_now();
            }
            (0..1000).for_each(|_| yield_now());
            go_on.send(()).unwrap();
        });
        let mut seen = Vec::new();
        assert!(!engines.any(|engine| {
            seen.push(*engine);
            false
        }));
        assert_eq!(seen, [2]);
        assert!(engines.enlist(&*one));
    }
}
