//! Connections to the store, which all engines share.
use crate::link::StoreLink;
use std::sync::{Condvar, Mutex};
use std::time::Instant;

/// Most connections. The store runs one command at a time, so more connections would only wait
/// there.
const LINKS_MAX: usize = 16;
/// Connections that may store or delete at a time. The rest is for reads, for which programs wait.
const MOVES_MAX: usize = 8;

/// What a connection is needed for.
#[derive(Copy, Clone, PartialEq, Eq)]
pub enum LinkWork {
    /// A program waits for it.
    Read,
    /// Anything else.
    Move,
}

/// The connections.
#[derive(Default)]
pub struct LinkPool {
    inner: Mutex<LinkState>,
    returned: Condvar,
}

/// Equations: `free` + `lent` <= [`LINKS_MAX`]; `moving` <= `lent`, [`MOVES_MAX`].
#[derive(Default)]
struct LinkState {
    free: Vec<StoreLink>,
    lent: usize,
    moving: usize,
}

/// The right to one connection. The drop returns it, with the connection in `link`.
pub struct LentLink<'a> {
    links: &'a LinkPool,
    work: LinkWork,
    /// `None`: it must be made.
    pub link: Option<StoreLink>,
}

impl LinkPool {
    /// Returns a connection, or the right to make one. Waits for it until `deadline`.
    pub fn lend(&self, work: LinkWork, deadline: Instant) -> Option<LentLink<'_>> {
        let mut inner = self.inner();
        while inner.lent == LINKS_MAX || work == LinkWork::Move && inner.moving == MOVES_MAX {
            let time_left =
                deadline.checked_duration_since(Instant::now()).filter(|time| !time.is_zero())?;
            inner = self
                .returned
                .wait_timeout(inner, time_left)
                .expect("nobody panics with the lock")
                .0;
        }
        inner.lent += 1;
        inner.moving += (work == LinkWork::Move) as usize;
        let link = inner.free.pop();
        Some(LentLink { links: self, work, link })
    }

    /// Closes unused connections: when one has failed, they have probably failed too.
    pub fn forget_free(&self) {
        let free = std::mem::take(&mut self.inner().free);
        drop(free);
    }

    fn inner(&self) -> std::sync::MutexGuard<'_, LinkState> {
        self.inner.lock().expect("nobody panics with the lock")
    }
}

impl Drop for LentLink<'_> {
    fn drop(&mut self) {
        let mut inner = self.links.inner();
        inner.lent -= 1;
        inner.moving -= (self.work == LinkWork::Move) as usize;
        inner.free.extend(self.link.take());
        drop(inner);
        self.links.returned.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn reads_find_a_connection_however_much_is_moved() {
        let links = LinkPool::default();
        let past_time = Instant::now();
        let moves: Vec<_> =
            (0..MOVES_MAX).map(|_| links.lend(LinkWork::Move, past_time).unwrap()).collect();
        assert!(links.lend(LinkWork::Move, past_time).is_none());
        let mut reads: Vec<_> = (MOVES_MAX..LINKS_MAX)
            .map(|_| links.lend(LinkWork::Read, past_time).unwrap())
            .collect();
        assert!(links.lend(LinkWork::Read, past_time).is_none());
        drop(moves);
        reads.extend((0..MOVES_MAX).map(|_| links.lend(LinkWork::Read, past_time).unwrap()));
        assert!(links.lend(LinkWork::Move, past_time).is_none());
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                links.lend(LinkWork::Move, Instant::now() + Duration::from_secs(60)).is_some()
            });
            reads.clear();
            assert!(waits.join().unwrap(), "who waits is told");
        });
    }
}
