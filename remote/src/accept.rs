//! Accepts connections, also while the process is out of descriptors.
use std::io::{self, ErrorKind};
use std::thread;
use std::time::Duration;

/// Pauses while no connection can be accepted.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Gives `each` every connection that `accept` returns, forever. While the kernel has no descriptor
/// or memory for one, it sleeps, and clients wait. Without the pause it would retry the same connection as fast as the
/// processor can.
pub fn each_connection<S>(mut accept: impl FnMut() -> io::Result<S>, mut each: impl FnMut(S)) {
    let mut pause = PAUSE_MIN;
    loop {
        match accept() {
            Ok(stream) => {
                pause = PAUSE_MIN;
                each(stream);
            }
            Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {
            }
            Err(_) => {
                thread::sleep(pause);
                pause = (pause * 2).min(PAUSE_MAX);
            }
        }
    }
}
