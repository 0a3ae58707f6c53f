//! Lines that the processes of a run leave for whoever started it, in shared memory.
//!
//! A line is left by one who has taken a free place for it (`TAKEN`), and is read when it is whole
//! (`WHOLE`). A process that is killed while it leaves one costs its place, and no line of anybody
//! else.
use alloc::string::String;
use alloc::vec::Vec;
use core::sync::atomic::{
    AtomicU8, AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
};
use core::sync::atomic::{Ordering::Release, Ordering::SeqCst};
use memfold_os::Errno;
use rustix::thread::futex;

/// Lines that may wait to be read.
const PLACES: usize = 64;
/// Bytes of a line; the rest is cut off.
pub const LINE_BYTES_MAX: usize = 1000;

const FREE: u32 = 0;
const TAKEN: u32 = 1;
const WHOLE: u32 = 2;

/// The lines. All zeros are an empty one.
#[repr(C)]
pub struct Mailbox {
    /// Raised for each line that is whole.
    bell: AtomicU32,
    /// Lines that had no room.
    lost: AtomicU32,
    /// Numbers the lines.
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

/// A line that was left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MailLine {
    /// The process that has left it, by the number that it gave.
    pub process: u32,
    /// It is the last that the process says: it ends.
    pub last: bool,
    /// The line, without its end.
    pub text: String,
}

impl Mailbox {
    /// Leaves a line. `false` if there is no room for it, which [`Mailbox::take_lost`] tells.
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

    /// Takes what was left, in its order: a thread's later line never comes before an earlier one.
    pub fn take(&self) -> Vec<MailLine> {
        let mut found = Vec::new();
        self.collect(&mut found, u64::MAX);
        // One that was left at a place already passed, before another that was found.
        let end = found.iter().map(|(number, _)| *number).max().unwrap_or(0);
        // No more often than there are places: a process may write there what it likes.
        let _ = self.places.iter().take_while(|_| self.collect(&mut found, end)).count();
        found.sort_by_key(|(number, _)| *number);
        found.into_iter().map(|(_, letter)| letter).collect()
    }

    /// How many lines had no room since this was asked last.
    pub fn take_lost(&self) -> u32 {
        self.lost.swap(0, Relaxed)
    }

    /// Takes what has a number below `end`; whether there was any.
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

    /// How often the bell has rung: for [`Mailbox::wait`].
    pub fn rung(&self) -> u32 {
        self.bell.load(SeqCst)
    }

    /// Sleeps until the bell rings; not at all if it has rung since it had `rung` so often.
    pub fn wait(&self, rung: u32) {
        // Other processes ring it, so it isn't private. Woken for nothing, the caller looks for
        // nothing.
        let _: Result<(), Errno> = futex::wait(&self.bell, futex::Flags::empty(), rung, None);
    }

    /// Wakes who waits.
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
        // SAFETY: atomics and a number, all of which may be zeros.
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
        let found = mailbox.take();
        assert_eq!(found.len(), PLACES);
        assert_eq!(found[3], MailLine { process: 3, last: true, text: "line 3".into() });
        assert!(found.iter().enumerate().all(|(n, l)| l.process == n as u32 && l.last == (n == 3)));
        assert!(mailbox.take().is_empty());
        assert!(mailbox.leave(7, false, &[b'x'; 3000]));
        assert_eq!(mailbox.take()[0].text.len(), LINE_BYTES_MAX);
    }

    #[test]
    fn waiter_gets_every_line_of_many_threads() {
        let mailbox = empty();
        let mut read = Vec::new();
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
            while read.len() < 4000 {
                let rung = mailbox.rung();
                let new = mailbox.take();
                if new.is_empty() {
                    mailbox.wait(rung);
                }
                read.extend(new);
            }
        });
        for thread in 0..4 {
            let texts: Vec<_> = read
                .iter()
                .filter(|l| l.process == thread)
                .map(|l| l.text.parse::<u32>().unwrap())
                .collect();
            assert_eq!(texts, (0..1000).collect::<Vec<u32>>());
        }
    }
}
