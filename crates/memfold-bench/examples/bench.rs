//! `bench corpus|walk|walk-child` as a program of its own, for work on the benchmarks alone.

use clap::{Parser, Subcommand};

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    #[command(subcommand)]
    Bench(Bench),
}

#[derive(Subcommand)]
enum Bench {
    Corpus(memfold_bench::CorpusArgs),
    Walk(memfold_bench::WalkArgs),
    #[command(hide = true)]
    WalkChild(memfold_bench::WalkChildArgs),
}

fn main() {
    let Command::Bench(bench) = Cli::parse().command;
    let status = match bench {
        Bench::Corpus(args) => memfold_bench::corpus(args).map(|()| 0),
        Bench::Walk(args) => memfold_bench::walk(args),
        Bench::WalkChild(args) => memfold_bench::walk_child(args).map(|()| 0),
    };
    std::process::exit(status.unwrap_or_else(|error| {
        eprintln!("bench: {error:#}");
        error.downcast_ref().map_or(1, memfold_bench::Refusal::exit_code)
    }));
}
