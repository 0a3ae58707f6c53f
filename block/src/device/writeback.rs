//! Writeback: objects that do not fit in memory go to a file as they are stored, sealed, many in
//! one write.
//!
//! An object is moved in three steps. Its payload is copied under its block's lock. The copies are
//! written. Then each one whose slot still holds the object replaces it. Until then the object in
//! memory counts, so a failed write changes nothing.
use super::backing::DeviceMemory;
use super::error::IoError;
use super::io::BlockDecoder;
use super::spill::{ITEMS_MAX, SpillFile, SpillItem, SpillWriter};
use memfold_os::page::Page;
use memfold_os::units::{Order, PAGE_SIZE};
use memfold_store::{ColdObject, Handle};
use memfold_swap::{HEAD_BYTES, ObjectLocation, UNIT_BYTES};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Orders of the runs that objects are written to. The largest free one is used.
const RUN_ORDERS: std::ops::RangeInclusive<u8> = 1..=7;
/// Searches for one run. Objects that are found may be freed before they are copied.
const LOOKS_MAX: usize = 64;
/// Entries that one search examines.
const SCAN: usize = 4096;
/// Least payload that is written back for a write that finds no room.
const ROOM_BYTES: u64 = 1 << 20;
/// Room that another thread's turn must have left so that this one needs no turn.
const ENOUGH_BYTES: u64 = 256 << 10;
/// Most turns of [`DeviceMemory::make_room`] for one block, because others may take the room.
pub(crate) const ROOM_TRIES: usize = 32;

impl DeviceMemory {
    /// Keeps room below the limit if there is a file, packs sparse memory, and returns empty memory
    /// to the kernel. For a background thread. Returns the bytes freed.
    pub fn tidy(&self) -> u64 {
        self.ages.advance(&self.store);
        let has_written = self.keep_room();
        let packed_bytes: u64 =
            std::iter::from_fn(|| Some(self.store.tidy()).filter(|bytes| *bytes > 0))
                .take(64)
                .sum();
        has_written + packed_bytes + self.store.trim()
    }

    /// Runs [`DeviceMemory::tidy`] when there is work, and at least once a `period`, until
    /// [`DeviceMemory::stop`].
    pub fn tend(&self, period: Duration) {
        loop {
            self.tidy();
            let call = self.call.lock().expect("nobody panics with the lock");
            let waits = |stop: &mut bool| !*stop && !self.is_called.load(Relaxed);
            let call = self
                .called
                .wait_timeout_while(call, period, waits)
                .expect("nobody panics with the lock")
                .0;
            if *call {
                return;
            }
            self.is_called.store(false, Relaxed);
        }
    }

    /// Writes back until memory is well below its limit.
    fn keep_room(&self) -> u64 {
        let Some(spill) = self.spill() else { return 0 };
        let mut all = 0;
        while self.is_nearly_full() {
            let freed_bytes = write_cold(self, spill, ROOM_BYTES);
            if freed_bytes == 0 {
                break;
            }
            self.store.compact(freed_bytes);
            all += freed_bytes;
        }
        self.set_limit(self.table_bytes());
        all
    }

    /// Makes room for a write that was refused. Returns `false` if there is none. The caller holds
    /// no lock of a block.
    pub(crate) fn make_room(&self) -> bool {
        let Some(spill) = self.spill() else { return false };
        if self.store.pool_bytes() + ENOUGH_BYTES <= self.store.pool_bytes_max() {
            return true;
        }
        let freed_bytes = write_cold(self, spill, ROOM_BYTES);
        self.store.compact(freed_bytes);
        freed_bytes > 0
    }
}

/// Decodes an object of the file into `to`, a block of `order`.
pub(crate) fn load(
    backing: &DeviceMemory,
    decoder: &mut BlockDecoder,
    handle: Handle,
    order: Order,
    to: *mut u8,
) -> Result<(), IoError> {
    let (Some(spill), Some(place)) = (backing.spill(), ObjectLocation::from_handle(handle)) else {
        return Err(IoError::Unread);
    };
    assert!(Page::begins_at(to));
    let outcome = spill.swap.read_packed(place, place, |outcome| {
        let (fields, payload) = outcome.open(place)?;
        // SAFETY: `to` is a block of `order` that only the caller uses. The seal ensures that these
        // are the exported bytes.
        Ok(unsafe { backing.store.import(&mut decoder.worker, fields, payload, order, to) })
    });
    let counters = &spill.counters;
    match outcome {
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

/// Reads the payload of an object in the file, as it was exported: its fields, and its length at
/// the start of `out`.
pub(crate) fn export(
    backing: &DeviceMemory,
    handle: Handle,
    out: &mut [u8],
) -> Result<(u32, usize), IoError> {
    let (Some(spill), Some(place)) = (backing.spill(), ObjectLocation::from_handle(handle)) else {
        return Err(IoError::Unread);
    };
    let payload_place = spill.swap.read_packed(place, place, |object| {
        let (fields, payload) = object.open(place)?;
        out[..payload.len()].copy_from_slice(payload);
        Ok((fields, payload.len()))
    });
    payload_place.map_err(|error| {
        spill.note(error);
        spill.counters.failed_reads.fetch_add(1, Relaxed);
        IoError::Unread
    })
}

/// Writes back the objects that were unused for longest, until at least `bytes` of payload are
/// freed, or no object is left. Returns the payload bytes freed.
pub(crate) fn write_cold(backing: &DeviceMemory, spill: &SpillFile, bytes: u64) -> u64 {
    let mut writer = spill.writer.lock();
    (writer.used, writer.count) = (0, 0);
    let mut freed_bytes = 0;
    while freed_bytes < bytes {
        let outcome = write_run(backing, spill, &mut writer, |slots| look_for_cold(backing, slots));
        if outcome == 0 {
            break;
        }
        freed_bytes += outcome;
    }
    freed_bytes
}

/// Writes these objects back. Returns the payload bytes freed.
pub(crate) fn write_these(backing: &DeviceMemory, spill: &SpillFile, these: &[ColdObject]) -> u64 {
    let mut writer = spill.writer.lock();
    (writer.used, writer.count) = (0, 0);
    let (mut rest, mut freed_bytes) = (these, 0);
    loop {
        let count_left = rest.len() + writer.count - writer.used;
        let outcome = write_run(backing, spill, &mut writer, |slots| {
            let count = rest.len().min(slots.len());
            let (now, later) = rest.split_at(count);
            slots[..count].copy_from_slice(now);
            rest = later;
            count
        });
        freed_bytes += outcome;
        // Nothing could be written, or nothing is left.
        if rest.is_empty() && writer.used == writer.count
            || rest.len() + writer.count - writer.used == count_left
        {
            return freed_bytes;
        }
    }
}

fn look_for_cold(backing: &DeviceMemory, found: &mut [ColdObject]) -> usize {
    // Two turns, because an object that was used since the last turn gets a second chance.
    for _ in 0..2 * (backing.store.stats().objects as usize / SCAN + 2) {
        let count = backing.store.coldest(SCAN, found);
        if count > 0 {
            return count;
        }
    }
    0
}

/// Fills one run with as many objects as fit, first from the rest of the last search, then from
/// further searches.
fn write_run(
    backing: &DeviceMemory,
    spill: &SpillFile,
    writer: &mut SpillWriter,
    mut look: impl FnMut(&mut [ColdObject]) -> usize,
) -> u64 {
    let swap = &spill.swap;
    if !swap.accepts_writes() || spill.limit_left() == Some(0) {
        return 0;
    }
    let Some(buffer) = swap.take_write_buffer(false) else { return 0 };
    let orders =
        RUN_ORDERS.rev().filter_map(Order::new).filter(|order| *order <= swap.run_order_max());
    let Some((order, slot)) =
        orders.filter_map(|order| Some((order, swap.allocate(order)?))).next()
    else {
        spill.note("the file is full");
        swap.note_full();
        swap.give_buffer_back(buffer);
        return 0;
    };
    // SAFETY: the buffer is this thread's.
    let room = unsafe { &mut swap.buffer_mut(buffer)[..order.bytes()] };
    let used_bytes = fill(backing, spill, writer, slot, room, &mut look);
    let pages = used_bytes.div_ceil(PAGE_SIZE);
    if pages < order.pages() {
        swap.release(slot + pages as u64, order.pages() - pages);
    }
    let mut freed_bytes = 0;
    if pages > 0 {
        room[used_bytes..pages * PAGE_SIZE].fill(0);
        let mut writes = [swap.write_from(buffer, slot, pages * PAGE_SIZE)];
        // SAFETY: buffer and run are this thread's.
        unsafe { swap.write(&mut writes) };
        freed_bytes = end_run(spill, writer, writes[0].result);
        swap.release(slot, pages);
    }
    swap.give_buffer_back(buffer);
    freed_bytes
}

/// Copies and seals objects. Returns the room that they take.
fn fill(
    backing: &DeviceMemory,
    spill: &SpillFile,
    writer: &mut SpillWriter,
    slot: u64,
    room: &mut [u8],
    look: &mut impl FnMut(&mut [ColdObject]) -> usize,
) -> usize {
    let (mut used_bytes, mut looks) = (0, 0);
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
        if used_bytes + len > room.len() && used_bytes > 0 {
            break;
        }
        writer.used += 1;
        // A whole turn found only objects that are being written already, so another search would
        // find them again.
        if writer.items.first().is_some_and(|first| first.cold.handle == cold.handle) {
            writer.used = writer.count;
            break;
        }
        let Some(place) = room.get_mut(used_bytes..used_bytes + len) else { continue };
        let Some(device) = backing.device_of(cold.key) else { continue };
        let Some(object) = device.export(&cold, &mut place[HEAD_BYTES..]) else { continue };
        if HEAD_BYTES + object.len > len {
            continue;
        }
        if !spill.spend(cold.order) {
            break;
        }
        let at = ObjectLocation {
            slot: slot + (used_bytes / PAGE_SIZE) as u64,
            offset: used_bytes % PAGE_SIZE,
            len,
            is_raw: false,
        };
        spill.swap.seal_packed(at, object.fields, object.len, place);
        writer.items.push(SpillItem { device, cold, place: at });
        used_bytes += len;
    }
    used_bytes
}

/// Replaces the objects in memory by those that were written.
fn end_run(
    spill: &SpillFile,
    writer: &mut SpillWriter,
    result: Result<(), memfold_os::Errno>,
) -> u64 {
    let mut freed_bytes = 0;
    if let Err(error) = result {
        spill.note(error);
        spill.counters.failed_writes.fetch_add(1, Relaxed);
        spill.swap.note_failure(error);
    }
    for SpillItem { device, cold, place } in writer.items.drain(..).filter(|_| result.is_ok()) {
        let bytes = cold.order.bytes() as u64;
        spill.counters.written_bytes.fetch_add(bytes, Relaxed);
        spill.counters.original_bytes.fetch_add(bytes, Relaxed);
        spill.swap.insert(place);
        if device.replace(&cold, place.handle()) {
            freed_bytes += u64::from(cold.stored_bytes);
        } else {
            spill.free(place.handle(), cold.order);
        }
    }
    freed_bytes
}
