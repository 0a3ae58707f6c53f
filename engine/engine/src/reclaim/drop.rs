//! Clean folios are dropped, many at a time.
//!
//! A random read loads one page or block. It is copied home **write-protected**
//! (`fault/load_by_copy.rs`), and its folio is marked `clean`: it equals its stored copy, and each
//! write to it is noticed. The first write faults. The faulting thread clears the mark under the
//! shard lock, and then the protection (`Faults::touch_resident`). So an eviction of clean folios
//! needs no frame, no fingerprint and no move. The oldest clean folios become `Leaving`, each under
//! its shard lock. One `process_madvise` drops the pages of all of them, and they become `Stored`.
//! A thread that touches one of them meanwhile waits for that.
//!
//! # Why no write is lost
//! - **By the program.** The page was missing before it was mapped, and was mapped protected. So no
//!   TLB has an entry that allows a write to it: each write faults. A fault before the folio is
//!   `Leaving` clears the mark, and then the folio isn't dropped. A later fault waits, and writes
//!   to the page that is loaded again.
//! - **By the kernel in a system call.** It takes the same fault, which fails there (EFAULT). In
//!   regions of the library, buffers of system calls are pinned before ([`crate::Region::pin`]). A
//!   pinned page is neither protected nor dropped. In gate delivery buffers are held (`holds.rs`):
//!   pages that the kernel writes to are made writable before, and held pages aren't dropped.
//! - **By a device**, or by a thread of the kernel, through pages that it has pinned for writing.
//!   Pinning for writing is a write fault, which fails like that of a system call. No device can
//!   have pinned the page before it was protected, because it was missing then. A device that
//!   pinned the page for reading keeps the old contents, which is what it asked for.
//! - **Through another process.** A fork shares the page. The process that writes first gets a
//!   copy, and the other's bytes stay. In this process the page stays protected, and dropping it
//!   unmaps it here only. In the child no page is protected, and no folio clean
//!   (`FolioTable::generation`). `ptrace` and `/proc/PID/mem` write as system calls do.
//! - **Discards** by the owner lock the areas for writing, so no folio is `Leaving` then. A discard
//!   that the program makes with `madvise` is unnoticed in regions of the library, where it is not
//!   allowed. Where discards come as events, the engine drops no folio. In gate delivery they are
//!   calls of the program, and end the folio, as mremap ends the protection of the pages that it
//!   moves.
//!
//! # What the kernel refuses
//! A call may drop only some ranges, and returns how far it got. Locked pages are refused for good:
//! they become resident again, and the next eviction moves them out, which is refused and noted. If
//! a page of a larger folio has gone by then, the folio is `Partial`: the remaining pages are here,
//! the others in the store.
use crate::area::Areas;
use crate::folio::index::{FolioId, ShardGuard};
use crate::folio::lru::LruList;
use crate::folio::{FolioState, PARTIAL_MAX};
use crate::holds::LeavingPages;
use crate::limits::Limits;
use crate::parts::bytes;
use crate::policy::{eviction, workingset};
use crate::reclaim::Reclaim;
use crate::reclaim::block_size::BlockSize;
use memfold_os::Errno;
use memfold_os::uffd::drop::{AddressSpan, SPANS_MAX};
use memfold_os::units::{PAGE_SHIFT, PAGE_SIZE};
use memfold_stats as stats;

/// How often a call is repeated that dropped no page, and may succeed later.
const TRIES: usize = 4;

/// Folios that this thread has made `Leaving`.
pub(crate) struct DropBatch {
    folios: [(FolioId, u64); SPANS_MAX],
    spans: [AddressSpan; SPANS_MAX],
    count: usize,
    pages: u64,
}

impl DropBatch {
    pub const fn new() -> DropBatch {
        let none = AddressSpan { start: 0, len: 0 };
        DropBatch { folios: [(0, 0); SPANS_MAX], spans: [none; SPANS_MAX], count: 0, pages: 0 }
    }

    /// Returns the number of its folios.
    pub fn count(&self) -> usize {
        self.count
    }

    fn push(&mut self, id: FolioId, key: u64, span: AddressSpan, pages: u64) {
        self.folios[self.count] = (id, key);
        self.spans[self.count] = span;
        self.count += 1;
        self.pages += pages;
    }
}

impl Reclaim<'_> {
    /// Returns whether a batch takes no more folios.
    pub(crate) fn is_full(&self, batch: &DropBatch) -> bool {
        batch.count == SPANS_MAX || batch.pages >= self.batch_pages()
    }

    /// Returns how many pages are dropped together.
    pub(crate) fn batch_pages(&self) -> u64 {
        eviction::batch_pages(Limits::new(self.engine).target())
    }

    /// Takes an isolated folio, in memory and not pinned, into a batch that isn't full, if it is
    /// clean and its block keeps its size. A block that is to be cut or joined is moved out for
    /// that, and so is one of more pages than `Folio::here` has bits.
    pub(crate) fn prepare_eviction(
        &self,
        areas: &Areas,
        guard: &ShardGuard<'_>,
        id: FolioId,
        batch: &mut DropBatch,
    ) -> bool {
        let block_size = BlockSize::new(self.engine);
        let folio = self.table.get(guard, id);
        if !self.table.is_clean(folio)
            || folio.order() > PARTIAL_MAX
            || block_size.is_to_be_cut(folio.order(), folio.touch.get(), false)
            || block_size.is_to_be_joined(areas, guard, id)
        {
            return false;
        }
        debug_assert!(folio.has_copy.get());
        let key = folio.key();
        let area = areas.find_key(key).expect("a folio lies in an area");
        self.table.lists().detach(id);
        folio.state.set(FolioState::Leaving);
        let len = bytes(folio.pages() as usize);
        batch.push(id, key, AddressSpan { start: area.addr_of(key), len }, folio.pages_here());
        true
    }

    /// Drops the folios of a batch, which is empty then. Returns the number of evicted pages.
    pub(crate) fn drop_batch(&self, batch: &mut DropBatch) -> u64 {
        if batch.count == 0 {
            return 0;
        }
        let ranges =
            batch.spans[..batch.count].iter().map(|span| span.start..span.start + span.len);
        // Marked until the pages are gone: a thread that makes a call on one of them waits
        // meanwhile.
        let leaving = self.holds.mark_leaving(ranges);
        self.keep_held(batch, &leaving);
        let (mut first, mut tries, mut gone) = (0, 0, 0);
        while first < batch.count {
            // SAFETY: the folios are `Leaving`, so their bytes are in the store. No call holds
            // them.
            let result =
                unsafe { self.mapper.space().drop_spans(&batch.spans[first..batch.count]) };
            stats::add(&self.stats.drops, 1);
            let mut dropped_bytes = result.map_or_else(|partial| partial.done, |()| usize::MAX);
            tries = if dropped_bytes > 0 { 0 } else { tries + 1 };
            while first < batch.count && dropped_bytes >= batch.spans[first].len {
                dropped_bytes -= batch.spans[first].len;
                gone += self.settle(batch, first, true);
                first += 1;
            }
            let may_do_better = |errno| matches!(errno, Errno::AGAIN | Errno::INTR);
            if result.is_err_and(|partial| {
                partial.done == 0 && !(may_do_better(partial.errno) && tries < TRIES)
            }) {
                gone += self.settle(batch, first, false);
                first += 1;
                tries = 0;
            }
        }
        (batch.count, batch.pages) = (0, 0);
        gone
    }

    /// Takes folios that a system call holds out of a batch: they stay resident.
    fn keep_held(&self, batch: &mut DropBatch, leaving: &LeavingPages<'_>) {
        let mut kept_count = 0;
        for n in 0..batch.count {
            let ((id, key), span) = (batch.folios[n], batch.spans[n]);
            if leaving.may_evict(span.start..span.start + span.len) {
                (batch.folios[kept_count], batch.spans[kept_count]) = ((id, key), span);
                kept_count += 1;
                continue;
            }
            let guard = self.table.lock(key);
            let folio = self.table.get(&guard, id);
            let resident_bits = match folio.here.get() {
                0 => folio.bits(key..folio.end()),
                resident_bits => resident_bits,
            };
            self.end_leaving(&guard, id, resident_bits);
            let range = span.start..span.start + span.len;
            self.list_held(&guard, id, || leaving.is_held(range));
        }
        batch.count = kept_count;
    }

    /// Ends the eviction of folio `n` of a batch. `is_gone`: the kernel has dropped its pages.
    /// Returns the number of evicted pages.
    fn settle(&self, batch: &DropBatch, n: usize, is_gone: bool) -> u64 {
        let ((id, key), AddressSpan { start, len }) = (batch.folios[n], batch.spans[n]);
        let pages = (start..start + len).step_by(PAGE_SIZE).enumerate();
        let left_bits = pages
            .filter(|(_, page)| !is_gone && self.mapper.space().is_populated(*page))
            .fold(0, |left_bits, (n, _)| left_bits | 1u16 << n);
        let guard = self.table.lock(key);
        let folio = self.table.get(&guard, id);
        let all = folio.bits(key..folio.end());
        let left_bits = left_bits & if folio.here.get() == 0 { all } else { folio.here.get() };
        let dropped_pages = folio.pages_here() - left_bits.count_ones() as u64;
        folio.clean_in.set(0);
        folio.written.set(false);
        self.table.tally().unmap(dropped_pages);
        let folded_pages = self.table.tally().fold(dropped_pages);
        if left_bits == 0 {
            folio.age.set(workingset::shadow(
                self.table.tally().evict(dropped_pages),
                folio.active.replace(false),
            ));
            folio.refused.set(LruList::None);
            stats::raise(&self.stats.peak_folded_bytes, folded_pages << PAGE_SHIFT);
            stats::add(&self.stats.blocks_clean, 1);
            stats::add(&self.stats.clean_evictions, 1);
        } else {
            stats::add(&self.stats.move_busy, 1);
        }
        self.end_leaving(&guard, id, left_bits);
        dropped_pages
    }

    /// Makes a `Leaving` folio `Stored`, or `Partial` with the pages `here`.
    fn end_leaving(&self, guard: &ShardGuard<'_>, id: FolioId, here: u16) {
        let folio = self.table.get(guard, id);
        let all = folio.bits(folio.key()..folio.end());
        folio.here.set(if here == all { 0 } else { here });
        folio.state.set(match here {
            0 => FolioState::Stored,
            here if here == all => FolioState::Resident,
            _ => FolioState::Partial,
        });
        self.table.list_by_state(guard, id);
        self.table.notify(guard);
    }
}
