//! Accepts connections, also while the process is out of descriptors.
use std::io::ErrorKind;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::Duration;

/// Pauses while no connection can be accepted.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Gives `each` every connection, forever. While the kernel has no descriptor or memory for one, it
/// sleeps, and clients wait. Without the pause it would retry the same connection as fast as the
/// processor can.
pub fn each_connection(listener: &UnixListener, mut each: impl FnMut(UnixStream)) {
    let mut pause = PAUSE_MIN;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
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
