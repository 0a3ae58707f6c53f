//! The devices to serve: new ones, or those of an image.
use super::flags::{BlkSettings, WantedDevice};
use crate::failure::CommandFailure;
use memfold_block::image::{
    self, DeviceEntry, ImageError, ImageJournal, ImagePlace, VerifiedImage,
};
use memfold_block::{Device, DeviceError, DeviceMemory, Export, NAME_BYTES_MAX};
use std::path::Path;
use std::sync::Arc;

/// The devices, and what is written of them at the end.
pub struct ServedDevices {
    pub backing: Arc<DeviceMemory>,
    pub exports: Vec<Arc<Export>>,
    devices: Vec<Arc<Device>>,
    entries: Vec<DeviceEntry>,
    journal: Option<Arc<ImageJournal>>,
}

/// An image to start with.
struct FoundImage {
    image: VerifiedImage,
    /// Its place, if it is the image that follows the devices.
    own: Option<ImagePlace>,
    flag: &'static str,
}

impl ServedDevices {
    /// Makes the devices, with the content of an image.
    ///
    /// # Errors
    /// 125: the settings or an image are invalid, or there is no memory.
    pub fn open(settings: &BlkSettings) -> Result<ServedDevices, CommandFailure> {
        if let Some(path) = &settings.save {
            check_place(path)?;
        }
        let (image, definitions) = find_image(settings)?;
        let entries: Vec<DeviceEntry> = definitions
            .iter()
            .map(|definition| DeviceEntry { name: definition.name.clone(), size: definition.size })
            .collect();
        let backing = DeviceMemory::new(&settings.backing).map_err(|e| match e {
            DeviceError::Spill(why) => of("writeback", why),
            other => CommandFailure::own(other),
        })?;
        let mut devices = Vec::new();
        for definition in &definitions {
            let flag = if definition.name.is_empty() { "size" } else { "export" };
            devices.push(Device::new(&backing, definition.size).map_err(|e| of(flag, e))?);
        }
        if settings.swap_safe {
            devices
                .iter()
                .try_for_each(|device| device.preallocate())
                .map_err(|e| of("swap-safe", e))?;
        }
        let journal = restore(settings, image, &entries, &devices)?;
        let exports = definitions.iter().zip(&devices).map(|(definition, device)| {
            let export = Export::new(
                &definition.name,
                device.clone(),
                definition.read_only,
                settings.sector_bytes,
            );
            Arc::new(match &journal {
                Some(journal) => export.with_journal(journal.clone()),
                None => export,
            })
        });
        Ok(ServedDevices { backing, exports: exports.collect(), devices, entries, journal })
    }

    /// Writes the image at the end.
    ///
    /// # Errors
    /// 125: the image can't be written. An older image is unchanged then.
    pub fn end(&self, settings: &BlkSettings) -> Result<(), CommandFailure> {
        if let Some(journal) = &self.journal {
            journal.flush().map_err(|e| at("persist", settings.persist.as_deref(), e))?;
        }
        if let Some(path) = &settings.save {
            ImagePlace::open(path)
                .and_then(|place| image::save(&place, &self.entries, &self.devices))
                .map_err(|e| at("save", Some(path), e))?;
        }
        Ok(())
    }
}

fn of(flag: &str, why: impl std::fmt::Display) -> CommandFailure {
    CommandFailure::own(format!("--{flag}: {why}"))
}

fn at(flag: &str, path: Option<&Path>, why: impl std::fmt::Display) -> CommandFailure {
    of(flag, format!("{}: {why}", path.unwrap_or(Path::new("?")).display()))
}

/// Checks that the place of an image to be written holds an image or nothing.
fn check_place(path: &Path) -> Result<(), CommandFailure> {
    let directory =
        path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !directory.is_dir() {
        return Err(at(
            "save",
            Some(path),
            "the directory of the image does not exist. Make it first.",
        ));
    }
    match ImagePlace::open(path).and_then(|place| VerifiedImage::check_head(&place)) {
        Ok(()) => Ok(()),
        Err(error @ ImageError::System(_)) => Err(at("save", Some(path), error)),
        Err(ImageError::NoImage) => Err(at(
            "save",
            Some(path),
            "the file exists and is no image of memfold blk, so it is left unchanged. Give another path.",
        )),
        Err(_) => Ok(()),
    }
}

/// Returns the image to start with, if there is one, and the devices to make.
fn find_image(
    settings: &BlkSettings,
) -> Result<(Option<FoundImage>, Vec<WantedDevice>), CommandFailure> {
    let own = match &settings.persist {
        Some(path) => look(path).map_err(|e| at("persist", Some(path), e))?,
        None => None,
    };
    let (flag, path) =
        if own.is_some() { ("persist", &settings.persist) } else { ("load", &settings.load) };
    if let (Some(_), Some(load)) = (&own, &settings.load) {
        return Err(at(
            "load",
            Some(load),
            "the image of --persist exists already. Leave --load out.",
        ));
    }
    let image = match (own, &settings.load) {
        (Some((place, image)), _) => Some(FoundImage { image, own: Some(place), flag }),
        (None, Some(path)) => {
            let image = load(path).map_err(|e| at("load", Some(path), e))?;
            Some(FoundImage { image, own: None, flag })
        }
        (None, None) => None,
    };
    let Some(image) = image else {
        if settings.exports.is_empty() {
            return Err(at(
                "persist",
                settings.persist.as_deref(),
                "the image does not exist yet. Give --size SIZE.",
            ));
        }
        return Ok((None, with_read_only(settings, settings.exports.clone())));
    };
    let definitions =
        wanted(settings, image.image.entries()).map_err(|why| at(flag, path.as_deref(), why))?;
    Ok((Some(image), with_read_only(settings, definitions)))
}

/// Opens an image that is written to, with its place.
fn look(path: &Path) -> Result<Option<(ImagePlace, VerifiedImage)>, ImageError> {
    let place = ImagePlace::open(path)?;
    Ok(ImageJournal::look(&place)?.map(|image| (place, image)))
}

/// Opens an image that is only read.
fn load(path: &Path) -> Result<VerifiedImage, ImageError> {
    let image = VerifiedImage::open(&ImagePlace::open(path)?)?;
    image.ok_or(ImageError::System("no such file".to_string()))
}

/// Returns the devices of an image, which must equal the requested ones, if any were requested.
fn wanted(settings: &BlkSettings, entries: &[DeviceEntry]) -> Result<Vec<WantedDevice>, String> {
    if settings.exports.is_empty() {
        if entries.iter().any(|entry| entry.name.len() > NAME_BYTES_MAX) {
            return Err("the image has a device with a name that is too long".to_string());
        }
        let all = entries.iter().map(|e| WantedDevice {
            name: e.name.clone(),
            size: e.size,
            read_only: false,
        });
        return Ok(all.collect());
    }
    let are_same = entries.len() == settings.exports.len()
        && entries.iter().zip(&settings.exports).all(|(a, b)| a.name == b.name && a.size == b.size);
    if are_same {
        return Ok(settings.exports.clone());
    }
    let holds: Vec<String> =
        entries.iter().map(|e| format!("{:?} of {} bytes", e.name, e.size)).collect();
    Err(format!(
        "the image holds {}, which differs from --size and --export. Leave these out.",
        holds.join(", ")
    ))
}

fn with_read_only(settings: &BlkSettings, mut wanted: Vec<WantedDevice>) -> Vec<WantedDevice> {
    wanted.iter_mut().filter(|w| w.name.is_empty()).for_each(|w| w.read_only |= settings.read_only);
    wanted
}

/// Puts an image's bytes into the devices. Returns the image that follows them from now on, if
/// there is one.
fn restore(
    settings: &BlkSettings,
    found: Option<FoundImage>,
    entries: &[DeviceEntry],
    devices: &[Arc<Device>],
) -> Result<Option<Arc<ImageJournal>>, CommandFailure> {
    let mut own = None;
    if let Some(FoundImage { image, own: place, flag }) = found {
        let path = if place.is_some() { &settings.persist } else { &settings.load };
        image.restore(devices).map_err(|e| at(flag, path.as_deref(), e))?;
        own = place.map(|place| (place, image));
    }
    let Some(path) = &settings.persist else { return Ok(None) };
    let journal = match own {
        Some((place, image)) => ImageJournal::resume(place, image, devices),
        None => {
            ImagePlace::open(path).and_then(|place| ImageJournal::create(place, entries, devices))
        }
    };
    journal.map(|journal| Some(Arc::new(journal))).map_err(|e| at("persist", Some(path), e))
}
