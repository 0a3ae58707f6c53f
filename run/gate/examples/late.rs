//! A library that is loaded into a program that runs: `memfold_late_arm` arms it. `madvise` with the
//! advice 4242 is answered 4242 by the gate, so a thread can tell whether its calls pass there.
use memfold_gate::{
    AnyRights, BadAddress, HoldKeeper, Keeper, KeeperFault, KeeperHold, LifeKeeper, Names,
    NoHoldRoom, NoServer, NoThreads, OtherProcess, PageKeeper,
};

struct Answers;

static KEEPER: Keeper = Keeper {
    holds: &Answers,
    pages: &Answers,
    life: &Answers,
    children: &NoServer,
    rights: &AnyRights,
    threads: &NoThreads,
};
const ASKED: usize = 4242;

impl HoldKeeper for Answers {
    fn concerns(&self, _start: usize, _len: usize) -> bool {
        false
    }

    fn hold(
        &self,
        _names: Names,
        _thread: usize,
        _touch: fn(usize, bool) -> Result<(), BadAddress>,
    ) -> Result<Option<KeeperHold>, NoHoldRoom> {
        Ok(None)
    }

    fn release(&self, _hold: KeeperHold) {}

    fn lent(
        &self,
        _process: OtherProcess,
        _parts: &[[usize; 2]],
        _write: bool,
        make: &mut dyn FnMut(usize) -> isize,
    ) -> isize {
        make(0)
    }

    fn piece_bytes(&self) -> usize {
        usize::MAX
    }

    fn refused(&self, _nr: usize, _name: &str, _words: &[usize]) {}
}

impl PageKeeper for Answers {
    fn hides(&self) -> bool {
        false
    }

    fn fault(&self, _fault: KeeperFault) -> bool {
        false
    }

    fn change(
        &self,
        _nr: usize,
        args: &[usize; 6],
        make: &mut dyn FnMut(&[usize; 6]) -> isize,
    ) -> isize {
        if args[2] == ASKED { ASKED as isize } else { make(args) }
    }

    fn never_fold(&self, _start: usize, _len: usize) {}

    fn keep_all(&self, _keep: bool) {}

    fn keep_home(&self, _keep: bool) -> bool {
        true
    }
}

impl LifeKeeper for Answers {
    fn expect_copy(&self) {}

    fn begin_copy(&self) {}

    fn end_copy(&self, _made: isize) {}

    fn execute(
        &self,
        _nr: usize,
        args: &[usize; 6],
        make: &mut dyn FnMut(&[usize; 6]) -> isize,
    ) -> isize {
        make(args)
    }

    fn owns_descriptor(&self, _fd: i32) -> bool {
        false
    }

    fn ends(&self) {}
}

/// Arms the process: 0, or what is wrong on standard error.
#[unsafe(no_mangle)]
pub extern "C" fn memfold_late_arm() -> i32 {
    // SAFETY: there are no threads of an engine's, and the keeper makes no call.
    match unsafe { memfold_gate::start(&KEEPER) } {
        Ok(process) => {
            process.keep();
            0
        }
        Err(why) => {
            eprintln!("{why:?}");
            1
        }
    }
}

/// Calls a function while the thread's calls don't pass the gate.
#[unsafe(no_mangle)]
pub extern "C" fn memfold_late_apart(call: extern "C" fn()) {
    // SAFETY: the keeper has no memory, and the program has armed.
    unsafe { memfold_gate::apart(|| call()) }
}
