//! Serving devices: from settings to sockets, and to the end.
use super::flags::{self, Settings};
use super::listeners::{self, Named};
use crate::failure::Failure;
use crate::program::plain;
use crate::signals::Signals;
use clap::ArgMatches;
use memfold_block::nbd::{Server, Tls};
use memfold_block::{Backing, Device, Export};
use std::env;
use std::io::Write;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;

/// `memfold blk` without a subcommand.
///
/// # Errors
/// 125: the settings make no sense, or what they name can't be had.
pub fn main(matches: &ArgMatches) -> Result<u8, Failure> {
    let signals = Signals::block();
    let settings = flags::settings(matches)?;
    let tls = tls(&settings)?;
    let (listeners, names) = listeners::open(&settings)?;
    if listeners.is_empty() {
        return Err(Failure::own("nobody could reach the device: give --unix PATH or --tcp ADDRESS:PORT"));
    }
    let exports = exports(&settings)?;
    let mut server = Server::new(&exports, tls, settings.connections);
    let mut uris = Vec::new();
    for Named { listener, uri } in listeners {
        server.listen(listener).map_err(|e| Failure::own(format!("{uri}: {}", plain(&e))))?;
        uris.push(uri);
    }
    tell_ready(&uris);
    wait_for_end(&signals);
    server.end();
    drop(names);
    Ok(0)
}

fn tls(settings: &Settings) -> Result<Option<Tls>, Failure> {
    let Some(files) = &settings.tls else { return Ok(None) };
    let loaded = Tls::load(&files.certificate, &files.key, files.client_ca.as_deref());
    loaded.map(Some).map_err(|why| Failure::own(format!("TLS: {why}")))
}

/// The devices, under their names.
fn exports(settings: &Settings) -> Result<Vec<Arc<Export>>, Failure> {
    let backing = Backing::new(&settings.backing).map_err(Failure::own)?;
    let mut all = Vec::new();
    for wanted in &settings.exports {
        let device = Device::new(&backing, wanted.size).map_err(Failure::own)?;
        all.push(Arc::new(Export::new(&wanted.name, device, wanted.read_only, settings.sector_bytes)));
    }
    Ok(all)
}

/// A line for each socket on stdout, and a word to systemd, if it waits for one.
fn tell_ready(uris: &[String]) {
    let mut out = std::io::stdout().lock();
    // Whoever does not read it does not want it.
    let _ = uris.iter().try_for_each(|uri| writeln!(out, "{uri}")).and_then(|()| out.flush());
    let Some(path) = env::var_os("NOTIFY_SOCKET") else { return };
    let _ = UnixDatagram::unbound().and_then(|socket| socket.send_to(b"READY=1", path));
}

fn wait_for_end(signals: &Signals) {
    loop {
        match signals.next(None).map(|caught| caught.number) {
            Some(libc::SIGINT | libc::SIGTERM | libc::SIGHUP | libc::SIGQUIT) => return,
            // As it would without us: the signal itself is blocked.
            // SAFETY: stops this process, and touches no memory.
            Some(libc::SIGTSTP) => drop(unsafe { libc::raise(libc::SIGSTOP) }),
            _ => {}
        }
    }
}
