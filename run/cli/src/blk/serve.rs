//! Serves devices: from settings to sockets, and to the end.
use super::devices::ServedDevices;
use super::flags::{self, BlkSettings, MachinePlace};
use super::listeners::{self, NamedListener, SocketName};
use super::swap_safe;
use super::vhost::MachineServers;
use crate::child::signals::PassedSignals;
use crate::failure::CommandFailure;
use crate::program::plain;
use crate::sockets;
use clap::ArgMatches;
use memfold_block::ctl::DeviceControl;
use memfold_block::nbd::{NbdServer, TlsIdentity};
use memfold_remote::each_connection;
use std::env;
use std::io::Write;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Time between tidyings of memory without requests.
const TIDY_PERIOD: Duration = Duration::from_secs(1);

/// Runs `memfold blk` without a subcommand.
///
/// # Errors
/// 125: the settings are invalid, something that they name is unavailable, or an image can't be
/// written at the end.
pub fn main(matches: &ArgMatches) -> Result<u8, CommandFailure> {
    let signals = PassedSignals::block();
    let settings = flags::settings(matches)?;
    let tls = tls(&settings)?;
    let (listeners, names) = listeners::open(&settings)?;
    if listeners.is_empty() && settings.vhost.is_empty() {
        let flags = "--unix PATH, --tcp ADDRESS:PORT or --vhost PATH";
        return Err(CommandFailure::own(format!(
            "No socket given, so no client could reach the device. Give {flags}."
        )));
    }
    if settings.swap_safe {
        swap_safe::enter()?;
    }
    let devices = ServedDevices::open(&settings)?;
    let control = control(&settings, &devices)?;
    let mut server = NbdServer::new(&devices.exports, tls, settings.connections);
    let mut uris = Vec::new();
    for NamedListener { listener, uri } in listeners {
        server
            .listen(listener)
            .map_err(|e| CommandFailure::own(format!("{uri}: {}", plain(&e))))?;
        uris.push(uri);
    }
    let machines = MachineServers::start(&settings.vhost, &devices.exports)?;
    uris.extend(settings.vhost.iter().map(MachinePlace::uri));
    let backing = devices.backing.clone();
    let tender = thread::Builder::new()
        .name("memfold-tend".to_string())
        .spawn(move || backing.tend(TIDY_PERIOD));
    let tender = tender
        .map_err(|e| CommandFailure::own(format!("Starting a thread failed: {}", plain(&e))))?;
    tell_ready(&uris);
    wait_for_end(&signals);
    server.end();
    machines.end();
    devices.backing.stop();
    let _ = tender.join();
    let outcome = devices.end(&settings);
    drop((control, names));
    outcome.map(|()| 0)
}

fn tls(settings: &BlkSettings) -> Result<Option<TlsIdentity>, CommandFailure> {
    let Some(files) = &settings.tls else { return Ok(None) };
    let identity = TlsIdentity::load(&files.certificate, &files.key, files.client_ca.as_deref());
    identity.map(Some).map_err(|why| CommandFailure::own(format!("TLS: {why}")))
}

/// Answers `memfold blk stat`, `set` and the others, with a thread for each request. If no socket
/// can be made and none was requested, returns `None`: the devices are served without one.
fn control(
    settings: &BlkSettings,
    devices: &ServedDevices,
) -> Result<Option<SocketName>, CommandFailure> {
    let (listener, name) = match &settings.control {
        Some(path) => listeners::unix(path)
            .map_err(|e| CommandFailure::own(format!("--control: {}: {e}", path.display())))?,
        None => {
            let socket = sockets::listen(sockets::BLK);
            let name = socket.and_then(|(listener, path)| Ok((listener, SocketName::of(&path)?)));
            let Ok(name) = name else { return Ok(None) };
            name
        }
    };
    let control =
        Arc::new(DeviceControl::new(&devices.backing, &devices.exports, settings.recompress));
    let serve = move || serve_control(&listener, &control);
    let outcome = thread::Builder::new().name("memfold-control".to_string()).spawn(serve);
    outcome.map_err(|e| CommandFailure::own(format!("Starting a thread failed: {}", plain(&e))))?;
    Ok(Some(name))
}

fn serve_control(listener: &UnixListener, control: &Arc<DeviceControl>) {
    each_connection(
        || listener.accept().map(|(stream, _)| stream),
        |stream| {
            let control = control.clone();
            // Some requests take long, and others must not wait for them. A broken connection affects
            // no other.
            let serve = move || {
                drop(sockets::answer(stream, |request| control.answer(request).to_string()))
            };
            let _ = thread::Builder::new().name("memfold-answer".to_string()).spawn(serve);
        },
    );
}

/// Prints a line for each socket on stdout, and notifies systemd, if it waits.
fn tell_ready(uris: &[String]) {
    let mut out = std::io::stdout().lock();
    // A closed stdout is no error.
    let _ = uris.iter().try_for_each(|uri| writeln!(out, "{uri}")).and_then(|()| out.flush());
    let Some(path) = env::var_os("NOTIFY_SOCKET") else { return };
    let _ = UnixDatagram::unbound().and_then(|socket| socket.send_to(b"READY=1", path));
}

fn wait_for_end(signals: &PassedSignals) {
    loop {
        match signals.next(None).map(|signal| signal.number) {
            Some(libc::SIGINT | libc::SIGTERM | libc::SIGHUP | libc::SIGQUIT) => return,
            // The signal is blocked, so this does what its default action would do. SAFETY: raise
            // stops this process and touches no memory.
            Some(libc::SIGTSTP) => drop(unsafe { libc::raise(libc::SIGSTOP) }),
            _ => {}
        }
    }
}
