//! The demoter: moves the coldest groups of the swap file to the remote store, and deletes objects
//! there that are not needed any more. [`crate::tier`] has the invariants.
use crate::cluster::Clusters;
use crate::disk::Disk;
use crate::lent::LentSlots;
use crate::remote::{ENTRIES_MAX, ObjectFetch, RemoteError, StoredObject};
use crate::tier::slot_group::{Demotion, GROUP_SLOTS, ones, rank, runs};
use crate::tier::{GROUP_BYTES, Tier, first_own};
use alloc::vec::Vec;
use core::ops::Range;
use memfold_os::page::Page;
use memfold_os::sync::atomic::Ordering::Relaxed;
use memfold_os::thread::sleep_ns;
use memfold_os::transfer::{Direction, Transfer};
use memfold_os::units::PAGE_SIZE;

/// Groups that are scanned in one hold of the lock.
const LOOK_GROUPS: u64 = 1024;
/// Demotion ends when the file holds this much less than the mark: its size divided by this.
const HYSTERESIS: u64 = 32;
/// The demoter's shortest pause, after a failure or when no group can move. Each pause is twice as
/// long as the one before, up to the longest.
const PAUSE_MIN_NS: u64 = 100_000_000;
const PAUSE_MAX_NS: u64 = 5_000_000_000;
/// Length of a step of a pause. After each step the demoter looks for other work.
const STEP_NS: u64 = 50_000_000;

impl Tier {
    /// Sleeps until there may be work for [`Tier::run_round`].
    pub fn wait_for_work(&self) {
        let mut state = self.state.lock();
        while !state.woken && !state.stop {
            let time_left = self.watched.left_ns();
            if time_left == 0 {
                break;
            }
            state = self.changed.wait_within(state, time_left);
        }
    }

    /// Runs one round of the demoter: deletes unneeded objects, and moves groups until the file is
    /// below its mark, except for groups that are lent. With `wait`, sleeps after failures. Returns
    /// `false` after [`Tier::stop`], or, without `wait`, if there was no work.
    pub fn run_round(
        &self,
        disk: &dyn Disk,
        clusters: &Clusters,
        lent: &LentSlots,
        wait: bool,
    ) -> bool {
        let mut state = self.state.lock();
        state.woken = false;
        // Runs with the lock held, so that no copy of the process is made meanwhile.
        lent.collect(clusters);
        let (trim, stop) = (core::mem::take(&mut state.trim), state.stop);
        drop(state);
        if stop {
            return false;
        }
        self.watch_service();
        self.collect(disk, clusters, trim);
        if trim {
            self.finish_round(false);
        }
        let low = self.bounds.file_bytes / 100 * self.bounds.mark_percent;
        let low = low.saturating_sub(self.bounds.file_bytes / HYSTERESIS);
        let (mut moved_slots, mut cause) = (0, None);
        while self.is_above(&self.state.lock(), clusters, low) {
            match self.move_batch(disk, clusters, lent) {
                Ok(0) => break,
                Ok(pages) => {
                    moved_slots += pages;
                    self.finish_round(false);
                }
                Err(failure) => {
                    cause = Some(failure);
                    break;
                }
            }
        }
        let is_stuck = moved_slots == 0 && self.is_above(&self.state.lock(), clusters, low);
        self.finish_round(cause.is_some() || is_stuck);
        match cause.or_else(|| self.discard().err()) {
            Some(failure) => {
                self.note_failure(&failure);
                // Waiting for the answer may have taken long.
                if failure.is_cut {
                    self.ask_service();
                }
                self.pause(wait);
            }
            None => {
                self.has_failed.store(false, Relaxed);
                // Without a pause, each write would make the demoter scan again.
                match is_stuck {
                    true => self.pause(wait),
                    false => self.pause_ns.store(0, Relaxed),
                }
            }
        }
        wait || moved_slots > 0
    }

    /// Asks now and then whether the service keeps the data in the store.
    fn watch_service(&self) {
        if self.watched.left_ns() == 0 {
            self.ask_service();
        }
    }

    /// Asks whether the service keeps the data in the store, and warns if it has been silent.
    fn ask_service(&self) {
        if let Some(why) = self.watched.ask(&*self.remote, self.is_used()) {
            memfold_os::raw::warn(&[
                "memfold: warning: Remote store ",
                self.name(),
                ": ",
                &why,
                "\n",
            ]);
        }
    }

    /// Wakes threads that wait for the demoter.
    fn finish_round(&self, stalled: bool) {
        let mut state = self.state.lock();
        state.rounds += 1;
        state.stalled = stalled;
        self.changed.notify_all();
    }

    fn note_failure(&self, failure: &RemoteError) {
        self.counts.failed.fetch_add(1, Relaxed);
        if !self.has_failed.swap(true, Relaxed) {
            let why = alloc::format!("{failure}");
            let name = self.name();
            memfold_os::raw::warn(&[
                "memfold: warning: Remote store ",
                name,
                ": ",
                &why,
                ". New data stays local\n",
            ]);
        }
    }

    /// Pauses with `wait`, twice as long as the last time.
    fn pause(&self, wait: bool) {
        let pause = (self.pause_ns.load(Relaxed) * 2).clamp(PAUSE_MIN_NS, PAUSE_MAX_NS);
        self.pause_ns.store(pause, Relaxed);
        let mut pause_left = if wait { pause } else { 0 };
        while pause_left > 0 {
            sleep_ns(STEP_NS);
            pause_left = pause_left.saturating_sub(STEP_NS);
            let state = self.state.lock();
            if state.stop || state.trim {
                break;
            }
        }
        self.wake(&mut self.state.lock());
    }

    /// Forgets the bytes of free slots in the remote store. With `trim`, gives the file's space of
    /// free slots back.
    fn collect(&self, disk: &dyn Disk, clusters: &Clusters, trim: bool) {
        let groups = clusters.slots() / GROUP_SLOTS as u64;
        let first_own = first_own(clusters);
        for first in (first_own..groups).step_by(LOOK_GROUPS as usize) {
            let mut to_punch = Vec::new();
            let mut state = self.state.lock();
            for group in first..groups.min(first + LOOK_GROUPS) {
                let live = clusters.used_bits(group * GROUP_SLOTS as u64);
                let is_stale = state.groups.group(group).remote & !live;
                if is_stale != 0 {
                    state.groups.forget(group, is_stale);
                }
                let free = state.groups.group(group).backed & !live;
                if trim && free != 0 {
                    state.groups.begin_punch(group, free);
                    to_punch.push((group, free));
                }
            }
            drop(state);
            self.punch(disk, &to_punch);
        }
    }

    /// Gives back the file's space of slots for which [`SlotGroups::begin_punch`] was called.
    fn punch(&self, disk: &dyn Disk, which: &[(u64, u16)]) {
        // Ranges are joined, because a file system takes milliseconds for each call, however long
        // the range.
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for &(group, mask) in which {
            for run in runs(mask) {
                let start = group * GROUP_BYTES as u64 + (run.start * PAGE_SIZE) as u64;
                let end = start + (run.len() * PAGE_SIZE) as u64;
                match ranges.last_mut() {
                    Some(last) if last.end == start => last.end = end,
                    _ => ranges.push(start..end),
                }
            }
        }
        for range in ranges {
            let _ = disk.punch(range.start, range.end - range.start);
        }
        let mut state = self.state.lock();
        for &(group, mask) in which {
            state.groups.backed -= ones(mask);
            state.groups.group(group).punching = false;
        }
        if !which.is_empty() {
            self.changed.notify_all();
        }
    }

    /// Moves some cold groups. Returns the number of pages that moved.
    fn move_batch(
        &self,
        disk: &dyn Disk,
        clusters: &Clusters,
        lent: &LentSlots,
    ) -> Result<u64, RemoteError> {
        let mut batch = self.pick(clusters, lent);
        if batch.is_empty() {
            return Ok(0);
        }
        // SAFETY: only the demoter uses the buffer, and `self` keeps it mapped. Its memory starts
        // as zeros, and this is its only slice.
        let buffer =
            unsafe { core::slice::from_raw_parts_mut(self.buffer.as_ptr(), self.buffer.len()) };
        self.fill(disk, &mut batch, buffer)?;
        let objects: Vec<StoredObject<'_>> = batch
            .iter()
            .zip(buffer.chunks(GROUP_BYTES))
            .filter(|(demotion, _)| demotion.local != 0)
            .map(|(l, bytes)| StoredObject {
                number: l.number,
                bytes: &bytes[..ones(l.local | l.keep) as usize * PAGE_SIZE],
            })
            .collect();
        let outcome = if objects.is_empty() { Ok(()) } else { self.remote.put(&objects) };
        if outcome.is_err() {
            self.state.lock().groups.cancel(&batch);
        }
        outcome?;
        let mut state = self.state.lock();
        let (mut to_punch, mut moved_slots) = (Vec::new(), 0);
        for demotion in batch.iter().filter(|l| l.local != 0) {
            let live = clusters.used_bits(demotion.group * GROUP_SLOTS as u64);
            moved_slots += state.groups.finish(demotion, live);
            let stays = state.groups.group(demotion.group).remote;
            let backed_slots = state.groups.group(demotion.group).backed;
            let free = backed_slots & (stays | !live);
            if free != 0 {
                state.groups.begin_punch(demotion.group, free);
                to_punch.push((demotion.group, free));
            }
        }
        drop(state);
        self.punch(disk, &to_punch);
        self.counts.out.fetch_add(moved_slots, Relaxed);
        Ok(moved_slots.max(1))
    }

    /// Reads the slots of the groups of a batch. A group whose bytes can't be read stays in the
    /// file, and its `local` becomes 0.
    fn fill(
        &self,
        disk: &dyn Disk,
        batch: &mut [Demotion],
        buffer: &mut [u8],
    ) -> Result<(), RemoteError> {
        let (mut reads, mut owners, mut fetches) = (Vec::new(), Vec::new(), Vec::new());
        for (i, (demotion, bytes)) in batch.iter().zip(buffer.chunks_mut(GROUP_BYTES)).enumerate() {
            let mut pages = bytes.chunks_mut(PAGE_SIZE);
            for at in 0..GROUP_SLOTS as u64 {
                let bit = 1 << at;
                if (demotion.local | demotion.keep) & bit == 0 {
                    continue;
                }
                let to = pages.next().expect("a page for each slot");
                if demotion.local & bit != 0 {
                    let offset = demotion.group * GROUP_BYTES as u64 + at * PAGE_SIZE as u64;
                    reads.push(Transfer::new(
                        Direction::Read,
                        offset,
                        Page::at(to.as_mut_ptr()),
                        PAGE_SIZE,
                    ));
                    owners.push(i);
                } else {
                    let (number, slots_stored) = demotion.old;
                    let offset = rank(slots_stored, at) * PAGE_SIZE;
                    fetches.push(ObjectFetch { forks: 0, number, offset, to });
                }
            }
        }
        let (mut runs_joined, mut of) = (Vec::<Transfer>::new(), Vec::new());
        for (transfer, owner) in reads.iter().zip(&owners) {
            match runs_joined.last_mut() {
                Some(last)
                    if last.offset + last.len as u64 == transfer.offset
                        && of.last() == Some(owner) =>
                {
                    last.len += transfer.len;
                }
                _ => {
                    runs_joined.push(*transfer);
                    of.push(*owner);
                }
            }
        }
        // SAFETY: the pages are the buffer's, each in one transfer, and only this thread uses them.
        // A written slot is written again only after a claim, and the bytes of slots that were
        // claimed meanwhile are not used.
        unsafe { disk.transfer(&mut runs_joined) };
        let outcome = fetches.chunks_mut(ENTRIES_MAX).try_for_each(|some| self.remote.get(some));
        if let Err(failure) = outcome {
            self.state.lock().groups.cancel(batch);
            return Err(failure);
        }
        let failed_reads: Vec<usize> = runs_joined
            .iter()
            .zip(&of)
            .filter(|(r, _)| r.result.is_err())
            .map(|(_, i)| *i)
            .collect();
        for i in failed_reads {
            self.state.lock().groups.cancel(&batch[i..i + 1]);
            batch[i].local = 0;
        }
        Ok(())
    }

    /// Picks the coldest groups that can move, as many as the buffer holds, and marks them as
    /// moving.
    fn pick(&self, clusters: &Clusters, lent: &LentSlots) -> Vec<Demotion> {
        let first_own = first_own(clusters);
        let groups = clusters.slots() / GROUP_SLOTS as u64 - first_own;
        let room = self.buffer.len() / GROUP_BYTES;
        let mut batch = Vec::new();
        let mut looked = 0;
        // Two rounds, because the first may only clear the second chances.
        while looked < 2 * groups && batch.len() < room {
            let mut state = self.state.lock();
            for _ in 0..LOOK_GROUPS.min(2 * groups - looked) {
                looked += 1;
                let group = first_own + state.hand % groups;
                state.hand = group - first_own + 1;
                // A copy of the process reads this group at its present place.
                if lent.has_group(group - first_own) {
                    continue;
                }
                if let Some(demotion) = state
                    .groups
                    .begin_demotion(group, clusters.used_bits(group * GROUP_SLOTS as u64))
                {
                    batch.push(demotion);
                    if batch.len() == room {
                        break;
                    }
                }
            }
        }
        batch
    }

    /// Deletes objects that are not needed any more.
    fn discard(&self) -> Result<(), RemoteError> {
        loop {
            let mut state = self.state.lock();
            let count = state.groups.garbage.len().min(ENTRIES_MAX);
            let from = state.groups.garbage.len() - count;
            let some = state.groups.garbage.split_off(from);
            drop(state);
            if some.is_empty() {
                return Ok(());
            }
            if let Err(failure) = self.remote.delete(&some) {
                self.state.lock().groups.discard(&some);
                return Err(failure);
            }
        }
    }
}
