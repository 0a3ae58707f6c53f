//! Serves `clone`, `clone3` and `vfork`, which make threads, and processes that share the memory
//! for a while.
use crate::entry;
use crate::frame::{AlternateStack, SignalContext, copy_context};
use crate::keeper::{Keeper, NamedSpan};
use crate::patch::patch_awaited;
use crate::record::GateThread;
use crate::signals::{block_all, deliver_pending};
use crate::threads::behalf::{keep_all, keep_home, on_behalf};
use crate::threads::copy::{CLEAR_SIGHAND, begin, copy};
use crate::touch::{read_bytes, touch};
use memfold_os::Errno;
use memfold_os::raw::system_call;
use memfold_os::units::PAGE_SIZE;

const VM: usize = libc::CLONE_VM as usize;
const SETTLS: usize = libc::CLONE_SETTLS as usize;
const VFORK: usize = libc::CLONE_VFORK as usize;
const NAMESPACES: usize = (libc::CLONE_NEWUSER | libc::CLONE_NEWNS | libc::CLONE_NEWPID) as usize;

/// The number of words of `struct clone_args` that are passed on. Later words must be 0.
const WORDS: usize = 32;
const FLAGS: usize = 0;
const PIDFD: usize = 1;
const CHILD_TID: usize = 2;
const PARENT_TID: usize = 3;
const STACK: usize = 5;
const STACK_BYTES: usize = 6;
const SET_TID: usize = 8;
const SET_TID_COUNT: usize = 9;
const BYTES_MIN: usize = 64;
/// The most ranges that the kernel reads or writes: three numbers that it returns, and the numbers
/// that the program asks for.
const SPANS_MAX: usize = 4;

/// A call that makes a task.
struct CloneRequest {
    nr: usize,
    flags: usize,
    /// The child's first stack pointer. 0 means its parent's.
    top: usize,
    args: [usize; 6],
    /// The words of `clone3`'s `struct clone_args`.
    words: [usize; WORDS],
    /// The ranges that the kernel reads and writes.
    spans: [Option<NamedSpan>; SPANS_MAX],
}

impl CloneRequest {
    fn new(nr: usize, args: &[usize; 6]) -> Result<CloneRequest, Errno> {
        let mut new = CloneRequest {
            nr,
            flags: 0,
            top: 0,
            args: *args,
            words: [0; WORDS],
            spans: [None; SPANS_MAX],
        };
        match nr as i64 {
            libc::SYS_fork => {}
            libc::SYS_vfork => {
                new.nr = libc::SYS_clone as usize;
                new.flags = VM | VFORK;
                new.args = [VM | VFORK | libc::SIGCHLD as usize, 0, 0, 0, 0, 0];
            }
            libc::SYS_clone => {
                (new.flags, new.top) = (args[0] & !0xff, args[1]);
                // CLONE_PIDFD makes the kernel put the descriptor where the thread's number would
                // be.
                let parent = libc::CLONE_PARENT_SETTID as usize | libc::CLONE_PIDFD as usize;
                new.kernel_writes(args[2], parent);
                new.kernel_writes(args[3], libc::CLONE_CHILD_SETTID as usize);
            }
            _ => new.read_words(args[0], args[1])?,
        }
        Ok(new)
    }

    fn read_words(&mut self, at: usize, bytes: usize) -> Result<(), Errno> {
        if bytes < BYTES_MIN {
            return Err(Errno::INVAL);
        }
        if bytes > PAGE_SIZE {
            return Err(Errno::TOOBIG);
        }
        let mut words = [0u8; WORDS * 8];
        let known = bytes.min(words.len());
        // Words that aren't known here must be 0, as in the kernel.
        for from in (known..bytes).step_by(words.len()) {
            let rest = &mut words[..(bytes - from).min(WORDS * 8)];
            read_bytes(at + from, rest).map_err(|_| Errno::FAULT)?;
            if rest.iter().any(|byte| *byte != 0) {
                return Err(Errno::TOOBIG);
            }
        }
        words.fill(0);
        read_bytes(at, &mut words[..known]).map_err(|_| Errno::FAULT)?;
        self.args[1] = known;
        for (word, bytes) in self.words.iter_mut().zip(words.chunks_exact(8)) {
            *word = usize::from_ne_bytes([0, 1, 2, 3, 4, 5, 6, 7].map(|i: usize| bytes[i]));
        }
        let words = self.words;
        self.flags = words[FLAGS];
        self.top = if words[STACK] == 0 { 0 } else { words[STACK] + words[STACK_BYTES] };
        self.kernel_writes(words[PIDFD], libc::CLONE_PIDFD as usize);
        self.kernel_writes(words[PARENT_TID], libc::CLONE_PARENT_SETTID as usize);
        self.kernel_writes(words[CHILD_TID], libc::CLONE_CHILD_SETTID as usize);
        let len = words[SET_TID_COUNT].min(WORDS) * 4;
        self.name(words[SET_TID], len, false);
        Ok(())
    }

    fn kernel_writes(&mut self, start: usize, if_any: usize) {
        if self.flags & if_any != 0 {
            self.name(start, 4, true);
        }
    }

    fn name(&mut self, start: usize, len: usize, write: bool) {
        let free = self.spans.iter_mut().find(|place| place.is_none());
        *free.expect("each of the four is named once") = NamedSpan::new(start, len, write);
    }

    /// Returns the address at which the kernel writes 0 when the task ends, or `None` if it
    /// doesn't.
    fn cleared_at_end(&self) -> Option<usize> {
        let set = libc::CLONE_CHILD_CLEARTID as usize | libc::CLONE_CHILD_SETTID as usize;
        let at =
            if self.nr == libc::SYS_clone as usize { self.args[3] } else { self.words[CHILD_TID] };
        (self.flags & set != 0).then_some(at)
    }

    /// Makes the child begin on this stack. With 0 bytes it begins on its parent's.
    fn set_stack(&mut self, start: usize, bytes: usize) {
        if self.nr == libc::SYS_clone as usize {
            self.args[1] = start + bytes;
        } else if self.nr == libc::SYS_clone3 as usize {
            (self.words[STACK], self.words[STACK_BYTES]) = (start, bytes);
            self.args[0] = self.words.as_ptr() as usize;
        }
    }
}

/// Serves these calls, and returns the call's result in the parent and in a copy. The caller
/// continues as `context` says.
pub fn clone(
    keeper: &Keeper,
    record: &'static GateThread,
    context: &mut SignalContext,
    nr: usize,
    args: &[usize; 6],
) -> isize {
    let mut request = match CloneRequest::new(nr, args) {
        Ok(wanted) => wanted,
        Err(e) => return -(e.raw_os_error() as isize),
    };
    if request.flags & (VM | VFORK) == VM || request.flags & NAMESPACES != 0 {
        keeper.rights.last_chance();
    }
    if request.flags & libc::CLONE_NEWNET as usize != 0 {
        keeper.rights.leaves_network();
    }
    if let Some(at) = request.cleared_at_end() {
        keeper.pages.never_fold(at, 4);
    }
    let spans = request.spans;
    let names = |each: &mut dyn FnMut(NamedSpan)| spans.into_iter().flatten().for_each(each);
    let Ok(hold) = keeper.holds.hold(&names, record.number.get(), touch) else {
        return -(libc::ENOMEM as isize);
    };
    let result = if request.flags & VM != 0 {
        spawn(keeper, record, context, &mut request)
    } else {
        request.set_stack(0, 0);
        let result = copy(keeper, record, request.nr, &request.args, request.flags);
        if result == 0 && request.top != 0 {
            context.regs.rsp = request.top as u64;
        }
        result
    };
    if let Some(hold) = hold {
        keeper.holds.release(hold);
    }
    result
}

fn spawn(
    keeper: &Keeper,
    record: &'static GateThread,
    context: &SignalContext,
    wanted: &mut CloneRequest,
) -> isize {
    if wanted.flags & libc::CLONE_THREAD as usize == 0 {
        keeper.children.has_child();
    }
    block_all();
    let mut child = None;
    // SAFETY: the closure uses only slots and records, which are the gate's, and locals of the
    // caller, which waits meanwhile. It touches no memory of the program.
    unsafe {
        on_behalf(keeper, &mut || {
            child = GateThread::take();
            // If the caller is killed now, this slot is never given back. It belongs to a process
            // that has ended then, and counts as a thread of no other.
            let is_thread = wanted.flags & libc::CLONE_THREAD as usize != 0;
            child.inspect(|child| child.join(is_thread.then_some(record)));
        });
    }
    let Some(child) = child else { return -(libc::EAGAIN as isize) };
    child.blocked.set(record.blocked.get());
    child.inherit_actions(record, wanted.flags & libc::CLONE_SIGHAND as usize != 0);
    if wanted.flags & (VFORK | SETTLS) == 0 {
        record.shares_fs.set(true);
        child.shares_fs.set(true);
    }
    // Meanwhile the child may have the same `fs`. Patched sites find the caller's record again
    // after its next trap.
    record.fs.set(0);
    if wanted.flags & VFORK != 0 {
        child.alternate.set(record.alternate.get());
    }
    child.flags.set(wanted.flags & CLEAR_SIGHAND);
    let frame = copy_frame(child, context, wanted.top);
    child.frame.set(frame);
    let AlternateStack { sp: start, .. } = child.stack();
    wanted.set_stack(start, ((frame - 256) & !15) - start);
    // SAFETY: the arguments are the program's own, except the stack, which is the child slot's. No
    // other code uses it. All signals but the gate's own are blocked.
    let result =
        unsafe { entry::clone(wanted.nr, &wanted.args, first, &raw const *child as usize) };
    if result < 0 || wanted.flags & VFORK != 0 {
        child.errand.finish();
        // The `execve` of a child of vfork never returned, so its hold still exists.
        if let Some(hold) = child.hold.take() {
            keeper.holds.release(hold);
        }
        if child.traced.get() {
            keep_home(keeper, child, false);
        }
        keeper.children.has_no_child(child.number.get());
        if child.keeps_all.get() {
            keep_all(keeper, child, false);
        }
        child.give_back();
        if record.is_of_first_process() {
            patch_awaited();
        }
    }
    result
}

/// Copies the frame of `context` onto the child's stack, and returns the copy's address. In the
/// copy the call returns 0.
fn copy_frame(child: &GateThread, context: &SignalContext, top: usize) -> usize {
    let stack = child.stack();
    // SAFETY: the kernel wrote the context for this thread's handler. No code uses the child's stack
    // yet, which has room for a frame.
    let theirs = unsafe { copy_context(context, &stack) };
    theirs.stack = stack;
    theirs.regs.rax = 0;
    if top != 0 {
        theirs.regs.rsp = top as u64;
    }
    &raw const *theirs as usize
}

/// Runs as the child's first code, on its slot's stack.
unsafe extern "C" fn first(record: usize) -> ! {
    // SAFETY: `spawn` passed the address of the record that it took for this thread. Records stay
    // mapped, and only this thread uses its cells.
    let record = unsafe { &*(record as *const GateThread) };
    let stack = record.stack();
    // SAFETY: the kernel only reads `stack`, which lives until the call returns. The new alternate
    // stack is that of this thread's slot, which no other code uses while the thread lives.
    let _ =
        unsafe { system_call(libc::SYS_sigaltstack, [&raw const stack as usize, 0, 0, 0, 0, 0]) };
    record.claim();
    begin(record, record.flags.get());
    // SAFETY: `copy_frame` made the frame. It lies on this stack, and no frame below it is needed
    // any more. The first word of the record tells what is pending.
    unsafe { entry::leave(record.frame.get(), &raw const *record as usize, deliver_pending) }
}
