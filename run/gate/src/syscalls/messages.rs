//! Makes `sendmmsg` and `recvmmsg` with many parts for some messages at a time. A call may name a
//! million parts, and otherwise all that it names would be held at once. The kernel also handles
//! message by message.
//!
//! One difference remains. A socket error that comes with a later message is consumed by this call,
//! which returns only the number of messages before.
use crate::call_state::CALLED_OFF;
use crate::touch::read;

/// The most parts that are named at a time, unless one message has more.
const PARTS_MAX: usize = 512;
/// The most messages that the kernel takes in one call.
const MESSAGES_MAX: usize = 1024;
/// The size of `struct mmsghdr`, and the offset of its count of parts.
const MESSAGE_BYTES: usize = 64;
const COUNT_AT: usize = 24;

/// Makes such a call for some messages at a time, by `make`, and returns its result. Returns `None`
/// if the call has few parts or is another call.
pub fn in_pieces(
    nr: usize,
    args: &[usize; 6],
    make: &mut dyn FnMut(&[usize; 6]) -> isize,
) -> Option<isize> {
    let receives = match nr as i64 {
        libc::SYS_sendmmsg => false,
        libc::SYS_recvmmsg => true,
        _ => return None,
    };
    let (messages, count) = (args[1], (args[2] as u32 as usize).min(MESSAGES_MAX));
    let (mut done_count, mut flags) = (0, args[3]);
    while done_count < count {
        let some = few(messages.wrapping_add(done_count * MESSAGE_BYTES), count - done_count);
        if done_count == 0 && some == count {
            return None;
        }
        let at = messages.wrapping_add(done_count * MESSAGE_BYTES);
        let result = make(&[args[0], at, some, flags, args[4], args[5]]);
        if result == CALLED_OFF || result < 0 {
            return Some(if done_count > 0 { done_count as isize } else { result });
        }
        done_count += result as usize;
        if (result as usize) < some || receives && is_over(args[4]) {
            break;
        }
        if receives && flags as i32 & libc::MSG_WAITFORONE != 0 {
            flags |= libc::MSG_DONTWAIT as usize;
        }
    }
    Some(done_count as isize)
}

/// Returns the number of messages that have few parts together. It is at least one.
fn few(messages: usize, count: usize) -> usize {
    let mut parts = 0usize;
    for n in 0..count {
        // A message whose count can't be read names nothing.
        let at = messages.wrapping_add(n * MESSAGE_BYTES + COUNT_AT);
        parts = parts.saturating_add(read::<usize>(at).unwrap_or(0));
        if parts > PARTS_MAX {
            return n.max(1);
        }
    }
    count
}

/// Returns whether nothing is left of the time that the kernel has written back.
fn is_over(time: usize) -> bool {
    time != 0 && read::<[usize; 2]>(time).is_ok_and(|time| time == [0, 0])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a call on messages with these counts of parts. Returns its result, and the calls that
    /// were made for it. `says` has their results.
    fn made(
        nr: i64,
        counts: &[usize],
        flags: i32,
        says: &[isize],
    ) -> (Option<isize>, Vec<[usize; 3]>) {
        let mut messages = vec![[0usize; 8]; counts.len()];
        messages.iter_mut().zip(counts).for_each(|(message, count)| message[3] = *count);
        let at = messages.as_ptr() as usize;
        let (mut pieces, mut says) = (Vec::new(), says.iter());
        let args = [3, at, counts.len(), flags as usize, 0, 0];
        let result = in_pieces(nr as usize, &args, &mut |args| {
            pieces.push([(args[1] - at) / MESSAGE_BYTES, args[2], args[3]]);
            *says.next().unwrap()
        });
        (result, pieces)
    }

    #[test]
    fn messages_of_many_parts_are_sent_in_groups() {
        let (send, receive) = (libc::SYS_sendmmsg, libc::SYS_recvmmsg);
        assert_eq!(made(send, &[1; 512], 0, &[]), (None, vec![]));
        assert_eq!(made(send, &[600], 0, &[]), (None, vec![]));
        let many = [256, 256, 600, 1, 512];
        let all = vec![[0, 2, 7], [2, 1, 7], [3, 1, 7], [4, 1, 7]];
        assert_eq!(made(send, &many, 7, &[2, 1, 1, 1]), (Some(5), all.clone()));
        // Fewer messages than asked for, an error, a signal.
        assert_eq!(made(send, &many, 7, &[2, 0]), (Some(2), all[..2].to_vec()));
        assert_eq!(made(send, &many, 7, &[1]), (Some(1), all[..1].to_vec()));
        assert_eq!(made(send, &many, 7, &[2, 1, -32]), (Some(3), all[..3].to_vec()));
        assert_eq!(made(send, &many, 7, &[CALLED_OFF]), (Some(CALLED_OFF), all[..1].to_vec()));
        assert_eq!(made(send, &many, 7, &[2, CALLED_OFF]), (Some(2), all[..2].to_vec()));
        assert_eq!(made(receive, &many, 0, &[-11]).0, Some(-11));
        // The call waits for one message, and doesn't wait for the others.
        let (one, now) = (libc::MSG_WAITFORONE, libc::MSG_DONTWAIT);
        let pieces = made(receive, &many, one, &[2, -11]).1;
        assert_eq!(pieces, [[0, 2, one as usize], [2, 1, (one | now) as usize]]);
    }
}
