//! What `memfold run` wants of this process: the environment variable that it sets.
use crate::addresses;
use alloc::string::String;
use core::ffi::CStr;
use memfold::config::Config;

/// The variable; its value is the lines of `Config::encode` and `stats=PATH`, joined by semicolons.
const VARIABLE: &CStr = c"MEMFOLD_RUN";
/// `1` switches memfold off.
const DISABLE: &CStr = c"MEMFOLD_DISABLE";

/// An order to run under management.
pub struct Order {
    /// The settings.
    pub config: Config,
    /// Where the table of figures is.
    pub stats_path: String,
}

/// The order to this process; `None` if there is none, or memfold is switched off. Without one nothing is allocated. Ends the
/// process with a message if it may have too few addresses.
///
/// # Errors
/// The order makes no sense, as when another version of memfold wrote it.
pub fn read() -> Result<Option<Order>, String> {
    let Some(text) = variable(VARIABLE).filter(|text| !text.is_empty()) else { return Ok(None) };
    if variable(DISABLE) == Some(b"1") {
        return Ok(None);
    }
    addresses::check();
    let text = core::str::from_utf8(text).map_err(|_| String::from("not text"))?;
    let (mut settings, mut stats_path) = (String::new(), String::new());
    for line in text.split(';') {
        match line.strip_prefix("stats=") {
            Some(path) => stats_path.push_str(path),
            None => {
                settings.push_str(line);
                settings.push('\n');
            }
        }
    }
    let config = Config::decode(&settings).map_err(|e| e.0)?;
    config.check().map_err(|e| e.0)?;
    Ok(Some(Order { config, stats_path }))
}

fn variable(name: &CStr) -> Option<&'static [u8]> {
    // SAFETY: called from the constructor only, before the program has started any thread that could change the
    // environment; what `getenv` points to stays in place until then.
    unsafe {
        let value = libc::getenv(name.as_ptr());
        (!value.is_null()).then(|| CStr::from_ptr(value).to_bytes())
    }
}
