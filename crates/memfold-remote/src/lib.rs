//! The service between memfold's engines and a remote store that speaks the Redis protocol.
//!
//! Engines have no `std`, so they can't have a client of such servers. They send sealed bytes over a Unix socket
//! (`memfold_sys::remote`), and this service passes them on. `memfold run` keeps one for its run; who uses the library
//! starts one: [`Service::start`], and gives its socket to `memfold::Builder::remote_socket`.
//!
//! What it promises: `Ok` of a put is said only when the servers have acknowledged it; a read is tried again, with
//! connections made anew and longer pauses, until its time is up; on a connection that has failed in any way nothing is
//! read any more, so that no answer is taken for another; keys are this run's alone, deleted at its end, and expire by
//! themselves if it was killed. It holds no object longer than a request takes.

mod settings;
mod link;
mod keys;
mod service;

pub use service::Service;
pub use settings::Settings;
