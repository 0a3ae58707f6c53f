//! The files of `memfold record`: a profile for the Firefox Profiler, and collapsed stacks for
//! flame graphs, and one of these.
use crate::profile::flame::StackLoads;
use crate::profile::recording::Recording;
use crate::profile::symbols::{Function, NamedStacks};
use crate::profile::tables::label;
use fxprof_processed_profile::{
    CategoryHandle, CpuDelta, Frame, FrameFlags, FrameInfo, ProcessHandle, Profile,
    SamplingInterval, ThreadHandle, Timestamp, WeightType,
};
use std::collections::HashMap;
use std::io::{self, Write};
use std::time::SystemTime;

/// Columns of a name in a file.
const NAME_COLUMNS: usize = 400;

/// Writes the profile in the format of the Firefox Profiler. Each sample counts as the loads that it
/// stands for. Times are since the first sample.
///
/// # Errors
/// The errors of writing.
pub fn write_firefox(
    recording: &Recording,
    named: &NamedStacks,
    name: &str,
    out: impl Write,
) -> io::Result<()> {
    // There is no interval: samples are taken by the count of loads.
    let interval = SamplingInterval::from_millis(1);
    let mut profile = Profile::new(name, SystemTime::now().into(), interval);
    profile.set_product(name);
    let begin = recording.loads.first().map_or(0, |load| load.time_ns);
    let (mut processes, mut threads) = (HashMap::new(), HashMap::new());
    for load in &recording.loads {
        let process = recording.stacks.values()[load.stack].process;
        let of_process = *processes.entry(process).or_insert_with(|| {
            let (key, about) = recording.about(process);
            let start = Timestamp::from_nanos_since_reference(0);
            profile.add_process(&about.name, key.number, start)
        });
        let count = threads.len();
        let thread = *threads
            .entry((process, load.thread))
            .or_insert_with(|| add_thread(&mut profile, of_process, load.thread, count == 0));
        let frames: Vec<FrameInfo> = named
            .stack(load.stack)
            .rev()
            .map(|function| FrameInfo {
                frame: Frame::Label(profile.intern_string(&label(function, NAME_COLUMNS))),
                category_pair: CategoryHandle::OTHER.into(),
                flags: FrameFlags::empty(),
            })
            .collect();
        let stack = profile.intern_stack_frames(thread, frames.into_iter());
        let time = Timestamp::from_nanos_since_reference(load.time_ns.saturating_sub(begin));
        let cpu_time = CpuDelta::from_nanos(load.spent_ns);
        let weight = i32::try_from(recording.every).unwrap_or(i32::MAX);
        profile.add_sample(thread, time, stack, cpu_time, weight);
    }
    serde_json::to_writer(out, &profile).map_err(io::Error::from)
}

fn add_thread(
    profile: &mut Profile,
    process: ProcessHandle,
    thread: u32,
    is_first: bool,
) -> ThreadHandle {
    let start = Timestamp::from_nanos_since_reference(0);
    let handle = profile.add_thread(process, thread, start, is_first);
    profile.set_thread_samples_weight_type(handle, WeightType::Samples);
    handle
}

/// Returns the stacks, each with the loads that its samples stand for.
pub fn stack_loads(recording: &Recording, named: &NamedStacks) -> StackLoads {
    let mut all = StackLoads::new();
    for load in &recording.loads {
        let process = recording.stacks.values()[load.stack].process;
        let (_, about) = recording.about(process);
        let frame = |function: &Function| label(function, NAME_COLUMNS);
        let frames =
            [about.name.clone()].into_iter().chain(named.stack(load.stack).rev().map(frame));
        *all.entry(frames.collect()).or_default() += recording.every;
    }
    all
}

/// Writes a line for each stack: its program and functions, the outermost first and separated by
/// semicolons, and how many loads it has.
///
/// # Errors
/// The errors of writing.
pub fn write_collapsed(stacks: &StackLoads, mut out: impl Write) -> io::Result<()> {
    let line = |frames: &[String]| {
        let frames = frames.iter().map(|frame| frame.replace(';', ":"));
        frames.collect::<Vec<_>>().join(";")
    };
    stacks.iter().try_for_each(|(stack, loads)| writeln!(out, "{} {loads}", line(stack)))?;
    out.flush()
}
