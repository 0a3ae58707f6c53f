//! What the kernel lets a thread do by whose it is (credentials(7)): it is the thread's own, also
//! where libc has all threads of a program change theirs together.
use crate::Errno;
use crate::raw::system_call;

/// `_LINUX_CAPABILITY_VERSION_3`: two words of each kind.
const VERSION: u32 = 0x2008_0522;
/// Capabilities with which a thread can become any user, or be in any group.
const CAP_SETGID: u64 = 1 << 6;
const CAP_SETUID: u64 = 1 << 7;

/// The users and groups of a thread (real, effective, saved), and its permitted capabilities.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    users: [u32; 3],
    groups: [u32; 3],
    permitted: u64,
}

impl Identity {
    /// The calling thread's.
    ///
    /// # Errors
    /// Only where a filter of system calls of the program's refuses to tell.
    pub fn own() -> Result<Identity, Errno> {
        let mut own = Identity::default();
        three(libc::SYS_getresuid, &mut own.users)?;
        three(libc::SYS_getresgid, &mut own.groups)?;
        let (mut head, mut words) = ([VERSION, 0], [0u32; 6]);
        let args = [&raw mut head as usize, &raw mut words as usize, 0, 0, 0, 0];
        // SAFETY: both are local and as long as the kernel takes them to be in this version.
        unsafe { system_call(libc::SYS_capget, args) }?;
        // Effective, permitted, inheritable; the upper three behind the lower.
        own.permitted = u64::from(words[1]) | u64::from(words[4]) << 32;
        Ok(own)
    }

    /// The real user.
    pub fn user(&self) -> u32 {
        self.users[0]
    }

    /// Whether a thread that is this can become `other` by itself.
    pub fn can_become(&self, other: &Identity) -> bool {
        let has = |own: &[u32], its: &[u32], by| {
            self.permitted & by != 0 || its.iter().all(|id| own.contains(id))
        };
        other.permitted & !self.permitted == 0
            && has(&self.users, &other.users, CAP_SETUID)
            && has(&self.groups, &other.groups, CAP_SETGID)
    }
}

/// Three numbers of a kind, by a call that stores them.
fn three(call: i64, to: &mut [u32; 3]) -> Result<(), Errno> {
    let at = to.as_mut_ptr();
    let args = [at as usize, at.wrapping_add(1) as usize, at.wrapping_add(2) as usize, 0, 0, 0];
    // SAFETY: the kernel writes one number to each.
    unsafe { system_call(call, args) }.map(drop)
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn the_calling_threads_is_what_the_kernel_says_and_can_become_itself() {
        let own = Identity::own().unwrap();
        // SAFETY: only ask.
        let ids = unsafe { (libc::getuid(), libc::getgid()) };
        assert_eq!((own.user(), own.groups[0]), ids);
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("CapPrm:")).unwrap();
        assert_eq!(own.permitted, u64::from_str_radix(line.trim(), 16).unwrap());
        assert!(own.can_become(&own));
    }

    #[test]
    fn who_has_given_something_up_for_good_cant_become_what_it_was() {
        let root = Identity { permitted: !0, ..Identity::default() };
        let nobody = Identity { users: [9; 3], groups: [9; 3], permitted: 0 };
        let only_group = Identity { groups: [9; 3], ..root };
        let for_now = Identity { users: [0, 9, 0], ..root };
        let keeps = Identity { users: [9; 3], permitted: CAP_SETUID | CAP_SETGID, ..root };
        assert!(root.can_become(&nobody) && !nobody.can_become(&root));
        assert!(only_group.can_become(&root) && for_now.can_become(&root));
        assert!(!keeps.can_become(&root) && keeps.can_become(&nobody));
        let two = Identity { users: [5, 6, 6], ..nobody };
        assert!(!Identity { users: [5, 5, 5], ..two }.can_become(&two));
        assert!(two.can_become(&Identity { users: [6, 5, 5], ..two }));
    }
}
