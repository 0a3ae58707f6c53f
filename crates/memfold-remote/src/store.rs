//! The run's objects in the store.
use crate::kept::Kept;
use crate::keys::Keys;
use crate::link::{Link, Node};
use crate::links::{Lent, Links, Work};
use crate::process::Process;
use crate::settings::Settings;
use memfold_swap::remote::RequestEntry;
use redis::{Cmd, RedisError, Value};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Mutex, RwLock};
use std::thread;
use std::time::{Duration, Instant};

/// Keys that are refreshed or deleted at once.
const BATCH: usize = 512;
/// How often is looked for processes that have ended, and whether keys are to be refreshed.
const LOOK: Duration = Duration::from_secs(1);
/// Pauses between tries of a read.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// An answer of the store may take this long, if the time of a whole read is no shorter.
const PATIENCE: Duration = Duration::from_secs(3);
/// What the end of a run may take for deleting keys while the store does not answer.
const END: Duration = Duration::from_secs(5);
/// Characters of what is passed on of an error.
const TEXT_CHARS: usize = 160;

/// The store, as one run uses it.
pub struct Store {
    /// Where it is.
    pub settings: Settings,
    /// What the run has there.
    pub keys: Keys,
    links: Links,
    /// The servers of a cluster, as far as they are known.
    nodes: Mutex<Vec<Node>>,
    kept: Kept,
    requests: AtomicU64,
    /// Nothing is to be kept any more. Read-locked while objects are being stored, so that none
    /// comes after the last was deleted.
    ended: RwLock<bool>,
}

/// Why a request was not done.
pub enum Trouble {
    /// It can't be had any more.
    Lost(String),
    /// Perhaps later.
    Failed(String),
}

impl Trouble {
    fn text(self) -> String {
        match self {
            Trouble::Lost(why) | Trouble::Failed(why) => why,
        }
    }
}

impl Store {
    /// None of its keys is there yet. `run` must be nobody else's.
    pub fn new(settings: Settings, run: String) -> Store {
        let kept = Kept::new(settings.expiry);
        let (keys, links) = (Keys::new(run), Links::default());
        Store {
            settings,
            keys,
            links,
            nodes: Mutex::default(),
            kept,
            requests: AtomicU64::new(0),
            ended: RwLock::new(false),
        }
    }

    /// Whether [`Store::delete_all`] has begun.
    pub fn has_ended(&self) -> bool {
        *self.ended.read().expect("nobody panics with the lock")
    }

    /// The number of a request, larger than those of all before.
    pub fn tick(&self) -> u64 {
        self.requests.fetch_add(1, SeqCst)
    }

    /// A connection for some requests. They are waited for as long as for a read: longer, nobody
    /// waits for the answer.
    fn lend(&self, work: Work, deadline: Instant) -> Result<Lent<'_>, Trouble> {
        let busy = || {
            Trouble::Failed(format!("too many requests for {} s", self.settings.timeout.as_secs()))
        };
        self.links.lend(work, deadline.max(Instant::now() + self.settings.timeout)).ok_or_else(busy)
    }

    /// A new connection. What servers a cluster has is asked each time: those that the settings name
    /// may be gone when one is needed next.
    fn open(&self, patience: Duration) -> Result<Link, RedisError> {
        let known = self.nodes.lock().expect("nobody panics with the lock").clone();
        let mut link = Link::open(&self.settings, &known, patience)?;
        match link.nodes() {
            Ok(nodes) if !nodes.is_empty() => {
                *self.nodes.lock().expect("nobody panics with the lock") = nodes;
                Ok(link)
            }
            Ok(_) => Ok(link),
            // Not allowed to ask: those of the settings must do. The connection may not be used again.
            Err(_) => Link::open(&self.settings, &known, patience),
        }
    }

    /// One try at some commands. After an error the connection is given up.
    fn attempt(
        &self,
        lent: &mut Lent<'_>,
        commands: &[Cmd],
        patience: Duration,
    ) -> Result<Vec<Value>, RedisError> {
        let link = match lent.link.take() {
            Some(link) => Ok(link),
            None => self.open(patience),
        };
        let mut link = link?;
        let values =
            link.all(commands.iter().cloned()).inspect_err(|_| self.links.forget_free())?;
        lent.link = Some(link);
        Ok(values)
    }

    /// Tries commands until they succeed or the time is up, but twice at least: the first try may
    /// only find that the connection is gone. The connection with which they did is still the
    /// caller's.
    fn insist(
        &self,
        work: Work,
        commands: &[Cmd],
        deadline: Instant,
    ) -> Result<(Vec<Value>, Lent<'_>), Trouble> {
        let mut lent = self.lend(work, deadline)?;
        let patience = PATIENCE.min(self.settings.timeout);
        let mut pause = PAUSE_MIN;
        for tries in 1.. {
            match self.attempt(&mut lent, commands, patience) {
                Ok(values) => return Ok((values, lent)),
                Err(e) if tries >= 2 && Instant::now() + pause >= deadline => {
                    return Err(Trouble::Failed(format!("{} (tried {tries} times)", short(&e))));
                }
                Err(_) if tries == 1 => {}
                Err(_) => {
                    thread::sleep(pause);
                    pause = (pause * 2).min(PAUSE_MAX);
                }
            }
        }
        unreachable!("it returns after some tries")
    }

    /// Whether the store does what it is needed for, and keeps what it is given.
    ///
    /// # Errors
    /// What it doesn't do, and what would be right.
    pub fn try_store(&self) -> Result<(), String> {
        let key = self.keys.name(0, 0);
        let commands = [self.set(&key, b"memfold"), get(&key, 3, 4), delete(&key)];
        let patience = PATIENCE.min(self.settings.timeout);
        let mut lent = self.lend(Work::Move, Instant::now()).map_err(Trouble::text)?;
        let values = self.attempt(&mut lent, &commands, patience).map_err(|e| {
            let text = short(&e);
            if text.to_lowercase().contains("moved") {
                return "it is one of a cluster: write redis-cluster://".to_string();
            }
            text
        })?;
        if values.get(1) != Some(&Value::BulkString(b"fold".to_vec())) {
            return Err(format!(
                "it does not give back what it was given, but {:?}",
                values.get(1)
            ));
        }
        let link = lent.link.as_mut().expect("it has just been used");
        let about = match link.info("default") {
            Ok(about) => about,
            // Not allowed to ask: taken on trust, a key that is missed ends the program.
            Err(e) if e.to_string().to_lowercase().contains("permission") => String::new(),
            Err(e) => return Err(short(&e)),
        };
        if !self.settings.is_cluster && about.contains("cluster_enabled:1") {
            return Err("it is one of a cluster: write redis-cluster://".to_string());
        }
        match dropping_policy(&about) {
            Some(policy) => Err(format!(
                "its maxmemory-policy is {policy}: it may drop data that is needed; set it to noeviction"
            )),
            None => Ok(()),
        }
    }

    /// Stores objects of an engine. They are local no more then: a server that has a replica has
    /// handed them on, so that they survive its end.
    ///
    /// # Errors
    /// Any of them may be there or not.
    pub fn put(&self, engine: u64, entries: &[RequestEntry], bytes: &[u8]) -> Result<(), Trouble> {
        let mut rest = bytes;
        let mut commands = Vec::with_capacity(entries.len());
        for entry in entries {
            let (object, after) = rest.split_at(entry.len as usize);
            commands.push(self.set(&self.keys.name(engine, entry.number), object));
            rest = after;
        }
        let ended = self.ended.read().expect("nobody panics with the lock");
        if *ended {
            return Err(Trouble::Failed("the run has ended".to_string()));
        }
        // Before they are sent: whatever becomes of them, they are deleted in the end.
        self.keys.add(engine, entries.iter().map(|e| e.number));
        let (values, mut lent) = self.insist(Work::Move, &commands, Instant::now())?;
        match values.iter().find(|value| **value != Value::Okay) {
            Some(other) => {
                lent.link = None;
                Err(Trouble::Failed(format!("an object was not acknowledged: {other:?}")))
            }
            None => self.await_replica(lent),
        }
    }

    fn await_replica(&self, mut lent: Lent<'_>) -> Result<(), Trouble> {
        let mut link = lent.link.take().expect("it has just been used");
        // The answer may take longer than the wait.
        let patience = PATIENCE.min(self.settings.timeout) / 2;
        match link.is_replicated(patience) {
            Ok(true) => {
                lent.link = Some(link);
                Ok(())
            }
            Ok(false) => {
                lent.link = Some(link);
                Err(Trouble::Failed("no replica has acknowledged it".to_string()))
            }
            Err(e) => Err(Trouble::Failed(short(&e))),
        }
    }

    /// The parts of objects that entries name, each as long as was asked for. The store isn't asked
    /// for none.
    ///
    /// # Errors
    /// One is not there, or the time is up.
    pub fn get(&self, entries: &[RequestEntry]) -> Result<Vec<Vec<u8>>, Trouble> {
        if entries.is_empty() {
            return Ok(Vec::new());
        }
        let name = |e: &RequestEntry| self.keys.name(e.engine, e.number);
        let commands: Vec<Cmd> = entries.iter().map(|e| get(&name(e), e.offset, e.len)).collect();
        let (values, mut lent) =
            self.insist(Work::Read, &commands, Instant::now() + self.settings.timeout)?;
        let mut parts = Vec::with_capacity(entries.len());
        for (entry, value) in entries.iter().zip(values) {
            let key = || name(entry);
            let Value::BulkString(bytes) = value else {
                lent.link = None;
                return Err(Trouble::Failed(format!("key {}: {value:?}", key())));
            };
            if bytes.len() != entry.len as usize {
                let late = self.kept.lateness().map_or(String::new(), |late| format!(" ({late})"));
                let what = "is not there, or shorter than it was: the store has lost data";
                return Err(Trouble::Lost(format!("key {} {what}{late}", key())));
            }
            parts.push(bytes);
        }
        Ok(parts)
    }

    /// Deletes objects, given by engine and number.
    ///
    /// # Errors
    /// Any of them may be left.
    pub fn delete(&self, which: &[(u64, u64)], deadline: Instant) -> Result<(), Trouble> {
        let commands: Vec<Cmd> = which
            .iter()
            .map(|(engine, number)| delete(&self.keys.name(*engine, *number)))
            .collect();
        self.insist(Work::Move, &commands, deadline)?;
        which
            .iter()
            .for_each(|(engine, number)| self.keys.remove(*engine, std::iter::once(*number)));
        Ok(())
    }

    /// Deletes all that the run has there, when what is being stored at this moment is there.
    /// Nothing is stored or refreshed any more.
    ///
    /// # Errors
    /// Some are left: one line.
    pub fn delete_all(&self) -> Result<(), String> {
        *self.ended.write().expect("nobody panics with the lock") = true;
        let deadline = Instant::now() + END;
        loop {
            let some = self.keys.after(None, BATCH);
            if some.is_empty() {
                return Ok(());
            }
            self.delete(&some, deadline).map_err(|trouble| {
                let (name, why, expiry) =
                    (&self.settings.name, trouble.text(), self.settings.expiry.as_secs());
                format!("{name}: some keys are left, and expire within {expiry} s: {why}")
            })?;
        }
    }

    /// Whether all keys have been refreshed lately.
    ///
    /// # Errors
    /// Why not.
    pub fn is_kept(&self) -> Result<(), Trouble> {
        self.kept.check().map_err(Trouble::Failed)
    }

    /// Deletes what processes that have ended have left, and keeps the rest from expiring, until
    /// the end.
    pub fn keep_keys(&self) {
        while !self.has_ended() {
            thread::sleep(LOOK.min(self.settings.expiry / 16));
            let orphans = self.keys.orphans(BATCH, Process::has_ended);
            if !orphans.is_empty() {
                let _ = self.delete(&orphans, Instant::now());
            }
            if self.kept.is_due() {
                let done = self.refresh();
                self.kept.note(&self.settings.name, done, self.keys.is_empty());
            }
        }
    }

    /// Goes on with a pass over all keys, each of which then lives for the whole time again.
    fn refresh(&self) -> Result<(), String> {
        loop {
            let some = self.keys.after(self.kept.at(), BATCH);
            let Some(end) = some.last() else { return Ok(()) };
            let commands: Vec<Cmd> =
                some.iter().map(|(engine, n)| self.expire(*engine, *n)).collect();
            if self.has_ended() {
                return Err("the run has ended".to_string());
            }
            self.insist(Work::Move, &commands, Instant::now()).map_err(Trouble::text)?;
            self.kept.reach(*end);
        }
    }

    fn set(&self, key: &str, bytes: &[u8]) -> Cmd {
        let mut command = command("SET", key);
        command.arg(bytes).arg("EX").arg(self.settings.expiry.as_secs());
        command
    }

    fn expire(&self, engine: u64, number: u64) -> Cmd {
        let mut command = command("EXPIRE", &self.keys.name(engine, number));
        command.arg(self.settings.expiry.as_secs());
        command
    }
}

/// What went wrong, in one line that isn't long: a pipeline tells of each of its commands.
fn short(e: &RedisError) -> String {
    let text = e.to_string().replace('\n', " ");
    match text.char_indices().nth(TEXT_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// The policy of a server that may drop keys when its memory is full.
fn dropping_policy(about: &str) -> Option<&str> {
    let mut limited = false;
    for line in about.lines() {
        match line.trim().split_once(':') {
            Some(("maxmemory", bytes)) => limited = bytes != "0",
            Some(("maxmemory_policy", policy)) if limited && policy != "noeviction" => {
                return Some(policy);
            }
            _ => {}
        }
    }
    None
}

fn command(name: &str, key: &str) -> Cmd {
    let mut command = redis::cmd(name);
    command.arg(key);
    command
}

fn get(key: &str, offset: u32, len: u32) -> Cmd {
    let mut command = command("GETRANGE", key);
    command.arg(offset).arg(offset + len - 1);
    command
}

fn delete(key: &str) -> Cmd {
    command("UNLINK", key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_drops_keys_is_recognised() {
        let about = |max: &str, policy: &str| {
            format!("used_memory:5\r\nmaxmemory:{max}\r\nmaxmemory_policy:{policy}\r\n")
        };
        assert_eq!(dropping_policy(&about("0", "allkeys-lru")), None, "it never is full");
        assert_eq!(dropping_policy(&about("100", "noeviction")), None);
        assert_eq!(dropping_policy(&about("100", "volatile-lru")), Some("volatile-lru"));
        assert_eq!(dropping_policy(""), None);
    }
}
