//! Lines that the processes of a run leave in shared memory for `memfold run` to read.
//!
//! A process first takes a free place for its line (`TAKEN`), and marks it once the line is
//! complete (`WHOLE`). `memfold run` reads only complete lines. A process that is killed in between
//! costs one place, and no line of another process.
use alloc::string::String;
use alloc::vec::Vec;
use core::sync::atomic::{
    AtomicU8, AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
};
use core::sync::atomic::{Ordering::Release, Ordering::SeqCst};
use memfold_os::Errno;
use rustix::thread::futex;

/// The number of lines that can wait to be read.
const PLACES: usize = 64;
/// Length of a line in bytes, at most. A longer line is cut off.
pub const LINE_BYTES_MAX: usize = 1000;

const FREE: u32 = 0;
const TAKEN: u32 = 1;
const WHOLE: u32 = 2;

/// The mailbox. All zeros are an empty one.
#[repr(C)]
pub struct Mailbox {
    /// Incremented for each complete line.
    bell: AtomicU32,
    /// Number of lines that found no free place.
    lost: AtomicU32,
    /// The number of the next line.
    count: AtomicU64,
    places: [LetterPlace; PLACES],
}

#[repr(C)]
struct LetterPlace {
    state: AtomicU32,
    last: AtomicU32,
    number: AtomicU64,
    process: AtomicU32,
    len: AtomicU32,
    text: [AtomicU8; LINE_BYTES_MAX],
}

/// A line that a process left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MailLine {
    /// The process that left the line, by the number that it gave.
    pub process: u32,
    /// Whether the process ends after this line.
    pub last: bool,
    /// The text of the line, without a newline.
    pub text: String,
}

impl Mailbox {
    /// Leaves a line. Returns `false` if there is no free place; [`Mailbox::take_lost`] counts that
    /// line.
    pub fn leave(&self, process: u32, last: bool, text: &[u8]) -> bool {
        let take = |place: &&LetterPlace| {
            place.state.compare_exchange(FREE, TAKEN, AcqRel, Relaxed).is_ok()
        };
        let Some(place) = self.places.iter().find(take) else {
            self.lost.fetch_add(1, Relaxed);
            return false;
        };
        let text = &text[..text.len().min(LINE_BYTES_MAX)];
        for (to, &from) in place.text.iter().zip(text) {
            to.store(from, Relaxed);
        }
        place.len.store(text.len() as u32, Relaxed);
        place.process.store(process, Relaxed);
        place.last.store(last as u32, Relaxed);
        place.number.store(self.count.fetch_add(1, Relaxed), Relaxed);
        place.state.store(WHOLE, Release);
        self.ring();
        true
    }

    /// Takes all complete lines, in their order. A later line of a thread never comes before an
    /// earlier one.
    pub fn take(&self) -> Vec<MailLine> {
        let mut lines = Vec::new();
        self.collect(&mut lines, u64::MAX);
        // A line may have been left at a place already passed, before another line that was found.
        let end = lines.iter().map(|(number, _)| *number).max().unwrap_or(0);
        // There are at most as many passes as places, since a process may write any number there.
        let _ = self.places.iter().take_while(|_| self.collect(&mut lines, end)).count();
        lines.sort_by_key(|(number, _)| *number);
        lines.into_iter().map(|(_, letter)| letter).collect()
    }

    /// Returns how many lines found no free place since the last call.
    pub fn take_lost(&self) -> u32 {
        self.lost.swap(0, Relaxed)
    }

    /// Takes the lines with a number below `end`. Returns whether there were any.
    fn collect(&self, found: &mut Vec<(u64, MailLine)>, end: u64) -> bool {
        let before = found.len();
        for place in self.places.iter().filter(|place| place.state.load(Acquire) == WHOLE) {
            let number = place.number.load(Relaxed);
            if number >= end {
                continue;
            }
            let len = (place.len.load(Relaxed) as usize).min(LINE_BYTES_MAX);
            let bytes: Vec<u8> = place.text[..len].iter().map(|byte| byte.load(Relaxed)).collect();
            let letter = MailLine {
                process: place.process.load(Relaxed),
                last: place.last.load(Relaxed) != 0,
                text: String::from_utf8_lossy(&bytes).into_owned(),
            };
            found.push((number, letter));
            place.state.store(FREE, Release);
        }
        found.len() > before
    }

    /// Returns how often the bell has rung, to be passed to [`Mailbox::wait`].
    pub fn rung(&self) -> u32 {
        self.bell.load(SeqCst)
    }

    /// Sleeps until the bell rings. Returns at once if it rang after [`Mailbox::rung`] returned
    /// `rung`. May return early.
    pub fn wait(&self, rung: u32) {
        // Other processes ring the bell, so the futex is not private. After a wake-up without cause
        // the caller finds no lines.
        let _: Result<(), Errno> = futex::wait(&self.bell, futex::Flags::empty(), rung, None);
    }

    /// Wakes all waiting threads.
    pub fn ring(&self) {
        self.bell.fetch_add(1, SeqCst);
        let _ = futex::wake(&self.bell, futex::Flags::empty(), i32::MAX as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::boxed::Box;

    fn empty() -> &'static Mailbox {
        // SAFETY: a `Mailbox` holds only atomics of integers, for which all zeros are valid.
        Box::leak(Box::new(unsafe { core::mem::zeroed() }))
    }

    #[test]
    fn lines_come_whole_once_and_in_order_while_there_is_room() {
        let mailbox = empty();
        for n in 0..PLACES as u32 {
            assert!(mailbox.leave(n, n == 3, std::format!("line {n}").as_bytes()));
        }
        assert!(!mailbox.leave(1, false, b"no room"));
        assert!(!mailbox.leave(1, false, b"nor here"));
        assert_eq!([mailbox.take_lost(), mailbox.take_lost()], [2, 0]);
        let letters = mailbox.take();
        assert_eq!(letters.len(), PLACES);
        assert_eq!(letters[3], MailLine { process: 3, last: true, text: "line 3".into() });
        assert!(
            letters.iter().enumerate().all(|(n, l)| l.process == n as u32 && l.last == (n == 3))
        );
        assert!(mailbox.take().is_empty());
        assert!(mailbox.leave(7, false, &[b'x'; 3000]));
        assert_eq!(mailbox.take()[0].text.len(), LINE_BYTES_MAX);
    }

    #[test]
    fn waiter_gets_every_line_of_many_threads() {
        let mailbox = empty();
        let mut letters_read = Vec::new();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                scope.spawn(move || {
                    for n in 0..1000u32 {
                        while !mailbox.leave(thread, false, std::format!("{n}").as_bytes()) {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            while letters_read.len() < 4000 {
                let rung = mailbox.rung();
                let new = mailbox.take();
                if new.is_empty() {
                    mailbox.wait(rung);
                }
                letters_read.extend(new);
            }
        });
        for thread in 0..4 {
            let texts: Vec<_> = letters_read
                .iter()
                .filter(|l| l.process == thread)
                .map(|l| l.text.parse::<u32>().unwrap())
                .collect();
            assert_eq!(texts, (0..1000).collect::<Vec<u32>>());
        }
    }
}
