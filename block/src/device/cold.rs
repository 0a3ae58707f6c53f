//! Objects picked by a request, to be written back or compressed again (M9).
use super::backing::DeviceMemory;
use super::holder::{RecompressResult, SlotHolder};
use super::state::Device;
use super::table::IN_BLOCK;
use super::writeback;
use memfold_os::units::{Order, PAGE_SIZE};
use memfold_store::{CodecSpec, CodecWorker, ColdObject, ExportedObject, Handle};
use std::time::Duration;

/// Objects that are picked before they are processed.
const TURN: usize = 256;

/// Which objects to pick.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum ObjectPick {
    /// Objects that [`DeviceMemory::mark_idle`] marked.
    Idle,
    /// Objects that did not compress.
    Huge,
    /// Objects that are idle and did not compress.
    HugeIdle,
    /// Objects that a stronger codec could not compress either.
    Incompressible,
    /// Every object.
    All,
}

/// An object as in zram's `block_state`.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct ObjectState {
    /// Byte of the device at which it begins.
    pub offset: u64,
    /// Bytes before compression.
    pub bytes: u64,
    /// Payload bytes; 0 for an object in the file, whose payload is unknown until it is read.
    pub stored_bytes: u64,
    /// Each page is one repeated word.
    pub is_same: bool,
    /// It is in the file.
    pub is_written_back: bool,
    /// It did not compress.
    pub is_huge: bool,
    /// It is marked idle.
    pub is_idle: bool,
    /// A stronger codec was tried on it.
    pub is_tried: bool,
}

impl DeviceMemory {
    /// Marks everything that was not used for `age` as idle. A later use ends that.
    pub fn mark_idle(&self, age: Duration) {
        self.ages.mark_idle(&self.store, age);
    }

    fn picks(&self, pick: ObjectPick, cold: &ColdObject) -> bool {
        let idle = || self.ages.is_idle(&self.store, cold);
        match pick {
            ObjectPick::Idle => idle(),
            ObjectPick::Huge => cold.is_huge,
            ObjectPick::HugeIdle => cold.is_huge && idle(),
            ObjectPick::Incompressible => cold.is_huge && cold.is_tried,
            ObjectPick::All => true,
        }
    }

    /// Calls `each` with batches of picked objects until it returns `false`.
    fn each_turn(&self, pick: ObjectPick, mut each: impl FnMut(&[ColdObject]) -> bool) {
        let mut turn = Vec::with_capacity(TURN);
        let mut goes_on = true;
        self.store.each_object(|cold| {
            if self.picks(pick, cold) {
                turn.push(*cold);
            }
            if turn.len() == TURN {
                goes_on = each(&turn);
                turn.clear();
            }
            goes_on
        });
        if goes_on && !turn.is_empty() {
            each(&turn);
        }
    }

    /// Writes picked objects back to the file. Returns the payload bytes that were freed in memory;
    /// `None` if there is no file.
    pub fn write_back(&self, pick: ObjectPick) -> Option<u64> {
        let spill = self.spill()?;
        let mut all = 0;
        self.each_turn(pick, |turn| {
            let bytes = writeback::write_these(self, spill, turn);
            all += bytes;
            bytes > 0
        });
        self.store.compact(all);
        Some(all)
    }

    /// Compresses picked objects again with another codec, where that makes them smaller. Skips
    /// objects that were tried before, and those with fewer than `bytes_min` bytes.
    pub fn recompress(
        &self,
        pick: ObjectPick,
        codec: CodecSpec,
        bytes_min: u32,
    ) -> RecompressResult {
        let mut worker = self.store.worker_for(codec);
        let mut result = RecompressResult::default();
        self.each_turn(pick, |turn| {
            for cold in
                turn.iter().filter(|c| !c.is_tried && !c.is_same && c.stored_bytes >= bytes_min)
            {
                let Some(device) = self.device_of(cold.key) else { continue };
                device.recompress(&mut worker, cold, &mut result);
            }
            true
        });
        result
    }

    /// Calls `each` with every object of a device from a byte on, in the order of the device, until
    /// it returns `false`.
    pub fn each_object(
        &self,
        device: &Device,
        from: u64,
        mut each: impl FnMut(ObjectState) -> bool,
    ) {
        device.each_handle(from, |offset, order, handle| {
            let cold = self.store.object(handle);
            each(ObjectState {
                offset,
                bytes: order.bytes() as u64,
                stored_bytes: cold.map_or(0, |cold| cold.stored_bytes.into()),
                is_same: cold.is_some_and(|cold| cold.is_same),
                is_written_back: handle.as_foreign().is_some(),
                is_huge: cold.is_some_and(|cold| cold.is_huge),
                is_idle: cold.is_some_and(|cold| self.ages.is_idle(&self.store, &cold)),
                is_tried: cold.is_some_and(|cold| cold.is_tried),
            })
        });
    }

    /// Counts pages in objects that did not compress, and pages in objects of one repeated word a
    /// page.
    pub fn huge_and_same_pages(&self) -> (u64, u64) {
        let (mut huge, mut same_pages) = (0, 0);
        self.store.each_object(|cold| {
            let pages = cold.order.pages() as u64;
            huge += if cold.is_huge { pages } else { 0 };
            same_pages += if cold.is_same { pages } else { 0 };
            true
        });
        (huge, same_pages)
    }
}

impl SlotHolder for Device {
    fn has_key(&self, key: u64) -> bool {
        let pages = self.size.div_ceil(PAGE_SIZE as u64);
        (self.key..self.key + pages).contains(&key)
    }

    fn export(&self, cold: &ColdObject, out: &mut [u8]) -> Option<ExportedObject> {
        let (block, page) = self.spot(cold);
        let _lock = self.lock_of(block).read();
        if !self.holds(block, page, cold) {
            return None;
        }
        self.backing.store.export(cold.handle, out).ok()
    }

    fn replace(&self, cold: &ColdObject, new: Handle) -> bool {
        let (block, page) = self.spot(cold);
        let _lock = self.lock_of(block).write();
        if !self.holds(block, page, cold) {
            return false;
        }
        let slots = self.table.slots(self.table.chunk(block).expect("just seen"), block);
        match page {
            Some(page) => slots.replace_page(page, new),
            None => slots.replace_block(new),
        };
        self.backing.store.free(cold.handle);
        true
    }

    fn recompress(&self, worker: &mut CodecWorker, cold: &ColdObject, done: &mut RecompressResult) {
        let (block, page) = self.spot(cold);
        let store = &self.backing.store;
        let smaller = {
            let _lock = self.lock_of(block).read();
            if !self.holds(block, page, cold) {
                return;
            }
            done.tried += 1;
            // SAFETY: the slot holds the object, and objects in slots are freed only with the
            // block's lock held for writing.
            unsafe { store.recompress(worker, cold.handle, cold.order) }
        };
        // Damage is reported to the reader of the data.
        let Ok(Some(new)) = smaller else { return };
        let len = store.payload_bytes(new);
        if self.replace(cold, new) {
            done.smaller += 1;
            done.gained_bytes += u64::from(cold.stored_bytes).saturating_sub(len);
        } else {
            store.free(new);
        }
    }
}

impl Device {
    /// Returns the block of an object, and the page in it if the object is one page.
    fn spot(&self, cold: &ColdObject) -> (u64, Option<usize>) {
        let page = cold.key - self.key;
        let (block, page) = (page / self.order.pages() as u64, page as usize % self.order.pages());
        (block, (cold.order != self.order || self.order == Order::PAGE).then_some(page))
    }

    /// Returns whether a slot still holds the object with the same bytes. The caller holds the
    /// block's lock.
    fn holds(&self, block: u64, page: Option<usize>, cold: &ColdObject) -> bool {
        let Some(chunk) = self.table.chunk(block) else { return false };
        let slots = self.table.slots(chunk, block);
        let handle = page.map_or_else(|| slots.block(), |page| slots.page(page));
        handle == cold.handle && self.backing.store.is_still(cold)
    }

    /// Counts pages of zeros that were written.
    pub fn zero_pages(&self) -> u64 {
        self.table
            .all()
            .map(|chunk| chunk.pages().filter(|handle| handle.is_zero()).count() as u64)
            .sum()
    }

    /// Calls `each` with offset, order and handle of every object from a byte on, until it returns
    /// `false`.
    fn each_handle(&self, from: u64, mut each: impl FnMut(u64, Order, Handle) -> bool) {
        let is_object =
            |handle: &Handle| !handle.is_none() && !handle.is_zero() && *handle != IN_BLOCK;
        let mut block = from / self.order.bytes() as u64;
        while block < self.size.div_ceil(self.order.bytes() as u64) {
            let Some(chunk) = self.table.chunk(block) else {
                block = self.table.next_chunk(block);
                continue;
            };
            let slots = self.table.slots(chunk, block);
            let start = block * self.order.bytes() as u64;
            let pages = (0..self.order.pages())
                .map(|page| (start + (page * PAGE_SIZE) as u64, Order::PAGE, slots.page(page)));
            let whole = std::iter::once((start, self.order, slots.block()));
            for (offset, order, handle) in
                whole.chain(pages).filter(|(.., handle)| is_object(handle))
            {
                if !each(offset, order, handle) {
                    return;
                }
            }
            block += 1;
        }
    }
}
