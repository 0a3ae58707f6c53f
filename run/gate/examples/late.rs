//! A library that is loaded into a program that runs: `memfold_late_arm` arms it. `madvise` with the
//! advice 4242 is answered 4242 by the gate, so a thread can tell whether its calls pass there.
use memfold_gate::{BadAddress, Keeper, KeeperFault, KeeperHold, Names, NoHoldRoom};

struct Answers;

static KEEPER: Answers = Answers;
const ASKED: usize = 4242;

impl Keeper for Answers {
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

    fn piece_bytes(&self) -> usize {
        usize::MAX
    }

    fn refused(&self, _nr: usize, _name: &str, _words: &[usize]) {}

    fn change(
        &self,
        _nr: usize,
        args: &[usize; 6],
        make: &mut dyn FnMut(&[usize; 6]) -> isize,
    ) -> isize {
        if args[2] == ASKED { ASKED as isize } else { make(args) }
    }

    fn begin_copy(&self) {}

    fn end_copy(&self, _made: isize) {}

    fn fault(&self, _fault: KeeperFault) -> bool {
        false
    }

    fn never_fold(&self, _start: usize, _len: usize) {}

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
