//! The request of `memfold run` to this process.
use crate::diagnostics;
use crate::diagnostics::addresses::{self, Remedy};
use crate::diagnostics::unserved::unserved;
use crate::initial_stack::InitialStack;
use alloc::string::String;
use core::ffi::CStr;
use memfold_engine::config::Config;
use memfold_run::member;
use memfold_run::request::{NAME, RunRequest};

/// The value `1` switches memfold off.
const DISABLE: &CStr = c"MEMFOLD_DISABLE";

/// Returns the settings with which this process is to be managed. Returns `None` if there is no
/// request, memfold is switched off, or there are too few addresses. Without a request, nothing is
/// allocated. Maps the table that the request names.
///
/// # Errors
/// The request is invalid, for example because another version of memfold wrote it.
pub fn read(stack: &InitialStack) -> Result<Option<Config>, String> {
    let variable = |name: &CStr| stack.variable(name.to_bytes());
    let Some(text) = variable(NAME).filter(|text| !text.is_empty()) else { return Ok(None) };
    if variable(DISABLE) == Some(b"1") || variable(c"LD_PRELOAD").is_some_and(is_of_valgrind) {
        return Ok(None);
    }
    let request = RunRequest::new(core::str::from_utf8(text).unwrap_or(""));
    if let Some(address) = request.address() {
        member::open(address, request.link());
        diagnostics::listen();
    }
    if let Some(path) = request.samples() {
        member::open_samples(path);
    }
    if addresses::are_too_few() {
        unserved(format_args!("no address space for the engine{Remedy}"));
        return Ok(None);
    }
    let config = Config::decode(&request.settings()).map_err(|e| e.0)?;
    config.check().map_err(|e| e.0)?;
    Ok(Some(config))
}

/// Returns whether valgrind's launcher has made a LD_PRELOAD: it adds a library of its own to this
/// one. Valgrind runs the program's instructions on a simulated processor and makes their system
/// calls itself. The gate would catch valgrind's own calls.
fn is_of_valgrind(preload: &[u8]) -> bool {
    const CORE: &[u8] = b"/vgpreload_core-";
    preload.windows(CORE.len()).any(|part| part == CORE)
}
