//! Writeback: folded data that memory and pool can't keep goes to the swap file.
//!
//! - A folio that the store refuses (it doesn't compress, or the pool is full) is written **raw**.
//!   It is sealed into a buffer, whole, and written to one run of slots in one write. Meanwhile it
//!   is `Cached` with a ticket in `Folio::writing`, on no list, and its frame is authoritative. A
//!   touch maps it back at once and ends the ticket. The result of the write is then ignored.
//! - When the pool holds more than its share of the limit, the blocks of the coldest `Stored`
//!   folios are **packed**. They are copied as they are stored, sealed, and written many at a time.
//!   Meanwhile the pool's copy is authoritative, and loads, splits and merges continue. After the
//!   write, each block is looked up again. If its handle and hash are those that were copied, and
//!   its folio still is `Stored`, the block gets the handle of the file. Only then is the pool's
//!   copy freed.
//!
//! So the data is in one authoritative place at any time, and a write that fails changes nothing.
//!
//! The writer takes shard locks only. A thread that waits for it may hold `areas` for reading and a
//! context, but no shard.
use crate::backing::contexts::CodecContext;
use crate::backing::{Backing, BlockSlot, end_damaged};
use crate::config::Config;
use crate::folio::FolioState;
use crate::folio::index::{FolioId, ShardGuard};
use crate::folio::lru::LruList;
use crate::folio::table::FolioTable;
use crate::memory::budget::Budget;
use crate::parts::{EngineParts, bytes};
use crate::requests::background::RequestQueue;
use crate::requests::pause::ForkPauses;
use crate::residency::Residency;
use crate::stats_place::StatsPlace;
use alloc::vec::Vec;
use core::cell::Cell;
use memfold_os::Errno;
use memfold_os::sync::atomic::Ordering::Relaxed;
use memfold_os::transfer::Transfer;
use memfold_os::units::{Order, PAGE_SIZE};
use memfold_stats as stats;
use memfold_store::LoadError;
use memfold_swap::location::{ObjectLocation, UNIT_BYTES};
use memfold_swap::write_queue::RawWrite;
use memfold_swap::{HEAD_BYTES, Swap};

/// The pool may hold one part in this many of the limit. Above it, its coldest blocks go to the
/// file.
const POOL_SHARE: u64 = 2;
/// Packing ends when the pool holds this much less than its share: one part in so many.
const HYSTERESIS: u64 = 8;
/// Orders of the runs that packed blocks are written to. The largest free one is taken.
const PACK_ORDERS: core::ops::RangeInclusive<u8> = 1..=7;
/// Runs that one round writes at once.
const PACK_RUNS: usize = 2;
/// Folios scanned for one run.
const PACK_TRIES: usize = 4096;
/// The pool is compacted after packing has freed so many bytes of it.
const COMPACT_BYTES: u64 = 1 << 20;

/// A folio that this thread is saving, and that the store has refused.
pub(crate) struct RefusedFolio {
    pub id: FolioId,
    pub key: u64,
    pub order: Order,
    /// Address of its frame.
    pub frame: *const u8,
}

/// The result for a refused folio.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum WriteOutcome {
    /// It is being written, or its pieces are queued.
    Leaving,
    /// A thread wants it, or it can't be written: the caller maps it back. It still is `Saving`.
    Stays,
}

/// One packed object that is being written.
struct PackedItem {
    /// First page of the block.
    key: u64,
    /// Its copy in the pool.
    slot: BlockSlot,
    order: Order,
    place: ObjectLocation,
    fields: u32,
    len: usize,
}

/// One run of packed objects that is being written.
pub(crate) struct PackedRun {
    pub buffer: usize,
    pub slot: u64,
    pub pages: usize,
    items: Vec<PackedItem>,
}

/// A folio of which only a part fitted into a run.
pub(crate) struct UnpackedFolio {
    id: FolioId,
    key: u64,
    why: LeftReason,
}

/// Why a block did not fit.
#[derive(Copy, Clone, PartialEq, Eq)]
enum LeftReason {
    /// The run is full: the next one begins with the remaining blocks.
    Full,
    /// No free run is as long as one of its blocks: it is tried again after all others.
    TooLong,
}

/// Writes to the swap file what memory and pool can't keep.
#[derive(Copy, Clone)]
pub struct Writeback<'a> {
    config: &'a Config,
    stats: &'a StatsPlace,
    table: &'a FolioTable,
    backing: &'a Backing,
    budget: &'a Budget,
    requests: &'a RequestQueue,
    pauses: &'a ForkPauses,
    engine: &'a EngineParts,
}

impl<'a> Writeback<'a> {
    /// Returns the walk over the parts of an engine.
    #[inline]
    pub(crate) fn new(engine: &'a EngineParts) -> Writeback<'a> {
        Writeback {
            config: &engine.config,
            stats: &engine.stats,
            table: &engine.table,
            backing: &engine.backing,
            budget: &engine.budget,
            requests: &engine.requests,
            pauses: &engine.pauses,
            engine,
        }
    }

    /// Returns the pool's share, bytes. Above it, the coldest blocks go to the swap file.
    fn pool_share(&self) -> u64 {
        let limit = self.config.limit_bytes.unwrap_or(u64::MAX);
        let share = limit.saturating_sub(self.budget.quota().outside_bytes()) / POOL_SHARE;
        // Below the store's own maximum, because what the store refuses is written uncompressed.
        match self.backing.store().pool_bytes_max() {
            0 => share,
            most => share.min(most - most / HYSTERESIS),
        }
    }

    // Raw folios.

    /// Writes a folio that the store has refused to the swap file. `context.fingerprints` has those
    /// of its blocks.
    pub(crate) fn write_out(&self, context: &CodecContext, refused: &RefusedFolio) -> WriteOutcome {
        let Some(swap) = self.backing.swap().filter(|swap| swap.accepts_writes()) else {
            return WriteOutcome::Stays;
        };
        let &RefusedFolio { id, key, order, frame } = refused;
        let slot = if order <= swap.run_order_max() { swap.allocate(order) } else { None };
        let Some(slot) = slot else { return self.halve(id, key, order) };
        let buffer = swap.take_write_buffer(true).expect("it waits");
        // SAFETY: the buffer is this thread's. The frame holds the folio's bytes; it stays full and
        // unmoved, because the folio is `Saving`.
        unsafe {
            let bytes = &mut swap.buffer_mut(buffer)[..order.bytes()];
            core::ptr::copy_nonoverlapping(frame, bytes.as_mut_ptr(), order.bytes());
            swap.seal_raw(slot, bytes, self.table.block_order(order));
        }
        let guard = self.table.lock(key);
        let folio = self.table.get(&guard, id);
        if folio.wanted.load(Relaxed) {
            swap.release(slot, order.pages());
            swap.give_buffer_back(buffer);
            return WriteOutcome::Stays;
        }
        self.table.drop_copy(&guard, id, self.backing);
        for (slot, &fingerprint) in self.table.slots(folio).iter().zip(&context.fingerprints) {
            slot.set(BlockSlot { fingerprint, ..slot.get() });
        }
        let ticket = swap.queue().next_ticket();
        folio.writing.set(ticket);
        folio.state.set(FolioState::Cached);
        self.table.notify(&guard);
        drop(guard);
        if !swap.queue().submit(RawWrite { id, key, order, ticket, buffer, slot }) {
            self.write_pending(false);
        }
        WriteOutcome::Leaving
    }

    /// Splits a folio for which no run of its order is free. The halves are tried later (S3).
    fn halve(&self, id: FolioId, key: u64, order: Order) -> WriteOutcome {
        if let Some(swap) = self.backing.swap()
            && (order == Order::PAGE || order <= swap.run_order_max() && !swap.has_room())
        {
            swap.note_full();
            return WriteOutcome::Stays;
        }
        let mut guard = self.table.lock(key);
        let folio = self.table.get(&guard, id);
        if folio.wanted.load(Relaxed) {
            return WriteOutcome::Stays;
        }
        stats::add(&self.stats.swpout_fallback[order.get() as usize], 1);
        folio.state.set(FolioState::Cached);
        self.table.drop_copy(&guard, id, self.backing);
        self.table.split(&mut guard, id, self.backing);
        self.table.list_by_state(&guard, id);
        self.table.notify(&guard);
        self.requests.reclaim();
        WriteOutcome::Leaving
    }

    /// Ends a raw write: the folio becomes `Stored` if it was not touched meanwhile.
    fn end_raw(&self, swap: &Swap, write: &RawWrite, result: Result<(), Errno>) {
        let &RawWrite { id, key, order, ticket, buffer, slot } = write;
        swap.give_buffer_back(buffer);
        if let Err(errno) = result {
            stats::add(&self.stats.swap_write_failed, 1);
            swap.note_failure(errno);
        }
        let guard = self.table.lock(key);
        if self.table.find(&guard, key) == Some(id) {
            let folio = self.table.get(&guard, id);
            if folio.key() == key && folio.writing.get() == ticket {
                folio.writing.set(0);
                if result.is_ok() {
                    self.note_written(swap, &guard, id, slot);
                    Residency::new(self.engine).release_frame(&guard, id);
                } else {
                    folio.active.set(true);
                    self.table.list_by_state(&guard, id);
                }
            }
        }
        drop(guard);
        swap.release(slot, order.pages());
    }

    /// Records the slots of a folio's blocks, which were written whole to the run at `slot`.
    fn note_written(&self, swap: &Swap, guard: &ShardGuard<'_>, id: FolioId, slot: u64) {
        let folio = self.table.get(guard, id);
        debug_assert!(folio.state.get() == FolioState::Cached && !folio.has_copy.get());
        let block = self.table.block_order(folio.order());
        for (i, to) in self.table.slots(folio).iter().enumerate() {
            let place = ObjectLocation {
                slot: slot + (i * block.pages()) as u64,
                offset: 0,
                len: block.bytes(),
                is_raw: true,
            };
            swap.insert(place);
            to.set(BlockSlot { handle: place.handle(), ..to.get() });
        }
        folio.has_copy.set(true);
        self.table.tally().copy(folio.pages());
        stats::add(&self.stats.swpout_folio[folio.order().get() as usize], 1);
        stats::add(&self.stats.pswpout, folio.pages());
    }

    // Packed blocks.

    /// Asks for writeback if the pool holds more than its share, and waits for it if the pool holds
    /// far more.
    pub(crate) fn relieve_pool(&self) {
        let Some(swap) = self.backing.swap() else { return };
        let share = self.pool_share();
        loop {
            let pool_bytes = self.backing.store().pool_bytes();
            if pool_bytes <= share || !swap.accepts_writes() {
                return;
            }
            let is_far = pool_bytes > share + share / HYSTERESIS;
            if !swap.queue().request_shrink(is_far) {
                self.write_pending(false);
            }
            if !is_far || self.backing.store().pool_bytes() >= pool_bytes {
                return;
            }
        }
    }

    /// Copies, seals and writes the coldest blocks of the pool, one round. Returns the pool bytes
    /// that became free, as payload.
    pub(crate) fn pack_round(&self, swap: &Swap) -> u64 {
        let mut runs: Vec<PackedRun> = Vec::new();
        let mut rest = Vec::new();
        while runs.len() < PACK_RUNS
            && let Some(run) = self.pack_run(swap, &mut rest)
        {
            runs.push(run);
        }
        let writes = runs.iter().map(|run| swap.write_from(run.buffer, run.slot, bytes(run.pages)));
        let mut writes: Vec<Transfer> = writes.collect();
        // SAFETY: buffers and runs belong to this thread.
        unsafe { swap.write(&mut writes) };
        let freed_bytes = runs
            .iter()
            .zip(&writes)
            .map(|(run, write)| self.end_packed(swap, run, write.result))
            .sum();
        // Listed only now, so that no block is copied twice.
        self.list_left(&rest);
        freed_bytes
    }

    /// Lists the folios again of which a round did not pack all.
    fn list_left(&self, left: &[UnpackedFolio]) {
        for &UnpackedFolio { id, key, why } in left {
            let guard = self.table.lock(key);
            if self.table.find(&guard, key) == Some(id)
                && self.table.get(&guard, id).state.get() == FolioState::Stored
            {
                let folio = self.table.get(&guard, id);
                match why {
                    LeftReason::Full => self.table.lists().push_tail(
                        id,
                        folio.key(),
                        folio.order().get(),
                        LruList::Folded,
                    ),
                    LeftReason::TooLong => self.table.lists().push(
                        id,
                        folio.key(),
                        folio.order().get(),
                        LruList::Folded,
                    ),
                }
            }
        }
    }

    /// Fills one buffer with packed objects. Returns `None` without a buffer, slots, or folios.
    pub(crate) fn pack_run(&self, swap: &Swap, left: &mut Vec<UnpackedFolio>) -> Option<PackedRun> {
        let buffer = swap.take_write_buffer(false)?;
        let orders =
            PACK_ORDERS.rev().filter_map(Order::new).filter(|o| *o <= swap.run_order_max());
        let Some((order, slot)) =
            orders.filter_map(|o| swap.allocate(o).map(|slot| (o, slot))).next()
        else {
            swap.note_full();
            swap.give_buffer_back(buffer);
            return None;
        };
        // SAFETY: the buffer is this thread's.
        let room = unsafe { &mut swap.buffer_mut(buffer)[..order.bytes()] };
        let items = self.pack_items(slot, room, left);
        if items.is_empty() {
            swap.release(slot, order.pages());
            swap.give_buffer_back(buffer);
            return None;
        }
        for item in &items {
            let start = (item.place.start() - slot * PAGE_SIZE as u64) as usize;
            swap.seal_packed(
                item.place,
                item.fields,
                item.len,
                &mut room[start..start + item.place.len],
            );
        }
        // The rest of the run is written too. It must not hold data of another thread.
        let used_bytes =
            items.last().map_or(0, |item| (item.place.end() - slot * PAGE_SIZE as u64) as usize);
        let pages = used_bytes.div_ceil(PAGE_SIZE);
        room[used_bytes..bytes(pages)].fill(0);
        if pages < order.pages() {
            swap.release(slot + pages as u64, order.pages() - pages);
        }
        Some(PackedRun { buffer, slot, pages, items })
    }

    /// Copies the payloads of the coldest folios to `room`, which goes to the run at `slot`. Folios
    /// of which not all blocks fitted are added to `left`.
    fn pack_items(
        &self,
        slot: u64,
        room: &mut [u8],
        left: &mut Vec<UnpackedFolio>,
    ) -> Vec<PackedItem> {
        let mut items = Vec::new();
        let mut used_bytes = 0;
        for _ in 0..PACK_TRIES {
            let Some((id, key)) = self.table.lists().isolate(LruList::Folded) else { break };
            let guard = self.table.lock(key);
            let is_still =
                self.table.find(&guard, key) == Some(id) && self.table.get(&guard, id).key() == key;
            if !is_still {
                continue;
            }
            let folio = self.table.get(&guard, id);
            self.table.lists().detach(id);
            if folio.state.get() != FolioState::Stored {
                self.table.list_by_state(&guard, id);
                continue;
            }
            if let Err(why) = self.pack_folio(&guard, id, slot, room, &mut used_bytes, &mut items) {
                left.push(UnpackedFolio { id, key, why });
                if why == LeftReason::Full {
                    break;
                }
            }
        }
        items
    }

    /// Copies the payloads of one folio, or of as many of its blocks as fit.
    fn pack_folio(
        &self,
        guard: &ShardGuard<'_>,
        id: FolioId,
        run: u64,
        room: &mut [u8],
        used: &mut usize,
        items: &mut Vec<PackedItem>,
    ) -> Result<(), LeftReason> {
        let folio = self.table.get(guard, id);
        let (key, order) = (folio.key(), self.table.block_order(folio.order()));
        let mut outcome = Ok(());
        for (i, slot) in self.table.slots(folio).iter().map(Cell::get).enumerate() {
            let Some(payload) = self.backing.store().payload(slot.handle) else { continue };
            let len = (HEAD_BYTES + payload.len).next_multiple_of(UNIT_BYTES);
            if *used + len > room.len() {
                if *used > 0 {
                    return Err(LeftReason::Full);
                }
                outcome = Err(LeftReason::TooLong);
                continue;
            }
            let to = &mut room[*used + HEAD_BYTES..*used + len];
            let exported =
                self.backing.store().export(slot.handle, to).unwrap_or_else(|problem| {
                    end_damaged(&LoadError { handle: slot.handle, problem })
                });
            let place = ObjectLocation {
                slot: run + (*used / PAGE_SIZE) as u64,
                offset: *used % PAGE_SIZE,
                len,
                is_raw: false,
            };
            let key = key + (i * order.pages()) as u64;
            items.push(PackedItem {
                key,
                slot,
                order,
                place,
                fields: exported.fields,
                len: exported.len,
            });
            *used += len;
        }
        outcome
    }

    /// Ends the write of a run: unchanged blocks are in the file from now on.
    pub(crate) fn end_packed(
        &self,
        swap: &Swap,
        run: &PackedRun,
        result: Result<(), Errno>,
    ) -> u64 {
        swap.give_buffer_back(run.buffer);
        if let Err(errno) = result {
            stats::add(&self.stats.swap_write_failed, 1);
            swap.note_failure(errno);
        }
        let mut freed_pages = 0;
        for item in &run.items {
            let guard = self.table.lock(item.key);
            let Some(id) = self.table.find(&guard, item.key) else { continue };
            let folio = self.table.get(&guard, id);
            if folio.state.get() != FolioState::Stored {
                continue;
            }
            if result.is_err() {
                self.table.lists().push(id, folio.key(), folio.order().get(), LruList::Folded);
                continue;
            }
            let number = (item.key - folio.key()) as usize / item.order.pages();
            let is_block = self.table.block_order(folio.order()) == item.order;
            let Some(slot) =
                self.table.slots(folio).get(number).filter(|s| is_block && s.get() == item.slot)
            else {
                continue;
            };
            swap.insert(item.place);
            slot.set(BlockSlot { handle: item.place.handle(), ..item.slot });
            self.backing.store().free(item.slot.handle);
            freed_pages += item.len as u64;
            let pages = item.order.pages() as u64;
            stats::add(&self.stats.zswpwb, pages);
            stats::add(&self.stats.pswpout, pages);
            stats::add(&self.stats.swpout_folio[item.order.get() as usize], 1);
        }
        swap.release(run.slot, run.pages);
        freed_pages
    }

    // The writer.

    /// Runs one round of the writer: writes queued folios, shrinks the pool, discards. With `wait`,
    /// sleeps until there is work. Returns `false` if there was none, or after
    /// [`crate::pager::Pager::stop`].
    pub fn write_pending(&self, wait: bool) -> bool {
        let Some(swap) = self.backing.swap() else { return false };
        if wait {
            swap.queue().wait_for_work();
        }
        // Before any work is taken, so that a fork copies no work that is half done.
        let _open = self.pauses.writing();
        let work = swap.queue().take_work();
        let raw: Vec<RawWrite> = work.raw.iter().flatten().copied().collect();
        if !raw.is_empty() {
            let mut writes: Vec<Transfer> =
                raw.iter().map(|w| swap.write_from(w.buffer, w.slot, w.order.bytes())).collect();
            // SAFETY: the submitters have handed buffers and runs over.
            unsafe { swap.write(&mut writes) };
            raw.iter()
                .zip(&writes)
                .for_each(|(write, done)| self.end_raw(swap, write, done.result));
        }
        let packed = if work.shrink_pool { self.shrink_pool(swap) } else { 0 };
        if work.discard {
            swap.discard();
        }
        swap.queue().finish_round(raw.len());
        !work.stop && (wait || !raw.is_empty() || packed > 0)
    }

    /// Runs some rounds of packing. Asks for more while the pool holds too much and rounds free
    /// memory.
    fn shrink_pool(&self, swap: &Swap) -> u64 {
        let share = self.pool_share();
        let low = share - share / HYSTERESIS;
        let mut freed_pages = 0;
        while freed_pages < COMPACT_BYTES
            && self.backing.store().pool_bytes() > low
            && swap.accepts_writes()
        {
            match self.pack_round(swap) {
                0 => break,
                round => freed_pages += round,
            }
        }
        let above = self.backing.store().pool_bytes().saturating_sub(low);
        if above > 0 && freed_pages > 0 {
            // Freed objects lie between live ones.
            self.backing.store().compact(above);
            if self.backing.store().pool_bytes() > low {
                swap.queue().request_shrink(false);
            }
        }
        freed_pages
    }

    /// Runs one round of the thread that moves the cold end of the swap file to the remote store.
    /// With `wait`, sleeps until there is work. Returns `false` if there was none, or after
    /// [`crate::pager::Pager::stop`].
    pub fn move_out(&self, wait: bool) -> bool {
        let Some(swap) = self.backing.swap() else { return false };
        let goes_on = swap.demote(wait);
        self.backing.note_remote();
        goes_on
    }

    /// Sleeps until a write in progress has ended. Returns `false` if there is none.
    pub(crate) fn await_write(&self) -> bool {
        self.backing.swap().is_some_and(|swap| swap.queue().wait_for_write())
    }

    /// Waits until no raw write is in progress.
    pub(crate) fn drain_writes(&self) {
        while self.await_write() {}
    }
}
