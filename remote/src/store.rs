//! The run's objects in the store.
use crate::kept::KeptPasses;
use crate::keys::RunKeys;
use crate::link::{Node, StoreLink};
use crate::links::{LentLink, LinkPool, LinkWork};
use crate::process::EngineProcess;
use crate::settings::StoreSettings;
use memfold_swap::remote::RequestEntry;
use redis::{Cmd, RedisError, Value};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Mutex, RwLock};
use std::thread;
use std::time::{Duration, Instant};

/// Keys that are refreshed or deleted in one call.
const BATCH: usize = 512;
/// Pause between looks for ended processes and for keys to refresh.
const LOOK: Duration = Duration::from_secs(1);
/// Pauses between tries of a read.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Longest time for one answer of the store, if a whole read may take that long.
const PATIENCE: Duration = Duration::from_secs(3);
/// Time for deleting keys at the end of a run while the store does not answer.
const END: Duration = Duration::from_secs(5);
/// Characters of an error that are passed on.
const TEXT_CHARS: usize = 160;

/// The store, as one run uses it.
pub struct RunStore {
    /// Its address and credentials.
    pub settings: StoreSettings,
    /// The keys of the run.
    pub keys: RunKeys,
    links: LinkPool,
    /// The known servers of a cluster.
    nodes: Mutex<Vec<Node>>,
    kept: KeptPasses,
    requests: AtomicU64,
    /// The run has ended. Read-locked while objects are being stored, so that none comes after the
    /// last was deleted.
    ended: RwLock<bool>,
}

/// Why a request failed.
pub enum StoreTrouble {
    /// The data is lost.
    Lost(String),
    /// A later try may succeed.
    Failed(String),
}

impl StoreTrouble {
    fn text(self) -> String {
        match self {
            StoreTrouble::Lost(why) | StoreTrouble::Failed(why) => why,
        }
    }
}

impl RunStore {
    /// Makes a store without keys. No other run may have the name `run`.
    pub fn new(settings: StoreSettings, run: String) -> RunStore {
        let passes = KeptPasses::new(settings.expiry);
        let (keys, links) = (RunKeys::new(run), LinkPool::default());
        RunStore {
            settings,
            keys,
            links,
            nodes: Mutex::default(),
            kept: passes,
            requests: AtomicU64::new(0),
            ended: RwLock::new(false),
        }
    }

    /// Returns whether [`RunStore::delete_all`] has begun.
    pub fn has_ended(&self) -> bool {
        *self.ended.read().expect("nobody panics with the lock")
    }

    /// Returns the number of a request, larger than those of all before.
    pub fn tick(&self) -> u64 {
        self.requests.fetch_add(1, SeqCst)
    }

    /// Lends a connection for some requests. Waits as long as a read may take, because no caller
    /// waits longer for the answer.
    fn lend(&self, work: LinkWork, deadline: Instant) -> Result<LentLink<'_>, StoreTrouble> {
        let busy = || {
            StoreTrouble::Failed(format!(
                "all connections were busy for {} s",
                self.settings.timeout.as_secs()
            ))
        };
        self.links.lend(work, deadline.max(Instant::now() + self.settings.timeout)).ok_or_else(busy)
    }

    /// Makes a connection. It asks each time for the servers of the cluster, because those in the
    /// settings may be gone by the next time.
    fn open(&self, patience: Duration) -> Result<StoreLink, RedisError> {
        let known = self.nodes.lock().expect("nobody panics with the lock").clone();
        let mut link = StoreLink::open(&self.settings, &known, patience)?;
        match link.nodes() {
            Ok(nodes) if !nodes.is_empty() => {
                *self.nodes.lock().expect("nobody panics with the lock") = nodes;
                Ok(link)
            }
            Ok(_) => Ok(link),
            // The server may not be asked, so the servers in the settings must do. This connection
            // may not be used again.
            Err(_) => StoreLink::open(&self.settings, &known, patience),
        }
    }

    /// Tries some commands once. After an error the connection is dropped.
    fn attempt(
        &self,
        lent: &mut LentLink<'_>,
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

    /// Tries commands until they succeed or the time is up, but at least twice, because the first
    /// try may only find that the connection is gone. The caller keeps the connection that
    /// succeeded.
    fn insist(
        &self,
        work: LinkWork,
        commands: &[Cmd],
        deadline: Instant,
    ) -> Result<(Vec<Value>, LentLink<'_>), StoreTrouble> {
        let mut link = self.lend(work, deadline)?;
        let patience = PATIENCE.min(self.settings.timeout);
        let mut pause = PAUSE_MIN;
        for tries in 1.. {
            match self.attempt(&mut link, commands, patience) {
                Ok(values) => return Ok((values, link)),
                Err(e) if tries >= 2 && Instant::now() + pause >= deadline => {
                    return Err(StoreTrouble::Failed(format!(
                        "{} (tried {tries} times)",
                        short(&e)
                    )));
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

    /// Checks that the store works, and keeps what it is given.
    ///
    /// # Errors
    /// What it doesn't do, and what would be right.
    pub fn try_store(&self) -> Result<(), String> {
        let key = self.keys.name(0, 0);
        let commands = [self.set(&key, b"memfold"), get(&key, 3, 4), delete(&key)];
        let patience = PATIENCE.min(self.settings.timeout);
        let mut link = self.lend(LinkWork::Move, Instant::now()).map_err(StoreTrouble::text)?;
        let values = self.attempt(&mut link, &commands, patience).map_err(|e| {
            let text = short(&e);
            if text.to_lowercase().contains("moved") {
                return "the server belongs to a cluster. Write redis-cluster:// in the URL."
                    .to_string();
            }
            text
        })?;
        if values.get(1) != Some(&Value::BulkString(b"fold".to_vec())) {
            return Err(format!(
                "the server returned other data than was stored: {:?}",
                values.get(1)
            ));
        }
        let link = link.link.as_mut().expect("it has just been used");
        let about = match link.info("default") {
            Ok(about) => about,
            // The server may not be asked, so it is trusted. A missing key ends the program.
            Err(e) if e.to_string().to_lowercase().contains("permission") => String::new(),
            Err(e) => return Err(short(&e)),
        };
        if !self.settings.is_cluster && about.contains("cluster_enabled:1") {
            return Err(
                "the server belongs to a cluster. Write redis-cluster:// in the URL.".to_string()
            );
        }
        match dropping_policy(&about) {
            Some(policy) => Err(format!(
                "the server may drop data, because its maxmemory-policy is {policy}. Set it to noeviction."
            )),
            None => Ok(()),
        }
    }

    /// Stores objects of an engine. They are then not kept locally: a server with a replica has
    /// passed them on, so they survive its end.
    ///
    /// # Errors
    /// Any of them may be there or not.
    pub fn put(
        &self,
        engine: u64,
        entries: &[RequestEntry],
        bytes: &[u8],
    ) -> Result<(), StoreTrouble> {
        let mut rest = bytes;
        let mut commands = Vec::with_capacity(entries.len());
        for entry in entries {
            let (object, after) = rest.split_at(entry.len as usize);
            commands.push(self.set(&self.keys.name(engine, entry.number), object));
            rest = after;
        }
        let end = self.ended.read().expect("nobody panics with the lock");
        if *end {
            return Err(StoreTrouble::Failed("the run has ended".to_string()));
        }
        // The keys are noted before they are sent, so that they are deleted in any case.
        self.keys.add(engine, entries.iter().map(|e| e.number));
        let (values, mut link) = self.insist(LinkWork::Move, &commands, Instant::now())?;
        match values.iter().find(|value| **value != Value::Okay) {
            Some(other) => {
                link.link = None;
                Err(StoreTrouble::Failed(format!("an object was not acknowledged: {other:?}")))
            }
            None => self.await_replica(link),
        }
    }

    fn await_replica(&self, mut lent: LentLink<'_>) -> Result<(), StoreTrouble> {
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
                Err(StoreTrouble::Failed("no replica acknowledged an object".to_string()))
            }
            Err(e) => Err(StoreTrouble::Failed(short(&e))),
        }
    }

    /// Returns the parts of objects that entries name, each as long as requested. With no entries
    /// it does not ask the store.
    ///
    /// # Errors
    /// One is not there, or the time is up.
    pub fn get(&self, entries: &[RequestEntry]) -> Result<Vec<Vec<u8>>, StoreTrouble> {
        if entries.is_empty() {
            return Ok(Vec::new());
        }
        let name = |e: &RequestEntry| self.keys.name(e.engine, e.number);
        let commands: Vec<Cmd> = entries.iter().map(|e| get(&name(e), e.offset, e.len)).collect();
        let (values, mut link) =
            self.insist(LinkWork::Read, &commands, Instant::now() + self.settings.timeout)?;
        let mut parts = Vec::with_capacity(entries.len());
        for (entry, value) in entries.iter().zip(values) {
            let key = || name(entry);
            let Value::BulkString(bytes) = value else {
                link.link = None;
                return Err(StoreTrouble::Failed(format!("key {}: {value:?}", key())));
            };
            if bytes.len() != entry.len as usize {
                let late = self.kept.lateness().map_or(String::new(), |late| format!(" ({late})"));
                let what = "is missing or too short, so the store has lost data";
                return Err(StoreTrouble::Lost(format!("key {} {what}{late}", key())));
            }
            parts.push(bytes);
        }
        Ok(parts)
    }

    /// Deletes objects, given by engine and number.
    ///
    /// # Errors
    /// Any of them may be left.
    pub fn delete(&self, which: &[(u64, u64)], deadline: Instant) -> Result<(), StoreTrouble> {
        let commands: Vec<Cmd> = which
            .iter()
            .map(|(engine, number)| delete(&self.keys.name(*engine, *number)))
            .collect();
        self.insist(LinkWork::Move, &commands, deadline)?;
        which
            .iter()
            .for_each(|(engine, number)| self.keys.remove(*engine, std::iter::once(*number)));
        Ok(())
    }

    /// Deletes all objects of the run, after stores in progress have ended. Nothing is stored or
    /// refreshed after that.
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
                format!("{name}: some keys could not be deleted. They expire within {expiry} s. Reason: {why}")
            })?;
        }
    }

    /// Checks that all keys were refreshed lately.
    ///
    /// # Errors
    /// Why not.
    pub fn is_kept(&self) -> Result<(), StoreTrouble> {
        self.kept.check().map_err(StoreTrouble::Failed)
    }

    /// Deletes objects of ended processes, and refreshes the others, until the end.
    pub fn keep_keys(&self) {
        while !self.has_ended() {
            thread::sleep(LOOK.min(self.settings.expiry / 16));
            let orphans = self.keys.orphans(BATCH, EngineProcess::has_ended);
            if !orphans.is_empty() {
                let _ = self.delete(&orphans, Instant::now());
            }
            if self.kept.is_due() {
                let outcome = self.refresh();
                self.kept.note(&self.settings.name, outcome, self.keys.is_empty());
            }
        }
    }

    /// Continues a pass over all keys, each of which then lives for the whole time again.
    fn refresh(&self) -> Result<(), String> {
        loop {
            let some = self.keys.after(self.kept.at(), BATCH);
            let Some(end) = some.last() else { return Ok(()) };
            let commands: Vec<Cmd> =
                some.iter().map(|(engine, n)| self.expire(*engine, *n)).collect();
            if self.has_ended() {
                return Err("the run has ended".to_string());
            }
            self.insist(LinkWork::Move, &commands, Instant::now()).map_err(StoreTrouble::text)?;
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

/// Returns an error in one short line, because a pipeline reports each of its commands.
fn short(e: &RedisError) -> String {
    let text = e.to_string().replace('\n', " ");
    match text.char_indices().nth(TEXT_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// Returns the policy of a server that may drop keys when its memory is full.
fn dropping_policy(about: &str) -> Option<&str> {
    let mut is_limited = false;
    for line in about.lines() {
        match line.trim().split_once(':') {
            Some(("maxmemory", bytes)) => is_limited = bytes != "0",
            Some(("maxmemory_policy", policy)) if is_limited && policy != "noeviction" => {
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
