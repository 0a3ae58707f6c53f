//! Disks of virtual machines: a socket for each device of `--vhost`.
use super::flags::MachinePlace;
use super::listeners::{self, SocketName};
use crate::failure::CommandFailure;
use crate::printable::printable;
use crate::program::plain;
use memfold_block::Export;
use memfold_block::vhost::{VhostError, VhostServer};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

/// Running servers. They end when [`MachineServers::end`] is called.
pub struct MachineServers {
    all: Vec<(Arc<VhostServer>, JoinHandle<()>)>,
    _names: Vec<SocketName>,
}

impl MachineServers {
    /// Serves each device on its socket.
    ///
    /// # Errors
    /// 125: there is no such device, or the socket can't be made.
    pub fn start(
        places: &[MachinePlace],
        exports: &[Arc<Export>],
    ) -> Result<MachineServers, CommandFailure> {
        let mut machines = MachineServers { all: Vec::new(), _names: Vec::new() };
        for place in places {
            let at = |why: &str| {
                CommandFailure::own(format!("--vhost: {}: {why}", place.path.display()))
            };
            let export = find(place, exports).ok_or_else(|| {
                let name = place.export.as_deref().unwrap_or_default();
                at(&format!("there is no device {name:?}. Give its name as in --export, or no name for the first device."))
            })?;
            let (listener, name) = listeners::unix(&place.path).map_err(|why| at(&why))?;
            machines._names.push(name);
            let threads = thread::available_parallelism().map_or(1, |n| n.get());
            let server =
                VhostServer::new(listener, export.clone(), threads).map_err(|e| at(&plain(&e)))?;
            machines
                .run(Arc::new(server), &place.path)
                .map_err(|e| at(&format!("starting a thread failed: {}", plain(&e))))?;
        }
        Ok(machines)
    }

    fn run(&mut self, server: Arc<VhostServer>, path: &Path) -> io::Result<()> {
        let (own, path) = (server.clone(), path.to_path_buf());
        // eprintln! would panic if stderr is closed, and disks of other machines must survive that.
        let report = move |why: &VhostError| {
            let text = format!("--vhost: {}: {why}", path.display());
            drop(writeln!(io::stderr(), "memfold: {}", printable(&text)))
        };
        let serve = move || own.serve(report);
        let thread = thread::Builder::new().name("memfold-vhost".to_string()).spawn(serve)?;
        self.all.push((server, thread));
        Ok(())
    }

    /// Ends all connections. Returns when no request is in progress.
    pub fn end(self) {
        self.all.iter().for_each(|(server, _)| server.stop());
        for (_, thread) in self.all {
            let _ = thread.join();
        }
    }
}

fn find<'a>(place: &MachinePlace, exports: &'a [Arc<Export>]) -> Option<&'a Arc<Export>> {
    match &place.export {
        Some(name) => exports.iter().find(|export| export.name() == name),
        None => exports.first(),
    }
}
