//! Converts the engine's errors to Python's.
use memfold_engine::Error;
use pyo3::exceptions::{PyMemoryError, PyOSError, PyPermissionError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

const ECHILD: i32 = 10;
const EINVAL: i32 = 22;
const ENOMEM: i32 = 12;

/// Returns the exception for an error. Its text says what is wrong and what to do.
pub fn exception(error: Error) -> PyErr {
    let text = error.to_string();
    match error {
        // Settings are keyword arguments here: `swap_size`, not `--swap-size`.
        Error::Config(_) => PyValueError::new_err(as_keywords(&text)),
        Error::Userfaultfd(memfold_engine::OpenError::Forbidden) => {
            PyPermissionError::new_err(format!(
                "{text}; or leave delivery out, or give delivery=\"signal\", which needs no permission, but then hand an array to \
             files, sockets and other system calls only inside `with mem.pinned(array):`"
            ))
        }
        Error::Userfaultfd(_) => PyOSError::new_err(text),
        Error::System(_, errno) => match errno.raw_os_error() {
            ENOMEM => {
                PyMemoryError::new_err(format!("{text}: free some arrays, or raise ulimit -v"))
            }
            EINVAL => PyValueError::new_err(text),
            ECHILD => PyRuntimeError::new_err(text),
            _ => PyOSError::new_err(text),
        },
        Error::Inherited => PyRuntimeError::new_err(text),
    }
}

/// Writes `--swap-size` as `swap_size`.
fn as_keywords(text: &str) -> String {
    let word = |word: &str| match word.strip_prefix("--") {
        Some(flag) => flag.replace('-', "_"),
        None => word.to_string(),
    };
    text.split(' ').map(word).collect::<Vec<_>>().join(" ")
}
