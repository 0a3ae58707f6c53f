//! The mover: takes the coldest groups of the swap file to the remote store, and deletes there what
//! nobody needs any more. What holds meanwhile is told in [`crate::tier`].
use crate::cluster::Clusters;
use crate::disk::Disk;
use crate::lent::Lent;
use crate::remote::{ENTRIES_MAX, Failure, Fetch, Object};
use crate::tier::slot_group::{GROUP_SLOTS, Leaving, ones, rank, runs};
use crate::tier::{GROUP_BYTES, Tier, first_own};
use alloc::vec::Vec;
use core::ops::Range;
use memfold_sys::page::Page;
use memfold_sys::sync::atomic::Ordering::Relaxed;
use memfold_sys::thread::sleep_ns;
use memfold_sys::transfer::{Direction, Transfer};
use memfold_sys::units::PAGE_SIZE;

/// Groups that are looked at with the lock held.
const LOOK_GROUPS: u64 = 1024;
/// The file is emptied until it holds this much less than the mark: one part in so many of its
/// size.
const HYSTERESIS: u64 = 32;
/// After a failure, or where nothing can move, nothing is moved for so long, twice as long each
/// time.
const PAUSE_MIN_NS: u64 = 100_000_000;
const PAUSE_MAX_NS: u64 = 5_000_000_000;
/// Steps of that pause, after which is looked whether there is something else to do.
const STEP_NS: u64 = 50_000_000;

impl Tier {
    /// Sleeps until there may be something for [`Tier::step`] to do.
    pub fn await_work(&self) {
        let mut inner = self.inner.lock();
        while !inner.woken && !inner.stop {
            let left = self.watched.left_ns();
            if left == 0 {
                break;
            }
            inner = self.changed.wait_within(inner, left);
        }
    }

    /// One round of the mover: deletes what nobody needs, and moves groups until the file is below
    /// its mark, but for what is lent. With `wait`, sleeps after failures. `false`: [`Tier::stop`]
    /// was called, or, without `wait`, nothing was done.
    pub fn step(&self, disk: &dyn Disk, clusters: &Clusters, lent: &Lent, wait: bool) -> bool {
        let mut inner = self.inner.lock();
        inner.woken = false;
        // With the lock held: no copy of the process is made meanwhile.
        lent.collect(clusters);
        let (trim, stop) = (core::mem::take(&mut inner.trim), inner.stop);
        drop(inner);
        if stop {
            return false;
        }
        self.watch_service();
        self.collect(disk, clusters, trim);
        if trim {
            self.end_round(false);
        }
        let low = self.bounds.file_bytes / 100 * self.bounds.mark_percent;
        let low = low.saturating_sub(self.bounds.file_bytes / HYSTERESIS);
        let (mut moved, mut failed) = (0, None);
        while self.is_above(&self.inner.lock(), clusters, low) {
            match self.move_batch(disk, clusters, lent) {
                Ok(0) => break,
                Ok(pages) => {
                    moved += pages;
                    self.end_round(false);
                }
                Err(failure) => {
                    failed = Some(failure);
                    break;
                }
            }
        }
        let is_stuck = moved == 0 && self.is_above(&self.inner.lock(), clusters, low);
        self.end_round(failed.is_some() || is_stuck);
        match failed.or(self.bury().err()) {
            Some(failure) => {
                self.note_failure(&failure);
                self.pause(wait);
            }
            None => {
                self.has_failed.store(false, Relaxed);
                // Each write would have it look again.
                match is_stuck {
                    true => self.pause(wait),
                    false => self.pause_ns.store(0, Relaxed),
                }
            }
        }
        wait || moved > 0
    }

    /// Looks now and then whether the service keeps what lies in the store.
    fn watch_service(&self) {
        if self.watched.left_ns() > 0 {
            return;
        }
        if let Some(why) = self.watched.ask(&*self.remote, self.is_used()) {
            memfold_sys::raw::warn(&[
                "memfold: warning: remote store ",
                self.name(),
                ": ",
                &why,
                "\n",
            ]);
        }
    }

    /// Lets who waits for the mover look again.
    fn end_round(&self, stalled: bool) {
        let mut inner = self.inner.lock();
        inner.rounds += 1;
        inner.stalled = stalled;
        self.changed.notify_all();
    }

    fn note_failure(&self, failure: &Failure) {
        self.counts.failed.fetch_add(1, Relaxed);
        if !self.has_failed.swap(true, Relaxed) {
            let why = alloc::format!("{failure}");
            let name = self.name();
            memfold_sys::raw::warn(&[
                "memfold: warning: remote store ",
                name,
                ": ",
                &why,
                "; data stays local\n",
            ]);
        }
    }

    /// With `wait`, does nothing for a while, twice as long as the last time.
    fn pause(&self, wait: bool) {
        let pause = (self.pause_ns.load(Relaxed) * 2).clamp(PAUSE_MIN_NS, PAUSE_MAX_NS);
        self.pause_ns.store(pause, Relaxed);
        let mut left = if wait { pause } else { 0 };
        while left > 0 {
            sleep_ns(STEP_NS);
            left = left.saturating_sub(STEP_NS);
            let inner = self.inner.lock();
            if inner.stop || inner.trim {
                break;
            }
        }
        self.wake(&mut self.inner.lock());
    }

    /// Forgets the bytes of free slots in the remote store; with `trim`, gives the file's space of
    /// free slots back.
    fn collect(&self, disk: &dyn Disk, clusters: &Clusters, trim: bool) {
        let groups = clusters.slots() / GROUP_SLOTS as u64;
        let first_own = first_own(clusters);
        for first in (first_own..groups).step_by(LOOK_GROUPS as usize) {
            let mut to_punch = Vec::new();
            let mut inner = self.inner.lock();
            for group in first..groups.min(first + LOOK_GROUPS) {
                let live = clusters.used_bits(group * GROUP_SLOTS as u64);
                let is_stale = inner.groups.group(group).remote & !live;
                if is_stale != 0 {
                    inner.groups.forget(group, is_stale);
                }
                let free = inner.groups.group(group).backed & !live;
                if trim && free != 0 {
                    inner.groups.begin_punch(group, free);
                    to_punch.push((group, free));
                }
            }
            drop(inner);
            self.punch(disk, &to_punch);
        }
    }

    /// Gives back space of the file that [`Inner::begin_punch`] has taken from its slots.
    fn punch(&self, disk: &dyn Disk, which: &[(u64, u16)]) {
        // Joined: a file system takes milliseconds for each call, however long the range.
        let mut joined: Vec<Range<u64>> = Vec::new();
        for &(group, mask) in which {
            for run in runs(mask) {
                let start = group * GROUP_BYTES as u64 + (run.start * PAGE_SIZE) as u64;
                let end = start + (run.len() * PAGE_SIZE) as u64;
                match joined.last_mut() {
                    Some(last) if last.end == start => last.end = end,
                    _ => joined.push(start..end),
                }
            }
        }
        for range in joined {
            let _ = disk.punch(range.start, range.end - range.start);
        }
        let mut inner = self.inner.lock();
        for &(group, mask) in which {
            inner.groups.backed -= ones(mask);
            inner.groups.group(group).punching = false;
        }
        if !which.is_empty() {
            self.changed.notify_all();
        }
    }

    /// Moves some cold groups. Returns pages that moved.
    fn move_batch(
        &self,
        disk: &dyn Disk,
        clusters: &Clusters,
        lent: &Lent,
    ) -> Result<u64, Failure> {
        let mut batch = self.pick(clusters, lent);
        if batch.is_empty() {
            return Ok(0);
        }
        // SAFETY: the buffer is the mover's alone, and holds as many groups as were picked.
        let buffer =
            unsafe { core::slice::from_raw_parts_mut(self.buffer.as_ptr(), self.buffer.len()) };
        self.fill(disk, &mut batch, buffer)?;
        let objects: Vec<Object<'_>> = batch
            .iter()
            .zip(buffer.chunks(GROUP_BYTES))
            .filter(|(leaving, _)| leaving.local != 0)
            .map(|(l, bytes)| Object {
                number: l.number,
                bytes: &bytes[..ones(l.local | l.keep) as usize * PAGE_SIZE],
            })
            .collect();
        let put = if objects.is_empty() { Ok(()) } else { self.remote.put(&objects) };
        if put.is_err() {
            self.inner.lock().groups.end_without(&batch);
        }
        put?;
        let mut inner = self.inner.lock();
        let (mut to_punch, mut moved) = (Vec::new(), 0);
        for leaving in batch.iter().filter(|l| l.local != 0) {
            let live = clusters.used_bits(leaving.group * GROUP_SLOTS as u64);
            moved += inner.groups.publish(leaving, live);
            let stays = inner.groups.group(leaving.group).remote;
            let backed = inner.groups.group(leaving.group).backed;
            let free = backed & (stays | !live);
            if free != 0 {
                inner.groups.begin_punch(leaving.group, free);
                to_punch.push((leaving.group, free));
            }
        }
        drop(inner);
        self.punch(disk, &to_punch);
        self.counts.out.fetch_add(moved, Relaxed);
        Ok(moved.max(1))
    }

    /// Reads what the groups of a batch hold. One whose bytes can't be had stays, with `local` at
    /// 0.
    fn fill(
        &self,
        disk: &dyn Disk,
        batch: &mut [Leaving],
        buffer: &mut [u8],
    ) -> Result<(), Failure> {
        let (mut reads, mut owners, mut fetches) = (Vec::new(), Vec::new(), Vec::new());
        for (i, (leaving, bytes)) in batch.iter().zip(buffer.chunks_mut(GROUP_BYTES)).enumerate() {
            let mut pages = bytes.chunks_mut(PAGE_SIZE);
            for at in 0..GROUP_SLOTS as u64 {
                let bit = 1 << at;
                if (leaving.local | leaving.keep) & bit == 0 {
                    continue;
                }
                let to = pages.next().expect("a page for each slot");
                if leaving.local & bit != 0 {
                    let offset = leaving.group * GROUP_BYTES as u64 + at * PAGE_SIZE as u64;
                    reads.push(Transfer::new(
                        Direction::Read,
                        offset,
                        Page::at(to.as_mut_ptr()),
                        PAGE_SIZE,
                    ));
                    owners.push(i);
                } else {
                    let (number, stored) = leaving.old;
                    let offset = rank(stored, at) * PAGE_SIZE;
                    fetches.push(Fetch { forks: 0, number, offset, to });
                }
            }
        }
        let (mut joined, mut of) = (Vec::<Transfer>::new(), Vec::new());
        for (read, owner) in reads.iter().zip(&owners) {
            match joined.last_mut() {
                Some(last)
                    if last.offset + last.len as u64 == read.offset && of.last() == Some(owner) =>
                {
                    last.len += read.len;
                }
                _ => {
                    joined.push(*read);
                    of.push(*owner);
                }
            }
        }
        // SAFETY: the pages are the buffer's, each in one transfer. No slot that has been written
        // is written again before it is claimed, and what is claimed meanwhile is not believed.
        unsafe { disk.transfer(&mut joined) };
        let fetched = fetches.chunks_mut(ENTRIES_MAX).try_for_each(|some| self.remote.get(some));
        if let Err(failure) = fetched {
            self.inner.lock().groups.end_without(batch);
            return Err(failure);
        }
        let unread: Vec<usize> =
            joined.iter().zip(&of).filter(|(r, _)| r.result.is_err()).map(|(_, i)| *i).collect();
        for i in unread {
            self.inner.lock().groups.end_without(&batch[i..i + 1]);
            batch[i].local = 0;
        }
        Ok(())
    }

    /// The coldest groups that can move, as many as the buffer holds; they are marked as leaving.
    fn pick(&self, clusters: &Clusters, lent: &Lent) -> Vec<Leaving> {
        let first_own = first_own(clusters);
        let groups = clusters.slots() / GROUP_SLOTS as u64 - first_own;
        let room = self.buffer.len() / GROUP_BYTES;
        let mut batch = Vec::new();
        let mut looked = 0;
        // Two rounds: the first may take only the second chances.
        while looked < 2 * groups && batch.len() < room {
            let mut inner = self.inner.lock();
            for _ in 0..LOOK_GROUPS.min(2 * groups - looked) {
                looked += 1;
                let group = first_own + inner.hand % groups;
                inner.hand = group - first_own + 1;
                // A copy of the process reads it where it is.
                if lent.has(group - first_own) {
                    continue;
                }
                if let Some(leaving) =
                    inner.groups.leave(group, clusters.used_bits(group * GROUP_SLOTS as u64))
                {
                    batch.push(leaving);
                    if batch.len() == room {
                        break;
                    }
                }
            }
        }
        batch
    }

    /// Deletes objects that nobody needs any more.
    fn bury(&self) -> Result<(), Failure> {
        loop {
            let mut inner = self.inner.lock();
            let count = inner.groups.dead.len().min(ENTRIES_MAX);
            let from = inner.groups.dead.len() - count;
            let some = inner.groups.dead.split_off(from);
            drop(inner);
            if some.is_empty() {
                return Ok(());
            }
            if let Err(failure) = self.remote.delete(&some) {
                self.inner.lock().groups.bury(&some);
                return Err(failure);
            }
        }
    }
}
