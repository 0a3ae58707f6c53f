//! The few lines that `--summary` prints.
use crate::report::figures::Height;
use crate::table::slots::Slots;
use memfold::config::{Config, Size};
use memfold::stats::Stats;
use memfold::table::APART;
use std::fmt::Write;
use std::sync::atomic::Ordering::Relaxed;

/// What the run came to, a few lines of text, each with `memfold: ` in front.
pub fn summary(config: &Config, slots: &Slots, height: &Height) -> String {
    managed(config, slots, height) + &unmanaged(slots)
}

/// Programs that memfold could not be in.
fn unmanaged(slots: &Slots) -> String {
    match slots.table().unmanaged() {
        (0, _) => String::new(),
        (count, first) => format!(
            "memfold: programs that can't be managed were executed {count} times, the first {}\n",
            first.escape_ascii()
        ),
    }
}

fn managed(config: &Config, slots: &Slots, height: &Height) -> String {
    let mut out = String::new();
    let processes = slots.table().processes().count();
    if processes == 0 && !slots.table().has_begun() {
        return "memfold: the engine started in no process\n".to_string();
    }
    let sum = |of: fn(&Stats) -> u64| slots.table().processes().map(|p| of(p.stats())).sum::<u64>();
    let most = if processes > 1 { "at most " } else { "" };
    let bound = match (config.limit_bytes, config.resident_bytes) {
        (Some(limit), _) if config.pool_counts => format!("limit {}", Size(limit)),
        (Some(limit), _) => format!("limit {} without the pools", Size(limit)),
        (None, Some(resident)) => format!("resident limit {}", Size(resident)),
        (None, None) => "no limit".to_string(),
    };
    // Later ones go on with the seats of ended ones.
    let count =
        if processes >= APART { format!("{processes} or more") } else { processes.to_string() };
    let noun = if processes == 1 { "process" } else { "processes" };
    if processes == 0 {
        let _ = writeln!(out, "memfold: {bound} never came near, all processes were small");
        return out;
    }
    if sum(|s| s.adopted_bytes.load(Relaxed)) == 0 {
        let _ =
            writeln!(out, "memfold: {bound} never came near, nothing was folded ({count} {noun})");
        return out;
    }
    let _ = writeln!(
        out,
        "memfold: peak {most}{} ({bound}), folded {most}{}, ratio {}",
        Size(sum(|s| s.peak_bytes.load(Relaxed))),
        Size(sum(|s| s.peak_folded_bytes.load(Relaxed))),
        height.ratio().map_or("-".to_string(), |r| format!("{r:.2}")),
    );
    let _ = writeln!(
        out,
        "memfold: {} faults, {} of them major; {} rescues; {count} {noun}",
        sum(|s| s.faults.load(Relaxed)),
        sum(|s| s.pgmajfault.load(Relaxed)),
        sum(|s| s.rescues.load(Relaxed)),
    );
    let over = sum(|s| s.over_limit.load(Relaxed));
    if over > 0 {
        let _ = writeln!(out, "memfold: the limit could not be kept {over} times");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::slots::tests::claim;

    #[test]
    fn each_state_of_a_run_has_its_lines() {
        let mut config = Config::new(1 << 30);
        config.set("limit", "64M").unwrap();
        let slots = Slots::new().unwrap();
        let text = || summary(&config, &slots, &Height::default());
        assert!(text().contains("started in no process"));
        assert!(slots.table().note_process() && text().contains("all processes were small"));
        let slot = claim(&slots, 5).stats();
        assert!(text().contains("limit 64.0 MiB never came near"), "{}", text());
        slot.adopted_bytes.store(1 << 28, Relaxed);
        slot.peak_bytes.store(60 << 20, Relaxed);
        slot.faults.store(9, Relaxed);
        let lines = text();
        assert!(
            lines.contains("peak 60.0 MiB (limit 64.0 MiB)") && lines.contains("9 faults"),
            "{lines}"
        );
        assert!(lines.lines().all(|l| l.starts_with("memfold: ")) && !lines.contains("can't be"));
        slots.table().note_unmanaged(b"/bin/busybox: it is statically linked");
        assert!(text().ends_with("1 times, the first /bin/busybox: it is statically linked\n"));
    }
}
