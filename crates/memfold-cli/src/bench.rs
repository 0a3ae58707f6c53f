//! `memfold bench`: hands over to the benchmarks.
use crate::failure::Failure;
use clap::{ArgMatches, Args, Command, FromArgMatches};
use memfold_bench::{
    AppsArgs, BriefArgs, CorpusArgs, Refusal, ReportArgs, StoreArgs, SwapArgs, UsememArgs, UsememChildArgs, WalkArgs,
    WalkChildArgs,
};

/// Status of a benchmark that broke off, after sysexits.h (EX_SOFTWARE).
const BROKEN: u8 = 70;

/// The command line of `bench`.
pub fn command() -> Command {
    Command::new("bench")
        .about("Measures memfold against the kernel's own compressed swap")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(
            CorpusArgs::augment_args(Command::new("corpus"))
                .about("Builds the file of real data that the benchmarks work on"),
        )
        .subcommand(
            WalkArgs::augment_args(Command::new("walk"))
                .about("Fills memory, reads, dirties and checks it, for memfold and its peers in turn"),
        )
        .subcommand(
            StoreArgs::augment_args(Command::new("store"))
                .about("Measures the compressed store: memory held, speed, many threads"),
        )
        .subcommand(
            SwapArgs::augment_args(Command::new("swap"))
                .about("Measures the swap file: large folios, reading, index; against the kernel's as root"),
        )
        .subcommand(
            AppsArgs::augment_args(Command::new("apps"))
                .about("Runs well-known programs in a third of their memory, and on zram as root"),
        )
        .subcommand(
            UsememArgs::augment_args(Command::new("usemem"))
                .about("Several processes write and read more memory than they may keep (usemem)"),
        )
        .subcommand(
            BriefArgs::augment_args(Command::new("blocks"))
                .about("Shows what each codec makes of the corpus, by the size of the block"),
        )
        .subcommand(
            BriefArgs::augment_args(Command::new("pools"))
                .about("Ten workloads reclaim and refault at once, on one pool and on several"),
        )
        .subcommand(
            BriefArgs::augment_args(Command::new("peers"))
                .about("Compares with nbdkit's memory disk and python-blosc2, where they are installed"),
        )
        .subcommand(
            ReportArgs::augment_args(Command::new("report"))
                .about("Runs all of these, and shows where every requirement and target stands"),
        )
        .subcommand(WalkChildArgs::augment_args(Command::new("walk-child").hide(true)))
        .subcommand(UsememChildArgs::augment_args(Command::new("usemem-child").hide(true)))
}

/// Runs a benchmark; the status to exit with.
///
/// # Errors
/// The benchmark's own refusal and status; 70 if it broke off.
pub fn main(matches: &ArgMatches) -> Result<u8, Failure> {
    let done = match matches.subcommand() {
        Some(("corpus", matches)) => memfold_bench::corpus(args(matches)).map(|()| 0),
        Some(("walk", matches)) => memfold_bench::walk(args(matches)),
        Some(("store", matches)) => memfold_bench::store(args(matches)),
        Some(("swap", matches)) => memfold_bench::swap(args(matches)),
        Some(("apps", matches)) => memfold_bench::apps(args(matches)),
        Some(("usemem", matches)) => memfold_bench::usemem(args(matches)),
        Some(("blocks", matches)) => memfold_bench::blocks(args(matches)),
        Some(("pools", matches)) => memfold_bench::pools(args(matches)),
        Some(("peers", matches)) => memfold_bench::peers(args(matches)),
        Some(("report", matches)) => memfold_bench::report(args(matches)),
        Some(("walk-child", matches)) => memfold_bench::walk_child(args(matches)).map(|()| 0),
        Some(("usemem-child", matches)) => memfold_bench::usemem_child(args(matches)).map(|()| 0),
        _ => unreachable!("clap requires a subcommand"),
    };
    done.map(|status| status as u8).map_err(|error| {
        let status = error.downcast_ref::<Refusal>().map_or(BROKEN, |refusal| refusal.exit_code() as u8);
        Failure { status, text: format!("{error:#}") }
    })
}

fn args<T: FromArgMatches>(matches: &ArgMatches) -> T {
    T::from_arg_matches(matches).unwrap_or_else(|error| error.exit())
}
