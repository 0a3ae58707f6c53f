//! What the kernel leaves on the stack of a new program: the arguments, the environment, and the
//! auxiliary vector (`fs/binfmt_elf.c`, `create_elf_tables`).
use core::ffi::{CStr, c_char};
use core::sync::atomic::{AtomicPtr, Ordering::Relaxed};

/// The arguments, environment and auxiliary vector of this process, where the kernel put them.
#[derive(Copy, Clone)]
pub struct InitialStack {
    count: usize,
    arguments: *mut *mut c_char,
}

impl InitialStack {
    /// Describes the stack whose array of `count` arguments is at `arguments`.
    ///
    /// # Safety
    /// - `arguments` is the array that the kernel left, and has `count` arguments.
    /// - The array and the two behind it stay in place while this value lives, and only one thread
    ///   of this library uses them. Threads of the program may replace entries of the environment.
    pub unsafe fn new(count: usize, arguments: *mut *mut c_char) -> InitialStack {
        InitialStack { count, arguments }
    }

    /// Returns the stack pointer with which the kernel started this process.
    pub fn lowest(&self) -> usize {
        self.arguments as usize - size_of::<usize>()
    }

    /// Returns the arguments with their final zeros.
    pub fn arguments(&self) -> impl Iterator<Item = &'static [u8]> {
        // SAFETY: `new` was promised that the array has `count` arguments, which the kernel put on
        // the stack, and that only one thread uses it.
        let all = (0..self.count).map(|n| unsafe { *self.arguments.add(n) });
        // SAFETY: each is a string, as said above.
        all.map(|word| unsafe { CStr::from_ptr(word).to_bytes_with_nul() })
    }

    /// Returns the array of the environment, which ends in a null word.
    pub fn environment(&self) -> *mut *mut c_char {
        // SAFETY: `new` was promised that the array has `count` arguments. A null word and the
        // environment follow them.
        unsafe { self.arguments.add(self.count + 1) }
    }

    /// Returns the entries of the environment with their final zeros.
    pub fn entries(&self) -> impl Iterator<Item = &'static [u8]> {
        let all = self.environment();
        // SAFETY: the array ends in a null word, and each entry is a string, which the kernel or the
        // program put there. `new` was promised that no other thread does more than replace words,
        // which are read as atomics.
        unsafe {
            let word = move |n| AtomicPtr::from_ptr(all.add(n)).load(Relaxed);
            let words = (0..).map(word).take_while(|word| !word.is_null());
            words.map(|word| CStr::from_ptr(word).to_bytes_with_nul())
        }
    }

    /// Returns the value of the first variable of this name.
    pub fn variable(&self, name: &[u8]) -> Option<&'static [u8]> {
        self.entries().find_map(|entry| {
            entry.strip_prefix(name)?.strip_prefix(b"=").map(|value| &value[..value.len() - 1])
        })
    }

    /// Removes the last variable of this name, and returns its entry with the final zero. What
    /// follows it moves down by a word, the auxiliary vector too. So nothing may have noted the
    /// vector's address before.
    pub fn take(&self, name: &[u8]) -> Option<&'static [u8]> {
        let is_it = |entry: &[u8]| entry.strip_prefix(name).is_some_and(|rest| rest[0] == b'=');
        let all = self.environment();
        let entries = self.entries().enumerate().filter(|(_, entry)| is_it(entry));
        let (at, entry) = entries.last()?;
        let end = self.vector_pairs().as_ptr_range().end.cast::<*mut c_char>();
        // SAFETY: everything from the entry to the end of the vector is on the kernel's stack, and
        // only one thread uses it.
        unsafe {
            let from = all.add(at + 1).cast_const();
            core::ptr::copy(from, all.add(at), end.offset_from(from) as usize);
        }
        Some(entry)
    }

    /// Replaces the value of this kind in the auxiliary vector, if it is there.
    pub fn set_auxiliary(&self, kind: u64, value: usize) {
        if let Some(pair) = self.find_auxiliary(kind) {
            // SAFETY: the pair lies in the vector, and only one thread uses it.
            unsafe { (*pair)[1] = value };
        }
    }

    /// Returns the value of this kind in the auxiliary vector.
    pub fn auxiliary(&self, kind: u64) -> Option<usize> {
        // SAFETY: the pair lies in the vector, and only one thread uses it.
        self.find_auxiliary(kind).map(|pair| unsafe { (*pair)[1] })
    }

    fn find_auxiliary(&self, kind: u64) -> Option<*mut [usize; 2]> {
        let vector = self.vector();
        // SAFETY: the vector ends in a pair of kind 0, and only one thread uses it.
        unsafe {
            let mut pairs = (0..).map(|n| vector.add(n)).take_while(|pair| (**pair)[0] != 0);
            pairs.find(|pair| (**pair)[0] == kind as usize)
        }
    }

    /// Returns the auxiliary vector with its last pair. The slice is valid until the vector changes.
    pub fn vector_pairs(&self) -> &'static [[usize; 2]] {
        let vector = self.vector();
        // SAFETY: the vector ends in a pair of kind 0, and only one thread uses it.
        unsafe {
            let pairs = (0..).take_while(|n| (*vector.add(*n))[0] != 0).count() + 1;
            core::slice::from_raw_parts(vector, pairs)
        }
    }

    /// Returns the auxiliary vector, pairs of a kind and a value. The last one is of kind 0.
    pub fn vector(&self) -> *mut [usize; 2] {
        let all = self.environment();
        // SAFETY: the vector follows the null word behind the environment.
        unsafe { all.add(self.entries().count() + 1).cast() }
    }
}
