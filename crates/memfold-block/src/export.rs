//! Devices under names, as clients get them.
use crate::device::{Device, IoError};
use crate::image::Journal;
use std::sync::Arc;

/// The longest name of an export, bytes: what the NBD protocol allows.
pub const NAME_BYTES_MAX: usize = 4096;

/// A device under a name. What serves it (NBD, vhost-user) adds nothing of its own to what this
/// says.
pub struct Export {
    name: String,
    device: Arc<Device>,
    /// Writes, discards and zeroing are refused.
    read_only: bool,
    /// The logical sector size that clients are told, bytes: 512 or 4096. Requests of any alignment
    /// are served all the same.
    sector_bytes: u32,
    /// What makes it durable.
    journal: Option<Arc<Journal>>,
}

impl Export {
    /// An export of a device.
    pub fn new(name: &str, device: Arc<Device>, read_only: bool, sector_bytes: u32) -> Export {
        Export { name: name.to_string(), device, read_only, sector_bytes, journal: None }
    }

    /// The same, with an image that follows its device.
    pub fn with_journal(mut self, journal: Arc<Journal>) -> Export {
        self.journal = Some(journal);
        self
    }

    /// Its name; the default export's is empty.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Whether clients may only read.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// The logical sector size that clients are told, bytes.
    pub fn sector_bytes(&self) -> u32 {
        self.sector_bytes
    }

    /// The image that follows its device.
    pub fn journal(&self) -> Option<&Arc<Journal>> {
        self.journal.as_ref()
    }

    /// What is read and written best, bytes: a whole block.
    pub fn preferred_bytes(&self) -> u32 {
        (self.device.block_bytes() as u32).max(self.sector_bytes)
    }

    /// Returns when everything that was written before is as safe as it can be: on disk, for a
    /// device with an image that follows it.
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
