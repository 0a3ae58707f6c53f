//! Describes one row of the table of system calls: name, number, operands, and how the call is
//! served.
use crate::frame::SignalContext;
use crate::keeper::{BadAddress, Keeper, NamedSpan};
use crate::record::GateThread;
use crate::syscalls::operands::{Operands, ReadMemory, TEXT_MAX};
use memfold_os::Errno;

/// A system call of the program that has trapped.
pub(crate) struct ProgramCall<'a> {
    /// The owner of the memory.
    pub keeper: &'static Keeper,
    /// The record of the calling thread.
    pub record: &'static GateThread,
    /// The state in which the program continues.
    pub context: &'a mut SignalContext,
    /// The call's number.
    pub nr: usize,
    /// The call's arguments.
    pub args: [usize; 6],
    /// The table of calls.
    pub rows: &'static CallRows,
}

/// The thread of the program for which calls are made.
#[derive(Copy, Clone)]
pub struct CallingThread<'a> {
    /// The owner of the memory.
    pub keeper: &'a Keeper,
    /// The record of the thread.
    pub record: &'a GateThread,
    /// The table of calls.
    pub rows: &'static CallRows,
}

/// A function that serves a call and returns its result.
pub(crate) type CallHandler = fn(&mut ProgramCall) -> isize;

/// The use that a [`ServedBy::Masked`] call makes of the set of signals to which an argument
/// points.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum MaskUse {
    /// The kernel blocks the set while the call waits.
    Blocked,
    /// The kernel blocks the set while the call waits. The argument points to the set's address and
    /// size.
    BlockedNested,
    /// The call waits for the signals of the set.
    Awaited,
    /// From now on the signals of the set come by a descriptor.
    Read,
}

/// How a call is served.
#[derive(Copy, Clone)]
pub enum ServedBy {
    /// The call is made while its memory is held. It needs no trap from a patched site.
    Plain,
    /// A function of `handlers/` serves the call. It needs no trap from a patched site.
    Direct(DirectHandler),
    /// The call is made from a trap, with a context, while its memory is held.
    Trapped,
    /// The call is made from a trap. The argument with this number points to a set of signals, of
    /// which the kernel gets a copy.
    Masked(u8, MaskUse),
    /// The call changes mappings or frees memory. [`crate::PageKeeper::change`] makes it.
    Change,
    /// A function of `handlers/` serves the call.
    Special(RowHandler),
    /// A function of `handlers/` serves the call. It sets the context and returns no result.
    InContext(ContextHandler),
    /// An argument gives a command. This function decides by it how the call is served.
    ByCommand(fn(&[usize; 6]) -> ServedBy),
    /// The table doesn't have the call. It is made from a trap.
    Unknown,
}

/// A row's handler that needs only the calling thread, the number and the arguments.
#[derive(Copy, Clone)]
pub struct DirectHandler(pub(crate) fn(CallingThread, usize, &[usize; 6]) -> isize);

/// A row's handler, which returns the result of the call.
#[derive(Copy, Clone)]
pub struct RowHandler(pub(crate) CallHandler);

/// A row's handler that sets the context and returns nothing.
#[derive(Copy, Clone)]
pub struct ContextHandler(pub(crate) fn(&mut ProgramCall));

/// The pieces in which a large call may be made.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum CutInto {
    /// The call is made whole.
    Whole,
    /// The call may be made in pieces of its buffers (`pieces.rs`).
    Bytes,
    /// The call may be made in groups of messages (`messages.rs`).
    Messages,
    /// The call may be made in pieces of the memory of another process (`others.rs`).
    Others,
}

/// The length of the memory that an argument points to. Arguments are counted from 0.
#[derive(Copy, Clone, Debug)]
pub(super) enum OperandSize {
    /// A fixed number of bytes.
    Bytes(usize),
    /// The number of bytes that another argument gives.
    Len(u8),
    /// The number of bytes that another argument gives as an `int`. The kernel refuses a negative
    /// one.
    Int(u8),
    /// The number of bytes that another argument gives as an `unsigned int`.
    Uint(u8),
    /// The number of items that another argument gives. The second number is the size of an item in
    /// bytes.
    Items(u8, usize),
    /// The number of items that another argument gives as an `int`. The second number is the size
    /// of an item in bytes.
    IntItems(u8, usize),
    /// The number of items that another argument gives as an `unsigned int`. The second number is
    /// the size of an item in bytes.
    UintItems(u8, usize),
    /// The number of bytes in the `int` to which another argument points.
    At(u8),
    /// A socket's address. It has as many bytes as another argument gives, which is an `int`, but
    /// no more than the largest address.
    Address(u8),
    /// A socket's address. It has as many bytes as the `int` gives to which another argument
    /// points.
    AddressAt(u8),
    /// A mask of NUMA nodes. It has one bit less than another argument gives, in whole words.
    Nodes(u8),
    /// A set of descriptors. It has as many bits as another argument gives, in whole words.
    Fds(u8),
}

/// The memory that one argument names. The first number is that of the argument.
#[derive(Copy, Clone)]
pub(super) enum Arg {
    /// The kernel reads the memory.
    In(u8, OperandSize),
    /// The kernel writes to the memory, and may read it.
    Out(u8, OperandSize),
    /// The kernel reads a text up to its null byte, such as a path.
    Text(u8),
    /// More than this language can describe. A function of `decode/` names the memory.
    Decoded(fn(&mut Operands)),
}

const ADDRESS_MAX: usize = 128;

/// A system call: one row of the table.
#[derive(Copy, Clone)]
pub struct CallRow {
    /// The call's name.
    pub name: &'static str,
    /// The call's number.
    pub number: u16,
    /// True if the call names memory.
    pub names: bool,
    /// True if the call can lend pages to the kernel, or make other calls do so (`lent.rs`).
    pub lends: bool,
    /// True if the call may reveal the engine, so that its answer is changed (`seen.rs`).
    pub tells: bool,
    /// The argument that is a path of which the last link is followed (`own_program.rs`).
    pub follows: Option<u8>,
    /// The pieces in which the call may be made.
    pub cut: CutInto,
    pub(super) served: ServedBy,
    pub(super) operands: &'static [Arg],
}

impl CallRow {
    pub(super) const fn new(
        served: ServedBy,
        number: u16,
        name: &'static str,
        operands: &'static [Arg],
    ) -> CallRow {
        let names = !operands.is_empty();
        CallRow {
            names,
            lends: false,
            tells: false,
            follows: None,
            cut: CutInto::Whole,
            served,
            number,
            name,
            operands,
        }
    }

    /// Marks a call that can lend pages to the kernel.
    pub(super) const fn lending(mut self) -> CallRow {
        self.lends = true;
        self
    }

    /// Marks a call that may reveal the engine.
    pub(super) const fn telling(mut self) -> CallRow {
        self.tells = true;
        self
    }

    /// Marks a call of which this argument is a path, whose last link is followed.
    pub(super) const fn following(mut self, argument: u8) -> CallRow {
        self.follows = Some(argument);
        self
    }

    /// Marks a call that may be made in pieces.
    pub(super) const fn cut(mut self, cut: CutInto) -> CallRow {
        self.cut = cut;
        self
    }

    /// Returns how a call with these arguments is served. It is never [`ServedBy::ByCommand`].
    pub fn served(&self, args: &[usize; 6]) -> ServedBy {
        match self.served {
            ServedBy::ByCommand(decide) => decide(args),
            served => served,
        }
    }

    /// Calls `out` with the ranges that a call names. `read` reads the program's memory where
    /// structs have pointers inside.
    ///
    /// # Errors
    /// A struct can't be read, as for [`crate::syscalls::name`].
    pub fn name_memory(
        &self,
        args: &[usize; 6],
        read: ReadMemory,
        out: &mut dyn FnMut(NamedSpan),
    ) -> Result<(), BadAddress> {
        let mut operands = Operands::new(args, read, out);
        self.operands.iter().for_each(|each| each.name(&mut operands));
        operands.result()
    }

    /// Returns whether the table has this call.
    pub const fn is_known(&self) -> bool {
        !matches!(self.served, ServedBy::Unknown)
    }
}

/// Returns a row of the most frequent kind: [`ServedBy::Plain`].
pub(super) const fn plain(number: u16, name: &'static str, operands: &'static [Arg]) -> CallRow {
    CallRow::new(ServedBy::Plain, number, name, operands)
}

/// Returns the row of a call that a handler serves.
pub(super) const fn special(
    number: u16,
    name: &'static str,
    operands: &'static [Arg],
    handler: CallHandler,
) -> CallRow {
    CallRow::new(ServedBy::Special(RowHandler(handler)), number, name, operands)
}

/// Returns the row of a call that a handler serves without a context.
pub(super) const fn direct(
    number: u16,
    name: &'static str,
    operands: &'static [Arg],
    handler: fn(CallingThread, usize, &[usize; 6]) -> isize,
) -> CallRow {
    CallRow::new(ServedBy::Direct(DirectHandler(handler)), number, name, operands)
}

/// One more than the number of the last call of Linux 6.18.
pub const COUNT: usize = 470;

/// The row of unknown calls.
pub(super) const UNKNOWN: CallRow = CallRow::new(ServedBy::Unknown, u16::MAX, "unknown", &[]);

/// All calls by number.
pub struct CallRows(pub(super) [CallRow; COUNT]);

impl CallRows {
    /// Returns the row of a call. If x86-64 has no call with this number, returns a row of
    /// [`ServedBy::Unknown`].
    pub fn look_up(&'static self, nr: usize) -> &'static CallRow {
        static NO_ROW: CallRow = UNKNOWN;
        self.0.get(nr).unwrap_or(&NO_ROW)
    }
}

/// Returns the result of a call that has no value, in the kernel's form.
pub(crate) fn value(done: Result<(), Errno>) -> isize {
    done.map_or_else(|e| -(e.raw_os_error() as isize), |()| 0)
}

impl OperandSize {
    /// Returns the length in bytes, or `None` if the kernel will refuse the call.
    fn bytes(self, n: &mut Operands) -> Option<usize> {
        let int = |v: usize| usize::try_from(v as i32).ok();
        let address = |v: usize| int(v).map(|len| len.min(ADDRESS_MAX));
        match self {
            OperandSize::Bytes(bytes) => Some(bytes),
            OperandSize::Len(i) => Some(n.arg(i as usize)),
            OperandSize::Int(i) => int(n.arg(i as usize)),
            OperandSize::Uint(i) => Some(n.int(i as usize) as usize),
            OperandSize::Items(i, each) => n.arg(i as usize).checked_mul(each),
            OperandSize::IntItems(i, each) => int(n.arg(i as usize)).map(|count| count * each),
            OperandSize::UintItems(i, each) => Some(n.int(i as usize) as usize * each),
            OperandSize::At(i) => int(n.half(n.arg(i as usize))? as usize),
            OperandSize::Address(i) => address(n.arg(i as usize)),
            OperandSize::AddressAt(i) => address(n.half(n.arg(i as usize))? as usize),
            OperandSize::Nodes(i) => Some(n.arg(i as usize).saturating_sub(1).div_ceil(64) * 8),
            OperandSize::Fds(i) => int(n.arg(i as usize)).map(|bits| bits.div_ceil(64) * 8),
        }
    }
}

impl Arg {
    /// Names the memory that the argument points to.
    pub fn name(self, n: &mut Operands) {
        let (i, size, write) = match self {
            Arg::In(i, size) => (i, size, false),
            Arg::Out(i, size) => (i, size, true),
            Arg::Text(i) => return n.text(n.arg(i as usize), TEXT_MAX),
            Arg::Decoded(name) => return name(n),
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
