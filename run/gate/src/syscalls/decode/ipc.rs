//! Names the memory of System V IPC by command, and of POSIX queues.
use super::ask::ask;
use crate::syscalls::operands::Operands;
use crate::syscalls::sizes::*;

const IPC_SET: u32 = 1;
const IPC_STAT: u32 = 2;
const IPC_INFO: u32 = 3;

/// Names the memory of `shmctl`, by command.
pub fn shmctl(n: &mut Operands) {
    let at = n.arg(2);
    match n.int(1) {
        IPC_SET => n.reads(at, SHMID_DS),
        // SHM_STAT, SHM_STAT_ANY
        IPC_STAT | 13 | 15 => n.writes(at, SHMID_DS),
        IPC_INFO => n.writes(at, SHMINFO),
        // SHM_INFO
        14 => n.writes(at, SHM_INFO),
        _ => {}
    }
}

/// Names the memory of `msgctl`, by command.
pub fn msgctl(n: &mut Operands) {
    let at = n.arg(2);
    match n.int(1) {
        IPC_SET => n.reads(at, MSQID_DS),
        // MSG_STAT, MSG_STAT_ANY
        IPC_STAT | 11 | 13 => n.writes(at, MSQID_DS),
        // MSG_INFO
        IPC_INFO | 12 => n.writes(at, MSGINFO),
        _ => {}
    }
}

/// Names the memory of `semctl`, by command.
pub fn semctl(n: &mut Operands) {
    let at = n.arg(3);
    match n.int(2) {
        IPC_SET => n.reads(at, SEMID_DS),
        // SEM_STAT, SEM_STAT_ANY
        IPC_STAT | 18 | 20 => n.writes(at, SEMID_DS),
        // SEM_INFO
        IPC_INFO | 19 => n.writes(at, SEMINFO),
        // GETALL, SETALL
        13 => n.writes(at, semaphores(n.arg(0)) * 2),
        17 => n.reads(at, semaphores(n.arg(0)) * 2),
        _ => {}
    }
}

/// Returns the number of semaphores in a set. If the kernel doesn't tell, returns the most that a
/// set may have.
fn semaphores(id: usize) -> usize {
    const MOST: usize = 32000;
    let mut about = [0u64; SEMID_DS / 8];
    let args = [id, 0, IPC_STAT as usize, &raw mut about as usize, 0, 0];
    // SAFETY: `about` has room for the struct that this command writes, and lives until the call
    // returns. `sem_nsems` follows the permissions (48 bytes) and two times, each with a word after
    // it.
    let known = unsafe { ask(libc::SYS_semctl, args) };
    known.map_or(MOST, |_| (about[10] as usize).min(MOST))
}

/// Names a message to send: a type, and a text of a given length.
pub fn msgsnd(n: &mut Operands) {
    n.reads(n.arg(1), n.arg(2).saturating_add(8));
}

/// Names room for a type and a message.
pub fn msgrcv(n: &mut Operands) {
    n.writes(n.arg(1), n.arg(2).saturating_add(8));
}

/// Names an event. Its value points to 32 bytes if a thread is to be notified.
pub fn mq_notify(n: &mut Operands) {
    if let Some(event) = n.take::<SIGEVENT>(n.arg(1))
        && event.half(12) == libc::SIGEV_THREAD as u32
    {
        n.reads(event.word(0), 32);
    }
}
