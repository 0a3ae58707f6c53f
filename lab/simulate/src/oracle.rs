//! The oracle: every byte that the program should see, and which task changes which mapping.
//!
//! Only one task runs at a time, and none is switched while it holds the fake page table. So the
//! program's access and the oracle's are one step, and all tasks may use all pages. Only what a
//! program may not do at once either is excluded: a task that changes mappings of pages claims them,
//! and others leave them alone meanwhile.
use memfold_os::units::PAGE_SIZE;
use std::ops::Range;
use std::sync::Mutex;

/// What a task does to the pages that it has claimed.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Claim {
    /// It discards them. Others may read them meanwhile: the old bytes, or zeros.
    Discard,
    /// It changes their mapping, and no other task touches them.
    Mapping,
}

#[derive(Copy, Clone, Default)]
struct OraclePage {
    is_unmapped: bool,
    claim: Option<Claim>,
    /// Tasks that touch it.
    users: u32,
}

/// All pages of the area.
pub struct Oracle(Mutex<OracleState>);

struct OracleState {
    bytes: Vec<u8>,
    pages: Vec<OraclePage>,
}

impl Oracle {
    /// Makes so many mapped pages of zeros.
    pub fn new(pages: usize) -> Oracle {
        let bytes = vec![0; pages * PAGE_SIZE];
        Oracle(Mutex::new(OracleState { bytes, pages: vec![OraclePage::default(); pages] }))
    }

    fn with<R>(&self, work: impl FnOnce(&mut OracleState) -> R) -> R {
        work(&mut self.0.lock().expect("no task ends while it has the oracle"))
    }

    /// Begins touches of a range. Returns `false` if a task changes a part of it, or nothing is
    /// mapped there.
    pub fn enter(&self, range: &Range<usize>, writes: bool) -> bool {
        self.with(|state| {
            let pages = &mut state.pages[range.clone()];
            let is_open = |page: &OraclePage| match page.claim {
                None => !page.is_unmapped,
                Some(Claim::Discard) => !writes,
                Some(Claim::Mapping) => false,
            };
            let are_open = pages.iter().all(is_open);
            pages.iter_mut().filter(|_| are_open).for_each(|page| page.users += 1);
            are_open
        })
    }

    /// Ends [`Oracle::enter`].
    pub fn leave(&self, range: &Range<usize>) {
        self.with(|state| state.pages[range.clone()].iter_mut().for_each(|page| page.users -= 1));
    }

    /// Claims ranges whose pages are mapped, or unmapped. Returns `false` if another task uses a
    /// part of them.
    pub fn claim(&self, range: &Range<usize>, claim: Claim, is_mapped: bool) -> bool {
        self.with(|state| {
            let pages = &mut state.pages[range.clone()];
            let is_free = |page: &OraclePage| {
                page.claim.is_none() && page.users == 0 && page.is_unmapped != is_mapped
            };
            let are_free = pages.iter().all(is_free);
            pages.iter_mut().filter(|_| are_free).for_each(|page| page.claim = Some(claim));
            are_free
        })
    }

    /// Ends a claim. The range is mapped from now on and reads as zeros, or it isn't.
    pub fn settle(&self, range: &Range<usize>, is_mapped: bool) {
        self.with(|state| {
            state.bytes[range.start * PAGE_SIZE..range.end * PAGE_SIZE].fill(0);
            for page in &mut state.pages[range.clone()] {
                (page.claim, page.is_unmapped) = (None, !is_mapped);
            }
        });
    }

    /// Ends a claim, and changes nothing.
    pub fn give_back(&self, range: &Range<usize>) {
        self.with(|state| state.pages[range.clone()].iter_mut().for_each(|page| page.claim = None));
    }

    /// Moves the bytes of a claimed range to the claimed pages from `to` on, and ends both claims.
    pub fn relocate(&self, from: &Range<usize>, to: usize, keeps_source: bool) {
        self.with(|state| {
            let bytes = from.start * PAGE_SIZE..from.end * PAGE_SIZE;
            state.bytes.copy_within(bytes, to * PAGE_SIZE);
            for page in &mut state.pages[to..to + from.len()] {
                (page.claim, page.is_unmapped) = (None, false);
            }
        });
        self.settle(from, keeps_source);
    }

    /// Returns the number of pages.
    pub fn pages(&self) -> usize {
        self.with(|state| state.pages.len())
    }

    /// Returns whether a page is mapped.
    pub fn is_mapped(&self, number: usize) -> bool {
        self.with(|state| !state.pages[number].is_unmapped)
    }

    /// Checks a page that the program sees.
    ///
    /// # Panics
    /// It should see something else.
    pub fn check(&self, number: usize, seen: &[u8]) {
        self.with(|state| {
            let bytes = &state.bytes[number * PAGE_SIZE..][..PAGE_SIZE];
            let is_discarded = state.pages[number].claim == Some(Claim::Discard);
            if seen == bytes || is_discarded && seen.iter().all(|byte| *byte == 0) {
                return;
            }
            let at = (0..PAGE_SIZE).find(|at| seen[*at] != bytes[*at]).unwrap_or(0);
            panic!(
                "page {number}, byte {at}: the program sees {:#x} and wrote {:#x}",
                seen[at], bytes[at]
            );
        });
    }

    /// Notes what the program has written to a page.
    pub fn note(&self, number: usize, bytes: &[u8]) {
        self.with(|state| {
            state.bytes[number * PAGE_SIZE..][..PAGE_SIZE].copy_from_slice(bytes);
        });
    }
}
