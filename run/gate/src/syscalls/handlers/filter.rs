//! Runs a seccomp filter of the program on calls that the gate or the keeper makes, to find out
//! whether it refuses them. A filter is classic BPF over `struct seccomp_data` (`kernel/seccomp.c`,
//! `seccomp_check_filter`).
use crate::keeper::{KeeperCall, RightsKeeper};
use crate::touch::read;
use crate::user_dispatch::PR_SET_SYSCALL_USER_DISPATCH;

const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;
/// The number of words of `struct seccomp_data`: number, architecture, address, six arguments.
const DATA_WORDS: usize = 16;
const SCRATCH_WORDS: usize = 16;
/// The actions after which a call is made, at least if a tracer or supervisor agrees.
const LETS_THROUGH: [u32; 4] = [
    libc::SECCOMP_RET_ALLOW,
    libc::SECCOMP_RET_LOG,
    libc::SECCOMP_RET_TRACE,
    libc::SECCOMP_RET_USER_NOTIF,
];

/// The calls that the gate makes for a thread, and at the start of a new thread or process.
const OWN_CALLS: [KeeperCall; 5] = [
    KeeperCall::needed(libc::SYS_rt_sigreturn, [0; 4]),
    KeeperCall::needed(libc::SYS_rt_sigprocmask, [0; 4]),
    KeeperCall::needed(libc::SYS_prctl, [PR_SET_SYSCALL_USER_DISPATCH as usize, 1, 0, 0]),
    KeeperCall::needed(libc::SYS_sigaltstack, [0; 4]),
    KeeperCall::tried(libc::SYS_mprotect, [0; 4]),
];

/// Returns the address of the filter that a call sets, or `None` if it sets none.
pub fn set_by(nr: usize, args: &[usize; 6]) -> Option<usize> {
    let sets = match nr as i64 {
        libc::SYS_prctl => {
            args[0] as i32 == libc::PR_SET_SECCOMP && args[1] == libc::SECCOMP_MODE_FILTER as usize
        }
        libc::SYS_seccomp => args[0] as u32 == libc::SECCOMP_SET_MODE_FILTER,
        _ => false,
    };
    sets.then_some(args[2])
}

/// Returns whether a call asks for SECCOMP_MODE_STRICT.
pub fn wants_strict(nr: usize, args: &[usize; 6]) -> bool {
    match nr as i64 {
        libc::SYS_prctl => {
            args[0] as i32 == libc::PR_SET_SECCOMP && args[1] == libc::SECCOMP_MODE_STRICT as usize
        }
        libc::SYS_seccomp => {
            args[0] as u32 == libc::SECCOMP_SET_MODE_STRICT && args[1] as u32 == 0 && args[2] == 0
        }
        _ => false,
    }
}

/// Returns whether a filter refuses a call that the gate or the keeper makes. `of_all` is whether it
/// is for the keeper's threads too. In a copy of the process it is.
pub fn refuses_own(rights: &dyn RightsKeeper, at: usize, of_all: bool) -> bool {
    let forks = forks(at);
    let mut any = OWN_CALLS.iter().any(|call| refuses(at, call));
    rights.each_call(of_all || forks, &mut |call| any = any || refuses(at, call));
    any || forks && CALLS_OF_COPY.iter().any(|call| refuses(at, call))
}

/// The flags with which libc's `fork` makes a copy of the process.
const FORK: usize =
    (libc::CLONE_CHILD_CLEARTID | libc::CLONE_CHILD_SETTID | libc::SIGCHLD) as usize;
/// The flags with which the keeper makes its first thread in a copy of the process.
const FIRST_THREAD: usize = (libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID) as usize;

/// The calls that a copy of the process makes before its program continues. Without a userfaultfd
/// or a file of /proc it continues in another way.
const CALLS_OF_COPY: [KeeperCall; 8] = [
    KeeperCall::needed(libc::SYS_clone, [FIRST_THREAD, 0, 0, 0]),
    KeeperCall::tried(libc::SYS_userfaultfd, [1, 0, 0, 0]),
    KeeperCall::tried(libc::SYS_openat, [0; 4]),
    KeeperCall::tried(libc::SYS_dup3, [0; 4]),
    KeeperCall::tried(libc::SYS_fcntl, [0; 4]),
    KeeperCall::tried(libc::SYS_close, [0; 4]),
    KeeperCall::tried(libc::SYS_close_range, [0; 4]),
    KeeperCall::tried(libc::SYS_prctl, [libc::PR_SET_NAME as usize, 0, 0, 0]),
];

/// Returns whether a thread with this filter can copy its process.
fn forks(at: usize) -> bool {
    let copies = [(libc::SYS_clone, FORK), (libc::SYS_fork, 0), (libc::SYS_clone3, 0)];
    copies.into_iter().any(|(nr, flags)| !refuses(at, &KeeperCall::needed(nr, [flags, 0, 0, 0])))
}

/// Returns whether a filter refuses a call in a way that it must not. `at` is the address of the
/// filter's `struct sock_fprog`. A filter that can't be read or isn't valid refuses nothing, because
/// the kernel doesn't take it.
fn refuses(at: usize, call: &KeeperCall) -> bool {
    let mut data = [0u32; DATA_WORDS];
    (data[0], data[1]) = (call.number as u32, AUDIT_ARCH_X86_64);
    let address = refuses as *const () as usize;
    (data[2], data[3]) = (address as u32, (address >> 32) as u32);
    for (words, arg) in data[4..].chunks_exact_mut(2).zip(call.args) {
        (words[0], words[1]) = (arg as u32, (arg >> 32) as u32);
    }
    says(at, &data).is_some_and(|answer| {
        let action = answer & libc::SECCOMP_RET_ACTION_FULL;
        let fails = call.may_fail && action == libc::SECCOMP_RET_ERRNO;
        !(fails || LETS_THROUGH.contains(&action))
    })
}

/// The state of a filter that runs.
struct FilterMachine {
    a: u32,
    x: u32,
    scratch: [u32; SCRATCH_WORDS],
}

/// Returns the filter's result, or `None` if it isn't a valid filter.
fn says(at: usize, data: &[u32; DATA_WORDS]) -> Option<u32> {
    let (len, code) = (read::<u32>(at).ok()? & 0xffff, read::<usize>(at + 8).ok()?);
    let mut machine = FilterMachine { a: 0, x: 0, scratch: [0; SCRATCH_WORDS] };
    let mut next = 0usize;
    while next < len as usize {
        let word = read::<u64>(code.checked_add(next * 8)?).ok()?;
        let (op, k) = (word as u32 & 0xffff, (word >> 32) as u32);
        next += 1;
        match op & 7 {
            libc::BPF_RET => return Some(if op & 0x18 == libc::BPF_A { machine.a } else { k }),
            libc::BPF_JMP => {
                let (on_match, otherwise) = (word >> 16 & 0xff, word >> 24 & 0xff);
                next += match op & 0xf0 {
                    libc::BPF_JA => k as usize,
                    _ if machine.jumps(op, k)? => on_match as usize,
                    _ => otherwise as usize,
                };
            }
            _ => machine.step(op, k, data)?,
        }
    }
    None
}

impl FilterMachine {
    fn operand(&self, op: u32, k: u32) -> u32 {
        if op & libc::BPF_X != 0 { self.x } else { k }
    }

    fn jumps(&self, op: u32, k: u32) -> Option<bool> {
        let operand = self.operand(op, k);
        Some(match op & 0xf0 {
            libc::BPF_JEQ => self.a == operand,
            libc::BPF_JGT => self.a > operand,
            libc::BPF_JGE => self.a >= operand,
            libc::BPF_JSET => self.a & operand != 0,
            _ => return None,
        })
    }

    fn step(&mut self, op: u32, k: u32, data: &[u32; DATA_WORDS]) -> Option<()> {
        let place = k as usize;
        match op & 7 {
            libc::BPF_LD => self.a = self.loaded(op, k, data)?,
            libc::BPF_LDX => self.x = self.loaded(op, k, data)?,
            libc::BPF_ST => *self.scratch.get_mut(place)? = self.a,
            libc::BPF_STX => *self.scratch.get_mut(place)? = self.x,
            libc::BPF_ALU => self.a = self.computed(op, self.operand(op, k))?,
            _ if op & 0xf8 == libc::BPF_TXA => self.a = self.x,
            _ => self.x = self.a,
        }
        Some(())
    }

    fn loaded(&self, op: u32, k: u32, data: &[u32; DATA_WORDS]) -> Option<u32> {
        match op & 0xe0 {
            libc::BPF_IMM => Some(k),
            libc::BPF_ABS => data.get(k as usize / 4).copied(),
            libc::BPF_MEM => self.scratch.get(k as usize).copied(),
            libc::BPF_LEN => Some(size_of_val(data) as u32),
            _ => None,
        }
    }

    fn computed(&self, op: u32, operand: u32) -> Option<u32> {
        let a = self.a;
        Some(match op & 0xf0 {
            libc::BPF_ADD => a.wrapping_add(operand),
            libc::BPF_SUB => a.wrapping_sub(operand),
            libc::BPF_MUL => a.wrapping_mul(operand),
            libc::BPF_DIV => a.checked_div(operand)?,
            libc::BPF_OR => a | operand,
            libc::BPF_AND => a & operand,
            libc::BPF_XOR => a ^ operand,
            libc::BPF_LSH => a.wrapping_shl(operand),
            libc::BPF_RSH => a.wrapping_shr(operand),
            libc::BPF_NEG => a.wrapping_neg(),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(code: &[(u32, u8, u8, u32)], (nr, second): (i64, usize)) -> bool {
        refused_call(code, &KeeperCall::needed(nr, [0, second, 0, 0]))
    }

    fn refused_call(code: &[(u32, u8, u8, u32)], call: &KeeperCall) -> bool {
        let word = |&(op, jt, jf, k): &(u32, u8, u8, u32)| {
            u64::from(op) | u64::from(jt) << 16 | u64::from(jf) << 24 | u64::from(k) << 32
        };
        let code: Vec<u64> = code.iter().map(word).collect();
        let program = [code.len(), code.as_ptr() as usize];
        refuses(program.as_ptr() as usize, call)
    }

    #[test]
    fn filter_is_judged_by_what_it_returns() {
        use libc::*;
        const NUMBER: (u32, u8, u8, u32) = (BPF_LD | BPF_ABS, 0, 0, 0);
        const ALLOW: (u32, u8, u8, u32) = (BPF_RET, 0, 0, SECCOMP_RET_ALLOW);
        let kill = (BPF_RET, 0, 0, SECCOMP_RET_KILL_THREAD);
        let errno = (BPF_RET, 0, 0, SECCOMP_RET_ERRNO | 1);
        let only = |nr: i64| [NUMBER, (BPF_JMP | BPF_JEQ, 0, 1, nr as u32), ALLOW, errno];
        assert!(!refused(&only(SYS_futex), (SYS_futex, 0)));
        assert!(refused(&only(SYS_futex), (SYS_ioctl, 0)));
        assert!(refused(&[kill], (SYS_ioctl, 0)) && !refused(&[ALLOW], (SYS_ioctl, 0)));
        // A filter that decides by the low word of the second argument, with every kind of step.
        let second = [
            (BPF_LD | BPF_ABS, 0, 0, 24),
            (BPF_ST, 0, 0, 3),
            (BPF_LDX | BPF_MEM, 0, 0, 3),
            (BPF_MISC | BPF_TXA, 0, 0, 0),
            (BPF_ALU | BPF_AND, 0, 0, 0xff),
            (BPF_ALU | BPF_ADD | BPF_X, 0, 0, 0),
            (BPF_JMP | BPF_JGT, 0, 1, 20),
            kill,
            (BPF_JMP, 0, 0, 1),
            kill,
            ALLOW,
        ];
        assert!(refused(&second, (SYS_ioctl, 11)) && !refused(&second, (SYS_ioctl, 10)));
        // A call that may fail isn't refused by an error, but by a signal or by an unknown action.
        let fails = [NUMBER, errno];
        let call = KeeperCall::tried(SYS_openat, [0; 4]);
        assert!(!refused_call(&fails, &call) && refused(&fails, (SYS_openat, 0)));
        for action in [SECCOMP_RET_TRAP, SECCOMP_RET_KILL_PROCESS, 0x1234_0000] {
            assert!(refused_call(&[(BPF_RET, 0, 0, action)], &call), "{action:x}");
        }
        // A filter that decides by each of the other arguments.
        for place in [0, 2, 3] {
            let of = |value| {
                let load = (BPF_LD | BPF_ABS, 0, 0, 16 + 8 * place);
                let code = [load, (BPF_JMP | BPF_JEQ, 0, 1, 7), errno, ALLOW];
                let mut args = [0; 4];
                args[place as usize] = value;
                refused_call(&code, &KeeperCall::needed(SYS_mmap, args))
            };
            assert!(of(7) && !of(8), "{place}");
        }
        // None of these is a filter.
        assert!(!refused(&[NUMBER], (SYS_ioctl, 0)) && !refused(&[], (SYS_ioctl, 0)));
        let divides = [(BPF_ALU | BPF_DIV, 0, 0, 0), kill];
        assert!(!refused(&divides, (SYS_ioctl, 0)));
    }
}
