//! Rows as JSON, for scripts and for the key `e`. Names are as they are, without escapes for terminals.
use super::model::{Row, RowKey, TopPage, rows};
use super::watch::Heard;
use serde_json::{Value, json};
use std::time::Instant;

/// Returns everything that is known: all rows, and the processes and devices in them.
pub fn json(heard: &[Heard]) -> Value {
    let now = Instant::now();
    let (mut runs, mut groups, mut servers) = (Vec::new(), Vec::new(), Vec::new());
    for row in rows(heard, &TopPage::All, now) {
        let mut one = of_row(&row);
        let members = |page: TopPage| rows(heard, &page, now).iter().map(of_row).collect::<Value>();
        match row.key {
            RowKey::Run(pid) => {
                one["processes"] = members(TopPage::Run(pid));
                runs.push(one);
            }
            RowKey::Server(pid) => {
                one["devices"] = members(TopPage::Server(pid));
                servers.push(one);
            }
            _ => groups.push(one),
        }
    }
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "runs": runs,
        "groups": groups,
        "servers": servers,
    })
}

fn of_row(row: &Row) -> Value {
    let (rates, name) = (&row.rates, &row.name);
    if let RowKey::Export(name) = &row.key {
        return json!({
            "name": name,
            "size_bytes": row.limit_bytes,
            "reads_per_second": rates.loads,
            "writes_per_second": rates.writes,
        });
    }
    let known = |bytes: u64| row.has_figures.then_some(bytes);
    let mut one = json!({
        "name": name,
        "limit_bytes": row.limit_bytes,
        "used_bytes": known(row.used_bytes),
        "resident_bytes": known(row.resident_bytes),
        "compressed_bytes": known(row.compressed_bytes),
        "spilled_bytes": known(row.spilled_bytes),
        "folded_bytes": known(row.folded_bytes),
        "ratio": row.ratio(),
        "codec": row.codec,
    });
    let mut set = |name: &str, value: Value| one[name] = value;
    match &row.key {
        RowKey::Group(name) => {
            set("name", name.as_str().into());
            set("runs", row.members.into());
        }
        _ => set("pid", row.pid.into()),
    }
    if let RowKey::Run(_) = row.key {
        set("name", row.command.as_ref().unwrap_or(name).as_str().into());
        set("group", row.group.clone().into());
    }
    if let RowKey::Run(_) | RowKey::Server(_) = row.key {
        set("silent_seconds", row.silent.map(|silent| silent.as_secs_f64()).into());
        set("is_stopped", row.is_stopped.into());
    }
    if let RowKey::Server(_) = row.key {
        set("reads_per_second", rates.loads.into());
        set("writes_per_second", rates.writes.into());
    } else {
        set("faults_per_second", rates.faults.into());
        set("loads_per_second", rates.loads.into());
        set("first_touches_per_second", rates.zeros.into());
        set("first_writes_per_second", rates.writes.into());
        set("fault_time_percent", row.fault_percent().into());
    }
    one
}
