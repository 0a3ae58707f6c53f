//! memfold for C and C++. `tests/header.rs` generates `include/memfold.h` from this file.
//!
//! A `memfold_t` is a number that is never reused, and the heap knows memory by its address. So a
//! call on something that was destroyed or unmapped returns a status instead of crashing.

// Bottom first: a module imports only from modules listed above it.
mod status;
mod memories;

use memfold::{Error, Heap, Hint, Memory, OpenError};
use memories::{add, remove, with};
use status::{Failure, Status, answer};
use std::ffi::{CStr, c_char, c_void};
use std::sync::Once;

/// Memory use of a memory in bytes, and counts since it was created.
#[repr(C)]
#[derive(Copy, Clone, Default)]
pub struct Stats {
    /// All physical memory: resident, frames, pool and index.
    pub physical_bytes: u64,
    /// Mapped memory that is resident, uncompressed.
    pub resident_bytes: u64,
    /// Uncompressed pages that are being evicted or loaded.
    pub frame_bytes: u64,
    /// Memory of compressed data.
    pub pool_bytes: u64,
    /// Memory of the index and other metadata.
    pub index_bytes: u64,
    /// Mapped memory that is only compressed (or in the swap file), before compression.
    pub folded_bytes: u64,
    /// Space used in the swap file.
    pub swap_bytes: u64,
    /// Address space of mapped memory.
    pub mapped_bytes: u64,
    /// Page faults: touches of memory that was not resident.
    pub faults: u64,
    /// Page faults that loaded folded memory.
    pub loads: u64,
    /// Times that the limit was exceeded, because nothing more could be folded.
    pub over_limit: u64,
}

/// Creates a memory with its threads. `settings` are flags of `memfold run` with their values,
/// separated by spaces or line ends: "limit=2G codec=zstd swap=/var/tmp". Give at least limit or
/// resident. delivery=signal needs no permission, but system calls may use the memory only while it
/// is pinned. It is the default for a user without that permission, with a warning on stderr.
/// delivery=gate is unavailable here; it is for `memfold run` and Python.
///
/// # Safety
/// - `settings` is a string; `memory` points to where the result may be written. Either may be
///   null, which is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memfold_create(settings: *const c_char, memory: *mut u64) -> Status {
    answer(|| {
        if settings.is_null() || memory.is_null() {
            return Err(Failure::null());
        }
        // SAFETY: a string, as the caller says.
        let text = unsafe { CStr::from_ptr(settings) };
        let text = text.to_str().map_err(|_| Failure::invalid("the settings are not in UTF-8"))?;
        let mut settings = Vec::new();
        for setting in text.split_whitespace() {
            let refusal = || {
                Failure::invalid(format!(
                    "{setting:?} is not a setting: write name=value, as in limit=2G"
                ))
            };
            settings.push(setting.split_once('=').ok_or_else(refusal)?);
        }
        // SAFETY: the caller's place for it.
        unsafe { memory.write(add(&build(&settings)?)) };
        Ok(())
    })
}

/// Builds a memory. A user who may use no threads for faults gets signals, unless the settings name
/// the delivery.
fn build(settings: &[(&str, &str)]) -> Result<Memory, Failure> {
    let start = |more: Option<(&'static str, &'static str)>| {
        let all = settings.iter().copied().chain(more);
        all.fold(Memory::builder(), |builder, (name, value)| builder.set(name, value)).build()
    };
    let delivery = settings.iter().rev().find(|(name, _)| *name == "delivery");
    match (start(None), delivery) {
        (Err(refusal @ Error::Userfaultfd(OpenError::Forbidden)), None) => {
            let memory = start(Some(("delivery", "signal"))).map_err(|_| refusal)?;
            static WARNS: Once = Once::new();
            WARNS.call_once(|| eprintln!("memfold: warning: {BY_SIGNAL}"));
            Ok(memory)
        }
        (Err(refusal @ Error::Userfaultfd(OpenError::Forbidden)), Some((_, "thread"))) => {
            Err(Failure::from(refusal).or(SIGNAL))
        }
        (outcome, _) => Ok(outcome?),
    }
}

const SIGNAL: &str = "; or give delivery=signal, which needs no permission, but then give memory to system calls only while it is pinned";

const BY_SIGNAL: &str = "delivery=signal is used, because this user may not use userfaultfd for system calls: give memory to system \
    calls only while it is pinned. delivery=signal in the settings ends this warning";

/// Destroys a memory, and everything that is mapped in it.
#[unsafe(no_mangle)]
pub extern "C" fn memfold_destroy(memory: u64) -> Status {
    answer(|| remove(memory))
}

/// Maps `len` bytes of zeros at a multiple of 64 KiB. They take no memory until they are touched.
///
/// # Safety
/// - `address` points to where the result may be written, or is null, which is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memfold_map(memory: u64, len: usize, address: *mut *mut c_void) -> Status {
    answer(|| {
        if address.is_null() {
            return Err(Failure::null());
        }
        let at = with(memory, |heap| heap.alloc(len))?;
        // SAFETY: the caller's place for it.
        unsafe { address.write(at.as_ptr().cast()) };
        Ok(())
    })
}

/// Unmaps what `memfold_map` or `memfold_resize` returned. It may not be used any more.
///
/// # Safety
/// - The mapping there is not used any more. Any address may be given.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memfold_unmap(memory: u64, address: *mut c_void) -> Status {
    // SAFETY: as the caller says.
    answer(|| with(memory, |heap| unsafe { heap.free(address as usize) }))
}

/// Changes the length of the mapping at `address` to `len` bytes. `moved` receives its address,
/// which may be another one. Contents that fit are kept. On failure nothing changes.
///
/// # Safety
/// - No other thread uses what is mapped there meanwhile, nor, if it moves, its old address any
///   more. `moved` points to where the result may be written, or is null, which is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memfold_resize(
    memory: u64,
    address: *mut c_void,
    len: usize,
    moved: *mut *mut c_void,
) -> Status {
    answer(|| {
        if moved.is_null() {
            return Err(Failure::null());
        }
        // SAFETY: as the caller says.
        let at = with(memory, |heap| unsafe { heap.resize(address as usize, len) })?;
        // SAFETY: the caller's place for it.
        unsafe { moved.write(at.as_ptr().cast()) };
        Ok(())
    })
}

/// Folds the pages wholly inside a range now.
#[unsafe(no_mangle)]
pub extern "C" fn memfold_fold(memory: u64, address: *const c_void, len: usize) -> Status {
    hint(memory, address, len, Hint::Fold)
}

/// Makes the pages of a range the first to be folded when memory is needed.
#[unsafe(no_mangle)]
pub extern "C" fn memfold_cold(memory: u64, address: *const c_void, len: usize) -> Status {
    hint(memory, address, len, Hint::Cold)
}

/// Loads the folded pages of a range.
#[unsafe(no_mangle)]
pub extern "C" fn memfold_prefetch(memory: u64, address: *const c_void, len: usize) -> Status {
    hint(memory, address, len, Hint::Prefetch)
}

/// Loads a range and keeps it resident until `memfold_unpin` with the same range, or until it is
/// unmapped. Pins nest.
#[unsafe(no_mangle)]
pub extern "C" fn memfold_pin(memory: u64, address: *const c_void, len: usize) -> Status {
    answer(|| range(address, len).and_then(|range| with(memory, |heap| heap.pin(range))))
}

/// Ends one pin.
#[unsafe(no_mangle)]
pub extern "C" fn memfold_unpin(memory: u64, address: *const c_void, len: usize) -> Status {
    answer(|| range(address, len).and_then(|range| with(memory, |heap| heap.unpin(range))))
}

/// Drops the contents of the pages wholly inside a range: they read as zeros. No other thread may
/// use them meanwhile.
///
/// # Safety
/// - No other thread uses the range meanwhile, and what it held is needed no longer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memfold_discard(memory: u64, address: *mut c_void, len: usize) -> Status {
    // SAFETY: as the caller says.
    let discard = |heap: &Heap, range| unsafe { heap.discard(range) };
    answer(|| range(address, len).and_then(|range| with(memory, |heap| discard(heap, range))))
}

/// Writes the counters of a memory. `size` is sizeof *stats: a later version of the struct has more
/// fields at its end, which an older library sets to 0.
///
/// # Safety
/// - `stats` points to `size` bytes that may be written, or is null, which is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memfold_stats(memory: u64, stats: *mut Stats, size: usize) -> Status {
    answer(|| {
        if stats.is_null() {
            return Err(Failure::null());
        }
        let now = with(memory, |heap| heap.at_home().map(|()| figures(heap)))?;
        let len = size.min(size_of::<Stats>());
        // SAFETY: the caller's place for `size` bytes, of which `len` are the first; a struct of
        // numbers has no padding.
        unsafe {
            stats.cast::<u8>().copy_from_nonoverlapping((&raw const now).cast(), len);
            stats.cast::<u8>().add(len).write_bytes(0, size - len);
        }
        Ok(())
    })
}

/// Returns why the calling thread's last call failed, as a sentence; empty after a success. Valid
/// until the thread's next call.
#[unsafe(no_mangle)]
pub extern "C" fn memfold_last_error() -> *const c_char {
    status::last_error()
}

/// Returns the version, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn memfold_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => panic!("a version has no zeros"),
        };
    VERSION.as_ptr()
}

fn hint(memory: u64, address: *const c_void, len: usize, hint: Hint) -> Status {
    answer(|| {
        range(address, len).and_then(|range| with(memory, |heap| heap.hint(range, hint)).map(drop))
    })
}

fn range(address: *const c_void, len: usize) -> Result<std::ops::Range<usize>, Failure> {
    let start = address as usize;
    let end = start
        .checked_add(len)
        .ok_or_else(|| Failure::invalid("the range reaches past the end of all addresses"))?;
    Ok(start..end)
}

fn figures(heap: &memfold::Heap) -> Stats {
    let stats = heap.memory().stats();
    let get =
        |figure: &std::sync::atomic::AtomicU64| figure.load(std::sync::atomic::Ordering::Relaxed);
    let (resident_bytes, frame_bytes) = (get(&stats.resident_bytes), get(&stats.frame_bytes));
    let (pool_bytes, index_bytes) = (get(&stats.pool_bytes), get(&stats.index_bytes));
    Stats {
        physical_bytes: resident_bytes + frame_bytes + pool_bytes + index_bytes,
        resident_bytes,
        frame_bytes,
        pool_bytes,
        index_bytes,
        folded_bytes: get(&stats.folded_bytes),
        swap_bytes: get(&stats.swap_bytes),
        mapped_bytes: heap.allocated_bytes(),
        faults: get(&stats.faults),
        loads: get(&stats.pgmajfault),
        over_limit: get(&stats.over_limit),
    }
}
