//! The identity of a thread (credentials(7)), which decides what the kernel permits. It is the
//! thread's own, although libc changes it in all threads of a program together.
use crate::Errno;
use crate::raw::system_call;
use alloc::vec::Vec;

/// `_LINUX_CAPABILITY_VERSION_3`: two words of each kind.
const VERSION: u32 = 0x2008_0522;
/// Capabilities with which a thread can become any user, or be in any group.
const CAP_SETGID: u64 = 1 << 6;
const CAP_SETUID: u64 = 1 << 7;

/// The users and groups of a thread (real, effective, saved), and its permitted capabilities.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct ThreadIdentity {
    users: [u32; 3],
    groups: [u32; 3],
    permitted: u64,
}

impl ThreadIdentity {
    /// Returns the calling thread's.
    ///
    /// # Errors
    /// Only if a system call filter of the program refuses the query.
    pub fn own() -> Result<ThreadIdentity, Errno> {
        let mut own = ThreadIdentity::default();
        three(libc::SYS_getresuid, &mut own.users)?;
        three(libc::SYS_getresgid, &mut own.groups)?;
        let (mut head, mut words) = ([VERSION, 0], [0u32; 6]);
        let args = [&raw mut head as usize, &raw mut words as usize, 0, 0, 0, 0];
        // SAFETY: both are local and have the length of this version.
        unsafe { system_call(libc::SYS_capget, args) }?;
        // Effective, permitted, inheritable; the upper three follow the lower.
        own.permitted = u64::from(words[1]) | u64::from(words[4]) << 32;
        Ok(own)
    }

    /// Returns the real user.
    pub fn user(&self) -> u32 {
        self.users[0]
    }

    /// Returns whether a thread with this identity can become `other` itself.
    pub fn can_become(&self, other: &ThreadIdentity) -> bool {
        let has = |own: &[u32], its: &[u32], by| {
            self.permitted & by != 0 || its.iter().all(|id| own.contains(id))
        };
        other.permitted & !self.permitted == 0
            && has(&self.users, &other.users, CAP_SETUID)
            && has(&self.groups, &other.groups, CAP_SETGID)
    }
}

/// The rights of a thread, which other threads can take.
pub struct ThreadRights {
    identity: ThreadIdentity,
    /// Supplementary groups.
    groups: Vec<u32>,
}

impl ThreadRights {
    /// Returns the calling thread's.
    ///
    /// # Errors
    /// The errors of [`ThreadIdentity::own`].
    pub fn own() -> Result<ThreadRights, Errno> {
        let mut groups = Vec::new();
        loop {
            let (at, len) = (groups.as_mut_ptr() as usize, groups.len());
            // SAFETY: the list has as many places as passed; 0 asks for their number.
            let count =
                unsafe { system_call(libc::SYS_getgroups, [len, at, 0, 0, 0, 0]) }? as usize;
            if len > 0 || count == 0 {
                groups.truncate(count);
                return Ok(ThreadRights { identity: ThreadIdentity::own()?, groups });
            }
            groups.resize(count, 0);
        }
    }

    /// Limits the calling thread to these rights from now on. The thread must be able to
    /// ([`ThreadIdentity::can_become`]).
    ///
    /// # Errors
    /// EPERM: it can't.
    pub fn take(&self) -> Result<(), Errno> {
        let ThreadIdentity { users, groups, permitted } = self.identity;
        let call = |number, args: [usize; 3]| {
            // SAFETY: the call changes what the kernel permits to the calling thread. Its arguments
            // are numbers, and lists of the passed length.
            unsafe { system_call(number, [args[0], args[1], args[2], 0, 0, 0]) }.map(drop)
        };
        let three = |ids: [u32; 3]| ids.map(|id| id as usize);
        // A thread that may not set its groups keeps them.
        let _ = call(libc::SYS_setgroups, [self.groups.len(), self.groups.as_ptr() as usize, 0]);
        // Otherwise a change of user may drop all capabilities, and the next steps would fail.
        let keep = |keeps: usize| {
            let _ = call(libc::SYS_prctl, [libc::PR_SET_KEEPCAPS as usize, keeps, 0]);
        };
        call(libc::SYS_setresgid, three(groups))?;
        keep(usize::from(permitted != 0));
        call(libc::SYS_setresuid, three(users))?;
        keep(0);
        // A change of user may have dropped them all the same.
        let capabilities = ThreadIdentity::own()?.permitted & permitted;
        let (low, high) = (capabilities as u32, (capabilities >> 32) as u32);
        let (head, words) = ([VERSION, 0u32], [low, low, 0, high, high, 0]);
        call(libc::SYS_capset, [&raw const head as usize, &raw const words as usize, 0])
    }
}

/// Reads three numbers of a kind, by a call that stores them.
fn three(call: i64, to: &mut [u32; 3]) -> Result<(), Errno> {
    let at = to.as_mut_ptr();
    let args = [at as usize, at.wrapping_add(1) as usize, at.wrapping_add(2) as usize, 0, 0, 0];
    // SAFETY: the kernel writes one number to each.
    unsafe { system_call(call, args) }.map(drop)
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn identity_is_the_kernels_and_can_become_itself() {
        let own = ThreadIdentity::own().unwrap();
        // SAFETY: both calls only read.
        let ids = unsafe { (libc::getuid(), libc::getgid()) };
        assert_eq!((own.user(), own.groups[0]), ids);
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("CapPrm:")).unwrap();
        assert_eq!(own.permitted, u64::from_str_radix(line.trim(), 16).unwrap());
        assert!(own.can_become(&own));
    }

    /// Runs in a thread of its own, whose rights no other thread shares.
    #[test]
    fn thread_takes_the_rights_of_another_and_no_more() {
        let nobody = || {
            if ThreadIdentity::own().unwrap().permitted & CAP_SETUID == 0 {
                std::eprintln!("skipped: needs CAP_SETUID");
                return None;
            }
            let args = [65534, 65534, 65534, 0, 0, 0];
            // SAFETY: the calls change only this thread.
            unsafe {
                system_call(libc::SYS_setgroups, [0; 6]).unwrap();
                system_call(libc::SYS_setresgid, args).unwrap();
                system_call(libc::SYS_setresuid, args).unwrap();
            }
            Some(ThreadRights::own().unwrap())
        };
        let Some(rights) = std::thread::spawn(nobody).join().unwrap() else { return };
        let outcome = std::thread::spawn(move || {
            rights.take().unwrap();
            let now = ThreadRights::own().unwrap();
            (now.identity == rights.identity, now.groups.len(), rights.take())
        });
        assert_eq!(outcome.join().unwrap(), (true, 0, Ok(())));
        let own = ThreadRights::own().unwrap();
        let is_same =
            std::thread::spawn(move || (own.take(), ThreadIdentity::own() == Ok(own.identity)));
        assert_eq!(is_same.join().unwrap(), (Ok(()), true));
    }

    #[test]
    fn who_has_given_something_up_for_good_cant_become_what_it_was() {
        let root = ThreadIdentity { permitted: !0, ..ThreadIdentity::default() };
        let nobody = ThreadIdentity { users: [9; 3], groups: [9; 3], permitted: 0 };
        let only_group = ThreadIdentity { groups: [9; 3], ..root };
        let for_now = ThreadIdentity { users: [0, 9, 0], ..root };
        let keeps = ThreadIdentity { users: [9; 3], permitted: CAP_SETUID | CAP_SETGID, ..root };
        assert!(root.can_become(&nobody) && !nobody.can_become(&root));
        assert!(only_group.can_become(&root) && for_now.can_become(&root));
        assert!(!keeps.can_become(&root) && keeps.can_become(&nobody));
        let two = ThreadIdentity { users: [5, 6, 6], ..nobody };
        assert!(!ThreadIdentity { users: [5, 5, 5], ..two }.can_become(&two));
        assert!(two.can_become(&ThreadIdentity { users: [6, 5, 5], ..two }));
    }
}
