//! `memfold._memfold`: the part of the Python package memfold that uses the engine. The public
//! interface, with documentation and argument checks, is in `python/memfold`.
//!
//! Arrays in folded memory are ordinary numpy arrays. numpy allocates and frees their bytes through
//! a handler of NEP 49 (`handler.rs`).

// Bottom first: a module imports only from modules listed above it.
mod error;
mod engine;
mod handler;
mod install;
mod fork;

use pyo3::prelude::*;

// `install.rs` and the list of heaps rely on Python's global lock. Without `gil_used` a
// free-threaded Python that builds this from source would run without the lock.
#[pymodule(gil_used = true)]
fn _memfold(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("LAYOUT_VERSION", memfold_run::table::LAYOUT_VERSION)?;
    module.add_class::<engine::Engine>()?;
    module.add_function(wrap_pyfunction!(engine::is_folded, module)?)?;
    module.add_function(wrap_pyfunction!(engine::figures, module)?)?;
    module.add_function(wrap_pyfunction!(engine::run_order, module)?)?;
    module.add_function(wrap_pyfunction!(engine::parse_size, module)?)?;
    module.add_function(wrap_pyfunction!(handler::make_handler, module)?)?;
    module.add_function(wrap_pyfunction!(handler::set_handler, module)?)?;
    module.add_function(wrap_pyfunction!(install::install, module)?)?;
    module.add_function(wrap_pyfunction!(install::uninstall, module)?)?;
    module.add_function(wrap_pyfunction!(fork::after_fork_in_child, module)?)?;
    Ok(())
}
