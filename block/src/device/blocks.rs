//! Requests on a part of one block: reads, writes and zeros.
use super::counters::DeviceCounters;
use super::error::IoError;
use super::io::{BlockDecoder, DeviceIo};
use super::state::{BlockPart, Device};
use super::table::{BlockSlots, IN_BLOCK, TableChunk};
use super::units::ZeroPolicy;
use super::writeback;
use memfold_os::page::Page;
use memfold_os::units::{MAX_PAGES, Order, PAGE_SIZE};
use memfold_store::{BlockSet, CodecWorker, Handle};
use std::ops::Range;

impl Device {
    pub(super) fn read_part(
        &self,
        io: &mut DeviceIo,
        part: &BlockPart,
        to: &mut [u8],
    ) -> Result<(), IoError> {
        let Some(chunk) = self.table.chunk(part.block) else {
            to.fill(0);
            return Ok(());
        };
        let slots = self.table.slots(chunk, part.block);
        let _lock = self.lock_of(part.block).read();
        let (start, last) = (part.bytes.start, (part.bytes.end - 1) / PAGE_SIZE);
        let mut page = start / PAGE_SIZE;
        while page <= last {
            let handle = slots.page(page);
            let mut after = page + 1;
            while handle == IN_BLOCK && after <= last && slots.page(after) == IN_BLOCK {
                after += 1;
            }
            let bytes = start.max(page * PAGE_SIZE)..part.bytes.end.min(after * PAGE_SIZE);
            let to = &mut to[bytes.start - start..bytes.end - start];
            if handle.is_none() || handle.is_zero() {
                to.fill(0);
            } else {
                self.read_run(io, &slots, page..after, &bytes, to)?;
            }
            page = after;
        }
        Ok(())
    }

    /// Reads `bytes` of a block. They lie in `pages`, which are pages of the block's object, or one
    /// page with its own object.
    fn read_run(
        &self,
        io: &mut DeviceIo,
        slots: &BlockSlots,
        pages: Range<usize>,
        bytes: &Range<usize>,
        to: &mut [u8],
    ) -> Result<(), IoError> {
        let all = pages.start * PAGE_SIZE..pages.end * PAGE_SIZE;
        if Page::begins_at(to.as_ptr()) && *bytes == all {
            return self.load(&mut io.decoder, slots, pages, to);
        }
        let buffer = &mut io.block.bytes_mut()[..all.len()];
        self.load(&mut io.decoder, slots, pages, buffer)?;
        to.copy_from_slice(&buffer[bytes.start - all.start..][..bytes.len()]);
        Ok(())
    }

    /// Loads `pages` to page-aligned memory, from the block's object or from one page's own. The
    /// caller holds the block's lock.
    fn load(
        &self,
        decoder: &mut BlockDecoder,
        slots: &BlockSlots,
        pages: Range<usize>,
        to: &mut [u8],
    ) -> Result<(), IoError> {
        assert!(Page::begins_at(to.as_ptr()) && to.len() == pages.len() * PAGE_SIZE);
        let (store, handle) = (&self.backing.store, slots.page(pages.start));
        let whole = pages.len() == self.order.pages();
        if handle == IN_BLOCK {
            DeviceCounters::add(
                if whole { &self.counters.block_reads } else { &self.counters.partial_reads },
                1,
            );
        } else {
            DeviceCounters::add(&self.counters.page_reads, 1);
        }
        let object = if handle == IN_BLOCK { slots.block() } else { handle };
        if object.as_foreign().is_some() {
            return self.load_spilled(decoder, object, handle == IN_BLOCK, pages, to);
        }
        let worker = &mut decoder.worker;
        let outcome = if handle == IN_BLOCK {
            // SAFETY: `to` is as many whole page-aligned pages, which only this thread uses.
            // Handles of this block are freed only with its lock held for writing, and no other
            // thread holds it.
            unsafe {
                store.load_pages(
                    worker,
                    slots.block(),
                    self.order,
                    pages.start,
                    pages.len(),
                    to.as_mut_ptr(),
                )
            }
            .map(drop)
        } else {
            assert!(pages.len() == 1);
            // SAFETY: `to` is one whole page-aligned page, which only this thread uses. The block's
            // lock keeps the handle.
            unsafe { store.load(worker, handle, Order::PAGE, to.as_mut_ptr()) }
        };
        outcome.map_err(IoError::Damaged)
    }

    /// Loads `pages` of a block's object in the file, or of the one page's own object.
    fn load_spilled(
        &self,
        decoder: &mut BlockDecoder,
        object: Handle,
        is_block: bool,
        pages: Range<usize>,
        to: &mut [u8],
    ) -> Result<(), IoError> {
        let order = if is_block { self.order } else { Order::PAGE };
        if to.len() == order.bytes() {
            return writeback::load(&self.backing, decoder, object, order, to.as_mut_ptr());
        }
        let whole = decoder.whole.as_mut_ptr();
        writeback::load(&self.backing, decoder, object, order, whole)?;
        to.copy_from_slice(&decoder.whole.bytes()[pages.start * PAGE_SIZE..pages.end * PAGE_SIZE]);
        Ok(())
    }

    /// Stores a block or page. The caller puts the handle in a slot, or frees it.
    fn save(
        &self,
        worker: &mut CodecWorker,
        from: &[u8],
        order: Order,
        key: u64,
    ) -> Result<Handle, IoError> {
        assert!(Page::begins_at(from.as_ptr()) && from.len() == order.bytes());
        let mut handle = [Handle::NONE];
        // SAFETY: `from` has `order.bytes()` bytes, is page-aligned, and is borrowed, so no thread
        // writes to it.
        unsafe {
            self.backing.store.save(
                worker,
                from.as_ptr(),
                order,
                key,
                &BlockSet::first(1),
                || false,
                &mut handle,
            )?;
        }
        Ok(handle[0])
    }

    pub(super) fn write_part(
        &self,
        io: &mut DeviceIo,
        part: &BlockPart,
        from: &[u8],
    ) -> Result<(), IoError> {
        let chunk = self.chunk_or_new(part.block)?;
        if self.order > Order::PAGE && part.bytes.len() == self.order.bytes() {
            return self.write_block(io, chunk, part.block, from);
        }
        let slots = self.table.slots(chunk, part.block);
        for (page, bytes) in Self::each_page(&part.bytes) {
            let at = page * PAGE_SIZE + bytes.start - part.bytes.start;
            let from = &from[at..][..bytes.len()];
            if self.is_whole(part.block, page, &bytes) {
                self.write_page(io, &slots, part.block, page, from)?;
            } else {
                self.change_page(io, &slots, part.block, page, bytes, Some(from))?;
            }
        }
        Ok(())
    }

    fn write_block(
        &self,
        io: &mut DeviceIo,
        chunk: &TableChunk,
        block: u64,
        from: &[u8],
    ) -> Result<(), IoError> {
        let from = if Page::begins_at(from.as_ptr()) {
            from
        } else {
            io.block.bytes_mut().copy_from_slice(from);
            io.block.bytes_mut()
        };
        let new = self.save(&mut io.decoder.worker, from, self.order, self.page_key(block, 0))?;
        DeviceCounters::add(&self.counters.block_writes, 1);
        let _lock = self.lock_of(block).write();
        let in_slots = if new.is_zero() { Handle::ZERO } else { IN_BLOCK };
        let of_block = if new.is_zero() { Handle::NONE } else { new };
        self.set_block(&self.table.slots(chunk, block), in_slots, of_block);
        Ok(())
    }

    fn write_page(
        &self,
        io: &mut DeviceIo,
        slots: &BlockSlots,
        block: u64,
        page: usize,
        from: &[u8],
    ) -> Result<(), IoError> {
        let from = if Page::begins_at(from.as_ptr()) && from.len() == PAGE_SIZE {
            from
        } else {
            let to = io.page.bytes_mut();
            to[..from.len()].copy_from_slice(from);
            to[from.len()..].fill(0);
            to
        };
        let new =
            self.save(&mut io.decoder.worker, from, Order::PAGE, self.page_key(block, page))?;
        DeviceCounters::add(&self.counters.page_writes, 1);
        let _lock = self.lock_of(block).write();
        self.set_page(slots, page, new);
        self.cut(io, slots, block);
        Ok(())
    }

    /// Reads a page, puts `from` at `bytes` of it (zeros for `None`), and stores it again.
    fn change_page(
        &self,
        io: &mut DeviceIo,
        slots: &BlockSlots,
        block: u64,
        page: usize,
        bytes: Range<usize>,
        from: Option<&[u8]>,
    ) -> Result<(), IoError> {
        let _lock = self.lock_of(block).write();
        let handle = slots.page(page);
        if handle.is_none() || handle.is_zero() {
            io.page.bytes_mut().fill(0);
        } else {
            self.load(&mut io.decoder, slots, page..page + 1, io.page.bytes_mut())?;
        }
        match from {
            Some(from) => io.page.bytes_mut()[bytes].copy_from_slice(from),
            None => io.page.bytes_mut()[bytes].fill(0),
        }
        // Zeros are never refused, because they free memory. Saves of other threads at this moment
        // are not refused either.
        let _room = from.is_none().then(|| self.backing.store.past_limit());
        let new = self.save(
            &mut io.decoder.worker,
            io.page.bytes_mut(),
            Order::PAGE,
            self.page_key(block, page),
        )?;
        DeviceCounters::add(&self.counters.partial_writes, 1);
        self.set_page(slots, page, new);
        self.cut(io, slots, block);
        Ok(())
    }

    pub(super) fn zero_part(
        &self,
        io: &mut DeviceIo,
        slots: &BlockSlots,
        part: &BlockPart,
        zeros: ZeroPolicy,
    ) -> Result<(), IoError> {
        if part.bytes.len() == self.order.bytes() {
            let _lock = self.lock_of(part.block).write();
            self.set_block(slots, zeros.slot(), Handle::NONE);
            return Ok(());
        }
        for (page, bytes) in Self::each_page(&part.bytes) {
            if self.is_whole(part.block, page, &bytes) {
                let _lock = self.lock_of(part.block).write();
                self.set_page(slots, page, zeros.slot());
            } else if self.is_data(slots, part.block, page) {
                self.change_page(io, slots, part.block, page, bytes, None)?;
            } else if zeros == ZeroPolicy::Written {
                let _lock = self.lock_of(part.block).write();
                if slots.page(page).is_none() {
                    self.set_page(slots, page, Handle::ZERO);
                }
            }
        }
        Ok(())
    }

    fn is_data(&self, slots: &BlockSlots, block: u64, page: usize) -> bool {
        let _lock = self.lock_of(block).read();
        let handle = slots.page(page);
        !handle.is_none() && !handle.is_zero()
    }

    /// Sets all slots of a block, and frees their old objects. The caller holds the lock.
    fn set_block(&self, slots: &BlockSlots, in_slots: Handle, of_block: Handle) {
        for page in 0..self.order.pages() {
            let old = slots.replace_page(page, in_slots);
            if old != IN_BLOCK {
                self.backing.free(old, Order::PAGE);
            }
        }
        self.backing.free(slots.replace_block(of_block), self.order);
        slots.set_changed();
    }

    /// Puts an object of one page, `NONE` or `ZERO` in a page's slot. The block's object is freed
    /// with its last page. Until then its memory stays, which is counted (M4, M5). The caller holds
    /// the lock.
    fn set_page(&self, slots: &BlockSlots, page: usize, new: Handle) {
        let old = slots.replace_page(page, new);
        if old != IN_BLOCK {
            self.backing.free(old, Order::PAGE);
        } else if slots.in_block() == 0 {
            self.backing.free(slots.replace_block(Handle::NONE), self.order);
        } else {
            DeviceCounters::add(&self.counters.deferred_frees, 1);
        }
        slots.set_changed();
    }

    /// Stores the rest of a block's object as pages when at most half of its pages are left,
    /// because they could take twice the memory otherwise. On failure nothing changes. The caller
    /// holds the lock.
    fn cut(&self, io: &mut DeviceIo, slots: &BlockSlots, block: u64) {
        let rest = slots.in_block();
        if rest == 0 || rest > self.order.pages() / 2 {
            return;
        }
        let mut pages = [Handle::NONE; MAX_PAGES];
        let rest = || (0..self.order.pages()).filter(|page| slots.page(*page) == IN_BLOCK);
        for page in rest() {
            let outcome = self.load(&mut io.decoder, slots, page..page + 1, io.page.bytes_mut());
            let outcome = outcome.is_ok().then(|| {
                self.save(
                    &mut io.decoder.worker,
                    io.page.bytes_mut(),
                    Order::PAGE,
                    self.page_key(block, page),
                )
                .ok()
            });
            match outcome.flatten() {
                Some(handle) => pages[page] = handle,
                None => {
                    return pages[..page]
                        .iter()
                        .for_each(|page| self.backing.free(*page, Order::PAGE));
                }
            }
        }
        for page in (0..self.order.pages()).filter(|page| !pages[*page].is_none()) {
            slots.replace_page(page, pages[page]);
        }
        self.backing.free(slots.replace_block(Handle::NONE), self.order);
        DeviceCounters::add(&self.counters.blocks_cut, 1);
    }
}
