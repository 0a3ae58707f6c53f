//! A run as a member of a group: it renews its claim in the group's file, and takes its share of the
//! limit.
use crate::failure::CommandFailure;
use crate::group::file::{GroupFile, LockedGroup, RUNS};
use memfold_engine::config::{Size, WORKABLE_MIN_BYTES};
use memfold_run::fair_share::ShareClaim;
use memfold_run::group::{GroupRun, most, share};
use memfold_run::users::UserTables;
use std::fmt;
use std::fs;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Time between two claims. [`SOON`] while shares change, and for a while after that.
const PERIOD: Duration = Duration::from_millis(100);
const SOON: Duration = Duration::from_millis(10);
const SOON_LASTS: Duration = Duration::from_secs(1);
/// Time until a process has seen a smaller bound. It looks every 5 ms.
const SEEN: Duration = Duration::from_millis(8);
/// Renewing the claim takes at most a CPU's time divided by this.
const COST: u32 = 100;
/// A run that works for less than one part in so many of the time, in all intervals of this length
/// since [`QUIET`], is quiet. The same part makes a process idle.
const WORK_SHARE: u128 = 20;
const INTERVAL: Duration = Duration::from_millis(100);
const QUIET: Duration = Duration::from_secs(1);
/// What a run needs before anything is known of it, bytes.
const NEED_BYTES: u64 = WORKABLE_MIN_BYTES;
/// The least share with which a run starts, bytes.
const START_BYTES: u64 = 1 << 20;
/// Longest wait for the other runs to fold so much that a new one can start.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a run asks of its group.
#[derive(Clone)]
pub struct GroupRequest {
    /// The group's name.
    pub name: String,
    /// In hundredths.
    pub weight: u32,
    /// Of what it needs, the run has so many bytes before weights count.
    pub floor_bytes: u64,
}

impl GroupRequest {
    /// Returns the record of this process's run, without claims.
    fn record(&self) -> GroupRun {
        GroupRun {
            pid: std::process::id(),
            weight: self.weight,
            floor_bytes: self.floor_bytes,
            ..GroupRun::default()
        }
    }
}

/// A run's membership in a group. It ends with this process.
pub struct GroupMember {
    group: GroupFile,
    request: GroupRequest,
    record: usize,
    limit_bytes: AtomicU64,
    most_bytes: AtomicU64,
    share_bytes: AtomicU64,
}

/// What a run is, as its tables show.
#[derive(Default)]
struct RunState {
    claim: ShareClaim,
    held_bytes: u64,
    is_quiet: bool,
}

/// The share of a run, as the other runs count it. It falls only after the processes had time to see
/// that they may use less.
#[derive(Default)]
struct PublishedShare {
    bytes: u64,
    /// A smaller share, and since when the processes have it.
    lowered: Option<(u64, Instant)>,
}

impl PublishedShare {
    /// Returns what the others must count, if the processes have so many bytes from now on.
    fn after(&mut self, bytes: u64) -> u64 {
        match self.lowered {
            _ if bytes >= self.bytes => *self = PublishedShare { bytes, lowered: None },
            None => self.lowered = Some((bytes, Instant::now())),
            Some((lower, since)) if since.elapsed() >= SEEN => {
                *self = PublishedShare { bytes: lower.max(bytes), lowered: None };
            }
            Some(_) => {}
        }
        self.bytes
    }
}

/// Whether a run has worked lately.
struct RunWork {
    /// When the present interval began, and the work until then.
    begin: Instant,
    worked_ns: u64,
    /// End of the last interval in which the run has worked.
    last: Instant,
}

impl RunWork {
    fn new() -> RunWork {
        RunWork { begin: Instant::now(), worked_ns: 0, last: Instant::now() }
    }

    /// Returns whether a run that has worked for so long in all is quiet.
    fn is_quiet(&mut self, worked_ns: u64) -> bool {
        let (now, elapsed) = (Instant::now(), self.begin.elapsed());
        // The sum falls when a process ends. A run whose processes end does work. It also falls a
        // little when the estimate of the time in faults is renewed.
        let work_ns = worked_ns.abs_diff(self.worked_ns);
        let has_worked = u128::from(work_ns) * WORK_SHARE > elapsed.max(INTERVAL).as_nanos();
        if has_worked || elapsed >= INTERVAL {
            (self.begin, self.worked_ns) = (now, worked_ns);
        }
        if has_worked {
            self.last = now;
        }
        now - self.last > QUIET
    }
}

/// Returns whether a process is stopped by a signal.
fn is_stopped(pid: u32) -> bool {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name, in parentheses, may have any character in it.
    text.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with(['T', 't']))
}

impl fmt::Display for GroupMember {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "group {} of {}", self.group.name(), Size(self.limit_bytes()))
    }
}

impl GroupMember {
    /// Makes this process's run a member. Waits until it has a share that it can start with.
    ///
    /// # Errors
    /// 125: there is no such group, it has too many runs, or its runs hold all of the limit.
    pub fn join(request: GroupRequest) -> Result<GroupMember, CommandFailure> {
        let group = GroupFile::known(&request.name)?;
        let Some(record) = group.lock()?.take_record(&request.record())? else {
            return Err(group.failure(&format!("it has {RUNS} runs already. End one first.")));
        };
        let [limit_bytes, most_bytes, share_bytes] = [0; 3].map(AtomicU64::new);
        let member = GroupMember { group, request, record, limit_bytes, most_bytes, share_bytes };
        let (end, mut share) = (Instant::now() + PATIENCE, PublishedShare::default());
        let claim = ShareClaim { need: NEED_BYTES, ..ShareClaim::default() };
        while member.share_bytes() < START_BYTES {
            if Instant::now() > end {
                return Err(member.full(&member.group.lock()?));
            }
            let group = member.group.lock()?;
            let state = RunState { claim, ..RunState::default() };
            member
                .renew(&group, &state, &mut share)
                .map_err(|e| member.group.failure(&e.to_string()))?;
            drop(group);
            sleep(Duration::from_millis(1));
        }
        Ok(member)
    }

    fn full(&self, locked: &LockedGroup<'_>) -> CommandFailure {
        if let Some((_, run)) = locked.runs.iter().find(|(_, run)| is_stopped(run.pid)) {
            let pid = run.pid;
            return self.group.failure(&format!(
                "its runs have all of its limit ({}), and memfold run {pid} is stopped, so it gives nothing back. Continue it (kill -CONT {pid}), or end it.",
                Size(self.limit_bytes())
            ));
        }
        let name = self.group.name();
        self.group.failure(&format!(
            "its runs need all of its limit ({}). End one, or raise the limit: memfold set --group {name} --limit SIZE.",
            Size(self.limit_bytes())
        ))
    }

    /// Returns what was asked of the group.
    pub fn request(&self) -> &GroupRequest {
        &self.request
    }

    /// Returns the limit of the group, as it was last seen, bytes.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes.load(Relaxed)
    }

    /// Returns the bytes that this run may use now.
    pub fn share_bytes(&self) -> u64 {
        self.share_bytes.load(Relaxed)
    }

    /// Returns the bytes that this run may get if the others fold everything.
    pub fn most_bytes(&self) -> u64 {
        self.most_bytes.load(Relaxed)
    }

    /// Publishes what the run asks and holds, and takes its share.
    fn renew(
        &self,
        locked: &LockedGroup<'_>,
        state: &RunState,
        published: &mut PublishedShare,
    ) -> io::Result<()> {
        let mut run = GroupRun {
            need_bytes: state.claim.need,
            least_bytes: state.claim.least,
            held_bytes: state.held_bytes,
            share_bytes: published.bytes,
            is_quiet: state.is_quiet,
            ..self.request.record()
        };
        let others: Vec<GroupRun> = locked.runs.iter().map(|(_, run)| *run).collect();
        let own = share(locked.limit_bytes, &run, &others);
        run.share_bytes = published.after(own);
        locked.write(self.record, &run)?;
        self.limit_bytes.store(locked.limit_bytes, Relaxed);
        self.most_bytes.store(most(locked.limit_bytes, &others), Relaxed);
        self.share_bytes.store(own, Relaxed);
        Ok(())
    }

    /// Renews the claim from time to time, for as long as this process lives. Calls `changed` after
    /// each change. `own_limit` returns the run's own limit, bytes.
    ///
    /// While the file can't be read or written, the share stays as it is.
    pub fn tend(&self, tables: &UserTables, own_limit: impl Fn() -> u64, changed: impl Fn()) -> ! {
        let (mut soon_until, mut work) = (Instant::now() + SOON_LASTS, RunWork::new());
        let mut outer_share = PublishedShare { bytes: self.share_bytes(), lowered: None };
        loop {
            let begin = Instant::now();
            let (share, most) = (self.share_bytes(), self.most_bytes());
            let (mut claim, held_bytes) = tables.claim();
            claim.need = claim.need.max(claim.least).min(own_limit());
            let is_quiet = work.is_quiet(tables.worked_ns());
            if let Ok(Some(group)) = self.group.try_lock() {
                let state = RunState { claim, held_bytes, is_quiet };
                let _ = self.renew(&group, &state, &mut outer_share);
            }
            if (share, most) != (self.share_bytes(), self.most_bytes()) {
                changed();
            }
            if share != self.share_bytes() || outer_share.lowered.is_some() {
                soon_until = begin + SOON_LASTS;
            }
            let period = if begin < soon_until { SOON } else { PERIOD };
            sleep(period.max(begin.elapsed() * COST));
        }
    }
}
