//! The table of the flags of `memfold blk`, and the settings from them.
use crate::failure::CommandFailure;
use crate::machine;
use clap::{Arg, ArgAction, ArgMatches};
use memfold_block::{LIMIT_BYTES_MIN, SpillSettings};
use memfold_engine::config::parse_size;
use memfold_os::units::{MAX_ORDER, Order, PAGE_SIZE};
use memfold_store::CodecSpec;
use std::ffi::OsString;
use std::path::PathBuf;

/// One flag, as help and docs show it.
pub struct BlkFlag {
    /// The flag's name, as in `--name`.
    pub name: &'static str,
    /// The form of a value; empty for a switch.
    pub value: &'static str,
    /// The default, as text.
    pub default: &'static str,
    /// One line of help.
    pub help: &'static str,
    /// Whether it may be given several times.
    pub many: bool,
}

const fn flag(
    name: &'static str,
    value: &'static str,
    default: &'static str,
    help: &'static str,
) -> BlkFlag {
    BlkFlag { name, value, default, help, many: false }
}

/// Every flag.
pub const FLAGS: &[BlkFlag] = &[
    flag("size", "SIZE", "none", "Size of the device, a multiple of 512"),
    BlkFlag {
        many: true,
        ..flag(
            "export",
            "NAME=SIZE[,ro]",
            "none",
            "Another device, with a name; may be given several times",
        )
    },
    flag("read-only", "", "off", "Make the device of --size read-only"),
    flag("sector", "512|4096", "512", "Logical sector size that the device reports to clients"),
    flag(
        "limit",
        "SIZE",
        "none",
        "Memory for all devices together, in bytes or as a percentage of the machine's memory",
    ),
    flag("codec", "NAME[:LEVEL]", "delta", "Compression, as in memfold run"),
    flag(
        "block",
        "SIZE",
        "16K",
        "Unit of compression, 4K to 2M; smaller writes are stored as 4K pages",
    ),
    flag("verify", "", "off", "Decompress everything that is written, and compare"),
    flag("unix", "PATH", "none", "Serve NBD on this Unix socket"),
    flag(
        "tcp",
        "ADDRESS:PORT",
        "none",
        "Serve NBD on this TCP port; beyond loopback TLS is required",
    ),
    BlkFlag {
        many: true,
        ..flag(
            "vhost",
            "[NAME=]PATH",
            "none",
            "Serve a device to virtual machines (vhost-user-blk) on this Unix socket: the device NAME, or the first one; may be given several times",
        )
    },
    flag("tls-cert", "FILE", "none", "Certificate chain for TLS, PEM"),
    flag("tls-key", "FILE", "none", "Private key of the certificate, PEM"),
    flag(
        "tls-client-ca",
        "FILE",
        "none",
        "Accept only clients with a certificate that is signed by one of these authorities, PEM",
    ),
    flag(
        "writeback",
        "DIR",
        "none",
        "Directory for an unnamed file that takes compressed data that does not fit in memory",
    ),
    flag("writeback-size", "SIZE", "64G", "Largest size of the file"),
    flag(
        "writeback-limit",
        "SIZE",
        "none",
        "Most data that may be written to the file in total, counted before compression",
    ),
    flag(
        "writeback-encrypt",
        "on|off",
        "on",
        "Encrypt the file with a key that is only in memory; off keeps checksums only",
    ),
    flag("recompress", "NAME[:LEVEL]", "zstd:3", "Codec of memfold blk recompress"),
    flag("load", "FILE", "none", "Load the devices from an image at the start"),
    flag(
        "save",
        "FILE",
        "none",
        "Write an image at the end; an existing image is replaced in one step",
    ),
    flag("persist", "FILE", "none", "Load this image if it exists, and write every flush to it"),
    flag(
        "swap-safe",
        "",
        "off",
        "Make the device safe as swap of this machine: lock its memory, allocate all tables at the start, never wait for its own I/O; needs root",
    ),
    flag(
        "control",
        "PATH",
        "none",
        "Control socket for memfold blk stat, set and the other subcommands; they find the default one without a flag",
    ),
    flag(
        "connections",
        "N",
        "64",
        "Most NBD clients served at the same time, 1 to 1024; further clients wait",
    ),
];

/// A device to serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedDevice {
    /// The export's name; empty for the default one.
    pub name: String,
    /// Its size, bytes.
    pub size: u64,
    /// Whether clients may only read.
    pub read_only: bool,
}

/// A device, and the socket on which a virtual machine finds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachinePlace {
    /// The export's name; `None` for the first one.
    pub export: Option<String>,
    /// Path of the socket.
    pub path: PathBuf,
}

impl MachinePlace {
    /// Parses `[NAME=]PATH`.
    ///
    /// # Errors
    /// The path is empty.
    pub fn parse(text: &str) -> Result<MachinePlace, String> {
        let (export, path) = match text.split_once('=') {
            Some((name, path)) => (Some(name.to_string()), path),
            None => (None, text),
        };
        if path.is_empty() {
            return Err(format!("{text:?} has no path. Write PATH or NAME=PATH."));
        }
        Ok(MachinePlace { export, path: PathBuf::from(path) })
    }

    /// Returns the URI that is printed on stdout.
    pub fn uri(&self) -> String {
        format!("vhost-user-blk:{}", self.path.display())
    }
}

/// Files for TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The server's certificate chain.
    pub certificate: PathBuf,
    /// The server's private key.
    pub key: PathBuf,
    /// The authorities that may sign certificates of clients.
    pub client_ca: Option<PathBuf>,
}

/// The settings of `memfold blk`.
#[derive(Clone, Debug)]
pub struct BlkSettings {
    /// Devices, the default one first. If empty, the devices of an image are served.
    pub exports: Vec<WantedDevice>,
    /// Whether clients may only read the default device.
    pub read_only: bool,
    /// Logical sector size, bytes.
    pub sector_bytes: u32,
    /// Settings of the memory behind the devices.
    pub backing: memfold_block::MemorySettings,
    /// Unix socket for NBD.
    pub unix: Option<PathBuf>,
    /// Sockets for virtual machines.
    pub vhost: Vec<MachinePlace>,
    /// TCP address and port for NBD.
    pub tcp: Option<String>,
    /// Certificates and key for TLS.
    pub tls: Option<TlsFiles>,
    /// NBD clients at the same time, at most.
    pub connections: usize,
    /// Codec of a recompression.
    pub recompress: CodecSpec,
    /// Image to begin with.
    pub load: Option<PathBuf>,
    /// Image to be written at the end.
    pub save: Option<PathBuf>,
    /// Image that follows the devices.
    pub persist: Option<PathBuf>,
    /// Whether the devices may be this machine's swap.
    pub swap_safe: bool,
    /// Control socket.
    pub control: Option<PathBuf>,
}

/// Space that stays free on the file system of the writeback file, bytes.
const KEEP_FREE_BYTES: u64 = 1 << 30;

/// Returns the table as clap's arguments.
pub fn arguments() -> impl Iterator<Item = Arg> {
    FLAGS.iter().map(|flag| {
        let arg = Arg::new(flag.name).long(flag.name);
        if flag.value.is_empty() {
            return arg.action(ArgAction::SetTrue).help(flag.help);
        }
        let help = match flag.default {
            "none" => flag.help.to_string(),
            default => format!("{} [default: {default}]", flag.help),
        };
        let arg = arg.value_name(flag.value).help(help).value_parser(clap::value_parser!(OsString));
        if flag.many { arg.action(ArgAction::Append) } else { arg }
    })
}

/// The given flags, with messages that name them.
struct GivenFlags<'a>(&'a ArgMatches);

impl GivenFlags<'_> {
    fn fail(flag: &str, why: impl std::fmt::Display) -> CommandFailure {
        CommandFailure::own(format!("--{flag}: {why}"))
    }

    fn path(&self, flag: &str) -> Option<PathBuf> {
        self.0.get_one::<OsString>(flag).map(PathBuf::from)
    }

    fn text(&self, flag: &str) -> Result<Option<&str>, CommandFailure> {
        let Some(value) = self.0.get_one::<OsString>(flag) else { return Ok(None) };
        value
            .to_str()
            .map(Some)
            .ok_or_else(|| GivenFlags::fail(flag, format!("{value:?} is not valid UTF-8")))
    }

    /// Returns a value parsed by `parse`, if the flag was given.
    fn parsed<T>(
        &self,
        flag: &str,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<Option<T>, CommandFailure> {
        self.text(flag)?
            .map(|text| parse(text).map_err(|why| GivenFlags::fail(flag, why)))
            .transpose()
    }

    /// Returns a value parsed by `parse`, or the table's default.
    fn value<T>(
        &self,
        flag: &str,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<T, CommandFailure> {
        let default =
            FLAGS.iter().find(|known| known.name == flag).expect("a flag of the table").default;
        parse(self.text(flag)?.unwrap_or(default)).map_err(|why| GivenFlags::fail(flag, why))
    }

    /// Returns whether a flag was given a value.
    fn has(&self, flag: &str) -> bool {
        self.0.get_one::<OsString>(flag).is_some()
    }
}

/// Returns the settings of the flags.
///
/// # Errors
/// 125, with one line: a value is invalid, or two flags exclude each other.
pub fn settings(matches: &ArgMatches) -> Result<BlkSettings, CommandFailure> {
    let flags = GivenFlags(matches);
    Ok(BlkSettings {
        exports: exports(&flags)?,
        read_only: flags.0.get_flag("read-only"),
        sector_bytes: flags.value("sector", sector)?,
        backing: backing(&flags)?,
        unix: flags.path("unix"),
        vhost: vhost(&flags)?,
        tcp: flags.text("tcp")?.map(str::to_string),
        tls: tls(&flags)?,
        connections: flags.value("connections", connections)?,
        recompress: flags.value("recompress", codec)?,
        load: flags.path("load"),
        save: flags.path("save"),
        persist: flags.path("persist"),
        swap_safe: flags.0.get_flag("swap-safe"),
        control: flags.path("control"),
    })
}

fn vhost(given: &GivenFlags) -> Result<Vec<MachinePlace>, CommandFailure> {
    let places = given.0.get_many::<OsString>("vhost").into_iter().flatten().map(|value| {
        let text = value
            .to_str()
            .ok_or_else(|| GivenFlags::fail("vhost", "a name or path is not valid UTF-8"))?;
        MachinePlace::parse(text).map_err(|why| GivenFlags::fail("vhost", why))
    });
    places.collect()
}

fn tls(given: &GivenFlags) -> Result<Option<TlsFiles>, CommandFailure> {
    let client_ca = given.path("tls-client-ca");
    match (given.path("tls-cert"), given.path("tls-key")) {
        (Some(certificate), Some(key)) => Ok(Some(TlsFiles { certificate, key, client_ca })),
        (None, None) if client_ca.is_none() => Ok(None),
        (None, _) => Err(GivenFlags::fail(
            "tls-cert",
            "--tls-key and --tls-client-ca need it. Give --tls-cert FILE too.",
        )),
        (_, None) => Err(GivenFlags::fail(
            "tls-key",
            "--tls-cert and --tls-client-ca need it. Give --tls-key FILE too.",
        )),
    }
}

fn connections(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count @ 1..=1024) => Ok(count),
        _ => Err(format!("{text:?} is not a number from 1 to 1024")),
    }
}

fn sector(text: &str) -> Result<u32, String> {
    match text {
        "512" => Ok(512),
        "4096" | "4K" | "4k" => Ok(4096),
        _ => Err(format!("{text:?} is not 512 or 4096")),
    }
}

fn exports(given: &GivenFlags) -> Result<Vec<WantedDevice>, CommandFailure> {
    let size = given.parsed("size", size)?;
    let read_only = given.0.get_flag("read-only");
    let first = size.map(|size| WantedDevice { name: String::new(), size, read_only });
    let mut all: Vec<WantedDevice> = first.into_iter().collect();
    for value in given.0.get_many::<OsString>("export").into_iter().flatten() {
        let text = value
            .to_str()
            .ok_or_else(|| GivenFlags::fail("export", "the name is not valid UTF-8"))?;
        let definition = export(text).map_err(|why| GivenFlags::fail("export", why))?;
        if all.iter().any(|other| other.name == definition.name) {
            return Err(GivenFlags::fail(
                "export",
                format!("{:?} is given twice. Give each device another name.", definition.name),
            ));
        }
        all.push(definition);
    }
    if all.is_empty() && given.path("load").or(given.path("persist")).is_none() {
        return Err(CommandFailure::own(
            "No device given. Write --size SIZE or --export NAME=SIZE.",
        ));
    }
    Ok(all)
}

/// Parses `NAME=SIZE[,ro]`.
fn export(text: &str) -> Result<WantedDevice, String> {
    let (rest, read_only) = match text.strip_suffix(",ro") {
        Some(rest) => (rest, true),
        None => (text, false),
    };
    let (name, size) = rest
        .rsplit_once('=')
        .ok_or_else(|| format!("{text:?} is not NAME=SIZE or NAME=SIZE,ro"))?;
    if name.len() > memfold_block::NAME_BYTES_MAX || name.chars().any(char::is_control) {
        return Err(format!(
            "{name:?} is not a name. A name has at most {} bytes and no control characters.",
            memfold_block::NAME_BYTES_MAX
        ));
    }
    Ok(WantedDevice { name: name.to_string(), size: self::size(size)?, read_only })
}

fn backing(given: &GivenFlags) -> Result<memfold_block::MemorySettings, CommandFailure> {
    let mut settings = memfold_block::MemorySettings {
        codec: given.value("codec", codec)?,
        block_order: given.value("block", order)?,
        verify: given.0.get_flag("verify"),
        spill: spill(given)?,
        ..Default::default()
    };
    if let Some(text) = given.text("limit")?.filter(|text| *text != "none") {
        let memory = machine::memory_bytes();
        let limit = parse_size(text, memory).map_err(|why| GivenFlags::fail("limit", why))?;
        if limit < LIMIT_BYTES_MIN {
            return Err(GivenFlags::fail(
                "limit",
                format!("{limit} bytes are too small. Give at least {}M.", LIMIT_BYTES_MIN >> 20),
            ));
        }
        if limit > memory {
            return Err(GivenFlags::fail(
                "limit",
                format!(
                    "{text} is more than the memory of this machine or cgroup ({memory} bytes). Give less."
                ),
            ));
        }
        settings.limit_bytes = limit;
    }
    Ok(settings)
}

fn size(text: &str) -> Result<u64, String> {
    parse_size(text, 0)
}

fn codec(text: &str) -> Result<CodecSpec, String> {
    CodecSpec::parse(text).map_err(|e| e.to_string())
}

fn spill(given: &GivenFlags) -> Result<Option<SpillSettings>, CommandFailure> {
    let limit_bytes = given.value("writeback-limit", |text| match text {
        "none" => Ok(None),
        _ => size(text).map(Some),
    })?;
    let size_bytes = given.value("writeback-size", |text| match size(text)? {
        0 => Err("the file needs a size above 0".to_string()),
        bytes => Ok(bytes),
    })?;
    let encrypt = given.value("writeback-encrypt", |text| match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(format!("{text:?} is not one of on, off")),
    })?;
    let Some(path) = given.text("writeback")? else {
        let own = ["writeback-limit", "writeback-size", "writeback-encrypt"];
        return match own.into_iter().find(|flag| given.has(flag)) {
            Some(flag) => Err(GivenFlags::fail(
                flag,
                "this flag needs a writeback file. Give --writeback DIR too.",
            )),
            None => Ok(None),
        };
    };
    Ok(Some(SpillSettings {
        path: path.to_string(),
        size_bytes,
        keep_free_bytes: KEEP_FREE_BYTES,
        encrypt,
        limit_bytes,
    }))
}

fn order(text: &str) -> Result<Order, String> {
    let bytes = size(text)? as usize;
    match Order::covering(bytes) {
        Some(order) if order.bytes() == bytes => Ok(order),
        _ => {
            let valid: Vec<String> =
                (0..=MAX_ORDER).map(|n| format!("{}K", (PAGE_SIZE << n) >> 10)).collect();
            Err(format!("{text:?} is not one of {}", valid.join(", ")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a row of the table in the document. A bar within a cell is escaped, because it would
    /// end the cell.
    fn row(flag: &BlkFlag) -> String {
        let name = format!("`--{} {}", flag.name, flag.value);
        let cells = [format!("{}`", name.trim()), flag.default.to_string(), flag.help.to_string()];
        format!("| {} |\n", cells.map(|cell| cell.replace('|', "\\|")).join(" | "))
    }

    #[test]
    fn the_document_lists_every_flag_with_its_default_and_help() {
        let document = include_str!("../../../../docs/block.md");
        let (_, rest) = document.split_once("<!-- blk-flags:begin -->\n").expect("it has the mark");
        let (text, _) = rest.split_once("<!-- blk-flags:end -->").expect("it has the mark");
        let table = "| flag | default | what it sets |\n|---|---|---|\n".to_string();
        let table = FLAGS.iter().fold(table, |all, flag| all + &row(flag));
        assert!(text == table, "docs/block.md, between the marks: replace\n{text}\nby\n{table}");
    }

    #[test]
    fn exports_are_told_apart() {
        let device = |name: &str, size, read_only| {
            Ok(WantedDevice { name: name.to_string(), size, read_only })
        };
        assert_eq!(export("a=1M"), device("a", 1 << 20, false));
        assert_eq!(export("a=b=512,ro"), device("a=b", 512, true));
        for (text, word) in
            [("a", "NAME=SIZE"), ("a=x", "\"x\""), ("a\u{7}=1M", "control"), ("a=1M,rw", "1M,rw")]
        {
            assert!(export(text).is_err_and(|why| why.contains(word)), "{text:?}");
        }
    }
}
