//! Devices with names, as clients see them.
use crate::device::{Device, IoError};
use crate::image::ImageJournal;
use std::sync::Arc;

/// The longest name of an export, bytes: the bound of the NBD protocol.
pub const NAME_BYTES_MAX: usize = 4096;

/// A device with a name. The servers (NBD, vhost-user) only pass on what it does.
pub struct Export {
    name: String,
    device: Arc<Device>,
    /// Writes, discards and zeroing are refused.
    read_only: bool,
    /// The logical sector size that the device reports, bytes: 512 or 4096. Unaligned requests work
    /// too.
    sector_bytes: u32,
    /// The image that makes it durable.
    journal: Option<Arc<ImageJournal>>,
}

impl Export {
    /// Makes an export of a device.
    pub fn new(name: &str, device: Arc<Device>, read_only: bool, sector_bytes: u32) -> Export {
        Export { name: name.to_string(), device, read_only, sector_bytes, journal: None }
    }

    /// Adds an image that follows the device.
    pub fn with_journal(mut self, journal: Arc<ImageJournal>) -> Export {
        self.journal = Some(journal);
        self
    }

    /// Returns its name; that of the default export is empty.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns its device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Returns whether clients may only read.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Returns the logical sector size that the device reports, bytes.
    pub fn sector_bytes(&self) -> u32 {
        self.sector_bytes
    }

    /// Returns the image that follows the device.
    pub fn journal(&self) -> Option<&Arc<ImageJournal>> {
        self.journal.as_ref()
    }

    /// Returns the best size for reads and writes, bytes: a whole block.
    pub fn preferred_bytes(&self) -> u32 {
        (self.device.block_bytes() as u32).max(self.sector_bytes)
    }

    /// Waits until everything that was written before is as safe as possible: on disk, if an image
    /// follows the device.
    ///
    /// # Errors
    /// [`IoError::NotDurable`]
    pub fn flush(&self) -> Result<(), IoError> {
        self.journal
            .as_ref()
            .map_or(Ok(()), |journal| journal.flush())
            .map_err(|_| IoError::NotDurable)
    }
}
