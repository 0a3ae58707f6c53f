//! The locks of the models, over shuttle's.
use alloc::boxed::Box;
use core::ops::{Deref, DerefMut};

/// Most time that passes in one wait.
const PASS_MAX_NS: u64 = 1_000_000;

/// A mutex whose schedule the model checker chooses.
#[derive(Default)]
pub struct Mutex<T>(shuttle::sync::Mutex<T>);
/// Holds a [`Mutex`] until dropped.
pub struct MutexGuard<'a, T>(shuttle::sync::MutexGuard<'a, T>, &'a Mutex<T>);

impl<T> Mutex<T> {
    /// Makes a free mutex.
    pub const fn new(value: T) -> Self {
        Mutex(shuttle::sync::Mutex::new(value))
    }
    /// Makes `count` free mutexes whose values are made of zero bytes.
    ///
    /// # Safety
    /// - All bytes zero is a valid `T`.
    pub unsafe fn zeroed(count: usize) -> Box<[Self]> {
        // SAFETY: the caller vouches for the value.
        (0..count).map(|_| Mutex::new(unsafe { core::mem::zeroed() })).collect()
    }
    /// Waits for the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard(self.0.lock().unwrap_or_else(|e| e.into_inner()), self)
    }
    /// Takes the lock if it is free.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.0.try_lock().ok().map(|guard| MutexGuard(guard, self))
    }
    /// Returns the value, without locking.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(|e| e.into_inner())
    }
}
impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}
impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

/// A condition variable whose schedule the model checker chooses.
#[derive(Default)]
pub struct Condvar(shuttle::sync::Condvar);

impl Condvar {
    /// Makes one without waiters.
    pub const fn new() -> Self {
        Condvar(shuttle::sync::Condvar::new())
    }
    /// Releases the guard, waits, takes the lock again. May wake spuriously.
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        MutexGuard(self.0.wait(guard.0).unwrap_or_else(|e| e.into_inner()), guard.1)
    }
    /// Wakes at once, after at most [`PASS_MAX_NS`] of simulated time. So time passes for threads
    /// that wait for nothing else.
    pub fn wait_within<'a, T>(&self, guard: MutexGuard<'a, T>, ns: u64) -> MutexGuard<'a, T> {
        let lock = guard.1;
        drop(guard);
        crate::thread::sleep_ns(ns.min(PASS_MAX_NS));
        lock.lock()
    }
    /// Wakes every waiter.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
    /// Wakes one waiter.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }
}

/// A readers-writer lock whose schedule the model checker chooses.
#[derive(Default)]
pub struct RwLock<T>(shuttle::sync::RwLock<T>);
/// Holds an [`RwLock`] for reading.
pub struct ReadGuard<'a, T>(shuttle::sync::RwLockReadGuard<'a, T>);
/// Holds an [`RwLock`] for writing.
pub struct WriteGuard<'a, T>(shuttle::sync::RwLockWriteGuard<'a, T>);

/// For a fork. Not modelled.
impl<T> Mutex<T> {
    /// Ends a lock whose guard was forgotten.
    ///
    /// # Safety
    /// - A guard of this mutex was given to `core::mem::forget`, and this is called once for it.
    pub unsafe fn unlock(&self) {
        panic!("no model forks")
    }
    /// Returns the value, also if the lock is held.
    ///
    /// # Safety
    /// - No other thread uses the value while the reference lives.
    pub unsafe fn peek(&self) -> &T {
        panic!("no model forks")
    }
    /// Returns the value for changing, also if the lock is held.
    ///
    /// # Safety
    /// - No other thread uses the value while the reference lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn peek_mut(&self) -> &mut T {
        panic!("no model forks")
    }
    /// Returns whether a thread holds the lock, or has ended while it held it.
    pub fn is_held(&self) -> bool {
        panic!("no model forks")
    }
    /// Makes the lock free, also if it is held.
    ///
    /// # Safety
    /// - No living thread holds it or waits for it.
    pub unsafe fn reset(&self) {
        panic!("no model forks")
    }
}

impl<T> RwLock<T> {
    /// Makes a free lock.
    pub const fn new(value: T) -> Self {
        RwLock(shuttle::sync::RwLock::new(value))
    }
    /// Waits until no writer holds the lock.
    pub fn read(&self) -> ReadGuard<'_, T> {
        ReadGuard(self.0.read().unwrap_or_else(|e| e.into_inner()))
    }
    /// Takes the lock for reading if no writer holds it.
    pub fn try_read(&self) -> Option<ReadGuard<'_, T>> {
        self.0.try_read().ok().map(ReadGuard)
    }
    /// Waits without a limit, because models have no time.
    pub fn write_within(&self, _ns: u64) -> Option<WriteGuard<'_, T>> {
        Some(self.write())
    }
    /// Waits until no thread holds the lock.
    pub fn write(&self) -> WriteGuard<'_, T> {
        WriteGuard(self.0.write().unwrap_or_else(|e| e.into_inner()))
    }
}
/// For a fork. Not modelled.
impl<T> RwLock<T> {
    /// Returns whether a thread holds the lock, or has ended while it held it.
    pub fn is_held(&self) -> bool {
        panic!("no model forks")
    }
    /// Returns whether a thread holds the lock for writing, or has ended while it did.
    pub fn is_written(&self) -> bool {
        panic!("no model forks")
    }
    /// Makes the lock free.
    ///
    /// # Safety
    /// - No living thread holds it or waits for it.
    pub unsafe fn reset(&self) {
        panic!("no model forks")
    }
    /// Returns the value, also if the lock is held.
    ///
    /// # Safety
    /// - No thread changes the value while the reference lives.
    pub unsafe fn peek(&self) -> &T {
        panic!("no model forks")
    }
    /// Ends a write lock whose guard was forgotten.
    ///
    /// # Safety
    /// - A write guard of this lock was given to `core::mem::forget`, and this is called once for
    ///   it.
    pub unsafe fn unlock_write(&self) {
        panic!("no model forks")
    }
}

impl<T> Deref for ReadGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}
impl<T> Deref for WriteGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}
impl<T> DerefMut for WriteGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}
