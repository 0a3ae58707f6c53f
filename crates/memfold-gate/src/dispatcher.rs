//! Which call is what, and how it is made.
use crate::actions::{PROTECTED, UNBLOCKABLE};
use crate::call_state::{CALLED_OFF, Outcome};
use crate::frame::Context;
use crate::keeper::{Ending, Fault, Keeper, Names, Refused, Span};
use crate::record::Record;
use crate::signals;
use crate::syscalls::{
    self as calls, Class, Entry, Piece, filter, lent, messages, namespaces, seen,
};
use crate::threads;
use crate::touch::{read, read_bytes, touch, write};
use crate::user_dispatch::{self as dispatch, PR_SET_SYSCALL_USER_DISPATCH, ProgramDispatch};
use core::sync::atomic::Ordering::SeqCst;
use memfold_sys::Errno;
use memfold_sys::raw::system_call;
use memfold_sys::thread::{process_id, use_no_counter};
use memfold_sys::units::PAGE_SIZE;

/// `prctl`: whether the processor's counter is refused to the calling thread, by SIGSEGV.
const PR_GET_TSC: usize = 25;
const PR_SET_TSC: usize = 26;
const PR_TSC_SIGSEGV: usize = 2;

/// Whether the processor's counter is refused to the calling thread. It may have that of the program
/// before it.
pub fn has_no_counter() -> bool {
    let mut state = 0u32;
    let args = [PR_GET_TSC, &raw mut state as usize, 0, 0, 0, 0];
    // SAFETY: there is room for the answer.
    let asked = unsafe { system_call(libc::SYS_prctl, args) };
    asked.is_ok() && state as usize == PR_TSC_SIGSEGV
}

/// A system call of the program's that has come as SIGSYS.
pub struct Call<'a> {
    /// The owner of the memory.
    pub keeper: &'static dyn Keeper,
    /// The thread.
    pub record: &'static Record,
    /// Where the program goes on.
    pub context: &'a mut Context,
    /// Its number.
    pub nr: usize,
    /// Its arguments.
    pub args: [usize; 6],
    /// What the table says of it.
    pub entry: &'static Entry,
}

fn value(done: Result<(), Errno>) -> isize {
    done.map_or_else(|e| -(e.raw_os_error() as isize), |()| 0)
}

fn raw(nr: usize, args: &[usize; 6]) -> isize {
    // SAFETY: the program's own call.
    match unsafe { system_call(nr as i64, *args) } {
        Ok(value) => value as isize,
        Err(e) => -(e.raw_os_error() as isize),
    }
}

impl Call<'_> {
    /// Makes it.
    pub fn make(&mut self) -> Outcome {
        let (nr, args) = (self.nr, self.args);
        Outcome::of(match nr as i64 {
            libc::SYS_rt_sigreturn => {
                signals::resume(self.record, self.context);
                return Outcome::InContext;
            }
            libc::SYS_rt_sigaction => value(signals::set_action(self.record, &args)),
            libc::SYS_rt_sigprocmask => value(signals::set_mask(self.record, self.context, &args)),
            libc::SYS_rt_sigpending => value(signals::pending(self.record, &args)),
            libc::SYS_sigaltstack => self.set_alternate(),
            libc::SYS_clone | libc::SYS_clone3 | libc::SYS_fork | libc::SYS_vfork => {
                threads::clone(self.keeper, self.record, self.context, nr, &args)
            }
            libc::SYS_execve | libc::SYS_execveat => self.execute(),
            libc::SYS_kill => match signals::kill(self.record, &args) {
                Some(made) => made,
                None => self.wait(),
            },
            libc::SYS_rt_sigqueueinfo => self.queue([1, 2]),
            libc::SYS_rt_tgsigqueueinfo => self.queue([2, 3]),
            libc::SYS_pidfd_send_signal => self.queue([1, 2]),
            libc::SYS_unshare | libc::SYS_setns if self.is_alone() => {
                signals::block_all();
                namespaces::alone(self.keeper, nr, &args, raw)
            }
            _ if filter::wants_strict(nr, &args) => self.be_strict(),
            _ if filter::set_by(nr, &args).is_some() => self.filter(),
            libc::SYS_getrlimit | libc::SYS_setrlimit | libc::SYS_prlimit64 => self.limit(),
            libc::SYS_ptrace if is_wish_to_be_traced(nr, &args) => self.be_traced(),
            libc::SYS_exit => threads::exit(self.keeper, self.record, args[0]),
            libc::SYS_exit_group => {
                threads::keep_locks(self.keeper, self.record);
                self.keeper.ends(Ending::Process);
                raw(nr, &args)
            }
            libc::SYS_prctl if args[0] as i32 == PR_SET_SYSCALL_USER_DISPATCH as i32 => {
                signals::block_all();
                value(ProgramDispatch::of(&args).map(|own| self.record.dispatch.set(own)))
            }
            libc::SYS_prctl if args[..2] == [PR_SET_TSC, PR_TSC_SIGSEGV] => {
                use_no_counter();
                self.wait()
            }
            libc::SYS_arch_prctl => {
                // It may set `fs`.
                self.record.fs.set(0);
                self.wait()
            }
            libc::SYS_set_tid_address => self.never_fold(args[0], 4),
            libc::SYS_set_robust_list => {
                let done = self.never_fold(args[0], args[1]);
                if done >= 0 {
                    self.record.robust.store(args[0], SeqCst);
                }
                done
            }
            libc::SYS_rseq => self.never_fold(args[0], args[1]),
            _ if gives_up_rights(nr, &args) => {
                self.keeper.last_chance();
                let made = self.wait();
                if made >= 0 && changes_identity(nr) {
                    signals::block_all();
                    self.keeper.give_up_rights();
                }
                made
            }
            libc::SYS_close
            | libc::SYS_dup
            | libc::SYS_dup2
            | libc::SYS_dup3
            | libc::SYS_fcntl
            | libc::SYS_close_range => self.descriptors(),
            _ if calls::class(self.entry, &args) == Class::Mapping => self.held(&args, |call| {
                signals::block_all();
                call.keeper.change(nr, &args, &mut |args| raw(nr, args))
            }),
            _ => self.wait(),
        })
    }

    /// PTRACE_TRACEME. Each signal stops the caller from now on, for a parent that waits in vfork, or
    /// that knows nothing of the gate's. So the gate raises none until the caller executes another
    /// program: all memory is home, and the calls of the only thread pass it by. What it executes
    /// isn't managed, as the environment that it passes has nothing of memfold's.
    fn be_traced(&mut self) -> isize {
        let (keeper, record) = (self.keeper, self.record);
        if !self.is_alone() {
            return self.wait();
        }
        signals::block_all();
        if !threads::keep_home(keeper, record, true) {
            return -(libc::ENOMEM as isize);
        }
        let made = raw(self.nr, &self.args);
        if made < 0 {
            threads::keep_home(keeper, record, false);
            return made;
        }
        keeper.tells(Refused::Traced);
        self.pass_by(true);
        made
    }

    /// A signal with information, whose places among the arguments these are.
    fn queue(&mut self, places: [usize; 2]) -> isize {
        let (record, nr) = (self.record, self.nr);
        let for_thread = nr as i64 == libc::SYS_rt_tgsigqueueinfo;
        // SAFETY: what the call names is the gate's own.
        let make = |args: &[usize; 6]| unsafe { signals::call(record, nr, args) };
        signals::make_up(&self.args, places, for_thread, make).unwrap_or_else(|| self.wait())
    }

    /// Whether the program has one thread, the caller.
    fn is_alone(&self) -> bool {
        let mut is_alone = true;
        self.record.each_of_process(|each| is_alone &= core::ptr::eq(each, self.record));
        is_alone
    }

    /// A seccomp filter. One for all threads of a program that has one is the caller's alone: the
    /// keeper's threads aren't the program's. One that refuses a call of the keeper's is set when all
    /// memory is home.
    fn filter(&mut self) -> isize {
        const ALL_THREADS: usize =
            (libc::SECCOMP_FILTER_FLAG_TSYNC | libc::SECCOMP_FILTER_FLAG_TSYNC_ESRCH) as usize;
        let keeper = self.keeper;
        let is_for_all = self.nr as i64 == libc::SYS_seccomp && self.args[1] & ALL_THREADS != 0;
        if is_for_all && self.is_alone() {
            self.args[1] &= !ALL_THREADS;
            self.context.regs.rsi = self.args[1] as u64;
        }
        keeper.last_chance();
        keeper.filtered();
        let at = filter::set_by(self.nr, &self.args).expect("it sets a filter");
        if filter::refuses_own(keeper, at) {
            return self.shut_in(Refused::Filter);
        }
        self.wait()
    }

    /// A limit of this process's is the keeper's to answer.
    fn limit(&mut self) -> isize {
        let [first, second, third, fourth, ..] = self.args;
        let (process, resource, new_at, old_at) = match self.nr as i64 {
            libc::SYS_getrlimit => (0, first, 0, second),
            libc::SYS_setrlimit => (0, first, second, 0),
            _ => (first as u32, second, third, fourth),
        };
        if process != 0 && process != process_id() {
            return self.wait();
        }
        if gives_up_rights(self.nr, &self.args) {
            self.keeper.last_chance();
        }
        let new = (new_at != 0).then(|| read::<[usize; 2]>(new_at)).transpose();
        let Ok(new) = new else { return -(libc::EFAULT as isize) };
        let new = new.map(|new| new.map(|each| each as u64));
        value(self.keeper.limit(resource as u32, new).and_then(|before| {
            let before = before.map(|each| each as usize);
            // SAFETY: the program has asked for it there.
            let told = old_at == 0 || unsafe { write(old_at, &before) }.is_ok();
            if told { Ok(()) } else { Err(Errno::FAULT) }
        }))
    }

    /// SECCOMP_MODE_STRICT: from now on the kernel lets the caller read, write, return from handlers
    /// and end, and kills it for all else that the gate would do.
    fn be_strict(&mut self) -> isize {
        // Who has a filter is refused this.
        let has = [libc::PR_GET_SECCOMP as usize, 0, 0, 0, 0, 0];
        if raw(libc::SYS_prctl as usize, &has) != 0 {
            return raw(self.nr, &self.args);
        }
        self.shut_in(Refused::Strict)
    }

    /// The caller asks the kernel to refuse it what the gate would do. So all memory is brought home, and
    /// the caller's calls pass the gate by: this one first, as it may not even return from a handler
    /// after it.
    fn shut_in(&mut self, how: Refused) -> isize {
        let is_alone = self.is_alone();
        signals::block_all();
        if !threads::keep_home(self.keeper, self.record, true) {
            return -(libc::ENOMEM as isize);
        }
        if self.record.is_of_first_process() {
            self.keeper.tells(how);
        } else {
            // Its parent waits for it to execute or end, and is managed again then.
            self.record.traced.set(true);
        }
        self.pass_by(is_alone);
        CALLED_OFF
    }

    /// From here on the caller's calls pass the gate by, patched sites too; if it is the only thread,
    /// its signals, too.
    fn pass_by(&mut self, is_alone: bool) {
        self.record.fs.set(0);
        dispatch::disarm();
        if is_alone {
            signals::give_back(self.record);
            self.context.mask |= self.record.blocked.get();
            self.context.stack = self.record.alternate.get();
        }
    }

    fn set_alternate(&mut self) -> isize {
        match signals::set_alternate(self.record, self.context, &self.args) {
            Ok(Some(stack)) if stack.size > 0 => {
                self.keeper.never_fold(stack.sp, stack.size);
                0
            }
            done => value(done.map(drop)),
        }
    }

    fn never_fold(&self, start: usize, len: usize) -> isize {
        let done = raw(self.nr, &self.args);
        if done >= 0 && start != 0 {
            self.keeper.never_fold(start, len);
        }
        done
    }

    fn execute(&mut self) -> isize {
        let (keeper, record, nr, args) = (self.keeper, self.record, self.nr, self.args);
        self.held(&args, |call| threads::execute(keeper, record, call.context, nr, &args))
    }

    /// `make`s the call while what it names is held.
    fn held(&mut self, args: &[usize; 6], make: impl FnOnce(&mut Self) -> isize) -> isize {
        let (keeper, record, entry) = (self.keeper, self.record, self.entry);
        if !entry.names {
            return make(self);
        }
        let names = |each: &mut dyn FnMut(Span)| name(entry, args, each);
        under_hold(keeper, record, &names, || make(self))
    }

    /// A call on which the thread may wait, and on which it may wait with another mask.
    fn wait(&mut self) -> isize {
        let (mut set, mut with_set) = (0, [0, 0]);
        let (args, waits) = match self.with_mask(&mut set, &mut with_set) {
            Ok(replaced) => replaced,
            Err(e) => return -(e.raw_os_error() as isize),
        };
        if matches!(self.nr as i64, libc::SYS_signalfd | libc::SYS_signalfd4) {
            signals::note_read(set);
        }
        let awaits = match self.nr as i64 {
            libc::SYS_rt_sigtimedwait => set,
            // The others are open to them anyway.
            _ => waits.map_or(0, |mask| !mask & self.record.blocked.get()),
        };
        self.record.awaits.set(awaits & PROTECTED);
        self.record.waiting_mask.set(waits);
        let made = plain(self.keeper, self.record, self.entry, self.nr, &args);
        self.record.awaits.set(0);
        if self.nr as i64 == libc::SYS_rt_sigtimedwait && made > 0 && args[1] != 0 {
            signals::tell_as_sent(args[1]);
        }
        // Of a call that wasn't interrupted, the mask is over.
        let interrupted = made == -(libc::EINTR as isize);
        if !interrupted || self.record.pending.load(SeqCst) == 0 {
            self.record.waiting_mask.set(None);
        }
        made
    }

    /// The arguments with a copy of the set of signals that they name; the mask that is in force
    /// meanwhile. The kernel may have the gate's own signals blocked while it waits: what interrupts
    /// the call is put off, which raises none.
    fn with_mask(
        &self,
        set: &mut u64,
        with_set: &mut [usize; 2],
    ) -> Result<([usize; 6], Option<u64>), Errno> {
        let mut args = self.args;
        let Some(at) = self.entry.mask() else { return Ok((args, None)) };
        // Others take it for good, or name what they wait for.
        let suspends = self.nr as i64 == libc::SYS_rt_sigsuspend;
        let waits = suspends || self.entry.class != Class::Signal;
        if args[at] == 0 {
            return Ok((args, None));
        }
        if matches!(self.nr as i64, libc::SYS_pselect6 | signals::SYS_IO_PGETEVENTS) {
            *with_set = read::<[usize; 2]>(args[at]).map_err(|_| Errno::FAULT)?;
            args[at] = with_set.as_ptr() as usize;
            if with_set[0] == 0 {
                return Ok((args, None));
            }
            *set = read::<u64>(with_set[0]).map_err(|_| Errno::FAULT)?;
            with_set[0] = &raw const *set as usize;
        } else {
            *set = read::<u64>(args[at]).map_err(|_| Errno::FAULT)?;
            args[at] = &raw const *set as usize;
        }
        Ok((args, waits.then_some(*set & !UNBLOCKABLE)))
    }

    /// Calls that close descriptors, or ask whether there are any, pass over the engine's.
    fn descriptors(&mut self) -> isize {
        let own = |fd: usize| self.keeper.owns_descriptor(fd as i32);
        let args = self.args;
        match self.nr as i64 {
            libc::SYS_close | libc::SYS_dup | libc::SYS_fcntl if own(args[0]) => {
                -(libc::EBADF as isize)
            }
            libc::SYS_dup2 | libc::SYS_dup3 if own(args[0]) || own(args[1]) => {
                -(libc::EBADF as isize)
            }
            libc::SYS_close_range => self.close_range(),
            _ => self.wait(),
        }
    }

    fn close_range(&self) -> isize {
        /// The engine has none above.
        const OWN_MAX: usize = 1 << 16;
        let [first, last, flags, ..] = self.args.map(|arg| arg as u32 as usize);
        let mut from = first;
        for fd in (first..=last.min(OWN_MAX)).filter(|fd| self.keeper.owns_descriptor(*fd as i32)) {
            if fd > from {
                let done = raw(self.nr, &[from, fd - 1, flags, 0, 0, 0]);
                if done < 0 {
                    return done;
                }
            }
            from = fd + 1;
        }
        if from > last && from > first { 0 } else { raw(self.nr, &[from, last, flags, 0, 0, 0]) }
    }
}

/// Calls `each` with what a call names.
fn name(entry: &Entry, args: &[usize; 6], each: &mut dyn FnMut(Span)) {
    // What can't be read names nothing: the kernel will find the same.
    let _ = calls::name(entry, args, &read_bytes, each);
}

/// Whether any of the owner's memory is named.
fn concerns(keeper: &dyn Keeper, names: Names) -> bool {
    let mut any = false;
    names(&mut |span| any |= keeper.concerns(span.start, span.len));
    any
}

/// `make`s a call while what it names is held.
fn under_hold(
    keeper: &dyn Keeper,
    record: &Record,
    names: Names,
    make: impl FnOnce() -> isize,
) -> isize {
    let Ok(hold) = keeper.hold(names, record.number.get(), touch) else {
        return -(libc::ENOMEM as isize);
    };
    record.hold.set(hold);
    let made = make();
    record.hold.set(None);
    if let Some(hold) = hold {
        keeper.release(hold);
    }
    made
}

/// Makes a call of which nothing else must be known.
fn plain(
    keeper: &dyn Keeper,
    record: &Record,
    entry: &Entry,
    nr: usize,
    args: &[usize; 6],
) -> isize {
    loop {
        // The kernel sees zeros where memory is hidden.
        let made = match keeper.hides() && seen::names_own_memory(nr, args) {
            true => -(libc::EIO as isize),
            false => made(keeper, record, entry, nr, args),
        };
        let made = seen::with_own_memory(nr, args, made, |nr, args, seen| {
            in_own_memory(keeper, record, nr, args, seen)
        });
        if made < 0 {
            return made;
        }
        if let Some(shown) = seen::without_threads(keeper, record, nr, args, made) {
            return shown;
        }
    }
}

/// Makes a call that copies between a buffer and what of the program's memory a file has: `seen`.
fn in_own_memory(
    keeper: &dyn Keeper,
    record: &Record,
    nr: usize,
    args: &[usize; 6],
    seen: Span,
) -> isize {
    let make = |write: bool| {
        let names = |each: &mut dyn FnMut(Span)| {
            each(Span { start: args[1], len: args[2], write: !seen.write });
            each(Span { write, ..seen });
        };
        under_hold(keeper, record, &names, || {
            if seen.write && !write {
                let first = seen.start & !(PAGE_SIZE - 1);
                for address in (first..seen.start + seen.len).step_by(PAGE_SIZE) {
                    keeper.fault(Fault { address, write: true, protected: true });
                }
            }
            raw(nr, args)
        })
    };
    match make(seen.write) {
        // What the program may not write to otherwise it can write to so.
        failed if failed == -(libc::EIO as isize) && seen.write => make(false),
        made => made,
    }
}

/// Makes it while all that it names is held, or in pieces.
fn made(
    keeper: &dyn Keeper,
    record: &Record,
    entry: &Entry,
    nr: usize,
    args: &[usize; 6],
) -> isize {
    // SAFETY: the program's own call; what it names is held.
    let call = |nr: usize, args: &[usize; 6]| unsafe { signals::call(record, nr, args) };
    if !entry.names {
        return checked(keeper, entry, nr, args, &|_| {}, call(nr, args));
    }
    let names = |each: &mut dyn FnMut(Span)| name(entry, args, each);
    let concerns = || concerns(keeper, &names);
    if entry.lends {
        let mut make = |nr: i64, args: [usize; 6]| {
            let nr = nr as usize;
            plain(keeper, record, calls::look_up(nr), nr, &args)
        };
        if let Some(made) = lent::make(nr, args, concerns, &mut make) {
            return made;
        }
    }
    let mut some = |args: &[usize; 6]| plain(keeper, record, entry, nr, args);
    if let Some(made) = messages::in_pieces(nr, args, &mut some) {
        return made;
    }
    let most = || keeper.piece_bytes();
    let pieces = calls::in_pieces(nr, args, most, concerns, &read_bytes, &mut raw);
    let mut make = |piece: &Piece| {
        let names = |each: &mut dyn FnMut(Span)| piece.names(each);
        under_hold(keeper, record, &names, || {
            let made = match piece.must {
                true => raw(piece.nr, &piece.args),
                false => call(piece.nr, &piece.args),
            };
            // What the call names beside this piece isn't held, and says nothing.
            checked(keeper, entry, nr, &piece.args, &names, made)
        })
    };
    pieces.and_then(|pieces| pieces.run(&read_bytes, &mut raw, &mut make)).unwrap_or_else(|| {
        under_hold(keeper, record, &names, || {
            checked(keeper, entry, nr, args, &names, call(nr, args))
        })
    })
}

/// Words of a call that may be pointers to memory which it doesn't name.
const WORDS_MAX: usize = 160;
const STRUCT_MAX: usize = 512;
/// So many of them are the first words of what it names.
const SPANS_MAX: usize = 32;
const _: () = assert!(WORDS_MAX > 6 + SPANS_MAX);

/// Calls that take addresses of another process: what is at those here says nothing.
const FOR_OTHERS: [i64; 5] = [
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_ptrace,
    libc::SYS_move_pages,
];

/// The result of a call. The net: if it says EFAULT, the keeper is asked whether the table is to
/// blame. It isn't made again: what a first try has done nobody knows.
fn checked(
    keeper: &dyn Keeper,
    entry: &Entry,
    nr: usize,
    args: &[usize; 6],
    names: Names,
    made: isize,
) -> isize {
    if made == -(libc::EFAULT as isize) && !FOR_OTHERS.contains(&(nr as i64)) {
        let (mut words, mut count) = ([0; WORDS_MAX], args.len());
        words[..count].copy_from_slice(args);
        // The parts of a piece: no argument leads to them.
        names(&mut |span| {
            if count < args.len() + SPANS_MAX {
                words[count] = span.start;
                count += 1;
            }
        });
        names(&mut |span| {
            let len = if span.len <= STRUCT_MAX { span.len / 8 * 8 } else { 0 };
            for at in (span.start..span.start + len).step_by(8) {
                if count < WORDS_MAX
                    && let Ok(word) = read::<usize>(at)
                {
                    words[count] = word;
                    count += 1;
                }
            }
        });
        keeper.refused(nr, entry.name, &words[..count]);
    }
    made
}

/// Limits of a process's memory, descriptors and threads.
const LIMITS: [u32; 5] = [
    libc::RLIMIT_AS,
    libc::RLIMIT_DATA,
    libc::RLIMIT_MEMLOCK,
    libc::RLIMIT_NOFILE,
    libc::RLIMIT_NPROC,
];

/// Whether a process may have fewer rights after a call: to open descriptors, files of /proc, or
/// address space.
fn gives_up_rights(nr: usize, args: &[usize; 6]) -> bool {
    match nr as i64 {
        libc::SYS_chroot
        | libc::SYS_pivot_root
        | libc::SYS_mount
        | libc::SYS_umount2
        | libc::SYS_setuid
        | libc::SYS_setgid
        | libc::SYS_setreuid
        | libc::SYS_setregid
        | libc::SYS_setresuid
        | libc::SYS_setresgid
        | libc::SYS_setfsuid
        | libc::SYS_setfsgid
        | libc::SYS_setgroups
        | libc::SYS_capset
        | libc::SYS_seccomp
        | libc::SYS_landlock_restrict_self => true,
        libc::SYS_setrlimit => LIMITS.contains(&(args[0] as u32)),
        libc::SYS_prlimit64 => args[2] != 0 && LIMITS.contains(&(args[1] as u32)),
        libc::SYS_prctl => matches!(
            args[0] as i32,
            libc::PR_SET_DUMPABLE | libc::PR_SET_SECCOMP | libc::PR_SET_NO_NEW_PRIVS
        ),
        _ => false,
    }
}

/// Whether a thread may have other users, groups or capabilities after a call.
fn changes_identity(nr: usize) -> bool {
    matches!(
        nr as i64,
        libc::SYS_setuid
            | libc::SYS_setgid
            | libc::SYS_setreuid
            | libc::SYS_setregid
            | libc::SYS_setresuid
            | libc::SYS_setresgid
            | libc::SYS_capset
    )
}

fn is_wish_to_be_traced(nr: usize, args: &[usize; 6]) -> bool {
    nr as i64 == libc::SYS_ptrace && args[0] == libc::PTRACE_TRACEME as usize
}

/// Whether a call can be made without a context, from a patched site.
pub fn is_plain(entry: &Entry, args: &[usize; 6]) -> bool {
    calls::class(entry, args) == Class::Plain
        && !is_wish_to_be_traced(entry.number as usize, args)
        && !gives_up_rights(entry.number as usize, args)
        && !matches!(
            i64::from(entry.number),
            libc::SYS_exit_group
                | libc::SYS_kill
                | libc::SYS_rt_sigqueueinfo
                | libc::SYS_rt_tgsigqueueinfo
                | libc::SYS_pidfd_send_signal
                | libc::SYS_set_tid_address
                | libc::SYS_set_robust_list
                | libc::SYS_rseq
                | libc::SYS_arch_prctl
                | libc::SYS_prctl
                | libc::SYS_unshare
                | libc::SYS_setns
                | libc::SYS_getrlimit
                | libc::SYS_prlimit64
        )
}

/// Makes a call of a patched site; `None`: it must come as SIGSYS.
pub fn make_plain(
    keeper: &dyn Keeper,
    record: &Record,
    nr: usize,
    args: &[usize; 6],
) -> Option<isize> {
    let entry = calls::look_up(nr);
    is_plain(entry, args).then(|| plain(keeper, record, entry, nr, args))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keeper::{BadAddress, Fault, Hold, NoRoom};
    use memfold_sys::raw::system_call;
    use std::sync::Mutex;

    /// Owns all memory, holds nothing, and notes what it is asked about failed calls.
    struct Asked(Mutex<Vec<Vec<usize>>>);

    impl Keeper for Asked {
        fn concerns(&self, _: usize, _: usize) -> bool {
            true
        }
        fn hold(
            &self,
            _: Names,
            _: usize,
            _: fn(usize, bool) -> Result<(), BadAddress>,
        ) -> Result<Option<Hold>, NoRoom> {
            Ok(None)
        }
        fn release(&self, _: Hold) {}
        fn piece_bytes(&self) -> usize {
            64 << 10
        }
        fn refused(&self, _: usize, _: &str, words: &[usize]) {
            self.0.lock().unwrap().push(words.to_vec());
        }
        fn change(
            &self,
            _: usize,
            _: &[usize; 6],
            _: &mut dyn FnMut(&[usize; 6]) -> isize,
        ) -> isize {
            unreachable!()
        }
        fn begin_copy(&self) {
            unreachable!()
        }
        fn end_copy(&self, _: isize) {
            unreachable!()
        }
        fn fault(&self, _: Fault) -> bool {
            false
        }
        fn never_fold(&self, _: usize, _: usize) {}
        fn owns_descriptor(&self, _: i32) -> bool {
            false
        }
        fn ends(&self, _: Ending) {}
    }

    #[test]
    fn a_piece_that_fails_is_told_of_as_a_whole_call_is() {
        const BYTES: usize = 1 << 20;
        let (protection, flags) = (libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let args = [0, BYTES, protection as usize, flags as usize, usize::MAX, 0];
        // SAFETY: a new mapping.
        let bad = unsafe { system_call(libc::SYS_mmap, args) }.unwrap() as usize;
        let (_reader, writer) = std::io::pipe().unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&writer) as usize;
        let parts = [[bad, BYTES / 2], [bad + BYTES / 2, BYTES / 2]];
        let calls = [
            (libc::SYS_write, [fd, bad, BYTES, 0, 0, 0]),
            (libc::SYS_writev, [fd, parts.as_ptr() as usize, 2, 0, 0, 0]),
        ];
        let record = Record::take().unwrap();
        for (nr, args) in calls {
            let asked = Asked(Mutex::new(Vec::new()));
            let entry = calls::look_up(nr as usize);
            let made = plain(&asked, record, entry, nr as usize, &args);
            assert_eq!(made, -(libc::EFAULT as isize));
            let asked = asked.0.into_inner().unwrap();
            assert!(asked.len() == 1 && asked[0].contains(&bad), "{asked:x?}");
        }
        record.give_back();
    }

    /// Its start may be folded by then.
    #[test]
    fn of_a_later_piece_that_fails_the_start_of_the_buffer_is_not_told() {
        const PIECE: usize = 64 << 10;
        let (access, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let args = [0, 2 * PIECE, access as usize, flags as usize, usize::MAX, 0];
        // SAFETY: a new mapping, whose second half nobody uses.
        let start = unsafe {
            let start = system_call(libc::SYS_mmap, args).unwrap() as usize;
            let half = [start + PIECE, PIECE, libc::PROT_NONE as usize, 0, 0, 0];
            system_call(libc::SYS_mprotect, half).unwrap();
            start
        };
        let (_reader, writer) = std::io::pipe().unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&writer) as usize;
        // It has room for all.
        let room = [fd, libc::F_SETPIPE_SZ as usize, 4 * PIECE, 0, 0, 0];
        // SAFETY: the call touches no memory.
        unsafe { system_call(libc::SYS_fcntl, room) }.unwrap();
        let (record, asked) = (Record::take().unwrap(), Asked(Mutex::new(Vec::new())));
        let (nr, args) = (libc::SYS_write as usize, [fd, start, 2 * PIECE, 0, 0, 0]);
        let made = plain(&asked, record, calls::look_up(nr), nr, &args);
        assert_eq!(made, PIECE as isize);
        let asked = asked.0.into_inner().unwrap();
        assert!(asked.len() == 1 && asked[0].contains(&(start + PIECE)), "{asked:x?}");
        assert!(!asked[0].contains(&start), "{asked:x?}");
        record.give_back();
    }
}
