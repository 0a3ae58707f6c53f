//! The locks of the models, over shuttle's.
use alloc::boxed::Box;
use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};

/// Most time that passes in one wait.
const PASS_MAX_NS: u64 = 1_000_000;

type InnerGuard<'a> = shuttle::sync::MutexGuard<'a, ()>;
type InnerWrite<'a> = shuttle::sync::RwLockWriteGuard<'a, ()>;

/// A mutex whose schedule the model checker chooses.
///
/// The checker's own guard lies in the lock while it is held, so that a thread may forget the guard
/// and unlock it later.
pub struct Mutex<T> {
    lock: shuttle::sync::Mutex<()>,
    guard: UnsafeCell<Option<InnerGuard<'static>>>,
    value: UnsafeCell<T>,
}
/// Holds a [`Mutex`] until dropped.
pub struct MutexGuard<'a, T>(&'a Mutex<T>);

// SAFETY: the lock gives `&mut T` to one holder at a time, and only the holder uses its guard.
unsafe impl<T: Send> Sync for Mutex<T> {}
// SAFETY: owning the lock is owning the value. A free lock has no guard.
unsafe impl<T: Send> Send for Mutex<T> {}

impl<T: Default> Default for Mutex<T> {
    fn default() -> Self {
        Mutex::new(T::default())
    }
}

impl<T> Mutex<T> {
    /// Makes a free mutex.
    pub const fn new(value: T) -> Self {
        Mutex {
            lock: shuttle::sync::Mutex::new(()),
            guard: UnsafeCell::new(None),
            value: UnsafeCell::new(value),
        }
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
        self.enter(self.lock.lock().unwrap_or_else(|e| e.into_inner()))
    }
    /// Takes the lock if it is free.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.lock.try_lock().ok().map(|guard| self.enter(guard))
    }
    fn enter<'a>(&'a self, guard: InnerGuard<'a>) -> MutexGuard<'a, T> {
        // SAFETY: the guard leaves the lock when that is released, so it lives no longer than before.
        let guard = unsafe { core::mem::transmute::<InnerGuard<'a>, InnerGuard<'static>>(guard) };
        // SAFETY: this thread holds the lock, so no other one uses the place.
        unsafe { *self.guard.get() = Some(guard) };
        MutexGuard(self)
    }
    /// Takes the checker's guard out.
    ///
    /// # Safety
    /// - The caller holds the lock.
    unsafe fn leave(&self) -> InnerGuard<'_> {
        // SAFETY: by the caller's promise no other thread uses the place.
        unsafe { (*self.guard.get()).take() }.expect("the lock is held")
    }
    /// Returns the value, without locking.
    pub fn get_mut(&mut self) -> &mut T {
        self.value.get_mut()
    }
    /// Ends a lock whose guard was forgotten.
    ///
    /// # Safety
    /// - A guard of this mutex was given to `core::mem::forget`, and this is called once for it.
    pub unsafe fn unlock(&self) {
        drop(MutexGuard(self));
    }
    /// Returns the value, also if the lock is held.
    ///
    /// # Safety
    /// - No other thread uses the value while the reference lives.
    pub unsafe fn peek(&self) -> &T {
        // SAFETY: by the caller's promise no other thread uses the value.
        unsafe { &*self.value.get() }
    }
    /// Returns the value for changing, also if the lock is held.
    ///
    /// # Safety
    /// - No other thread uses the value while the reference lives, and there is no other reference.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn peek_mut(&self) -> &mut T {
        // SAFETY: by the caller's promise this is the only reference.
        unsafe { &mut *self.value.get() }
    }
    /// Returns whether a thread holds the lock, or has ended while it held it.
    pub fn is_held(&self) -> bool {
        self.lock.try_lock().is_err()
    }
    /// Makes the lock free, also if it is held.
    ///
    /// # Safety
    /// - No living thread holds it or waits for it.
    pub unsafe fn reset(&self) {
        panic!("no model has a child of fork")
    }
}
impl<T> Drop for MutexGuard<'_, T> {
    fn drop(&mut self) {
        // SAFETY: this is the guard, so its thread holds the lock.
        drop(unsafe { self.0.leave() });
    }
}
impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the guard exists only while its thread holds the lock.
        unsafe { &*self.0.value.get() }
    }
}
impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard exists only while its thread holds the lock, and is borrowed uniquely.
        unsafe { &mut *self.0.value.get() }
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
        let lock = guard.0;
        core::mem::forget(guard);
        // SAFETY: the guard was forgotten, so this thread holds the lock.
        let inner = unsafe { lock.leave() };
        lock.enter(self.0.wait(inner).unwrap_or_else(|e| e.into_inner()))
    }
    /// Wakes at once, after at most [`PASS_MAX_NS`] of simulated time. So time passes for threads
    /// that wait for nothing else.
    pub fn wait_within<'a, T>(&self, guard: MutexGuard<'a, T>, ns: u64) -> MutexGuard<'a, T> {
        let lock = guard.0;
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

/// A readers-writer lock whose schedule the model checker chooses. The checker's own guard of a
/// writer lies in the lock while it is held.
pub struct RwLock<T> {
    lock: shuttle::sync::RwLock<()>,
    guard: UnsafeCell<Option<InnerWrite<'static>>>,
    value: UnsafeCell<T>,
}
/// Holds an [`RwLock`] for reading.
pub struct ReadGuard<'a, T>(
    &'a RwLock<T>,
    #[allow(dead_code)] shuttle::sync::RwLockReadGuard<'a, ()>,
);
/// Holds an [`RwLock`] for writing.
pub struct WriteGuard<'a, T>(&'a RwLock<T>);

// SAFETY: readers share `&T` between threads (so `T: Sync`), the writer moves it (so `T: Send`), and
// only the writer uses its guard.
unsafe impl<T: Send + Sync> Sync for RwLock<T> {}
// SAFETY: owning the lock is owning the value. A free lock has no guard.
unsafe impl<T: Send> Send for RwLock<T> {}

impl<T> RwLock<T> {
    /// Makes a free lock.
    pub const fn new(value: T) -> Self {
        RwLock {
            lock: shuttle::sync::RwLock::new(()),
            guard: UnsafeCell::new(None),
            value: UnsafeCell::new(value),
        }
    }
    /// Waits until no writer holds the lock.
    pub fn read(&self) -> ReadGuard<'_, T> {
        ReadGuard(self, self.lock.read().unwrap_or_else(|e| e.into_inner()))
    }
    /// Takes the lock for reading if no writer holds it.
    pub fn try_read(&self) -> Option<ReadGuard<'_, T>> {
        self.lock.try_read().ok().map(|guard| ReadGuard(self, guard))
    }
    /// Waits without a limit, because no thread holds a lock for long in simulated time.
    pub fn write_within(&self, _ns: u64) -> Option<WriteGuard<'_, T>> {
        Some(self.write())
    }
    /// Waits until no thread holds the lock.
    pub fn write(&self) -> WriteGuard<'_, T> {
        let guard = self.lock.write().unwrap_or_else(|e| e.into_inner());
        // SAFETY: the guard leaves the lock when that is released, so it lives no longer than before.
        let guard = unsafe { core::mem::transmute::<InnerWrite<'_>, InnerWrite<'static>>(guard) };
        // SAFETY: this thread holds the lock for writing, so no other one uses the place.
        unsafe { *self.guard.get() = Some(guard) };
        WriteGuard(self)
    }
    /// Returns whether a thread holds the lock, or has ended while it held it.
    pub fn is_held(&self) -> bool {
        self.lock.try_write().is_err()
    }
    /// Returns whether a thread holds the lock for writing, or has ended while it did.
    pub fn is_written(&self) -> bool {
        self.lock.try_read().is_err()
    }
    /// Makes the lock free.
    ///
    /// # Safety
    /// - No living thread holds it or waits for it.
    pub unsafe fn reset(&self) {
        panic!("no model has a child of fork")
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
        drop(WriteGuard(self));
    }
}

impl<T> Drop for WriteGuard<'_, T> {
    fn drop(&mut self) {
        // SAFETY: this is the guard, so its thread holds the lock, and no other one uses the place.
        let guard = unsafe { (*self.0.guard.get()).take() };
        drop(guard.expect("the lock is held"));
    }
}
impl<T> Deref for ReadGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: while a reader holds the lock no writer does.
        unsafe { &*self.0.value.get() }
    }
}
impl<T> Deref for WriteGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: while the writer holds the lock, no other thread has a reference.
        unsafe { &*self.0.value.get() }
    }
}
impl<T> DerefMut for WriteGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: while the writer holds the lock, no other thread has a reference, and the guard is
        // borrowed uniquely.
        unsafe { &mut *self.0.value.get() }
    }
}
