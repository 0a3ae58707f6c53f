//! A fork at any moment of what threads do to their mappings: a simulated kernel makes the changes,
//! and queues their events later, one thread's behind another's or before; the child must find what
//! was where.
use crate::area::Areas;
use crate::area::early_events::PARKED_FROM;
use crate::quiesce::copy_moment::{Moment, Pages};
use memfold_sys::uffd::Event;
use memfold_sys::units::{PAGE_SHIFT, PAGE_SIZE};
use memfold_testkit::random::{Random, seed};
use std::collections::{BTreeMap, VecDeque};

const THREADS: usize = 4;
const SPACE: usize = 400;
/// What is in a page of a mapping that was never managed, nor marked.
const FRESH: u64 = u64::MAX;

struct Thread {
    /// Whole ranges that it has mapped: only it changes them.
    own: Vec<Pages>,
    /// Of the change that it has made: not queued yet, and queued but not read.
    unqueued: VecDeque<Event>,
    queued: usize,
    /// When it made that change.
    at: usize,
}

struct Kernel {
    changes: usize,
    random: Random,
    /// Key (that of the index), or [`FRESH`], of each page that is mapped. A key means that there
    /// is a mark, too.
    pages: BTreeMap<u64, u64>,
    threads: Vec<Thread>,
    queue: VecDeque<(usize, Event)>,
    log: Vec<Event>,
}

fn addr(page: u64) -> usize {
    (page << PAGE_SHIFT) as usize
}

fn unmap((start, end): Pages) -> Event {
    Event::Unmap { start: addr(start), end: addr(end) }
}

impl Kernel {
    fn new(random: Random) -> (Kernel, Areas) {
        let (mut areas, mut pages, mut threads) = (Areas::default(), BTreeMap::new(), Vec::new());
        for thread in 0..THREADS as u64 {
            let range = (thread * 24, thread * 24 + 16);
            areas.add(range.0, range.1);
            pages.extend((range.0..range.1).map(|page| (page, page)));
            threads.push(Thread { own: vec![range], unqueued: VecDeque::new(), queued: 0, at: 0 });
        }
        (
            Kernel { changes: 0, random, pages, threads, queue: VecDeque::new(), log: Vec::new() },
            areas,
        )
    }

    /// A place for `len` pages where nothing is, the lowest or one at random: the kernel gives what
    /// was just unmapped to the next who asks.
    fn room(&mut self, len: u64) -> u64 {
        let from = if self.random.below(2) == 0 { 0 } else { self.random.below(SPACE) as u64 };
        (from..).find(|at| (*at..at + len).all(|page| !self.pages.contains_key(&page))).unwrap()
    }

    /// A part of what a thread has, which it has no more.
    fn take_part(&mut self, thread: usize) -> Pages {
        let own = &mut self.threads[thread].own;
        let (start, end) = own.swap_remove(self.random.below(own.len()));
        let from = start + self.random.below((end - start) as usize) as u64;
        let to = from + 1 + self.random.below((end - from) as usize) as u64;
        own.extend([(start, from), (to, end)].into_iter().filter(|part| part.0 < part.1));
        (from, to)
    }

    /// Whether the kernel reports what happens there.
    fn is_registered(&self, range: Pages) -> bool {
        self.pages.range(range.0..range.1).any(|(_, key)| *key != FRESH)
    }

    /// An event may be overtaken by those of one change of each other thread, not of two: see
    /// [`Kernel::is_clear`].
    fn may_change(&self, thread: usize) -> bool {
        let last = self.threads[thread].at;
        !self.threads.iter().any(|t| !t.unqueued.is_empty() && t.at < last)
    }

    fn change(&mut self, thread: usize) {
        self.changes += 1;
        self.threads[thread].at = self.changes;
        if self.threads[thread].own.is_empty() || self.random.below(4) == 0 {
            let len = 1 + self.random.below(8) as u64;
            let at = self.room(len);
            self.pages.extend((at..at + len).map(|page| (page, FRESH)));
            self.threads[thread].own.push((at, at + len));
            return;
        }
        let part = self.take_part(thread);
        let mut events = Vec::new();
        // A mapping is moved as a whole: parts of others are ones of their own.
        let first = self.pages[&part.0];
        let len = (part.0..part.1)
            .take_while(|page| (self.pages[page] == FRESH) == (first == FRESH))
            .count() as u64;
        self.threads[thread]
            .own
            .extend([(part.0 + len, part.1)].into_iter().filter(|rest| rest.0 < rest.1));
        let part = (part.0, part.0 + len);
        if self.random.below(3) == 0 {
            if self.is_registered(part) {
                events.push(unmap(part));
            }
            self.pages.retain(|page, _| !(part.0..part.1).contains(page));
        } else {
            // To a free place, or over something of its own.
            let over = self.random.below(3) == 0 && !self.threads[thread].own.is_empty();
            let target = if over { self.take_part(thread) } else { (0, 0) };
            let to = if over && target.1 - target.0 >= len {
                self.threads[thread]
                    .own
                    .extend([(target.0 + len, target.1)].into_iter().filter(|p| p.0 < p.1));
                target.0
            } else {
                self.threads[thread].own.extend([target].into_iter().filter(|p| p.0 < p.1));
                self.room(len)
            };
            if self.is_registered((to, to + len)) {
                events.push(unmap((to, to + len)));
            }
            let moved: Vec<u64> =
                (part.0..part.1).map(|page| self.pages.remove(&page).unwrap()).collect();
            if first != FRESH {
                events.push(Event::Remap {
                    from: addr(part.0),
                    to: addr(to),
                    len: len as usize * PAGE_SIZE,
                });
                events.push(unmap(part));
            }
            self.pages.extend((to..to + len).zip(moved));
            self.threads[thread].own.push((to, to + len));
        }
        self.threads[thread].unqueued = events.into();
    }

    /// Whether the engine can make sense of the events at all. Where one is queued so late that
    /// another thread, which came to the same place, has changed it once more and been read, nobody
    /// can: events don't tell their thread.
    fn is_clear(&mut self, mut areas: Areas) -> bool {
        while self.threads.iter().any(|t| t.queued > 0 || !t.unqueued.is_empty()) {
            for at in 0..THREADS {
                if let (0, Some(event)) =
                    (self.threads[at].queued, self.threads[at].unqueued.pop_front())
                {
                    self.queue.push_back((at, event));
                    self.threads[at].queued = 1;
                }
            }
            while let Some((who, event)) = self.queue.pop_front() {
                self.log.push(event);
                self.threads[who].queued = 0;
            }
        }
        self.log.iter().for_each(|change| areas.follow(*change));
        areas.end_parked();
        found(&areas) == managed(&self.pages)
    }

    fn step(&mut self) {
        let at = self.random.below(THREADS);
        let thread = &mut self.threads[at];
        match self.random.below(3) {
            0 if thread.queued == 0 && !thread.unqueued.is_empty() => {
                self.queue.push_back((at, thread.unqueued.pop_front().unwrap()));
                thread.queued = 1;
            }
            1 => {
                if let Some((who, event)) = self.queue.pop_front() {
                    self.log.push(event);
                    self.threads[who].queued = 0;
                }
            }
            2 if thread.queued == 0 && thread.unqueued.is_empty() && self.may_change(at) => {
                self.change(at)
            }
            _ => {}
        }
    }
}

fn found(areas: &Areas) -> BTreeMap<u64, u64> {
    let mut found = BTreeMap::new();
    for area in areas.iter() {
        found.extend((area.start..area.end).map(|page| (page, area.key_of(addr(page)))));
    }
    found
}

fn managed(pages: &BTreeMap<u64, u64>) -> BTreeMap<u64, u64> {
    pages.iter().filter(|page| *page.1 != FRESH).map(|page| (*page.0, *page.1)).collect()
}

/// As `Pager::catch_up`. Returns whether the log sufficed.
fn catch_up(areas: &mut Areas, log: &[Event], known: usize, marked: Vec<Pages>) -> bool {
    log[..known].iter().for_each(|change| areas.follow(*change));
    let mut moment = Moment::new(marked);
    let mut later = log[known..].iter();
    loop {
        let managed: Vec<Pages> =
            areas.iter().map(|a| (a.start, a.end)).filter(|p| p.0 < PARKED_FROM).collect();
        let ghosts = areas.waiting();
        if moment.is_reached(&managed, &ghosts) {
            areas.end_parked();
            return true;
        }
        let Some(change) = later.next() else { return false };
        moment
            .judge(*change, &managed, &ghosts)
            .into_iter()
            .for_each(|change| areas.follow(change));
    }
}

#[test]
fn b1_a_child_knows_what_was_where_when_it_was_copied() {
    let mut random = Random::new(seed(20_261_122));
    let (mut open, mut missed, mut unclear) = (0, 0, 0);
    let rounds = 20_000;
    for round in 0..rounds {
        let (mut kernel, mut areas) = Kernel::new(random.fork());
        (0..kernel.random.below(120)).for_each(|_| kernel.step());
        let (then, known) = (kernel.pages.clone(), kernel.log.len());
        open += kernel.threads.iter().any(|t| t.queued > 0 || !t.unqueued.is_empty()) as usize;
        (0..200).for_each(|_| kernel.step());
        if !kernel.is_clear(areas.clone()) {
            unclear += 1;
            continue;
        }
        let marked =
            then.iter().filter(|page| *page.1 != FRESH).map(|page| (*page.0, page.0 + 1)).collect();
        if !catch_up(&mut areas, &kernel.log, known, marked) {
            missed += 1;
            continue;
        }
        let (found, wanted) = (found(&areas), managed(&then));
        assert!(
            found == wanted,
            "round {round}, {known} of {:?}: {found:?}, not {wanted:?}",
            kernel.log
        );
    }
    println!("{unclear} of {rounds} are unclear");
    assert!(open > rounds / 4, "the copy is made in the middle of changes: {open}");
    assert_eq!(missed, 0, "the child would have been stopped");
}
