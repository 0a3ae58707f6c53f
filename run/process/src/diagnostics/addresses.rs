//! Limits on a process's address space. The engine reserves more of it than it will ever use. These
//! are addresses, not memory.
use core::fmt::{self, Display, Formatter};
use memfold_os::memory::zone::{NoPromise, counts_reservations};
use rustix::process::{Resource, getrlimit};

/// Below this many bytes, the only advice is to raise the limit.
const LEAST_BYTES: u64 = 1 << 30;
const LIMITS: [(Resource, &str); 2] = [(Resource::As, "-v"), (Resource::Data, "-d")];

/// Displays advice for a process that lacks address space; displays nothing without limits.
pub struct Remedy;

impl Display for Remedy {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for (resource, flag) in LIMITS {
            if let Some(bytes) = getrlimit(resource).current {
                let mib = bytes >> 20;
                write!(
                    f,
                    ". `ulimit {flag}` allows {mib} MiB, but memfold reserves far more addresses than it uses memory. Run `ulimit {flag} unlimited`"
                )?;
            }
        }
        if counts_reservations() {
            f.write_str(". ")?;
            NoPromise.fmt(f)?;
        }
        Ok(())
    }
}

/// Returns whether this process has too little address space to try anything.
pub fn are_too_few() -> bool {
    LIMITS
        .iter()
        .any(|(resource, _)| getrlimit(*resource).current.is_some_and(|bytes| bytes < LEAST_BYTES))
}
