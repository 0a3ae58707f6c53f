//! One entry of the table, and how it is written down.
use crate::syscalls::operands::{Naming, TEXT_MAX};

/// Who makes a call.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Class {
    /// Made as it is, under a hold of what it names, if anything.
    Plain,
    /// As plain, but one argument is a signal mask that the kernel sets while it waits
    /// ([`Entry::mask`]).
    Masked,
    /// Changes mappings, or gives memory up: made by [`crate::Keeper::change`].
    Mapping,
    /// Actions, masks, frames and stacks of signals.
    Signal,
    /// Makes, ends or replaces a thread or the process, or tells the kernel where it may write later.
    Thread,
    /// Closes descriptors or takes their numbers: the engine's are spared.
    Descriptor,
    /// The memory that it names is used after it has returned, until completions are reaped.
    Asynchronous,
    /// Not in the table: made as it is, and looked at if it says EFAULT.
    Unknown,
}

/// How long the memory is that an argument points to. Numbers name arguments.
#[derive(Copy, Clone, Debug)]
pub(super) enum Size {
    /// So many bytes.
    Bytes(usize),
    /// As many as another argument says.
    Len(u8),
    /// The same where the kernel takes an `int`: a negative one is an error.
    Int(u8),
    /// The same where the kernel takes an `unsigned int`.
    Uint(u8),
    /// So many things, of so many bytes each.
    Items(u8, usize),
    /// The same with an `int`.
    IntItems(u8, usize),
    /// The same with an `unsigned int`.
    UintItems(u8, usize),
    /// As many bytes as the `int` says that another argument points to.
    At(u8),
    /// A socket's address: an `int`, and no more than the largest address has.
    Address(u8),
    /// The same where another argument points to the `int`.
    AddressAt(u8),
    /// A mask of NUMA nodes, of one less than so many bits, in whole words.
    Nodes(u8),
    /// A set of descriptors, of so many bits, in whole words.
    Fds(u8),
}

/// What one argument names; the first number is its own.
#[derive(Copy, Clone)]
pub(super) enum Arg {
    /// The kernel reads there.
    In(u8, Size),
    /// The kernel writes there, and may read.
    Out(u8, Size),
    /// The kernel reads a text up to its null byte: a path, a name.
    Text(u8),
    /// More than this language can say.
    Own(fn(&mut Naming)),
}

const ADDRESS_MAX: usize = 128;
const NO_MASK: u8 = u8::MAX;

/// A system call.
#[derive(Copy, Clone)]
pub struct Entry {
    /// Whether it names memory at all.
    pub names: bool,
    /// Whether it can lend the pages that it names, or have others do so: see `lent.rs`.
    pub lends: bool,
    /// Who makes it.
    pub class: Class,
    mask: u8,
    /// Its number.
    pub number: u16,
    /// Its name.
    pub name: &'static str,
    pub(super) args: &'static [Arg],
}

impl Entry {
    pub(super) const fn new(
        class: Class,
        number: u16,
        name: &'static str,
        args: &'static [Arg],
    ) -> Entry {
        let names = !args.is_empty();
        Entry { names, lends: false, class, mask: NO_MASK, number, name, args }
    }

    pub(super) const fn masked_by(mut self, argument: u8) -> Entry {
        self.mask = argument;
        self
    }

    pub(super) const fn lending(mut self) -> Entry {
        self.lends = true;
        self
    }

    /// Which argument of a [`Class::Masked`] or [`Class::Signal`] call points to a mask of 8 bytes
    /// that the kernel takes; in `pselect6` and `io_pgetevents` it points to that pointer and its
    /// size.
    pub fn mask(&self) -> Option<usize> {
        (self.mask != NO_MASK).then_some(self.mask as usize)
    }
}

/// An entry of the most frequent class.
pub(super) const fn plain(number: u16, name: &'static str, args: &'static [Arg]) -> Entry {
    Entry::new(Class::Plain, number, name, args)
}

impl Size {
    /// The bytes; `None` if the kernel will refuse the call for it.
    fn bytes(self, n: &mut Naming) -> Option<usize> {
        let int = |v: usize| usize::try_from(v as i32).ok();
        let address = |v: usize| int(v).map(|len| len.min(ADDRESS_MAX));
        match self {
            Size::Bytes(bytes) => Some(bytes),
            Size::Len(i) => Some(n.arg(i as usize)),
            Size::Int(i) => int(n.arg(i as usize)),
            Size::Uint(i) => Some(n.int(i as usize) as usize),
            Size::Items(i, each) => n.arg(i as usize).checked_mul(each),
            Size::IntItems(i, each) => int(n.arg(i as usize)).map(|count| count * each),
            Size::UintItems(i, each) => Some(n.int(i as usize) as usize * each),
            Size::At(i) => int(n.half(n.arg(i as usize))? as usize),
            Size::Address(i) => address(n.arg(i as usize)),
            Size::AddressAt(i) => address(n.half(n.arg(i as usize))? as usize),
            Size::Nodes(i) => Some(n.arg(i as usize).saturating_sub(1).div_ceil(64) * 8),
            Size::Fds(i) => int(n.arg(i as usize)).map(|bits| bits.div_ceil(64) * 8),
        }
    }
}

impl Arg {
    /// Names what the argument points to.
    pub fn name(self, n: &mut Naming) {
        let (i, size, write) = match self {
            Arg::In(i, size) => (i, size, false),
            Arg::Out(i, size) => (i, size, true),
            Arg::Text(i) => return n.text(n.arg(i as usize), TEXT_MAX),
            Arg::Own(name) => return name(n),
        };
        let start = n.arg(i as usize);
        if start == 0 {
            return;
        }
        if let Some(bytes) = size.bytes(n) {
            n.touches(start, bytes, write);
        }
    }
}
