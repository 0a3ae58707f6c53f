//! Images on a disk that forgets, tears and fails: each opens and holds everything that was
//! acknowledged.
use super::{DeviceEntry, ImageError, ImageJournal, ImagePlace, VerifiedImage};
use crate::device::{Device, DeviceMemory, MemorySettings, ZeroPolicy};
use memfold_os::Errno;
use memfold_os::units::Order;
use memfold_store::CodecSpec;
use memfold_testkit::disk::files::{Fate, Fault, Forgetful};
use memfold_testkit::fill::fill;
use memfold_testkit::random::{Random, seed};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const SIZES: [u64; 2] = [(96 << 10) + 512, 16 << 10];
const NAME: &[u8] = b"disk.img";
/// Small enough that a few flushes need a new image.
const SLACK_BYTES: u64 = 8 << 10;

/// How much the test tries.
#[derive(Copy, Clone)]
struct Effort {
    /// Power cuts for each moment, besides those that lose everything or nothing.
    cuts: usize,
    steps: usize,
}

fn backing() -> Arc<DeviceMemory> {
    let settings = MemorySettings {
        codec: CodecSpec::parse("lz4").unwrap(),
        block_order: Order::new(1).unwrap(),
        pools: 1,
        ..MemorySettings::default()
    };
    DeviceMemory::new(&settings).unwrap()
}

fn entries() -> Vec<DeviceEntry> {
    let entry =
        |(number, size): (usize, &u64)| DeviceEntry { name: format!("{number}"), size: *size };
    SIZES.iter().enumerate().map(entry).collect()
}

fn place(folder: &Forgetful) -> ImagePlace {
    ImagePlace::new(Path::new("disk.img"), Box::new(folder.clone()), NAME)
}

/// Devices that change, and their image.
struct Served {
    folder: Forgetful,
    backing: Arc<DeviceMemory>,
    devices: Vec<Arc<Device>>,
    journal: Option<ImageJournal>,
    /// The content of the devices at each attempted flush.
    states: Vec<Vec<u8>>,
    /// The last of them that was acknowledged.
    acknowledged: usize,
    random: Random,
}

impl Served {
    /// Makes devices of zeros, without an image yet.
    fn new(folder: &Forgetful, backing: &Arc<DeviceMemory>, random: Random) -> Served {
        let devices = SIZES.iter().map(|size| Device::new(backing, *size).unwrap()).collect();
        let mut image = Served {
            folder: folder.clone(),
            backing: backing.clone(),
            devices,
            journal: None,
            states: Vec::new(),
            acknowledged: 0,
            random,
        };
        image.states.push(content(&image.devices));
        image
    }

    /// Opens the devices of the image; `None` if there is none. A power cut meanwhile may leave any
    /// of the earlier states.
    fn open(
        folder: &Forgetful,
        backing: &Arc<DeviceMemory>,
        random: Random,
        before: &[Vec<u8>],
        acknowledged: usize,
    ) -> Result<Option<Served>, ImageError> {
        let mut other = Served::new(folder, backing, random);
        folder.note(acknowledged << 16 | before.len());
        let place = place(folder);
        let Some(image) = ImageJournal::look(&place)? else { return Ok(None) };
        assert_eq!(image.entries(), entries());
        image.restore(&other.devices)?;
        other.states = [before, &[content(&other.devices)]].concat();
        let journal = ImageJournal::resume(place, image, &other.devices)?;
        other.journal = Some(journal.with_slack(SLACK_BYTES));
        other.acknowledged = before.len();
        other.note();
        Ok(Some(other))
    }

    /// Kills and restarts the server until it starts.
    fn start_again(&mut self) {
        let (folder, backing) = (self.folder.clone(), self.backing.clone());
        if self.journal.take().is_none() {
            return;
        }
        let states = std::mem::take(&mut self.states);
        loop {
            match Served::open(&folder, &backing, self.random.fork(), &states, self.acknowledged) {
                Ok(Some(served)) => {
                    let state = served.states.last().unwrap();
                    assert!(states[self.acknowledged..].contains(state), "what was flushed");
                    *self = served;
                    return;
                }
                Err(ImageError::System(_)) => {}
                other => panic!("{:?}", other.err()),
            }
        }
    }

    /// Makes a few writes, discards and zeros.
    fn change(&mut self) {
        for _ in 0..1 + self.random.below(3) {
            let device = &self.devices[self.random.below(8) / 7];
            let size = device.size() as usize;
            let at = self.random.below(size);
            let most = self.random.pick(&[100, 3000, 20_000]);
            let len = (1 + self.random.below(most)).min(size - at);
            let mut io = device.io();
            match self.random.below(5) {
                0 => device.zero(&mut io, at as u64, len as u64, ZeroPolicy::Hole).unwrap(),
                1 => device.zero(&mut io, at as u64, len as u64, ZeroPolicy::Written).unwrap(),
                _ => {
                    let mut bytes = vec![0; len];
                    fill(&mut self.random, &mut bytes);
                    device.write(&mut io, at as u64, &bytes).unwrap();
                }
            }
        }
    }

    /// Flushes, or makes the image if there is none yet.
    fn flush(&mut self) -> Result<(), ImageError> {
        self.states.push(content(&self.devices));
        self.note();
        match &self.journal {
            Some(journal) => journal.flush()?,
            None => {
                let journal = ImageJournal::create(place(&self.folder), &entries(), &self.devices)?;
                self.journal = Some(journal.with_slack(SLACK_BYTES));
            }
        }
        self.acknowledged = self.states.len() - 1;
        self.note();
        Ok(())
    }

    /// Returns, with a moment, the acknowledged and the attempted state.
    fn note(&self) {
        self.folder.note(self.acknowledged << 16 | (self.states.len() - 1));
    }

    /// Verifies that the image holds what was acknowledged at a moment, or a later attempt.
    fn check(&self, folder: &Forgetful, note: usize, what: &str) {
        let (flushed_states, tried_states) = (note >> 16, note & 0xffff);
        let entries = match read(folder, &self.backing) {
            Ok(Some(found)) => found,
            // No image was made yet.
            Ok(None) if flushed_states == 0 => return,
            other => panic!("{what}: {:?}, and {flushed_states} was acknowledged", other.err()),
        };
        let is_one = self.states[flushed_states..=tried_states].contains(&entries);
        assert!(is_one, "{what}: not what was flushed as {flushed_states} to {tried_states}");
    }
}

/// Returns all bytes of devices, and their holes.
fn content(devices: &[Arc<Device>]) -> Vec<u8> {
    let mut all = Vec::new();
    for device in devices {
        let mut bytes = vec![0; device.size() as usize];
        device.read(&mut device.io(), 0, &mut bytes).unwrap();
        all.extend(bytes);
        let each = |len: u64, status| {
            (0..len.div_ceil(512)).for_each(|_| all.push(status as u8));
            true
        };
        device.status(0, device.size(), each).unwrap();
    }
    all
}

/// Returns the content of the image in a directory.
fn read(folder: &Forgetful, backing: &Arc<DeviceMemory>) -> Result<Option<Vec<u8>>, ImageError> {
    let Some(image) = VerifiedImage::open(&place(folder))? else { return Ok(None) };
    let devices: Vec<Arc<Device>> =
        SIZES.iter().map(|size| Device::new(backing, *size).unwrap()).collect();
    image.restore(&devices)?;
    Ok(Some(content(&devices)))
}

/// Cuts the power at a moment in many ways.
fn cut(served: &Served, note: usize, moment: &Forgetful, cuts: usize, random: &mut Random) {
    let count = moment.unsynced();
    let all = |fate| moment.after_power_cut(|_| fate);
    served.check(&all(Fate::Lost), note, "all lost");
    served.check(&all(Fate::Done), note, "nothing lost");
    served.check(&moment.after_kill(), note, "killed");
    // With few changes, every subset is tried.
    if count < 31 && 1 << count <= cuts {
        for set in 0..1 << count {
            let fate = |n| if set >> n & 1 == 1 { Fate::Done } else { Fate::Lost };
            served.check(&moment.after_power_cut(fate), note, "some lost");
        }
    }
    for turn in 0..cuts {
        // With many changes, only some subsets are tried.
        let one = if count <= cuts / 4 { turn / 4 } else { random.below(count) };
        if one >= count {
            break;
        }
        let (what, [before, at, after]) = [
            ("a prefix", [Fate::Done, Fate::Torn, Fate::Lost]),
            ("all but one", [Fate::Done, random.pick(&[Fate::Lost, Fate::Zeros]), Fate::Done]),
            ("all, one torn", [Fate::Done, Fate::Torn, Fate::Done]),
            ("one only", [Fate::Lost, Fate::Done, Fate::Lost]),
        ][turn % 4];
        let fate = |n: usize| match n.cmp(&one) {
            std::cmp::Ordering::Less => before,
            std::cmp::Ordering::Equal => at,
            std::cmp::Ordering::Greater => after,
        };
        served.check(&moment.after_power_cut(fate), note, what);
    }
    for _ in 0..cuts / 4 {
        served.check(&moment.after_any_power_cut(random), note, "any lost");
    }
}

/// Continues after a power cut or a kill, and has another power cut.
fn go_on(
    found: &Forgetful,
    before: &[Vec<u8>],
    backing: &Arc<DeviceMemory>,
    mut random: Random,
    cuts: usize,
) {
    found.record();
    let image = Served::open(found, backing, random.fork(), before, 0).unwrap();
    let Some(mut image) = image else { return };
    for _ in 0..2 {
        image.change();
        image.flush().unwrap();
    }
    for (note, moment) in found.moments() {
        cut(&image, note, &moment, cuts, &mut random);
    }
}

fn cut_power(effort: Effort, seed: u64) {
    let (backing, mut random) = (backing(), Random::new(seed));
    let folder = Forgetful::new();
    if seed % 2 == 1 {
        folder.refuse_nameless();
    }
    folder.record();
    let mut image = Served::new(&folder, &backing, random.fork());
    for _ in 0..effort.steps {
        image.change();
        image.flush().unwrap();
    }
    assert_eq!(folder.names(), 1);
    for (note, moment) in folder.moments() {
        cut(&image, note, &moment, effort.cuts, &mut random);
        let folder_after = moment.after_any_power_cut(&mut random);
        let before = &image.states[note >> 16..=note & 0xffff];
        go_on(&folder_after, before, &backing, random.fork(), effort.cuts / 8);
        go_on(&moment.after_kill(), before, &backing, random.fork(), effort.cuts / 8);
    }
}

#[test]
fn power_cut_at_any_moment_leaves_all_that_was_flushed() {
    let first = seed(70);
    (first..first + 3).for_each(|seed| cut_power(Effort { cuts: 24, steps: 9 }, seed));
}

/// Tries new seeds for `MEMFOLD_SECONDS` (600).
#[test]
#[ignore = "for make torture: many more power cuts and failing calls"]
fn hunt() {
    let seconds = std::env::var("MEMFOLD_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(600);
    let begin = Instant::now();
    let mut next = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    while begin.elapsed() < Duration::from_secs(seconds) {
        next += 1;
        println!("seed {next}");
        cut_power(Effort { cuts: 120, steps: 12 }, next);
        fail_each_call(Effort { cuts: 48, steps: 10 }, next);
    }
}

/// Faults that a call may have.
const FAULTS: [Fault; 6] = [
    Fault::Fails(Errno::IO),
    Fault::Partly(Errno::IO),
    Fault::Fails(Errno::NOSPC),
    Fault::Partly(Errno::NOSPC),
    Fault::Fails(Errno::MFILE),
    Fault::Short,
];

/// Serves, restarts in the middle, and serves on, while the calls from `from` on fail. Returns the
/// number of calls.
fn serve_with(
    fault: Option<(usize, usize, Fault)>,
    effort: Effort,
    backing: &Arc<DeviceMemory>,
    seed: u64,
) -> usize {
    let mut random = Random::new(seed);
    let folder = Forgetful::new();
    if let Some((from, count, fault)) = fault {
        folder.fail(from, count, fault);
    }
    let what = format!("{fault:?}");
    folder.record();
    let mut image = Served::new(&folder, backing, random.fork());
    for step in 0..effort.steps {
        if step == effort.steps / 2 {
            image.start_again();
        }
        image.change();
        let outcome = image.flush();
        let fine = matches!(fault, None | Some((_, _, Fault::Short)));
        assert!(outcome.is_ok() || !fine, "{what}: {outcome:?}");
    }
    let calls = folder.calls();
    assert!(fault.is_some() || folder.files() > 1, "it is written anew");
    // No call fails any more, so nothing may be wrong any more.
    folder.fail(usize::MAX, 0, Fault::Short);
    image.flush().unwrap_or_else(|error| panic!("{what}: {error:?}"));
    let last = image.states.last().unwrap();
    let moments = folder.moments();
    for (note, moment) in &moments {
        let all = |fate| moment.after_power_cut(|_| fate);
        image.check(&all(Fate::Lost), *note, &what);
        image.check(&all(Fate::Done), *note, &what);
        for _ in 0..effort.cuts / 12 {
            image.check(&moment.after_any_power_cut(&mut random), *note, &what);
        }
    }
    let (_, end) = moments.last().unwrap();
    let folder_after = end.after_power_cut(|_| Fate::Lost);
    assert!(read(&folder_after, backing).unwrap().as_ref() == Some(last), "{what}");
    // Its removal may fail, too.
    let is_clean = folder.names() == 1 || fault.is_some_and(|(_, count, _)| count > 1);
    assert!(is_clean, "{what}: something is left behind");
    calls
}

fn fail_each_call(effort: Effort, seed: u64) {
    let backing = backing();
    let calls = serve_with(None, effort, &backing, seed);
    for from in 0..calls {
        for fault in FAULTS {
            for count in [1, 3] {
                serve_with(Some((from, count, fault)), effort, &backing, seed);
            }
        }
    }
}

#[test]
fn call_that_fails_loses_nothing_that_was_flushed() {
    fail_each_call(Effort { cuts: 12, steps: 8 }, seed(81));
}

#[test]
fn group_mixed_of_two_attempts_does_not_count() {
    let folder = Forgetful::new();
    let (mut image, _) = filled(&folder);
    let write = |image: &mut Served, block: u64| {
        let noise = image.random.noise(8192);
        image.devices[0].write(&mut image.devices[0].io(), block * 8192, &noise).unwrap();
    };
    (0..3).for_each(|block| write(&mut image, block));
    // Everything is on disk but not acknowledged, and can't be cut off.
    folder.fail(folder.calls() + 1, 2, Fault::Partly(Errno::NOSPC));
    assert!(image.flush().is_err());
    folder.fail(usize::MAX, 0, Fault::Short);
    // The one in between is equal in both, so that sectors of both fit.
    [0, 2].into_iter().for_each(|block| write(&mut image, block));
    folder.record();
    image.flush().unwrap();
    let (note, moment) = folder.moments().swap_remove(0);
    for end in 0..=moment.unsynced() {
        let fate = |n| if n < end { Fate::Done } else { Fate::Lost };
        image.check(&moment.after_power_cut(fate), note, "mixed");
        let fate = |n| if n < end { Fate::Lost } else { Fate::Done };
        image.check(&moment.after_power_cut(fate), note, "mixed");
    }
}

/// Makes an image of noise, and returns the most bytes that one of its flushes takes.
fn filled(folder: &Forgetful) -> (Served, usize) {
    let mut image = Served::new(folder, &backing(), Random::new(90));
    let noise = image.random.noise(SIZES[0] as usize);
    image.devices[0].write(&mut image.devices[0].io(), 0, &noise).unwrap();
    image.flush().unwrap();
    (image, 3 * 4096)
}

fn write_a_page(served: &mut Served) {
    let noise = served.random.noise(4096);
    served.devices[0].write(&mut served.devices[0].io(), 8192, &noise).unwrap();
}

#[test]
fn new_image_without_room_costs_only_the_attempt() {
    let folder = Forgetful::new();
    let (mut image, most) = filled(&folder);
    let bytes = || folder.bytes(NAME).unwrap();
    let new = bytes();
    let room = 3 * new;
    folder.set_room(room);
    // Far beyond the length at which a new image is written, up to the end of the room.
    while bytes() + most < room {
        let before = bytes();
        write_a_page(&mut image);
        image.flush().unwrap();
        assert!(bytes() > before && bytes() - before <= most, "{before}, then {}", bytes());
    }
    // There is no room for a group. That flush fails, and nothing else does.
    let noise = image.random.noise(16 * 4096);
    image.devices[0].write(&mut image.devices[0].io(), 0, &noise).unwrap();
    let before = bytes();
    assert!(image.flush().is_err());
    assert!(image.journal.as_ref().unwrap().error().unwrap().contains("disk.img"));
    assert!(bytes() <= before, "a group that failed gives its room back");
    folder.set_room(before + 24 * 4096);
    image.flush().unwrap();
    assert!(bytes() - before <= 24 * 4096, "only what has changed is written");
    assert_eq!(image.journal.as_ref().unwrap().error(), None);
    // With enough room it is rewritten.
    folder.set_room(100 * new);
    let most_bytes = (0..40).map(|_| {
        write_a_page(&mut image);
        image.flush().unwrap();
        bytes()
    });
    assert!(most_bytes.min().unwrap() < 2 * new);
    let last = image.states.last();
    assert_eq!(read(&folder, &image.backing).unwrap().as_ref(), last);
}

#[test]
fn image_is_written_anew_across_restarts() {
    let folder = Forgetful::new();
    let (mut image, most) = filled(&folder);
    let new = folder.bytes(NAME).unwrap();
    let mut longest = 0;
    for _ in 0..60 {
        write_a_page(&mut image);
        image.flush().unwrap();
        longest = longest.max(folder.bytes(NAME).unwrap());
        image.start_again();
    }
    assert!(longest <= 2 * new + SLACK_BYTES as usize + most, "{new}, then {longest}");
}
