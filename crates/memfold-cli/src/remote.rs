//! The service of `memfold run --remote`: what its flags ask for, and where its socket is.
use crate::failure::Failure;
use crate::program::plain;
use crate::sockets;
use memfold::config::Config;
use memfold_remote::{Service, Settings};
use std::path::Path;
use std::time::Duration;

/// The suffix of the socket's name.
const SUFFIX: &str = ".remote";

/// A service that has reached its store, if the settings ask for one; they get its socket. It does nothing before
/// [`Service::serve`].
///
/// # Errors
/// 125: the flags make no sense, the store can't be used, or there is no place for the socket.
pub fn open(config: &mut Config) -> Result<Option<Service>, Failure> {
    let Some(url) = &config.remote else {
        for (flag, given) in [("remote-auth", &config.remote_auth), ("remote-ca", &config.remote_ca)] {
            if given.is_some() {
                return Err(Failure::own(format!("--{flag}: give --remote URL too")));
            }
        }
        return Ok(None);
    };
    let of = |flag: &str, why: String| Failure::own(format!("--{flag}: {why}"));
    let timeout = Duration::from_secs(config.remote_timeout_s as u64);
    let mut settings = Settings::parse(url, timeout).map_err(|why| of("remote", why))?;
    if let Some(path) = &config.remote_auth {
        settings.set_auth(Path::new(path)).map_err(|why| of("remote-auth", why))?;
    }
    if let Some(path) = &config.remote_ca {
        settings.set_ca(Path::new(path)).map_err(|why| of("remote-ca", why))?;
    }
    let path = sockets::path(SUFFIX).map_err(|e| of("remote", format!("no place for a socket: {}", plain(&e))))?;
    let service = Service::open(settings, &path).map_err(|why| of("remote", why))?;
    let text = path.to_str().ok_or_else(|| of("remote", format!("{}: not in UTF-8", path.display())))?;
    config.remote_socket = Some(text.to_string());
    // They are nobody's business in the environment of the program.
    (config.remote_auth, config.remote_ca) = (None, None);
    Ok(Some(service))
}
