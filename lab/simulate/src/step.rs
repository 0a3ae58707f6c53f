//! Steps: what the tasks of a run do, each drawn from the seed before the run begins. Any part of a
//! list of steps is a list of steps, so a failing one can be shrunk by leaving steps out: a step that
//! makes no sense by then does nothing.
use memfold_os::units::PAGE_SIZE;
use memfold_testkit::random::Random;
use std::ops::Range;

/// What a write puts into a page.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Zeros.
    Zeros,
    /// One byte, repeated.
    Byte(u8),
    /// Bytes of which a quarter is random: they compress.
    Text(u32),
    /// Bytes that don't compress.
    Noise(u32),
    /// A page of which half compresses.
    Half(u32),
    /// A few bytes of the page change.
    Poke(u32),
    /// The bytes that are there.
    Same,
}

impl Content {
    fn random(random: &mut Random) -> Content {
        let salt = random.word() as u32;
        match random.below(12) {
            0 => Content::Zeros,
            1 => Content::Byte(salt as u8),
            2..5 => Content::Text(salt),
            5 | 6 => Content::Noise(salt),
            7 => Content::Half(salt),
            8..11 => Content::Poke(salt),
            _ => Content::Same,
        }
    }

    /// Writes it into a page.
    pub fn put(self, page: &mut [u8]) {
        let noise = |salt: u32, bytes: &mut [u8]| {
            let mut random = Random::new(salt as u64);
            bytes.chunks_mut(8).for_each(|word| word.copy_from_slice(&random.word().to_le_bytes()));
        };
        match self {
            Content::Zeros => page.fill(0),
            Content::Byte(byte) => page.fill(byte),
            Content::Text(salt) => {
                page.fill(salt as u8);
                let mut random = Random::new(salt as u64);
                for word in page.chunks_mut(32) {
                    word[..8].copy_from_slice(&random.word().to_le_bytes());
                }
            }
            Content::Noise(salt) => noise(salt, page),
            Content::Half(salt) => {
                page.fill(salt as u8);
                noise(salt, &mut page[..PAGE_SIZE / 2]);
            }
            Content::Poke(salt) => {
                let at = salt as usize % (PAGE_SIZE / 8) * 8;
                page[at..at + 4].copy_from_slice(&salt.to_le_bytes());
            }
            Content::Same => {}
        }
    }
}

/// A fault of a device: the request that it strikes, counted from 1, and its kind.
pub type Strike = (u64, usize);

/// One step of a task. Pages are numbers in the area.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Reads a page.
    Read(usize),
    /// Writes a page.
    Write(usize, Content),
    /// Reads pages one after another, upwards or downwards.
    ReadAll(Range<usize>, bool),
    /// Writes pages one after another.
    WriteAll(Range<usize>, Content),
    /// Makes a system call that reads or writes the pages, which are held or pinned meanwhile.
    Call(Range<usize>, Option<Content>),
    /// Discards pages.
    Discard(Range<usize>),
    /// Unmaps pages.
    Unmap(Range<usize>),
    /// Maps pages that were unmapped.
    Map(Range<usize>),
    /// Moves the mapping of pages to the page, and keeps the source or not.
    Remap(Range<usize>, usize, bool),
    /// Copies the process, and looks at all pages as a child would. A child reaches the remote store
    /// or not.
    Fork(bool),
    /// Asks to fold pages.
    Fold(Range<usize>),
    /// Marks pages as cold.
    Cool(Range<usize>),
    /// Asks to load pages.
    Need(Range<usize>),
    /// Sets the limit and the resident limit, KiB; 0 for none.
    Bounds(u64, u64),
    /// Sets how much memory isn't managed, KiB.
    Outside(u64),
    /// Makes so many of 1000 calls of the kernel fail.
    Trouble(u32),
    /// Makes a write to the swap file fail.
    FailWrite(Strike),
    /// Makes a request to the remote store fail.
    FailRemote(Strike),
    /// Makes the store fail.
    FailStore(Strike),
    /// Lets time pass, microseconds, and does what the first engine thread does from time to time.
    Pass(u64),
}

/// Draws a step of one kind.
type StepKind = fn(&mut StepSource<'_>) -> Step;

/// The kinds of steps, and how often each is drawn.
const KINDS: [(StepKind, usize); 12] = [
    (|source| Step::Read(source.page()), 20),
    (|source| Step::Write(source.page(), source.content()), 24),
    (|source| Step::ReadAll(source.range(96), source.random.below(4) > 0), 6),
    (|source| Step::WriteAll(source.range(64), source.content()), 6),
    (|source| Step::Call(source.range(12), None), 4),
    (|source| Step::Call(source.range(12), Some(source.content())), 4),
    (|source| Step::Discard(source.range(64)), 5),
    (|source| source.mapping(), 7),
    (|source| Step::Fold(source.range(256)), 8),
    (|source| Step::Cool(source.range(128)), 2),
    (|source| Step::Need(source.range(64)), 3),
    (|source| source.circumstance(), 11),
];

/// How often each kind of steps is drawn in a run, and where. Each run has other ones, so that two
/// mechanisms meet more often in some runs than they do in a mixture of all.
#[derive(Clone, Debug)]
pub struct Habits {
    /// Pages of the area.
    pages: usize,
    /// Mappings change.
    maps: bool,
    weights: [usize; KINDS.len()],
    /// Pages near which much is done.
    centers: [usize; 3],
    /// Pages near a center.
    spread: usize,
    /// One page in so many is anywhere.
    strays: usize,
}

impl Habits {
    /// Draws the habits of a run with so many pages, whose mappings change or not.
    pub fn random(random: &mut Random, pages: usize, maps: bool) -> Habits {
        let mut weights = KINDS.map(|(_, weight)| weight * random.pick(&[0, 1, 1, 1, 4]));
        // Without touches nothing happens.
        weights[..2].iter_mut().for_each(|weight| *weight += 8);
        let centers = [0; 3].map(|_| random.below(pages));
        let (spread, strays) = (random.pick(&[6, 24, 24]), random.pick(&[2, 3, 20]));
        Habits { pages, maps, weights, centers, spread, strays }
    }
}

/// Draws steps.
pub struct StepSource<'a> {
    habits: &'a Habits,
    random: Random,
}

impl<'a> StepSource<'a> {
    /// Makes the source of a seed.
    pub fn new(habits: &'a Habits, random: Random) -> StepSource<'a> {
        StepSource { habits, random }
    }

    /// Draws the next step.
    pub fn next(&mut self) -> Step {
        let weights = self.habits.weights;
        let mut at = self.random.below(weights.iter().sum());
        let is_drawn = |weight: &usize| match at.checked_sub(*weight) {
            Some(rest) => {
                at = rest;
                false
            }
            None => true,
        };
        let kind = weights.iter().position(is_drawn).expect("it is below the sum");
        KINDS[kind].0(self)
    }

    fn content(&mut self) -> Content {
        Content::random(&mut self.random)
    }

    fn page(&mut self) -> usize {
        let habits = self.habits;
        if self.random.below(habits.strays) == 0 {
            return self.random.below(self.habits.pages);
        }
        let center = self.random.pick(&habits.centers);
        (center + self.random.below(habits.spread)).min(self.habits.pages - 1)
    }

    fn range(&mut self, most: usize) -> Range<usize> {
        let most = if self.random.below(2) == 0 { most.min(8) } else { most };
        let (start, mut len) = (self.page(), 1 + self.random.below(most));
        if self.random.below(3) == 0 {
            // Whole blocks and folios.
            len = len.next_power_of_two();
            let start = start & !(len - 1);
            return start..(start + len).min(self.habits.pages);
        }
        start..(start + len).min(self.habits.pages)
    }

    fn strike(&mut self) -> Strike {
        (1 + self.random.below(8) as u64, self.random.below(3))
    }

    fn mapping(&mut self) -> Step {
        if !self.habits.maps {
            return Step::Discard(self.range(64));
        }
        match self.random.below(9) {
            0 | 1 => Step::Unmap(self.range(64)),
            2 | 3 => Step::Map(self.range(128)),
            4 => Step::Fork(self.random.below(3) > 0),
            _ => {
                let from = self.range(96);
                let to = self.page().min(self.habits.pages - from.len());
                Step::Remap(from, to, self.random.below(3) == 0)
            }
        }
    }

    fn circumstance(&mut self) -> Step {
        let random = &mut self.random;
        match random.below(8) {
            0 => {
                let some = [0, 1, 600, 1000, 2000, 4000, 8000];
                Step::Bounds(random.pick(&some), random.pick(&some))
            }
            1 => Step::Outside(random.pick(&[0, 100, 1000])),
            2 => Step::Trouble(random.pick(&[0, 20, 100, 300])),
            3 => Step::FailWrite(self.strike()),
            4 => Step::FailRemote(self.strike()),
            5 => Step::FailStore(self.strike()),
            _ => Step::Pass(random.pick(&[10, 1_000, 100_000, 2_000_000])),
        }
    }
}
