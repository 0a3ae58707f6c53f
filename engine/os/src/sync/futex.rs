//! Futex locks: a mutex, a condition variable and a readers-writer lock.
//!
//! The mutex is the three-state lock of Ulrich Drepper's "Futexes Are Tricky" (mutex 3): 0 free, 1
//! held, 2 held and threads may wait. Uncontended lock and unlock cost one atomic each and no
//! system call.
use crate::clock::now_ns;
use alloc::boxed::Box;
use core::cell::UnsafeCell;
use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicU32, Ordering::*};
use rustix::thread::{Timespec, futex};

fn wait_while(word: &AtomicU32, value: u32) {
    // EAGAIN (the word changed) and EINTR both mean: look again. The caller loops.
    let _ = futex::wait(word, futex::Flags::PRIVATE, value, None);
}

fn timespec(ns: u64) -> Timespec {
    Timespec { tv_sec: (ns / 1_000_000_000) as i64, tv_nsec: (ns % 1_000_000_000) as i64 }
}

fn wake(word: &AtomicU32, count: u32) {
    let _ = futex::wake(word, futex::Flags::PRIVATE, count);
}

/// Turns of polling before a thread sleeps. Short sections end within them.
const TURNS: u32 = 60;

/// Turns of polling of readers and writers: as long as a move of pages that interrupts another CPU,
/// 10 to 30 us. To sleep and be woken from another CPU takes longer (80 us a round trip on an idle
/// virtual machine).
const RW_TURNS: u32 = 1000;

/// A mutual-exclusion lock.
pub struct Mutex<T> {
    state: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the lock gives `&mut T` to one holder at a time, so sharing the lock only moves `T`
// between threads.
unsafe impl<T: Send> Sync for Mutex<T> {}
// SAFETY: owning the lock is owning the value.
unsafe impl<T: Send> Send for Mutex<T> {}

/// Holds a [`Mutex`] until dropped.
pub struct MutexGuard<'a, T> {
    lock: &'a Mutex<T>,
    /// It gives out `&T`, so threads may share it only if they may share a `T`.
    value: PhantomData<T>,
}

impl<'a, T> MutexGuard<'a, T> {
    /// Makes the guard of a lock that the caller holds.
    fn of(lock: &'a Mutex<T>) -> Self {
        MutexGuard { lock, value: PhantomData }
    }
}

impl<T: Default> Default for Mutex<T> {
    fn default() -> Self {
        Mutex::new(T::default())
    }
}

impl<T> Mutex<T> {
    /// Makes a free mutex.
    pub const fn new(value: T) -> Self {
        Mutex { state: AtomicU32::new(0), value: UnsafeCell::new(value) }
    }

    /// Makes `count` free mutexes whose values are made of zero bytes. Where the allocator has
    /// memory that was never touched (see [`crate::memory::arena`]), they take none until they are
    /// used.
    ///
    /// # Safety
    /// - All bytes zero is a valid `T`.
    pub unsafe fn zeroed(count: usize) -> Box<[Self]> {
        let locks = Box::new_zeroed_slice(count);
        // SAFETY: a lock is its word, which is free as zero, and the value, for which the caller
        // vouches; padding may have any bytes.
        unsafe { locks.assume_init() }
    }

    /// Waits for the lock.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        if self.state.compare_exchange(0, 1, Acquire, Relaxed).is_err() {
            self.lock_slow();
        }
        MutexGuard::of(self)
    }

    #[cold]
    fn lock_slow(&self) {
        for _ in 0..TURNS {
            if self.state.load(Relaxed) == 0
                && self.state.compare_exchange(0, 1, Acquire, Relaxed).is_ok()
            {
                return;
            }
            core::hint::spin_loop();
        }
        while self.state.swap(2, Acquire) != 0 {
            wait_while(&self.state, 2);
        }
    }

    /// Takes the lock if it is free.
    #[inline]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.state.compare_exchange(0, 1, Acquire, Relaxed).ok().map(|_| MutexGuard::of(self))
    }

    /// Ends a lock whose guard was forgotten.
    ///
    /// # Safety
    /// - A guard of this mutex was given to `core::mem::forget`, and this is called once for it.
    pub unsafe fn unlock(&self) {
        drop(MutexGuard::of(self));
    }

    /// Returns the value, also if the lock is held.
    ///
    /// # Safety
    /// - No other thread uses the value while the reference lives: the holder, if there is one, is
    ///   not in this process.
    pub unsafe fn peek(&self) -> &T {
        // SAFETY: by the caller's promise no other thread uses the value.
        unsafe { &*self.value.get() }
    }

    /// Returns the value for changing, also if the lock is held.
    ///
    /// # Safety
    /// - No other thread uses the value while the reference lives: the holder, if there is one, is
    ///   not in this process.
    /// - No other reference to the value is alive.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn peek_mut(&self) -> &mut T {
        // SAFETY: by the caller's promise no other thread uses the value, and this is the only
        // reference.
        unsafe { &mut *self.value.get() }
    }

    /// Returns whether a thread holds the lock, or has ended while it held it.
    pub fn is_held(&self) -> bool {
        self.state.load(SeqCst) != 0
    }

    /// Makes the lock free, also if it is held.
    ///
    /// # Safety
    /// - No living thread holds it or waits for it: this is a child of fork, or the threads have
    ///   ended.
    pub unsafe fn reset(&self) {
        self.state.store(0, SeqCst);
    }

    /// Returns the value without locking: `&mut self` proves that the lock is free.
    pub fn get_mut(&mut self) -> &mut T {
        self.value.get_mut()
    }
}

impl<T> Drop for MutexGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if self.lock.state.swap(0, Release) == 2 {
            wake(&self.lock.state, 1);
        }
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the guard exists only while its thread holds the lock, so no `&mut T` is alive
        // elsewhere.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard exists only while its thread holds the lock, so no other `&mut T` is
        // alive, and `&mut self` makes this borrow of the value unique.
        unsafe { &mut *self.lock.value.get() }
    }
}

/// A condition variable. Waiters sleep in the kernel; a notify with no waiter costs one load.
pub struct Condvar {
    sequence: AtomicU32,
    waiters: AtomicU32,
}

impl Default for Condvar {
    fn default() -> Self {
        Condvar::new()
    }
}

impl Condvar {
    /// Makes one without waiters.
    pub const fn new() -> Self {
        Condvar { sequence: AtomicU32::new(0), waiters: AtomicU32::new(0) }
    }

    /// Releases the guard, sleeps until a notify, and takes the lock again. May wake spuriously:
    /// call it in a loop.
    ///
    /// No wake-up is lost if the notifier changed the condition under the same lock.
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.wait_by(guard, wait_while)
    }

    /// Waits like [`Condvar::wait`], but sleeps for at most about `ns` nanoseconds.
    pub fn wait_within<'a, T>(&self, guard: MutexGuard<'a, T>, ns: u64) -> MutexGuard<'a, T> {
        self.wait_by(guard, |word, sequence| {
            // ETIMEDOUT means: look again, too.
            let _ = futex::wait(word, futex::Flags::PRIVATE, sequence, Some(&timespec(ns)));
        })
    }

    fn wait_by<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        sleep: impl FnOnce(&AtomicU32, u32),
    ) -> MutexGuard<'a, T> {
        let lock = guard.lock;
        self.waiters.fetch_add(1, SeqCst);
        let sequence = self.sequence.load(SeqCst);
        drop(guard);
        sleep(&self.sequence, sequence);
        self.waiters.fetch_sub(1, SeqCst);
        lock.lock()
    }

    /// Wakes every waiter.
    pub fn notify_all(&self) {
        self.notify(i32::MAX as u32);
    }

    /// Wakes one waiter.
    pub fn notify_one(&self) {
        self.notify(1);
    }

    fn notify(&self, most: u32) {
        if self.waiters.load(SeqCst) > 0 {
            self.sequence.fetch_add(1, SeqCst);
            wake(&self.sequence, most);
        }
    }
}

const WRITER: u32 = 1 << 31;
const WRITER_WAITS: u32 = 1 << 30;
const READER_WAITS: u32 = 1 << 29;
const READERS: u32 = READER_WAITS - 1;

/// A readers-writer lock that prefers a waiting writer.
///
/// A thread that holds it for reading must not take it for reading again: with a writer waiting,
/// that would deadlock.
pub struct RwLock<T> {
    state: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: readers share `&T` between threads (so `T: Sync`), the writer moves it (so `T: Send`).
unsafe impl<T: Send + Sync> Sync for RwLock<T> {}
// SAFETY: owning the lock is owning the value.
unsafe impl<T: Send> Send for RwLock<T> {}

/// Holds an [`RwLock`] for reading.
pub struct ReadGuard<'a, T> {
    lock: &'a RwLock<T>,
}
/// Holds an [`RwLock`] for writing.
pub struct WriteGuard<'a, T> {
    lock: &'a RwLock<T>,
}

impl<T> RwLock<T> {
    /// Makes a free lock.
    pub const fn new(value: T) -> Self {
        RwLock { state: AtomicU32::new(0), value: UnsafeCell::new(value) }
    }

    /// Waits until no writer holds the lock or waits for it.
    pub fn read(&self) -> ReadGuard<'_, T> {
        let mut turns = RW_TURNS;
        loop {
            let s = self.state.load(Relaxed);
            if s & (WRITER | WRITER_WAITS) != 0 {
                if turns > 0 {
                    turns -= 1;
                    core::hint::spin_loop();
                } else if s & READER_WAITS != 0
                    || self
                        .state
                        .compare_exchange_weak(s, s | READER_WAITS, Relaxed, Relaxed)
                        .is_ok()
                {
                    wait_while(&self.state, s | READER_WAITS);
                }
            } else if self.state.compare_exchange_weak(s, s + 1, Acquire, Relaxed).is_ok() {
                return ReadGuard { lock: self };
            }
        }
    }

    /// Takes the lock for reading if no writer holds it or waits for it.
    pub fn try_read(&self) -> Option<ReadGuard<'_, T>> {
        let mut s = self.state.load(Relaxed);
        while s & (WRITER | WRITER_WAITS) == 0 {
            match self.state.compare_exchange_weak(s, s + 1, Acquire, Relaxed) {
                Ok(_) => return Some(ReadGuard { lock: self }),
                Err(now) => s = now,
            }
        }
        None
    }

    /// Waits until no thread holds the lock.
    pub fn write(&self) -> WriteGuard<'_, T> {
        self.write_until(|| None).expect("waits for ever")
    }

    /// Waits like [`RwLock::write`], but gives up after about `ns` nanoseconds.
    pub fn write_within(&self, ns: u64) -> Option<WriteGuard<'_, T>> {
        let end = now_ns() + ns;
        self.write_until(|| Some(end.saturating_sub(now_ns())))
    }

    /// Waits as long as `left` returns nanoseconds that remain, or without end if it returns
    /// `None`.
    fn write_until(&self, left: impl Fn() -> Option<u64>) -> Option<WriteGuard<'_, T>> {
        let mut turns = RW_TURNS;
        loop {
            let s = self.state.load(Relaxed);
            if s & (WRITER | READERS) == 0 {
                // Other waiters set their marks again when they wake and find the lock held.
                if self
                    .state
                    .compare_exchange_weak(s, s & READER_WAITS | WRITER, Acquire, Relaxed)
                    .is_ok()
                {
                    return Some(WriteGuard { lock: self });
                }
            } else if turns > 0 {
                turns -= 1;
                core::hint::spin_loop();
            } else if s & WRITER_WAITS != 0
                || self.state.compare_exchange_weak(s, s | WRITER_WAITS, Relaxed, Relaxed).is_ok()
            {
                let time_left = left();
                if time_left == Some(0) {
                    // All waiters look again, and another writer sets the mark anew.
                    self.state.fetch_and(!WRITER_WAITS, Relaxed);
                    wake(&self.state, i32::MAX as u32);
                    return None;
                }
                let time = time_left.map(timespec);
                let _ = futex::wait(
                    &self.state,
                    futex::Flags::PRIVATE,
                    s | WRITER_WAITS,
                    time.as_ref(),
                );
            }
        }
    }
}

impl<T> RwLock<T> {
    /// Returns whether a thread holds the lock, or has ended while it held it.
    pub fn is_held(&self) -> bool {
        self.state.load(SeqCst) & (WRITER | READERS) != 0
    }

    /// Returns whether a thread holds the lock for writing, or has ended while it did.
    pub fn is_written(&self) -> bool {
        self.state.load(SeqCst) & WRITER != 0
    }

    /// Makes the lock free. Marks of threads that have ended while they waited are gone.
    ///
    /// # Safety
    /// - No living thread holds it or waits for it.
    pub unsafe fn reset(&self) {
        self.state.store(0, SeqCst);
    }

    /// Returns the value, also if the lock is held.
    ///
    /// # Safety
    /// - No thread changes the value while the reference lives.
    pub unsafe fn peek(&self) -> &T {
        // SAFETY: by the caller's promise only shared references exist.
        unsafe { &*self.value.get() }
    }

    /// Ends a write lock whose guard was forgotten.
    ///
    /// # Safety
    /// - A write guard of this lock was given to `core::mem::forget`, and this is called once for
    ///   it.
    pub unsafe fn unlock_write(&self) {
        drop(WriteGuard { lock: self });
    }
}

impl<T> Drop for ReadGuard<'_, T> {
    fn drop(&mut self) {
        let before = self.lock.state.fetch_sub(1, Release);
        if before & READERS == 1 && before & WRITER_WAITS != 0 {
            wake(&self.lock.state, i32::MAX as u32);
        }
    }
}

impl<T> Drop for WriteGuard<'_, T> {
    fn drop(&mut self) {
        if self.lock.state.swap(0, Release) & (WRITER_WAITS | READER_WAITS) != 0 {
            wake(&self.lock.state, i32::MAX as u32);
        }
    }
}

impl<T> Deref for ReadGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: while a reader holds the lock no writer does, so only shared references exist.
        unsafe { &*self.lock.value.get() }
    }
}
impl<T> Deref for WriteGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: while the writer holds the lock, no other thread has a reference.
        unsafe { &*self.lock.value.get() }
    }
}
impl<T> DerefMut for WriteGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: while the writer holds the lock, no other thread has a reference; `&mut self`
        // makes this borrow unique.
        unsafe { &mut *self.lock.value.get() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::cell::Cell;
    use std::sync::Arc;

    /// A guard gives out `&T`: two threads could change a `Cell` at once. If a guard of a `Cell`
    /// were `Sync`, two implementations below would match, and this would not compile.
    #[test]
    fn guard_of_what_threads_may_not_share_is_not_shared() {
        trait Unclear<A> {
            fn is_not_sync() {}
        }
        impl<T: ?Sized> Unclear<()> for T {}
        impl<T: ?Sized + Sync> Unclear<u8> for T {}
        <MutexGuard<'static, Cell<u8>> as Unclear<_>>::is_not_sync();
        fn is_sync<T: Sync>() {}
        is_sync::<MutexGuard<'static, u8>>();
    }

    #[test]
    fn mutex_and_condvar_lose_no_wakeup() {
        let pair = Arc::new((Mutex::new(0u32), Condvar::new()));
        let threads: Vec<_> = (0..4)
            .map(|me| {
                let s = pair.clone();
                std::thread::spawn(move || {
                    for round in 0..500 {
                        let mut turn = s.0.lock();
                        while *turn % 4 != me {
                            turn = s.1.wait(turn);
                        }
                        assert_eq!(*turn, round * 4 + me);
                        *turn += 1;
                        s.1.notify_all();
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(*pair.0.lock(), 2000);
    }

    #[test]
    fn a_writer_that_gives_up_lets_the_others_in() {
        let lock = Arc::new(RwLock::new(0u64));
        let guard = lock.read();
        let writer = {
            let lock = lock.clone();
            std::thread::spawn(move || *lock.write() += 1)
        };
        let giving_up = {
            let lock = lock.clone();
            std::thread::spawn(move || lock.write_within(20_000_000).is_none())
        };
        // It is queued behind the marks of both.
        let reader = {
            let lock = lock.clone();
            std::thread::spawn(move || *lock.read())
        };
        assert!(giving_up.join().unwrap());
        drop(guard);
        writer.join().unwrap();
        assert!(reader.join().unwrap() <= 1);
        let guard = lock.read();
        assert!(lock.write_within(0).is_none());
        assert!(lock.try_read().is_some(), "no thread waits any more");
        drop(guard);
        *lock.write_within(0).unwrap() += 1;
        assert_eq!(*lock.read(), 2);
    }

    #[test]
    fn rwlock_keeps_readers_and_writers_apart() {
        let lock = Arc::new(RwLock::new((0u64, 0u64)));
        let threads: Vec<_> = (0..4)
            .map(|me| {
                let lock = lock.clone();
                std::thread::spawn(move || {
                    for round in 0..5000 {
                        if me < 2 {
                            let mut w = match lock.write_within(round % 3 * 10_000) {
                                Some(w) => w,
                                None => lock.write(),
                            };
                            w.0 += 1;
                            w.1 += 1;
                        } else {
                            let r = lock.read();
                            assert_eq!(r.0, r.1);
                        }
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(lock.read().0, 10_000);
    }
}
