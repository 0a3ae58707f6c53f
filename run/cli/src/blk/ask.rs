//! Requests to a server of devices: `memfold blk stat`, `set`, `idle`, `recompress`, `writeback`,
//! `compact`, `flush`.
use crate::failure::CommandFailure;
use crate::program::plain;
use crate::runs;
use crate::sockets;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use memfold_engine::config::{Size, parse_size};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A server that does not answer a short request in this time is stopped, or too busy.
const PATIENCE: Duration = Duration::from_secs(10);

/// A subcommand: its name, its description, and its flags.
struct AskCommand {
    name: &'static str,
    about: &'static str,
    flags: &'static [(&'static str, &'static str, &'static str)],
}

const ASKS: &[AskCommand] = &[
    AskCommand {
        name: "stat",
        about: "Prints the memory use and counters of the devices",
        flags: &[
            ("json", "", "Print every counter as JSON"),
            (
                "block-state",
                "",
                "Print every object: offset, bytes, compressed bytes, and flags (s same-filled, w written back, h huge, i idle, r recompressed, n incompressible)",
            ),
            ("export", "NAME", "Device for --block-state"),
        ],
    },
    AskCommand {
        name: "set",
        about: "Changes limits of a running server",
        flags: &[
            ("limit", "SIZE", "Memory for all devices; none removes the limit"),
            (
                "writeback-limit",
                "SIZE",
                "Bytes that may still be written back; none removes the limit",
            ),
        ],
    },
    AskCommand {
        name: "idle",
        about: "Marks data that was not used for a while as idle, until it is used again",
        flags: &[(
            "older",
            "SECONDS",
            "Mark only data that was not used for this long [default: 0]",
        )],
    },
    AskCommand {
        name: "recompress",
        about: "Compresses data again with a stronger codec, where that makes it smaller",
        flags: &[
            (
                "pick",
                "WHICH",
                "Which data: idle, huge, huge_idle, incompressible or all [default: idle]",
            ),
            ("codec", "NAME[:LEVEL]", "Codec to use instead of that of memfold blk --recompress"),
            ("threshold", "SIZE", "Take only data with at least this many compressed bytes"),
        ],
    },
    AskCommand {
        name: "writeback",
        about: "Moves data to the file of memfold blk --writeback",
        flags: &[(
            "pick",
            "WHICH",
            "Which data: idle, huge, huge_idle, incompressible or all [default: idle]",
        )],
    },
    AskCommand {
        name: "compact",
        about: "Packs the compressed memory and returns free pages to the system",
        flags: &[],
    },
    AskCommand {
        name: "flush",
        about: "Writes all data to the image of memfold blk --persist, and waits for it",
        flags: &[],
    },
];

/// Returns the command lines of all subcommands.
pub fn commands() -> impl Iterator<Item = Command> {
    ASKS.iter().map(|ask| {
        let flags = ask.flags.iter().map(|(name, value, help)| {
            let arg = Arg::new(*name).long(*name).help(*help);
            if value.is_empty() { arg.action(ArgAction::SetTrue) } else { arg.value_name(*value) }
        });
        Command::new(ask.name)
            .about(ask.about)
            .arg(
                Arg::new("pid")
                    .value_name("PID")
                    .value_parser(|text: &str| runs::process_id(text).ok_or("it is no process ID"))
                    .help("Process ID of memfold blk; needed only if several are running"),
            )
            .arg(
                Arg::new("control")
                    .long("control")
                    .value_name("PATH")
                    .value_parser(value_parser!(OsString))
                    .help("Control socket of memfold blk, if it was given one"),
            )
            .args(flags)
            .after_help("Exit status: 0; 125 if there is no such server, or if it refuses.")
    })
}

/// Sends a request and prints the answer.
///
/// # Errors
/// 125: no such server, or it refuses.
pub fn main(name: &str, matches: &ArgMatches) -> Result<u8, CommandFailure> {
    let request = request(name, matches)?;
    let path = find(matches)?;
    let is_long = matches!(name, "recompress" | "writeback" | "flush" | "compact");
    let patience = (!is_long).then_some(PATIENCE);
    if name == "stat" && matches.get_flag("block-state") {
        return block_state(&path, matches);
    }
    let answer = ask(&path, &request, patience)?;
    match name {
        "stat" if !matches.get_flag("json") => print_stat(&answer)?,
        "set" => say!("{}", limits(&answer)),
        "idle" | "flush" => {}
        _ => say!("{answer:#}"),
    }
    Ok(0)
}

fn request(name: &str, matches: &ArgMatches) -> Result<Value, CommandFailure> {
    let mut request = json!({ "do": name });
    let text = |flag: &str| matches.try_get_one::<String>(flag).ok().flatten();
    let size_of = |flag: &str| text(flag).map(|text| size_or_none(flag, text)).transpose();
    for (flag, key) in [
        ("limit", "limit_bytes"),
        ("writeback-limit", "writeback_limit_bytes"),
        ("threshold", "bytes_min"),
    ] {
        if let Some(value) = size_of(flag)? {
            request[key] = value;
        }
    }
    for key in ["pick", "codec"] {
        if let Some(value) = text(key) {
            request[key] = value.as_str().into();
        }
    }
    if let Some(age) = text("older") {
        let seconds: u64 = age.parse().map_err(|_| {
            CommandFailure::own(format!("--older: {age:?} is not a number of seconds"))
        })?;
        request["age_seconds"] = seconds.into();
    }
    if name == "set" && request.as_object().is_some_and(|all| all.len() == 1) {
        return Err(CommandFailure::own(
            "No limit given. Give --limit SIZE or --writeback-limit SIZE",
        ));
    }
    Ok(request)
}

fn size_or_none(flag: &str, text: &str) -> Result<Value, CommandFailure> {
    match text {
        "none" => Ok("none".into()),
        text => parse_size(text, 0)
            .map(Value::from)
            .map_err(|e| CommandFailure::own(format!("--{flag}: {e}"))),
    }
}

/// Sets the limit of a server, by its process ID. Returns a line about its limits.
///
/// # Errors
/// 125: no such server, or it refuses.
pub fn set_limit(pid: u32, limit: &str) -> Result<String, CommandFailure> {
    let all = sockets::all(sockets::BLK).into_iter();
    let path = all.filter(|(of, _)| *of == pid).map(|(_, path)| path).next();
    let path = path.ok_or_else(|| CommandFailure::own(format!("memfold blk {pid} has ended.")))?;
    let request = json!({"do": "set", "limit_bytes": size_or_none("limit", limit)?});
    Ok(format!("memfold blk {pid}: {}", limits(&ask(&path, &request, Some(PATIENCE))?)))
}

fn limits(answer: &Value) -> String {
    let [limit, held] = ["limit_bytes", "held_bytes"].map(|name| answer[name].as_u64());
    let above = match (limit, held) {
        (Some(limit), Some(held)) if held > limit => {
            let rest = match answer["writes_back"].as_bool() {
                Some(true) => "the rest moves to the file",
                _ => "nothing is dropped, and writes of new data fail until so much is discarded",
            };
            format!("; {} is held, which is above the limit: {rest}", Size(held))
        }
        _ => String::new(),
    };
    format!(
        "limit {}, writeback limit {}{above}",
        size(&answer["limit_bytes"]),
        size(&answer["writeback_limit_bytes"])
    )
}

/// Returns the control socket that the flags select.
fn find(matches: &ArgMatches) -> Result<PathBuf, CommandFailure> {
    if let Some(path) = matches.get_one::<OsString>("control") {
        return Ok(path.into());
    }
    let all = sockets::all(sockets::BLK);
    let all: Vec<_> =
        all.into_iter().filter(|(_, path)| !matches!(sockets::connect(path), Ok(None))).collect();
    match (matches.get_one::<u32>("pid"), &all[..]) {
        (Some(pid), all) => {
            let path = all.iter().find(|(of, _)| of == pid).map(|(_, path)| path.clone());
            path.ok_or_else(|| {
                CommandFailure::own(format!("Process {pid} is no memfold blk of this user."))
            })
        }
        (None, [(_, path)]) => Ok(path.clone()),
        (None, []) => Err(CommandFailure::own(
            "This user runs no memfold blk. If its socket is elsewhere, give --control PATH.",
        )),
        (None, many) => {
            let pids: Vec<String> = many.iter().map(|(pid, _)| pid.to_string()).collect();
            Err(CommandFailure::own(format!(
                "Several memfold blk are running. Give the PID of one: {}.",
                pids.join(", ")
            )))
        }
    }
}

fn ask(path: &Path, request: &Value, patience: Option<Duration>) -> Result<Value, CommandFailure> {
    let answer = sockets::ask(path, request, patience);
    let answer =
        answer.map_err(|e| CommandFailure::own(format!("{}: {}", path.display(), plain(&e))))?;
    let Some(answer) = answer else {
        return Err(CommandFailure::own(format!(
            "{}: no server answers on this socket",
            path.display()
        )));
    };
    match answer["error"].as_str() {
        Some(why) => Err(CommandFailure::own(why)),
        None => Ok(answer),
    }
}

fn size(value: &Value) -> String {
    value.as_u64().map_or("none".to_string(), |bytes| Size(bytes).to_string())
}

fn print_stat(about: &Value) -> Result<(), CommandFailure> {
    let mm = &about["mm_stat"];
    let held_bytes = mm["mem_used_total"].as_u64().unwrap_or(0);
    let ratio = mm["orig_data_size"].as_u64().unwrap_or(0) as f64 / held_bytes.max(1) as f64;
    say!(
        "memfold blk {}, {:.1} s, limit {}",
        about["pid"],
        about["seconds"].as_f64().unwrap_or(0.0),
        size(&about["limit_bytes"])
    );
    say!(
        "{} of data in {} ({ratio:.2} to 1), {} compressed",
        size(&mm["orig_data_size"]),
        size(&mm["mem_used_total"]),
        size(&mm["compr_data_size"])
    );
    for export in about["exports"].as_array().into_iter().flatten() {
        let count = |name: &str| export["counters"][name].as_u64().unwrap_or(0);
        say!(
            "export {}: {}{}, {} reads, {} writes, {} discards",
            export["name"],
            size(&export["size_bytes"]),
            if export["read_only"] == true { ", read-only" } else { "" },
            count("reads"),
            count("writes"),
            count("zeroings")
        );
    }
    for group in ["mm_stat", "io_stat", "bd_stat"] {
        let all = about[group].as_object().into_iter().flatten();
        let all: Vec<String> = all.map(|(name, value)| format!("{name} {value}")).collect();
        say!("{group}: {}", all.join(", "));
    }
    if let Some(error) = about["writeback"]["error"].as_str() {
        say!("writeback: {error}");
    }
    Ok(())
}

/// Returns the line of an object, in columns. A JSON value itself ignores the width of a column.
fn object_line(object: &Value) -> String {
    let [offset, bytes, stored_bytes] = [0, 1, 2].map(|n| object[n].to_string());
    format!("{offset:>14} {bytes:>8} {stored_bytes:>8} {}", object[3].as_str().unwrap_or(""))
}

fn block_state(path: &Path, matches: &ArgMatches) -> Result<u8, CommandFailure> {
    let export = matches.get_one::<String>("export").map_or("", String::as_str);
    let mut from = 0;
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    loop {
        let answer = ask(
            path,
            &json!({"do": "block_state", "export": export, "from": from}),
            Some(PATIENCE),
        )?;
        for object in answer["objects"].as_array().into_iter().flatten() {
            // A closed stdout means that the reader has seen enough.
            if writeln!(out, "{}", object_line(object)).is_err() {
                return Ok(0);
            }
        }
        match answer["next"].as_u64() {
            Some(next) => from = next,
            None => break,
        }
    }
    let _ = out.flush();
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_of_blocks_stand_in_columns() {
        let line = object_line(&json!([4096, 16384, 77, "..h..."]));
        assert_eq!(line, "          4096    16384       77 ..h...");
    }
}
