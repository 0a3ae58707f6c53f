//! The service between memfold's engines and a remote store that speaks the Redis protocol.
//!
//! Engines have no `std`, so they can't contain a client of such servers. They send sealed bytes
//! over a Unix socket (`memfold_swap::remote`), and this service passes them on. `memfold run`
//! starts one for its run. A program that uses the library starts one with [`Service::start`], and
//! gives its socket to `memfold::Builder::remote_socket`.
//!
//! Such a program needs a swap file, the URL in both places, and a path for the socket in its own
//! directory. The service must outlive the memory, because its drop deletes everything in the
//! store.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use memfold::Memory;
//! use memfold_remote::{Service, StoreSettings};
//! use std::{path::Path, time::Duration};
//!
//! let (url, socket) = ("redis://10.0.0.5:6379", "/run/user/1000/mine.socket");
//! let service = Service::start(StoreSettings::parse(url, Duration::from_secs(10))?, Path::new(socket))?;
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
//! Promises. A put returns `Ok` only when the servers have acknowledged it. A read is repeated,
//! with new connections and longer pauses, until its time is up. After any failure a connection is
//! not read again, so no answer is mistaken for another. Keys belong to this run only, are deleted
//! at its end, and expire if it was killed. Until then they are refreshed, and a warning is printed
//! if that fails for half of their lifetime. The service keeps no object longer than a request
//! takes. An engine takes one descriptor, and all engines share up to 16 connections to each
//! server.

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
pub use settings::StoreSettings;
