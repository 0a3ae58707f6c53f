//! `memfold dict train`: makes a dictionary for canned mode from files.
use crate::failure::CommandFailure;
use crate::program;
use clap::{Arg, ArgMatches, Command, value_parser};
use memfold_engine::config::DictionarySource;
use memfold_os::units::Order;
use memfold_store::{
    CodecSpec, DICTIONARY_FILE_BYTES_MAX, Dictionary, DictionaryKind, DictionaryTrial,
    SizeComparison, raw_dictionaries, trained_dictionaries,
};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

/// Bytes of samples, at most. Blocks are taken evenly from all inputs to stay below.
const SAMPLE_BYTES_MAX: usize = 32 << 20;
/// Blocks that a judgement needs, at least.
const BLOCKS_MIN: usize = 32;
/// One block in this many is used for judging, not for training.
const HELD_OUT: usize = 4;

/// Returns the command line of `dict`.
pub fn command() -> Command {
    let train = Command::new("train")
        .about("Makes a dictionary from a part of the files, and writes it if it compresses the rest better")
        .arg(
            Arg::new("out")
                .long("out")
                .value_name("FILE")
                .required(true)
                .value_parser(value_parser!(PathBuf))
                .help("File to write the dictionary to"),
        )
        .arg(
            Arg::new("codec")
                .long("codec")
                .value_name("NAME[:LEVEL]")
                .default_value("zstd")
                .value_parser(|text: &str| CodecSpec::parse(text))
                .help("Codec of the dictionary: lz4 (also for delta) or zstd"),
        )
        .arg(
            Arg::new("block")
                .long("block")
                .value_name("SIZE")
                .default_value("4K")
                .value_parser(block_order)
                .help("Unit of compression, 4K to 2M"),
        )
        .arg(
            Arg::new("input")
                .value_name("INPUT")
                .required(true)
                .num_args(1..)
                .value_parser(value_parser!(PathBuf))
                .help("Files with data like that of the memory to be folded"),
        );
    Command::new("dict")
        .about("Makes dictionaries for memfold run --canned FILE")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(train)
}

/// Runs `dict`. Returns the exit status: 0, or 1 if no dictionary wins.
///
/// # Errors
/// 125: a file can't be read or written, the codec takes no dictionaries, or there is too little
/// input.
pub fn main(matches: &ArgMatches) -> Result<u8, CommandFailure> {
    let Some(("train", matches)) = matches.subcommand() else {
        unreachable!("clap requires a subcommand")
    };
    let out: &PathBuf = matches.get_one("out").expect("required");
    let spec: CodecSpec = *matches.get_one("codec").expect("has a default");
    let order: Order = *matches.get_one("block").expect("has a default");
    if !spec.takes_dictionaries() {
        return Err(CommandFailure::own(format!(
            "--codec: {spec} has no dictionaries. Give lz4 or zstd."
        )));
    }
    let inputs: Vec<&PathBuf> = matches.get_many("input").expect("required").collect();
    let blocks = sample(&inputs, order.bytes())?;
    let (teach, judge) = split(&blocks, order.bytes());
    let mut trial = DictionaryTrial::new(spec, order);
    let samples = judge.chunks_exact(order.bytes());
    let off = trial.without(samples.clone());
    let raw = trial.best(samples.clone(), raw_dictionaries(&teach, order.bytes()));
    let dictionary_result = if spec.name() == "zstd" {
        trial.best(samples, trained_dictionaries(&teach, order))
    } else {
        None
    };
    let show = |found: &Option<(u64, Dictionary)>| match found {
        Some((on, dictionary)) => format!(
            "{on} bytes with {} bytes of dictionary, {:.1}%",
            dictionary.content().len(),
            change(off, *on)
        ),
        None => "none".to_string(),
    };
    say!(
        "held out: {} blocks of {} bytes, {off} bytes with {spec}",
        judge.len() / order.bytes(),
        order.bytes()
    );
    say!("raw content: {}", show(&raw));
    if spec.name() == "zstd" {
        say!("trained: {}", show(&dictionary_result));
    }
    let best = [raw, dictionary_result].into_iter().flatten().min_by_key(|(on, _)| *on);
    match best.filter(|(on, _)| SizeComparison { off, on: *on }.wins()) {
        Some((_, dictionary)) => {
            let fail = |e| CommandFailure::own(format!("{}: {e}", out.display()));
            fs::write(out, dictionary.to_file()).map_err(fail)?;
            say!("written: {}", out.display());
            Ok(0)
        }
        None => {
            say!(
                "not written: no dictionary saves {}% or more",
                memfold_store::CANNED_MARGIN_PERCENT
            );
            Ok(1)
        }
    }
}

/// Checks `--canned` before a program is started with it. Makes its path absolute, because the
/// program may run in another directory.
///
/// # Errors
/// 125: the codec takes no dictionaries, or the file can't be read, is damaged, or is no dictionary
/// for the codec.
pub fn check(canned: &mut DictionarySource, codec: CodecSpec) -> Result<(), CommandFailure> {
    if *canned != DictionarySource::Off && !codec.takes_dictionaries() {
        return Err(CommandFailure::own(format!(
            "--canned: codec {codec} has no dictionaries. Give --codec delta, lz4 or zstd, or leave --canned out."
        )));
    }
    let DictionarySource::File(path) = canned else { return Ok(()) };
    let fail = |e: &dyn std::fmt::Display| CommandFailure::own(format!("--canned: {path}: {e}"));
    let whole = fs::canonicalize(&*path).map_err(|e| fail(&program::plain(&e)))?;
    let mut bytes = Vec::new();
    let file = File::open(&whole).map_err(|e| fail(&program::plain(&e)))?;
    file.take(DICTIONARY_FILE_BYTES_MAX as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| fail(&program::plain(&e)))?;
    let dictionary = Dictionary::from_file(&bytes).map_err(|e| fail(&e))?;
    if codec.name() != "zstd" && dictionary.kind() != DictionaryKind::Raw {
        return Err(fail(
            &"this dictionary is for zstd. Make one with `memfold dict train --codec lz4`.",
        ));
    }
    match whole.to_str() {
        Some(text) if !text.contains([';', '\n']) => *path = text.to_string(),
        _ => {
            return Err(fail(
                &"its path has a semicolon or a line break, or is not valid UTF-8. Rename it.",
            ));
        }
    }
    Ok(())
}

fn change(off: u64, on: u64) -> f64 {
    (on as f64 / off.max(1) as f64 - 1.0) * 100.0
}

fn block_order(text: &str) -> Result<Order, String> {
    let bytes = memfold_engine::config::parse_size(text, 0)? as usize;
    Order::covering(bytes)
        .filter(|order| order.bytes() == bytes)
        .ok_or_else(|| format!("{text:?} is not a power of two from 4K to 2M"))
}

/// Returns whole blocks from all inputs, without blocks of zeros, which are never compressed.
fn sample(inputs: &[&PathBuf], block: usize) -> Result<Vec<u8>, CommandFailure> {
    let mut blocks = Vec::new();
    let share = (SAMPLE_BYTES_MAX / inputs.len()).max(block);
    for input in inputs {
        let fail = |e| CommandFailure::own(format!("{}: {e}", input.display()));
        let mut bytes = Vec::new();
        read(input, &mut bytes).map_err(fail)?;
        let whole = bytes.chunks_exact(block).filter(|b| b.iter().any(|byte| *byte != 0));
        let step = (bytes.len() / share).max(1);
        whole.step_by(step).take(share / block).for_each(|b| blocks.extend_from_slice(b));
    }
    let count = blocks.len() / block;
    if count < BLOCKS_MIN {
        return Err(CommandFailure::own(format!(
            "The inputs have only {count} blocks of {block} bytes. Give files with at least {} of data.",
            memfold_engine::config::Size((BLOCKS_MIN * block) as u64)
        )));
    }
    Ok(blocks)
}

/// Reads at most 256 MiB of a regular file.
fn read(input: &Path, bytes: &mut Vec<u8>) -> std::io::Result<()> {
    let file = File::open(input)?;
    if !file.metadata()?.is_file() {
        return Err(std::io::Error::other("not a regular file"));
    }
    file.take(256 << 20).read_to_end(bytes).map(drop)
}

/// Returns blocks for training, and blocks for judging.
fn split(blocks: &[u8], block: usize) -> (Vec<u8>, Vec<u8>) {
    let (mut teach, mut judge) = (Vec::new(), Vec::new());
    for (nth, bytes) in blocks.chunks_exact(block).enumerate() {
        if nth % HELD_OUT == HELD_OUT - 1 { &mut judge } else { &mut teach }
            .extend_from_slice(bytes);
    }
    (teach, judge)
}
