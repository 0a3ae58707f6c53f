//! An NBD server: fixed newstyle negotiation, structured replies, block status, TLS.
//!
//! `wire.rs` has the protocol's numbers; `negotiate.rs` its first phase; `session.rs` its second,
//! which uses `buffers.rs`; `server.rs` accepts connections on the sockets of `socket.rs`, with TLS
//! of `tls.rs`.
//!
//! Unsupported: extended headers (64-bit lengths), which few clients have; PSK, which rustls lacks;
//! metadata contexts other than `base:allocation`.

mod wire;
mod buffers;
mod tls;
mod socket;
mod negotiate;
mod session;
mod server;

#[cfg(test)]
mod client;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_fuzz;

pub use server::NbdServer;
pub use socket::SocketListener;
pub use tls::TlsIdentity;
