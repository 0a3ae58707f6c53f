//! The lines of `--summary`.
use crate::machine::oom::OomKills;
use crate::report::ending::kills_line;
use crate::report::figures::RunFigures;
use crate::report::recommended::LimitCurve;
use memfold_engine::config::{Config, Size};
use memfold_run::table::APART;
use memfold_run::users::UserTables;

/// Processes without an engine are reported if they have more memory than this, bytes. All of them
/// are small below it.
const SMALL_BYTES: u64 = 8 << 20;

/// The end of the run.
pub struct RunEnd {
    /// The status that memfold exits with.
    pub status: u8,
    /// The largest resident size of a process, including pages of files, bytes.
    pub largest_bytes: u64,
    /// How long the run took.
    pub seconds: f64,
    /// The group of the run, and its limit.
    pub group: Option<String>,
    /// Whether the summary shows the slowdown by limit.
    pub with_curve: bool,
    /// Processes that the kernel has ended meanwhile for lack of memory.
    pub kills: OomKills,
}

/// Returns the summary: a few lines of text, each with the prefix `memfold: `.
pub fn summary(config: &Config, tables: &UserTables, ended: &RunEnd) -> String {
    let sum = RunFigures::sum(tables);
    let mut lines = match sum.get("adopted_bytes") {
        0 => vec![unfolded(config, tables, &sum, ended)],
        _ => folded(config, tables, &sum, ended),
    };
    lines.extend(kills_line(&ended.kills));
    let curve = LimitCurve::of(tables, &sum).filter(|_| ended.with_curve);
    let curve = curve.map_or(Vec::new(), |curve| curve.points().lines());
    let title = (!curve.is_empty()).then(|| "slowdown by limit, an estimate:".to_string());
    let lines = lines.into_iter().chain(title).chain(curve);
    let lines = lines.map(|line| format!("memfold: {line}\n"));
    lines.collect::<String>() + &unmanaged(tables)
}

/// Returns a line about programs that memfold could not manage.
fn unmanaged(tables: &UserTables) -> String {
    match tables.unmanaged() {
        (0, _) => String::new(),
        (count, first) => format!(
            "memfold: programs that memfold can't manage were executed {count} times; the first was {}\n",
            first.escape_ascii()
        ),
    }
}

/// Returns the bound of the run as it was given, or that of its group.
pub fn bound(config: &Config, group: Option<&str>) -> String {
    match (config.limit_bytes, config.resident_bytes) {
        (None, None) if group.is_some() => group.unwrap_or_default().to_string(),
        (Some(limit), _) if config.pool_counts => format!("limit {}", Size(limit)),
        (Some(limit), _) => format!("limit {} without the compressed pools", Size(limit)),
        (None, Some(resident)) => format!("resident limit {}", Size(resident)),
        (None, None) => "no limit".to_string(),
    }
}

/// Returns the data of the run that does not compress and has no swap file, bytes.
pub fn dense_bytes(config: &Config, sum: &RunFigures) -> u64 {
    if config.swap.is_some() { 0 } else { sum.get("refused_dense_bytes") }
}

/// Returns the number of processes. Later ones reuse the slots of ended ones.
fn processes(tables: &UserTables) -> String {
    match tables.processes().count() {
        1 => "1 process".to_string(),
        count if count >= APART => format!("{count} or more processes"),
        count => format!("{count} processes"),
    }
}

/// Returns the line of a run in which nothing was folded. It claims that the limit was far only if
/// the run ended with status 0 and no process was large.
fn unfolded(config: &Config, tables: &UserTables, sum: &RunFigures, ended: &RunEnd) -> String {
    let least =
        config.limit_bytes.unwrap_or(u64::MAX).min(config.resident_bytes.unwrap_or(u64::MAX));
    let (peak, unmanaged_bytes) = (sum.get("peak_bytes"), tables.bounds().peak_slotless_bytes());
    let is_far = least != u64::MAX && peak.max(ended.largest_bytes) < least / 2;
    let bound = bound(config, ended.group.as_deref());
    let has_engines = tables.processes().next().is_some();
    if tables.has_begun() && ended.status == 0 && is_far && unmanaged_bytes <= SMALL_BYTES {
        return match has_engines {
            true => format!(
                "nothing was folded, because memory use stayed far below its limit ({bound}; {})",
                processes(tables)
            ),
            false => format!(
                "nothing was folded, because memory use stayed far below its limit ({bound}; all processes were small)"
            ),
        };
    }
    let what = match (tables.has_begun(), has_engines) {
        (false, _) => "nothing was folded, because the engine started in no process".to_string(),
        (true, false) => "nothing was folded, because no process had an engine".to_string(),
        (true, true) => format!("nothing was folded ({})", processes(tables)),
    };
    let of_it = match unmanaged_bytes {
        0..=SMALL_BYTES => String::new(),
        _ => format!(", of which at most {} in processes without an engine", Size(unmanaged_bytes)),
    };
    let largest = match ended.largest_bytes {
        bytes if bytes > peak => {
            format!("; the largest process had {} including its pages of files", Size(bytes))
        }
        _ => String::new(),
    };
    let status = match ended.status {
        0 => String::new(),
        status => format!("; the program ended with status {status}"),
    };
    format!("{what}; peak {} ({bound}){of_it}{largest}{status}", Size(peak))
}

/// Returns what folding has cost, percent, the bound of it (ten-thousandths; 0 for none), how long
/// processes were idle, and what it cost to wake them.
pub fn cost(percent: Option<f64>, bound: u32, idle_ns: u64, waking_ns: u64) -> String {
    let slowdown = percent.map_or("-".to_string(), |percent| format!("{percent:.1}%"));
    let bound = match bound {
        0 => String::new(),
        _ => format!(" (at most {}% asked for)", bound as f64 / 100.0),
    };
    let idle = match idle_ns {
        0 => String::new(),
        ns => format!(
            ", idle for {:.0} s in all (waking took {:.1} s of CPU time)",
            ns as f64 / 1e9,
            waking_ns as f64 / 1e9
        ),
    };
    format!("slowdown {slowdown}{bound}{idle}")
}

/// Returns how long faults took, by the place that their pages came from. Returns `None` if none was
/// timed.
fn times(sum: &RunFigures) -> Option<String> {
    let us = |ns: Option<u64>| ns.map_or(0.0, |ns| ns as f64 / 1e3);
    let parts = sum.times().filter(|(name, its)| name.starts_with("fault_") && its.count() > 0);
    let parts = parts.map(|(name, its)| {
        let source = name.trim_start_matches("fault_").trim_end_matches("_time");
        let [half, most] = [50, 99].map(|percent| us(its.percentile_ns(percent)));
        format!("{source} {half:.1}/{most:.1}")
    });
    let parts: Vec<String> = parts.collect();
    (!parts.is_empty()).then(|| format!("faults took, p50/p99 in us: {}", parts.join(", ")))
}

/// Returns the lines of a run in which memory was managed.
fn folded(config: &Config, tables: &UserTables, sum: &RunFigures, ended: &RunEnd) -> Vec<String> {
    let size = |name: &str| Size(sum.get(name));
    let mut lines = vec![
        format!(
            "peak {} ({}), folded {}, ratio {}",
            size("peak_bytes"),
            bound(config, ended.group.as_deref()),
            size("peak_folded_bytes"),
            sum.ratio().map_or("-".to_string(), |r| format!("{r:.2}")),
        ),
        format!(
            "{} faults, {} of them major; {} folios mapped back before they were stored; {}",
            sum.get("faults"),
            sum.get("pgmajfault"),
            sum.get("rescues"),
            processes(tables),
        ),
        format!(
            "{} first writes to loaded pages; {} pages read ahead for nothing; {} times the program reclaimed memory itself",
            sum.get("faults_write"),
            sum.get("readahead_wasted"),
            sum.get("direct_reclaims"),
        ),
    ];
    let saved_bytes = sum.get("saved_byte_seconds") as f64 / ended.seconds.max(f64::MIN_POSITIVE);
    lines.push(format!(
        "{}, {} saved in the mean",
        cost(sum.slowdown(), config.slowdown, sum.get("idle_ns"), sum.get("waking_ns")),
        Size(saved_bytes as u64)
    ));
    lines.extend(times(sum));
    lines.extend(LimitCurve::of(tables, sum).and_then(|curve| curve.line()));
    let unmanaged_bytes = tables.bounds().peak_slotless_bytes();
    if unmanaged_bytes > SMALL_BYTES {
        lines.push(format!("processes without an engine used at most {}", Size(unmanaged_bytes)));
    }
    match sum.get("over_limit") {
        0 => {}
        over => {
            let least = match tables.least_bytes() {
                0 => String::new(),
                least => format!("; the least limit that would have held is {}", Size(least)),
            };
            let cure = match dense_bytes(config, sum) {
                0..=SMALL_BYTES => String::new(),
                bytes => format!(
                    "; {} of data do not compress: --swap DIR moves them to a file",
                    Size(bytes)
                ),
            };
            lines.push(format!("the limit was exceeded {over} times{least}{cure}"));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::hand_over::tests::{claim, tables};
    use std::sync::atomic::Ordering::Relaxed;

    const WELL: RunEnd = RunEnd {
        status: 0,
        largest_bytes: 0,
        seconds: 10.0,
        group: None,
        with_curve: false,
        kills: OomKills { in_group: 0, in_machine: 0, limit: None },
    };

    fn limited(size: &str) -> Config {
        let mut config = Config::new(1 << 30);
        config.set("limit", size).unwrap();
        config
    }

    #[test]
    fn each_state_of_a_run_has_its_lines() {
        let (config, tables) = (limited("64M"), tables());
        let text = || summary(&config, &tables, &WELL);
        assert!(text().contains("started in no process"));
        assert!(tables.tables()[0].note_process() && text().contains("all processes were small"));
        let slot = claim(&tables, 5).stats();
        assert!(text().contains("far below its limit (limit 64.0 MiB;"), "{}", text());
        slot.adopted_bytes.store(1 << 28, Relaxed);
        slot.peak_bytes.store(60 << 20, Relaxed);
        slot.faults.store(9, Relaxed);
        slot.faults_write.store(4, Relaxed);
        slot.readahead_wasted.store(3, Relaxed);
        let lines = text();
        assert!(
            lines.contains("4 first writes") && lines.contains("3 pages read ahead for nothing")
        );
        assert!(
            lines.contains("peak 60.0 MiB (limit 64.0 MiB)") && lines.contains("9 faults"),
            "{lines}"
        );
        assert!(lines.lines().all(|l| l.starts_with("memfold: ")) && !lines.contains("can't be"));
        slot.over_limit.store(2, Relaxed);
        slot.refused_dense_bytes.store(123 << 20, Relaxed);
        let cure = "exceeded 2 times; 123.0 MiB of data do not compress: --swap DIR moves them";
        assert!(text().contains(cure), "{}", text());
        tables.tables()[0].note_unmanaged(b"/bin/su: it is a set-user-ID program");
        assert!(text().ends_with("1 times; the first was /bin/su: it is a set-user-ID program\n"));
    }

    #[test]
    fn summary_says_what_folding_has_cost_and_saved() {
        let (mut config, tables) = (limited("64M"), tables());
        let stats = claim(&tables, 5).stats();
        stats.adopted_bytes.store(1 << 28, Relaxed);
        let text = |config: &Config| summary(config, &tables, &WELL);
        assert!(text(&config).contains("slowdown -, 0 B saved"), "{}", text(&config));
        stats.folding_ns.store(3, Relaxed);
        stats.own_ns.store(200, Relaxed);
        stats.saved_byte_seconds.store(50 << 20, Relaxed);
        assert!(text(&config).contains("memfold: slowdown 1.5%, 5.0 MiB saved in the mean\n"));
        config.slowdown = 250;
        stats.idle_ns.store(4_000_000_000, Relaxed);
        stats.waking_ns.store(300_000_000, Relaxed);
        let line = "slowdown 1.5% (at most 2.5% asked for), \
                    idle for 4 s in all (waking took 0.3 s of CPU time), 5.0 MiB saved";
        assert!(text(&config).contains(line), "{}", text(&config));
    }

    #[test]
    fn summary_claims_distance_only_where_it_is_known() {
        let config = limited("64M");
        let cases: &[(u8, u64, u64, u64, &str)] = &[
            (0, 0, 0, 0, "far below its limit"),
            (139, 0, 0, 0, "ended with status 139"),
            (0, 40 << 20, 0, 0, "nothing was folded"),
            (0, 0, 60 << 20, 0, "peak 60.0 MiB"),
            (0, 0, 0, 30 << 20, "at most 30.0 MiB in processes without an engine"),
        ];
        for (status, largest_bytes, peak, unmanaged_bytes, words) in cases.iter().copied() {
            let tables = tables();
            tables.tables()[0].note_process();
            claim(&tables, 5).stats().peak_bytes.store(peak, Relaxed);
            tables.bounds().set_slotless(1, unmanaged_bytes);
            let text = summary(&config, &tables, &RunEnd { status, largest_bytes, ..WELL });
            assert!(text.contains(words), "{words}: {text}");
            assert_eq!(text.contains("far below"), words.contains("far below"), "{text}");
        }
    }
}
