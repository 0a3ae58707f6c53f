//! A library for LD_PRELOAD whose keeper has no memory: the program must not see a difference.
//!
//! With `MEMFOLD_GATE_COUNT` in the environment, the process writes what it was asked to that
//! descriptor when it ends.
use core::ffi::{CStr, c_char, c_int};
use core::sync::atomic::{AtomicI32, AtomicUsize, Ordering::Relaxed};
use memfold_gate::{
    AnyRights, BadAddress, HoldKeeper, Keeper, KeeperFault, KeeperHold, LifeKeeper, Names,
    NoHoldRoom, NoServer, NoThreads, OtherProcess, PageKeeper,
};

struct CountingKeeper;

static KEEPER: Keeper = Keeper {
    holds: &CountingKeeper,
    pages: &CountingKeeper,
    life: &CountingKeeper,
    children: &NoServer,
    rights: &AnyRights,
    threads: &NoThreads,
};
static CONCERNS: AtomicUsize = AtomicUsize::new(0);
static CHANGES: AtomicUsize = AtomicUsize::new(0);
static COPIES: AtomicUsize = AtomicUsize::new(0);
static TO: AtomicI32 = AtomicI32::new(-1);

impl HoldKeeper for CountingKeeper {
    fn concerns(&self, _start: usize, _len: usize) -> bool {
        true
    }

    fn hold(
        &self,
        names: Names,
        _thread: usize,
        touch: fn(usize, bool) -> Result<(), BadAddress>,
    ) -> Result<Option<KeeperHold>, NoHoldRoom> {
        names(&mut |span| {
            CONCERNS.fetch_add(1, Relaxed);
            // What is touched is the program's, and goes on as it was.
            let mut at = span.start;
            while at < span.start + span.len {
                if touch(at, span.write).is_err() {
                    break;
                }
                at = (at | 4095) + 1;
            }
        });
        Ok(Some(KeeperHold(0)))
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

impl PageKeeper for CountingKeeper {
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
        CHANGES.fetch_add(1, Relaxed);
        make(args)
    }

    fn never_fold(&self, _start: usize, _len: usize) {}

    fn keep_all(&self, _keep: bool) {}

    fn keep_home(&self, _keep: bool) -> bool {
        true
    }
}

impl LifeKeeper for CountingKeeper {
    fn expect_copy(&self) {}

    fn begin_copy(&self) {
        COPIES.fetch_add(1, Relaxed);
    }

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

    fn ends(&self) {
        say();
    }
}

fn say() {
    let mut text = [b' '; 64];
    let counts = [&CONCERNS, &CHANGES, &COPIES];
    for (at, count) in counts.iter().enumerate() {
        let (mut rest, mut to) = (count.load(Relaxed), at * 20 + 19);
        loop {
            text[to] = b'0' + (rest % 10) as u8;
            (rest, to) = (rest / 10, to - 1);
            if rest == 0 {
                break;
            }
        }
    }
    text[63] = b'\n';
    let to = TO.load(Relaxed) as usize;
    // SAFETY: the text is alive; a descriptor that isn't there is an error.
    let _ = unsafe {
        memfold_os::raw::system_call(libc::SYS_write, [to, text.as_ptr() as usize, 64, 0, 0, 0])
    };
}

extern "C" fn construct(_count: c_int, _args: *const *const c_char, env: *const *const c_char) {
    const NAME: &[u8] = b"MEMFOLD_GATE_COUNT=";
    let mut at = env;
    // SAFETY: the loader gives an array of strings with null at its end.
    unsafe {
        while !(*at).is_null() {
            let each = CStr::from_ptr(*at).to_bytes();
            if let Some(number) = each.strip_prefix(NAME) {
                let number = number.iter().fold(0, |all, digit| all * 10 + i32::from(digit - b'0'));
                TO.store(number, Relaxed);
            }
            at = at.add(1);
        }
        match memfold_gate::start(&KEEPER) {
            Ok(process) => process.keep(),
            Err(why) => panic!("{why:?}"),
        }
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCT: extern "C" fn(c_int, *const *const c_char, *const *const c_char) = construct;
