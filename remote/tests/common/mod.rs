//! Helpers of the tests.
#![allow(unused_imports)] // Each test file uses a part of this.
use memfold_swap::remote::socket::SocketRemote;
pub use memfold_testkit::scratch::Scratch;
use std::path::Path;
use std::time::Duration;

/// Makes an engine's client of the service at `socket`.
pub fn remote(socket: &Path) -> SocketRemote {
    SocketRemote::new(socket.to_str().unwrap(), "the store", Duration::from_secs(60)).unwrap()
}
