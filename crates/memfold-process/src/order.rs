//! What `memfold run` wants of this process: the environment variable that it sets.
use crate::diagnostics as say;
use crate::diagnostics::addresses::{self, Remedy};
use crate::diagnostics::unserved::unserved;
use alloc::string::String;
use core::ffi::CStr;
use memfold::config::Config;
use memfold_run::door::Key;
use memfold_run::slots::{self, Way};

/// The variable; its value is the lines of `Config::encode`, `stats=PATH`, `bounds=PATH` and
/// `door=NAME,KEY`, joined by semicolons.
const VARIABLE: &CStr = c"MEMFOLD_RUN";
/// `1` switches memfold off.
const DISABLE: &CStr = c"MEMFOLD_DISABLE";

/// In front of the path of the table that processes of the user of `memfold run` share, and of that
/// of the run's bounds.
const STATS: &str = "stats=";
const BOUNDS: &str = "bounds=";
/// In front of where to ask for it, and the key.
const DOOR: &str = "door=";

/// An order to run under management.
pub struct Order {
    /// The settings.
    pub config: Config,
}

/// The order to this process; `None` if there is none, memfold is switched off, or there are too
/// few addresses. Without one nothing is allocated. Maps the table that it names.
///
/// # Errors
/// The order makes no sense, as when another version of memfold wrote it.
pub fn read() -> Result<Option<Order>, String> {
    let Some(text) = variable(VARIABLE).filter(|text| !text.is_empty()) else { return Ok(None) };
    if variable(DISABLE) == Some(b"1") || is_under_valgrind() {
        return Ok(None);
    }
    let lines = || core::str::from_utf8(text).unwrap_or("").split(';');
    let of = |prefix: &str| lines().find_map(|line| line.strip_prefix(prefix));
    let door = of(DOOR).and_then(|text| text.split_once(','));
    let door = door.and_then(|(door, key)| Some((door, Key::parse(key)?)));
    if let (Some(table), Some(bounds), Some((door, key))) = (of(STATS), of(BOUNDS), door) {
        slots::open(Way { paths: [table, bounds], door, key });
        say::listen();
    }
    if addresses::are_too_few() {
        unserved(format_args!("Reserving address space for the engine failed{Remedy}"));
        return Ok(None);
    }
    let mut settings = String::new();
    let is_setting = |line: &&str| [STATS, BOUNDS, DOOR].iter().all(|what| !line.starts_with(what));
    for line in lines().filter(is_setting) {
        settings.push_str(line);
        settings.push('\n');
    }
    let config = Config::decode(&settings).map_err(|e| e.0)?;
    config.check().map_err(|e| e.0)?;
    Ok(Some(Order { config }))
}

/// Valgrind runs the program's instructions on a processor of its own, whose system calls are made
/// by valgrind's: the gate would catch those. Its launcher puts a library of its own beside this one.
fn is_under_valgrind() -> bool {
    const CORE: &[u8] = b"/vgpreload_core-";
    variable(c"LD_PRELOAD").is_some_and(|all| all.windows(CORE.len()).any(|part| part == CORE))
}

fn variable(name: &CStr) -> Option<&'static [u8]> {
    // SAFETY: called from the constructor only, before the program has started any thread that
    // could change the environment; what `getenv` points to stays in place until then.
    unsafe {
        let value = libc::getenv(name.as_ptr());
        (!value.is_null()).then(|| CStr::from_ptr(value).to_bytes())
    }
}
