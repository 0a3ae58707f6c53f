//! Serves calls that change what a process may do, or how much it may have.
use crate::signals;
use crate::syscalls::row::{ProgramCall, value};
use crate::touch::{read, write};
use memfold_os::Errno;
use memfold_os::thread::process_id;

/// The limits of memory, descriptors and threads. If one of them is low, the keeper can't begin any
/// more.
const LIMITS: [u32; 5] = [
    libc::RLIMIT_AS,
    libc::RLIMIT_DATA,
    libc::RLIMIT_MEMLOCK,
    libc::RLIMIT_NOFILE,
    libc::RLIMIT_NPROC,
];

/// Serves calls after which a process may have fewer rights: to descriptors, files of /proc, or
/// address space.
pub fn give_up_rights(call: &mut ProgramCall) -> isize {
    call.keeper.rights.last_chance();
    call.wait()
}

/// Serves calls after which a thread may have other users, groups or capabilities.
pub fn change_identity(call: &mut ProgramCall) -> isize {
    let result = give_up_rights(call);
    if result >= 0 {
        signals::block_all();
        call.keeper.rights.give_up_rights();
    }
    result
}

/// Serves `getrlimit`, `setrlimit` and `prlimit64`. The keeper answers for the limits of this
/// process.
pub fn limit(call: &mut ProgramCall) -> isize {
    let [first, second, third, fourth, ..] = call.args;
    let (process, resource, new_at, old_at) = match call.nr as i64 {
        libc::SYS_getrlimit => (0, first, 0, second),
        libc::SYS_setrlimit => (0, first, second, 0),
        _ => (first as u32, second, third, fourth),
    };
    if process != 0 && process != process_id() {
        return call.wait();
    }
    if (new_at != 0 || call.nr as i64 == libc::SYS_setrlimit) && LIMITS.contains(&(resource as u32))
    {
        call.keeper.rights.last_chance();
    }
    let new = (new_at != 0).then(|| read::<[usize; 2]>(new_at)).transpose();
    let Ok(new) = new else { return -(libc::EFAULT as isize) };
    let new = new.map(|new| new.map(|each| each as u64));
    value(call.keeper.threads.limit(resource as u32, new).and_then(|before| {
        let before = before.map(|each| each as usize);
        // SAFETY: the program passed this address for the previous limit.
        let is_written = old_at == 0 || unsafe { write(old_at, &before) }.is_ok();
        if is_written { Ok(()) } else { Err(Errno::FAULT) }
    }))
}
