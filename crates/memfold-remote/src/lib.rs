//! The service between memfold's engines and a remote store that speaks the Redis protocol.
//!
//! Engines have no `std`, so they can't have a client of such servers. They send sealed bytes over
//! a Unix socket (`memfold_swap::remote`), and this service passes them on. `memfold run` keeps one
//! for its run; who uses the library starts one: [`Service::start`], and gives its socket to
//! `memfold::Builder::remote_socket`.
//!
//! A program that uses the library needs a swap file, the URL in both places, and a path for the
//! socket in a directory of its own. The service must outlive the memory: what lies in the store is
//! deleted when it is dropped.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use memfold::Memory;
//! use memfold_remote::{Service, Settings};
//! use std::{path::Path, time::Duration};
//!
//! let (url, socket) = ("redis://10.0.0.5:6379", "/run/user/1000/mine.socket");
//! let service = Service::start(Settings::parse(url, Duration::from_secs(10))?, Path::new(socket))?;
//! let memory = Memory::builder()
//!     .limit_bytes(256 << 20)
//!     .set("swap", "/var/tmp")
//!     .set("swap-size", "1G")
//!     .set("remote", url)
//!     .set("remote-size", "64G")
//!     .remote_socket(socket)
//!     .build()?;
//! let region = memory.region(8 << 30)?;
//! # drop((region, memory, service));
//! # Ok(())
//! # }
//! ```
//! `examples/library.rs` is such a program.
//!
//! What it promises: `Ok` of a put is said only when the servers have acknowledged it; a read is
//! tried again, with connections made anew and longer pauses, until its time is up; on a connection
//! that has failed in any way nothing is read any more, so that no answer is taken for another;
//! keys are this run's alone, deleted at its end, and expire by themselves if it was killed; until
//! then they are refreshed, and there is a warning if that fails for half of their time. It holds
//! no object longer than a request takes. An engine takes one descriptor, and all together take up
//! to 16 connections to each server.

mod accept;
mod settings;
mod link;
mod links;
mod process;
mod keys;
mod kept;
mod store;
mod line;
mod service;

pub use accept::each_connection;
pub use service::Service;
pub use settings::Settings;
