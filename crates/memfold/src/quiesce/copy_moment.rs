//! What other threads had done to the address space at the moment when a fork copied it.
//!
//! The kernel tells of a change after it was made, and only the parent. A child knows the changes
//! that were *read* before the copy. One that was made but not read is among those that the parent
//! read later, together with such as were made after the copy. The child's own map tells them
//! apart: what was managed in the parent has a mark there
//! ([`crate::delivery::program::Watcher::lend_to_children`]), which moves with it and which nothing
//! has that was mapped anew. A thread that has made a change waits until it is read, so it has made
//! at most one; each of them takes the mark from where something managed was, or brings it where
//! nothing was; and two threads that change the same memory at the same time, with nothing between
//! them, are wrong without a fork too.
//!
//! What this relies on: mremap with MREMAP_DONTUNMAP, which takes no mark away, waits for the end
//! of a fork (`memfold-preload`). A discard changes no mark, but is read before anything is
//! dropped, thus before the copy or not at all.
use crate::area::early_events::without;
use alloc::vec::Vec;
use memfold_sys::uffd::Event;
use memfold_sys::units::{PAGE_SHIFT, PAGE_SIZE};

/// A range of pages.
pub type Pages = (u64, u64);

/// The moment of the copy.
pub struct Moment {
    marked: Vec<Pages>,
    /// Changes that had not happened, as something is still there; or something else had come
    /// there.
    unclear: Vec<Event>,
}

impl Moment {
    /// That at which these pages, in ascending order, had the mark.
    pub fn new(marked: Vec<Pages>) -> Moment {
        Moment { marked, unclear: Vec::new() }
    }

    /// Whether nothing is missing: all that is `managed` is there, and none of it waits for its
    /// event (`ghosts`).
    pub fn is_reached(&self, managed: &[Pages], ghosts: &[Pages]) -> bool {
        ghosts.is_empty() && managed.iter().all(|pages| self.absent(*pages).is_empty())
    }

    /// What of a change, which was read after the copy, had happened by then. `managed` and
    /// `ghosts` are as the changes before have left them.
    pub fn judge(&mut self, change: Event, managed: &[Pages], ghosts: &[Pages]) -> Vec<Event> {
        match change {
            Event::Unmap { start, end } => {
                self.judge_unmap(pages(start, end - start), managed, ghosts)
            }
            Event::Remap { from, to, len } => {
                let (source, target) = (pages(from, len), pages(to, len));
                if !self.has_moved(source, target, managed, ghosts) {
                    self.unclear.push(change);
                    return Vec::new();
                }
                let mut changes = Vec::new();
                self.make_way(target, managed, &mut changes);
                changes.push(change);
                changes
            }
            _ => Vec::new(),
        }
    }

    /// Of what waits for an end, that end is told; of the rest, what is not there.
    fn judge_unmap(&mut self, range: Pages, managed: &[Pages], ghosts: &[Pages]) -> Vec<Event> {
        let here =
            without(range.0, range.1, ghosts).into_iter().flat_map(|part| parts(part, managed));
        let here: Vec<Pages> = here.collect();
        let stay = here.iter().flat_map(|part| parts(*part, &self.marked));
        self.unclear.extend(stay.map(unmap));
        let gone = here.into_iter().flat_map(|part| self.absent(part)).chain(parts(range, ghosts));
        gone.map(unmap).collect()
    }

    /// Something has come to `target`, so what is managed there had gone, by changes that were not
    /// clear till now.
    fn make_way(&mut self, target: Pages, managed: &[Pages], changes: &mut Vec<Event>) {
        for part in parts(target, managed) {
            while let Some(at) =
                self.unclear.iter().position(|change| touch(part, &[source_of(change)]))
            {
                match self.unclear.remove(at) {
                    Event::Remap { from, to, len } => {
                        self.make_way(pages(to, len), managed, changes);
                        changes.push(Event::Remap { from, to, len });
                    }
                    change => {
                        let (start, end) = source_of(&change);
                        changes.push(unmap((start.max(part.0), end.min(part.1))));
                    }
                }
            }
        }
    }

    /// It has arrived, and either it is not where it was, or nothing else can be what has arrived
    /// there.
    fn has_moved(&self, source: Pages, target: Pages, managed: &[Pages], ghosts: &[Pages]) -> bool {
        if !self.absent(target).is_empty() {
            return false;
        }
        let here = parts(source, managed);
        let left = touch(source, ghosts) || here.iter().any(|part| !self.absent(*part).is_empty());
        let arrived = !without(target.0, target.1, managed).is_empty();
        left || arrived && !here.is_empty()
    }

    /// The parts of a range that have no mark.
    fn absent(&self, range: Pages) -> Vec<Pages> {
        let first = self.marked.partition_point(|part| part.1 <= range.0);
        let last = self.marked.partition_point(|part| part.0 < range.1);
        without(range.0, range.1, &self.marked[first..last])
    }
}

/// The pages that a change takes away.
fn source_of(change: &Event) -> Pages {
    match *change {
        Event::Remap { from, len, .. } => pages(from, len),
        Event::Unmap { start, end } => pages(start, end - start),
        _ => (0, 0),
    }
}

fn unmap((start, end): Pages) -> Event {
    Event::Unmap { start: addr(start), end: addr(end) }
}

fn addr(page: u64) -> usize {
    (page << PAGE_SHIFT) as usize
}

fn pages(start: usize, len: usize) -> Pages {
    (start as u64 >> PAGE_SHIFT, (start + len).div_ceil(PAGE_SIZE) as u64)
}

fn touch(range: Pages, set: &[Pages]) -> bool {
    set.iter().any(|other| range.0 < other.1 && other.0 < range.1)
}

/// The parts of a range that are in a set.
fn parts(range: Pages, set: &[Pages]) -> Vec<Pages> {
    let cut = set.iter().map(|other| (range.0.max(other.0), range.1.min(other.1)));
    cut.filter(|part| part.0 < part.1).collect()
}
