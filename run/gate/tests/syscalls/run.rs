//! Runs cases: each on ordinary and on folded memory, at four places, whole and with each object
//! bad in three ways; every run in a process and a folder of its own.
use crate::world::{self, Bad, Outcome, Place, World};
use memfold_gate::syscalls::look_up;
use std::io::{Read, Write};
use std::os::fd::FromRawFd;
use std::path::{Path, PathBuf};

/// A call, and how to make its arguments.
pub struct Case {
    /// The call's name, and after a colon what is special.
    pub name: &'static str,
    pub build: fn(&mut World) -> Vec<usize>,
    /// The result counts as done or not only: a descriptor, a number of a thing, a time.
    pub any: bool,
    /// Bytes differ from run to run.
    pub volatile: bool,
    /// Spans may be longer than what the case has there.
    pub loose: bool,
    /// It must succeed, whole.
    pub succeeds: bool,
}

pub const fn case(name: &'static str, build: fn(&mut World) -> Vec<usize>) -> Case {
    Case { name, build, any: false, volatile: false, loose: false, succeeds: true }
}

impl Case {
    pub const fn any(mut self) -> Case {
        self.any = true;
        self
    }
    pub const fn volatile(mut self) -> Case {
        self.volatile = true;
        self
    }
    pub const fn loose(mut self) -> Case {
        self.loose = true;
        self
    }
    /// The kernel of this machine refuses it: what counts is that the error is the same.
    pub const fn refused(mut self) -> Case {
        self.succeeds = false;
        self
    }

    pub fn number(&self) -> usize {
        let name = self.name.split(':').next().unwrap();
        (0..1000).find(|&nr| look_up(nr).name == name).unwrap_or_else(|| panic!("no {name}"))
    }
}

struct Result {
    ret: i64,
    objects: usize,
    strays: Vec<(u64, u64)>,
    bytes: Vec<u8>,
}

/// One run, in a child.
fn run(case: &Case, place: Place, bad: Option<(usize, Bad)>, folded: bool, dir: &Path) -> Result {
    std::fs::create_dir(dir).unwrap();
    let mut ends = [0; 2];
    // SAFETY: `ends` has room for both.
    assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
    // SAFETY: the ends are ours.
    let (mut from, to) =
        unsafe { (std::fs::File::from_raw_fd(ends[0]), std::fs::File::from_raw_fd(ends[1])) };
    world::base();
    // SAFETY: the child uses its own memory, and leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // Numbers of descriptors must be the same in every run.
        // SAFETY: what is closed belongs to the parent's other threads.
        let mut to = unsafe {
            assert_eq!(libc::dup2(ends[1], 200), 200);
            libc::close_range(3, 199, 0);
            std::fs::File::from_raw_fd(200)
        };
        std::env::set_current_dir(dir).unwrap();
        let mut world = World::new(place, bad);
        let mut args = (case.build)(&mut world);
        args.resize(6, 0);
        let Outcome { ret, bytes, strays } =
            world.make(case.number(), args.try_into().unwrap(), folded);
        let mut out = Vec::new();
        out.extend(ret.to_le_bytes());
        out.extend((world.objects() as u64).to_le_bytes());
        out.extend((strays.len() as u64).to_le_bytes());
        for (start, len) in strays {
            out.extend(((start - world.base) as u64).to_le_bytes());
            out.extend((len as u64).to_le_bytes());
        }
        out.extend(bytes);
        let outcome = to.write_all(&out).is_ok();
        // SAFETY: ends the child.
        unsafe { libc::_exit(if outcome { 0 } else { 1 }) };
    }
    drop(to);
    let mut out = Vec::new();
    from.read_to_end(&mut out).unwrap();
    let mut status = 0;
    // SAFETY: our child.
    unsafe { libc::waitpid(child, &mut status, 0) };
    let what = || format!("{}, {place:?}, bad {bad:?}, folded {folded}", case.name);
    assert!(status == 0 && out.len() >= 24, "{}: status {status:#x}", what());
    let word = |i: usize| u64::from_le_bytes(out[i * 8..i * 8 + 8].try_into().unwrap());
    let strays = (0..word(2) as usize).map(|i| (word(3 + 2 * i), word(4 + 2 * i))).collect();
    let bytes = out[24 + 16 * word(2) as usize..].to_vec();
    Result { ret: word(0) as i64, objects: word(1) as usize, strays, bytes }
}

/// A folder that goes with its value.
struct Scratch(PathBuf);
impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs all of them, and says at the end what differed.
pub fn all(field: &str, cases: &[Case]) {
    let only = std::env::var("CASE").ok();
    let root = std::env::temp_dir().join(format!("memfold-gate-{field}-{}", std::process::id()));
    std::fs::create_dir(&root).unwrap();
    let root = Scratch(root);
    let (mut failures, mut dirs) = (Vec::new(), 0);
    for case in cases {
        if only.as_ref().is_some_and(|only| !case.name.contains(only.as_str())) {
            continue;
        }
        let before = failures.len();
        for place in [Place::Start, Place::Cross, Place::Last, Place::End] {
            let mut bads = vec![None];
            let mut i = 0;
            while i < bads.len() && failures.len() == before {
                let bad = bads[i];
                let mut both = [false, true].map(|is_folded| {
                    dirs += 1;
                    run(case, place, bad, is_folded, &root.0.join(dirs.to_string()))
                });
                if i == 0 && place == Place::Start {
                    bads = with_bad(both[0].objects);
                }
                failures.extend(compare(case, place, bad, &mut both));
                i += 1;
            }
        }
    }
    assert!(failures.is_empty(), "{} wrong:\n{}", failures.len(), failures.join("\n"));
}

fn with_bad(objects: usize) -> Vec<Option<(usize, Bad)>> {
    let each = (0..objects).flat_map(|i| [Bad::Cut, Bad::Missing, Bad::Kernel].map(|b| (i, b)));
    std::iter::once(None).chain(each.map(Some)).collect()
}

fn compare(
    case: &Case,
    place: Place,
    bad: Option<(usize, Bad)>,
    both: &mut [Result; 2],
) -> Option<String> {
    let [plain_world, folded_world] = both;
    let what = format!("{} ({place:?}, {bad:?})", case.name);
    if case.any {
        plain_world.ret = plain_world.ret.min(0);
        folded_world.ret = folded_world.ret.min(0);
    }
    if plain_world.ret != folded_world.ret {
        return Some(format!(
            "{what}: {} on ordinary memory, {} folded",
            plain_world.ret, folded_world.ret
        ));
    }
    if bad.is_none() && case.succeeds == (plain_world.ret < 0) {
        return Some(format!("{what}: the case itself gives {}", plain_world.ret));
    }
    if !case.volatile && plain_world.bytes != folded_world.bytes {
        let at = plain_world.bytes.iter().zip(&folded_world.bytes).position(|(a, b)| a != b);
        return Some(format!("{what}: bytes differ at {at:#x?}"));
    }
    if !case.loose && bad.is_none() && !folded_world.strays.is_empty() {
        return Some(format!("{what}: spans reach over their objects: {:x?}", folded_world.strays));
    }
    None
}

pub fn words(words: &[usize]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

pub fn halves(halves: &[u32]) -> Vec<u8> {
    halves.iter().flat_map(|w| w.to_le_bytes()).collect()
}
