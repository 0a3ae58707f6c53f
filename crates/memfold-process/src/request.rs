//! What `memfold run` asks of this process.
use crate::diagnostics;
use crate::diagnostics::addresses::{self, Remedy};
use crate::diagnostics::unserved::unserved;
use alloc::string::String;
use core::ffi::CStr;
use memfold::config::Config;
use memfold_run::member;
use memfold_run::request::{NAME, RunRequest};

/// `1` switches memfold off.
const DISABLE: &CStr = c"MEMFOLD_DISABLE";

/// The settings that this process is to be managed with; `None` if it isn't to be managed, memfold is
/// switched off, or there are too few addresses. Without a request nothing is allocated. Maps the
/// table that it names.
///
/// # Errors
/// The request makes no sense, as when another version of memfold wrote it.
pub fn read() -> Result<Option<Config>, String> {
    let Some(text) = variable(NAME).filter(|text| !text.is_empty()) else { return Ok(None) };
    if variable(DISABLE) == Some(b"1") || variable(c"LD_PRELOAD").is_some_and(is_of_valgrind) {
        return Ok(None);
    }
    let request = RunRequest::new(core::str::from_utf8(text).unwrap_or(""));
    if let Some(address) = request.address() {
        member::open(address);
        diagnostics::listen();
    }
    if addresses::are_too_few() {
        unserved(format_args!("no address space for the engine{Remedy}"));
        return Ok(None);
    }
    let config = Config::decode(&request.settings()).map_err(|e| e.0)?;
    config.check().map_err(|e| e.0)?;
    Ok(Some(config))
}

/// Whether a LD_PRELOAD is one that valgrind's launcher has made: it puts a library of its own beside
/// this one. Valgrind runs the program's instructions on a processor of its own, whose system calls
/// are made by valgrind's: the gate would catch those.
fn is_of_valgrind(preload: &[u8]) -> bool {
    const CORE: &[u8] = b"/vgpreload_core-";
    preload.windows(CORE.len()).any(|part| part == CORE)
}

fn variable(name: &CStr) -> Option<&'static [u8]> {
    // SAFETY: called from the constructor only, before the program has started any thread that
    // could change the environment; what `getenv` points to stays in place until then.
    unsafe {
        let value = libc::getenv(name.as_ptr());
        (!value.is_null()).then(|| CStr::from_ptr(value).to_bytes())
    }
}
