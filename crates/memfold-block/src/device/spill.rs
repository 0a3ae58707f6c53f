//! What does not fit in memory goes to a file: objects as they are stored, sealed, many in one write.
//!
//! An object leaves memory in three steps: its payload is copied under its block's lock, the copies are written, and then
//! each one whose slot still holds the object takes its place there. Until that moment the object in memory is the one that
//! counts, so a write that fails changes nothing.
use super::backing::Backing;
use super::{Decoder, Device, IoError};
use memfold::swap::{Bounds, HEAD_BYTES, Place, Swap, UNIT_BYTES};
use memfold_store::{Cold, Handle};
use memfold_sys::page::Page;
use memfold_sys::swapfile::{FileDisk, Options};
use memfold_sys::sync::Mutex;
use memfold_sys::units::{Order, PAGE_SIZE};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Orders of the runs that objects are written to: the largest that can be had.
const RUN_ORDERS: std::ops::RangeInclusive<u8> = 1..=7;
/// Objects of one run, at most.
const ITEMS_MAX: usize = 1024;
/// Objects that are looked for at a time.
const LOOK: usize = 64;
/// Looks for one run: what is found may have been given up before it can be copied.
const LOOKS_MAX: usize = 64;
/// Entries that are looked at for them.
const SCAN: usize = 4096;
/// No limit to what is written.
const UNLIMITED: u64 = u64::MAX;

/// Where and how much is written back.
#[derive(Clone, Debug)]
pub struct SpillSettings {
    /// A directory, or where a file could be made: it never has that name, and is gone when the process ends.
    pub path: String,
    /// The most that the file may take, bytes.
    pub size_bytes: u64,
    /// What stays free on its file system, bytes.
    pub keep_free_bytes: u64,
    /// Encrypted with a key that is in memory only; else only checked.
    pub encrypt: bool,
    /// Bytes that may be written in all; `None` for any number.
    pub limit_bytes: Option<u64>,
}

/// A file behind the memory of devices.
pub(crate) struct Spill {
    swap: Swap,
    name: String,
    /// Bytes that may still be written.
    left: AtomicU64,
    writer: Mutex<Writer>,
    pub counters: SpillCounters,
    /// What went wrong last.
    error: std::sync::Mutex<Option<String>>,
}

/// Counts as zram's `bd_stat` has them, in bytes.
#[derive(Default)]
pub(crate) struct SpillCounters {
    pub read_bytes: AtomicU64,
    pub written_bytes: AtomicU64,
    /// Of the blocks that are in the file now, before compression.
    pub original_bytes: AtomicU64,
    pub failed_reads: AtomicU64,
    pub failed_writes: AtomicU64,
}

/// Figures of the file behind the memory, as zram's `bd_stat` has them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpillStats {
    /// Blocks in the file, before compression, bytes.
    pub original_bytes: u64,
    /// Objects in the file.
    pub objects: u64,
    /// Bytes of the file in use.
    pub used_bytes: u64,
    /// Bytes of blocks that were read from it, before compression.
    pub read_bytes: u64,
    /// Bytes of blocks that were written to it, before compression.
    pub written_bytes: u64,
    /// Reads that failed.
    pub failed_reads: u64,
    /// Writes that failed; what was to be written stayed in memory.
    pub failed_writes: u64,
    /// Bytes that may still be written; `None` for any number.
    pub limit_left_bytes: Option<u64>,
    /// What went wrong last.
    pub error: Option<String>,
}

/// Who writes; one at a time.
struct Writer {
    items: Vec<Item>,
    found: [Cold; LOOK],
    used: usize,
    count: usize,
}

struct Item {
    device: Arc<Device>,
    cold: Cold,
    place: Place,
}

impl Spill {
    /// An empty file.
    ///
    /// # Errors
    /// One line that says why there can be none.
    pub fn new(settings: &SpillSettings, limit_bytes: u64, block: Order) -> Result<Spill, String> {
        let disk = FileDisk::open(&settings.path, Options::default())?;
        let bounds = Bounds {
            size_bytes: settings.size_bytes,
            keep_free_bytes: settings.keep_free_bytes,
            remote_bytes: 0,
            remote_expiry: std::time::Duration::MAX,
            mark_percent: 100,
            limit_bytes: if limit_bytes == 0 { u64::MAX } else { limit_bytes },
            folio: block,
        };
        let swap = Swap::new(Box::new(disk), None, settings.encrypt, bounds);
        let writer = Writer { items: Vec::with_capacity(ITEMS_MAX), found: [Cold::NONE; LOOK], used: 0, count: 0 };
        Ok(Spill {
            swap: swap.map_err(|e| format!("{}: {e}", settings.path))?,
            name: settings.path.clone(),
            left: AtomicU64::new(settings.limit_bytes.unwrap_or(UNLIMITED)),
            writer: Mutex::new(writer),
            counters: SpillCounters::default(),
            error: std::sync::Mutex::new(None),
        })
    }

    /// Bytes of memory that it takes.
    pub fn memory_bytes(&self) -> u64 {
        self.swap.memory_bytes()
    }

    /// Bytes that may still be written; `None` for any number.
    pub fn limit_left(&self) -> Option<u64> {
        Some(self.left.load(Relaxed)).filter(|left| *left != UNLIMITED)
    }

    /// Changes what [`Spill::limit_left`] says.
    pub fn set_limit(&self, bytes: Option<u64>) {
        self.left.store(bytes.unwrap_or(UNLIMITED), Relaxed);
    }

    pub fn stats(&self) -> SpillStats {
        SpillStats {
            original_bytes: self.counters.original_bytes.load(Relaxed),
            objects: self.swap.objects(),
            used_bytes: self.swap.used_bytes(),
            read_bytes: self.counters.read_bytes.load(Relaxed),
            written_bytes: self.counters.written_bytes.load(Relaxed),
            failed_reads: self.counters.failed_reads.load(Relaxed),
            failed_writes: self.counters.failed_writes.load(Relaxed),
            limit_left_bytes: self.limit_left(),
            error: self.error.lock().expect("nobody panics with the lock").clone(),
        }
    }

    /// Lets go of an object in the file; `handle` may be any other.
    pub fn free(&self, handle: Handle, order: Order) {
        if Place::of(handle).is_some() {
            self.counters.original_bytes.fetch_sub(order.bytes() as u64, Relaxed);
            self.swap.free(handle);
        }
    }

    fn note(&self, error: impl ToString) {
        *self.error.lock().expect("nobody panics with the lock") =
            Some(format!("{}: {}", self.name, error.to_string()));
    }
}

/// Decodes the object of a place into `to`, a block of `order`.
pub(crate) fn load(
    backing: &Backing,
    decoder: &mut Decoder,
    handle: Handle,
    order: Order,
    to: *mut u8,
) -> Result<(), IoError> {
    let (Some(spill), Some(place)) = (backing.spill(), Place::of(handle)) else { return Err(IoError::Unread) };
    assert!(Page::begins_at(to));
    let read = spill.swap.read_packed(place, place, |packed| {
        let (fields, payload) = packed.open(place)?;
        // SAFETY: the caller has a block of `order` at `to` that is its alone; the seal says that this is what was exported.
        Ok(unsafe { backing.store.import(&mut decoder.worker, fields, payload, order, to) })
    });
    let counters = &spill.counters;
    match read {
        Ok(Ok(())) => {
            counters.read_bytes.fetch_add(order.bytes() as u64, Relaxed);
            return Ok(());
        }
        Ok(Err(problem)) => spill.note(format!("{problem:?}")),
        Err(error) => spill.note(error),
    }
    counters.failed_reads.fetch_add(1, Relaxed);
    Err(IoError::Unread)
}

/// The payload of an object in the file, as it was exported: its fields, and its length at the start of `out`.
pub(crate) fn export(backing: &Backing, handle: Handle, out: &mut [u8]) -> Result<(u32, usize), IoError> {
    let (Some(spill), Some(place)) = (backing.spill(), Place::of(handle)) else { return Err(IoError::Unread) };
    let read = spill.swap.read_packed(place, place, |packed| {
        let (fields, payload) = packed.open(place)?;
        out[..payload.len()].copy_from_slice(payload);
        Ok((fields, payload.len()))
    });
    read.map_err(|error| {
        spill.note(error);
        spill.counters.failed_reads.fetch_add(1, Relaxed);
        IoError::Unread
    })
}

/// Writes back the objects that were not used for longest, until at least `bytes` of payload have left memory, if there
/// are as many. Returns how many did.
pub(crate) fn write_cold(backing: &Backing, spill: &Spill, bytes: u64) -> u64 {
    let mut writer = spill.writer.lock();
    (writer.used, writer.count) = (0, 0);
    let mut freed = 0;
    while freed < bytes {
        let done = write_run(backing, spill, &mut writer, |found| look_for_cold(backing, found));
        if done == 0 {
            break;
        }
        freed += done;
    }
    freed
}

/// Writes back these objects. Returns how many bytes of payload have left memory.
pub(crate) fn write_these(backing: &Backing, spill: &Spill, these: &[Cold]) -> u64 {
    let mut writer = spill.writer.lock();
    (writer.used, writer.count) = (0, 0);
    let (mut rest, mut freed) = (these, 0);
    loop {
        let left = rest.len() + writer.count - writer.used;
        let done = write_run(backing, spill, &mut writer, |found| {
            let count = rest.len().min(found.len());
            let (now, later) = rest.split_at(count);
            found[..count].copy_from_slice(now);
            rest = later;
            count
        });
        freed += done;
        // Nothing could be written, or nothing is left.
        if rest.is_empty() && writer.used == writer.count || rest.len() + writer.count - writer.used == left {
            return freed;
        }
    }
}

fn look_for_cold(backing: &Backing, found: &mut [Cold]) -> usize {
    // Twice: what was used since the last turn gets a second chance.
    for _ in 0..2 * (backing.store.stats().objects as usize / SCAN + 2) {
        let count = backing.store.coldest(SCAN, found);
        if count > 0 {
            return count;
        }
    }
    0
}

/// One run: as many objects as fit it, from those that are left of the last look, and then of further looks.
fn write_run(backing: &Backing, spill: &Spill, writer: &mut Writer, mut look: impl FnMut(&mut [Cold]) -> usize) -> u64 {
    let swap = &spill.swap;
    if !swap.accepts() || spill.left.load(Relaxed) == 0 {
        return 0;
    }
    let Some(buffer) = swap.write_buffer(false) else { return 0 };
    let orders = RUN_ORDERS.rev().filter_map(Order::new).filter(|order| *order <= swap.largest());
    let Some((order, slot)) = orders.filter_map(|order| Some((order, swap.take(order)?))).next() else {
        spill.note("full");
        swap.note_full();
        swap.give_buffer(buffer);
        return 0;
    };
    // SAFETY: the buffer is this thread's.
    let room = unsafe { &mut swap.buffer(buffer)[..order.bytes()] };
    let used = fill(backing, spill, writer, slot, room, &mut look);
    let pages = used.div_ceil(PAGE_SIZE);
    if pages < order.pages() {
        swap.put(slot + pages as u64, order.pages() - pages);
    }
    let mut freed = 0;
    if pages > 0 {
        room[used..pages * PAGE_SIZE].fill(0);
        let mut writes = [swap.write_of(buffer, slot, pages * PAGE_SIZE)];
        // SAFETY: buffer and run are this thread's.
        unsafe { swap.write(&mut writes) };
        freed = end_run(spill, writer, writes[0].result);
        swap.put(slot, pages);
    }
    swap.give_buffer(buffer);
    freed
}

/// Copies and seals objects; how many bytes of the room they take.
fn fill(
    backing: &Backing,
    spill: &Spill,
    writer: &mut Writer,
    slot: u64,
    room: &mut [u8],
    look: &mut impl FnMut(&mut [Cold]) -> usize,
) -> usize {
    let (mut used, mut looks) = (0, 0);
    writer.items.clear();
    while writer.items.len() < ITEMS_MAX {
        if writer.used == writer.count {
            looks += 1;
            if looks > LOOKS_MAX {
                break;
            }
            (writer.used, writer.count) = (0, look(&mut writer.found));
            if writer.count == 0 {
                break;
            }
        }
        let cold = writer.found[writer.used];
        let len = (HEAD_BYTES + cold.stored_bytes as usize).next_multiple_of(UNIT_BYTES);
        if used + len > room.len() && used > 0 {
            break;
        }
        writer.used += 1;
        // A whole turn, of which all that can leave is on its way: what is looked for again was found before.
        if writer.items.first().is_some_and(|first| first.cold.handle == cold.handle) {
            writer.used = writer.count;
            break;
        }
        let Some(place) = room.get_mut(used..used + len) else { continue };
        let Some(device) = backing.device_of(cold.key) else { continue };
        let Some(exported) = device.export(&cold, &mut place[HEAD_BYTES..]) else { continue };
        if HEAD_BYTES + exported.len > len {
            continue;
        }
        if !spill.spend(cold.order) {
            break;
        }
        let at = Place { slot: slot + (used / PAGE_SIZE) as u64, offset: used % PAGE_SIZE, len, raw: false };
        spill.swap.seal_packed(at, exported.fields, exported.len, place);
        writer.items.push(Item { device, cold, place: at });
        used += len;
    }
    used
}

/// Puts what was written in the place of what is in memory.
fn end_run(spill: &Spill, writer: &mut Writer, result: Result<(), memfold_sys::Errno>) -> u64 {
    let mut freed = 0;
    if let Err(error) = result {
        spill.note(error);
        spill.counters.failed_writes.fetch_add(1, Relaxed);
        spill.swap.note_failure(error);
    }
    for Item { device, cold, place } in writer.items.drain(..).filter(|_| result.is_ok()) {
        let bytes = cold.order.bytes() as u64;
        spill.counters.written_bytes.fetch_add(bytes, Relaxed);
        spill.counters.original_bytes.fetch_add(bytes, Relaxed);
        spill.swap.enter(place);
        if device.replace(&cold, place.handle()) {
            freed += u64::from(cold.stored_bytes);
        } else {
            spill.free(place.handle(), cold.order);
        }
    }
    freed
}

impl Spill {
    /// Takes a block from what may still be written. `false`: that is used up.
    fn spend(&self, order: Order) -> bool {
        let bytes = order.bytes() as u64;
        let spend = |left: u64| if left == UNLIMITED { Some(left) } else { left.checked_sub(bytes) };
        let spent = self.left.fetch_update(Relaxed, Relaxed, spend).is_ok();
        if !spent {
            self.note("the writeback limit is reached");
        }
        spent
    }
}
